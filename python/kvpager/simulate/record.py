"""What a run is measured by: latencies, counters, and the pool over time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 500
"""Points of a timeline; when there are twice as many, every other one goes."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds; NaN where there was nothing to measure."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The pool and the requests over simulated time, one entry a sample; blocks after a step."""

    seconds: NDArray[np.float64]
    steps: NDArray[np.int64]
    active: NDArray[np.int64]
    cached: NDArray[np.int64]
    free: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    """So far."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one engine made of a load.

    Tokens: ``computed = useful - hit + recomputed``, always.
    """

    load: str
    admission: str
    victims: str
    chunk: str
    requests: int
    steps: int
    seconds: float
    useful_tokens: int
    """Prompts and answers, less each answer's last token, which needs no KV."""
    computed_tokens: int
    recomputed_tokens: int
    """Computed before, and again after a preemption."""
    hit_tokens: int
    """Found in the pool, not counting what a preempted request finds of its own."""
    queried_tokens: int
    output_tokens: int
    preemptions: int
    preemptions_max: int
    """Most preemptions of one request."""
    swaps: int
    stalled_rows: int
    """Rows left out of a step for want of a block, summed over the steps."""
    running_mean: float
    """Requests in a step."""
    active_mean: float
    """Share of the pool's blocks that somebody holds, over time."""
    lower_bound_steps: int
    """Steps that this pool needs at least, if nothing is shared."""
    ttft: Percentiles
    """From arrival to the first token of the answer."""
    itl: Percentiles
    """From each token of an answer to the next one, waits and preemptions included."""
    timeline: Timeline
    load_factor: float | None = None
    """Rate of the requests, as a share of `capacity_per_s`; None: as the load has it."""
    capacity_per_s: float | None = None
    """Requests a second that the engine serves when its queue never empties, where that was asked for."""

    @property
    def tax(self) -> float:
        """Recomputed among all computed tokens."""
        return self.recomputed_tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found, at first admissions."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def useful_tokens_per_s(self) -> float:
        """Useful tokens a simulated second, whether computed or found."""
        return self.useful_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_s(self) -> float:
        """Finished requests a simulated second."""
        return self.requests / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON; NaN becomes None."""
        fields = {name: value for name, value in asdict(self).items() if name != "timeline"}
        for name in ("ttft", "itl"):
            fields[name] = {key: None if np.isnan(value) else value for key, value in fields[name].items()}
        derived = ("tax", "hit_rate", "useful_tokens_per_s", "requests_per_s")
        fields |= {name: getattr(self, name) for name in derived}
        timeline = {name: values.tolist() for name, values in asdict(self.timeline).items()}
        return fields | {"timeline": timeline}


class Gaps:
    """Times between the tokens of answers, with how often each occurred: rows that go on together share one."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, seconds: float, times: int) -> None:
        self._counts[seconds] += times

    def add_each(self, seconds: NDArray[np.float64]) -> None:
        self._counts.update(seconds.tolist())

    def percentiles(self) -> Percentiles:
        values = np.fromiter(self._counts.keys(), np.float64, len(self._counts))
        weights = np.fromiter(self._counts.values(), np.int64, len(self._counts))
        return percentiles(values, weights)


def percentiles(values: NDArray[np.float64], weights: NDArray[np.int64] | None = None) -> Percentiles:
    """The smallest values that 50, 90 and 99 % of all do not exceed."""
    if not len(values):
        return Percentiles(np.nan, np.nan, np.nan)
    order = np.argsort(values, kind="stable")
    below = np.cumsum(np.ones(len(values), np.int64) if weights is None else weights[order])
    # Counted in integers: a share such as 0.9 is not exact, and the rank beside it would be taken.
    ranks = [-(-int(below[-1]) * percent // 100) for percent in (50, 90, 99)]
    found = values[order[np.searchsorted(below, ranks)]]
    return Percentiles(*(float(value) for value in found))


class Recorder:
    """What an engine counts as it goes."""

    def __init__(self, num_requests: int) -> None:
        self.steps = self.row_steps = 0
        self.computed_tokens = self.recomputed_tokens = 0
        self.hit_tokens = self.queried_tokens = 0
        self.output_tokens = 0
        self.preemptions = self.preemptions_max = self.swaps = self.stalled_rows = 0
        self.ttft_s = np.full(num_requests, np.nan)
        self.finished_s = np.full(num_requests, np.nan)
        """When each request had its whole answer."""
        self.gaps = Gaps()
        self._busy_s = self._active_block_s = 0.0
        # The timeline: every `stride`-th step, and `stride` doubles as the run gets longer.
        self._stride = self._next_sample = 1
        self._samples: list[tuple[float, int, int, int, int, int, int, int]] = []

    def step(
        self, now_s: float, seconds: float, rows: int, tokens: int, active: int, cached: int, free: int, waiting: int
    ) -> None:
        """A step of so many rows and tokens is over; the pool and the queue as it leaves them."""
        self.steps += 1
        self.row_steps += rows
        self.computed_tokens += tokens
        self._busy_s += seconds
        self._active_block_s += active * seconds
        if self.steps >= self._next_sample:
            self._samples.append((now_s, self.steps, active, cached, free, rows, waiting, self.preemptions))
            if len(self._samples) >= 2 * MAX_SAMPLES:
                self._samples = self._samples[1::2]
                self._stride *= 2
            self._next_sample = self.steps + self._stride

    def result(self, *, num_blocks: int, **known: Any) -> Result:
        """All of it, with what the engine knows beside."""
        counted = (
            *("steps", "computed_tokens", "recomputed_tokens", "hit_tokens", "queried_tokens", "output_tokens"),
            *("preemptions", "preemptions_max", "swaps", "stalled_rows"),
        )
        columns = np.array(self._samples, np.float64).reshape(-1, 8)
        return Result(
            **known,
            **{name: getattr(self, name) for name in counted},
            running_mean=self.row_steps / self.steps,
            active_mean=self._active_block_s / (self._busy_s * num_blocks),
            ttft=percentiles(self.ttft_s),
            itl=self.gaps.percentiles(),
            timeline=Timeline(columns[:, 0], *columns[:, 1:].T.astype(np.int64)),
        )
