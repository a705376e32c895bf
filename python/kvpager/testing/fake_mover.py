"""A mover that does everything a mover may do, for tests of whatever uses one: it makes missing ordering visible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

from ..errors import TransferError
from ..movers.arena import HostArena
from ..movers.base import Book, Ticket, check_plan, finite
from ..movers.numpy_mover import Bytes, NumpyPool
from ..plans import Plan, Tier
from .streams import FakeEvent, FakeStream, Operation, Schedule

__all__ = ["FakeAfter", "FakeMover"]

FakeAfter: TypeAlias = FakeStream | FakeEvent | Callable[[], object] | None
"""What a plan may wait for: all that was launched on a stream, an event, or a function that answers true."""

POISON = 0xFF
"""Every byte of what is undefined: NaN in any float format, -1 in any signed one."""


class FakeMover:
    """Copies block by block in any order that is legal, when it is called, by seed. No clock, no thread.

    - A plan's blocks are copied in any order, mixed with those of other plans and with the kernels of `stream()`, as
      far as `after`, `order` and common blocks leave it open. Nothing runs by itself: `run_some`, `poll` and `wait` do.
    - A plan's destinations hold rubbish (0xFF bytes) from the moment at which the plan may start, which is `submit`
      itself if nothing is before it, until they are copied; those that failed keep it. So do the blocks that a kernel
      writes. A reader that is not ordered behind the copy, or a copy that is not behind the kernel, reads that.
    - Faults: a plan fails in some of its blocks with probability `fail`, and never ends with probability `never`
      (`thaw` lets such plans go on: a late report after the caller gave up). What has ended is reported up to `late`
      polls later.

    The same seed and calls give the same choices, in every process. For one thread.
    """

    def __init__(
        self,
        pool: NumpyPool,
        host: HostArena,
        seed: int,
        *,
        fail: float = 0.0,
        never: float = 0.0,
        late: int = 0,
        pace: int = 8,
    ) -> None:
        """`pace`: most operations that a poll carries out. `fail`, `never`: shares of blocks and plans. `late`: most
        polls that a report is held back. ConfigError if pool and arena do not fit, ValueError for odd settings.
        """
        if not (0 <= fail <= 1 and 0 <= never <= 1) or late < 0 or pace < 1:
            raise ValueError(
                f"fail={fail} and never={never} must be 0 to 1, late={late} 0 or more, pace={pace} 1 or more"
            )
        self._num_blocks: dict[Tier, int] = {"device": pool.layout.num_blocks, "host": host.num_blocks}
        self._sides: dict[Tier, list[Bytes]] = {"device": pool.views, "host": pool.records(host)}
        self._schedule = Schedule(seed)
        self._random = self._schedule.random
        self._fail, self._never, self._late, self._pace = fail, never, late, pace
        self._book = Book()
        self._ends: dict[Ticket, Operation] = {}
        self._held_back: dict[Ticket, int] = {}
        self._frozen: list[Operation] = []
        self._streams = 0
        self._closed = False

    @property
    def log(self) -> list[str]:
        """Names of the operations that have run, in order. For reading what happened."""
        return self._schedule.log

    def stream(self) -> FakeStream:
        """A stream of compute work, which this mover's copies race with."""
        self._streams += 1
        return FakeStream(self._schedule, f"stream {self._streams}", lambda blocks: self._poison("device", blocks))

    def submit(self, plan: Plan, after: FakeAfter = None) -> Ticket:
        """See :meth:`kvpager.movers.Mover.submit`. A stream as `after` is all that was launched on it so far."""
        check_plan(plan, self._num_blocks)
        if self._closed:
            raise TransferError("the mover is closed")
        ticket = Ticket(plan)
        needs: list[Operation | Callable[[], object]] = [
            self._ends[earlier] for earlier in self._book.under_way if _in_conflict(earlier.plan, plan)
        ]
        if isinstance(after, FakeStream):
            after = after.record()
        if isinstance(after, FakeEvent):
            needs += [] if after.last is None else [after.last]
        elif after is not None:
            needs.append(after)
        name = f"plan {plan.id}.{plan.generation}"
        start = self._schedule.add(
            Operation(f"{name} starts", lambda: self._poison(plan.destination, plan.destination_ids.tolist()), needs)
        )
        failing = self._draw_failing(plan)
        frozen = self._draw_frozen(name)
        copies = []
        for number in range(len(plan)):
            if number not in failing:
                needs = [start, *(frozen if self._random.random() < 0.5 else [])]
                copies.append(Operation(f"{name} block {number}", partial(self._copy, ticket, number), needs))
                self._schedule.add(copies[-1])
        end = Operation(f"{name} ends", partial(self._end, ticket, failing), [start, *copies, *frozen])
        self._ends[ticket] = self._schedule.add(end)
        self._held_back[ticket] = self._random.randint(0, self._late)
        self._book.begin(ticket)
        if start.ready():
            self._schedule.run(start)
        return ticket

    def order(self, stream: FakeStream, ticket: Ticket) -> None:
        """What is launched on the stream from now on runs after the ticket's copies."""
        if not ticket.ended:
            stream.wait(FakeEvent(self._ends[ticket]))

    def run_some(self, count: int | None = None) -> int:
        """Carries out up to `count` operations (None: a random number up to `pace`). Returns how many there were."""
        count = self._random.randint(0, self._pace) if count is None else count
        for number in range(count):
            if not self._schedule.run_one():
                return number
        return count

    def thaw(self) -> None:
        """Plans that would never have ended go on: what comes now is late."""
        for operation in self._frozen:
            operation.finished = True
        self._frozen.clear()

    def poll(self) -> list[Ticket]:
        """Carries out a few operations. See :meth:`kvpager.movers.Mover.poll`; a report may come `late` polls later."""
        self.run_some()
        return self._book.report(self._is_due)

    def wait(self, timeout: float, tickets: Sequence[Ticket] | None = None) -> list[Ticket]:
        """Carries out operations until the tickets have ended or nothing more can run (timeout 0: none).

        Looks at no clock, and holds no report back. See :meth:`kvpager.movers.Mover.wait`.
        """
        if finite(timeout) > 0:
            while self._book.pending(tickets) and self._schedule.run_one():
                pass
        return self._book.report()

    def close(self) -> None:
        """Fails what has not ended; its destinations stay as they are. See :meth:`kvpager.movers.Mover.close`."""
        self._closed = True
        self._schedule.queued.clear()
        for ticket in list(self._book.under_way):
            self._book.end(ticket, TransferError("the mover was closed before the copy was over"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_due(self, ticket: Ticket) -> bool:
        """False as often as its report is to be late."""
        polls = self._held_back[ticket]
        self._held_back[ticket] = max(0, polls - 1)
        return polls == 0

    def _draw_frozen(self, name: str) -> list[Operation]:
        """What a plan that never ends waits for: usually nothing."""
        frozen = [Operation(f"{name} freezes", None)] if self._random.random() < self._never else []
        self._frozen += frozen
        return frozen

    def _draw_failing(self, plan: Plan) -> set[int]:
        """Blocks of the plan that will fail: usually none."""
        if not len(plan) or self._random.random() >= self._fail:
            return set()
        some = {number for number in range(len(plan)) if self._random.random() < 0.5}
        return some or {self._random.randrange(len(plan))}

    def _poison(self, tier: Tier, blocks: list[int]) -> None:
        for view in self._sides[tier]:
            for block in blocks:
                view[block] = POISON

    def _copy(self, ticket: Ticket, number: int) -> None:
        plan = ticket.plan
        for here, there in zip(self._sides[plan.source], self._sides[plan.destination], strict=True):
            there[plan.destination_ids[number]] = here[plan.source_ids[number]]
        ticket._copied[number] = True

    def _end(self, ticket: Ticket, failing: set[int]) -> None:
        error = None
        if failing:
            error = TransferError(f"{len(failing)} of {len(ticket.plan)} blocks failed, as the seed wanted")
        self._book.end(ticket, error)
        self._ends.pop(ticket, None)


def _in_conflict(one: Plan, other: Plan) -> bool:
    """True if the two have a block in common that at least one of them writes."""
    return bool(_writes(one) & (_reads(other) | _writes(other)) or _reads(one) & _writes(other))


def _reads(plan: Plan) -> set[tuple[Tier, int]]:
    return {(plan.source, block) for block in plan.source_ids.tolist()}


def _writes(plan: Plan) -> set[tuple[Tier, int]]:
    return {(plan.destination, block) for block in plan.destination_ids.tolist()}
