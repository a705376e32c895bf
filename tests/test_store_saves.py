"""Saves: which host blocks go to a store, what marks them, and what is held meanwhile (rules 17.2, 17.3)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from implementations import admit_committed, cache, line, nothing_changes, refuses
from tiers import arrive, each_with_store, host_tree, offloaded, on_host, pairs, queue, states, stored, swapped

from kvpager import TransferError

pytestmark = each_with_store

IMAGE = 2**30
# In blocks of 4: an image of three blocks with the text behind it.
PICTURE = [IMAGE] * 6 + [IMAGE + 1] * 5 + [1]


@pytest.fixture
def pager(implementation):
    """Room for 16 blocks on either side."""
    return implementation(16, 4, num_host_blocks=16)


def cache_on_host(pager, *prompts):
    """Leave the full blocks of these prompts on the host."""
    for prompt in prompts:
        cache(pager, prompt)
    offloaded(pager, 99)


def host_line(pager):
    return pager.dump().splitlines()[1]


def test_a_plan_says_what_is_where_and_what_it_is_called(pager):
    cache_on_host(pager, [1] * 9)
    plan = pager.save(9)
    assert (plan.id, plan.generation, plan.kind, plan.source, plan.destination) == (0, 1, "save", "host", "store")
    assert pairs(plan) == [(0, 0), (1, 1)]
    assert plan.source_ids.dtype == plan.destination_ids.dtype == np.int32
    assert not plan.destination_ids.flags.writeable
    found = pager.store_keys([1] * 8)
    assert np.array_equal(plan.records.keys, found.keys)
    assert np.array_equal(plan.records.metas, found.metas)
    assert not plan.records.keys.flags.writeable
    assert not plan.records.metas.flags.writeable
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert pager.plans()[0].plan == plan
    assert pager.start(again)
    assert pager.complete(again)


def test_plans_of_other_kinds_have_no_records(pager):
    cache(pager, [1] * 5)
    assert offloaded(pager, 1).records is None
    sequence = admit_committed(pager, [2] * 5)
    assert swapped(pager, sequence).records is None
    assert arrive(pager, sequence.swap_in()).records is None
    pager.forget([1] * 4)
    cache_on_host(pager, [3] * 5)
    pager.admit([4] * 56).release()  # nobody has committed this: the device forgets what the host has
    assert pager.admit([3] * 5, fetch=True).fetch.records is None


def test_arguments(implementation, pager):
    cache_on_host(pager, [1] * 5)
    with nothing_changes(pager):
        for wrong, error in ((0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)):
            with refuses(error):
                pager.save(wrong)
    without = implementation(4, 4)
    with nothing_changes(without):
        with refuses(ValueError):
            without.save(0)
        with refuses(TransferError, "num_host_blocks"):
            without.save(1)
    assert len(pager.save(2**40)) == 1


def test_there_may_be_nothing_to_save(pager):
    assert pager.save(1) is None
    cache(pager, [1] * 9)  # the device's blocks are no affair of a save
    assert pager.save(1) is None


def test_queued_copies_do_not_matter(pager):
    """No save reads what they write."""
    cache_on_host(pager, [1] * 5)
    sequence = admit_committed(pager, [2] * 6)
    child = sequence.fork()[0]
    child.append(3)
    assert line(pager, "copies") != "copies: -"
    assert len(pager.save(1)) == 1


def test_a_save_releases_dropped_handles_first(pager):
    sequence = admit_committed(pager, [1] * 5)
    swapped(pager, sequence)
    del sequence
    assert pairs(pager.save(1)) == [(0, 0)]  # the swapped sequence had held it
    assert pager.stats().dropped_handles == 1


def test_the_coldest_go_first_and_each_with_what_is_above_it(pager):
    cache_on_host(pager, [1] * 9, [2] * 5, [3] * 5)
    assert queue(pager) == "1 0 2-3"
    plan = pager.save(3)
    assert pairs(plan) == [(0, 0), (1, 1), (2, 2)]
    assert np.array_equal(
        plan.records.keys, np.concatenate([pager.store_keys([1] * 8).keys, pager.store_keys([2] * 4).keys])
    )
    assert pairs(pager.save(9)) == [(3, 0)]
    assert pager.save(1) is None


def test_two_chains_below_one_block(pager):
    """The block above them goes with the first."""
    cache_on_host(pager, [1] * 4 + [2] * 5, [1] * 4 + [3] * 5)
    assert queue(pager) == "1-2 0"
    plan = pager.save(9)
    assert pairs(plan) == [(0, 0), (1, 1), (2, 2)]
    tokens = [1] * 4 + [3] * 4
    assert np.array_equal(plan.records.keys[2], pager.store_keys(tokens).keys[1])
    assert np.array_equal(plan.records.metas[2], pager.store_keys(tokens).metas[1])


def test_a_path_goes_on_behind_what_is_stored_or_on_its_way(pager):
    cache_on_host(pager, [1] * 17)
    first = pager.save(1)
    assert pairs(first) == [(0, 0)]
    second = pager.save(1)
    assert pairs(second) == [(1, 0)]
    arrive(pager, second)
    assert stored(pager) == "1"
    assert pairs(pager.save(1)) == [(2, 0)]
    assert np.array_equal(second.records.metas[0][:32], first.records.keys[0])
    pager.cancel(first)
    # Behind the deepest, whatever is above it, which is looked at when it is its turn.
    assert pairs(pager.save(9)) == [(3, 0), (0, 1)]


def test_the_namespace_and_the_identity_are_in_the_keys(implementation):
    pager = implementation(8, 4, num_host_blocks=8, identity=b"old")
    with pager.admit([1] * 5, namespace=(("tenant", b"a"),)) as sequence:
        sequence.commit()
    offloaded(pager, 1)
    plan = pager.save(1)
    assert np.array_equal(plan.records.keys, pager.store_keys([1] * 4, namespace=(("tenant", b"a"),)).keys)
    pager.reset(b"new")
    cache(pager, [1] * 5)
    offloaded(pager, 1)
    assert np.array_equal(pager.save(1).records.keys, pager.store_keys([1] * 4).keys)
    assert not np.array_equal(plan.records.keys, pager.store_keys([1] * 4, namespace=(("tenant", b"a"),)).keys)


def test_what_was_saved_is_marked(pager):
    cache_on_host(pager, [1] * 9, [2] * 5)
    plan = pager.save(3)
    pager.start(plan)
    assert (stored(pager), pager.stats().saved_blocks) == ("-", 0)
    assert pager.complete(plan)
    assert (stored(pager), pager.stats().saved_blocks) == ("0-2", 3)
    assert pager.save(9) is None


def test_a_failed_save_marks_what_is_done(pager):
    """In each chain down to the first that is not: without the block above it, none below it is found."""
    cache_on_host(pager, [1] * 13, [2] * 9)
    plan = pager.save(5)
    pager.start(plan)
    assert pager.fail(plan, [True, False, True, True, True])
    assert (stored(pager), pager.stats().saved_blocks) == ("0 3-4", 3)
    assert pager.save(9) is None  # the others were offered
    cache_on_host(pager, [3] * 9)
    plan = pager.save(2)
    pager.start(plan)
    assert pager.fail(plan, [True, False])
    assert (stored(pager), pager.stats().saved_blocks) == ("0 3-5", 4)
    assert pairs(pager.save(9)) == [(6, 0)]


def test_a_save_that_fails_at_its_first_block_doubts_what_is_above(pager):
    """The store may have lost that, and takes nothing below it."""
    cache_on_host(pager, [1] * 9 + [2] * 8, [3] * 5)
    for _ in range(2):
        arrive(pager, pager.save(1))
    assert stored(pager) == "0-1"
    plan = pager.save(3)
    assert pairs(plan) == [(2, 0), (3, 1), (4, 2)]
    pager.start(plan)
    assert pager.fail(plan, [False, True, True])
    assert (stored(pager), pager.stats().saved_blocks) == ("4", 3)
    cache_on_host(pager, [1] * 9 + [4] * 4)
    assert pairs(pager.save(9)) == [(0, 0), (1, 1), (5, 2)]


def test_a_save_that_fails_behind_its_first_block_doubts_nothing(pager):
    cache_on_host(pager, [1] * 13)
    arrive(pager, pager.save(1))
    plan = pager.save(2)
    pager.start(plan)
    assert pager.fail(plan, [True, False])
    assert stored(pager) == "0-1"


def test_a_save_that_is_cancelled_or_reclaimed_doubts_nothing(pager):
    """That says nothing of the store."""
    cache_on_host(pager, [1] * 9)
    arrive(pager, pager.save(1))
    assert pager.cancel(pager.save(1))
    plan = pager.save(1)
    pager.start(plan)
    pager.abandon(plan)
    assert pager.reclaim(plan)
    assert stored(pager) == "0"


def test_a_chain_that_was_forgotten_doubts_what_is_above_all_the_same(pager):
    """The store has refused it, wanted or not."""
    cache_on_host(pager, [1] * 9)
    arrive(pager, pager.save(1))
    plan = pager.save(1)
    pager.start(plan)
    pager.forget([1] * 8)
    assert pager.fail(plan)
    assert stored(pager) == "-"


def test_a_chain_that_arrived_and_was_forgotten_doubts_nothing(pager):
    """Regression: it was taken for one that the store has refused."""
    cache_on_host(pager, [1] * 9)
    arrive(pager, pager.save(1))
    plan = pager.save(1)
    pager.start(plan)
    pager.forget([1] * 8)
    assert pager.fail(plan, [True])
    assert stored(pager) == "0"


def test_what_is_above_and_on_its_way_is_not_doubted(pager):
    """A mark that it gets afterwards stays."""
    cache_on_host(pager, [1] * 13)
    arrive(pager, pager.save(1))
    second, third = pager.save(1), pager.save(1)
    for plan in (second, third):
        pager.start(plan)
    assert pager.fail(third)
    assert stored(pager) == "-"
    assert pager.complete(second)
    assert stored(pager) == "1"


def test_one_chain_doubts_what_another_of_its_plan_has_saved(pager):
    cache_on_host(pager, [1] * 4 + [2] * 5, [1] * 4 + [3] * 5)
    plan = pager.save(9)
    assert pairs(plan) == [(0, 0), (1, 1), (2, 2)]
    pager.start(plan)
    assert pager.fail(plan, [True, True, False])
    assert (stored(pager), pager.stats().saved_blocks) == ("1", 2)


def test_a_failed_or_cancelled_save_marks_nothing(pager):
    cache_on_host(pager, [1] * 5, [2] * 5)
    plan = pager.save(1)
    pager.start(plan)
    assert pager.fail(plan)
    assert (stored(pager), pager.stats().saved_blocks) == ("-", 0)
    plan = pager.save(1)
    assert pairs(plan) == [(0, 0)]  # it was not looked at again: the number was reached
    assert pager.cancel(plan)
    assert (stored(pager), pager.stats().saved_blocks, states(pager)) == ("-", 0, [])
    assert pairs(pager.save(1)) == [(0, 0)]


def test_an_offered_block_is_passed_over_until_it_joins_the_queue_again(pager):
    cache_on_host(pager, [1] * 5)
    plan = pager.save(9)  # it is looked at again, and is on its way
    pager.cancel(plan)
    assert pager.save(9) is None
    pager.admit([7] * 64).release()  # nobody has committed this: the device is empty
    fetched = pager.admit([1] * 5, fetch=True)
    arrive(pager, fetched.fetch)
    fetched.release()
    assert pairs(pager.save(9)) == [(0, 0)]


def test_a_save_takes_nothing_and_moves_nothing_in_the_queue(pager):
    cache_on_host(pager, [1] * 9, [2] * 5)
    before = line(pager, "host free: "), queue(pager)
    plan = pager.save(2)
    assert (line(pager, "host free: "), queue(pager)) == before
    assert host_line(pager) == "host: 16 blocks: 13 free, 1 cached, 2 active"
    arrive(pager, plan)
    assert (line(pager, "host free: "), queue(pager)) == before
    assert host_line(pager) == "host: 16 blocks: 13 free, 3 cached, 0 active"


def test_what_is_read_may_be_hit_and_is_not_evicted(implementation):
    """I9, as for an offload on the device."""
    pager = implementation(16, 4, num_host_blocks=3)
    cache_on_host(pager, [1] * 9, [2] * 5)
    plan = pager.save(2)
    assert pairs(plan) == [(0, 0), (1, 1)]
    cache(pager, [3] * 13)
    assert pairs(offloaded(pager, 9)) == [(3, 2)]  # the third block's frame, and no more
    assert "2 blocks 0-1: tokens 1 1 1 1; holders 1; hits 0; idle since 2\n" in host_tree(pager)
    pager.admit([7] * 64).release()
    fetched = pager.admit([1] * 9, fetch=True)
    assert fetched.fetch.source_ids.tolist() == [0, 1]
    assert "2 blocks 0-1: tokens 1 1 1 1; holders 2; hits 0\n" in host_tree(pager)
    fetched.release()
    assert queue(pager) == "2 1 0"
    assert pager.stats().host_cached_blocks == 1
    arrive(pager, plan)
    assert pager.stats().host_cached_blocks == 3


def test_chains_are_holders_each_of_its_own(pager):
    cache_on_host(pager, [1] * 4 + [2] * 5, [1] * 4 + [3] * 5)
    pager.save(9)
    assert "1 block 0: tokens 1 1 1 1; holders 2; hits 0" in host_tree(pager)
    assert "1 block 1: tokens 2 2 2 2; holders 1; hits 0" in host_tree(pager)


def test_what_is_forgotten_while_it_is_read_is_pushed_at_the_end_and_not_stored(pager):
    cache_on_host(pager, [1] * 13)
    plan = pager.save(3)
    pager.start(plan)
    assert pager.forget([1] * 8) == 4
    assert line(pager, "host free: ") == "host free: 3-15"
    assert host_line(pager) == "host: 16 blocks: 13 free, 0 cached, 3 active"
    assert pager.complete(plan)
    assert (stored(pager), pager.stats().saved_blocks) == ("0", 1)
    assert line(pager, "host free: ") == "host free: 1-15"


def test_a_reset_while_blocks_are_read(pager):
    cache_on_host(pager, [1] * 9)
    plan = pager.save(2)
    pager.start(plan)
    pager.reset()
    assert line(pager, "host free: ") == "host free: 2-15"
    assert pager.complete(plan)
    assert (stored(pager), pager.stats().saved_blocks) == ("-", 0)
    assert line(pager, "host free: ") == "host free: 0-15"


def test_an_abandoned_save_goes_on_holding_until_it_is_reclaimed(pager):
    """The store may still be given what is in these blocks."""
    cache_on_host(pager, [1] * 5, [2] * 5)
    plan = pager.save(1)
    pager.start(plan, 7)
    assert pager.abandon(plan)
    assert states(pager) == [(0, 1, "abandoned", 7)]
    assert host_line(pager) == "host: 16 blocks: 14 free, 1 cached, 1 active"
    assert pager.stats().host_quarantined_blocks == 0
    assert "1 block 0: tokens 1 1 1 1; holders 1; hits 0" in host_tree(pager)
    assert line(pager, "plan") == "plan 0.1: save; abandoned at 7; 0->0"
    assert pairs(pager.save(9)) == [(1, 0)]  # the first is being saved, for all that anybody knows
    with nothing_changes(pager):
        assert pager.complete(plan) is False
    assert pager.stats().late_reports == 1
    assert pager.reclaim(plan)
    assert host_line(pager) == "host: 16 blocks: 14 free, 1 cached, 1 active"
    assert (stored(pager), pager.stats().saved_blocks) == ("-", 0)


def test_forgotten_while_its_save_is_abandoned(pager):
    cache_on_host(pager, [1] * 5)
    plan = pager.save(1)
    pager.start(plan)
    pager.abandon(plan)
    pager.forget([1] * 4)
    assert line(pager, "host free: ") == "host free: 1-15"
    assert pager.reclaim(plan)
    assert line(pager, "host free: ") == "host free: 0-15"


def test_a_mark_ends_when_the_block_is_taken(implementation):
    """Stored says what was in this block, not what is in it now."""
    pager = implementation(8, 4, num_host_blocks=1)
    cache_on_host(pager, [1] * 5)
    arrive(pager, pager.save(1))
    assert stored(pager) == "0"
    cache_on_host(pager, [2] * 5)
    assert on_host(pager, [2] * 5) == 0
    assert pager.stats().host_evicted_blocks == 1
    assert stored(pager) == "-"
    assert pairs(pager.save(1)) == [(0, 0)]


def test_a_mark_of_what_was_forgotten_is_not_drawn(pager):
    cache_on_host(pager, [1] * 9)
    arrive(pager, pager.save(2))
    pager.forget([1] * 8)
    assert stored(pager) == "0"
    cache_on_host(pager, [1] * 9)
    assert pairs(pager.save(9)) == [(1, 0)]


def test_an_image_goes_as_a_whole_even_if_less_was_asked_for(pager):
    cache_on_host(pager, [5] * 4 + PICTURE + [6] * 5)
    plan = pager.save(2)
    assert pairs(plan) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert np.array_equal(plan.records.keys, pager.store_keys([5] * 4 + PICTURE).keys)
    assert pairs(pager.save(1)) == [(4, 0)]


def test_an_image_that_ends_with_its_path_may_go_on(pager):
    """What is above it is saved, it is not."""
    sequence = admit_committed(pager, [5] * 8 + [IMAGE] * 4)
    swapped(pager, sequence)
    assert "3 blocks 0-2" in host_tree(pager)
    sequence.release()
    assert queue(pager) == "2 1 0"
    assert pairs(pager.save(9)) == [(0, 0), (1, 1)]
    assert pager.save(9) is None


def test_an_image_at_the_end_of_a_path_alone(pager):
    sequence = admit_committed(pager, [IMAGE] * 4)
    swapped(pager, sequence)
    sequence.release()
    assert queue(pager) == "0"
    assert pager.save(9) is None


def test_an_image_of_which_a_part_is_stored_is_not_begun_in_the_middle(pager):
    cache_on_host(pager, [*PICTURE, 7, 7, 7, 7, 7])
    plan = pager.save(3)
    pager.start(plan)
    assert pager.fail(plan, [True, False, False])
    assert stored(pager) == "0"
    assert pager.save(9) is None


def test_an_image_of_which_the_first_part_is_not_stored_is_saved_again(pager):
    cache_on_host(pager, [*PICTURE, 7, 7, 7, 7, 7])
    plan = pager.save(3)
    pager.start(plan)
    assert pager.fail(plan, [False, True, True])
    assert stored(pager) == "-"
    assert pairs(pager.save(9)) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_key_is_that_of_the_path_it_is_saved_for(pager):
    """A block that came as the first part of an image, and is the whole of a shorter one on another path."""
    first, longer, shorter = [1, IMAGE, 1, IMAGE], [IMAGE, 1, 1, 1], [2] * 4
    arrive(pager, pager.load([*first, *longer, 1], 8))
    assert stored(pager) == "0-1"
    cache_on_host(pager, [*first, *shorter, 1])
    plan = pager.save(9)
    assert pairs(plan) == [(2, 0)]
    for found, right in zip(plan.records, pager.store_keys([*first, *shorter]), strict=True):
        assert np.array_equal(found, right[1:])


def test_a_swapped_sequence_holds_what_it_has_on_the_host(pager):
    """What is held is in no queue, and is not looked at; with the block below it, it is saved all the same."""
    sequence = admit_committed(pager, [1] * 9)
    swapped(pager, sequence)
    assert queue(pager) == "-"
    assert pager.save(9) is None
    cache_on_host(pager, [1] * 8 + [2] * 5)
    assert queue(pager) == "3"
    assert pairs(pager.save(9)) == [(0, 0), (1, 1), (3, 2)]


def test_room_on_the_host_does_not_count_what_is_read(implementation):
    """The block above a chain is held for it, and is not counted twice if a save reads it, too."""
    pager = implementation(8, 4, num_host_blocks=2)
    cache_on_host(pager, [1] * 5)
    cache(pager, [1] * 9)
    plan = pager.save(1)
    assert pairs(plan) == [(0, 0)]
    assert pairs(pager.offload(9)) == [(1, 1)]
