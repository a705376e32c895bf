"""Streams that run what is queued in any legal order, one operation at a time, chosen by a seed.

A GPU's streams promise little: within a stream one after the other, across streams only what an event says. On a fast
and idle machine work that nothing orders still tends to run in the order in which it was queued, and the missing event
shows up in production. Here it does not: every choice that the promises leave open is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

__all__ = ["FakeEvent", "FakeStream", "Schedule"]


class Operation:
    """Something queued: it may run once all it needs have finished."""

    def __init__(
        self, name: str, work: Callable[[], None] | None, needs: Iterable[Operation | Callable[[], object]] = ()
    ) -> None:
        self.finished = False
        self.name = name
        self.work = work
        self.needs = [need for need in needs if not (isinstance(need, Operation) and need.finished)]

    def ready(self) -> bool:
        """True once nothing is left to wait for."""
        self.needs = [need for need in self.needs if not (need.finished if isinstance(need, Operation) else need())]
        return not self.needs


class Schedule:
    """What is queued on all streams of one seed, and the order in which it ran."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.log: list[str] = []
        """Names of the operations that have run, in order: equal seeds and calls give equal logs."""
        self.queued: list[Operation] = []

    def add(self, operation: Operation) -> Operation:
        """Queues an operation."""
        self.queued.append(operation)
        return operation

    def run(self, operation: Operation) -> None:
        """Runs an operation that is ready. One that an interrupt cuts short stays queued, and runs again."""
        try:
            if operation.work is not None and not operation.finished:
                operation.work()
        except Exception:
            self._finish(operation)
            raise
        self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        operation.finished = True
        self.log.append(operation.name)
        self.queued.remove(operation)

    def run_one(self) -> bool:
        """Runs one of those that are ready; False if none is."""
        ready = [operation for operation in self.queued if operation.ready()]
        if not ready:
            return False
        self.run(self.random.choice(ready))
        return True


class FakeEvent:
    """A point in a stream."""

    def __init__(self, last: Operation | None) -> None:
        self.last = last

    @property
    def happened(self) -> bool:
        """True once the stream has got there."""
        return self.last is None or self.last.finished


class FakeStream:
    """Compute work in order: ``mover.stream()`` makes one."""

    def __init__(self, schedule: Schedule, name: str, poison: Callable[[list[int]], None]) -> None:
        self._schedule = schedule
        self._name = name
        self._poison = poison
        self._last: Operation | None = None
        self._waits: list[Operation] = []
        self._count = 0

    def launch(self, work: Callable[[], None], writes: Iterable[int] = ()) -> FakeEvent:
        """Queues a kernel: `work` is called when its turn comes. Returns the event of its end.

        `writes`: device blocks that it fills. From the moment at which it may start until its end they hold rubbish.
        """
        blocks = list(writes)
        name = f"{self._name}.{self._count}"
        self._count += 1
        if blocks:
            poison = self._queue(Operation(f"{name} starts", lambda: self._poison(blocks), self._needs()))
            if poison.ready():
                self._schedule.run(poison)
        self._queue(Operation(name, work, self._needs()))
        return self.record()

    def wait(self, event: FakeEvent) -> None:
        """What is launched from now on runs after the event."""
        if event.last is not None:
            self._waits.append(event.last)

    def record(self) -> FakeEvent:
        """The end of what was launched so far, and of what that waits for."""
        if self._waits:
            self._queue(Operation(f"{self._name} waits", None, self._needs()))
        return FakeEvent(self._last)

    def _needs(self) -> list[Operation]:
        needs, self._waits = self._waits, []
        return needs if self._last is None else [*needs, self._last]

    def _queue(self, operation: Operation) -> Operation:
        self._last = self._schedule.add(operation)
        return operation
