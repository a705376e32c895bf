"""The measured operations do what they say: each asserts its own hits and evictions; here they run once, in small."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from kvpager.benchmarks import (
    OPERATIONS,
    ROWS,
    Operation,
    Row,
    Settings,
    Subject,
    best_ns,
    bytes_per_cached_block,
    floors,
)
from kvpager.cli import bench

SMALL = Settings(num_blocks=60_000, small_blocks=2_000, large_blocks=3_000, constructed_blocks=10_000, rows_divisor=16)


@cache
def subject(name: str) -> Subject:
    return Subject.core(SMALL) if name == "core" else Subject.reference(SMALL)


@pytest.mark.parametrize("key", OPERATIONS)
@pytest.mark.parametrize("name", ["core", "reference"])
def test_operations(name: str, key: str) -> None:
    assert 0 < best_ns(OPERATIONS[key](subject(name)), seconds=0.0, samples_min=2) < 60e9


def test_the_pools_are_whole_after_all_that() -> None:
    for name in ("core", "reference"):
        assert subject(name).used.check() == []
        assert subject(name).used.stats().running_sequences == 0


def test_free_blocks_are_scattered() -> None:
    pager = subject("core").scattered(6400)
    with pager.admit(subject("core").prompt(6400 * 16)) as sequence:
        ids = sequence.block_ids.tolist()
    neighbours = sum(b - a == 1 for a, b in itertools.pairwise(ids))
    assert neighbours < 6400 * 0.1


def test_best_ns_takes_the_fastest_and_undoes_every_sample() -> None:
    undone = []
    operation = Operation(lambda s: s + 1, lambda: 7, lambda state, result: undone.append((state, result)), calls=10)
    assert 0 < best_ns(operation, seconds=0.0, samples_min=3) < 1e6
    assert undone == [(7, 8)] * 3
    undone.clear()
    best_ns(Operation(lambda _: None, clean=lambda s, r: undone.append((0, 0)), samples_max=4), seconds=5.0)
    assert len(undone) == 4


def test_floors() -> None:
    assert all(1e3 < value < 1e8 for value in floors(seconds=0.02).values())


@pytest.mark.parametrize("shape", ["chains", "mixed"])
def test_memory_a_block(shape: str) -> None:
    found = bytes_per_cached_block(shape, num_blocks=50_000)
    if found is None:
        pytest.skip("this system does not tell the resident memory of a process")
    assert 64 <= found < 300


def test_columns_without_the_reference_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("append", "append", "us", 0.06, "<= 0.08 us", True, None, None, None)
    bench._print([row], reference=False)
    text = capsys.readouterr().out
    assert text.splitlines()[2].split() == ["call", "unit", "kvpager", "x", "floor", "goal", "met"]
    assert "reference" not in text
    assert "x floor:" not in text
    bench._print([replace(row, times_floor=1.5, reference=6.0, reference_ratio=100.0)], reference=True)
    text = capsys.readouterr().out
    assert "x floor: how many times" in text
    assert text.splitlines()[2].split()[-2:] == ["reference", "ratio"]
    assert "100.0x" in text


def test_the_command_prints_every_row_it_was_asked_for() -> None:
    command = [sys.executable, "-m", "kvpager", "bench", "--quick", "--only", "append,hit_128k,replay", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert set(result) == {"command", "version", "seed", "quick", "machine", "rows"}
    assert [row["key"] for row in result["rows"]] == ["hit_128k", "append", "replay"]
    for row in result["rows"]:
        assert set(row) == {
            "key",
            "what",
            "unit",
            "value",
            "goal",
            "met",
            "times_floor",
            "reference",
            "reference_ratio",
        }
        assert row["value"] > 0
        assert row["reference"] > 0
        assert row["reference_ratio"] > 1
        assert isinstance(row["met"], bool)
    assert set(ROWS) >= {row["key"] for row in result["rows"]}
