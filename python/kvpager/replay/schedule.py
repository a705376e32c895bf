"""The order of events in a replay, and the plain simulation that the fast one is held against.

Event order, the same in every implementation:

1. Requests are taken in file order. The clock moves to the arrival of the request, never back.
2. Finishes due at or before the clock come first, in the order of (finish time, request number).
3. While the blocks held and the request's own chain together exceed the pool, the request waits: the next finish is
   taken, one at a time, and the clock moves to it. Nobody overtakes.
4. The request is admitted. With service it finishes at clock + service time; without, it is released at once.
5. After the last request, all that still run finish, in the same order.

All times are seconds in double precision: arrival = timestamp / 1000, and the sum of 4 is the only arithmetic.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from ..errors import NeverFits


class Schedule(ABC):
    """Takes requests through admission and release in the order above; what a pool does with them is up to the rest."""

    def __init__(
        self, num_requests: int, arrivals_s: NDArray[np.float64] | None, service_s: NDArray[np.float64] | None
    ) -> None:
        self._num_requests = num_requests
        self._arrivals = None if arrivals_s is None else arrivals_s.tolist()
        self._service = None if service_s is None else service_s.tolist()
        self._clock = 0.0
        self._running: list[tuple[float, int]] = []
        self._done = 0

    @abstractmethod
    def _admit(self, index: int) -> bool:
        """Admit a request if it fits beside what is held now; NeverFits if it would not even fit alone."""

    @abstractmethod
    def _release(self, index: int) -> None:
        """Release a request that was admitted."""

    @abstractmethod
    def result(self) -> dict[str, int]:
        """The counters so far."""

    def advance(self, num_requests: int) -> int:
        """Take up to so many requests; returns how many were taken since the beginning."""
        stop = min(self._num_requests, self._done + num_requests)
        while self._done < stop:
            index = self._done
            if self._arrivals is not None:
                self._clock = max(self._clock, self._arrivals[index])
            while self._running and self._running[0][0] <= self._clock:
                self._finish_next()
            while not self._admit(index):
                self._clock = max(self._clock, self._running[0][0])
                self._finish_next()
            if self._service is None:
                self._release(index)
            else:
                heapq.heappush(self._running, (self._clock + self._service[index], index))
            self._done += 1
        while self._done == self._num_requests and self._running:
            self._finish_next()
        return self._done

    def _finish_next(self) -> None:
        self._release(heapq.heappop(self._running)[1])


class ReferenceReplay(Schedule):
    """`kvpager._core.Replay` in plain Python: dictionaries of blocks, no pager. The oracle of the replay tests."""

    def __init__(
        self,
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        prompt_blocks: NDArray[np.int32],
        arrivals_s: NDArray[np.float64] | None,
        service_s: NDArray[np.float64] | None,
        num_blocks: int,
        policy: str,
    ) -> None:
        super().__init__(len(prompt_blocks), arrivals_s, service_s)
        if policy not in ("lru", "slru"):
            raise ValueError(f"policy {policy!r}: expected 'lru' or 'slru'")
        self._ids, self._offsets = ids, offsets
        self._prompt_blocks = prompt_blocks.tolist()
        self._num_blocks = num_blocks
        self._slru = policy == "slru"
        # A block is its id and everything before it: the pair (block before it, id) gets a number of its own.
        self._numbers: dict[tuple[int, int], int] = {}
        self._chains: dict[int, list[int]] = {}
        self._holders: dict[int, int] = {}
        self._marked: set[int] = set()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._active = self._active_max = 0
        self._hit_blocks = self._evicted = 0

    def _chain(self, index: int) -> list[int]:
        chain: list[int] = []
        before = -1
        for block_id in self._ids[self._offsets[index] : self._offsets[index + 1]].tolist():
            before = self._numbers.setdefault((before, block_id), len(self._numbers))
            chain.append(before)
        return chain

    def _admit(self, index: int) -> bool:
        chain = self._chain(index)
        if len(chain) + 1 > self._num_blocks:
            raise NeverFits(len(chain) + 1, self._num_blocks)
        holders, probation, protected = self._holders, self._probation, self._protected
        needed = 1 + sum(block not in holders for block in chain)
        if self._active + needed > self._num_blocks:
            return False
        hits = 0
        for block in chain:
            if block not in holders and block not in probation and block not in protected:
                break
            hits += 1
            self._marked.add(block)
        self._hit_blocks += min(hits, self._prompt_blocks[index])
        for block in chain:
            if block not in holders:
                probation.pop(block, None)
                protected.pop(block, None)
            holders[block] = holders.get(block, 0) + 1
        self._active += needed
        self._active_max = max(self._active_max, self._active)
        while self._active + len(probation) + len(protected) > self._num_blocks:
            victim, _ = (probation or protected).popitem(last=False)
            self._marked.discard(victim)
            self._evicted += 1
        self._chains[index] = chain
        return True

    def _release(self, index: int) -> None:
        self._active -= 1  # the private block, which becomes free
        for block in reversed(self._chains.pop(index)):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            self._active -= 1
            queue = self._protected if self._slru and block in self._marked else self._probation
            queue[block] = None
        while len(self._protected) > self._num_blocks // 2:
            demoted, _ = self._protected.popitem(last=False)
            self._marked.discard(demoted)
            self._probation[demoted] = None

    def result(self) -> dict[str, int]:
        return {
            "requests": self._done,
            "prompt_blocks": sum(self._prompt_blocks[: self._done]),
            "hit_blocks": self._hit_blocks,
            "evicted_blocks": self._evicted,
            "cached_blocks": len(self._probation) + len(self._protected),
            "active_blocks_max": self._active_max,
        }
