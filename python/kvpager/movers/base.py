"""What every mover has in common: the protocol, the ticket of a submitted plan, and the check of a plan's ids."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import TransferError
from ..plans import Plan, Tier

__all__ = ["Mover", "Ticket", "TicketState"]

TicketState: TypeAlias = Literal["under way", "done", "failed"]
"""A ticket is under way until it ends, once, as done or failed."""


class Ticket:
    """A submitted plan. Read it from any thread; only the mover changes it."""

    plan: Plan

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._copied = np.zeros(len(plan), np.bool_)
        self._state: TicketState = "under way"
        self._error: TransferError | None = None

    @property
    def state(self) -> TicketState:
        """Where the plan's copies stand, as far as the mover has looked: `poll` and `wait` look."""
        return self._state

    @property
    def ended(self) -> bool:
        """True once the ticket is done or failed."""
        return self._state != "under way"

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """bool [n]: blocks whose bytes have arrived, in the plan's order; a copy. False where that is not certain.

        What a pager wants to know of a failed plan: ``pager.fail(ticket.plan, done=ticket.done)``.
        """
        return self._copied.copy()

    @property
    def error(self) -> TransferError | None:
        """Why the ticket failed; None unless it did."""
        return self._error

    def _end(self, error: TransferError | None = None) -> None:
        """Ends the ticket: as done, every block has arrived, or with the error, those marked so far."""
        if self.ended:
            raise RuntimeError(f"{self} ends a second time")  # A bug in a mover.
        if error is None:
            self._copied[:] = True
        self._error = error
        self._state = "done" if error is None else "failed"

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"<Ticket of plan {plan.id}.{plan.generation}, {plan.kind}: {self._state}, {self._copied.sum()} of"
            f" {len(plan)} blocks>"
        )


class Mover(Protocol):
    """Copies what plans say. It knows no pager: the caller passes on what the tickets say.

    Plans that have a block in common, in the same tier, are carried out in the order in which they were submitted. In
    what order others run, or the blocks of one plan, is open.

    An interrupt (KeyboardInterrupt) in `poll` or `wait` loses no report: what the caller did not get comes with the
    next one. In a forked child a mover is of no use: `submit`, `poll` and `wait` raise TransferError there, and `close`
    does nothing, as what is under way is the parent's.
    """

    def submit(self, plan: Plan, after: Any = None) -> Ticket:
        """Starts a plan's copies once `after` has happened (what that may be, each mover says; None: now). Waits for
        nothing. Raises TransferError, with nothing copied, if the plan does not fit the pools or the mover is closed.
        """
        ...

    def poll(self) -> list[Ticket]:
        """Tickets that have ended since the last report, each exactly once, in the order in which they ended."""
        ...

    def wait(self, timeout: float, tickets: Sequence[Ticket] | None = None) -> list[Ticket]:
        """As `poll`, but first waits until `tickets` (None: all) have ended, for at most `timeout` seconds.

        What it returns may be fewer than was waited for (the time ran out) or others (they ended too): read the
        tickets' states. ValueError unless the timeout is a finite number: no wait is for ever.
        """
        ...

    def close(self) -> None:
        """Ends the mover: what has not been carried out fails, and `poll` goes on reporting.

        When it returns, nothing is written any more, nor read: pool and arena may be used otherwise, and every plan
        that was submitted can be reclaimed. A mover that cannot promise that raises TransferError instead, and has
        done the rest; a further call tries again. After one that has returned, a further one does nothing.
        """
        ...


class Book:
    """The tickets of a mover: those under way, in order, and those that have ended and are not reported.

    KeyboardInterrupt is raised in the main thread, between any two steps. So a ticket is moved by steps that may be
    repeated, and nothing waits with the lock in hand (in a condition, an interrupt can leave it with nobody).
    """

    def __init__(self) -> None:
        self.under_way: dict[Ticket, None] = {}
        self._ended: dict[Ticket, None] = {}
        self._waiters: list[threading.Lock] = []
        self._process = os.getpid()
        self.lock = threading.RLock()
        """Guards everything here."""

    @property
    def is_here(self) -> bool:
        """False in a forked child: its memory is a copy, no thread of the mover's runs, and a lock may be taken."""
        return os.getpid() == self._process

    @property
    def is_idle(self) -> bool:
        """True if no ticket is under way, and all that ended were reported."""
        with self.lock:
            return not (self.under_way or self._ended)

    def check_here(self) -> None:
        """Raises TransferError in a forked child."""
        if not self.is_here:
            raise TransferError(
                f"this mover belongs to the parent process, {self._process}: make one after os.fork(), or start workers"
                " with spawn"
            )

    def has(self, plan: Plan) -> bool:
        """True if a ticket of this plan is under way, or not reported."""
        with self.lock:
            return any(ticket.plan == plan for tickets in (self.under_way, self._ended) for ticket in tickets)

    def begin(self, ticket: Ticket) -> None:
        """A ticket is under way. With `lock` held."""
        # Who is woken waits for the lock.
        self.notify()
        self.under_way[ticket] = None

    def end(self, ticket: Ticket, error: TransferError | None = None) -> None:
        """Ends a ticket that is under way, and keeps it for the next report; does nothing for another. `lock` held."""
        if ticket in self.under_way:
            if not ticket.ended:
                ticket._end(error)
            self.notify()
            self._ended[ticket] = None
            del self.under_way[ticket]

    def notify(self) -> None:
        """Wakes who waits. With `lock` held."""
        while self._waiters:
            waiter = self._waiters[-1]
            if waiter.locked():
                waiter.release()
            del self._waiters[-1]

    def report(self, is_due: Callable[[Ticket], bool] = lambda ticket: True) -> list[Ticket]:
        """What ended since the last report, but what is not due yet. An interrupt leaves it all for the next report."""
        due: list[Ticket] = []
        try:
            with self.lock:
                due = [ticket for ticket in self._ended if is_due(ticket)]
                kept = self._ended.copy()
                for ticket in due:
                    del kept[ticket]
                self._ended = kept
            return due
        except BaseException:
            with self.lock:
                self._ended = dict.fromkeys(due) | self._ended
            raise

    def wait(self, timeout: float, tickets: Sequence[Ticket] | None) -> list[Ticket]:
        """As :meth:`Mover.wait`, where threads end the tickets."""
        seconds = finite(timeout)
        self.check_here()
        self.wait_until(lambda: not self.pending(tickets), seconds)
        return self.report()

    def pending(self, tickets: Sequence[Ticket] | None) -> bool:
        """True if one of `tickets` (None: of all) has not ended. With `lock` held."""
        if tickets is None:
            return bool(self.under_way)
        return any(not ticket.ended for ticket in tickets)

    def wait_until(self, happened: Callable[[], bool], timeout: float) -> None:
        """Returns once it has happened, or after so many seconds. Asks with `lock` held, and waits without."""
        deadline = time.monotonic() + timeout
        while True:
            waiter = threading.Lock()
            with self.lock:
                seconds = deadline - time.monotonic()
                if happened() or seconds <= 0:
                    return
                waiter.acquire()
                self._waiters.append(waiter)
            waiter.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
            with self.lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)


