"""What `kvpager.Admission` makes of the simulated loads: counts, which are the same on every machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_simulate import SPEED, thrash_load

from kvpager.simulate import (
    SCENARIOS,
    Adaptive,
    Engine,
    EngineConfig,
    FirstCome,
    Load,
    Newest,
    ReserveEverything,
    Result,
    Victims,
    Watermark,
    parse_admission,
)


def run(load: Load, policy: object, victims: Victims | None = None) -> Result:
    return Engine(load, EngineConfig(), SPEED, policy, victims).run()  # type: ignore[arg-type]


def counts(result: Result) -> tuple[int, int, int, int]:
    return result.steps, result.preemptions, result.computed_tokens, result.recomputed_tokens


def watermark_tax(load: Load, steps: int) -> float:
    """Tax of a watermark that takes so many steps, on straight lines between some."""
    runs = [run(load, FirstCome()), *(run(load, Watermark(share)) for share in (0.01, 0.05, 0.1, 0.2, 0.3))]
    return float(np.interp(steps, [one.steps for one in runs], [one.tax for one in runs]))


def test_goals_on_the_published_lengths() -> None:
    load = thrash_load()
    reference, unknown, known = (run(load, policy) for policy in (FirstCome(), Adaptive(), Adaptive(known=True)))
    assert unknown.tax <= 0.05
    assert unknown.steps <= 1.06 * reference.steps
    assert (known.preemptions, known.tax) == (0, 0.0)
    assert known.steps <= 1.06 * reference.steps
    assert unknown.useful_tokens_per_s > reference.useful_tokens_per_s


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("risk", [0.1, 0.28, 0.75])
def test_less_is_recomputed_than_with_any_watermark_of_as_many_steps(seed: int, risk: float) -> None:
    load = SCENARIOS["thrash"](seed, 256)
    ours = run(load, Adaptive(risk))
    assert ours.tax < 0.85 * watermark_tax(load, ours.steps)


@pytest.mark.slow
def test_goals_on_ten_seeds() -> None:
    """On average; of single seeds the steps are up to a tenth more than the reference's."""
    means: dict[float, list[tuple[float, float]]] = {}
    known = []
    for seed in range(10):
        load = SCENARIOS["thrash"](seed, 256)
        reference = run(load, FirstCome())
        for risk in (0.02, 0.1, 0.28, 0.5, 0.75):
            ours = run(load, Adaptive(risk))
            assert ours.tax < 0.85 * watermark_tax(load, ours.steps)
            means.setdefault(risk, []).append((ours.steps / reference.steps, ours.tax))
        told = run(load, Adaptive(known=True))
        assert told.preemptions == 0
        known.append(told.steps / reference.steps)
    steps, tax = np.mean(means[0.28], axis=0)
    assert (steps <= 1.06, tax <= 0.05) == (True, True), (steps, tax)
    assert np.mean(known) <= 1.04


@pytest.mark.parametrize("scenario", ["thrash", "mixed", "burst"])
def test_a_risk_of_one_is_first_come_with_its_watermark(scenario: str) -> None:
    load = SCENARIOS[scenario](1, 150)
    for share in (0.0, 0.05):
        patient = {"scan": 0, "longest_first": False, "patience": 2**32 - 1}
        ours = run(load, Adaptive(1.0, watermark=share, **patient), Newest())
        assert counts(ours) == counts(run(load, Watermark(share)))


@pytest.mark.parametrize("scenario", ["thrash", "mixed", "burst"])
def test_no_risk_is_to_reserve_everything(scenario: str) -> None:
    load = SCENARIOS[scenario](1, 150).at_once()
    ours, reserve = run(load, Adaptive(0.0, known=True, scan=0, longest_first=False)), run(load, ReserveEverything())
    if scenario == "thrash":
        assert counts(ours) == counts(reserve)
    # Of blocks that others hold the simulator's own policy does not know.
    assert (ours.preemptions, ours.recomputed_tokens) == (0, 0)
    assert ours.steps <= reserve.steps


def test_the_last_requests_of_a_batch_come_in_longest_first() -> None:
    load = SCENARIOS["thrash"](0, 120)
    for known in (False, True):
        plain, ours = (run(load, Adaptive(known=known, longest_first=value)) for value in (False, True))
        assert ours.steps < plain.steps
        # Where requests come one by one whoever comes later is served later.
        stream = replace(load, arrivals_s=np.linspace(0.0, 20.0, load.num_requests))
        assert counts(run(stream, Adaptive(known=known))) == counts(
            run(stream, Adaptive(known=known, longest_first=False))
        )


def test_the_same_again_is_the_same_again() -> None:
    load = SCENARIOS["mixed"](5, 200).at_once()
    one, other = (run(load, Adaptive()).as_dict() for _ in range(2))
    assert one == other


def test_where_there_is_room_it_costs_nothing() -> None:
    load = SCENARIOS["burst"](0, 400).at_rate(4.0)
    plain, ours = run(load, FirstCome()), run(load, Adaptive())
    assert ours.ttft.p99 <= 1.01 * plain.ttft.p99
    assert ours.steps <= 1.01 * plain.steps


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("adaptive", "adaptive 28%", (0.28, False)),
        ("known:0%", "known 0%", (0, True)),
        ("adaptive:1.5%", "adaptive 1.5%", (0.015, False)),
    ],
)
def test_its_names(text: str, name: str, settings: tuple[float, bool]) -> None:
    policy = parse_admission(text)
    assert isinstance(policy, Adaptive)
    assert (policy.risk, policy.known) == settings
    assert policy.name == name


@pytest.mark.parametrize(
    "text", ["adaptive:5", "adaptive:101%", "known:-1%", "adaptive:x%", "adaptive:5%+", "adaptive:+5%", "known:+5%"]
)
def test_what_is_no_risk(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_admission(text)


@pytest.mark.parametrize("policy", [Adaptive(), Adaptive(known=True)], ids=["unknown", "known"])
def test_in_a_stream_nobody_is_preempted_where_the_load_is_more_than_fits(policy: Adaptive) -> None:
    """Prompts of several thousand tokens that share their beginning, some of them let in within one step."""
    load = SCENARIOS["mixed"](0, 600).at_rate(8.5)
    result, plain = run(load, policy), run(load, FirstCome())
    assert (result.preemptions, plain.preemptions > 20) == (0, True)
    # A prompt of thousands is dear to compute again for an answer of hundreds, so less is risked than with short ones.
    assert result.steps <= 1.08 * plain.steps
