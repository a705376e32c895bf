"""How much of a prompt a step computes: chunk policies, the best fixed limit, and the time between tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay import trace_file
from test_simulate import SPEED, TINY, Checked, finished, lengths_load

from kvpager import ConfigError
from kvpager.cost import CostModel
from kvpager.simulate import (
    SCENARIOS,
    Adaptive,
    BestLimit,
    Chunk,
    ConcurrencyLimit,
    Engine,
    EngineConfig,
    FirstCome,
    Fixed,
    Load,
    Newest,
    Result,
    Roofline,
    Run,
    Slowdown,
    Speed,
    TimeTarget,
    capacity,
    compare,
    idle_itl,
    load_from_trace,
    parse_chunk,
    parse_policy,
)
from kvpager.traces import read_trace

# Of a size at which a few tokens matter: eight of them are computed while the weights are read.
SLOW = Speed(name="slow", token_s=1.0, pair_s=0.01, weights_s=8.0, kv_token_s=0.0625, block_s=0.5, overhead_s=1.0)
CHUNKS = [Fixed(), Fixed(1), Fixed(5), Roofline(), TimeTarget(12.0), TimeTarget(0.5), Slowdown(1.0), Slowdown(1.5)]
REQUESTS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60), st.integers(0, 900)), min_size=1, max_size=12)


class Watched(Checked):
    """Looks at every step that computes more than a token of each row."""

    def _compute(self) -> None:
        writing, planned = self.writing, self.planned
        prompts = planned.tokens - writing.tokens
        assert planned.tokens <= self.config.max_step_tokens
        if isinstance(self.chunk, Fixed):
            assert prompts <= (self.chunk.tokens or math.inf)
            super()._compute()
            return
        assert isinstance(self.chunk, Roofline)
        rows = self._rows
        lasts = rows.last_s[rows.order[rows.counts[rows.order] > 0]]
        if prompts > 1 and (lasts == self.now_s).any():
            reading = self.speed.step_s(0, 0, planned.kv_tokens)
            # Who begins has a token, whatever that takes; what is more keeps to the target, or to what is read.
            first = int((lasts != self.now_s).sum()) * (self.speed.token_s + planned.kv_tokens * self.speed.pair_s)
            assert self.speed.step_s(*planned) <= max(self.chunk.target_s(self), reading) + first + 1e-9
        super()._compute()


def timed(requests: list[tuple[int, int, int]]) -> Load:
    arrivals = sorted(float(moment) for *_, moment in requests)
    return lengths_load([(prompt, answer) for prompt, answer, _ in requests], arrivals)


@settings(max_examples=60)
@given(REQUESTS, st.integers(0, 60), st.sampled_from(CHUNKS), st.sampled_from([Newest(), Newest("swap")]))
def test_everybody_is_served_in_steps_of_the_size_that_was_said(
    requests: list[tuple[int, int, int]], spare: int, chunk: Chunk, victims: Newest
) -> None:
    load = timed(requests)
    config = replace(TINY, num_blocks=int(load.blocks_needed(4).max()) + spare, num_host_blocks=20)
    finished(Watched(load, config, SLOW, FirstCome(), victims, chunk))


@settings(max_examples=40)
@given(REQUESTS, st.integers(0, 60), st.sampled_from(CHUNKS))
def test_the_short_cut_and_a_second_run_change_nothing(
    requests: list[tuple[int, int, int]], spare: int, chunk: Chunk
) -> None:
    class EachStep(Engine):
        def _decode_on(self) -> bool:
            return False

    load = timed(requests)
    config = replace(TINY, num_blocks=int(load.blocks_needed(4).max()) + spare)
    runs = [each(load, config, SLOW, chunk=chunk).run().as_dict() for each in (Engine, Engine, EachStep)]
    assert json.dumps(runs[0]) == json.dumps(runs[1]) == json.dumps(runs[2])


def steps(chunk: Chunk, lengths: list[tuple[int, int]], arrivals: list[float]) -> list[int]:
    """Tokens of each step."""

    class Noting(Watched):
        def _compute(self) -> None:
            taken.append(self.planned.tokens)
            super()._compute()

        def _decode_on(self) -> bool:
            return False

    taken: list[int] = []
    finished(Noting(lengths_load(lengths, arrivals), TINY, SLOW, chunk=chunk))
    return taken


def test_a_prompt_beside_who_writes() -> None:
    """The first writes from its second step on. The other's 40 tokens come beside, or in one piece."""
    lengths, arrivals = [(8, 12), (40, 2)], [0.0, 5.0]
    assert steps(Fixed(), lengths, arrivals)[:4] == [8, 32, 10, 2]
    assert steps(Fixed(12), lengths, arrivals)[:6] == [8, 13, 13, 13, 5, 2]
    # 8 + 9/16 seconds are read, and what is computed is 1 by who writes and 1 + a little by each token of the prompt.
    assert steps(Roofline(), lengths, arrivals)[:7] == [8, 8, 8, 8, 8, 8, 6]
    # 14 seconds less the overhead are room for more, and for less as it goes on: each token looks at all before it.
    assert steps(TimeTarget(14.0), lengths, arrivals)[:5] == [8, 12, 11, 10, 9]
    # What is read takes longer than the target allows: no more than is hidden behind that.
    assert steps(TimeTarget(9.6), lengths, arrivals)[1:3] == [1, 1]


