"""Fill each memory with the same requests, then let them finish in random order, and count.

Lengths are of whole requests, prompt and answer, and log-normal: most are short, a few are many times as long. They
come from one PCG64 generator of the seed, the order of finishing from another, so that the requests do not depend on
what became of the ones before them.

Requests wait in one queue and are admitted first come, first served. After every finish the head of the queue is
tried until one does not fit. Each such refusal is counted, and whether enough slots were free in total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..workload.chats import LogNormal
from .memories import FREE, WASTED, Contiguous, Memory, Pages, SlotMap

SLOTS = 32_768
MAX_CONTEXT = 4096
BLOCK_SIZES = (1, 4, 16, 64, 128, 256)
LENGTH_MEDIAN = 400.0
LENGTH_SIGMA = 0.8
FINISHES = 1000


@dataclass(frozen=True, slots=True)
class Filled:
    """A memory when the first request did not fit."""

    admitted: int
    used: int
    """Slots with a token."""
    wasted: int
    """Slots that are held and have none."""
    free: int
    table_entries: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A moment at which the head of the queue did not fit."""

    length: int
    free: int
    largest_request: int
    """The longest request that would have fitted."""
    slots: SlotMap

    @property
    def enough_free(self) -> bool:
        return self.free >= self.length


@dataclass(frozen=True, slots=True)
class Churned:
    """What happened while requests finished in random order."""

    fail: int
    fail_with_free: int
    """Refusals although as many slots as the request needs were free in total."""
    running_mean: float
    """Requests in memory, over all refusals."""
    last: Refusal


@dataclass(frozen=True, slots=True)
class Scheme:
    filled: Filled
    churned: Churned


@dataclass(frozen=True, slots=True)
class Result:
    """The three schemes on the requests of one seed; pages at every block size."""

    seed: int
    reserved: Scheme
    exact: Scheme
    paged: dict[int, Scheme]


def request_lengths(seed: int) -> Iterator[int]:
    """The lengths of the requests in the order of the queue, without end."""
    rng = np.random.Generator(np.random.PCG64(seed))
    length = LogNormal(LENGTH_MEDIAN, LENGTH_SIGMA)
    while True:
        yield min(length.draw(rng), MAX_CONTEXT)


def measure(seed: int, progress: Callable[[int, int], None] | None = None) -> Result:
    total = 2 + len(BLOCK_SIZES)
    report = progress or (lambda done, total: None)
    reserved = _run(Contiguous(SLOTS, reserve=MAX_CONTEXT), seed)
    report(1, total)
    exact = _run(Contiguous(SLOTS), seed)
    report(2, total)
    paged = {}
    for size in BLOCK_SIZES:
        paged[size] = _run(Pages(SLOTS, size), seed)
        report(2 + len(paged), total)
    return Result(seed, reserved, exact, paged)


def _run(memory: Memory, seed: int) -> Scheme:
    queue = _Queue(memory, seed)
    queue.admit()
    filled = _filled(memory, len(queue.running))
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    fail_with_free = running = 0
    for _ in range(FINISHES):
        finished = queue.running.pop(int(rng.integers(len(queue.running))))
        memory.release(finished)
        queue.admit()
        fail_with_free += memory.free_slots >= queue.head
        running += len(queue.running)
    last = Refusal(queue.head, memory.free_slots, memory.largest_request, memory.slot_map())
    for request in queue.running:
        memory.release(request)
    return Scheme(filled, Churned(FINISHES, fail_with_free, running / FINISHES, last))


class _Queue:
    """Requests that wait, and the numbers of those that run."""

    def __init__(self, memory: Memory, seed: int) -> None:
        self._memory = memory
        self._lengths = request_lengths(seed)
        self._admitted = 0
        self.running: list[int] = []
        self.head = next(self._lengths)

    def admit(self) -> None:
        """Admit the head of the queue until one does not fit."""
        while self._memory.admit(self._admitted, self.head):
            self.running.append(self._admitted)
            self._admitted += 1
            self.head = next(self._lengths)


def _filled(memory: Memory, admitted: int) -> Filled:
    slots = memory.slot_map()
    wasted, free = int((slots == WASTED).sum()), int((slots == FREE).sum())
    return Filled(admitted, len(slots) - wasted - free, wasted, free, memory.table_entries)
