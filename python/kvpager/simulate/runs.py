"""Several policies, at several rates, on the same requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from ..cost import Speed
from .chunks import Chunk, Fixed
from .engine import Engine, EngineConfig, Progress
from .limits import BestLimit
from .load import Load
from .policies import Admission, ReserveEverything, Victims
from .record import Result


def capacity(load: Load, config: EngineConfig, speed: Speed, progress: Progress | None = None) -> float:
    """Requests a second that an engine serves when its queue never empties: the rate that just fills the pool.

    All requests wait at the door and are let in as with `ReserveEverything`, so that nothing is computed twice. The
    first and the last tenth to finish are not counted, as the pool fills and empties meanwhile.
    """
    load = replace(load.at_once(), max_tokens=None)
    engine = Engine(load, config, speed, ReserveEverything())
    engine.run(progress)
    finished = np.sort(engine.record.finished_s)
    tenth = len(finished) // 10
    counted = finished[tenth : len(finished) - tenth]
    seconds = float(counted[-1] - counted[0])
    return (len(counted) - 1) / seconds if seconds else len(finished) / float(finished[-1])


WHOLE_STEP = Fixed()


@dataclass(frozen=True, slots=True)
class Run:
    """One engine and the rate at which it is asked, as a share of its capacity; None: as the load has it."""

    admission: Admission | BestLimit
    victims: Victims | None = None
    """None: as the admission has it."""
    load_factor: float | None = None
    chunk: Chunk = WHOLE_STEP


def compare(
    load: Load,
    config: EngineConfig,
    speed: Speed,
    runs: Sequence[Run],
    progress: Progress | None = None,
) -> Iterator[Result]:
    """One result a run, in their order; `progress` counts the requests of all runs together.

    A policy is for one run: each run takes a copy of its own.
    """
    scaled = [run.load_factor for run in runs if run.load_factor is not None]
    passes = len(runs) + bool(scaled)

    def report(number: int) -> Progress | None:
        if progress is None:
            return None
        return lambda done, total: progress(number * total + done, passes * total)

    full = capacity(load, config, speed, report(0)) if scaled else 0.0
    for number, run in enumerate(runs, bool(scaled)):
        asked = load if run.load_factor is None else load.at_rate(run.load_factor * full)
        if isinstance(run.admission, BestLimit):
            _, result = run.admission.find(asked, config, speed, run.victims, run.chunk, report(number))
        else:
            policy = deepcopy(run.admission)
            result = Engine(asked, config, speed, policy, run.victims, run.chunk).run(report(number))
        yield replace(result, load_factor=run.load_factor, capacity_per_s=full or None)
