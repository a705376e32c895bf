"""The four shapes of load that `kvpager generate` makes: chats, agents, bursts, and prompts with a variable front.

Each is a dataclass of what can be chosen; its docstring states the distributions. Common to all:

- Everything comes from one PCG64 generator of the seed. Sessions begin as a Poisson process of `rate` a second.
- There are `systems` system prompts with lengths uniform on `system`; which one is used is Zipf with exponent 1.
- Lengths called `..._median` below are log-normal, 1 token at least. Sigmas are fixed: 0.8 for what is asked, 0.7 for
  answers, others as stated.
- No request outgrows `max_context`, its answer included: a session ends early, a first or only turn is cut.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from .arrivals import STEP_MS
from .chats import Chat, LogNormal, Source, Tokens, chat_workload, check_room

VOCABULARY = 32_000
ASKED_SIGMA = 0.8
ANSWER_SIGMA = 0.7
STEPS_PER_SECOND = 1000 / STEP_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(ABC):
    """What every kind lets you choose. A value that makes no sense is a ValueError."""

    name: ClassVar[str]

    sessions: int = 500
    rate: float = 5.0
    systems: int = 8
    system: tuple[int, int] = (200, 800)
    question: float = 40.0
    answer: float = 120.0
    max_context: int = 4096

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "system":
                if not 1 <= value[0] <= value[1]:
                    raise ValueError(f"system {value[0]}:{value[1]}: expected 1 <= LO <= HI")
            elif not math.isfinite(value) or value < 0 or (value == 0 and field.name not in ("think", "front")):
                raise ValueError(f"{field.name} {value}: expected a finite number above 0")
            elif field.name in ("turns", "burst") and value < 1:
                raise ValueError(f"{field.name} {value}: the mean of a count that is 1 at least")
        check_room(self.max_context, self.system, self._front())

    def _front(self) -> int:
        return 0

    def _source(self, seed: int) -> Source:
        return Source(seed, VOCABULARY, self.systems, self.system)

    @abstractmethod
    def chats(self, seed: int) -> tuple[Chat, ...]:
        """The sessions, in the order of their beginning. A session of one request is a chat of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chatting(Kind):
    """Chats over shared system prompts: each turn repeats what was said before it.

    The workload of `kvpager demo`, with other defaults for time: turns are geometric with mean `turns`; questions have
    the median `question`, answers `answer`; the next question comes an exponential time of mean `think` seconds after
    the answer.
    """

    name: ClassVar[str] = "chat"

    sessions: int = 300
    rate: float = 2.0
    turns: float = 4.0
    think: float = 20.0

    def chats(self, seed: int) -> tuple[Chat, ...]:
        load = chat_workload(
            seed,
            num_chats=self.sessions,
            chats_per_step=self.rate / STEPS_PER_SECOND,
            num_system_prompts=self.systems,
            max_context=self.max_context,
            vocabulary=VOCABULARY,
            system_tokens=self.system,
            turns_mean=self.turns,
            question_median=self.question,
            answer_median=self.answer,
            think_steps_mean=self.think * STEPS_PER_SECOND,
        )
        return load.chats


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent(Kind):
    """Agent sessions: a task, then tool call after tool call, each of which makes the context longer.

    The system prompt holds the tool definitions. The task has the median `question`, a model's call of a tool `answer`,
    a tool's result `result` (sigma 1.0: most are short, some are whole files). Calls are geometric with mean `turns`; a
    tool runs an exponential time of mean `think` seconds.
    """

    name: ClassVar[str] = "agent"

    sessions: int = 20
    rate: float = 0.2
    systems: int = 4
    system: tuple[int, int] = (2000, 6000)
    turns: float = 15.0
    question: float = 200.0
    answer: float = 60.0
    result: float = 400.0
    think: float = 2.0
    max_context: int = 32_768

    def chats(self, seed: int) -> tuple[Chat, ...]:
        source = self._source(seed)
        chats = []
        clock = 0.0
        for _ in range(self.sessions):
            clock += source.rng.exponential(STEPS_PER_SECOND / self.rate)
            system = source.system_prompt()
            turns = source.turns(
                int(source.rng.geometric(1 / self.turns)),
                self.max_context - len(system),
                first=LogNormal(self.question, ASKED_SIGMA),
                question=LogNormal(self.result, 1.0),
                answer=LogNormal(self.answer, ANSWER_SIGMA),
                think_steps=self.think * STEPS_PER_SECOND,
            )
            chats.append(Chat(int(clock), system, turns))
        return tuple(chats)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleRequests(Kind):
    """Sessions of one request each."""

    def _request(self, source: Source, step: float, before: Tokens, asked: LogNormal) -> Chat:
        turns = source.turns(
            1,
            self.max_context - len(before),
            first=asked,
            question=asked,
            answer=LogNormal(self.answer, ANSWER_SIGMA),
            think_steps=0,
        )
        return Chat(int(step), before, turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst(SingleRequests):
    """Bursts of one-off prompts over a steady stream on hot system prompts.

    Half of the requests are steady: a system prompt and a question, a Poisson process. The other half share nothing
    with anybody and come in bursts, which flood a cache: bursts begin as a Poisson process, their sizes are geometric
    with mean `burst`, within one the gaps are exponential with mean 20 ms. A one-off prompt has the median `one_off`
    (sigma 0.5). `rate` counts all requests.
    """

    name: ClassVar[str] = "burst"

    sessions: int = 1000
    rate: float = 10.0
    burst: float = 50.0
    one_off: float = 600.0

    def chats(self, seed: int) -> tuple[Chat, ...]:
        source = self._source(seed)
        rng = source.rng
        # An odd one out is steady, so that a trace of one request is a plain one.
        flooding = self.sessions // 2
        gap = 2 * STEPS_PER_SECOND / self.rate
        starts = [(float(start), False) for start in np.cumsum(rng.exponential(gap, self.sessions - flooding))]
        clock = 0.0
        while flooding:
            clock += rng.exponential(gap * self.burst)
            size = min(flooding, int(rng.geometric(1 / self.burst)))
            starts += [(clock + float(after), True) for after in np.cumsum(rng.exponential(1, size))]
            flooding -= size
        question, one_off = LogNormal(self.question, ASKED_SIGMA), LogNormal(self.one_off, 0.5)
        nothing = np.empty(0, np.int32)
        return tuple(
            self._request(source, start, nothing, one_off)
            if unique
            else self._request(source, start, source.system_prompt(), question)
            for start, unique in sorted(starts)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VarFront(SingleRequests):
    """Prompts that share a long system prompt and still share nothing: something variable stands in front of it.

    A prompt is `front` random tokens (a request id, the time), a system prompt, and a question. `--front 0` gives the
    same requests without what stands in front: but for requests cut to `max_context`, the two traces differ in nothing
    else, and in all that a prefix cache can do with them.
    """

    name: ClassVar[str] = "varfront"

    system: tuple[int, int] = (1000, 2000)
    front: int = 8

    def _front(self) -> int:
        return self.front

    def chats(self, seed: int) -> tuple[Chat, ...]:
        source = self._source(seed)
        # Of a generator of its own: what follows the front must not depend on how long it is.
        fronts = np.random.Generator(np.random.PCG64([seed, 1]))
        chats = []
        clock = 0.0
        for _ in range(self.sessions):
            clock += source.rng.exponential(STEPS_PER_SECOND / self.rate)
            front = fronts.integers(0, VOCABULARY, self.front, dtype=np.int32)
            before = np.concatenate([front, source.system_prompt()])
            chats.append(self._request(source, clock, before, LogNormal(self.question, ASKED_SIGMA)))
        return tuple(chats)


KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Chatting, Agent, Burst, VarFront)}
