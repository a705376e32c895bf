"""The example server's host tier: an answer stays what it is alone, whatever is swapped, fetched, late or lost."""

from __future__ import annotations

import random
from functools import partial

import pytest
from server_support import a_history, a_scheduler, ask, drive, some

from examples.server.requests import Failed
from kvpager.testing import FakeMover

PRESSED = {"max_seqs": 4, "risk": 1.0, "prefill_budget": 16}
"""Six answers of 50 tokens, four at a time, need some 52 blocks: in 20 they make room for each other."""


def a_mover(seed=0, **faults):
    return partial(FakeMover, seed=seed, **faults)


def with_clock(scheduler):
    """A deadline in rounds: each look at the clock is a second later."""
    ticks = iter(range(0, 10**9, 1000))
    scheduler.transfers.clock_ms = lambda: next(ticks)
    return scheduler


def finish(scheduler, asked=()):
    """All answers are right, and all blocks come back."""
    drive(scheduler)
    assert [each.texts for each in asked] == [each.alone() for each in asked]
    scheduler.transfers.close()
    pager, stats = scheduler.pager, scheduler.pager.stats()
    assert pager.check() == []
    assert pager.plans() == []
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert stats.host_free_blocks + stats.host_cached_blocks == stats.host_total_blocks
    return stats


def six(scheduler):
    return [ask(scheduler, some(each, 10), 40, temperature=each % 2, seed=each) for each in range(6)]


@pytest.mark.parametrize("make_mover", [None, a_mover(late=3, pace=3)], ids=["numpy", "fake"])
def test_who_makes_room_is_swapped_and_nothing_is_computed_twice(make_mover):
    more = {"make_mover": make_mover} if make_mover else {}
    scheduler = a_scheduler(20, host_blocks=64, **more, **PRESSED)
    asked = six(scheduler)
    stats = finish(scheduler, asked)
    assert stats.swap_outs == stats.swap_ins > 0
    assert scheduler.pager.preemptions()[0].reason.endswith("to the host for less than computing it again")
    if make_mover is None and stats.preemptions:
        return  # A thread copies: on a busy machine it may not have done so when nobody else can go on.
    assert (stats.preemptions, stats.recomputed_tokens) == (0, 0)
    assert scheduler.counters.computed_tokens == sum(10 + each.request.num_sampled - 1 for each in asked)


def test_a_host_without_room_falls_back_to_computing_again():
    scheduler = a_scheduler(20, host_blocks=2, **PRESSED)
    stats = finish(scheduler, six(scheduler))
    assert stats.preemptions > stats.swap_outs  # A very short answer may fit into two blocks of the host.


def test_what_was_evicted_comes_back_by_fetch():
    scheduler = a_scheduler(20, host_blocks=64)
    first = ask(scheduler, some(0, 30), 3)
    drive(scheduler)
    others = [ask(scheduler, some(each, 60), 3) for each in range(1, 4)]
    drive(scheduler)
    assert scheduler.pager.match(some(0, 30)).num_tokens < 28
    again = ask(scheduler, some(0, 30), 3)
    drive(scheduler)
    assert (first.request.num_cached, again.request.num_cached) == (0, 28)
    metrics = scheduler.metrics()
    assert metrics["fetched_tokens"] == 4 * metrics["pager_fetched_blocks"] > 0
    assert metrics["pager_host_cached_blocks"] > 0
    finish(scheduler, [first, *others, again])


def test_equal_prompts_wait_for_one_fetch():
    scheduler = a_scheduler(20, host_blocks=64, make_mover=a_mover(pace=1), max_seqs=4)
    for each in range(4):
        ask(scheduler, some(each, 60), 1)
        drive(scheduler)
    asked = [ask(scheduler, some(0, 60), 3) for _ in range(3)]
    scheduler.step()
    assert list(scheduler.moving.values()) == ["fetching"]
    assert len(scheduler.waiting) == 2
    stats = finish(scheduler, asked)
    assert {each.request.num_cached for each in asked} == {56}
    assert stats.fetched_blocks <= 14


