"""The thrash signal: what it is made of, when a state begins and ends, and whether its advice helps."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given
from test_simulate import SPEED

import kvpager
from kvpager import Pressure, Stats
from kvpager.simulate import SCENARIOS, Advised, ConcurrencyLimit, Engine, EngineConfig, FirstCome, Newest

EMPTY = kvpager.Pager(100, 16).stats()


class Pool:
    """Statistics by hand."""

    def __init__(self) -> None:
        self.now = EMPTY

    def stats(self) -> Stats:
        return self.now

    def add(self, **counters: int) -> None:
        """Counters go up by so much; gauges are set."""
        names = {
            name: value
            if name.endswith(("_blocks", "_sequences")) and name not in GROW
            else getattr(self.now, name) + value
            for name, value in counters.items()
        }
        self.now = dataclasses.replace(self.now, **names)


GROW = {"finished_sequences", "evicted_blocks", "refaulted_blocks", "admitted_sequences"}


def test_an_idle_pool_is_ok():
    pager = kvpager.Pager(100, 16)
    reading = Pressure(pager).read()
    assert (reading.state, reading.score, reading.tax, reading.running) == ("ok", 0.0, 0.0, 0)
    assert (reading.free, reading.active, reading.head_room) == (1.0, 0.0, 100)
    assert reading.concurrency >= 1


def test_each_number_is_a_difference_over_the_window():
    pool = Pool()
    pool.add(computed_tokens=10_000, recomputed_tokens=9_000, preemptions=99)  # before it was looked at
    pressure = Pressure(pool, window=2)
    pool.add(computed_tokens=100, recomputed_tokens=20, preemptions=3, finished_sequences=4)
    pool.add(evicted_blocks=10, refaulted_blocks=5, refault_distance=35)
    pool.add(active_blocks=60, cached_blocks=30, evictable_blocks=30, free_blocks=10, running_sequences=6)
    reading = pressure.read()
    assert (reading.tax, reading.preemptions_per_finish) == (0.2, 0.75)
    assert (reading.refault_share, reading.refault_distance) == (0.5, 7.0)
    assert (reading.active, reading.cached, reading.free, reading.head_room) == (0.6, 0.3, 0.1, 40)
    assert reading.score == pytest.approx(2.0)
    assert reading.concurrency == int(100 * 0.95 * 6 / 60)
    assert reading.reason.startswith("thrashing: 20.0% of the computed tokens")
    pool.add(computed_tokens=100)
    assert pressure.read().tax == 0.1
    assert pressure.read().tax == 0.0  # the first reading has left the window


def test_swaps_are_preemptions_without_a_tax():
    pool = Pool()
    pressure = Pressure(pool)
    pool.add(computed_tokens=100, swap_outs=3, finished_sequences=2)
    reading = pressure.read()
    assert (reading.tax, reading.preemptions_per_finish) == (0.0, 1.5)


def test_without_a_finish_every_preemption_counts_in_full():
    pool = Pool()
    pressure = Pressure(pool)
    pool.add(preemptions=2, recomputed_tokens=50)
    reading = pressure.read()
    assert (reading.preemptions_per_finish, reading.tax, reading.state) == (2.0, 1.0, "thrashing")


def test_a_state_ends_at_half_of_where_it_begins():
    pool = Pool()
    pressure = Pressure(pool, window=1)
    seen, told = [], []
    for percent in (0, 2, 3, 2, 1, 3, 9, 10, 9, 5, 4.9, 2, 1.2, 11, 0):
        pool.add(computed_tokens=1000, recomputed_tokens=round(10 * percent))
        reading = pressure.read()
        seen.append(reading.state)
        assert seen[-1] == pressure.state
        told += [percent] if reading.reason.endswith("; it ends below half of both") else []
    ok, some, much = "ok", "pressure", "thrashing"
    assert seen == [ok, ok, some, some, ok, some, some, much, much, much, some, some, ok, much, ok]
    assert told == [9, 5]  # thrashing below both limits, which nobody would expect


def test_bad_settings_are_refused():
    pager = kvpager.Pager(4, 16)
    for settings in (
        {"window": 0},
        {"window": True},
        {"window": 1.5},
        {"max_tax": 0.0},
        {"max_tax": float("nan")},
        {"max_preemptions_per_finish": float("inf")},
        {"reserve": 1.0},
        {"reserve": -0.1},
    ):
        with pytest.raises(kvpager.ConfigError):
            Pressure(pager, **settings)  # type: ignore[arg-type]


# On a real pager that thrashes.


class Watched(FirstCome):
    """First come, first served, and somebody who reads the signal."""

    def __init__(self, follows: bool) -> None:
        self.follows = follows
        self.pressure: Pressure | None = None
        self.states: set[str] = set()

    def admit(self, engine, request):
        if self.pressure is None:
            self.pressure = Pressure(engine.pager, window=200)
        reading = self.pressure.read()
        self.states.add(reading.state)
        if self.follows and reading.state != "ok" and engine.num_running >= reading.concurrency:
            return None
        return engine.enter(request)


def run(admission):
    load = SCENARIOS["thrash"](3, 96)
    return Engine(load, EngineConfig(num_blocks=1500), SPEED, admission, Newest()).run()


def test_the_signal_sees_a_pool_that_thrashes_and_none_in_one_that_does_not():
    watched = Watched(follows=False)
    result = run(watched)
    assert result.tax > 0.15
    assert "thrashing" in watched.states
    calm = Watched(follows=False)
    result = Engine(SCENARIOS["thrash"](3, 96), EngineConfig(num_blocks=20_000), SPEED, calm, Newest()).run()
    assert (result.preemptions, calm.states) == (0, {"ok"})


def test_following_the_advice_helps():
    blind, following = run(Watched(follows=False)), run(Watched(follows=True))
    assert following.preemptions < blind.preemptions
    assert following.tax < blind.tax
    assert following.steps <= 1.1 * blind.steps


@pytest.mark.parametrize("policy", ["newest", "cheapest", "least_progress"])
def test_the_simulator_can_ask_the_pager_for_its_victims(policy):
    load = SCENARIOS["thrash"](3, 48)
    config = EngineConfig(num_blocks=800)
    advised = Engine(load, config, SPEED, FirstCome(), Advised(policy)).run()
    again = Engine(load, config, SPEED, FirstCome(), Advised(policy)).run()
    assert (advised.steps, advised.preemptions) == (again.steps, again.preemptions)
    assert advised.preemptions > 0
    if policy == "newest":
        # Without sparing anybody it is the classic rule, to the last preemption.
        classic = Engine(load, config, SPEED, FirstCome(), Newest()).run()
        same = Engine(load, config, SPEED, FirstCome(), Advised(spare_after=10**6)).run()
        assert (same.steps, same.preemptions, same.tax) == (classic.steps, classic.preemptions, classic.tax)
    assert Engine(load, config, SPEED, ConcurrencyLimit(8), Advised(policy)).run().tax < advised.tax


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 6), min_size=1, max_size=30), st.integers(1, 8))
def test_a_window_is_what_the_last_readings_say(changes, window):
    """Against the sums over the window, counted anew for each reading."""
    pool = Pool()
    pressure = Pressure(pool, window, reserve=0.0)
    for number, (computed, recomputed, preemptions, finished, active, running) in enumerate(changes):
        pool.add(computed_tokens=computed, recomputed_tokens=recomputed, preemptions=preemptions)
        pool.add(finished_sequences=finished, active_blocks=active, running_sequences=running)
        reading = pressure.read()
        seen = changes[max(0, number + 1 - window) : number + 1]
        totals = [sum(column) for column in zip(*seen, strict=True)]
        assert reading.tax == (min(1.0, totals[1] / totals[0]) if totals[0] else float(totals[1] > 0))
        assert reading.preemptions_per_finish == totals[2] / max(1, totals[3])
        if totals[4]:
            assert reading.concurrency == max(1, int(100 * totals[5] / totals[4]))
