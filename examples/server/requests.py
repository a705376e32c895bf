"""What is asked, what is told, and an answer in the making: the words of the scheduler and of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import kvpager
from kvpager.tiers import Loading

from .tokenizer import AnswerText


@dataclass(frozen=True)
class Delta:
    """More text of one sample, and why it ended, if it did: "stop", "length"."""

    index: int
    text: str
    finish_reason: str | None = None


@dataclass(frozen=True)
class Failed:
    """The request ends here, unanswered: the server stops, or met a bug."""

    message: str


Event: TypeAlias = Delta | Failed


class NeverFitsError(ValueError):
    """A request that this server can never answer."""


class OverloadedError(RuntimeError):
    """Too many requests wait, or the server stops: try again later."""


@dataclass(eq=False)
class Request:
    prompt: NDArray[np.int32]
    max_tokens: int | None  # None: as many as fit
    on_event: Callable[[Event], None]  # called from the scheduler's thread: must not block
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    namespace: kvpager.Namespace = b""
    # Written by the scheduler, before the event that tells.
    number: int = -1
    num_cached: int = 0
    num_sampled: int = 0
    is_forked: bool = False
    waited: kvpager.Wait | None = None  # what admission said last
    loading: Loading | None = None


@dataclass(eq=False)
class Sample:
    """One answer in the making."""

    request: Request
    index: int
    seq: kvpager.Sequence
    text: AnswerText
    num_tokens: int = 0
    # The sampled token that is not in the sequence yet: the next step that reaches the sequence's end takes it along.
    pending: int | None = None
    # Its copy on the host could not be brought back: it is computed again.
    is_lost: bool = False
    waited: kvpager.Wait | None = None  # as for the request: preempted, it waits to come back

    @property
    def age(self) -> tuple[int, int]:
        return self.request.number, self.index

    @property
    def num_missing(self) -> int:
        """Positions to compute before the next token can be sampled: a prompt's rest, or 1 in a decode step."""
        return len(self.seq) - self.seq.num_planned + (self.pending is not None)

    @property
    def num_left(self) -> int | None:
        """Tokens that it still gets, at most."""
        return None if self.request.max_tokens is None else self.request.max_tokens - self.num_tokens
