"""Offloads: which blocks go to the host, in which order, and what is indexed there (rule 16.3)."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache, ids, line, nothing_changes, refuses
from tiers import arrive, each_with_tiers, host_tree, offloaded, on_host, pairs

from kvpager import StaleHandle, TransferError

pytestmark = each_with_tiers


@pytest.fixture
def pager(implementation):
    return implementation(8, 4, num_host_blocks=8)


def test_the_coldest_go_first_and_each_with_what_is_above_it(pager):
    cache(pager, [1] * 9)  # 0 1, of which 1 is colder
    cache(pager, [2] * 5)  # 2
    assert line(pager, "queue lru") == "queue lru: 1 0 2"
    assert pairs(pager.offload(2)) == [(0, 0), (1, 1)]
    assert pairs(pager.offload(9)) == [(2, 2)]
    assert pager.offload(1) is None


def test_a_path_that_is_cut_goes_on_later(pager):
    cache(pager, [1] * 13)
    first = pager.offload(2)
    assert pairs(first) == [(0, 0), (1, 1)]
    second = pager.offload(2)  # its host copy of the block above is not there yet
    assert pairs(second) == [(2, 2)]
    arrive(pager, first)
    assert line(pager, "host queue lru") == "host queue lru: 1 0"
    arrive(pager, second)
    assert line(pager, "host queue lru") == "host queue lru: 2 1 0"
    assert host_tree(pager).startswith(" b''\n└─ 3 blocks 0-2: tokens 1 1 1 1; holders 0; hits 0; idle since 1")


def test_blocks_whose_parent_never_arrives_come_to_nothing(pager):
    cache(pager, [1] * 13)
    first, second = pager.offload(2), pager.offload(1)
    pager.start(first)
    pager.fail(first, [True, False])
    assert pager.stats().offloaded_blocks == 1
    arrive(pager, second)
    assert pager.stats().offloaded_blocks == 1
    assert line(pager, "host free: ") == "host free: 2 1 3-7"
    assert pairs(pager.offload(9)) == [(1, 2), (2, 1)]


def test_what_failed_is_offered_again_and_what_arrived_is_not(pager):
    cache(pager, [1] * 13)
    plan = pager.offload(3)
    pager.start(plan)
    assert pager.fail(plan, [True, False, True])
    assert line(pager, "host free: ") == "host free: 1-7"
    assert pairs(pager.offload(3)) == [(1, 1), (2, 2)]


def test_a_block_that_was_on_its_way_was_offered(pager):
    """Should that plan fail, the block waits until it joins a queue again."""
    cache(pager, [1] * 9)
    plan = pager.offload(2)
    assert pager.offload(1) is None
    pager.cancel(plan)
    assert pager.offload(1) is None
    pager.admit([1] * 9).release()
    assert pairs(pager.offload(9)) == [(0, 0), (1, 1)]


def test_two_chains_of_one_plan(pager):
    """Two paths below one block: that is copied once, with the first."""
    cache(pager, [1] * 4 + [2] * 5)
    cache(pager, [1] * 4 + [3] * 5)
    assert line(pager, "queue lru") == "queue lru: 1-2 0"
    plan = pager.offload(9)
    assert pairs(plan) == [(0, 0), (1, 1), (2, 2)]
    assert "1 block 0: tokens 1 1 1 1; holders 2; hits 1" in pager.dump()
    arrive(pager, plan)
    assert line(pager, "host queue lru") == "host queue lru: 1-2 0"


def test_the_block_above_a_chain_is_held(implementation):
    """It is what the chain hangs on: the host may evict everything else."""
    pager = implementation(8, 4, num_host_blocks=2)
    cache(pager, [1] * 9)
    offloaded(pager, 1)
    cache(pager, [2] * 5)
    plan = pager.offload(9)
    assert pairs(plan) == [(1, 1)]
    assert "1 block 0: tokens 1 1 1 1; holders 1; hits 0" in host_tree(pager)
    assert pager.offload(9) is None  # no room: the only cached block is held
    arrive(pager, plan)
    assert line(pager, "host queue lru") == "host queue lru: 1 0"


def test_the_host_evicts_its_coldest(implementation):
    pager = implementation(8, 4, num_host_blocks=2)
    for number in (1, 2, 3):
        cache(pager, [number] * 5)
    offloaded(pager, 2)
    assert pairs(offloaded(pager, 1)) == [(2, 0)]
    assert pager.stats().host_evicted_blocks == 1
    assert pager.stats().evicted_blocks == 0
    assert on_host(pager, [1] * 5) == 0


def test_an_offered_block_is_passed_over_until_it_joins_a_queue_again(implementation):
    pager = implementation(8, 4, num_host_blocks=1)
    cache(pager, [1] * 5)
    cache(pager, [2] * 5)
    assert pairs(offloaded(pager, 1)) == [(0, 0)]
    assert pairs(offloaded(pager, 1)) == [(1, 0)]  # the first is found to be there, and then it is not any more
    assert pager.offload(2) is None
    pager.admit([1] * 5).release()
    assert pairs(pager.offload(2)) == [(0, 0)]


def test_demotion_ends_an_offer(implementation):
    pager = implementation(4, 4, policy="slru", num_host_blocks=1)
    for number in (1, 2):
        cache(pager, [number] * 5)
        pager.admit([number] * 5).release()
    assert pairs(offloaded(pager, 1)) == [(0, 0)]
    assert pairs(offloaded(pager, 1)) == [(1, 0)]
    assert pager.offload(9) is None
    cache(pager, [3] * 5)
    pager.admit([3] * 5).release()  # the first is demoted
    assert [line(pager, name) for name in ("queue probation", "queue protected")] == [
        "queue probation: 0",
        "queue protected: 1-2",
    ]
    assert pairs(pager.offload(9)) == [(0, 0)]


def test_probation_goes_before_protected(implementation):
    pager = implementation(8, 4, policy="slru", num_host_blocks=8)
    cache(pager, [1] * 5)
    pager.admit([1] * 5).release()
    cache(pager, [2] * 5)
    assert pairs(pager.offload(1)) == [(1, 0)]


def test_what_the_host_has_already_stays_as_it_is(pager):
    """Two plans for one content: a block is forgotten on the device, computed again and offloaded again."""
    cache(pager, [1] * 9)
    first = pager.offload(2)
    pager.forget([1] * 4)
    cache(pager, [1] * 9)
    second = pager.offload(2)
    assert pairs(second) == [(2, 2), (3, 3)]
    arrive(pager, second)
    assert pager.stats().offloaded_blocks == 2
    arrive(pager, first)  # its blocks were forgotten
    assert pager.stats().offloaded_blocks == 2
    assert pager.stats().host_free_blocks == 6


def test_an_existing_child_is_followed(implementation):
    """A swapped sequence brought the same block meanwhile."""
    pager = implementation(8, 4, num_host_blocks=8)
    sequence = admit_committed(pager, [1] * 9)
    plan = pager.offload_committed(sequence)
    assert pairs(plan) == [(0, 0), (1, 1)]
    arrive(pager, sequence.swap_out())
    assert line(pager, "sequence 0").endswith("host path 2-3; host own 4")
    arrive(pager, plan)
    assert pager.stats().offloaded_blocks == 0
    assert line(pager, "host free: ") == "host free: 0-1 5-7"
    sequence.release()


def test_cancel_and_reclaim_push_the_last_first(pager):
    cache(pager, [1] * 9)
    plan = pager.offload(2)
    assert pager.cancel(plan)
    assert line(pager, "host free: ") == "host free: 0-7"
    assert pager.num_evictable_blocks == 2
    plan = pager.offload(2)
    pager.start(plan)
    pager.abandon(plan)
    assert pager.num_evictable_blocks == 2
    other = pager.offload(2)
    assert pairs(other) == [(0, 2), (1, 3)]
    pager.reclaim(plan)
    assert line(pager, "host free: ") == "host free: 0-1 4-7"


def test_what_a_running_sequence_has_published(pager):
    sequence = admit_committed(pager, [1] * 10)
    other = pager.admit([1] * 8 + [2] * 5)
    other.commit()
    assert pairs(pager.offload_committed(sequence)) == [(0, 0), (1, 1)]
    assert pager.offload_committed(sequence) is None
    assert pairs(pager.offload_committed(other)) == [(3, 2)]
    assert "2 blocks 0-1: tokens 1 1 1 1; holders 4; hits 1" in pager.dump()
    assert "1 block 3: tokens 2 2 2 2; holders 2; hits 0" in pager.dump()


def test_the_rest_of_a_path_where_the_host_is_full(implementation):
    pager = implementation(8, 4, num_host_blocks=2)
    sequence = admit_committed(pager, [1] * 13)
    arrive(pager, pager.offload_committed(sequence))
    assert pager.offload_committed(sequence) is None
    assert on_host(pager, [1] * 13) == 0
    assert pager.stats().host_cached_blocks == 2


def test_only_the_live_path_goes(pager):
    sequence = admit_committed(pager, [1] * 13)
    pager.forget([1] * 8)
    assert pairs(pager.offload_committed(sequence)) == [(0, 0)]


def test_arguments(implementation):
    pager, other = (implementation(8, 4, num_host_blocks=8) for _ in range(2))
    sequence, foreign = pager.admit([1] * 5), other.admit([1] * 5)
    with nothing_changes(pager):
        for wrong, error in ((0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)):
            with refuses(error):
                pager.offload(wrong)
        with refuses(TypeError):
            pager.offload_committed(1)
        with refuses(ValueError, "another pager"):
            pager.offload_committed(foreign)
        assert pager.offload(1) is None
        assert pager.offload_committed(sequence) is None
    sequence.preempt()
    with refuses(StaleHandle):
        pager.offload_committed(sequence)
    sequence.resume()


def test_copies_come_first(pager):
    """W12: what an offload reads might not be there yet."""
    sequence = admit_committed(pager, [1] * 6)
    child = sequence.fork()[0]
    child.append(2)
    for call in (lambda: pager.offload(1), lambda: pager.offload_committed(child), child.swap_out):
        with nothing_changes(pager), refuses(TransferError, "take_copies"):
            call()
    assert ids(child) == [0, 2]
    pager.take_copies()
    assert pairs(pager.offload_committed(child)) == [(0, 0)]
