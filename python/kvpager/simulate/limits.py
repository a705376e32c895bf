"""The best fixed limit, found by trying: what capacity planners do by hand, once for each load."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..cost import Speed
from ..errors import ConfigError
from .chunks import Chunk
from .engine import Engine, EngineConfig, Progress
from .load import Load
from .policies import Admission, ConcurrencyLimit, Victims, parse_admission
from .record import Percentiles, Result, percentiles


def idle_itl(load: Load, speed: Speed) -> Percentiles:
    """The time between tokens on an engine that serves each request alone."""
    # A token behind n others comes of a step that reads n: all but the first one of each answer.
    first, behind = load.input_lengths + 1, load.input_lengths + load.output_lengths
    edges = np.zeros(int(behind.max()) + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, behind, -1)
    tokens = np.cumsum(edges)
    contexts = np.flatnonzero(tokens)
    seconds = np.array([speed.token_alone_s(context) for context in contexts.tolist()])
    return percentiles(seconds, tokens[contexts])


@dataclass(frozen=True, slots=True)
class BestLimit:
    """The `ConcurrencyLimit` of most requests a second among those whose p99 ITL is at most `stretch` idle engines'.

    The search takes the p99 for one that grows with the limit: it tries some ten limits.
    """

    stretch: float

    def __post_init__(self) -> None:
        if not 1 <= self.stretch < math.inf:
            raise ConfigError(f"a limit at {self.stretch} times the ITL of an idle engine: expected at least 1")

    @property
    def name(self) -> str:
        return f"limit at {self.stretch:g}x"

    def find(
        self,
        load: Load,
        config: EngineConfig,
        speed: Speed,
        victims: Victims | None = None,
        chunk: Chunk | None = None,
        progress: Progress | None = None,
    ) -> tuple[int, Result]:
        """The limit and what it made of the load."""
        # The last digits of a clock are not those of a formula.
        bound = self.stretch * idle_itl(load, speed).p99 * (1 + 1e-9)
        tried: dict[int, Result] = {}

        def good(limit: int) -> bool:
            if limit not in tried:
                engine = Engine(load, config, speed, ConcurrencyLimit(limit), victims, chunk)
                tried[limit] = engine.run(_part(progress, len(tried)))
            # An answer of one token has nothing between its tokens, and is no worse for it.
            return not tried[limit].itl.p99 > bound

        most = min(config.max_running, load.num_requests)
        below, above = 0, most + 1  # one that is good, one that is not
        # From about where the contexts alone take the time that there is.
        limit = self._guess(load, speed, bound, most)
        while above - below > 1:
            if good(limit):
                below, limit = limit, min(2 * limit, most) if above > most else (limit + above) // 2
            else:
                above, limit = limit, (below + limit) // 2
        best = max(filter(good, list(tried)), key=lambda one: (tried[one].requests_per_s, -one), default=1)
        return best, tried[best]

    def _guess(self, load: Load, speed: Speed, bound: float, most: int) -> int:
        context = float((load.input_lengths + load.output_lengths / 2).mean())
        per_request = context * speed.kv_token_s
        room = bound - speed.overhead_s - speed.weights_s
        return max(1, min(most, int(room / per_request))) if per_request and room > 0 else 1


def _part(progress: Progress | None, number: int) -> Progress | None:
    """Each try is half of what is left, since nobody knows how many there will be."""
    if progress is None:
        return None
    left = 0.5**number
    return lambda done, total: progress(int(total * (1 - left + left / 2 * done / total)), total)


def parse_policy(text: str) -> Admission | BestLimit:
    """What `parse_admission` takes, or `limit:1.2x`; ValueError otherwise."""
    found = re.fullmatch(r"limit:([0-9]{1,3}(?:\.[0-9]{1,12})?)x", text.strip())
    if found is None:
        return parse_admission(text)
    try:
        return BestLimit(float(Fraction(found[1])))
    except ConfigError as error:
        raise ValueError(str(error)) from None
