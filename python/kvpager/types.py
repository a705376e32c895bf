"""The plain values of the API: what goes in, and what comes out besides arrays."""

from __future__ import annotations

import dataclasses
import mmap
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ._core import Sequence

__all__ = [
    "AttachedTier",
    "BatchArrays",
    "Computing",
    "FetchPolicy",
    "Namespace",
    "Never",
    "Preemption",
    "PrefixMatch",
    "RecoveryCost",
    "Stats",
    "Tokens",
    "Victim",
    "VictimPolicy",
    "Wait",
    "WritableBuffer",
]

Tokens: TypeAlias = abc.Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
"""Token values, 0 to 2^31-1: any sequence (a list, a tuple, a range), or any one-dimensional buffer of integers.

An int32 or uint32 array in one piece is the fastest: it is read in place."""

Namespace: TypeAlias = bytes | tuple[tuple[str, bytes], ...]
"""Who may share with whom: bytes, or (kind, value) pairs such as ``(("tenant", b"a"), ("lora", b"7"))``."""


WritableBuffer: TypeAlias = npt.NDArray[Any] | memoryview | bytearray | mmap.mmap
"""Memory that a batch may fill. (Anything else that exports a writable buffer works as well.)"""


class BatchArrays(TypedDict, total=False):
    """Memory of the caller's for some of a batch's arrays, all buffers one behind the other, C-contiguous."""

    block_tables: WritableBuffer
    """int32 [buffers, max_seqs, max_blocks]."""
    seq_lens: WritableBuffer
    """int32 [buffers, max_seqs]."""
    slot_mapping: WritableBuffer
    """int64 [buffers, max_tokens]."""
    positions: WritableBuffer
    """int32 [buffers, max_tokens]."""
    query_start_loc: WritableBuffer
    """int32 [buffers, max_seqs + 1]."""


class AttachedTier(Protocol):
    """What ``Pager.attach`` takes: it keeps blocks outside the pager, and has to drop what the pager drops.

    It may have two attributes more. ``lock`` (with ``acquire`` and ``release``, reentrant) is held from before the
    pager changes until its method has returned: who brings blocks to the pager takes it, too, or brings what is being
    dropped. ``stale`` becomes what its method raised.
    """

    def on_reset(self) -> None:
        """The pager was reset, and its identity is what it was: nothing kept so far may come back."""
        ...

    def on_forget(self, tokens: Tokens, namespace: Namespace) -> None:
        """The pager forgot the last of these blocks and all below it: neither may come back."""
        ...


class FetchPolicy(Protocol):
    """What ``admit(..., fetch=)`` takes in place of a bool: `kvpager.cost.CostModel` is one."""

    def should_fetch(self, num_device_tokens: int, num_host_tokens: int, /) -> bool:
        """Is it worth to fetch what the host has behind the device's prefix? Asked only if it has something."""
        ...


class Computing(NamedTuple):
    """A running sequence is about to compute what a prompt wants: ``admit(..., wait=True)`` took nothing."""

    sequence_id: int
    """Its number (``Sequence.id``)."""
    position: int
    """Tokens of the prompt that an admit will hit once that sequence has committed them: a multiple of
    ``block_size``."""


class PrefixMatch(NamedTuple):
    """What an admit of the same prompt would hit now."""

    num_tokens: int
    """Tokens that are found in the pool: a multiple of ``block_size``, and less than the prompt's length."""
    num_blocks: int
    """Blocks that hold them."""
    computing: Computing | None = None
    """Who is about to compute what follows, and how far; None if nobody is."""
    num_host_tokens: int = 0
    """Tokens behind them that ``admit(..., fetch=True)`` would fetch from the host: a multiple of ``block_size``."""


VictimPolicy: TypeAlias = Literal["newest", "cheapest", "least_progress", "priority"]
"""Who gives way first: see ``Pager.choose_victims``."""


