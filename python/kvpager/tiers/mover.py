"""Carries out the plans between the host and a store."""

from __future__ import annotations

import contextlib
import math
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError
from ..movers.arena import HostArena
from ..movers.base import Book, Ticket, as_transfer_error, check_ids, name_of
from ..plans import Plan, StoreKeys
from .store import KEY_BYTES, ROOT, Store, told

__all__ = ["StoreMover"]

_AT_ONCE = 1 << 26
"""Bytes that one call of the store reads or writes: between two of them a worker looks whether it is to end."""


class StoreMover:
    """Copies between the rows of a host arena and a store: one thread reads, one writes. It is a mover
    (:class:`kvpager.movers.Mover`): it knows no pager, and the caller passes on what its tickets say. A save and a load
    are not kept in order; no pager plans two at once that have a host block in common.

    What waits to be written is bounded by `max_queued_bytes`: a save beyond it fails at once, and its blocks are
    counted (`num_dropped_blocks`). A load ends at the first block that the store has not got (its ticket fails,
    `done` says what arrived): what follows it would be of no use.
    """

    def __init__(self, store: Store, host: HostArena, *, max_queued_bytes: int = 1 << 28) -> None:
        """Starts the threads. ConfigError if the store's rows and the arena's have different sizes."""
        if store.row_bytes != host.bytes_per_block:
            raise ConfigError(
                f"the store's rows have {store.row_bytes:,} bytes, the host arena's blocks {host.bytes_per_block:,}"
            )
        max_queued_bytes = operator.index(max_queued_bytes)
        if max_queued_bytes < host.bytes_per_block:
            raise ConfigError(
                f"max_queued_bytes is {max_queued_bytes:,}; one block has {host.bytes_per_block:,} bytes already"
            )
        self._host = host
        self._store = store
        self._desk = _Desk(store, host.records, max_queued_bytes)
        for name, kind in (("reader", "load"), ("writer", "save")):
            threading.Thread(target=self._desk.work, args=(kind,), name=f"kvpager-store-{name}", daemon=True).start()
        # A mover that nobody closed ends its threads when it is collected.
        self._dropped = weakref.finalize(self, self._desk.stop)

    @property
    def num_dropped_blocks(self) -> int:
        """Blocks of saves that were refused since too much was waiting."""
        return self._desk.num_dropped_blocks

    @property
    def num_queued_bytes(self) -> int:
        """Bytes of saves that are waiting or being written."""
        return self._desk.num_queued_bytes

    @property
    def is_idle(self) -> bool:
        """True if no plan is under way, and all that ended were reported."""
        return self._desk.book.is_idle

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a save may have now without being refused."""
        desk = self._desk
        return max(0, desk.max_queued_bytes - desk.num_queued_bytes) // self._host.bytes_per_block

    def submit(self, plan: Plan, after: None = None) -> Ticket:
        """Queues a save or a load. See :meth:`kvpager.movers.Mover.submit`; there is nothing to wait for.

        TransferError if the plan is of another kind, does not fit the arena or the store, or the mover is closed.
        """
        self._check(plan)
        if after is not None:
            raise TypeError(f"after must be None, not {type(after).__name__}: a store waits for no stream")
        desk, ticket = self._desk, Ticket(plan)
        desk.book.check_here()
        with desk.book.lock:
            if desk.closing:
                raise TransferError("the mover is closed")
            waiting = desk.num_queued_bytes
            is_too_much = waiting + len(plan) * self._host.bytes_per_block > desk.max_queued_bytes
            # One step, so that an interrupt leaves no ticket that waits for nobody.
            desk.book.begin(ticket)
            if plan.kind == "save" and waiting and is_too_much:
                desk.num_dropped_blocks += len(plan)
                desk.book.end(ticket, TransferError(f"{waiting:,} bytes wait to be written: the store is too slow"))
        return ticket

    def has(self, plan: Plan) -> bool:
        """True if the plan was submitted, and its end is not reported."""
        return self._desk.book.has(plan)

    def poll(self) -> list[Ticket]:
        """See :meth:`kvpager.movers.Mover.poll`."""
        self._desk.book.check_here()
        return self._desk.book.report()

    def wait(self, timeout: float, tickets: Sequence[Ticket] | None = None) -> list[Ticket]:
        """See :meth:`kvpager.movers.Mover.wait`."""
        return self._desk.book.wait(timeout, tickets)

    @contextlib.contextmanager
    def nothing_written(self) -> Iterator[None]:
        """While this lasts the store is given nothing: saves that wait have failed, one that was being written has
        ended."""
        desk = self._desk
        with desk.writing:
            with desk.book.lock:
                desk.fail("save", "what was to be saved is not wanted any more")
            yield

    def close(self) -> None:
        """Fails what has not begun, and what has after the call of the store that it is in. A second call does nothing.

        Nothing is read into the arena or given to the store afterwards. (The store is the caller's to close.)
        """
        self._desk.stop()
        self._dropped.detach()
        if self._desk.book.is_here:
            with self._desk.writing, self._desk.reading:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, plan: Plan) -> None:
        name = name_of(plan)
        if plan.kind not in ("save", "load") or not isinstance(plan.records, StoreKeys):
            raise TransferError(f"{name}: this mover carries out saves and loads, which have records")
        ids = plan.source_ids if plan.kind == "save" else plan.destination_ids
        check_ids(ids, self._host.num_blocks, f"{name}: host block", "host arena")
        expected = {"keys": (len(ids), KEY_BYTES), "metas": (len(ids), self._store.meta_bytes)}
        for what, array in plan.records._asdict().items():
            if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != expected[what]:
                raise TransferError(
                    f"{name}: {what} must be uint8 {list(expected[what])} for this store, not"
                    f" {getattr(array, 'dtype', type(array).__name__)} {list(getattr(array, 'shape', ()))}"
                )


class _Desk:
    """What the threads of a mover share. It does not know the mover, which can go before them."""

    def __init__(self, store: Store, rows: npt.NDArray[np.uint8], max_queued_bytes: int) -> None:
        self.store = store
        self.rows = rows
        self.max_queued_bytes = max_queued_bytes
        self.book = Book()
        # All below is guarded by the book's lock. What waits is what the book has under way and no thread is at.
        self.busy: dict[str, Ticket] = {}
        self.num_dropped_blocks = 0
        self.closing = False
        # Held while the store is called. Taken before the book's lock.
        self.writing = threading.Lock()
        self.reading = threading.Lock()

    @property
    def num_queued_bytes(self) -> int:
        """Bytes of saves that have not ended."""
        with self.book.lock:
            blocks = sum(len(ticket.plan) for ticket in self.book.under_way if ticket.plan.kind == "save")
            return blocks * int(self.rows.shape[1])

    def waiting(self, kind: str) -> Iterator[Ticket]:
        """Tickets of a kind that have not begun, in order. With the book's lock held."""
        at_it = self.busy.get(kind)
        return (each for each in self.book.under_way if each.plan.kind == kind and each is not at_it)

    def stop(self) -> None:
        """Fails what waits; the threads end."""
        if self.book.is_here:
            with self.book.lock:
                self.closing = True
                self.fail("save", "the mover was closed")
                self.fail("load", "the mover was closed")
                self.book.notify()

    def fail(self, kind: str, why: str) -> None:
        """Ends what waits. With the book's lock held."""
        for ticket in list(self.waiting(kind)):
            self.book.end(ticket, TransferError(why))

    def work(self, kind: str) -> None:
        """A thread: one ticket after the other, until the mover is closed."""
        turn = self.reading if kind == "load" else self.writing
        while True:
            self.book.wait_until(lambda: self.closing or any(True for _ in self.waiting(kind)), math.inf)
            # Taken without the book's lock, so that whoever wants nothing written waits for one ticket only.
            with turn:
                with self.book.lock:
                    ticket = next(self.waiting(kind), None)
                    if ticket is None and self.closing:
                        return
                    if ticket is None:
                        continue
                    self.busy[kind] = ticket
                error: TransferError | None = None
                try:
                    self._carry_out(ticket)
                except BaseException as fault:
                    error = as_transfer_error(fault)
                with self.book.lock:
                    self.book.end(ticket, error)
                    del self.busy[kind]

    def _carry_out(self, ticket: Ticket) -> None:
        plan, records = ticket.plan, ticket.plan.records
        assert records is not None
        is_load = plan.kind == "load"
        ids = plan.destination_ids if is_load else plan.source_ids
        call = self.store.get_many if is_load else self.store.put_many
        wanted = np.arange(len(plan)) if is_load else np.flatnonzero(self._can_be_found(records))
        at_once = max(1, _AT_ONCE // self.rows.shape[1])
        for first in range(0, len(wanted), at_once):
            if self.closing:
                raise TransferError(f"the mover was closed after {first} of {len(plan)} blocks")
            part = wanted[first : first + at_once]
            done = told(call(records.keys[part], records.metas[part], self.rows, ids[part]), len(part))
            ticket._copied[part] = done
            if is_load and not done.all():
                break
        missing = len(plan) - int(ticket._copied.sum())
        if missing:
            what = "were not there" if is_load else "were not stored"
            raise TransferError(f"{missing} of {len(plan)} blocks {what}")

    def _can_be_found(self, records: StoreKeys) -> npt.NDArray[np.bool_]:
        """Of blocks to be saved, those that have their paths in the store or before them in the plan: bool [n].

        What hangs in the air nobody finds, so it is not written; told of it, the pager saves the path again.
        """
        above = records.metas[:, :KEY_BYTES]
        is_first = np.ones(len(above), np.bool_)
        is_first[1:] = (above[1:] != records.keys[:-1]).any(axis=1)
        firsts = np.flatnonzero(is_first)
        stored = told(self.store.contains_many(np.ascontiguousarray(above[firsts])), len(firsts))
        written = {key.tobytes(): nth for nth, key in enumerate(records.keys)}
        fine = np.zeros(len(above), np.bool_)
        for first, stop, is_stored in zip(firsts, [*firsts[1:], len(above)], stored, strict=True):
            key = above[first].tobytes()
            before = written.get(key)
            fine[first:stop] = is_stored or key.startswith(ROOT) or (before is not None and fine[before])
        return fine
