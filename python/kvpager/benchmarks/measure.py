"""Timing one operation, and the floors: what the machine needs for the bare bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENS_128K = 131_072


def _no_state() -> None:
    return None


def _no_cleaning(state: Any, result: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Operation:
    """`run(prepare())` is one sample; only `run` is timed, `clean(state, result)` undoes what it did."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = _no_state
    clean: Callable[[Any, Any], None] = _no_cleaning
    calls: int = 1
    """Calls in one run: the time is divided by it."""
    samples_max: int = 20_000
    """For operations that use up what they measure."""


def best_ns(operation: Operation, seconds: float = 0.5, samples_min: int = 5) -> float:
    """The fastest of many samples, per call.

    The minimum, because everything that disturbs a sample (another process, an interrupt, a cold cache) only adds to
    it. The garbage collector is off meanwhile, as in `timeit`.
    """
    _warm_heap()
    best = float("inf")
    deadline = time.monotonic() + seconds
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for sample in range(operation.samples_max):
            state = operation.prepare()
            before = time.perf_counter_ns()
            result = operation.run(state)
            elapsed = time.perf_counter_ns() - before
            operation.clean(state, result)
            best = min(best, elapsed / operation.calls)
            if sample + 1 >= samples_min and time.monotonic() > deadline:
                break
    finally:
        if collecting:
            gc.enable()
    return best


def _warm_heap() -> None:
    """Make the allocator keep what is freed, as it does in a process that has run for a while.

    glibc maps large blocks afresh, at a page fault for each 4 KiB, until it has seen a larger one freed.
    """
    bytearray(31 << 20)


def floors(seconds: float = 0.5, seed: int = 0) -> dict[str, float]:
    """Nanoseconds for the int32 tokens of a 128k prompt: to compare them once, and to copy them once. And to copy the
    block ids of 1,024 rows of 512 blocks."""
    tokens = np.random.default_rng(seed).integers(0, 32_000, TOKENS_128K, dtype=np.int32)
    # Equality of two bytes objects is one memcmp; numpy's own comparison writes a result array and is slower.
    left, right = tokens.tobytes(), tokens.tobytes()
    pages = np.zeros(1024 * 512, np.int32)
    other_pages = np.zeros_like(pages)
    target = np.empty_like(tokens)
    return {
        "memcmp_128k": best_ns(Operation(lambda _: left == right), seconds),
        "memcpy_128k": best_ns(Operation(lambda _: np.copyto(target, tokens)), seconds),
        "memcpy_pages": best_ns(Operation(lambda _: np.copyto(other_pages, pages)), seconds),
    }
