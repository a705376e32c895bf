"""A step in the form that a kernel reads. No form needs a Python loop.

===================  ==========================================================  =======================================
form                 arrays (int32 unless said)                                  cost
===================  ==========================================================  =======================================
:func:`dense`        block_table [r, max_blocks], cache_seqlens [r],             none: views of the step's own arrays
                     slot_mapping int64 [t], cu_seqlens_q [r + 1]
:func:`flashinfer`   qo_indptr [r + 1], kv_indptr [r + 1], kv_indices [blocks],  one copy of the blocks in use
                     kv_last_page_len [r]
:func:`tokens`       kv_indptr [r + 1], kv_indices [tokens],                     one write for each token of context
                     req_to_token [r, longest], out_cache_loc int64 [t]
:func:`ragged`       kv_lens [s], page_indices [s, max_blocks],                  none: views of the batch's whole buffer
                     cu_q_lens [s + 1], num_seqs [1]
===================  ==========================================================  =======================================

r: rows of the step; t: its planned positions; s: ``max_seqs``. Lengths are in tokens, indices are block ids ("pages")
or slots (``block_id * block_size + offset``). Views are valid while the step is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._core import Batch, Step

if TYPE_CHECKING:
    from . import reference

    AnyStep = Step | reference.Step

__all__ = ["Dense", "FlashInfer", "Ragged", "Tokens", "dense", "flashinfer", "ragged", "tokens"]


class Dense(NamedTuple):
    """What FlashAttention's ``flash_attn_with_kvcache`` and vLLM's kernels read."""

    block_table: NDArray[np.int32]
    """[rows, max_blocks]: block ids, padded."""
    cache_seqlens: NDArray[np.int32]
    """[rows]: tokens of each row, this step's included."""
    slot_mapping: NDArray[np.int64]
    """[tokens]: where the new K and V go."""
    cu_seqlens_q: NDArray[np.int32]
    """[rows + 1]: where each row's queries start."""


class FlashInfer(NamedTuple):
    """What FlashInfer's paged wrappers plan with."""

    qo_indptr: NDArray[np.int32]
    """[rows + 1]: where each row's queries start."""
    kv_indptr: NDArray[np.int32]
    """[rows + 1]: where each row's pages start."""
    kv_indices: NDArray[np.int32]
    """[pages of all rows]: block ids."""
    kv_last_page_len: NDArray[np.int32]
    """[rows]: tokens in each row's last page."""


class Tokens(NamedTuple):
    """What SGLang's kernels read: slots, one for each token."""

    kv_indptr: NDArray[np.int32]
    """[rows + 1]: where each row's tokens start."""
    kv_indices: NDArray[np.int32]
    """[tokens of all rows]: slots."""
    req_to_token: NDArray[np.int32]
    """[rows, longest row]: slots, 0 behind a row's last token."""
    out_cache_loc: NDArray[np.int64]
    """[tokens of the step]: where the new K and V go."""


class Ragged(NamedTuple):
    """What JAX's ragged paged attention reads: static shapes, so nothing is compiled again."""

    kv_lens: NDArray[np.int32]
    """[max_seqs]: tokens of each row, padded."""
    page_indices: NDArray[np.int32]
    """[max_seqs, max_blocks]: block ids, padded."""
    cu_q_lens: NDArray[np.int32]
    """[max_seqs + 1]: where each row's queries start; behind the last row it stays the total."""
    num_seqs: NDArray[np.int32]
    """[1]: rows."""


def dense(step: AnyStep) -> Dense:
    """Tables as they are. Raises StepError unless the step is open."""
    return Dense(step.block_tables, step.seq_lens, step.slot_mapping, step.query_start_loc)


def flashinfer(step: AnyStep) -> FlashInfer:
    """Pages one behind the other. Raises StepError unless the step is open."""
    indptr, indices, last_page_len = step.pages()
    return FlashInfer(step.query_start_loc, indptr, indices, last_page_len)


def tokens(step: AnyStep) -> Tokens:
    """Slots, one for each token. Raises StepError unless the step is open, ValueError where a slot is beyond int32."""
    indptr, indices = step.slots()
    return Tokens(indptr, indices, step.token_table(), step.slot_mapping)


def ragged(batch: Batch, step: Step) -> Ragged:
    """The whole buffer of the step. ``batch``: the one that planned it. Raises StepError unless the step is open.

    Empty rows below the last one in use count as sequences without a query: condense first where the kernel wants none.
    """
    num_seqs = np.array([len(step.seq_lens)], np.int32)
    buffer = step.buffer
    return Ragged(batch.seq_lens[buffer], batch.block_tables[buffer], batch.query_start_loc[buffer], num_seqs)
