"""From a trace to the flat arrays that a replay by block ids takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..traces import Ragged, Trace, TraceError

Outputs = Literal["none", "fresh", "recorded"]
Service = Literal["none", "model"]

PREFILL_TOKENS_PER_SECOND = 10_000
SECONDS_PER_OUTPUT_TOKEN = 0.020

# Token values from here on stand for content such as images, and the pager treats runs of them as one thing. A replay
# uses one token for each block, so its ids have to stay below.
MAX_IDS = 2**30


@dataclass(frozen=True, slots=True)
class ReplayColumns:
    """What `kvpager._core.Replay` and `ReferenceReplay` take. A chain here lacks its private last block."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prompt_blocks: NDArray[np.int32]
    arrivals_s: NDArray[np.float64] | None
    service_s: NDArray[np.float64] | None

    @property
    def chain_blocks(self) -> NDArray[np.int64]:
        """Blocks of each chain, the private one included: what the request needs if nothing is cached."""
        return np.diff(self.offsets) + 1

    @property
    def unique_prompt_blocks(self) -> int:
        """Different full prompt blocks of the whole trace: percentages of a pool refer to this number."""
        lengths = np.diff(self.offsets)
        place = np.arange(len(self.ids), dtype=np.int64) - np.repeat(self.offsets[:-1], lengths)
        prompt_ids = self.ids[place < np.repeat(self.prompt_blocks, lengths)]
        return int(np.count_nonzero(np.bincount(prompt_ids))) if len(prompt_ids) else 0


def build_columns(trace: Trace, outputs: Outputs = "none", service: Service = "none") -> ReplayColumns:
    """The chains of an id or lengths trace, fresh output blocks made up, and the times in seconds."""
    if trace.block_size is None or trace.form == "tokens":
        raise ValueError("a token trace has no block ids; use TokenChains")
    prompts = trace.prompts
    if trace.form == "lengths":
        prompts = _numbered(trace, trace.input_lengths // trace.block_size)
    known = [part.values for part in (prompts, trace.outputs) if len(part.values)]
    first_fresh = 1 + max((int(values.max()) for values in known), default=-1)
    answers = _answers(trace, trace.block_size, outputs, first_fresh)
    chains = prompts.joined(answers)
    if len(chains.values) and int(chains.values.max()) >= MAX_IDS:
        raise _too_many(trace)
    return ReplayColumns(chains.values, chains.offsets, prompts.lengths.astype(np.int32), *times(trace, service))


def times(trace: Trace, service: Service) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """When requests arrive and how long they hold their blocks, in seconds; None where everybody leaves at once."""
    if service == "none":
        return None, None
    modelled = trace.input_lengths / PREFILL_TOKENS_PER_SECOND + SECONDS_PER_OUTPUT_TOKEN * trace.output_lengths
    return trace.timestamps_ms / 1000, np.where(np.isnan(trace.service_ms), modelled, trace.service_ms / 1000)


def answer_blocks(trace: Trace, block_size: int) -> NDArray[np.int64]:
    """Full blocks that each answer fills; the first of them also holds the end of the prompt."""
    ends = trace.input_lengths + trace.output_lengths
    return ends // block_size - trace.input_lengths // block_size


def _answers(trace: Trace, block_size: int, outputs: Outputs, first_fresh: int) -> Ragged:
    recorded = trace.has_output if outputs == "recorded" else np.zeros(trace.num_requests, np.bool_)
    fresh_lengths = answer_blocks(trace, block_size) if outputs != "none" else np.zeros(trace.num_requests, np.int64)
    lengths = np.where(recorded, trace.outputs.lengths, fresh_lengths)
    rows = _numbered(trace, lengths)
    from_trace = np.repeat(recorded, lengths)
    if first_fresh + np.count_nonzero(~from_trace) > MAX_IDS:
        raise _too_many(trace)
    rows.values[from_trace] = trace.outputs.values[np.repeat(recorded, trace.outputs.lengths)]
    rows.values[~from_trace] = np.arange(first_fresh, first_fresh + np.count_nonzero(~from_trace), dtype=np.int64)
    return rows


def _numbered(trace: Trace, lengths: NDArray[np.int64]) -> Ragged:
    """Rows of these lengths, filled with ids that count up from 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Looked at before there is an array of them: a few lines can ask for more than any machine has.
    if offsets[-1] > MAX_IDS:
        raise _too_many(trace)
    return Ragged(np.arange(offsets[-1], dtype=np.int32), offsets)


def _too_many(trace: Trace) -> TraceError:
    return trace.error(None, None, f"needs block ids of {MAX_IDS} and above; a replay can number that many blocks")
