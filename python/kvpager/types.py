"""The plain values of the API: what goes in, and what comes out besides arrays."""

from __future__ import annotations

import dataclasses
from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Namespace", "PrefixMatch", "Stats", "Tokens"]

Tokens: TypeAlias = abc.Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
"""Token values: a list, a tuple, or any one-dimensional buffer of integers. Values are 0..2^31-1."""

Namespace: TypeAlias = bytes | tuple[tuple[str, bytes], ...]
"""Who may share with whom: bytes, or (kind, value) pairs such as ``(("tenant", b"a"), ("lora", b"7"))``."""


class PrefixMatch(NamedTuple):
    """What an admit of the same prompt would hit now."""

    num_tokens: int
    """Tokens that are found in the pool."""
    num_blocks: int
    """Blocks that hold them."""


@dataclass(frozen=True, slots=True)
class Stats:
    """One moment of a pager: blocks by state, sequences by state, and counters that only grow."""

    total_blocks: int
    """Blocks of the pool: free + cached + active + reserved."""
    free_blocks: int
    """Blocks without content."""
    cached_blocks: int
    """Blocks that nobody holds and that can still be hit."""
    active_blocks: int
    """Blocks that a sequence or a queued copy holds."""
    reserved_blocks: int
    """1 with a null block, else 0."""
    evictable_blocks: int
    """Blocks that eviction could free now."""
    running_sequences: int
    """Sequences that hold their blocks."""
    preempted_sequences: int
    """Sequences that wait to be resumed."""
    clock_ticks: int
    """Successful releases: the only clock of the pager."""
    admitted_sequences: int
    """Successful admits; resumes and forks are none."""
    queried_tokens: int
    """Lengths of the admitted prompts."""
    hit_tokens: int
    """Tokens of the admitted prompts that were found in the pool."""
    evicted_blocks: int
    """Cached blocks that gave up their content for a frame."""
    evicted_idle_ticks: int
    """Sum of their ages since the last holder left."""
    evicted_hits: int
    """Sum of the hits they had while they were indexed."""
    copies: int
    """Block copies handed out by ``take_copies``."""
    preemptions: int
    """Successful preempts."""
    recomputed_tokens: int
    """Tokens that were committed before a preempt and not found again at the resume."""
    dropped_handles: int
    """Live handles that the garbage collector took; the pager released them."""
    refused_calls: int
    """Calls answered with OutOfBlocks or NeverFits, or with None in their place."""
    noop_calls: int
    """Releases of handles that were released already."""

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were found, 0.0 before the first admit."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def mean_evicted_idle_ticks(self) -> float:
        """Mean age of a block at its eviction, 0.0 before the first eviction."""
        return self.evicted_idle_ticks / self.evicted_blocks if self.evicted_blocks else 0.0

    @property
    def mean_evicted_hits(self) -> float:
        """Mean number of hits of a block at its eviction, 0.0 before the first eviction."""
        return self.evicted_hits / self.evicted_blocks if self.evicted_blocks else 0.0

    def as_dict(self) -> dict[str, int]:
        """The fields by name, in their order, ready for JSON."""
        return dataclasses.asdict(self)
