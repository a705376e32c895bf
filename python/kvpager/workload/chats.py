"""Seeded chats that share system prompts: the same numbers for the same seed, on every machine.

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


def chat_workload(
    seed: int,
    *,
    num_chats: int,
    chats_per_step: float,
    num_system_prompts: int = 8,
    max_context: int = 4096,
    vocabulary: int = 32_000,
) -> ChatWorkload:
    """Chats whose requests never exceed `max_context` tokens, answer included."""
    if num_chats < 1 or num_system_prompts < 1 or vocabulary < 1 or not chats_per_step > 0:
        raise ValueError("a workload needs at least one chat, one system prompt, one token value and a rate above 0")
    if max_context < 1024:
        raise ValueError(f"max_context {max_context}: at least 1024, a system prompt may take 800 of them")
    rng = np.random.Generator(np.random.PCG64(seed))

    def text(length: int) -> Tokens:
        return rng.integers(0, vocabulary, length, dtype=np.int32)

    systems = [text(int(rng.integers(200, 801))) for _ in range(num_system_prompts)]
    popularity = 1 / np.arange(1, num_system_prompts + 1)
    popularity /= popularity.sum()
    chats = []
    clock = 0.0
    for _ in range(num_chats):
        clock += rng.exponential(1 / chats_per_step)
        system = systems[rng.choice(num_system_prompts, p=popularity)]
        length = len(system)
        turns: list[Turn] = []
        for _ in range(rng.geometric(1 / 4)):
            question = 1 + int(rng.lognormal(np.log(40), 0.8))
            answer = 1 + int(rng.lognormal(np.log(120), 0.7))
            think_steps = int(rng.exponential(60))
            room = max_context - length
            if not turns:
                # The first turn is cut to fit, so that no chat is empty.
                question = min(question, room // 2)
                answer = min(answer, room - question)
            elif question + answer > room:
                break
            turns.append(Turn(text(question), text(answer), think_steps if turns else 0))
            length += question + answer
        chats.append(Chat(int(clock), system, tuple(turns)))
    return ChatWorkload(seed, max_context, num_system_prompts, tuple(chats))
