"""What a trace shares at one block size, found by replaying it through the pager.

Counted as `kvpager replay --outputs recorded --service none` counts: requests come one after the other, an answer's
full blocks can be hit where the trace says what the answer was, and the last full block of a prompt may be hit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..replay import ReplayColumns, TokenChains, TokenReplay, build_columns
from ..traces import Progress, Trace

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Shared:
    """Counts of one replay, in blocks of its own size."""

    num_blocks: int
    prompt_blocks: int
    hit_blocks: int
    evicted_blocks: int


def replay_shared(trace: Trace, block_size: int, num_blocks: int | None, progress: Progress | None = None) -> Shared:
    """Replay a token trace at any block size, or an id trace at a multiple of its own; None is a pool without end."""
    from .. import Pager
    from .._core import Replay

    engine: TokenReplay | Replay
    if trace.form == "tokens":
        chains = TokenChains(trace, "recorded", block_size)
        num_blocks = num_blocks or min(int(chains.full_blocks.sum()) + 1, MAX_BLOCKS)
        engine = TokenReplay(chains, Pager(num_blocks, block_size), "none")
    else:
        assert trace.block_size is not None
        c = merged(build_columns(trace, "recorded"), block_size // trace.block_size)
        num_blocks = num_blocks or len(c.ids) + 1
        engine = Replay(c.ids, c.offsets, c.prompt_blocks, None, None, num_blocks, "lru")
    done, total = 0, trace.num_requests
    while done < total:
        done = engine.advance(max(1, total // 100))
        if progress is not None:
            progress(done, total)
    counts = engine.result()
    return Shared(num_blocks, counts["prompt_blocks"], counts["hit_blocks"], counts["evicted_blocks"])


def merged(columns: ReplayColumns, factor: int) -> ReplayColumns:
    """The same chains in blocks that are `factor` times as large.

    An id stands for all tokens up to and including its block, so the last id of a larger block names that block. What
    is left over at the end of a chain fills no larger block.
    """
    chain_blocks = np.diff(columns.offsets) // factor
    offsets = np.zeros(len(columns.offsets), np.int64)
    np.cumsum(chain_blocks, out=offsets[1:])
    place = np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], chain_blocks)
    last = np.repeat(columns.offsets[:-1], chain_blocks) + (place + 1) * factor - 1
    return ReplayColumns(columns.ids[last], offsets, columns.prompt_blocks // factor, None, None)
