"""Replays count to the block: by hand on small traces, by the published numbers on real ones, core against oracle."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvpager
import kvpager.reference
from kvpager._core import Replay
from kvpager.errors import NeverFits
from kvpager.replay import (
    Outputs,
    PoolSize,
    ReferenceReplay,
    ReplayColumns,
    ReplayRow,
    Service,
    TokenChains,
    TokenReplay,
    build_columns,
    replay,
)
from kvpager.traces import Trace, TraceError, read_trace

ENGINES = [Replay, ReferenceReplay]
engines = pytest.mark.parametrize("engine", ENGINES, ids=["core", "reference"])


def traces_folder() -> Path:
    default = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
    return Path(os.environ.get("KVPAGER_TRACES", default))


def trace_file(name: str) -> Path:
    path = traces_folder() / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {traces_folder()}; KVPAGER_TRACES names the folder of the public traces")
    return path


def id_trace(path: Path, chains: Sequence[Sequence[int]], **columns: Sequence[float]) -> Trace:
    """A trace of one-token blocks, so that lengths are block counts."""
    lines = []
    for i, chain in enumerate(chains):
        request: dict[str, Any] = {"timestamp": 0, "input_length": len(chain), "output_length": 0, "block_size": 1}
        request |= {name: column[i] for name, column in columns.items()}
        lines.append(json.dumps(request | {"hash_ids": list(chain)}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_trace(path)


def run(engine: Any, columns: ReplayColumns, num_blocks: int, policy: str, step: int = 1000) -> dict[str, int]:
    running = engine(
        columns.ids,
        columns.offsets,
        columns.prompt_blocks,
        columns.arrivals_s,
        columns.service_s,
        num_blocks,
        policy,
    )
    total = len(columns.prompt_blocks)
    done = 0
    while done < total:
        before = done
        done = running.advance(step)
        assert done == min(total, before + step)
    assert running.advance(1) == total
    counts: dict[str, int] = running.result()
    return counts


@engines
def test_lru_by_hand(engine: Any, tmp_path: Path) -> None:
    # Pool of 4; each request also needs a private block. Cached blocks after each release, coldest first:
    chains = [
        [0, 1, 2],  # 2 1 0     hit 0
        [0, 1, 3],  # 3 1 0     hit 2, evicts 2
        [4],  #       1 0 4     hit 0, evicts 3
        [0, 1],  #    4 1 0     hit 2
        [5, 6],  #    0 6 5     hit 0, evicts 4 and 1: the leaf before its parent
        [0, 1],  #    5 1 0     hit 1, evicts 6
    ]
    counts = run(engine, build_columns(id_trace(tmp_path / "t", chains)), 4, "lru")
    assert counts == {
        "requests": 6,
        "prompt_blocks": 13,
        "hit_blocks": 5,
        "evicted_blocks": 5,
        "cached_blocks": 3,
        "active_blocks_max": 4,
    }


@engines
def test_slru_keeps_what_returned_by_hand(engine: Any, tmp_path: Path) -> None:
    # Pool of 6, so protected holds at most 3. `probation | protected`, coldest first:
    chains = [
        [0, 1],  #    1 0 |         hit 0
        [0, 1],  #        | 1 0     hit 2
        [2, 3, 4],  # 4 3 2 | 1 0   hit 0
        [5, 6, 7],  # 7 6 5 | 1 0   needs 4, one is free: evicts 4, 3 and 2
        [0, 1],  #    7 6 5 | 1 0   hit 2; lru has evicted 1 and 0 by now and hits nothing
    ]
    columns = build_columns(id_trace(tmp_path / "t", chains))
    slru, lru = run(engine, columns, 6, "slru"), run(engine, columns, 6, "lru")
    assert (slru["hit_blocks"], slru["evicted_blocks"], slru["cached_blocks"]) == (4, 3, 5)
    assert (lru["hit_blocks"], lru["evicted_blocks"], lru["cached_blocks"]) == (2, 5, 5)


@engines
def test_slru_demotes_the_coldest_by_hand(engine: Any, tmp_path: Path) -> None:
    # Pool of 4: protected holds at most 2. `probation | protected`, coldest first:
    chains = [
        [0, 1, 2],  # 2 1 0 |
        [0, 1, 2],  # 2 | 1 0   hit 3: all three come back marked, 2 is the coldest and is demoted
        [3],  #       3 | 1 0   evicts 2
        [3],  #       1 | 0 3   hit 1: 3 joins protected, 1 is demoted
        [4, 5],  #    5 4 | 3   needs 3, one is free: evicts 1, then 0, protected's coldest
    ]
    counts = run(engine, build_columns(id_trace(tmp_path / "t", chains)), 4, "slru")
    assert (counts["hit_blocks"], counts["evicted_blocks"], counts["cached_blocks"]) == (4, 3, 3)


@engines
def test_requests_wait_for_room_in_order_by_hand(engine: Any, tmp_path: Path) -> None:
    trace = id_trace(
        tmp_path / "t",
        [[0, 1], [2], [0, 1], [9]],
        timestamp=[0, 1000, 2000, 11_000],
        service_ms=[10_000, 1000, 5000, 0],
    )
    columns = build_columns(trace, service="model")
    assert columns.arrivals_s is not None
    assert columns.arrivals_s.tolist() == [0.0, 1.0, 2.0, 11.0]
    # Pool of 4. Request 0 holds 3 until 10. Request 1 needs 2: it waits until 10 and holds them until 11. Request 2
    # came at 2 and would fit beside request 0, but nobody overtakes; at 10 it needs 3 beside 2 held: it waits until
    # 11, hits 0 and 1, and holds 3 until 16. Request 3 waits for it and evicts 2.
    counts = run(engine, columns, 4, "lru")
    assert (counts["hit_blocks"], counts["evicted_blocks"], counts["active_blocks_max"]) == (2, 1, 3)
    assert counts["cached_blocks"] == 3


@engines
def test_a_finish_at_the_moment_of_an_arrival_comes_first(engine: Any, tmp_path: Path) -> None:
    columns = build_columns(
        id_trace(tmp_path / "t", [[0, 1], [2, 3]], timestamp=[0, 1500], service_ms=[1500, 1]), service="model"
    )
    counts = run(engine, columns, 6, "lru")
    assert counts["active_blocks_max"] == 3


@engines
def test_a_request_larger_than_the_pool_is_an_error(engine: Any, tmp_path: Path) -> None:
    columns = build_columns(id_trace(tmp_path / "t", [[0], [1, 2, 3]]))
    with pytest.raises(NeverFits):
        run(engine, columns, 3, "lru")


def test_output_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    common = {"timestamp": 0, "block_size": 16, "input_length": 40}
    requests = [
        common | {"output_length": 9, "hash_ids": [0, 1, 2], "output_hash_ids": [7]},
        common | {"output_length": 50, "hash_ids": [0, 1]},
        common | {"output_length": 7, "hash_ids": [0, 1], "output_hash_ids": []},
    ]
    path.write_text("\n".join(map(json.dumps, requests)), encoding="utf-8")
    trace = read_trace(path)

    def chains(outputs: Outputs) -> list[list[int]]:
        columns = build_columns(trace, outputs)
        assert columns.prompt_blocks.tolist() == [2, 2, 2]
        assert columns.unique_prompt_blocks == 2
        return [columns.ids[a:b].tolist() for a, b in zip(columns.offsets, columns.offsets[1:], strict=False)]

    assert chains("none") == [[0, 1], [0, 1], [0, 1]]
    assert chains("fresh") == [[0, 1, 8], [0, 1, 9, 10, 11], [0, 1]]
    assert chains("recorded") == [[0, 1, 7], [0, 1, 8, 9, 10], [0, 1]]


def test_service_model_is_the_trace_or_prefill_and_decode_time(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    common = {"timestamp": 250, "input_length": 1000, "output_length": 50, "hash_ids": [0]}
    path.write_text("\n".join(map(json.dumps, [common, common | {"service_ms": 7}])), encoding="utf-8")
    columns = build_columns(read_trace(path), service="model")
    assert columns.service_s is not None
    assert columns.arrivals_s is not None
    assert columns.service_s.tolist() == [1000 / 10_000 + 0.020 * 50, 0.007]
    assert columns.arrivals_s.tolist() == [0.25, 0.25]
    none = build_columns(read_trace(path))
    assert none.service_s is None
    assert none.arrivals_s is None


def test_lengths_alone_never_hit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1100, "output_length": 500}\n' * 3, encoding="utf-8")
    row = next(replay(read_trace(path), sizes=[PoolSize.parse("100")], outputs="fresh"))
    assert (row.hit_blocks, row.prompt_blocks, row.cached_blocks) == (0, 6, 9)


class TestPoolSize:
    @pytest.mark.parametrize(
        ("text", "unique", "blocks"),
        [
            ("1%", 170_899, 1708),
            ("2.5%", 1000, 25),
            ("0.1%", 3000, 3),
            ("7%", 100, 7),
            ("150%", 3, 4),
            ("4096", 7, 4096),
        ],
    )
    def test_exact(self, text: str, unique: int, blocks: int) -> None:
        assert PoolSize.parse(text).resolve(unique) == blocks

    @pytest.mark.parametrize("text", ["", "0", "0%", "0.0%", "-1", "1e3", "ten", "5 %", "%", "1.5", "nan%", "1_000"])
    def test_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected a number of blocks"):
            PoolSize.parse(text)


def test_rows(tmp_path: Path) -> None:
    trace = id_trace(tmp_path / "t", [[0, 1], [0, 1], [2]])
    seen: list[tuple[int, int]] = []
    rows = list(
        replay(
            trace,
            policies=["lru", "slru"],
            sizes=[PoolSize.parse("100%"), PoolSize.parse("8")],
            progress=lambda done, total: seen.append((done, total)),
        )
    )
    assert [(row.policy, row.size, row.num_blocks) for row in rows] == [
        ("lru", "100%", 3),
        ("lru", "8", 8),
        ("slru", "100%", 3),
        ("slru", "8", 8),
    ]
    row = rows[1]
    assert isinstance(row, ReplayRow)
    assert (row.requests, row.prompt_blocks, row.hit_blocks, row.saved_tokens) == (3, 5, 2, 2)
    assert row.hit_rate == 2 / 5
    assert row.seconds > 0
    assert seen == [(done, 12) for done in range(1, 13)]


def test_replay_refuses_before_anything_runs(tmp_path: Path) -> None:
    trace = id_trace(tmp_path / "t", [[0], [1, 2, 3], [4]])
    sizes = [PoolSize.parse("5"), PoolSize.parse("60%")]
    with pytest.raises(TraceError, match="line 2: this request needs 4 blocks and would never fit in a pool of 3"):
        next(replay(trace, sizes=sizes))
    with pytest.raises(ValueError, match="policy 'fifo': expected one of lru, slru"):
        next(replay(trace, policies=["fifo"], sizes=sizes))
    with pytest.raises(TraceError, match="the trace names blocks of 1 tokens"):
        next(replay(trace, sizes=sizes, block_size=4))


@st.composite
def random_columns(draw: st.DrawFn) -> ReplayColumns:
    """Chains that walk down one small tree, so that prefixes are shared at every depth, and times with many ties."""
    steps = draw(st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=40))
    numbers: dict[tuple[int, ...], int] = {}
    chains = [
        [numbers.setdefault(tuple(path[: depth + 1]), len(numbers)) for depth in range(len(path))] for path in steps
    ]
    count = len(chains)
    prompt_blocks = [draw(st.integers(0, len(chain))) for chain in chains]
    arrivals = service = None
    if draw(st.booleans()):
        arrivals = np.cumsum(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))) / 4
        service = np.array(draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))) / 4
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum([len(chain) for chain in chains], out=offsets[1:])
    ids: NDArray[np.int32] = np.array([block for chain in chains for block in chain], np.int32)
    return ReplayColumns(ids, offsets, np.array(prompt_blocks, np.int32), arrivals, service)


@given(random_columns(), st.integers(0, 20), st.sampled_from(["lru", "slru"]), st.integers(1, 50))
def test_core_and_oracle_agree(columns: ReplayColumns, spare: int, policy: str, step: int) -> None:
    num_blocks = int(columns.chain_blocks.max()) + spare
    assert run(Replay, columns, num_blocks, policy, step) == run(ReferenceReplay, columns, num_blocks, policy)


def token_trace(path: Path, seed: int) -> Trace:
    """Prompts over two token values that share beginnings, some with recorded answers, some that continue them."""
    rng = np.random.default_rng(seed)
    texts: list[list[int]] = [rng.integers(0, 2, 12).tolist()]
    lines = []
    for at in range(40):
        text = texts[rng.integers(len(texts))]
        prompt = text[: rng.integers(1, len(text) + 1)] + rng.integers(0, 2, rng.integers(0, 9)).tolist()
        answer = rng.integers(0, 2, rng.integers(0, 12)).tolist()
        texts.append((prompt + answer)[:40])
        request: dict[str, Any] = {"timestamp": 500 * at, "tokens": prompt, "service_ms": int(rng.integers(0, 5000))}
        request |= {"output_tokens": answer} if rng.random() < 0.7 else {"output_length": len(answer)}
        lines.append(json.dumps(request))
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_trace(path)


@pytest.mark.parametrize("pager", [kvpager.Pager, kvpager.reference.Pager], ids=["core", "reference"])
@pytest.mark.parametrize("service", ["none", "model"])
@pytest.mark.parametrize("outputs", ["none", "fresh", "recorded"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_tokens_through_the_pager_count_like_ids(
    pager: Any, service: Service, outputs: Outputs, block_size: int, tmp_path: Path
) -> None:
    for seed in range(3):
        chains = TokenChains(token_trace(tmp_path / "t", seed), outputs, block_size)
        columns = chains.columns(service)
        for policy in ("lru", "slru"):
            num_blocks = int(columns.chain_blocks.max()) + 3
            running = TokenReplay(chains, pager(num_blocks, block_size, policy=policy), service)
            assert running.advance(1000) == len(chains)
            assert running.result() == run(ReferenceReplay, columns, num_blocks, policy), f"seed {seed}"


@pytest.mark.parametrize("outputs", ["none", "fresh", "recorded"])
def test_fresh_answers_are_fresh_whatever_tokens_a_trace_uses(outputs: Outputs, tmp_path: Path) -> None:
    """The same prompts in other token values, the largest that stand for text among them, count the same."""
    found = []
    for first, second in ((0, 1), (1, 0), (2, 4), (2**30 - 1, 3), (5, 2**30 - 1)):
        prompts = [[first] * 6, [first] * 6 + [second] * 3, [first] * 3]
        lines = [json.dumps({"timestamp": 0, "tokens": prompt, "output_length": 5}) for prompt in prompts]
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        chains = TokenChains(read_trace(path), outputs, 2)
        engine = TokenReplay(chains, kvpager.Pager(100, 2), "none")
        engine.advance(3)
        found.append(engine.result())
    # Blocks of 2: of the second prompt its 3 first blocks hit, of the third the only one it has.
    assert {count["hit_blocks"] for count in found} == {3 + 1}
    assert all(count == found[0] for count in found)


PUBLISHED = [
    # file, outputs, service, prompt blocks, unique, sizes in %, hit blocks, evicted blocks
    (
        ("conversation_trace.jsonl", "none", "none", 276_491, 170_899, [1, 2, 5, 10, 20, 50]),
        [15035, 22146, 55902, 79690, 99115, 104641],
        [259749, 250929, 212046, 179713, 143198, 86402],
    ),
    (
        ("conversation_trace.jsonl", "fresh", "none", 276_491, 170_899, [1, 2, 5, 10, 20, 50]),
        [14809, 21256, 54708, 78412, 97935, 104629],
        [268289, 260133, 221554, 189305, 152692, 94728],
    ),
    (
        ("conversation_trace.jsonl", "fresh", "model", 276_491, 170_899, [2, 5, 10, 20]),
        [20675, 54676, 78250, 98016],
        [260749, 221621, 189502, 152646],
    ),
    (
        ("synthetic_trace.jsonl", "none", "none", 117_888, 40_148, [1, 2, 5, 10, 20, 50]),
        [4350, 9129, 18273, 30325, 46582, 70852],
        [113138, 107958, 97609, 83550, 63278, 26963],
    ),
    (
        ("scan_a.jsonl.xz", "recorded", "model", 1_312_654, 1_119_662, [1, 5, 20]),
        [163787, 192542, 192992],
        [1179910, 1106368, 937969],
    ),
    (
        ("agent_a.jsonl.xz", "recorded", "model", 7_091_904, 259_879, [2, 10]),
        [5478139, 6820143],
        [1641890, 279096],
    ),
]
Published = tuple[str, Outputs, Service, int, int, list[int]]


@pytest.mark.parametrize(("what", "hits", "evictions"), PUBLISHED, ids=lambda v: "-".join(map(str, v[:3])))
def test_published_numbers(what: Published, hits: list[int], evictions: list[int]) -> None:
    name, outputs, service, prompt_blocks, _, percents = what
    sizes = [PoolSize.parse(f"{percent}%") for percent in percents]
    rows = list(replay(read_trace(trace_file(name)), sizes=sizes, outputs=outputs, service=service))
    assert {row.prompt_blocks for row in rows} == {prompt_blocks}
    assert [row.hit_blocks for row in rows] == hits
    assert [row.evicted_blocks for row in rows] == evictions


@pytest.mark.slow
@pytest.mark.parametrize(("what", "hits", "evictions"), PUBLISHED, ids=lambda v: "-".join(map(str, v[:3])))
def test_published_numbers_of_the_oracle(what: Published, hits: list[int], evictions: list[int]) -> None:
    name, outputs, service, _, unique, percents = what
    columns = build_columns(read_trace(trace_file(name)), outputs, service)
    assert columns.unique_prompt_blocks == unique
    for percent, hit_blocks, evicted_blocks in zip(percents, hits, evictions, strict=True):
        counts = run(ReferenceReplay, columns, PoolSize.parse(f"{percent}%").resolve(unique), "lru")
        assert (counts["hit_blocks"], counts["evicted_blocks"]) == (hit_blocks, evicted_blocks)