class RecoveryCost(NamedTuple):
    """What it costs to bring a sequence back, in any one unit. By default in tokens to compute, and never by a copy.

    ``CostModel.recovery_cost`` makes one in seconds. Computing tokens [start, end) behind `start` cached ones costs
    ``token * (end - start) + pair * pairs + cached_token * start``, at least `least`.

    - ``token``: to compute one token, attention apart.
    - ``pair``: of attention, for each pair of a token and one before it, or itself.
    - ``cached_token``: for each cached token before those that are computed (MLA expands them).
    - ``block``: to move one block one way; infinite: it cannot be done.
    - ``least``: of a prefill, however short.
    - ``row_step``: a row that sits out one step: what of the step's time was its share.
    """

    token: float = 1.0
    pair: float = 0.0
    cached_token: float = 0.0
    block: float = float("inf")
    least: float = 0.0
    row_step: float = 1.0


class Victim(NamedTuple):
    """One who gives way, and how: an answer of ``Pager.choose_victims``."""

    sequence_id: int
    sequence: Sequence | None
    """The candidate as it was given; None where no candidates were given."""
    candidate_index: int
    """Its position in `candidates`, counted as in `left_out`. Where none were given: among all that run and are not
    pinned, by ascending id."""
    action: Literal["recompute", "swap", "stall"]
    """``preempt``, ``swap_out``, or left out of this step with all its blocks."""
    blocks: int
    """What free + evictable grows by when it goes after those before it in the answer."""
    tokens: int
    """Committed tokens that are computed again, or moved: those that nobody who stays holds."""
    cost: float
    """In the unit of the `RecoveryCost`."""
    reason: str
    """For people, and for ``preempt(reason=...)``."""


