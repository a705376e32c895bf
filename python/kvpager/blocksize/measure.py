"""What each block size costs on a load: one row a size.

Waste, table entries and gathers follow from the lengths alone, and are those of a pager's block tables without sharing
(a test holds them against real ones). What is shared, or how many sequences fit at once, is seen by running the pager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..traces import Progress
from .load import Load
from .sharing import replay_shared


@dataclass(frozen=True, slots=True)
class BlockSizeRow:
    """One block size. Shares are of the tokens of all sequences, but for what says otherwise."""

    block_size: int
    table_entries: int
    """Blocks of all sequences, each with its answer complete."""
    table_entries_mean: float
    waste_tokens: int
    """Slots of the partial last blocks that hold no token."""
    waste_mean: float
    waste_share: float
    gathers_mean: float | None
    """Blocks that a decode step reads for a sequence, over all steps; None where there is no answer."""
    shared_tokens: int | None
    """Prompt tokens that were cached when their request came; None where nothing is known of sharing."""
    shared_share: float | None
    """Of the prompt tokens."""
    hit_rate: float | None
    """Of the full prompt blocks: the rate of `kvpager replay`."""
    lost_tokens: int | None
    """What the size that shares most shares, and this one does not."""
    overhead_share: float
    """Waste and lost sharing together: what the rule looks at."""
    num_blocks: int | None
    """Blocks of the pool; None for a pool without end."""
    evicted_blocks: int | None
    fit_at_once: int | None
    """Sequences, in their order, that fit in the pool beside each other; only for a load that shares nothing."""


def measure(
    load: Load,
    sizes: Sequence[int] | None = None,
    *,
    pool_tokens: int | None = None,
    progress: Progress | None = None,
) -> list[BlockSizeRow]:
    """One row for each block size, smallest first. `pool_tokens` bounds the pool: the same memory at every size."""
    wanted = sorted(set(load.default_sizes if sizes is None else sizes))
    for size in wanted:
        load.check_size(size)
        if pool_tokens is not None:
            load.check_fits(size, pool_tokens // size)
    counts = []
    for number, size in enumerate(wanted):

        def report(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(wanted) * total)

        counts.append(_count(load, size, None if pool_tokens is None else pool_tokens // size, report))
    most_shared = max((count.shared_tokens or 0 for count in counts), default=0)
    return [_row(load, count, most_shared) for count in counts]


@dataclass(frozen=True, slots=True)
class _Count:
    """What is known of a size before it is compared with the others."""

    block_size: int
    num_blocks: int | None
    shared_tokens: int | None = None
    hit_rate: float | None = None
    evicted_blocks: int | None = None
    fit_at_once: int | None = None


def _count(load: Load, size: int, num_blocks: int | None, progress: Progress) -> _Count:
    if load.trace is None:
        fitting = None if num_blocks is None else _fit_at_once(load.lengths, size, num_blocks)
        progress(1, 1)
        return _Count(size, num_blocks, fit_at_once=fitting)
    shared = replay_shared(load.trace, size, num_blocks, progress)
    rate = shared.hit_blocks / shared.prompt_blocks if shared.prompt_blocks else 0.0
    return _Count(size, num_blocks, shared.hit_blocks * size, rate, shared.evicted_blocks)


def _row(load: Load, count: _Count, most_shared: int) -> BlockSizeRow:
    size, lengths, tokens = count.block_size, load.lengths, load.tokens
    entries = -(-lengths // size)
    waste = int(entries.sum()) * size - tokens
    lost = None if count.shared_tokens is None else most_shared - count.shared_tokens
    return BlockSizeRow(
        block_size=size,
        table_entries=int(entries.sum()),
        table_entries_mean=float(entries.mean()),
        waste_tokens=waste,
        waste_mean=waste / len(lengths),
        waste_share=waste / tokens,
        gathers_mean=gathers_mean(load.prompt_lengths, lengths, size),
        shared_tokens=count.shared_tokens,
        shared_share=None if count.shared_tokens is None else count.shared_tokens / (load.prompt_tokens or 1),
        hit_rate=count.hit_rate,
        lost_tokens=lost,
        overhead_share=(waste + (lost or 0)) / tokens,
        num_blocks=count.num_blocks,
        evicted_blocks=count.evicted_blocks,
        fit_at_once=count.fit_at_once,
    )


def gathers_mean(prompts: NDArray[np.int64], ends: NDArray[np.int64], size: int) -> float | None:
    """Blocks that a decode step reads, on average: the step that makes a sequence n tokens long reads all of them."""
    steps = float((ends - prompts).sum())
    if not steps:
        return None
    return float((_blocks_up_to(ends, size) - _blocks_up_to(prompts, size)).sum()) / steps


def _blocks_up_to(lengths: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """The blocks of sequences of 1, 2, .. n tokens, summed in closed form; in floats, for the sums get large."""
    full, rest = np.divmod(lengths.astype(np.float64), size)
    return np.asarray(size * full * (full + 1) / 2 + rest * (full + 1))


def _fit_at_once(lengths: NDArray[np.int64], size: int, num_blocks: int) -> int:
    from .. import Pager

    pager = Pager(num_blocks, size, prefix_cache=False)
    # Held until all are counted: a sequence that nobody holds gives its blocks back.
    held = []
    text = np.zeros(int(lengths.max()), np.int32)
    for length in lengths.tolist():
        sequence = pager.try_admit(text[:length])
        if sequence is None:
            break
        held.append(sequence)
    for sequence in held:
        sequence.release()
    return len(held)
