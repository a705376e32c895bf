"""A server without a model, for measuring memory: it admits chats, writes their answers token by token, and waits.

Time is counted in steps. In a step every request that runs gets one token more; a prompt is prefilled in the step in
which its request is admitted. Requests are admitted first come, first served. What differs between schemes is the
`Memory` behind it.
"""

from __future__ import annotations

import heapq
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..workload import ChatWorkload

if TYPE_CHECKING:
    from .. import Pager, reference

Tokens = NDArray[np.int32]


class Memory(Protocol):
    """Where the KV of the running requests lives. A handle is whatever the memory wants back."""

    def admit(self, prompt: Tokens) -> Any | None:
        """Room for a prompt, or None if there is none now."""

    def append(self, handle: Any, token: int) -> bool:
        """Room for one token more."""

    def preempt(self, handle: Any) -> None:
        """Give the room back for a while."""

    def resume(self, handle: Any) -> bool:
        """Take it again."""

    def finish(self, handle: Any) -> None:
        """Give it back for good."""

    def wasted(self, length: int) -> int:
        """Slots that a request of this length holds and does not use."""

    def computed(self) -> int:
        """Prompt tokens prefilled so far, again after a preemption included."""


class Reserved:
    """Contiguous memory: every request gets the longest context there is, since nobody knows how long it will be."""

    def __init__(self, slots: int, max_context: int) -> None:
        self.max_context = max_context
        self._places = slots // max_context
        self._computed = 0

    def admit(self, prompt: Tokens) -> object | None:
        if not self._places:
            return None
        self._places -= 1
        self._computed += len(prompt)
        return self

    def append(self, handle: object, token: int) -> bool:
        return True

    def preempt(self, handle: object) -> None:
        raise AssertionError("a reservation never runs out")

    def resume(self, handle: object) -> bool:
        raise AssertionError("a reservation never runs out")

    def finish(self, handle: object) -> None:
        self._places += 1

    def wasted(self, length: int) -> int:
        return self.max_context - length

    def computed(self) -> int:
        return self._computed


class CallTimes:
    """Mean time of each kind of call, with what taking the time costs.

    That cost is not taken off: it changes with what else the machine does, and calls as short as an append would come
    out at nothing, or below. `clock_us` tells what it is.
    """

    def __init__(self) -> None:
        self._spent: dict[str, list[int]] = {}

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any, refused: str | None = None) -> Any:
        """Make a call and keep its time under its name, or under the other where it answers None."""
        before = time.perf_counter_ns()
        result = call(*arguments)
        elapsed = time.perf_counter_ns() - before
        spent = self._spent.setdefault(name if result is not None or refused is None else refused, [0, 0])
        spent[0] += 1
        spent[1] += elapsed
        return result

    def mean_us(self) -> dict[str, tuple[int, float]]:
        """Number of calls and mean microseconds by name."""
        return {name: (count, total / count / 1000) for name, (count, total) in self._spent.items()}


def clock_us(samples: int = 10_000) -> float:
    """What taking the time of a call adds to it on this machine now, in microseconds."""
    times = CallTimes()
    for _ in range(samples):
        times.timed("nothing", _nothing)
    return times.mean_us()["nothing"][1]


def _nothing() -> None:
    pass