class Preemption(NamedTuple):
    """A sequence that gave its blocks back, as ``Pager.preemptions`` tells of it.

    - ``number``: counts from 0 over the life of the pager: a gap tells that the log has forgotten some.
    - ``tick``: the pager's clock (``Stats.clock_ticks``).
    - ``blocks``: what free + evictable grew by.
    - ``tokens``: tokens that were committed.
    - ``cost``, ``reason``: as the caller gave them.
    """

    number: int
    tick: int
    sequence_id: int
    action: Literal["recompute", "swap"]
    blocks: int
    tokens: int
    cost: float
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A request does not come in now, says an :class:`~kvpager.Admission`. Nothing was changed. It is false.

    - ``reason``: "blocks", it does not fit now; "growth", it would fit now, but those who run are expected to need the
      room; "turn", others that wait were passed over too often.
    - ``needed``: blocks that it takes, the watermark's reserve included; for "growth": that all will hold at the worst
      moment, or with ``risk=0`` those that all may come to take.
    - ``available``: blocks that are free or cached; for "growth": all that there are, but with ``risk=0`` those free or
      cached.
    - ``passed_over``: how often others that asked later came in before it.
    - ``ticket``: its place among those that wait: hand the answer back as ``waited`` when the same request is asked
      about again, and keep it to that request.
    - ``admission_number``: names the Admission that answered, for ``Admission.give_up``.
    """

    reason: Literal["blocks", "growth", "turn"]
    needed: int
    available: int
    passed_over: int
    ticket: int
    admission_number: int = field(default=-1, repr=False, compare=False)

    @property
    def short(self) -> int:
        """Blocks that are missing; for "turn" there may be enough, and it is 0."""
        return max(0, self.needed - self.available)

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Never:
    """A request is larger than the whole pool: waiting cannot help. Nothing was changed. It is false.

    - ``needed``: blocks of the request.
    - ``usable``: blocks of the pool that sequences can hold.
    """

    needed: int
    usable: int

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Stats:
    """One moment of a pager: blocks by state, sequences by state, and counters that only grow.

    Blocks now:

    - ``total_blocks``: blocks of the pool, free + cached + active + writing + quarantined + reserved.
    - ``free_blocks``: blocks without content.
    - ``cached_blocks``: blocks that nobody holds and that can still be hit.
    - ``active_blocks``: blocks that a sequence, a queued copy, an open step or a plan that reads them holds.
    - ``reserved_blocks``: 1 with a null block, else 0.
    - ``evictable_blocks``: blocks that eviction could free now, all that are cached.
    - ``writing_blocks``: destinations of unfinished plans.
    - ``quarantined_blocks``: destinations of abandoned plans, until they are reclaimed.
    - ``host_total_blocks``: blocks of the host tier, the sum of the next five.
    - ``host_free_blocks``, ``host_cached_blocks``, ``host_active_blocks``, ``host_writing_blocks``,
      ``host_quarantined_blocks``: as above; a swapped sequence or a plan that reads it holds an active one.

    Sequences now:

    - ``running_sequences``: those that hold device blocks, ``pin=True`` ones and those in a transfer included.
    - ``preempted_sequences``: those that wait to be resumed.
    - ``swapped_sequences``: those whose KV is on the host.

    Counters since construction:

    - ``clock_ticks``: successful releases, the only clock of the pager.
    - ``admitted_sequences``: successful admits; resumes and forks are none.
    - ``queried_tokens``, ``hit_tokens``: lengths of the admitted prompts, and how much of them was found in the pool.
    - ``evicted_blocks``: cached blocks that gave up their content for a frame.
    - ``evicted_idle_ticks``: sum of their ages since the last holder left.
    - ``evicted_hits``: sum of the hits they had while they were indexed.
    - ``copies``: block copies handed out by ``take_copies``, and those of committed steps.
    - ``preemptions``: successful preempts.
    - ``recomputed_tokens``: tokens that were committed before a preempt and not found again at the resume.
    - ``dropped_handles``: live handles that the garbage collector took; the pager released them.
    - ``refused_calls``: calls answered with OutOfBlocks or NeverFits, or with None in their place.
    - ``noop_calls``: releases of handles that were released already.
    - ``host_evicted_blocks``: cached host blocks that gave up their content for a frame.
    - ``offloaded_blocks``: host blocks that offloads brought into the host's index.
    - ``fetched_blocks``: blocks that came back from the host for an admit.
    - ``swap_outs``, ``swap_ins``: completed plans of either kind.
    - ``saved_blocks``: host blocks that saves brought into a store.
    - ``loaded_blocks``: host blocks that loads brought from a store into the host's index.
    - ``late_reports``: reports of plans that had ended.
    - ``computed_tokens``: tokens that commits said to be written.
    - ``finished_sequences``: releases as finished.
    - ``swapped_tokens``: committed tokens of the sequences that were swapped out.
    - ``refaulted_blocks``: evicted blocks that an admit or resume asked for again while they were remembered
      (``num_ghost_blocks``).
    - ``refault_distance``: sum over them of the blocks that were evicted in between: by so many more blocks the pool
      would have kept it.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    reserved_blocks: int
    evictable_blocks: int
    running_sequences: int
    preempted_sequences: int
    clock_ticks: int
    admitted_sequences: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    evicted_idle_ticks: int
    evicted_hits: int
    copies: int
    preemptions: int
    recomputed_tokens: int
    dropped_handles: int
    refused_calls: int
    noop_calls: int
    writing_blocks: int = 0
    quarantined_blocks: int = 0
    host_total_blocks: int = 0
    host_free_blocks: int = 0
    host_cached_blocks: int = 0
    host_active_blocks: int = 0
    host_writing_blocks: int = 0
    host_quarantined_blocks: int = 0
    swapped_sequences: int = 0
    host_evicted_blocks: int = 0
    offloaded_blocks: int = 0
    fetched_blocks: int = 0
    swap_outs: int = 0
    swap_ins: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    late_reports: int = 0
    computed_tokens: int = 0
    finished_sequences: int = 0
    swapped_tokens: int = 0
    refaulted_blocks: int = 0
    refault_distance: int = 0

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

    @property
    def mean_refault_distance(self) -> float:
        """Mean number of blocks evicted between an eviction and its refault, 0.0 before the first refault."""
        return self.refault_distance / self.refaulted_blocks if self.refaulted_blocks else 0.0

    def as_dict(self) -> dict[str, int]:
        """The fields by name, in their order, ready for JSON."""
        return dataclasses.asdict(self)
