"""The patient: a part of a trace, the engine that serves it, and runs of both under changed settings.

Every number of a diagnosis comes from here. With a pool it is a run of `kvpager.simulate`; without one it is a replay
in a pool without end, which knows of hits and nothing of time, room or preemptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..blocksize.sharing import replay_shared
from ..errors import ConfigError
from ..simulate import (
    Adaptive,
    Admission,
    Engine,
    EngineConfig,
    FirstCome,
    Load,
    Result,
    Speed,
    Watermark,
    load_from_trace,
)
from ..traces import Ragged, Trace

Progress = Callable[[int, int], None]
DEFAULT_REQUESTS = 2000
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What a change may change. `moved` stands for prompts whose varying front is behind the text they share."""

    block_size: int
    max_running: int
    watermark: float
    eviction: str
    moved: bool = False
    pool: float = 1.0
    """Memory of the pool, as a multiple of what there is."""
    risk: float | None = None
    """Of `kvpager.Admission`, where that lets in; None: whoever fits comes in, behind the watermark."""


@dataclass(frozen=True, slots=True)
class Measures:
    """One run in the numbers that matter here; None where there is no pool, or nothing to measure."""

    computed_tokens: int
    hit_tokens: int
    prompt_tokens: int
    hit_rate: float
    """Of the prompt tokens."""
    tax: float | None = None
    preemptions: int | None = None
    preemptions_max: int | None = None
    usage_mean: float | None = None
    usage_median: float | None = None
    usage_max: float | None = None
    running_mean: float | None = None
    steps: int | None = None
    seconds: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None


class PreemptedError(Exception):
    """Somebody was preempted, in a run that was to find out whether anybody is."""


@dataclass(frozen=True, slots=True)
class _UntilPreempted(Watermark):
    def preempted(self, engine: Engine, request: object) -> None:
        raise PreemptedError


class Case:
    """A trace, or its busiest part, and what serves it. Runs are kept: asking twice costs nothing."""

    def __init__(
        self,
        trace: Trace,
        *,
        block_size: int,
        num_blocks: int | None = None,
        speed: Speed | None = None,
        max_running: int = 256,
        max_step_tokens: int = 8192,
        watermark: float = 0.0,
        eviction: str = "lru",
        requests: int = DEFAULT_REQUESTS,
        progress: Progress | None = None,
    ) -> None:
        if num_blocks is not None and speed is None:
            raise ConfigError("a pool is served by an engine, and nothing says how fast: speed is None")
        self.first = busiest(trace, requests)
        self.whole = trace.num_requests
        self.trace = part(trace, self.first, min(requests, trace.num_requests))
        self.as_it_is = Setting(block_size, max_running, watermark, eviction)
        self.num_blocks, self.speed = num_blocks, speed
        self.max_step_tokens = max_step_tokens
        self.moved_trace: Trace | None = None
        """Set by who finds a varying front."""
        self.progress = progress
        self._loads: dict[bool, Load] = {}
        self._runs: dict[tuple[Setting, int | None], Result] = {}
        self._shared: dict[tuple[bool, int], int] = {}
        if num_blocks is not None:
            self._check_fits(num_blocks)

    @property
    def has_pool(self) -> bool:
        return self.num_blocks is not None

    def blocks(self, setting: Setting) -> int:
        """Blocks of the pool: the same memory at every block size."""
        assert self.num_blocks is not None
        return int(self.num_blocks * self.as_it_is.block_size * setting.pool) // setting.block_size

    def trace_of(self, setting: Setting) -> Trace:
        if not setting.moved:
            return self.trace
        assert self.moved_trace is not None
        return self.moved_trace

    def measure(self, setting: Setting) -> Measures:
        """A run of the engine where there is a pool, else a replay in one without end."""
        if self.has_pool:
            return measures(self.run(setting), self.blocks(setting))
        trace = self.trace_of(setting)
        prompt_tokens = int(trace.input_lengths.sum())
        hits = self.shared_tokens(setting)
        useful = int((trace.input_lengths + np.maximum(trace.output_lengths, 1) - 1).sum())
        return Measures(useful - hits, hits, prompt_tokens, hits / prompt_tokens)

    def run(self, setting: Setting, num_blocks: int | None = None) -> Result:
        """Serve the requests; `num_blocks` in place of the pool that there is."""
        key = (setting, num_blocks)
        if key not in self._runs:
            self._runs[key] = self._engine(setting, _admission(setting), num_blocks).run(self.progress)
        return self._runs[key]

    def preempts(self, setting: Setting) -> bool:
        """Whether anybody is preempted; the run ends with the first who is."""
        if (setting, None) in self._runs:
            return self._runs[setting, None].preemptions > 0
        engine = self._engine(setting, _UntilPreempted(setting.watermark), None)
        try:
            self._runs[setting, None] = engine.run(self.progress)
        except PreemptedError:
            for request in [*engine.running, *engine.waiting]:
                if request.sequence is not None:
                    request.sequence.release()
            return True
        return False

    def shared_tokens(self, setting: Setting) -> int:
        """Prompt tokens that are found in a pool without end. Of an id trace only its own blocks can be told."""
        trace = self.trace_of(setting)
        size = trace.block_size if trace.form == "ids" else setting.block_size
        if trace.form == "lengths" or size is None:
            return 0
        key = (setting.moved, size)
        if key not in self._shared:
            self._shared[key] = replay_shared(trace, size, None, self.progress).hit_blocks * size
        return self._shared[key]

    def run_of(self, trace: Trace) -> Result:
        """Other requests, served as it is."""
        setting = self.as_it_is
        return self._engine(setting, _admission(setting), None, load_from_trace(trace)).run(self.progress)

    def load(self, setting: Setting) -> Load:
        if setting.moved not in self._loads:
            self._loads[setting.moved] = load_from_trace(self.trace_of(setting))
        return self._loads[setting.moved]

    def _engine(
        self, setting: Setting, admission: Admission, num_blocks: int | None, load: Load | None = None
    ) -> Engine:
        assert self.speed is not None
        config = EngineConfig(
            num_blocks=num_blocks or self.blocks(setting),
            block_size=setting.block_size,
            max_running=setting.max_running,
            max_step_tokens=self.max_step_tokens,
            eviction=setting.eviction,
        )
        # The time to read or copy a block goes with its size.
        speed = replace(self.speed, block_s=self.speed.block_s * setting.block_size / self.as_it_is.block_size)
        return Engine(load or self.load(setting), config, speed, admission)

    def _check_fits(self, num_blocks: int) -> None:
        needed = self.load(self.as_it_is).blocks_needed(self.as_it_is.block_size)
        longest = int(np.argmax(needed))
        if needed[longest] > num_blocks:
            problem = (
                f"this request needs {needed[longest]:,} blocks of {self.as_it_is.block_size} tokens before it ends"
            )
            raise self.trace.error(longest, None, f"{problem} and would never fit in a pool of {num_blocks:,}")