@pytest.mark.parametrize(
    "faults",
    [{"fail": 1.0}, {"fail": 0.5, "late": 4}, {"never": 1.0}, {"never": 0.3, "pace": 2}, {"fail": 0.3, "never": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("number", range(3))
def test_a_mover_that_fails_or_never_answers(faults, number, seed):
    rng = random.Random(f"{seed} {number} {faults}")
    make_mover = a_mover(rng.randrange(2**32), **faults)
    scheduler = with_clock(a_scheduler(20, host_blocks=rng.choice([8, 64]), make_mover=make_mover, **PRESSED))
    asked = six(scheduler)
    asked += [ask(scheduler, some(rng.randrange(6), rng.randrange(20, 60)), 5) for _ in range(6)]
    finish(scheduler, asked)
    metrics = scheduler.metrics()
    if faults.get("fail") == 1.0:
        assert metrics["failed_transfers"] > 0
    if faults.get("never") == 1.0:
        assert metrics["abandoned_transfers"] > 0
        assert not scheduler.transfers.is_open


def test_a_late_answer_ends_the_quarantine():
    scheduler = with_clock(a_scheduler(20, host_blocks=64, make_mover=a_mover(never=1.0), deadline_s=100))
    asked = [ask(scheduler, some(0, 30), 3)]
    while not scheduler.transfers.abandoned:
        scheduler.step()
    assert scheduler.pager.stats().host_quarantined_blocks > 0
    assert not scheduler.transfers.is_open
    scheduler.transfers.mover.thaw()
    while scheduler.transfers.abandoned:
        scheduler.step()
    assert scheduler.pager.stats().host_quarantined_blocks == 0
    assert scheduler.transfers.is_open
    finish(scheduler, asked)


@pytest.mark.parametrize("faults", [{}, {"never": 1.0}], ids=str)
def test_a_client_that_goes_away_at_any_moment(faults):
    """Also while its blocks move. Two of the requests are fetched: they were asked before, and evicted."""
    met = set()
    for rounds in range(0, 60, 2):
        make_mover = a_mover(rounds, pace=2, **faults)
        scheduler = with_clock(a_scheduler(20, host_blocks=64, make_mover=make_mover, deadline_s=60, **PRESSED))
        for each in range(3):
            ask(scheduler, some(each, 60), 1)
        for _ in range(80):
            scheduler.step()
        asked = [ask(scheduler, some(each % 3, 60 if each < 2 else 10), 15) for each in range(6)]
        for _ in range(rounds):
            scheduler.step()
        met |= set(scheduler.moving.values())
        for each in asked:
            scheduler.abort(each.request)
        scheduler.step()
        assert not scheduler._samples()
        finish(scheduler)
    if not faults:
        assert met == {"fetching", "swapping_out", "swapping_in"}


def test_a_server_that_stops_amid_transfers():
    scheduler = a_scheduler(20, host_blocks=64, make_mover=a_mover(pace=1), **PRESSED)
    asked = six(scheduler)
    while not scheduler.moving:
        scheduler.step()
    scheduler.start()
    scheduler.close()
    assert any(each.events[-1] == Failed("the server stops") for each in asked)
    finish(scheduler)


@pytest.mark.parametrize("host_blocks", [6, 24, 96])
@pytest.mark.parametrize("num_blocks", [12, 24])
def test_every_answer_is_what_it_is_alone_whatever_moves(num_blocks, host_blocks, seed):
    """Shared prefixes, samples, chunks, swaps, fetches, failures, late reports and aborts, all at once."""
    rng = random.Random(f"{seed} {num_blocks} {host_blocks}")
    faults = {"fail": rng.choice([0, 0.2]), "never": rng.choice([0, 0.02]), "late": rng.choice([0, 3])}
    make_mover = a_mover(rng.randrange(2**32), pace=rng.choice([1, 4, 20]), **faults)
    limits = {"max_seqs": rng.choice([3, 5]), "prefill_budget": rng.choice([3, 8, 64]), "risk": 1.0}
    scheduler = a_scheduler(num_blocks, host_blocks=host_blocks, make_mover=make_mover, deadline_s=200, **limits)
    finish(scheduler, a_history(with_clock(scheduler), rng, 25, max_tokens=20))


def test_nobody_waits_for_the_end_of_who_has_no_share_in_the_step():
    """Two rows that found no block had the whole prefill budget, and waited for the end of a third without any."""
    test_every_answer_is_what_it_is_alone_whatever_moves(12, 96, 2591184257)
