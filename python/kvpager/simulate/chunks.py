"""How much of a prompt a step computes beside those who write: the decision that sets the time between tokens.

A chunk policy is asked twice. `prompt_tokens` for each prompt of a step, the oldest first, until one has to be cut: the
rest waits for the next step. `room_for` before the admission policy is asked about a request: whether steps stay short
enough with it. Policies look at `engine.writing`, the work of those who write, and at `engine.planned`, that of the
step so far. With nobody writing nobody notices, and a prompt may take the whole step.

`EngineConfig.max_step_tokens` bounds every step besides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

from ..cost import MAX_TOKENS, parse_seconds
from ..errors import ConfigError

if TYPE_CHECKING:
    from .engine import Engine
    from .rows import Request


class Chunk(Protocol):
    """How many prompt tokens a step takes."""

    @property
    def name(self) -> str:
        """What tables and pictures call it."""

    def prompt_tokens(self, engine: Engine, start: int) -> int:
        """How many tokens of a prompt, behind `start` that are computed or cached, this step takes.

        At least 1, unless another prompt takes part already.
        """

    def room_for(self, engine: Engine, request: Request) -> bool:
        """Whether steps are short enough with this request among them. With nothing running it must be True."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """So many prompt tokens a step beside those who write; None: as many as the step has room for."""

    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"a chunk of {self.tokens} tokens: at least one has to be computed")

    @property
    def name(self) -> str:
        return "whole step" if self.tokens is None else f"{self.tokens:,}"

    def prompt_tokens(self, engine: Engine, start: int) -> int:
        return MAX_TOKENS if self.tokens is None else max(0, self.tokens - self._taken(engine))

    def room_for(self, engine: Engine, request: Request) -> bool:
        return self.tokens is None or self._taken(engine) < self.tokens

    def _taken(self, engine: Engine) -> int:
        return engine.planned.tokens - engine.writing.tokens


@dataclass(frozen=True, slots=True)
class Roofline:
    """As many prompt tokens as are computed while the step reads anyway: `kvpager.cost.Speed.prompt_tokens`."""

    @property
    def name(self) -> str:
        return "roofline"

    def prompt_tokens(self, engine: Engine, start: int) -> int:
        if not engine.writing.tokens:
            return MAX_TOKENS
        return engine.speed.prompt_tokens(engine.planned, start, target_s=self.target_s(engine))

    def target_s(self, engine: Engine) -> float:
        """What this step may take; 0: what its reading takes."""
        return 0.0

    def room_for(self, engine: Engine, request: Request) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class TimeTarget(Roofline):
    """Steps of so many seconds: prompts fill them up, and who would make the reading alone longer waits outside."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"a target of {self.seconds} seconds: expected a finite number above 0")

    @property
    def name(self) -> str:
        return f"{1000 * self.seconds:g} ms"

    def target_s(self, engine: Engine) -> float:
        return self.seconds

    def room_for(self, engine: Engine, request: Request) -> bool:
        rows, context = engine.num_running + 1, engine.running_tokens + request.num_tokens
        return rows == 1 or engine.speed.step_s(rows, context, context) <= self.seconds


@dataclass(frozen=True, slots=True)
class Slowdown(Roofline):
    """`Roofline`, and steps that read no longer than so many times a step of one request alone, of the mean context.

    Who would make them longer waits outside. It is for who has no `TimeTarget`: an idle engine is the measure, whatever
    model, device and requests are.
    """

    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor < float("inf"):
            raise ConfigError(f"a slowdown of {self.factor}: expected a finite number of at least 1")

    @property
    def name(self) -> str:
        return f"{self.factor:g} x alone"

    def room_for(self, engine: Engine, request: Request) -> bool:
        rows, context = engine.num_running + 1, engine.running_tokens + request.num_tokens
        target = self.factor * engine.speed.token_alone_s(context / rows)
        return rows == 1 or engine.speed.step_s(rows, context, context) <= target


def parse_chunk(text: str) -> Chunk:
    """`full`, `512`, `roofline`, `itl:8ms` or `slowdown:1.2`; ValueError otherwise."""
    kind, _, value = text.strip().partition(":")
    try:
        if kind == "full" and not value:
            return Fixed()
        if kind == "roofline" and not value:
            return Roofline()
        if re.fullmatch(r"[0-9]{1,9}", kind) and not value:
            return Fixed(int(kind))
        if kind == "itl":
            return TimeTarget(parse_seconds(value))
        if kind == "slowdown" and re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,12})?", value):
            return Slowdown(float(Fraction(value)))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    raise ValueError(f"chunk {text.strip()!r}: expected full, 512, roofline, itl:8ms or slowdown:1.2")
