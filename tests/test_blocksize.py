"""Block sizes by other means: brute force over prefixes, real block tables, and what has to hold for every load."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager import Pager
from kvpager.blocksize import LengthDistribution, Load, measure
from kvpager.blocksize.measure import gathers_mean
from kvpager.blocksize.sharing import merged
from kvpager.replay import TokenChains, build_columns
from kvpager.traces import Trace, read_trace, write_trace
from kvpager.workload import KINDS, arrivals, token_requests

SMALL: dict[str, dict[str, Any]] = {
    "chat": {"sessions": 15},
    "agent": {"sessions": 3, "max_context": 8000},
    "burst": {"sessions": 60, "burst": 10.0},
    "varfront": {"sessions": 30, "front": 0},
}
cases = pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in (0, 1)])


def trace_of(kind: str, seed: int, tmp_path: Path) -> Trace:
    chats = KINDS[kind](**SMALL[kind]).chats(seed)
    write_trace(tmp_path / "t.jsonl", token_requests(chats, arrivals(chats)))
    return read_trace(tmp_path / "t.jsonl")


def shared_by_brute_force(trace: Trace, size: int) -> int:
    """Tokens of the longest prefix, in whole blocks, that an earlier prompt with its answer began with."""
    seen: set[bytes] = set()
    shared = 0
    for index in range(trace.num_requests):
        prompt, answer = trace.prompts.row(index), trace.outputs.row(index)
        hits = 0
        while (hits + 1) * size <= len(prompt) and prompt[: (hits + 1) * size].tobytes() in seen:
            hits += 1
        shared += hits * size
        whole = np.concatenate([prompt, answer])
        seen.update(whole[:end].tobytes() for end in range(size, len(whole) + 1, size))
    return shared


@cases
def test_shared_tokens_are_those_of_brute_force(kind: str, seed: int, tmp_path: Path) -> None:
    trace = trace_of(kind, seed, tmp_path)
    for row in measure(Load.of_trace(trace), [16, 48, 128, 256]):
        assert row.shared_tokens == shared_by_brute_force(trace, row.block_size)


@cases
def test_what_holds_for_every_load(kind: str, seed: int, tmp_path: Path) -> None:
    load = Load.of_trace(trace_of(kind, seed, tmp_path))
    rows = measure(load)
    assert [row.block_size for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert rows[0].waste_tokens == 0
    assert rows[0].lost_tokens == 0
    assert rows[0].table_entries == load.tokens
    for smaller, larger in pairwise(rows):
        assert smaller.waste_tokens <= larger.waste_tokens < larger.block_size * len(load.lengths)
        assert smaller.table_entries >= larger.table_entries
        assert (smaller.gathers_mean or 0) >= (larger.gathers_mean or 0)
        assert (smaller.shared_tokens or 0) >= (larger.shared_tokens or 0)
        assert smaller.overhead_share <= larger.overhead_share
    for row in rows:
        assert row.table_entries * row.block_size == load.tokens + row.waste_tokens


def test_tables_and_gathers_are_those_of_a_real_pager() -> None:
    rng = np.random.default_rng(5)
    prompts = rng.integers(1, 200, 40)
    ends = prompts + rng.integers(0, 30, 40)
    for size in (1, 3, 16, 64):
        pager = Pager(20_000, size, prefix_cache=False)
        entries, gathers = 0, []
        for prompt, end in zip(prompts.tolist(), ends.tolist(), strict=True):
            sequence = pager.admit(np.zeros(prompt, np.int32))
            for _ in range(end - prompt):
                sequence.append(0)
                gathers.append(len(sequence.block_ids))
            entries += len(sequence.block_ids)
            sequence.release()
        (row,) = measure(Load.of_lengths("these", ends), [size])
        assert row.table_entries == entries
        assert row.waste_tokens == entries * size - int(ends.sum())
        assert gathers_mean(prompts, ends, size) == pytest.approx(np.mean(gathers))
    assert gathers_mean(prompts, prompts, 16) is None


def test_merged_ids_share_what_the_tokens_share(tmp_path: Path) -> None:
    trace = trace_of("chat", 3, tmp_path)
    small = TokenChains(trace, "recorded", 8).columns("none")
    for factor in (1, 2, 5, 64):
        large = TokenChains(trace, "recorded", 8 * factor).columns("none")
        ours = merged(small, factor)
        assert np.array_equal(ours.offsets, large.offsets)
        assert np.array_equal(ours.prompt_blocks, large.prompt_blocks)
        # Other names, the same blocks: each of ours stands for one of theirs and the other way round.
        pairs = set(zip(ours.ids.tolist(), large.ids.tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_merging_more_blocks_than_a_chain_has(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [7, 8]}', encoding="utf-8")
    columns = merged(build_columns(read_trace(path)), 4)
    assert columns.ids.tolist() == []
    assert columns.offsets.tolist() == [0, 0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distributions(seed: int) -> None:
    uniform = LengthDistribution.parse("uniform:100:300").draw(seed, 5000)
    assert (uniform.min(), uniform.max()) == (100, 300)
    assert uniform.mean() == pytest.approx(200, rel=0.02)
    bell = LengthDistribution.parse("lognormal:800:0.9").draw(seed, 5000)
    assert np.median(bell) == pytest.approx(800, rel=0.06)
    assert np.std(np.log(bell)) == pytest.approx(0.9, rel=0.05)
    assert bell.min() >= 1
    assert LengthDistribution.parse("lognormal:1:10").draw(seed, 5000).max() <= 2**31 - 1
    assert set(LengthDistribution.parse("fixed:7").draw(seed, 3).tolist()) == {7}


def test_progress_counts_up_to_all(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    measure(
        Load.of_trace(trace_of("burst", 0, tmp_path)), [16, 32], progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (120, 120)
