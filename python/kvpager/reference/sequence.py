"""The handle of one sequence."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, final

import numpy as np
import numpy.typing as npt

from ..errors import OutOfBlocks, StaleHandle, StepError
from ..plans import Plan
from ..types import Namespace, Tokens
from .inputs import as_position, as_token, as_tokens, shown
from .log import Why
from .record import WITH_BLOCKS, Record

if TYPE_CHECKING:
    from .pager import Pager


# A call makes at most so many children: a slip of the caller must not use up the machine.
FORK_MAX = 65_536
FORK_TOKENS_MAX = 2**28

_POSITION = "a position, 0 or more and at most the sequence's length"


@final
class Sequence:
    """The tokens of one running request and the blocks that hold their KV. Made by ``Pager.admit`` and ``fork``."""

    __slots__ = ("__weakref__", "_pager", "_record")

    _pager: Pager
    _record: Record

    def __init__(self) -> None:
        raise TypeError("a Sequence comes from Pager.admit() or Sequence.fork()")

    @classmethod
    def _make(cls, pager: Pager, record: Record) -> Sequence:
        handle = object.__new__(cls)
        handle._pager = pager
        handle._record = record
        return handle

    # What a handle always answers.

    @property
    def id(self) -> int:
        """Counts up over admits and forks, and is never used again."""
        return self._record.id

    @property
    def state(self) -> str:
        """``"running"``, ``"preempted"`` or ``"released"``; ``"fetching"``, ``"swapping_out"`` or ``"swapping_in"``
        while a plan for it has not ended; ``"swapped"``."""
        return self._record.state

    def __repr__(self) -> str:
        record = self._record
        if record.state == "released":
            return f"<kvpager.reference.Sequence {record.id}: released>"
        return (
            f"<kvpager.reference.Sequence {record.id}: {record.state}, len {len(record.tokens)},"
            f" committed {record.num_committed}, {len(record.table)} blocks>"
        )

    # What a live handle answers.

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._live("len").tokens)

    @property
    def num_cached(self) -> int:
        """Tokens found in the pool at the admit or resume: prefill starts behind them."""
        return self._live("num_cached").num_cached

    @property
    def num_committed(self) -> int:
        """Tokens whose KV the caller has said to be written."""
        return self._live("num_committed").num_committed

    @property
    def num_planned(self) -> int:
        """Tokens given to a step that writes them; without an open step these are the committed ones."""
        return self._live("num_planned").num_planned

    @property
    def namespace(self) -> Namespace:
        """The namespace given at the admit."""
        return self._live("namespace").namespace

    @property
    def pinned(self) -> bool:
        """Whether the sequence was admitted to hold a prefix, apart from the watermark's running ones."""
        return self._live("pinned").pinned

    @property
    def num_preemptions(self) -> int:
        """How often it, or who it was forked from before that, gave its blocks back to come back later."""
        return self._live("num_preemptions").num_preemptions

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens; -1 in the place of one that an open step is still to find."""
        return np.array(self._live("tokens").tokens, dtype=np.int32)

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the block table."""
        record = self._live("block_ids")
        if record.state not in WITH_BLOCKS:
            raise StaleHandle(record.id, record.state, "block_ids")
        return np.array(record.table, dtype=np.int32)

    @property
    def fetch(self) -> Plan | None:
        """The plan that brings a part of the prompt from the host, while it has not ended."""
        record = self._live("fetch")
        return None if record.fetch is None else self._pager._transfers.of(record).plan

    # Growing and writing.

    def append(self, token: int) -> int:
        """Add one token; its slot, ``block_id * block_size + offset``."""
        self._pager._drain()
        record = self._running("append")
        return self._grow(record, [as_token(token)])[0]

    def extend(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Add tokens; their slots."""
        self._pager._drain()
        record = self._running("extend")
        return np.array(self._grow(record, as_tokens(tokens)), dtype=np.int64)

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The slots of known, uncommitted positions, made writable for this sequence alone."""
        self._pager._drain()
        record = self._running("slots")
        start, stop = as_position("start", start, _POSITION), as_position("stop", stop, _POSITION)
        if not record.num_planned <= start <= stop <= len(record.tokens):
            low = "num_committed" if record.num_planned == record.num_committed else "num_planned"
            raise ValueError(
                f"start is {shown(start)} and stop is {shown(stop)}; it must hold that {record.num_planned}"
                f" ({low}) <= start <= stop <= {len(record.tokens)} (len)"
            )
        return np.array(self._give(record, start, stop), dtype=np.int64)

    def try_append(self, token: int) -> int | None:
        """``append``, or None where that raises OutOfBlocks."""
        try:
            return self.append(token)
        except OutOfBlocks:
            return None

    def try_extend(self, tokens: Tokens) -> npt.NDArray[np.int64] | None:
        """``extend``, or None where that raises OutOfBlocks."""
        try:
            return self.extend(tokens)
        except OutOfBlocks:
            return None

    def try_slots(self, start: int, stop: int) -> npt.NDArray[np.int64] | None:
        """``slots``, or None where that raises OutOfBlocks."""
        try:
            return self.slots(start, stop)
        except OutOfBlocks:
            return None

    def commit(self, end: int | None = None) -> None:
        """Say that the KV below ``end`` is written (None: all of it). Full blocks become part of the prefix cache."""
        self._pager._drain()
        record = self._running("commit")
        if record.open_rows:
            raise StepError(
                f"commit refused: sequence {record.id} is in an open step, whose commit says what is written"
            )
        length = len(record.tokens)
        end = length if end is None else as_position("end", end, _POSITION)
        if end > length:
            raise ValueError(f"end is {shown(end)}; it must be a position, {length} at most: the sequence's length")
        if end > (with_blocks := len(record.table) * self._pager.block_size):
            raise ValueError(f"commit needs an end of 0..{with_blocks} (tokens that have a block), not {end}")
        record.commit(self._pager._pool, end)

    # Sharing, cutting, leaving.

    def fork(self, n: int = 1) -> list[Sequence]:
        """Children that share every block."""
        self._pager._drain()
        record = self._running("fork")
        n = as_position("n", n, f"1 to {FORK_MAX}")
        limit = min(FORK_MAX, max(FORK_TOKENS_MAX // len(record.tokens), 1))
        if not 1 <= n <= limit:
            raise ValueError(f"n is {shown(n)}; it must be 1 to {limit} for a sequence of {len(record.tokens)} tokens")
        return [self._pager._fork(record) for _ in range(n)]

    def truncate(self, num_tokens: int) -> None:
        """Drop the tokens from ``num_tokens`` on."""
        self._pager._drain()
        record = self._running("truncate")
        num_tokens = as_position("num_tokens", num_tokens, "1 to the sequence's length")
        if not 1 <= num_tokens <= len(record.tokens):
            raise ValueError(
                f"num_tokens is {shown(num_tokens)}; it must be 1 to {len(record.tokens)}, the sequence's length"
            )
        record.truncate(self._pager._pool, num_tokens)

    def preempt(self, *, reason: str = "", cost: float = 0.0) -> None:
        """Give all blocks back; committed full blocks stay cached. Tokens and handle stay."""
        self._pager._drain()
        record, why = self._running("preempt"), Why.of(reason, cost)
        record.preempt(self._pager._pool, self._pager._log, why)

    def resume(self) -> Sequence:
        """Admit a preempted or swapped sequence again, all or nothing; the same handle."""
        self._pager._drain()
        record = self._live("resume")
        if record.state not in ("preempted", "swapped"):
            raise StaleHandle(record.id, record.state, "resume")
        self._pager._resume(record)
        return self

    def try_resume(self) -> Sequence | None:
        """``resume``, or None where that raises OutOfBlocks."""
        try:
            return self.resume()
        except OutOfBlocks:
            return None

    def swap_out(self, *, reason: str = "", cost: float = 0.0) -> Plan:
        """Plan to bring the committed KV to the host. The blocks are given back when the plan is complete."""
        self._pager._drain()
        record, why = self._running("swap_out"), Why.of(reason, cost)
        if record.open_rows:
            raise StepError(f"swap_out refused: sequence {record.id} is in an open step: commit or cancel it first")
        plan = self._pager._swap_out(record)
        record.why = why
        return plan

    def try_swap_out(self, *, reason: str = "", cost: float = 0.0) -> Plan | None:
        """``swap_out``, or None where that raises OutOfBlocks."""
        try:
            return self.swap_out(reason=reason, cost=cost)
        except OutOfBlocks:
            return None

    def swap_in(self) -> Plan:
        """Plan to bring the KV of a swapped sequence back. It runs when the plan is complete."""
        self._pager._drain()
        record = self._live("swap_in")
        if record.state != "swapped":
            raise StaleHandle(record.id, record.state, "swap_in")
        return self._pager._swap_in(record)

    def try_swap_in(self) -> Plan | None:
        """``swap_in``, or None where that raises OutOfBlocks."""
        try:
            return self.swap_in()
        except OutOfBlocks:
            return None

    def release(self, reason: str = "finished") -> None:
        """End the sequence (``"finished"`` or ``"aborted"``); committed full blocks stay cached. Again: no-op."""
        self._pager._drain()
        if self._record.state == "released":
            self._pager._counters.noop_calls += 1
            return
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a str, not {type(reason).__name__}")
        if reason not in ("finished", "aborted"):
            raise ValueError(f"reason is {shown(reason)}; it must be 'finished' or 'aborted'")
        self._pager._release(self._record)
        self._pager._counters.finished_sequences += reason == "finished"

    def __enter__(self) -> Self:
        self._live("__enter__")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release("finished" if kind is None else "aborted")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Sequence is a handle into one pager and cannot be copied or pickled")

    def __del__(self) -> None:
        record = getattr(self, "_record", None)
        if record is None or record.state == "released":
            return
        # No pager call here: the collector may run in the middle of one. The next mutating call does the release.
        self._pager._dropped.append(record)
        warnings.warn(f"sequence {record.id} was dropped without release()", ResourceWarning, source=self, stacklevel=2)

    # Helpers.

    def _live(self, call: str) -> Record:
        if self._record.state == "released":
            raise StaleHandle(self._record.id, self._record.state, call)
        return self._record

    def _running(self, call: str) -> Record:
        if self._record.state != "running":
            raise StaleHandle(self._record.id, self._record.state, call)
        return self._record

    def _grow(self, record: Record, tokens: list[int]) -> list[int]:
        start = len(record.tokens)
        slots = self._give(record, start, start + len(tokens))
        record.tokens.extend(tokens)
        return slots

    def _give(self, record: Record, start: int, stop: int) -> list[int]:
        """The slots of these positions, whose blocks are made writable or taken, as long as that is possible."""
        pool = self._pager._pool
        shared, missing = record.unwritable(pool, start, stop), record.missing(pool, start, stop)
        self._pager._require(len(shared) + missing)
        record.make_writable(pool, shared, pool.take(len(shared) + missing))
        return record.slots(range(start, stop), self._pager.block_size)
