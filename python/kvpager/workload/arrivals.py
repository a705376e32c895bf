"""When the requests of chats arrive: a step is 20 ms, the time of one token in the service model of a replay.

A chat's first request arrives at its start. Each later one arrives when the answer before it is complete, by the model
of `kvpager.replay` (prefill at 10,000 tokens a second, then 20 ms a token), and the user, or the tool, has taken the
time that the turn says. Nobody waits for memory here: a trace is what is asked of a server, not what one made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..replay.columns import PREFILL_TOKENS_PER_SECOND, SECONDS_PER_OUTPUT_TOKEN
from ..traces import TokenRequest
from .chats import Chat

STEP_MS = 1000 * SECONDS_PER_OUTPUT_TOKEN


class Arrival(NamedTuple):
    """A request: which turn of which chat, and when. Ordered by time, then by chat."""

    timestamp_ms: int
    chat: int
    turn: int


def arrivals(chats: Sequence[Chat]) -> list[Arrival]:
    """Every request of the chats in the order in which they arrive."""
    found = []
    for number, chat in enumerate(chats):
        clock = chat.start_step * STEP_MS
        length = len(chat.system_prompt)
        for turn, said in enumerate(chat.turns):
            clock += said.think_steps * STEP_MS
            found.append(Arrival(round(clock), number, turn))
            length += len(said.question)
            clock += 1000 * length / PREFILL_TOKENS_PER_SECOND + len(said.answer) * STEP_MS
            length += len(said.answer)
    return sorted(found)


def token_requests(chats: Sequence[Chat], order: Sequence[Arrival]) -> Iterator[TokenRequest]:
    """The requests with their tokens, each prompt made only when it is asked for: together they are much longer."""
    for timestamp_ms, number, turn in order:
        chat = chats[number]
        yield TokenRequest(timestamp_ms, chat.prompt(turn), chat.turns[turn].answer)
