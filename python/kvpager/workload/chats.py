"""Seeded chats that share system prompts.

The shape, and the distributions (all from one `numpy` PCG64 generator, in this order):

- System prompts: lengths uniform on 200..800 tokens. Which one a chat uses is Zipf with exponent 1: the second most
  popular is half as popular as the first.
- Chats begin at the steps of a Poisson process. Their number of turns is geometric with mean 4.
- A question is log-normal with median 40 tokens (sigma 0.8), an answer log-normal with median 120 (sigma 0.7). The next
  question comes an exponential time with mean 60 steps after the answer.
- A chat ends early rather than outgrow `max_context`.

The prompt of a turn is the system prompt and everything said before, so a turn repeats its chat's past: that is what a
prefix cache lives on. Token values are uniform; nothing here looks at what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

FIRST_TURN_ROOM = 224
"""What the longest system prompt has to leave of a context, so that the first question and answer have room."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer; `think_steps` pass between the answer before and this question."""

    question: Tokens
    answer: Tokens
    think_steps: int


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: which system prompt it uses and what is said."""

    start_step: int
    system_prompt: Tokens
    turns: tuple[Turn, ...]

    def prompt(self, turn: int) -> Tokens:
        """Everything up to and including the question of a turn: the prompt a server gets."""
        said = [part for earlier in self.turns[:turn] for part in (earlier.question, earlier.answer)]
        return np.concatenate([self.system_prompt, *said, self.turns[turn].question])


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Chats in the order of their beginning."""

    seed: int
    max_context: int
    num_system_prompts: int
    chats: tuple[Chat, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(chat.turns) for chat in self.chats)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(chat.prompt(turn)) for chat in self.chats for turn in range(len(chat.turns)))

    @property
    def answer_tokens(self) -> int:
        return sum(len(turn.answer) for chat in self.chats for turn in chat.turns)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal length: half of them are shorter than the median, and a few are many times as long."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> int:
        return 1 + int(rng.lognormal(np.log(self.median), self.sigma))


class Source:
    """A generator with what all workloads draw from it: texts, and system prompts by popularity."""

    def __init__(self, seed: int, vocabulary: int, num_system_prompts: int, system_tokens: tuple[int, int]) -> None:
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self._vocabulary = vocabulary
        shortest, longest = system_tokens
        self._systems = [self.text(int(self.rng.integers(shortest, longest + 1))) for _ in range(num_system_prompts)]
        popularity = 1 / np.arange(1, num_system_prompts + 1)
        self._popularity = popularity / popularity.sum()

    def text(self, length: int) -> Tokens:
        return self.rng.integers(0, self._vocabulary, length, dtype=np.int32)

    def system_prompt(self) -> Tokens:
        return self._systems[self.rng.choice(len(self._systems), p=self._popularity)]

    def turns(
        self,
        count: int,
        room: int,
        *,
        first: LogNormal,
        question: LogNormal,
        answer: LogNormal,
        think_steps: float,
    ) -> tuple[Turn, ...]:
        """Up to `count` turns that take no more than `room` tokens together; at least one."""
        turns: list[Turn] = []
        for _ in range(count):
            asked = (question if turns else first).draw(self.rng)
            answered = answer.draw(self.rng)
            waited = int(self.rng.exponential(think_steps))
            if not turns:
                # The first turn is cut to fit, so that no chat is empty.
                asked = min(asked, room // 2)
                answered = min(answered, room - asked)
            elif asked + answered > room:
                break
            turns.append(Turn(self.text(asked), self.text(answered), waited if turns else 0))
            room -= asked + answered
        return tuple(turns)


def chat_workload(
    seed: int,
    *,
    num_chats: int,
    chats_per_step: float,
    num_system_prompts: int = 8,
    max_context: int = 4096,
    vocabulary: int = 32_000,
    system_tokens: tuple[int, int] = (200, 800),
    turns_mean: float = 4,
    question_median: float = 40,
    answer_median: float = 120,
    think_steps_mean: float = 60,
) -> ChatWorkload:
    """Chats whose requests never exceed `max_context` tokens, answer included."""
    if num_chats < 1 or num_system_prompts < 1 or vocabulary < 1 or not chats_per_step > 0:
        raise ValueError("a workload needs at least one chat, one system prompt, one token value and a rate above 0")
    check_room(max_context, system_tokens)
    source = Source(seed, vocabulary, num_system_prompts, system_tokens)
    question, answer = LogNormal(question_median, 0.8), LogNormal(answer_median, 0.7)
    chats = []
    clock = 0.0
    for _ in range(num_chats):
        clock += source.rng.exponential(1 / chats_per_step)
        system = source.system_prompt()
        turns = source.turns(
            int(source.rng.geometric(1 / turns_mean)),
            max_context - len(system),
            first=question,
            question=question,
            answer=answer,
            think_steps=think_steps_mean,
        )
        chats.append(Chat(int(clock), system, turns))
    return ChatWorkload(seed, max_context, num_system_prompts, tuple(chats))


def check_room(max_context: int, system_tokens: tuple[int, int], front: int = 0) -> None:
    """Refuse a context in which the longest system prompt, and what stands before it, leave no room for a turn."""
    longest = system_tokens[1] + front
    if max_context < longest + FIRST_TURN_ROOM:
        least = longest + FIRST_TURN_ROOM
        raise ValueError(f"max_context {max_context}: at least {least}, a system prompt may take {longest} of them")
