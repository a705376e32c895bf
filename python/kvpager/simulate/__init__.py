"""A continuous-batching engine without a model, to see what admission and victim choice make of a load.

    from kvpager.cost import CostModel
    from kvpager.simulate import Engine, EngineConfig, Speed, Watermark, load_from_trace
    from kvpager.traces import read_trace

    load = load_from_trace(read_trace("trace.jsonl"))
    speed = Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))
    result = Engine(load, EngineConfig(num_blocks=20_000), speed, Watermark(0.05)).run()
    print(result.steps, result.preemptions, result.tax, result.ttft.p99)

It drives a real `kvpager.Pager` through the calls that a server makes, so hits, evictions, refusals and recomputed
tokens are the pager's own. Only time is modelled (`speed`): nothing sleeps, and the same load, configuration and
policies give the same result. `engine` says what a step does and in which order; `policies` and `chunks` say what may
be decided and how to write a policy; `load` has the requests, from a trace or from `scenarios`; `runs`
compares, `limits` finds the best fixed limit.
"""

from ..cost import Speed
from .chunks import Chunk, Fixed, Roofline, Slowdown, TimeTarget, parse_chunk
from .engine import Engine, EngineConfig, SimulationError
from .limits import BestLimit, idle_itl, parse_policy
from .load import BlockIds, Load, SystemPrompts, Texts, TokenTexts, load_from_trace
from .policies import (
    Adaptive,
    Admission,
    Advised,
    Answer,
    ConcurrencyLimit,
    FirstCome,
    Newest,
    Recompute,
    ReserveEverything,
    Stall,
    Swap,
    Victims,
    Watermark,
    parse_admission,
)
from .record import Percentiles, Result, Timeline
from .rows import Request
from .runs import Run, capacity, compare
from .scenarios import REQUESTS, SCENARIOS

__all__ = [
    "REQUESTS",
    "SCENARIOS",
    "Adaptive",
    "Admission",
    "Advised",
    "Answer",
    "BestLimit",
    "BlockIds",
    "Chunk",
    "ConcurrencyLimit",
    "Engine",
    "EngineConfig",
    "FirstCome",
    "Fixed",
    "Load",
    "Newest",
    "Percentiles",
    "Recompute",
    "Request",
    "ReserveEverything",
    "Result",
    "Roofline",
    "Run",
    "SimulationError",
    "Slowdown",
    "Speed",
    "Stall",
    "Swap",
    "SystemPrompts",
    "Texts",
    "TimeTarget",
    "Timeline",
    "TokenTexts",
    "Victims",
    "Watermark",
    "capacity",
    "compare",
    "idle_itl",
    "load_from_trace",
    "parse_admission",
    "parse_chunk",
    "parse_policy",
]
