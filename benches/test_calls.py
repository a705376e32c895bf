"""Every measured operation, kvpager beside its pure-Python reference, under pytest-benchmark.

    pytest benches --benchmark-group-by=group --benchmark-columns=min,median,rounds

Measured on 2026-11-30 (AMD EPYC, 2 shared cores, Python 3.11.7, numpy 2.4.6); the table of all operations, with floors
and goals, is printed by `kvpager bench` and kept in docs/performance.md. Conclusion: a cached prompt costs what
comparing its tokens costs, a new one what copying them costs; in the reference the Python objects of each block cost
hundreds of times that.

Each operation asserts its own result (hits, evictions) before and while it is timed: see `kvpager.benchmarks`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvpager.benchmarks import OPERATIONS, Settings, Subject

# The flat-cost rows compare two pools, of which one has 10 M blocks: they belong to `kvpager bench`, which has the
# memory and time.
KEYS = [key for key in OPERATIONS if not key.endswith(("_small", "_large"))]


@cache
def subject(name: str) -> Subject:
    return Subject.core(Settings()) if name == "core" else Subject.reference(Settings())


@pytest.mark.parametrize("name", ["core", "reference"])
@pytest.mark.parametrize("key", KEYS)
def test_call(benchmark: Any, key: str, name: str) -> None:
    operation = OPERATIONS[key](subject(name))
    benchmark.group = key
    benchmark.extra_info["calls"] = operation.calls
    samples: list[tuple[Any, Any]] = []

    def prepare() -> tuple[tuple[Any], dict[str, Any]]:
        # The sample before is undone here, outside the timed region.
        if samples:
            operation.clean(*samples.pop())
        return (operation.prepare(),), {}

    def run(state: Any) -> None:
        samples.append((state, operation.run(state)))

    rounds = min(operation.samples_max, 30 if name == "core" else 3)
    benchmark.pedantic(run, setup=prepare, rounds=rounds)
    operation.clean(*samples.pop())