def finite(timeout: float) -> float:
    """A number of seconds, 0 at least. Raises ValueError for infinity, NaN and what is no number."""
    try:
        seconds = float(timeout)
    except (TypeError, ValueError, OverflowError):
        seconds = math.inf
    if isinstance(timeout, str) or not math.isfinite(seconds):
        raise ValueError(f"timeout={timeout!r:.80}: a wait needs a finite number of seconds")
    return max(0.0, seconds)


def as_transfer_error(fault: BaseException) -> TransferError:
    """What a ticket fails with: a TransferError as it is, anything else named by one, as its cause."""
    if isinstance(fault, TransferError):
        return fault
    error = TransferError(f"{type(fault).__name__}: {fault}")
    error.__cause__ = fault
    return error


def name_of(plan: Plan) -> str:
    """A plan as messages name it. Raises TypeError for what is no plan."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a kvpager.Plan, not {type(plan).__name__}")
    return f"plan {plan.id}.{plan.generation} ({plan.kind})"


def check_plan(plan: Plan, num_blocks: Mapping[Tier, int]) -> None:
    """Raises TransferError unless the plan's tiers are known, its sides equally long and its ids within the pools.

    A destination named twice is refused too: which of two blocks it would hold is open. TypeError for what is no plan.
    """
    name = name_of(plan)
    for tier in (plan.source, plan.destination):
        if tier not in num_blocks:
            raise TransferError(f"{name}: this mover copies between {' and '.join(num_blocks)}, not {tier!r}")
    if plan.source == plan.destination:
        raise TransferError(f"{name}: source and destination are both the {plan.source}")
    for what, tier, ids in (
        ("source", plan.source, plan.source_ids),
        ("destination", plan.destination, plan.destination_ids),
    ):
        check_ids(ids, num_blocks[tier], f"{name}: {what}", tier)
    if len(plan.source_ids) != len(plan.destination_ids):
        raise TransferError(f"{name}: {len(plan.source_ids)} sources, but {len(plan.destination_ids)} destinations")
    if len(np.unique(plan.destination_ids)) != len(plan.destination_ids):
        values, counts = np.unique(plan.destination_ids, return_counts=True)
        raise TransferError(f"{name}: destination {values[counts > 1][0]} is named {counts.max()} times")


def check_ids(ids: npt.NDArray[np.int32], num_blocks: int, what: str, where: str) -> None:
    """Raises TransferError unless every id is in [0, num_blocks). Before any byte moves."""
    if not isinstance(ids, np.ndarray):
        raise TransferError(f"{what} ids are a {type(ids).__name__}, not a row of integers")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TransferError(f"{what} ids are {ids.dtype} of shape {ids.shape}, not a row of integers")
    if len(ids) and (ids.min() < 0 or ids.max() >= num_blocks):
        bad = int(np.flatnonzero((ids < 0) | (ids >= num_blocks))[0])
        raise TransferError(f"{what} {ids[bad]}, number {bad} of the plan, is no block of the {where}'s {num_blocks}")


def check_copies(copies: npt.NDArray[np.int32], num_blocks: int) -> npt.NDArray[np.int32]:
    """Copy-on-write pairs, int32 [n, 2]. Raises TransferError if one names no block of the pool."""
    copies = np.asarray(copies)
    if copies.dtype.kind not in "iu" and copies.size:
        raise TransferError(f"copies are {copies.dtype}, not integers: pairs of source and destination")
    if copies.ndim != 2 or copies.shape[1] != 2:
        raise TransferError(f"copies have shape {copies.shape}, not [n, 2]: pairs of source and destination")
    check_ids(copies[:, 0], num_blocks, "copies: source", "device")
    check_ids(copies[:, 1], num_blocks, "copies: destination", "device")
    return copies
