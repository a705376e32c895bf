"""Who may start, and who gives way: the two decisions that an engine leaves to others.

A policy is a small object for one run. The engine asks it, hands itself over to be looked at, and does the rest:

- `Admission.arrange(engine)` may reorder `engine.waiting` before anybody is let in. Most leave it as it is: first come,
  first served, and who was preempted in front.
- `Admission.admit(engine, request)` is asked about the request that waits longest, whenever a step has tokens and a row
  to spare. It answers by letting the request in, `engine.enter(request)`, or with None: then nobody behind it comes in
  before the next step, unless the policy wants to `scan` on (it bounds how often one is passed over). `enter` makes the
  one pager call that is right for the request (an admit, a resume, or a swap-in) and answers None where the pager has
  no room; a policy that decides and admits in one call of its own returns that call's sequence instead. With nothing
  running and nothing on its way a request must be let in.
- `Victims.choose(engine, left_out)` is asked when the rows of a step do not fit, until they do: take a row's blocks to
  compute them again later (`Recompute`), take them to the host (`Swap`), or leave out what does not fit (`Stall`).

`finished` and `preempted` tell a policy that learns what became of its decisions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import Admission as Controller
from ..errors import ConfigError, NeverFits
from ..types import Never, RecoveryCost, Wait

if TYPE_CHECKING:
    from .. import Plan, Sequence
    from .engine import Engine
    from .rows import Request

T = TypeVar("T")


class Admission(Protocol):
    """Who may start."""

    @property
    def name(self) -> str:
        """What tables and pictures call it."""

    @property
    def watermark(self) -> float:
        """The watermark of the pager it works with."""

    @property
    def victims(self) -> Victims:
        """Who gives way, where the engine is not told otherwise."""

    @property
    def scan(self) -> int:
        """How many requests that do not come in are passed over in a step; 0: whoever is first keeps all others out."""

    def arrange(self, engine: Engine) -> None:
        """Put those who wait into the order in which they are asked about. Called whenever somebody may come in."""

    def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
        """Let the request in, or None. May look at everything, changes the pager only for this request."""

    def finished(self, engine: Engine, request: Request) -> None:
        """A request has its whole answer, and is about to give its blocks back."""

    def preempted(self, engine: Engine, request: Request) -> None:
        """A request lost its blocks and waits again."""


@dataclass(frozen=True)  # without slots, so that a class of one's own may keep what it likes
class FirstCome:
    """Whoever fits, in the order of arrival: what engines do unless told. A base for policies of one's own."""

    @property
    def name(self) -> str:
        return "first come"

    @property
    def watermark(self) -> float:
        return 0.0

    @property
    def victims(self) -> Victims:
        return Newest()

    @property
    def scan(self) -> int:
        return 0

    def arrange(self, engine: Engine) -> None:
        pass

    def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
        return engine.enter(request)

    def finished(self, engine: Engine, request: Request) -> None:
        pass

    def preempted(self, engine: Engine, request: Request) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Watermark(FirstCome):
    """Whoever fits and leaves this share of the pool free or cached, so that those who run can grow."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"a watermark of {self.fraction}: expected a share from 0 to 1")

    @property
    def name(self) -> str:
        return f"watermark {100 * self.fraction:g}%"

    @property
    def watermark(self) -> float:
        return self.fraction


@dataclass(frozen=True, slots=True)
class ConcurrencyLimit(FirstCome):
    """Whoever fits while fewer than so many run: the knob that is usually turned."""

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"a limit of {self.limit}: at least one request has to run")

    @property
    def name(self) -> str:
        return f"limit {self.limit}"

    def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
        return engine.enter(request) if engine.num_running < self.limit else None


@dataclass(frozen=True, slots=True)
class ReserveEverything(FirstCome):
    """Whoever fits with the longest answer he may get, beside all others with theirs. Nobody is ever preempted.

    It takes `max_tokens` at its word: with the true lengths it is the best that never overcommits, with a server's
    limit it is a reservation of what nobody uses. Blocks that are shared count once with those who hold them; what a
    request would hit counts as not there, as long as it waits.
    """

    @property
    def name(self) -> str:
        return "reserve"

    def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
        room = engine.available_blocks - engine.promised_blocks
        alone = not engine.num_running
        return engine.enter(request) if alone or engine.most_blocks(request) <= room else None


class Adaptive:
    """`kvpager.Admission`: whoever fits without those who run being expected to run out of blocks.

    It is told the longest answer of a request where the load has a limit that is not the true length; with `known` it
    is told the true one. `watermark` is that of the pager beside it.

    Who gives way is whoever loses least (`Pager.choose_victims`).

    In a batch, all of which is there from the beginning, the last come in `longest_first`: when no more wait than run,
    whoever is expected to get most tokens is asked about first, so that nobody is left to run alone in the end (Graham,
    1969, calls it longest processing time first).
    """

    def __init__(
        self,
        risk: float = 0.28,
        *,
        known: bool = False,
        watermark: float = 0.0,
        scan: int = 3,
        longest_first: bool = True,
        **settings: int,
    ) -> None:
        if not 0 <= risk <= 1:
            raise ConfigError(f"a risk of {risk}: expected a share from 0 to 1")
        if not 0 <= watermark <= 1:
            raise ConfigError(f"a watermark of {watermark}: expected a share from 0 to 1")
        self.risk, self.known, self.watermark, self.scan, self.settings = risk, known, watermark, scan, settings
        self.longest_first = longest_first
        self._controller: Controller | None = None
        self._waited: dict[int, Wait] = {}
        self._arranged: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        kind = f"{'known' if self.known else 'adaptive'} {100 * self.risk:g}%"
        return f"{kind}+{100 * self.watermark:g}%" if self.watermark else kind

    @property
    def victims(self) -> Victims:
        return Advised("least_progress")

    def arrange(self, engine: Engine) -> None:
        waiting = engine.waiting
        if not (self.longest_first and 1 < len(waiting) <= engine.num_running and engine.load.is_batch):
            return
        # The order holds until somebody comes back or the estimates change.
        now = (engine.num_finished, engine.record.preemptions)
        if now != self._arranged:
            self._arranged = now
            order = np.argsort(-self._tokens_left(engine, waiting), kind="stable")
            requests = list(waiting)
            waiting.clear()
            waiting.extend(requests[place] for place in order.tolist())

    def _tokens_left(self, engine: Engine, requests: Iterable[Request]) -> NDArray[np.float64]:
        """How many tokens each is expected to get yet."""
        answered = np.array([request.num_answered for request in requests], np.int64)
        if self.known:
            return np.array([request.answer_tokens for request in requests], np.float64) - answered
        left = self._of(engine).mean_left(answered)
        if engine.load.max_tokens is None:
            return left
        return np.minimum(left, np.array([request.max_tokens for request in requests]) - answered)

    def _of(self, engine: Engine) -> Controller:
        if self._controller is None:
            self._controller = Controller(engine.pager, risk=self.risk, **self.settings)
        return self._controller

    def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
        controller = self._of(engine)
        waited, sequence = self._waited.get(request.index), request.sequence
        if sequence is None:
            tells = engine.load.max_tokens is not None
            answer = controller.try_admit(
                request.prompt,
                max_tokens=request.max_tokens if tells else None,
                expected_tokens=request.answer_tokens if self.known else None,
                waited=waited,
            )
        elif sequence.state == "swapped":
            return self._answer(request, controller.try_swap_in(sequence, waited=waited))
        else:
            answer = controller.try_resume(sequence, waited=waited)
        return self._answer(request, answer)

    def _answer(self, request: Request, answer: T | Wait | Never) -> T | None:
        if isinstance(answer, Wait):
            self._waited[request.index] = answer
            return None
        self._waited.pop(request.index, None)
        if isinstance(answer, Never):
            raise NeverFits(answer.needed, answer.usable)
        return answer

    def finished(self, engine: Engine, request: Request) -> None:
        pass

    def preempted(self, engine: Engine, request: Request) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Recompute:
    """This request gives its blocks back now; what it had is computed again when it returns."""

    request: Request


@dataclass(frozen=True, slots=True)
class Swap:
    """This request's blocks go to the host; the rows that do not fit wait until they are there.

    Where the host has no room, and where nobody could go on meanwhile, it is computed again instead.
    """

    request: Request


@dataclass(frozen=True, slots=True)
class Stall:
    """The rows that do not fit are left out of this step and keep their blocks. Some row has to be left."""


Answer: TypeAlias = Recompute | Swap | Stall


class Victims(Protocol):
    """Who gives way when the rows of a step do not fit."""

    @property
    def name(self) -> str:
        """What tables and pictures call it."""

    def choose(self, engine: Engine, left_out: int) -> Answer:
        """What to do. `left_out` rows of the step do not fit, and at least one request runs."""


How: TypeAlias = Literal["recompute", "swap", "stall"]


@dataclass(frozen=True, slots=True)
class Newest:
    """Whoever was let in last, by recompute or by swap.

    With `stall` nobody gives way as long as some row of the step fits: the others wait for a finish.
    """

    how: How = "recompute"

    @property
    def name(self) -> str:
        return self.how

    def choose(self, engine: Engine, left_out: int) -> Answer:
        if self.how == "stall" and left_out < engine.num_planned_rows:
            return Stall()
        newest = engine.running[-1]
        return Swap(newest) if self.how == "swap" else Recompute(newest)


@dataclass(frozen=True, slots=True)
class Advised:
    """Whoever `Pager.choose_victims` names first, in the way that it names; by age, cost, or what is lost."""

    policy: Literal["newest", "cheapest", "least_progress"] = "newest"
    cost: RecoveryCost | None = None
    spare_after: int = 2

    @property
    def name(self) -> str:
        return self.policy

    def choose(self, engine: Engine, left_out: int) -> Answer:
        running = [(each, sequence) for each in engine.running if (sequence := each.sequence) is not None]
        # One at a time: the step may fit without the next one, whose own need has gone with the last.
        first, *_ = engine.pager.choose_victims(
            engine.available_blocks + 1,
            self.policy,
            candidates=[sequence for _, sequence in running],
            cost=self.cost,
            spare_after=self.spare_after,
            keep=0,
        )
        victim, _ = running[first.candidate_index]
        return Swap(victim) if first.action == "swap" else Recompute(victim)


def parse_admission(text: str) -> Admission:
    """`first-come`, `watermark:5%`, `limit:64`, `reserve`, `adaptive:28%` or `known:28%`; ValueError otherwise.

    `adaptive` and `known` without a risk take that of `kvpager.Admission`.
    """
    kind, _, value = text.strip().partition(":")
    try:
        if kind == "first-come" and not value:
            return FirstCome()
        if kind == "reserve" and not value:
            return ReserveEverything()
        if kind in ("adaptive", "known") and not value:
            return Adaptive(known=kind == "known")
        if kind in ("adaptive", "known", "watermark") and re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,12})?%", value):
            share = float(Fraction(value[:-1]) / 100)
            return Watermark(share) if kind == "watermark" else Adaptive(share, known=kind == "known")
        if kind == "limit" and re.fullmatch(r"[0-9]{1,9}", value):
            return ConcurrencyLimit(int(value))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    raise ValueError(
        f"policy {text.strip()!r}: expected first-come, watermark:5%, limit:64, limit:1.2x, reserve, adaptive,"
        " adaptive:28%, known or known:28%"
    )
