"""Traces in memory for the tests of `kvpager.diagnose`: token traces from a generator's kinds, or by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpager.cost import CostModel
from kvpager.diagnose import Case
from kvpager.simulate import Speed
from kvpager.traces import Ragged, Trace
from kvpager.workload import KINDS, arrivals, token_requests

SPEED = Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))


def token_trace(
    prompts: Sequence[Any], *, output: int = 20, every_ms: float = 100.0, answers: Sequence[Any] | None = None
) -> Trace:
    """A token trace as a reader makes it; without answers only their lengths are known."""
    count = len(prompts)
    nothing: list[list[int]] = [[] for _ in range(count)]
    return Trace(
        path="by-hand.jsonl",
        form="tokens",
        block_size=None,
        lines=np.arange(1, count + 1),
        timestamps_ms=np.arange(count, dtype=np.float64) * every_ms,
        input_lengths=np.array([len(prompt) for prompt in prompts], np.int64),
        output_lengths=np.array([output if answers is None else len(a) for a in (answers or nothing)], np.int64),
        service_ms=np.full(count, np.nan),
        prompts=ragged(prompts),
        outputs=ragged(nothing if answers is None else answers),
        has_output=np.full(count, answers is not None),
    )


def ragged(rows: Sequence[Any]) -> Ragged:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Ragged(np.concatenate([np.asarray(row, np.int32) for row in rows]), offsets)


def length_trace(inputs: Sequence[int], outputs: Sequence[int]) -> Trace:
    """Lengths only, all at once."""
    count = len(inputs)
    empty = Ragged(np.empty(0, np.int32), np.zeros(count + 1, np.int64))
    return Trace(
        *("lengths.jsonl", "lengths", 512, np.arange(1, count + 1), np.zeros(count)),
        *(np.array(inputs, np.int64), np.array(outputs, np.int64), np.full(count, np.nan)),
        *(empty, empty, np.zeros(count, np.bool_)),
    )


def made(kind: str, seed: int = 0, **shape: Any) -> Trace:
    """What `kvpager generate KIND` writes, read back."""
    chats = KINDS[kind](**shape).chats(seed)
    requests = list(token_requests(chats, arrivals(chats)))
    trace = token_trace([r.tokens for r in requests], answers=[r.output_tokens for r in requests])
    at = np.array([r.timestamp_ms for r in requests], np.float64)
    return Trace(**{name: getattr(trace, name) for name in Trace.__slots__} | {"timestamps_ms": at, "path": kind})


def case(trace: Trace, **engine: Any) -> Case:
    engine.setdefault("block_size", 16)
    return Case(trace, speed=SPEED, **engine)
