"""`kvpager.simulate`: the reference engine's numbers, what holds for any load and policy, and who may decide what."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from simulate_model import Model

from kvpager import ConfigError, Plan, Sequence
from kvpager.cost import Work
from kvpager.replay import PoolSize, replay
from kvpager.simulate import (
    SCENARIOS,
    Admission,
    Answer,
    ConcurrencyLimit,
    Engine,
    EngineConfig,
    FirstCome,
    Load,
    Newest,
    Recompute,
    Request,
    ReserveEverything,
    Result,
    Run,
    SimulationError,
    Speed,
    Stall,
    SystemPrompts,
    Victims,
    Watermark,
    capacity,
    compare,
    load_from_trace,
    parse_admission,
)
from kvpager.traces import read_trace

# Llama-3.1-8B on an H100, roughly; a power of two apart where a test scales time.
SPEED = Speed(
    name="test",
    token_s=25e-6,
    pair_s=8e-10,
    weights_s=4.8e-3,
    kv_token_s=39e-9,
    block_s=84e-6,
    overhead_s=1e-3,
)
TINY = EngineConfig(num_blocks=40, block_size=4, max_running=8, max_step_tokens=32)


def lengths_load(pairs: list[tuple[int, int]], arrivals: list[float] | None = None, shared: int = 0) -> Load:
    """Requests of these prompt and answer lengths; with `shared`, behind that many tokens that all have in common."""
    inputs = np.array([prompt for prompt, _ in pairs], np.int64)
    which = np.full(len(pairs), 0 if shared else -1)
    systems = [np.zeros(shared, np.int32)] if shared else []
    return Load(
        "test",
        np.zeros(len(pairs)) if arrivals is None else np.array(arrivals, np.float64),
        inputs,
        np.array([answer for _, answer in pairs], np.int64),
        SystemPrompts(systems, which, inputs, 1),
    )


class Checked(Engine):
    """Recounts the pager after every step, and that the engine's idea of who runs is the pager's."""

    def _pass(self, rows: int, work: Work) -> None:
        super()._pass(rows, work)
        assert self.pager.check() == []
        stats = self.pager.stats()
        assert stats.running_sequences == self.num_running
        assert work.tokens <= self.config.max_step_tokens
        assert len(self.running) <= self.config.max_running

    def _let_in(self) -> bool:
        assert self.promised_blocks >= 0
        return super()._let_in()


def finished(engine: Engine) -> Result:
    """The result of a run, after what must hold for every run."""
    load, result = engine.load, engine.run()
    stats = engine.pager.stats()
    # Tokens are conserved, and the pager counts the same.
    assert result.computed_tokens == result.useful_tokens - result.hit_tokens + result.recomputed_tokens
    assert result.output_tokens == load.output_lengths.sum()
    assert (stats.queried_tokens, stats.recomputed_tokens) == (result.queried_tokens, result.recomputed_tokens)
    assert (stats.preemptions + stats.swap_outs, stats.swap_outs) == (result.preemptions, result.swaps)
    # Everybody got everything, in order, and nothing is left behind.
    assert stats.admitted_sequences == load.num_requests
    assert (stats.active_blocks, stats.running_sequences, stats.swapped_sequences) == (0, 0, 0)
    record = engine.record
    assert (record.ttft_s > 0).all()
    assert (record.finished_s + 1e-9 >= load.arrivals_s + record.ttft_s).all()
    # No pool does more in a step than it has blocks, if nothing is shared.
    if not result.hit_tokens:
        assert result.steps >= result.lower_bound_steps
        assert 0 < result.active_mean < 1 + 1e-9
    assert result.steps >= load.output_lengths.max()
    line = result.timeline
    assert (line.active + line.cached + line.free == engine.config.num_blocks).all()
    assert (np.diff(line.seconds) > 0).all()
    assert (np.diff(line.preemptions) >= 0).all()
    return result


# The reference engine.


def thrash_load() -> Load:
    """The published lengths, which are not ours to keep."""
    folder = Path(os.environ.get("KVPAGER_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
    if not (folder / "thrash.jsonl").is_file():
        pytest.skip(f"thrash.jsonl is not in {folder}; KVPAGER_TRACES names the folder of the public traces")
    return load_from_trace(read_trace(folder / "thrash.jsonl"))


@pytest.mark.parametrize(
    ("admission", "steps", "preemptions", "tax"),
    [
        (FirstCome(), 8990, 498, "35.0"),
        (Watermark(0.01), 8996, 334, "27.4"),
        (Watermark(0.05), 9146, 119, "15.2"),
        (Watermark(0.20), 10044, 54, "8.9"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_reference_engine(admission: Admission, steps: int, preemptions: int, tax: str) -> None:
    """The published numbers of thrash.jsonl; the preemptions with a watermark are those of the model below."""
    result = finished(Engine(thrash_load(), EngineConfig(), SPEED, admission))
    assert (result.steps, result.preemptions, f"{100 * result.tax:.1f}") == (steps, preemptions, tax)
    assert result.useful_tokens == 522_792
    assert result.lower_bound_steps == 8188


@pytest.mark.parametrize("watermark", [0.0, 0.05])
def test_the_thrash_scenario_as_the_model_counts_it(watermark: float) -> None:
    load = SCENARIOS["thrash"](0, 256)
    result = finished(Engine(load, EngineConfig(), SPEED, Watermark(watermark)))
    lengths = list(zip(load.input_lengths.tolist(), load.output_lengths.tolist(), strict=True))
    model = Model(lengths, 3999, 16, 256, 8192, watermark).run()
    assert (result.steps, result.preemptions, result.computed_tokens, result.recomputed_tokens) == model
    # Nothing but the watermark makes this load bearable, and it is heavy for any seed.
    assert result.tax > (0.3 if not watermark else 0.1)


pairs = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60)), min_size=1, max_size=12)


@settings(max_examples=150)
@given(
    pairs,
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(1, 70),
    st.sampled_from([0.0, 0.05, 0.2, 0.5]),
)
def test_counts_what_the_model_counts(
    lengths: list[tuple[int, int]], spare: int, size: int, max_running: int, max_tokens: int, watermark: float
) -> None:
    load = lengths_load(lengths)
    blocks = int(load.blocks_needed(size).max()) + spare
    config = EngineConfig(num_blocks=blocks, block_size=size, max_running=max_running, max_step_tokens=max_tokens)
    result = finished(Checked(load, config, SPEED, Watermark(watermark)))
    model = Model(lengths, blocks, size, max_running, max_tokens, watermark).run()
    counted = (result.steps, result.preemptions, result.computed_tokens, result.recomputed_tokens)
    assert counted == model


# What holds for any load and any policy.


POLICIES = st.sampled_from(
    [FirstCome(), Watermark(0.1), Watermark(1.0), ConcurrencyLimit(1), ConcurrencyLimit(3), ReserveEverything()]
)
HOW = st.sampled_from([Newest(), Newest("swap"), Newest("stall")])


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60), st.integers(0, 300)), min_size=1, max_size=12),
    st.sampled_from([0, 0, 3, 10, 24]),
    st.integers(0, 40),
    st.sampled_from([0, 2, 30]),
    POLICIES,
    HOW,
    st.booleans(),
)
def test_everybody_is_served_and_no_token_is_lost(
    requests: list[tuple[int, int, int]],
    shared: int,
    spare: int,
    host_blocks: int,
    admission: Admission,
    victims: Victims,
    prefix_cache: bool,
) -> None:
    lengths = [(shared + prompt, answer) for prompt, answer, _ in requests]
    load = lengths_load(lengths, sorted(0.01 * moment for *_, moment in requests), shared)
    config = replace(
        TINY,
        num_blocks=int(load.blocks_needed(4).max()) + spare,
        num_host_blocks=host_blocks,
        prefix_cache=prefix_cache,
    )
    result = finished(Checked(load, config, SPEED, admission, victims))
    if isinstance(admission, ReserveEverything):
        assert result.preemptions == 0
    if isinstance(admission, ConcurrencyLimit):
        assert result.running_mean <= admission.limit
    if not prefix_cache:
        assert result.hit_tokens == 0


@settings(max_examples=60)
@given(pairs, st.integers(0, 40), POLICIES, HOW)
def test_the_same_run_twice_is_the_same_run(
    lengths: list[tuple[int, int]], spare: int, admission: Admission, victims: Victims
) -> None:
    load = lengths_load(lengths)
    config = replace(TINY, num_blocks=int(load.blocks_needed(4).max()) + spare, num_host_blocks=8)

    def drawn() -> str:
        return json.dumps(Engine(load, config, SPEED, admission, victims).run().as_dict())

    assert drawn() == drawn()


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60), st.integers(0, 300)), min_size=1, max_size=12),
    st.integers(0, 60),
    st.sampled_from([0, 5]),
    POLICIES,
    HOW,
)
def test_steps_without_decisions_are_steps(
    requests: list[tuple[int, int, int]], spare: int, shared: int, admission: Admission, victims: Victims
) -> None:
    """The short cut through steps in which nothing is decided changes nothing."""

    class EachStep(Engine):
        def _decode_on(self) -> bool:
            return False

    lengths = [(shared + prompt, answer) for prompt, answer, _ in requests]
    load = lengths_load(lengths, sorted(0.01 * moment for *_, moment in requests), shared)
    config = replace(TINY, num_blocks=int(load.blocks_needed(4).max()) + spare, num_host_blocks=20)
    results = [engine(load, config, SPEED, admission, victims).run().as_dict() for engine in (Engine, EachStep)]
    assert json.dumps(results[0]) == json.dumps(results[1])


@settings(max_examples=60)
@given(pairs, st.integers(0, 40), POLICIES)
def test_only_time_is_modelled(lengths: list[tuple[int, int]], spare: int, admission: Admission) -> None:
    """On a machine that is twice as slow the same steps take twice as long, if all wait from the beginning."""
    load = lengths_load(lengths)
    config = replace(TINY, num_blocks=int(load.blocks_needed(4).max()) + spare)
    slow = Speed(name="slow", **{name: 2 * getattr(SPEED, name) for name in Speed.__slots__ if name != "name"})
    fast, twice = (Engine(load, config, speed, admission).run() for speed in (SPEED, slow))
    assert (fast.steps, fast.preemptions, fast.computed_tokens) == (
        twice.steps,
        twice.preemptions,
        twice.computed_tokens,
    )
    assert (2 * fast.seconds, 2 * fast.ttft.p99, 2 * fast.itl.p50) == pytest.approx(
        (twice.seconds, twice.ttft.p99, twice.itl.p50), nan_ok=True
    )


@settings(max_examples=60)
@given(pairs, st.integers(0, 60), st.integers(1, 60))
def test_blocks_that_nobody_needs_change_nothing(lengths: list[tuple[int, int]], spare: int, more: int) -> None:
    """Once everybody has all blocks at once, more of them make no difference."""
    load = lengths_load(lengths)
    enough = int(load.blocks_needed(4).sum()) + spare
    config = replace(TINY, num_blocks=enough)
    plenty = replace(TINY, num_blocks=enough + more)
    one, other = (Engine(load, each, SPEED).run() for each in (config, plenty))
    assert one.preemptions == other.preemptions == 0
    assert (one.steps, one.seconds, one.ttft, one.itl) == (other.steps, other.seconds, other.ttft, other.itl)


def test_more_blocks_may_mean_more_preemptions() -> None:
    """One block more lets somebody in who then has to go: the anomaly of paging first in, first out.

    So "more blocks never more preemptions" does not hold, not of three requests, and not of the thrash scenario.
    """
    load = lengths_load([(9, 11), (7, 13), (8, 10)])
    found = [Engine(load, replace(TINY, num_blocks=blocks), SPEED).run().preemptions for blocks in (6, 7, 12, 15)]
    assert found == [2, 3, 1, 0]


@settings(max_examples=60)
@given(pairs, st.integers(0, 60), st.integers(0, 60))
def test_the_bound_by_area_falls_with_blocks(lengths: list[tuple[int, int]], spare: int, more: int) -> None:
    """What does hold: no run beats the bound, which more blocks lower, and reservation never preempts."""
    load = lengths_load(lengths)
    blocks = int(load.blocks_needed(4).max()) + spare
    for admission in (FirstCome(), ReserveEverything()):
        few, many = (
            finished(Engine(load, replace(TINY, num_blocks=count), SPEED, admission))
            for count in (blocks, blocks + more)
        )
        assert few.lower_bound_steps >= many.lower_bound_steps
        if isinstance(admission, ReserveEverything):
            assert few.preemptions == many.preemptions == 0


def test_time_is_the_roofline() -> None:
    """Two steps of one request: its prompt, bound by compute, then a token, bound by memory."""
    speed = Speed(name="", token_s=1.0, pair_s=0.25, weights_s=8.0, kv_token_s=0.5, block_s=0.0, overhead_s=0.125)
    record = Engine(lengths_load([(10, 2)]), TINY, speed)
    result = record.run()
    prompt, token = 10 * 1.0 + 55 * 0.25 + 0.125, 8.0 + 11 * 0.5 + 0.125
    assert (result.steps, result.ttft.p50, result.itl.p50) == (2, prompt, token)
    assert result.seconds == prompt + token
    assert result.useful_tokens_per_s == 11 / (prompt + token)


def test_a_prompt_in_chunks_waits_for_the_tokens_of_a_step() -> None:
    load = lengths_load([(70, 3), (5, 3)])
    result = finished(Checked(load, TINY, SPEED))
    # 32 + 32, then 6 and the second prompt together; two more tokens for both.
    assert (result.steps, result.running_mean) == (5, 8 / 5)  # one, one, two, two, two


def test_shared_prompts_hit_and_count_once() -> None:
    load = lengths_load([(40, 4), (40, 4), (40, 4)], [0.0, 10.0, 20.0], shared=33)
    result = finished(Checked(load, TINY, SPEED))
    assert (result.hit_tokens, result.queried_tokens) == (64, 120)
    assert result.hit_rate == 64 / 120


def test_a_wait_for_arrivals_is_no_step() -> None:
    alone = Engine(lengths_load([(8, 4)]), TINY, SPEED).run()
    apart = Engine(lengths_load([(8, 4), (8, 4)], [0.0, 1000.0]), TINY, SPEED).run()
    assert apart.steps == 2 * alone.steps
    assert apart.ttft.p99 == pytest.approx(alone.ttft.p99)
    assert apart.seconds == pytest.approx(1000 + alone.seconds)


# Victims.


def contended(how: Victims, host_blocks: int = 0) -> Result:
    """Three that fit when they come and not when they have grown."""
    config = replace(TINY, num_blocks=24, num_host_blocks=host_blocks)
    return finished(Checked(lengths_load([(20, 40), (20, 40), (20, 40)]), config, SPEED, victims=how))


def test_a_swapped_victim_is_not_computed_again() -> None:
    result = contended(Newest("swap"), host_blocks=30)
    assert result.swaps == result.preemptions > 0
    assert result.recomputed_tokens == 0


def test_without_room_on_the_host_a_victim_is_computed_again() -> None:
    for host_blocks in (0, 1):
        result = contended(Newest("swap"), host_blocks)
        assert (result.swaps, result.preemptions > 0) == (0, True)
        assert result.recomputed_tokens > 0


def test_who_stalls_keeps_his_blocks_and_goes_on() -> None:
    """Two: the first ends while the second stalls; nobody is preempted."""
    config = replace(TINY, num_blocks=15)
    load = lengths_load([(20, 12), (20, 40)])
    stalled = finished(Checked(load, config, SPEED, victims=Newest("stall")))
    assert (stalled.preemptions, stalled.stalled_rows > 0) == (0, True)
    assert finished(Checked(load, config, SPEED)).preemptions > 0


def test_not_all_rows_may_stall() -> None:
    class Stubborn(Newest):
        def choose(self, engine: Engine, left_out: int) -> Answer:
            return Stall()

    with pytest.raises(SimulationError, match="leaves out all 3 rows of a step"):
        contended(Stubborn())


def test_a_policy_may_take_any_victim() -> None:
    class Oldest(Newest):
        def choose(self, engine: Engine, left_out: int) -> Answer:
            assert 0 < left_out <= engine.num_planned_rows <= len(engine.running)
            return Recompute(engine.running[0])

    assert contended(Oldest()).preemptions > 0


# Admission.


def test_who_never_lets_anybody_in_is_told_so() -> None:
    class Closed(FirstCome):
        def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
            return None

    with pytest.raises(SimulationError, match="lets nobody in although nothing runs: request 0 of 5 tokens waits"):
        Engine(lengths_load([(5, 5)]), TINY, SPEED, Closed()).run()


def test_a_policy_may_scan_past_who_does_not_fit() -> None:
    class Patient(FirstCome):
        @property
        def scan(self) -> int:
            return 2

    # The second needs the whole pool; the third fits beside the first.
    load = lengths_load([(20, 30), (150, 5), (8, 8)])
    kept_out, passed = (Checked(load, TINY, SPEED, policy) for policy in (FirstCome(), Patient()))
    finished(kept_out), finished(passed)
    assert kept_out.record.finished_s.argsort().tolist() == [0, 1, 2]
    assert passed.record.finished_s.argsort().tolist() == [2, 0, 1]


def test_a_policy_may_decide_and_admit_in_one_call_of_its_own() -> None:
    class Controller(FirstCome):
        """Stands for a controller that has the pager, and keeps sequences of its own."""

        name = "controller"

        def __init__(self) -> None:
            self.running: dict[int, int] = {}

        def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
            assert request is engine.waiting[0]
            if sum(self.running.values()) + engine.most_blocks(request) > engine.config.num_blocks:
                return None
            self.running[request.index] = engine.most_blocks(request)
            if request.sequence is not None:
                return request.sequence.resume()
            return engine.pager.admit(request.prompt)

        def finished(self, engine: Engine, request: Request) -> None:
            del self.running[request.index]

        def preempted(self, engine: Engine, request: Request) -> None:
            raise AssertionError("it reserves what they may need")

    controller = Controller()
    load = SCENARIOS["thrash"](1, 40)
    result = finished(Engine(load, EngineConfig(num_blocks=700), SPEED, controller))
    assert (result.preemptions, result.admission, controller.running) == (0, "controller", {})


def test_who_waits_costs_nothing() -> None:
    """Only the front of the queue is asked about, once a step, and a prompt is made once, when it is."""
    load = lengths_load([(20, 10 + i % 7) for i in range(300)])
    made: list[int] = []

    class Counting(SystemPrompts):
        def prompt(self, index: int) -> NDArray[np.int32]:
            made.append(index)
            return super().prompt(index)

    class Asked(FirstCome):
        times = 0

        def admit(self, engine: Engine, request: Request) -> Sequence | Plan | None:
            Asked.times += 1
            return engine.enter(request)

    counted = replace(load, texts=Counting([], np.full(300, -1), load.input_lengths, 1))
    result = finished(Engine(counted, TINY, SPEED, Asked()))
    assert made == list(range(300))
    assert Asked.times <= result.steps + load.num_requests + result.preemptions


def test_a_policy_hears_what_became_of_its_decisions() -> None:
    heard: list[str] = []

    class Listening(FirstCome):
        def finished(self, engine: Engine, request: Request) -> None:
            heard.append(f"finished {request.index} with {request.num_answered}")

        def preempted(self, engine: Engine, request: Request) -> None:
            heard.append(f"preempted {request.index}, {request.num_preemptions}")

    config = replace(TINY, num_blocks=24)
    Engine(lengths_load([(20, 40), (20, 41), (20, 42)]), config, SPEED, Listening()).run()
    assert heard[0] == "preempted 2, 1"
    assert sorted(line for line in heard if "with" in line) == [f"finished {i} with {40 + i}" for i in range(3)]


def test_a_request_that_never_fits_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="request 1 of test needs 41 blocks of 4 tokens before it ends"):
        Engine(lengths_load([(5, 5), (100, 64)]), TINY, SPEED)
    finished(Checked(lengths_load([(5, 5), (100, 61)]), TINY, SPEED))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("first-come", FirstCome()),
        ("watermark:5%", Watermark(0.05)),
        ("watermark:0.5%", Watermark(0.005)),
        (" limit:64 ", ConcurrencyLimit(64)),
        ("reserve", ReserveEverything()),
    ],
)
def test_policies_by_name(text: str, policy: Admission) -> None:
    assert parse_admission(text) == policy


@pytest.mark.parametrize(
    "text",
    ["", "last-come", "watermark", "watermark:5", "watermark:101%", "limit:0", "limit:-1", "limit:x", "reserve:1"],
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|at least one"):
        parse_admission(text)


# Loads.


def trace_load(path: Path, *requests: dict[str, object]) -> Load:
    path.write_text("".join(json.dumps({"timestamp": 0, **request}) + "\n" for request in requests), encoding="utf-8")
    return load_from_trace(read_trace(path))


def texts(load: Load) -> Iterator[tuple[list[int], list[int] | None]]:
    for index in range(load.num_requests):
        answer = load.texts.answer(index)
        yield load.texts.prompt(index).tolist(), None if answer is None else answer.tolist()


def test_an_id_trace_shares_what_its_ids_say(tmp_path: Path) -> None:
    load = trace_load(
        tmp_path / "t.jsonl",
        {"input_length": 10, "output_length": 7, "block_size": 4, "hash_ids": [0, 1], "output_hash_ids": [2, 3]},
        {"input_length": 17, "output_length": 2, "block_size": 4, "hash_ids": [0, 1, 2, 3]},
    )
    (first, answer), (second, unknown) = texts(load)
    # The answer's first block begins with the end of the prompt, so the second prompt is the first with its answer.
    assert first == [0] * 4 + [1] * 4 + [2] * 2
    assert answer == [2] * 2 + [3] * 4 + [4]
    assert second == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [5]
    assert unknown is None
    one_by_one = replace(load, arrivals_s=np.array([0.0, 100.0]))
    for size, hit in ((4, 16), (2, 16), (16, 16)):
        result = finished(Checked(one_by_one, replace(TINY, block_size=size), SPEED))
        assert result.hit_tokens == hit


def test_one_request_at_a_time_hits_what_a_replay_hits(tmp_path: Path, seed: int) -> None:
    """The same trace through `kvpager.replay`, with room for everything: the same blocks, at any block size here."""
    rng = np.random.default_rng(seed)
    paths: dict[tuple[int, ...], int] = {}
    requests: list[dict[str, object]] = []
    for _ in range(80):
        path = tuple(rng.integers(0, 2, rng.integers(1, 9)).tolist())
        ids = [paths.setdefault(path[: end + 1], len(paths)) for end in range(len(path))]
        # A token behind the last full block, so that all of them may be hit.
        length = 8 * len(ids) + int(rng.integers(1, 8))
        requests.append({"input_length": length, "output_length": 3, "block_size": 8, "hash_ids": ids})
    load = trace_load(tmp_path / "t.jsonl", *requests)
    (row,) = replay(read_trace(tmp_path / "t.jsonl"), sizes=[PoolSize.parse("100000")])
    apart = replace(load, arrivals_s=np.arange(80.0))
    for block_size in (1, 2, 8):
        config = replace(TINY, num_blocks=100_000, block_size=block_size)
        assert finished(Engine(apart, config, SPEED)).hit_tokens == row.saved_tokens


def test_a_token_trace_is_its_own_tokens(tmp_path: Path) -> None:
    load = trace_load(
        tmp_path / "t.jsonl",
        {"tokens": [7, 8, 9], "output_tokens": [7, 7]},
        {"tokens": [7, 8, 9, 7, 7], "output_length": 3},
    )
    assert list(texts(load)) == [([7, 8, 9], [7, 7]), ([7, 8, 9, 7, 7], None)]
    assert [load.texts.own_token(i) for i in range(2)] == [10, 11]


def test_an_answer_of_nothing_is_one_token(tmp_path: Path) -> None:
    requests: list[dict[str, object]] = [
        {"input_length": 3, "output_length": 0},
        {"input_length": 3, "output_length": 0, "block_size": 4, "hash_ids": [], "output_hash_ids": []},
        {"tokens": [1, 2, 3], "output_tokens": []},
    ]
    for request in requests:
        load = trace_load(tmp_path / "t.jsonl", request)
        assert load.output_lengths.tolist() == [1]
        result = finished(Checked(load, TINY, SPEED))
        assert (result.steps, np.isnan(result.itl.p50)) == (1, True)
        assert result.as_dict()["itl"]["p50"] is None


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_are_what_they_say(name: str) -> None:
    load = SCENARIOS[name](3, 400)
    again, other = SCENARIOS[name](3, 400), SCENARIOS[name](4, 400)
    assert np.array_equal(load.input_lengths, again.input_lengths)
    assert not np.array_equal(load.input_lengths, other.input_lengths)
    assert load.num_requests == 400
    assert (np.diff(load.arrivals_s) >= 0).all()
    assert min(load.input_lengths.min(), load.output_lengths.min()) >= 1
    prompts = [load.texts.prompt(index) for index in range(400)]
    assert [len(prompt) for prompt in prompts] == load.input_lengths.tolist()
    if name == "thrash":
        assert 256 <= load.input_lengths.min() < load.input_lengths.max() < 768
        assert 768 <= load.output_lengths.min() < load.output_lengths.max() < 2304
        assert not load.arrivals_s.any()
        return
    shared = {"mixed": 1024, "burst": 2048}[name]
    behind_it = sum(not prompt[:shared].any() and len(prompt) > shared for prompt in prompts)
    assert behind_it == {"mixed": 400, "burst": 200}[name]
    # A burst is one moment.
    assert (len(np.unique(load.arrivals_s)) < 230) == (name == "burst")


def test_rates() -> None:
    load = SCENARIOS["mixed"](0, 300).at_rate(4.0)
    assert (load.num_requests - 1) / (load.arrivals_s[-1] - load.arrivals_s[0]) == pytest.approx(4.0)
    with pytest.raises(ConfigError, match="all requests arrive at once"):
        SCENARIOS["thrash"](0, 10).at_rate(1.0)


def test_load_is_measured_against_what_the_engine_can_do() -> None:
    load, config = SCENARIOS["mixed"](1, 300), EngineConfig(num_blocks=2000)
    runs = [Run(FirstCome(), Newest(), factor) for factor in (0.2, 0.8, 3.0)]
    done: list[tuple[int, int]] = []
    low, high, over = compare(load, config, SPEED, runs, lambda *at: done.append(at))
    assert low.capacity_per_s == high.capacity_per_s == capacity(load, config, SPEED)
    assert low.ttft.p50 < high.ttft.p50 < over.ttft.p50
    assert low.active_mean < high.active_mean < over.active_mean
    # Below its capacity the engine keeps up; far above, it serves about what it can.
    assert low.capacity_per_s is not None
    assert low.requests_per_s == pytest.approx(0.2 * low.capacity_per_s, rel=0.1)
    assert over.requests_per_s == pytest.approx(low.capacity_per_s, rel=0.3)
    assert done == sorted(done)
    assert {total for _, total in done} == {4 * 300}


def test_the_bound_by_area_counts_blocks_times_steps() -> None:
    load = lengths_load([(5, 3), (4, 1)])
    # 5, 6, 7 tokens are 2 blocks of 4 each; 4 tokens are one.
    assert load.block_steps(4) == 3 * 2 + 1
    brute = sum(-(-(p + k) // 16) for p, a in [(300, 500), (17, 90)] for k in range(a))
    assert lengths_load([(300, 500), (17, 90)]).block_steps(16) == brute


def test_percentiles_count_each_token() -> None:
    from kvpager.simulate.record import Gaps, percentiles

    values: NDArray[np.float64] = np.arange(1.0, 101.0)
    assert percentiles(values[::-1]) == (found := percentiles(values))
    assert (found.p50, found.p90, found.p99) == (50.0, 90.0, 99.0)
    gaps = Gaps()
    gaps.add(1.0, 50)
    gaps.add(9.0, 1)
    gaps.add_each(np.array([1.0, 2.0]))
    assert (gaps.percentiles().p50, gaps.percentiles().p99) == (1.0, 9.0)


@pytest.mark.parametrize("field", ["token_s", "weights_s", "overhead_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_speed_that_makes_no_sense(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(SPEED, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config", [{"max_running": 0}, {"max_running": 10**6}, {"max_step_tokens": 0}, {"num_blocks": 0}, {"eviction": "x"}]
)
def test_an_engine_that_makes_no_sense(config: dict[str, object]) -> None:
    with pytest.raises((ConfigError, ValueError)):
        Engine(lengths_load([(5, 5)]), replace(TINY, **config), SPEED)  # type: ignore[arg-type]
