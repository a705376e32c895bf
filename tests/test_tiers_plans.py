"""Plans: numbers, states and reports, late ones too, and what holds what meanwhile (rules 16.1, 16.2)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from implementations import admit_committed, cache, free_ids, ids, line, nothing_changes, refuses
from tiers import arrive, each_with_tiers, offloaded, pairs, states, swapped

import kvpager
from kvpager import ConfigError, Plan, StaleHandle, TransferError

pytestmark = each_with_tiers


@pytest.fixture
def pager(implementation):
    """Three cached blocks (0-2), deepest coldest, and 5 free ones; an empty host of 8 blocks."""
    pager = implementation(8, 4, num_host_blocks=8)
    cache(pager, list(range(13)))
    return pager


def test_the_host_has_as_many_blocks_as_the_pager_was_told(implementation):
    assert implementation(4, 4).num_host_blocks == 0
    assert implementation(4, 4, num_host_blocks=7).num_host_blocks == 7
    for wrong in (-1, 2**31):
        with refuses(ConfigError, "num_host_blocks"):
            implementation(4, 4, num_host_blocks=wrong)
    with refuses(TypeError):
        implementation(4, 4, num_host_blocks=1.0)


def test_without_host_blocks_nothing_is_moved_and_nothing_more_is_drawn(implementation):
    pager = implementation(4, 4)
    sequence = admit_committed(pager, [1] * 6)
    assert pager.plans() == []
    for call in (lambda: pager.offload(1), lambda: pager.offload_committed(sequence), sequence.swap_out):
        with nothing_changes(pager), refuses(TransferError, "num_host_blocks"):
            call()
    assert "host" not in pager.dump(full=True)
    assert "fenced" not in pager.dump(full=True)
    assert pager.match([1] * 9).num_host_tokens == 0
    assert pager.admit([1] * 6, fetch=True).state == "running"


def test_a_plan_is_a_plain_value(pager):
    plan = pager.offload(2)
    assert (plan.id, plan.generation, plan.kind, plan.source, plan.destination) == (0, 0, "offload", "device", "host")
    assert pairs(plan) == [(0, 0), (1, 1)]
    assert plan.source_ids.dtype == plan.destination_ids.dtype == np.int32
    assert not plan.source_ids.flags.writeable
    assert not plan.destination_ids.flags.writeable
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pager.start(pickle.loads(pickle.dumps(plan)))


def test_the_lowest_free_number_is_used_again_with_another_generation(pager):
    first, second = pager.offload(1), pager.offload(1)
    assert states(pager) == [(0, 0, "planned", None), (1, 0, "planned", None)]
    assert pager.cancel(first)
    third = pager.offload(1)
    assert states(pager) == [(1, 0, "planned", None), (0, 1, "planned", None)]
    assert pager.cancel(second)
    assert pager.cancel(third)
    assert pager.offload(1).generation == 2


def test_an_abandoned_plan_keeps_its_number(pager):
    plan = pager.offload(1)
    pager.start(plan)
    pager.abandon(plan)
    assert pager.offload(1).id == 1
    assert pager.reclaim(plan)
    assert pager.offload(1).id == 0


def test_each_report_fits_one_state(pager):
    fits = {"planned": ("start", "cancel"), "started": ("complete", "fail", "abandon"), "abandoned": ("reclaim",)}
    reports = [report for some in fits.values() for report in some]
    plan, late = pager.offload(1), 0
    for step, state in (("start", "planned"), ("abandon", "started"), ("reclaim", "abandoned")):
        for report in set(reports) - set(fits[state]):
            if (report, state) == ("start", "started"):
                with nothing_changes(pager):
                    assert pager.start(plan) is False
                continue
            if state == "abandoned" and report in fits["started"]:
                with nothing_changes(pager):
                    assert getattr(pager, report)(plan) is False
                late += 1
                continue
            with nothing_changes(pager), refuses(TransferError, state):
                getattr(pager, report)(plan)
        assert getattr(pager, step)(plan) is True
    assert pager.stats().late_reports == late


def test_a_late_report_is_ignored_and_counted(pager):
    """L4: the number may belong to another plan by now; the generation tells."""
    plan = pager.offload(1)
    arrive(pager, plan)
    other = pager.offload(1)
    assert other.id == plan.id
    for report in ("start", "complete", "fail", "cancel", "abandon", "reclaim"):
        with nothing_changes(pager):
            assert getattr(pager, report)(plan) is False
    assert pager.stats().late_reports == 6
    assert pager.start(other)


def test_a_plan_that_was_never_made_is_an_error(pager):
    plan = pager.offload(1)
    for number, generation in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        strange = Plan(number, generation, "offload", "device", plan.source_ids, "host", plan.destination_ids)
        with nothing_changes(pager), refuses(ValueError):
            pager.start(strange)
    for wrong in (None, 0, (0, 0)):
        with nothing_changes(pager), refuses(TypeError):
            pager.start(wrong)


def test_ticks_are_the_callers(pager):
    first, second, third = (pager.offload(1) for _ in range(3))
    assert pager.start(second, 7)
    assert pager.start(first)  # the clock
    assert states(pager) == [(0, 0, "started", 1), (1, 0, "started", 7), (2, 0, "planned", None)]
    assert [status.plan for status in pager.plans(older_than=7)] == [first]
    assert pager.plans(older_than=1) == []
    assert pager.abandon(second)
    assert [status.state for status in pager.plans(older_than=8)] == ["started", "abandoned"]
    assert pager.plans()[0] == kvpager.PlanStatus(first, "started", 1)
    for wrong, error in ((-1, ValueError), (2**63, ValueError), (1.5, TypeError), (True, TypeError)):
        with nothing_changes(pager), refuses(error):
            pager.start(third, wrong)
        with refuses(error):
            pager.plans(older_than=wrong)


def test_done_is_checked(pager):
    plan = pager.offload(2)
    assert pager.start(plan)
    for wrong, error in (
        ([True], ValueError),
        ([True] * 3, ValueError),
        (np.ones(3, bool), ValueError),
        ([1, 0], TypeError),
        (np.ones(2, np.float32), TypeError),
        (range(2), TypeError),
        (np.ones((2, 1), bool), TypeError),
        ("no", TypeError),
        (True, TypeError),
    ):
        with nothing_changes(pager), refuses(error):
            pager.fail(plan, wrong)
    assert pager.fail(plan, np.array([True, False]))


def test_a_plan_without_blocks_goes_the_same_way(pager):
    sequence = pager.admit([9])
    plan = sequence.swap_out()
    assert len(plan) == 0
    assert line(pager, "plan").endswith("plan 0.0: swap_out; planned; -")
    arrive(pager, plan)
    assert sequence.state == "swapped"
    arrive(pager, sequence.swap_in())
    assert (sequence.state, sequence.num_committed) == ("running", 0)


def test_what_a_plan_writes_is_nobody_elses(pager):
    """I9: destinations are writing, then in quarantine, and only then free."""
    plan = pager.offload(2)
    assert (pager.stats().host_writing_blocks, pager.stats().host_free_blocks) == (2, 6)
    assert "host: 8 blocks: 6 free, 0 cached, 0 active, 2 writing\n" in pager.dump()
    assert line(pager, "host free: ") == "host free: 2-7"
    pager.start(plan)
    pager.abandon(plan)
    assert pager.stats().host_quarantined_blocks == 2
    assert "host: 8 blocks: 6 free, 0 cached, 0 active, 2 quarantined\n" in pager.dump()
    assert line(pager, "plan") == "plan 0.0: offload; abandoned at 1; 0->0 1->1"
    other = pager.offload(2)
    assert other.destination_ids.tolist() == [2, 3]
    assert pager.reclaim(plan)
    assert line(pager, "host free: ") == "host free: 0-1 4-7"


def test_what_an_offload_reads_is_passed_over_and_keeps_its_place(pager):
    """I9: a block that is read may be hit, but is not evicted. 2 is colder than 1, and 1 than 0."""
    plan = pager.offload(2)
    assert pairs(plan) == [(0, 0), (1, 1)]
    assert line(pager, "queue lru") == "queue lru: 2 1 0"
    assert pager.num_evictable_blocks == pager.stats().cached_blocks == 1
    assert pager.stats().active_blocks == 2
    assert "└─ 2 blocks 0-1: tokens 0 1 2 3; holders 1; hits 0; idle since 0\n" in pager.dump()
    other = pager.admit([7] * 20)
    assert ids(other) == [3, 4, 5, 6, 7]
    hit = pager.admit(list(range(9)))
    assert (hit.num_cached, ids(hit)) == (8, [0, 1, 2])
    hit.release()
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        pager.admit([8] * 8)
    assert (refused.value.free, refused.value.evictable) == (1, 0)
    arrive(pager, plan)
    assert ids(pager.admit([8] * 8)) == [2, 1]


def test_a_hit_block_that_is_read_joins_the_queue_as_usual(pager):
    plan = pager.offload(1)
    assert pairs(plan) == [(0, 0)]
    hit = pager.admit(list(range(5)))
    assert line(pager, "queue lru") == "queue lru: 2 1"
    hit.release()
    assert line(pager, "queue lru") == "queue lru: 2 1 0"
    assert "1 block 0: tokens 0 1 2 3; holders 1; hits 1; idle since 1" in pager.dump()
    arrive(pager, plan)
    assert pager.num_evictable_blocks == 3


def test_a_block_that_is_forgotten_while_it_is_read_is_pushed_when_the_plan_ends(pager):
    plan = pager.offload(3)
    assert pager.forget(list(range(8))) == 2
    assert free_ids(pager) == "3-7"
    assert pager.stats().active_blocks == 3
    arrive(pager, plan)
    assert free_ids(pager) == "1-7"
    assert pager.stats().offloaded_blocks == 1
    assert line(pager, "host free: ") == "host free: 1-7"


def test_a_reset_while_a_block_is_read(pager):
    plan = pager.offload(2)
    pager.reset()
    assert (pager.stats().cached_blocks, pager.stats().active_blocks) == (0, 2)
    assert free_ids(pager) == "3-7 2"
    arrive(pager, plan)
    assert free_ids(pager) == "0-1 3-7 2"
    assert (pager.stats().offloaded_blocks, pager.stats().host_free_blocks) == (0, 8)


def test_demotion_moves_what_is_read_like_the_others(implementation):
    pager = implementation(5, 4, policy="slru", num_host_blocks=4)
    for number in (1, 2, 3):
        cache(pager, [number] * 5)
        pager.admit([number] * 5).release()
    assert [line(pager, name) for name in ("queue probation", "queue protected")] == [
        "queue probation: 0",
        "queue protected: 1-2",
    ]
    assert pairs(pager.offload(2)) == [(0, 0), (1, 1)]
    cache(pager, [4] * 5)
    pager.admit([4] * 5).release()
    assert [line(pager, name) for name in ("queue probation", "queue protected")] == [
        "queue probation: 0-1",
        "queue protected: 2-3",
    ]
    assert pager.num_evictable_blocks == 2


def test_reports_release_dropped_handles_first(pager):
    sequence = admit_committed(pager, [9] * 5)
    plan = sequence.swap_out()
    del sequence
    # The sequence is released first, which cancels the plan that was not started.
    assert pager.start(plan) is False
    assert pager.stats().dropped_handles == 1
    assert pager.stats().running_sequences == 0


CALLS = ("append", "extend", "slots", "commit", "fork", "truncate", "preempt", "resume", "swap_out", "swap_in")
ARGUMENTS = {"append": (1,), "extend": ([1],), "slots": (0, 1), "truncate": (1,)}


def fetching(pager):
    """A sequence of two blocks, of which the first comes from the host."""
    cache(pager, [7] * 5)
    offloaded(pager, 9)
    pager.admit([5] * 32).release()  # nobody has committed this: the device is empty
    return pager.admit([7] * 5, fetch=True)


def swapping_out(pager):
    sequence = admit_committed(pager, [9] * 6)
    sequence.swap_out()
    return sequence


def swapping_in(pager):
    sequence = admit_committed(pager, [9] * 6)
    swapped(pager, sequence)
    sequence.swap_in()
    return sequence


@pytest.mark.parametrize("on_its_way", [fetching, swapping_out, swapping_in], ids=lambda each: each.__name__)
def test_what_a_sequence_on_its_way_allows(pager, on_its_way):
    """Its plan must end first; all that can be read can be read."""
    batch, sequence = pager.batch(2, 8), on_its_way(pager)
    assert sequence.state == on_its_way.__name__
    assert pager.stats().running_sequences == 1
    with nothing_changes(pager):
        for call in CALLS:
            with refuses(StaleHandle, "its plan must end first"):
                getattr(sequence, call)(*ARGUMENTS.get(call, ()))
        for call in (batch.add, pager.offload_committed):
            with refuses(StaleHandle, "its plan must end first"):
                call(sequence)
    assert len(sequence) == len(sequence.tokens)
    assert (sequence.namespace, sequence.pinned) == (b"", False)
    assert len(sequence.block_ids) == 2
    assert sequence.num_cached <= sequence.num_committed == sequence.num_planned
    assert (sequence.fetch is not None) == (sequence.state == "fetching")
    with sequence:
        pass
    assert sequence.state == "released"


def test_what_a_swapped_sequence_allows(pager):
    sequence = admit_committed(pager, [9] * 6)
    swapped(pager, sequence)
    with nothing_changes(pager):
        for call in set(CALLS) - {"swap_in", "resume"}:
            with refuses(StaleHandle, "swapped out"):
                getattr(sequence, call)(*ARGUMENTS.get(call, ()))
        with refuses(StaleHandle):
            _ = sequence.block_ids
    assert (sequence.num_committed, sequence.num_planned, len(sequence)) == (6, 6, 6)
    assert sequence.fetch is None
    with sequence:
        pass
    assert sequence.state == "released"
    with refuses(StaleHandle):
        _ = sequence.fetch