def test_with_nobody_writing_a_prompt_takes_the_whole_step() -> None:
    for chunk in (Roofline(), TimeTarget(2.0), Slowdown(1.0)):
        assert steps(chunk, [(64, 2)], [0.0]) == [32, 32, 1]
    assert steps(Fixed(20), [(64, 2)], [0.0]) == [20, 20, 20, 4, 1]


def test_who_would_make_the_steps_too_long_waits() -> None:
    """Each reads two seconds or a little more; weights and overhead are nine."""
    lengths, arrivals = [(32, 3)] * 4, [0.0] * 4
    config = replace(TINY, max_step_tokens=512)
    for chunk, most in ((Roofline(), 4), (TimeTarget(13.2), 2), (TimeTarget(11.0), 1), (TimeTarget(1.0), 1)):
        load = lengths_load(lengths, arrivals)
        seen = Engine(load, config, SLOW, chunk=chunk).run().timeline.running.max()
        assert seen == most, chunk
    # Twice alone is 2 x 11 seconds: 13 of reading beside the weights, which six would take.
    result = finished(Watched(lengths_load([(32, 3)] * 9), replace(config, num_blocks=400), SLOW, chunk=Slowdown(2.0)))
    assert result.timeline.running.max() == 6


def test_no_target_keeps_to_itself_whom_nothing_could_serve() -> None:
    load = lengths_load([(100, 3), (5, 3), (100, 3)])
    assert finished(Watched(load, TINY, SLOW, chunk=TimeTarget(0.001))).running_mean == 1


@pytest.mark.parametrize(
    ("text", "chunk", "name"),
    [
        ("full", Fixed(), "whole step"),
        ("2048", Fixed(2048), "2,048"),
        (" roofline", Roofline(), "roofline"),
        ("itl:8ms", TimeTarget(0.008), "8 ms"),
        ("itl:1.5s", TimeTarget(1.5), "1500 ms"),
        ("slowdown:1.25", Slowdown(1.25), "1.25 x alone"),
    ],
)
def test_the_names_of_chunks(text: str, chunk: Chunk, name: str) -> None:
    assert (parse_chunk(text), chunk.name) == (chunk, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "a chunk of 0 tokens: at least one"),
        ("itl:0ms", "a target of 0.0 seconds: expected a finite number above 0"),
        ("itl:8", "time '8': expected seconds with a unit"),
        ("slowdown:0.9", "a slowdown of 0.9: expected a finite number of at least 1"),
        *((text, "expected full, 512, roofline, itl:8ms or slowdown:1.2") for text in ("", "-5", "roofline:2", "5:5")),
        *((text, "expected full, 512, roofline") for text in ("slowdown", "slowdown:1e3", "full:1", "8ms")),
        ("itl:", "time '': expected seconds with a unit"),
    ],
)
def test_what_is_no_chunk(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_chunk(text)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_target(seconds: float) -> None:
    with pytest.raises(ConfigError, match="a target of"):
        TimeTarget(seconds)


# The best fixed limit.


@pytest.mark.parametrize("scenario", ["thrash", "mixed"])
def test_an_idle_engine_is_one_that_serves_one_at_a_time(scenario: str) -> None:
    load = SCENARIOS[scenario](3, 60)
    one = Engine(load.at_once(), EngineConfig(), SPEED, ConcurrencyLimit(1)).run()
    idle = idle_itl(load, SPEED)
    assert (idle.p50, idle.p90, idle.p99) == pytest.approx((one.itl.p50, one.itl.p90, one.itl.p99), rel=1e-9)


def test_nothing_lies_between_the_tokens_of_one() -> None:
    load = lengths_load([(9, 1), (5, 1)])
    assert math.isnan(idle_itl(load, SPEED).p99)
    limit, result = BestLimit(1.2).find(load, TINY, SPEED)
    assert (limit, result.output_tokens) == (2, 2)


@pytest.mark.parametrize("stretch", [1.0, 1.1, 50.0])
@pytest.mark.parametrize("load_factor", [0.5, 1.5])
@pytest.mark.parametrize("chunk", [Fixed(), Roofline()], ids=lambda chunk: chunk.name)
def test_the_best_limit_is_that_of_trying_all(stretch: float, load_factor: float, chunk: Chunk) -> None:
    load, config = SCENARIOS["mixed"](2, 30), EngineConfig(num_blocks=2000, max_running=9)
    load = load.at_rate(load_factor * capacity(load, config, SPEED))
    calls: list[tuple[int, int]] = []
    limit, found = BestLimit(stretch).find(load, config, SPEED, None, chunk, lambda *call: calls.append(call))
    every = [Engine(load, config, SPEED, ConcurrencyLimit(n + 1), None, chunk).run() for n in range(9)]
    assert found.as_dict() == every[limit - 1].as_dict()
    bound = stretch * idle_itl(load, SPEED).p99 * (1 + 1e-9)
    good = [one for one in every if one.itl.p99 <= bound]
    # The search looks at some of them; ties aside it misses none that is better.
    assert found.requests_per_s >= 0.999 * max(one.requests_per_s for one in good)
    assert found.itl.p99 <= bound
    done = [count for count, _ in calls]
    assert done == sorted(done)
    assert {total for _, total in calls} == {30}


def test_policies_and_limits_side_by_side() -> None:
    """A policy that learns is used once: each run has its own."""
    load, config = SCENARIOS["mixed"](0, 60), EngineConfig(num_blocks=1500)
    adaptive = Adaptive()
    runs = [Run(adaptive, Newest(), factor, chunk) for factor in (0.5, 1.0) for chunk in (Fixed(), Roofline())]
    runs.append(Run(BestLimit(1.2), Newest(), 1.0))
    results = list(compare(load, config, SPEED, runs))
    assert [(one.load_factor, one.chunk) for one in results] == [
        *((factor, chunk) for factor in (0.5, 1.0) for chunk in ("whole step", "roofline")),
        (1.0, "whole step"),
    ]
    assert results[-1].admission.startswith("limit ")
    assert [one.as_dict() for one in compare(load, config, SPEED, runs)] == [one.as_dict() for one in results]


@pytest.mark.parametrize("text", ["limit:0.9x", "limit:x", "limit:1.2y", "limit:-1x"])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected (at least 1|first-come)"):
        parse_policy(text)
    assert parse_policy("limit:1.5x") == BestLimit(1.5)
    assert parse_policy("limit:15") == ConcurrencyLimit(15)


# What it is for.

H100 = Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))