def _admission(setting: Setting) -> Admission:
    if setting.risk is not None:
        return Adaptive(setting.risk, watermark=setting.watermark)
    return Watermark(setting.watermark) if setting.watermark else FirstCome()


def measures(result: Result, num_blocks: int) -> Measures:
    """A run of the engine in short."""

    def known(value: float) -> float | None:
        return None if math.isnan(value) else value

    return Measures(
        computed_tokens=result.computed_tokens,
        hit_tokens=result.hit_tokens,
        prompt_tokens=result.queried_tokens,
        hit_rate=result.hit_rate,
        tax=result.tax,
        preemptions=result.preemptions,
        preemptions_max=result.preemptions_max,
        usage_mean=result.active_mean,
        usage_median=float(np.median(result.timeline.active)) / num_blocks,
        usage_max=int(result.timeline.active.max()) / num_blocks,
        running_mean=result.running_mean,
        steps=result.steps,
        seconds=result.seconds,
        ttft_p50_s=known(result.ttft.p50),
        ttft_p99_s=known(result.ttft.p99),
        itl_p50_s=known(result.itl.p50),
        itl_p99_s=known(result.itl.p99),
    )


def busiest(trace: Trace, requests: int) -> int:
    """Where the part of so many requests begins that brings most tokens a second."""
    if requests >= trace.num_requests:
        return 0
    tokens = np.concatenate([[0], np.cumsum(trace.input_lengths + trace.output_lengths)])
    at = trace.timestamps_ms
    seconds = np.maximum(at[requests - 1 :] - at[: len(at) - requests + 1], 1.0)
    return int(np.argmax((tokens[requests:] - tokens[:-requests]) / seconds))


def part(trace: Trace, first: int, count: int) -> Trace:
    """Consecutive requests of a trace."""
    if count == trace.num_requests:
        return trace
    return chosen(trace, np.arange(first, first + count))


def chosen(trace: Trace, which: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Trace:
    """Some requests of a trace, in their order."""
    columns = ("lines", "timestamps_ms", "input_lengths", "output_lengths", "service_ms", "has_output")
    return replace(
        trace,
        **{name: getattr(trace, name)[which] for name in columns},
        prompts=_rows(trace.prompts, which),
        outputs=_rows(trace.outputs, which),
    )


def _rows(rows: Ragged, which: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Ragged:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows.lengths[which])])
    kept = [rows.row(index) for index in which.tolist()]
    return Ragged(np.concatenate(kept) if kept else np.empty(0, np.int32), offsets)
