"""The reference engine in plain Python, without a pager: what `kvpager.simulate` has to count where nothing is shared.

First come, first served; prompts in chunks; who does not fit makes the last admitted give way, who is computed again.
Blocks of a preempted request stay cached, deepest first in the order of eviction, until somebody takes their frames.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import ceil
from typing import NamedTuple


class Counted(NamedTuple):
    """What both have to agree on."""

    steps: int
    preemptions: int
    computed: int
    recomputed: int


class Model:
    """One run over (prompt, answer) lengths, all there from the beginning."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        blocks: int,
        size: int,
        max_running: int,
        max_tokens: int,
        watermark: float,
    ) -> None:
        self.size, self.max_running, self.max_tokens = size, max_running, max_tokens
        self.reserve = ceil(watermark * blocks)
        self.known = [prompt for prompt, _ in lengths]
        self.ends = [prompt + answer for prompt, answer in lengths]
        self.computed = [0] * len(lengths)
        self.had = [0] * len(lengths)
        self.held = [0] * len(lengths)
        self.free = blocks
        self.cached: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.running: list[int] = []
        self.waiting = deque(range(len(lengths)))
        self.preemptions = self.recomputed = self.total = self.steps = 0

    def run(self) -> Counted:
        while self.waiting or self.running:
            tokens = self.step()
            self.steps += bool(tokens)
            self.total += sum(tokens.values())
            for request, count in tokens.items():
                self.computed[request] += count
                if self.computed[request] == self.known[request]:
                    self.known[request] += 1
                    if self.known[request] == self.ends[request]:
                        self.running.remove(request)
                        self.give_back(request)
        return Counted(self.steps, self.preemptions, self.total, self.recomputed)

    def step(self) -> dict[int, int]:
        """How many tokens of whom are computed."""
        tokens: dict[int, int] = {}
        budget, calm = self.max_tokens, True
        place = 0
        while place < len(self.running) and budget:
            request = self.running[place]
            count = min(self.known[request] - self.computed[request], budget)
            needed = max(0, ceil((self.computed[request] + count) / self.size) - self.held[request])
            if needed > self.free + len(self.cached):
                calm = False
                self.preempt(self.running.pop())
                continue
            self.take(request, needed)
            tokens[request] = count
            budget -= count
            place += 1
        while calm and self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0]
            hits = self.hits(request)
            needed = ceil(self.known[request] / self.size) - hits
            room = self.free + len(self.cached) - hits
            if needed + (self.reserve if self.running else 0) > room:
                break
            self.waiting.popleft()
            for block in range(hits):
                del self.cached[request, block]
            self.held[request] = hits
            self.take(request, needed)
            self.computed[request] = hits * self.size
            self.recomputed += self.had[request] - self.computed[request]
            self.running.append(request)
            tokens[request] = min(self.known[request] - self.computed[request], budget)
            budget -= tokens[request]
        return tokens

    def hits(self, request: int) -> int:
        most = (self.known[request] - 1) // self.size
        return next((block for block in range(most) if (request, block) not in self.cached), most)

    def take(self, request: int, blocks: int) -> None:
        self.held[request] += blocks
        for _ in range(blocks):
            if self.free:
                self.free -= 1
            else:
                self.cached.popitem(last=False)

    def give_back(self, request: int) -> None:
        full = self.computed[request] // self.size
        self.free += self.held[request] - full
        for block in range(full - 1, -1, -1):
            self.cached[request, block] = None

    def preempt(self, request: int) -> None:
        self.preemptions += 1
        self.give_back(request)
        self.had[request] = self.computed[request]
        self.waiting.appendleft(request)