class Paged:
    """The pager, compiled or reference. With `keep` false, blocks are shared only while somebody runs on them."""

    def __init__(self, pager: Pager | reference.Pager, *, keep: bool = True) -> None:
        self.pager, self.keep = pager, keep
        self.times = CallTimes()
        self.answers = 0
        """A checksum of every block id handed out at admission: equal pagers give equal ones."""

    def admit(self, prompt: Tokens) -> Any | None:
        sequence = self.times.timed("admit", self.pager.try_admit, prompt, refused="refuse a prompt")
        if sequence is not None:
            self.times.timed("commit a prompt", sequence.commit)
            self.answers = zlib.crc32(sequence.block_ids.tobytes(), self.answers)
        return sequence

    def append(self, handle: Any, token: int) -> bool:
        if self.times.timed("append a token", handle.try_append, token, refused="refuse a token") is None:
            return False
        self.times.timed("commit a token", handle.commit)
        return True

    def preempt(self, handle: Any) -> None:
        tokens = handle.tokens
        handle.preempt()
        self._drop_cached(tokens)

    def resume(self, handle: Any) -> bool:
        if handle.try_resume() is None:
            return False
        handle.commit()
        return True

    def finish(self, handle: Any) -> None:
        tokens = None if self.keep else handle.tokens
        self.times.timed("release", handle.release)
        self._drop_cached(tokens)

    def _drop_cached(self, tokens: Tokens | None) -> None:
        """Drop what only the request that just left could hit: the last blocks of its path, as many as are cached."""
        cached = 0 if self.keep or not self.pager.prefix_cache else self.pager.stats().cached_blocks
        if cached:
            assert tokens is not None
            size = self.pager.block_size
            self.pager.forget(tokens[: (len(tokens) // size - cached + 1) * size])

    def wasted(self, length: int) -> int:
        return -length % self.pager.block_size

    def computed(self) -> int:
        stats = self.pager.stats()
        return stats.queried_tokens - stats.hit_tokens + stats.recomputed_tokens


@dataclass(slots=True)
class _Running:
    chat: int
    turn: int
    handle: Any
    length: int
    answer: list[int]
    """What is still to be written, last token first."""


@dataclass(slots=True)
class Served:
    """What a run came to, summed over its steps."""

    steps: int = 0
    preemptions: int = 0
    running_max: int = 0
    running_sum: int = 0
    wasted_sum: int = 0

    def count_step(self, running: int, wasted: int) -> None:
        self.steps += 1
        self.running_max = max(self.running_max, running)
        self.running_sum += running
        self.wasted_sum += wasted

    @property
    def running_mean(self) -> float:
        """Requests that run at once; as each gets a token a step, also tokens a step."""
        return self.running_sum / self.steps if self.steps else 0.0

    @property
    def wasted_mean(self) -> float:
        """Slots that a running request holds and does not use."""
        return self.wasted_sum / self.running_sum if self.running_sum else 0.0


class Server:
    """Runs a workload on a memory, step by step."""

    def __init__(self, workload: ChatWorkload, memory: Memory) -> None:
        self.workload, self.memory = workload, memory
        self.served = Served()
        self._due = [(chat.start_step, number, 0) for number, chat in enumerate(workload.chats)]
        heapq.heapify(self._due)
        self._waiting: deque[tuple[int, int]] = deque()
        self._preempted: list[_Running] = []
        self._running: list[_Running] = []

    def run(self, progress: Callable[[int, int], None] | None = None) -> Served:
        total, finished = self.workload.num_requests, 0
        while finished < total:
            self._admit()
            wasted = sum(self.memory.wasted(request.length) for request in self._running)
            self.served.count_step(len(self._running), wasted)
            finished += self._write_one_token_each()
            if progress is not None:
                progress(finished, total)
        return self.served

    def _admit(self) -> None:
        while self._due and self._due[0][0] <= self.served.steps:
            _, chat, turn = heapq.heappop(self._due)
            self._waiting.append((chat, turn))
        # Whoever was preempted has waited longest.
        while self._preempted and self.memory.resume(self._preempted[-1].handle):
            self._running.append(self._preempted.pop())
        while self._waiting and not self._preempted:
            chat, turn = self._waiting[0]
            prompt = self.workload.chats[chat].prompt(turn)
            handle = self.memory.admit(prompt)
            if handle is None:
                break
            self._waiting.popleft()
            answer = self.workload.chats[chat].turns[turn].answer[::-1].tolist()
            self._running.append(_Running(chat, turn, handle, len(prompt), answer))

    def _write_one_token_each(self) -> int:
        finished = 0
        position = 0
        while position < len(self._running):
            request = self._running[position]
            if not self.memory.append(request.handle, request.answer[-1]):
                # The youngest gives way; where that is this request itself, it waits too. Nothing would ever come of
                # waiting for a request that has the memory to itself.
                if len(self._running) == 1:
                    raise ConfigError(f"a request of {request.length + 1} tokens does not fit in the memory even alone")
                youngest = self._running.pop()
                self.memory.preempt(youngest.handle)
                self._preempted.append(youngest)
                self.served.preemptions += 1
                continue
            request.answer.pop()
            request.length += 1
            position += 1
        for request in [r for r in self._running if not r.answer]:
            self.memory.finish(request.handle)
            finished += 1
            turns = self.workload.chats[request.chat].turns
            if request.turn + 1 < len(turns):
                due = self.served.steps + turns[request.turn + 1].think_steps
                heapq.heappush(self._due, (due, request.chat, request.turn + 1))
        self._running = [request for request in self._running if request.answer]
        return finished