def run(load: Load, chunk: Chunk, config: EngineConfig, speed: Speed = H100) -> Result:
    return Engine(load, config, speed, Adaptive(), chunk=chunk).run()


def goal(load: Load, config: EngineConfig, *load_factors: float, speed: Speed = H100, least_s: float = 0.0) -> None:
    """At least 98 % of the throughput of the best fixed limit, at most 1.05 times its p99 ITL, and nothing tuned."""
    full = capacity(load, config, speed)
    for factor in load_factors:
        asked = load.at_rate(factor * full)
        _, best = BestLimit(1.2).find(asked, config, speed)
        ours = run(asked, Slowdown(1.2), config, speed)
        assert ours.requests_per_s >= 0.98 * best.requests_per_s
        assert ours.itl.p99 <= max(1.05 * best.itl.p99, least_s)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_time_between_tokens(seed: int) -> None:
    goal(SCENARIOS["mixed"](seed, 200), EngineConfig(), 0.6, 1.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_time_between_tokens_at_length(seed: int) -> None:
    goal(SCENARIOS["mixed"](seed, 2000), EngineConfig(), 0.6, 0.8, 0.95, 1.1)


@pytest.mark.slow
def test_the_time_between_tokens_of_real_chats() -> None:
    load = load_from_trace(read_trace(trace_file("conversation_trace.jsonl"))).first(2000)
    goal(load, EngineConfig(num_blocks=20_000), 0.6, 0.8, 0.95, 1.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "device", "ranks"),
    [("llama-3.1-8b", "b200", 1), ("llama-3.1-8b", "l40s", 1), ("llama-3.1-70b", "h200", 4), ("llama-2-7b", "a100", 1)],
)
def test_the_time_between_tokens_of_other_models_and_devices(model: str, device: str, ranks: int) -> None:
    speed = Speed.of(CostModel.of(model, device, "25GB/s", ranks=ranks))
    load = SCENARIOS["mixed"](4, 300)
    # On four H200 the best limit is far below its bound: with one request more, prompts in one piece would break it.
    goal(load, EngineConfig(), 0.6, 1.1, speed=speed, least_s=1.2 * idle_itl(load, speed).p99)


@pytest.mark.parametrize("load_factor", [0.6, 0.95, 2.0])
def test_prompts_behind_what_is_read_cost_nothing(load_factor: float) -> None:
    """No throughput, however many wait, and no time between tokens beyond that of reading."""
    load, config = SCENARIOS["mixed"](1, 400), EngineConfig()
    load = load.at_rate(load_factor * capacity(load, config, H100))
    whole, hidden = (run(load, chunk, config) for chunk in (Fixed(), Roofline()))
    assert hidden.useful_tokens_per_s >= 0.999 * whole.useful_tokens_per_s
    assert hidden.itl.p99 < 0.0105 < whole.itl.p99 or load_factor == 0.6
    assert hidden.itl.p99 <= whole.itl.p99
    assert np.isfinite(hidden.ttft.p99)
