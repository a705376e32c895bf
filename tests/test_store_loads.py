"""Loads: what comes from a store to the host, and what becomes of it if much happens meanwhile (rule 17.4)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from implementations import admit_committed, cache, line, nothing_changes, refuses
from tiers import arrive, each_with_store, host_tree, offloaded, on_host, pairs, queue, states, stored, swapped

from kvpager import ConfigError, TokenError, TokenTypeError, TransferError

pytestmark = each_with_store

IMAGE = 2**30
# In blocks of 4: two images of three blocks with the text behind them, that agree in the first one.
PICTURE = [IMAGE] * 6 + [IMAGE + 1] * 5 + [1]
OTHER = [IMAGE] * 6 + [IMAGE + 2] * 5 + [1]


@pytest.fixture
def pager(implementation):
    """Room for 8 blocks on either side."""
    return implementation(8, 4, num_host_blocks=8)


def cache_on_host(pager, *prompts):
    """Leave the full blocks of these prompts on the host, and nothing on the device."""
    for prompt in prompts:
        cache(pager, prompt)
    offloaded(pager, 99)
    pager.admit([0] * 32).release()  # nobody has committed this


def free(pager):
    return line(pager, "host free: ").removeprefix("host free: ")


def loaded(pager, tokens, num_tokens=2**20, **namespace):
    return arrive(pager, pager.load(tokens, num_tokens, **namespace))


def failed(pager, plan, done=None):
    assert pager.start(plan)
    assert pager.fail(plan, done)


def test_a_plan_says_what_is_where_and_what_it_is_called(pager):
    plan = pager.load([1] * 9, 8)
    assert (plan.id, plan.generation, plan.kind, plan.source, plan.destination) == (0, 0, "load", "store", "host")
    assert pairs(plan) == [(0, 0), (1, 1)]
    assert plan.source_ids.dtype == plan.destination_ids.dtype == np.int32
    assert not plan.source_ids.flags.writeable
    found = pager.store_keys([1] * 8)
    assert np.array_equal(plan.records.keys, found.keys)
    assert np.array_equal(plan.records.metas, found.metas)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert arrive(pager, again) == plan


def test_arguments(implementation, pager):
    wrong = [
        ([], 4, {}, TokenError),
        ([-1], 4, {}, TokenError),
        ([1.0], 4, {}, TokenTypeError),
        ([1], 4, {"namespace": "text"}, TypeError),
        ([1], 4, {"namespace": (("a b", b""),)}, ConfigError),
        ([1], -1, {}, ValueError),
        ([1], 4.0, {}, TypeError),
        ([1], True, {}, TypeError),
        ([1], None, {}, TypeError),
    ]
    for each in (pager, implementation(4, 4)):
        with nothing_changes(each):
            for tokens, num_tokens, namespace, error in wrong:
                with refuses(error):
                    each.load(tokens, num_tokens, **namespace)
    without = implementation(4, 4)
    with nothing_changes(without), refuses(TransferError, "num_host_blocks"):
        without.load([1] * 9, 0)
    for form in (tuple([1] * 9), np.ones(9, np.int64), np.ones(18, np.uint32)[::2]):
        assert pager.load(form, np.int64(4)) == pager.plans()[0].plan
    assert len(pager.plans()) == 1


def test_queued_copies_do_not_matter(pager):
    sequence = admit_committed(pager, [2] * 6)
    child = sequence.fork()[0]
    child.append(3)
    assert line(pager, "copies") != "copies: -"
    assert len(pager.load([1] * 5, 4)) == 1


def test_a_load_releases_dropped_handles_first(implementation):
    pager = implementation(4, 4, num_host_blocks=2)
    sequence = admit_committed(pager, [1] * 8)
    swapped(pager, sequence)
    assert pager.load([2] * 5, 4) is None
    del sequence
    assert pairs(pager.load([2] * 5, 4)) == [(0, 1)]
    assert pager.stats().dropped_handles == 1


@pytest.mark.parametrize(
    ("num_tokens", "length", "num_blocks"),
    [
        (0, 9, 0),
        (3, 9, 0),
        (4, 9, 1),
        (7, 9, 1),
        (8, 9, 2),
        (8, 8, 1),
        (99, 9, 2),
        (2**70, 13, 3),
        (4, 4, 0),
        (4, 1, 0),
    ],
)
def test_whole_blocks_of_what_is_stored_and_what_a_hit_may_be(pager, num_tokens, length, num_blocks):
    """The last token is always computed: a block that ends with it is of no use."""
    plan = pager.load([1] * length, num_tokens)
    assert (0 if plan is None else len(plan)) == num_blocks


def test_what_has_arrived_is_on_the_host_and_stored(pager):
    plan = pager.load([1] * 13, 12)
    assert pager.stats().host_writing_blocks == 3
    assert "host: 8 blocks: 5 free, 0 cached, 0 active, 3 writing\n" in pager.dump()
    assert on_host(pager, [1] * 13) == 0
    pager.start(plan)
    assert pager.complete(plan)
    assert on_host(pager, [1] * 13) == 12
    assert (stored(pager), queue(pager), free(pager)) == ("0-2", "2 1 0", "3-7")
    assert (pager.stats().loaded_blocks, pager.stats().saved_blocks) == (3, 0)
    assert pager.save(9) is None
    fetched = pager.admit([1] * 13, fetch=True)
    arrive(pager, fetched.fetch)
    assert fetched.num_cached == 12


def test_a_load_goes_on_behind_what_the_host_has(pager):
    cache_on_host(pager, [1] * 9)
    assert pager.load([1] * 13, 8) is None
    plan = pager.load([1] * 17, 16)
    assert pairs(plan) == [(0, 2), (1, 3)]
    found = pager.store_keys([1] * 16)
    assert np.array_equal(plan.records.keys, found.keys[2:])
    assert np.array_equal(plan.records.metas, found.metas[2:])
    assert "2 blocks 0-1: tokens 1 1 1 1; holders 1; hits 0\n" in host_tree(pager)
    assert (queue(pager), pager.stats().host_active_blocks) == ("-", 2)
    arrive(pager, plan)
    assert (stored(pager), queue(pager)) == ("2-3", "3 2 1 0")
    assert "4 blocks 0-3: tokens 1 1 1 1; holders 0; hits 0; idle since" in host_tree(pager)


def test_the_device_does_not_matter(pager):
    sequence = admit_committed(pager, [1] * 9)
    plan = loaded(pager, [1] * 9)
    assert len(plan) == 2
    assert sequence.num_committed == 9


def test_a_namespace_of_its_own(pager):
    plan = loaded(pager, [1] * 5, namespace=(("tenant", b"a"),))
    assert np.array_equal(plan.records.keys, pager.store_keys([1] * 4, namespace=(("tenant", b"a"),)).keys)
    assert on_host(pager, [1] * 5) == 0
    assert on_host(pager, [1] * 5, namespace=(("tenant", b"a"),)) == 4
    assert "host namespace (('tenant', b'a'),)\n" in pager.dump()


# Room.


def test_only_so_much_as_there_is_room_for(implementation):
    pager = implementation(8, 4, num_host_blocks=3)
    cache_on_host(pager, [1] * 5, [2] * 5)
    plan = pager.load([1] * 21, 20)  # of two cached blocks one is on the path
    assert pairs(plan) == [(0, 2), (1, 1)]
    assert pager.stats().host_evicted_blocks == 1
    assert np.array_equal(plan.records.keys, pager.store_keys([1] * 12).keys[1:])
    assert pager.load([3] * 5, 4) is None
    assert pager.load([1] * 13, 4) is None
    arrive(pager, plan)
    assert (on_host(pager, [1] * 21), queue(pager)) == (12, "1-2 0")


def test_no_part_of_an_image_for_want_of_room(implementation):
    pager = implementation(8, 4, num_host_blocks=3)
    plan = pager.load([5] * 4 + PICTURE + [1], 16)
    assert pairs(plan) == [(0, 0)]
    arrive(pager, plan)
    assert pager.load([5] * 4 + PICTURE + [1], 16) is None
    assert pairs(pager.load([*PICTURE, 1], 12)) == [(0, 1), (1, 2), (2, 0)]


def test_what_a_save_reads_is_no_room(implementation):
    pager = implementation(8, 4, num_host_blocks=2)
    cache_on_host(pager, [1] * 5, [2] * 5)
    plan = pager.save(2)
    assert pager.load([3] * 9, 8) is None
    assert pager.load([1] * 9, 8) is None
    pager.cancel(plan)
    assert pairs(pager.load([1] * 9, 8)) == [(0, 1)]


def test_a_path_that_is_held_anyway_is_not_subtracted_from_the_room(implementation):
    pager = implementation(8, 4, num_host_blocks=3)
    sequence = admit_committed(pager, [1] * 8)
    swapped(pager, sequence)
    assert pairs(pager.load([1] * 13, 12)) == [(0, 2)]
    sequence.release()


# Runs of content tokens.


def test_a_load_ends_inside_no_image(pager):
    for num_tokens in (4, 8, 11):
        assert pager.load([*PICTURE, 1], num_tokens) is None
    assert pager.load([*PICTURE[:11], IMAGE, IMAGE], 12) is None
    plan = pager.load([*PICTURE, 1], 12)
    assert len(plan) == 3
    assert np.array_equal(plan.records.keys, pager.store_keys(PICTURE).keys)


def test_an_image_of_which_a_part_arrived(pager):
    prompt = [5] * 4 + PICTURE + [6] * 5
    plan = pager.load(prompt, 20)
    assert len(plan) == 5
    failed(pager, plan, [True, True, True, False, True])
    assert (on_host(pager, prompt), stored(pager), free(pager)) == (4, "0", "1-7")
    assert pager.stats().loaded_blocks == 1


def test_an_image_is_not_loaded_below_the_block_of_another(pager):
    """What the host has of the other only looks like the beginning of this one."""
    cache_on_host(pager, [*OTHER, 7])
    plan = pager.load([*PICTURE, 7], 12)
    assert pairs(plan) == [(0, 3), (1, 4), (2, 5)]
    arrive(pager, plan)
    assert (on_host(pager, [*PICTURE, 7]), on_host(pager, [*OTHER, 7])) == (0, 12)
    assert (pager.stats().loaded_blocks, free(pager), stored(pager)) == (0, "3-7", "-")


# One that is under way already.


def test_a_load_that_is_under_way_is_answered(pager):
    plan = pager.load([1] * 9, 8)
    with nothing_changes(pager):
        for tokens, num_tokens in (([1] * 9, 8), ([1] * 9, 4), ([1] * 21, 20), ([1] * 4 + [2] * 9, 4)):
            assert pager.load(tokens, num_tokens) == plan
    pager.start(plan)
    with nothing_changes(pager):
        assert pager.load([1] * 17, 16) == plan
        assert pager.start(plan) is False
    pager.complete(plan)
    rest = pager.load([1] * 17, 16)
    assert pairs(rest) == [(0, 2), (1, 3)]
    assert pager.load([1] * 21, 20) == rest


def test_one_of_another_prompt_is_not(pager):
    first = pager.load([1] * 9, 8)
    others = [pager.load([2] * 9, 8), pager.load([1] * 9, 8, namespace=b"a")]
    assert first not in others
    assert len(pager.plans()) == 3


def test_nor_one_of_a_block_that_is_a_part_of_an_image_here(pager):
    """It is the whole of a shorter one there."""
    plan = pager.load([1, 1, 1, IMAGE, 2], 4)
    assert plan is not None
    assert pager.load([1, 1, 1, IMAGE, IMAGE, 2], 4) is None
    longer = pager.load([1, 1, 1, IMAGE, IMAGE, 2, 2, 2, 2], 8)
    assert longer != plan
    assert not np.array_equal(longer.records.keys[0], plan.records.keys[0])


def test_nor_one_that_begins_elsewhere(pager):
    """What was missing when it was made is there by now: then the rest is loaded twice."""
    first = pager.load([1] * 13, 12)
    cache(pager, [1] * 5)
    offloaded(pager, 1)
    second = pager.load([1] * 13, 12)
    assert (pairs(first), pairs(second)) == ([(0, 0), (1, 1), (2, 2)], [(0, 4), (1, 5)])
    arrive(pager, second)
    arrive(pager, first)
    assert (pager.stats().loaded_blocks, stored(pager), free(pager)) == (2, "4-5", "0-2 6-7")


def test_nor_one_that_was_abandoned_or_is_over(pager):
    plan = pager.load([1] * 9, 8)
    pager.start(plan)
    pager.abandon(plan)
    second = pager.load([1] * 9, 8)
    assert (second.id, pairs(second)) == (1, [(0, 2), (1, 3)])
    pager.cancel(second)
    assert pager.load([1] * 9, 8).generation == 1


@pytest.mark.parametrize("num_forgotten", [1, 2])
def test_nor_one_of_which_something_was_forgotten(pager, num_forgotten):
    first = pager.load([1] * 9, 8)
    pager.forget([1] * 4 * num_forgotten)
    second = pager.load([1] * 9, 8)
    assert second != first
    pager.reset()
    third = pager.load([1] * 9, 8)
    assert third not in (first, second)
    assert pager.load([1] * 9, 8) == third


# Its end.


def test_a_failed_load_brings_the_longest_prefix_that_is_done(pager):
    plan = pager.load([1] * 17, 16)
    failed(pager, plan, [True, True, False, True])
    assert (on_host(pager, [1] * 17), stored(pager), queue(pager), free(pager)) == (8, "0-1", "1 0", "2-7")
    assert pager.stats().loaded_blocks == 2


def test_a_failed_or_cancelled_load_brings_nothing(pager):
    cache_on_host(pager, [1] * 5)
    for end in ("fail", "cancel"):
        plan = pager.load([1] * 13, 12)
        assert queue(pager) == "-"
        if end == "fail":
            failed(pager, plan)
        else:
            assert pager.cancel(plan)
        assert (on_host(pager, [1] * 13), stored(pager), queue(pager), free(pager)) == (4, "-", "0", "1-7")
        assert states(pager) == []
    assert pager.stats().loaded_blocks == 0


def test_an_abandoned_load_is_in_quarantine_until_it_is_reclaimed(pager):
    cache_on_host(pager, [1] * 5)
    plan = pager.load([1] * 13, 12)
    pager.start(plan, 7)
    assert pager.abandon(plan)
    assert line(pager, "plan") == "plan 0.1: load; abandoned at 7; 0->1 1->2"
    assert "host: 8 blocks: 5 free, 1 cached, 0 active, 2 quarantined\n" in pager.dump()
    assert (queue(pager), free(pager)) == ("0", "3-7")
    with nothing_changes(pager):
        assert pager.complete(plan) is False
    assert pager.reclaim(plan)
    assert (on_host(pager, [1] * 13), free(pager)) == (4, "1-7")


def test_the_path_above_is_let_go_of_when_what_came_is_held(implementation):
    """The one queue order that names each block before the one above it, whatever arrives."""
    pager = implementation(8, 4, num_host_blocks=8)
    cache_on_host(pager, [1] * 9, [2] * 5)
    plan = pager.load([1] * 17, 16)
    assert queue(pager) == "2"
    failed(pager, plan, [True, False])
    assert (queue(pager), free(pager)) == ("2-3 1 0", "4-7")


def test_what_the_host_has_by_then_stays_as_it_is(pager):
    """The mark is of blocks that came from the store, not of contents."""
    plan = pager.load([1] * 13, 12)
    cache(pager, [1] * 9)
    offloaded(pager, 9)
    assert queue(pager) == "4 3"
    arrive(pager, plan)
    assert (on_host(pager, [1] * 13), queue(pager), stored(pager)) == (4, "2 4 3", "2")
    assert (pager.stats().loaded_blocks, free(pager)) == (1, "0-1 5-7")
    assert pairs(pager.save(9)) == [(3, 0), (4, 1)]


def test_forgotten_meanwhile(pager):
    """Whether the blocks are in any tier or not."""
    plan = pager.load([1] * 17, 16)
    assert pager.forget([1] * 12) == 0
    arrive(pager, plan)
    assert (on_host(pager, [1] * 17), stored(pager), free(pager)) == (8, "0-1", "2-7")
    assert pager.stats().loaded_blocks == 2


def test_the_least_that_is_left_counts(pager):
    plan = pager.load([1] * 17, 16)
    for number in (4, 2, 3):
        pager.forget([1] * 4 * number)
    arrive(pager, plan)
    assert on_host(pager, [1] * 17) == 4


@pytest.mark.parametrize(
    ("tokens", "namespace"),
    [([1] * 8, b"a"), ([1] * 4 + [2] * 4, b""), ([2] * 4, b""), ([1] * 20, b""), ([1] * 16 + [2] * 4, b"")],
)
def test_what_it_does_not_bring_may_be_forgotten(pager, tokens, namespace):
    plan = pager.load([1] * 21, 16)
    pager.forget(tokens, namespace=namespace)
    assert pager.load([1] * 21, 16) == plan
    arrive(pager, plan)
    assert on_host(pager, [1] * 21) == 16


def test_forgotten_above_it(pager):
    """Even if that is there again by the time: what comes was computed behind what was meant to be gone."""
    cache_on_host(pager, [1] * 9)
    plan = pager.load([1] * 13, 12)
    pager.start(plan)
    assert pager.forget([1] * 8) == 1
    assert free(pager) == "3-7"  # the load holds what was forgotten
    cache(pager, [1] * 9)
    offloaded(pager, 9)
    assert on_host(pager, [1] * 13) == 0  # 8 on the device
    assert pager.complete(plan)
    assert (pager.stats().loaded_blocks, stored(pager), free(pager)) == (0, "-", "2 1 4-7")
    assert queue(pager) == "3 0"


def test_an_image_of_which_a_part_was_forgotten(pager):
    """A forget may name a block inside it."""
    plan = pager.load([5] * 4 + PICTURE + [1], 16)
    pager.forget([5] * 4 + PICTURE[:8])
    arrive(pager, plan)
    assert (on_host(pager, [5] * 4 + PICTURE + [1]), free(pager)) == (4, "1-7")


def test_forgotten_after_a_failure(pager):
    plan = pager.load([1] * 17, 16)
    pager.forget([1] * 16)
    failed(pager, plan, [True, False, True, True])
    assert on_host(pager, [1] * 17) == 4


@pytest.mark.parametrize("identity", [None, b"new weights"])
def test_a_reset_leaves_nothing(pager, identity):
    cache_on_host(pager, [1] * 5)
    plan = pager.load([1] * 13, 12)
    pager.start(plan)
    pager.reset(identity)
    assert free(pager) == "3-7"
    assert pager.complete(plan)
    assert (on_host(pager, [1] * 13), stored(pager), pager.stats().loaded_blocks) == (0, "-", 0)
    assert free(pager) == "1-2 0 3-7"  # the path above first


def test_an_offload_below_what_is_loaded(pager):
    """The block above it is on the host from then on."""
    cache(pager, [1] * 13)
    plan = pager.load([1] * 9, 8)
    out = pager.offload(9)
    assert pairs(out) == [(0, 2), (1, 3), (2, 4)]
    arrive(pager, plan)
    arrive(pager, out)
    assert (pager.stats().loaded_blocks, pager.stats().offloaded_blocks) == (2, 1)
    assert (queue(pager), stored(pager)) == ("4 1 0", "0-1")
    assert pairs(pager.save(9)) == [(4, 0)]


# Statistics and the drawing (17.5).


def test_the_counters_have_their_place(pager):
    names = list(pager.stats().as_dict())
    assert names[names.index("swap_outs") :] == [
        "swap_outs",
        "swap_ins",
        "saved_blocks",
        "loaded_blocks",
        "late_reports",
        "computed_tokens",
        "finished_sequences",
        "swapped_tokens",
        "refaulted_blocks",
        "refault_distance",
    ]


def test_without_host_blocks_nothing_more_is_drawn(implementation):
    text = implementation(4, 4).dump(full=True)
    assert "stored" not in text
    assert "saved" not in text


def test_the_drawing(pager):
    cache_on_host(pager, [1] * 9, [2] * 5)
    arrive(pager, pager.save(1))
    pager.start(pager.save(9), 5)
    pager.load([1] * 8 + [3] * 5, 12)
    assert pager.dump(full=True) == DRAWING


DRAWING = """\
pool: 8 blocks of 4 tokens: 8 free, 0 cached, 0 active, 0 reserved
host: 8 blocks: 4 free, 0 cached, 3 active, 1 writing
host namespace b''
├─ 2 blocks 0-1: tokens 1 1 1 1; holders 2; hits 0
└─ 1 block 2: tokens 2 2 2 2; holders 1; hits 0; idle since 2
free: 3-7 1 0 2
host free: 4-7
queue lru: -
host queue lru: 2
host stored: 0
fenced: -
plan 0.2: save; started at 5; 1->0 2->1
plan 1.0: load; planned; 0->3
copies: -
clock: 3
next sequence: 3
stats: admitted_sequences=3 queried_tokens=46 hit_tokens=0 evicted_blocks=3 evicted_idle_ticks=5 evicted_hits=0\
 copies=0 preemptions=0 recomputed_tokens=0 dropped_handles=0
transfers: host_evicted_blocks=0 offloaded_blocks=3 fetched_blocks=0 swap_outs=0 swap_ins=0\
 saved_blocks=1 loaded_blocks=0
"""
