"""`kvpager.cost.Speed`: how long a step takes, and how many prompt tokens fit into one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager import ConfigError
from kvpager.cost import DEVICES, MAX_TOKENS, MODELS, CostModel, Speed, Work


def speed(**seconds: float) -> Speed:
    """Where nothing costs anything but what is said."""
    free = dict.fromkeys(("token_s", "pair_s", "weights_s", "kv_token_s", "block_s", "overhead_s"), 0.0)
    return Speed(name="test", **(free | seconds))


# Whole numbers and quarters: sums and products of them are exact, so that equal is equal.
quarters = st.integers(0, 40).map(lambda n: n / 4)
SPEEDS = st.builds(
    speed,
    token_s=st.integers(1, 40).map(lambda n: n / 4),
    pair_s=st.integers(0, 8).map(lambda n: n / 4),
    weights_s=st.integers(0, 4000).map(float),
    kv_token_s=quarters,
    overhead_s=quarters,
)
WORKS = st.builds(Work, st.integers(0, 60), st.integers(0, 600), st.integers(0, 600))
TARGETS = st.one_of(st.just(0.0), st.integers(1, 20_000).map(lambda n: n / 4))
REAL = st.builds(
    lambda model, device: Speed.of(CostModel.of(model, device, "25GB/s")),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(DEVICES)),
)


def fits(speed: Speed, work: Work, start: int, target_s: float, tokens: int) -> bool:
    """Whether so many tokens compute no longer than the step reads without them, or than the target."""
    context = work.kv_tokens + start
    reading = speed.step_s(0, 0, context)
    tokens, pairs, _ = work.with_prompt(start, tokens)
    return speed.step_s(tokens, pairs, context) <= max(reading, target_s)


@given(SPEEDS, WORKS, st.integers(0, 400), TARGETS, st.integers(1, 300))
def test_it_is_the_largest_that_fits(speed: Speed, work: Work, start: int, target_s: float, most: int) -> None:
    count = 1
    while count < most and fits(speed, work, start, target_s, count + 1):
        count += 1
    assert speed.prompt_tokens(work, start, target_s=target_s, most=most) == count


@given(REAL, st.integers(1, 512), st.integers(1, 20_000), st.integers(0, 200_000), st.floats(0, 1))
def test_of_real_models_and_devices(speed: Speed, rows: int, each: int, start: int, target_s: float) -> None:
    work = Work.writing(rows, rows * each)
    count = speed.prompt_tokens(work, start, target_s=target_s)
    grown = work.with_prompt(start, count)
    reading = speed.step_s(0, 0, grown.kv_tokens)
    if count > 1:
        # Within the target, unless reading alone is not.
        assert speed.step_s(*grown) <= max(target_s, reading) * (1 + 1e-12)
    assert not fits(speed, work, start, target_s * (1 - 1e-12), count + 2)
    # It is what a prompt of one token would have cost, but for reading what it adds itself.
    least = max(target_s, speed.step_s(*work.with_prompt(start, 1)))
    assert speed.step_s(*grown) <= (least + count * speed.kv_token_s) * (1 + 1e-12)


@given(REAL, WORKS, st.integers(0, 10**6), st.floats(0, 2), st.floats(0, 2), st.integers(0, 100))
def test_more_time_is_more_tokens_and_more_rows_are_fewer(
    speed: Speed, work: Work, start: int, one: float, other: float, rows: int
) -> None:
    less, more = sorted((one, other))
    count = speed.prompt_tokens(work, start, target_s=more)
    assert 1 <= speed.prompt_tokens(work, start, target_s=less) <= count
    busier = work._replace(tokens=work.tokens + rows)
    assert speed.prompt_tokens(busier, start, target_s=more) <= count
    assert speed.prompt_tokens(work, start, target_s=more, most=7) == min(7, count)


def test_the_ridge_of_a_well_known_model() -> None:
    """By hand: weights and KV of 30,000 tokens in 5.97 ms, a token in 21.7 us, 16 rows of them gone."""
    model = CostModel.of("llama-3.1-8b", "h100", "25GB/s")
    speed, writers = Speed.of(model), Work.writing(16, 30_000)
    reading = (8.03e9 * 2 + 30_000 * 131_072) / 3.35e12
    token = model.shape.flops_per_token / (989.4e12 * 0.65)
    # Two more go to attention.
    assert speed.prompt_tokens(writers) == pytest.approx(reading / token - 16 - 2, abs=1)
    # A prompt that goes on behind 60,000 tokens reads these as well, and looks at them.
    behind = speed.prompt_tokens(writers, 60_000)
    pair = 4 * 32 * 4096 / (989.4e12 * 0.65)
    assert behind == pytest.approx((reading + 60_000 * 131_072 / 3.35e12) / (token + 60_000 * pair) - 6, rel=0.02)


def test_what_has_no_end_ends_at_most() -> None:
    assert speed(weights_s=1.0).prompt_tokens(Work(5, 5, 5)) == MAX_TOKENS
    assert speed(weights_s=1.0).prompt_tokens(Work(5, 5, 5), most=100) == 100
    # Where nothing is read every token is in the way, and one of them has to be.
    computing = speed(token_s=1.0)
    assert [computing.prompt_tokens(Work(5, 5, 5), target_s=seconds) for seconds in (0, 4, 6, 7, 15)] == [
        1,
        1,
        1,
        2,
        10,
    ]


def test_a_token_alone() -> None:
    slow = speed(token_s=2.0, pair_s=0.5, weights_s=3.0, kv_token_s=0.25, overhead_s=1.0)
    for context in (1, 5, 8, 100):
        assert slow.token_alone_s(context) == slow.step_s(*Work.writing(1, context))


def test_work_adds_up() -> None:
    work = Work.writing(3, 30).with_prompt(4, 2).with_prompt(0, 3)
    assert work == Work(3 + 2 + 3, 30 + (5 + 6) + (1 + 2 + 3), 30 + 6 + 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"work": Work(-1, 0, 0)}, "work.tokens is -1; it must be a whole number of at least 0"),
        ({"work": Work(1, 0.5, 0)}, "work.pairs is 0.5"),  # type: ignore[arg-type]
        ({"work": (1, 2, None)}, "work.kv_tokens is None"),
        ({"start": -3}, "start is -3"),
        ({"most": 0}, "most is 0; it must be a whole number of at least 1"),
        ({"target_s": -1}, "target_s is -1; it must be a finite number at least 0"),
        ({"target_s": math.inf}, "target_s is inf"),
        ({"target_s": math.nan}, "target_s is nan"),
        ({"target_s": "8ms"}, "target_s is '8ms'"),
    ],
)
def test_what_is_no_number(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speed(token_s=1.0).prompt_tokens(**({"work": Work(1, 1, 1)} | arguments))
