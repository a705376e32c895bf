"""Sequences that go to the host and come back (rule 16.5)."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache, free_ids, ids, in_batch, line, nothing_changes, refuses
from tiers import arrive, each_with_tiers, offloaded, on_host, pairs, swapped

from kvpager import NeverFits, OutOfBlocks, StaleHandle, StepError, TransferError

pytestmark = each_with_tiers

TOKENS = [1] * 4 + [2] * 4 + [3]


@pytest.fixture
def pager(implementation):
    return implementation(8, 4, num_host_blocks=8)


def test_there_and_back(pager):
    sequence = admit_committed(pager, TOKENS)
    plan = sequence.swap_out()
    assert (plan.kind, pairs(plan)) == ("swap_out", [(0, 0), (1, 1), (2, 2)])
    assert sequence.state == "swapping_out"
    assert ids(sequence) == [0, 1, 2]
    assert line(pager, "sequence").endswith("publishes yes; pinned no; host path -")
    arrive(pager, plan)
    assert sequence.state == "swapped"
    assert free_ids(pager) == "2-7"
    assert line(pager, "queue lru") == "queue lru: 1 0"  # as by a preempt
    assert line(pager, "sequence") == (
        "sequence 0: swapped; namespace b''; cached 0; committed 9; planned 9; len 9; preempted 1;"
        " host path 0-1; host own 2"
    )
    pager.forget([1] * 4)  # in both tiers, but the sequence holds its own
    assert pager.stats().host_active_blocks == 3
    back = sequence.swap_in()
    assert (back.kind, pairs(back)) == ("swap_in", [(0, 0), (1, 1), (2, 2)])
    arrive(pager, back)
    assert (sequence.state, sequence.num_committed, ids(sequence)) == ("running", 9, [0, 1, 2])
    assert pager.match(TOKENS).num_tokens == 0  # forgotten is forgotten
    assert (pager.stats().swap_outs, pager.stats().swap_ins, pager.stats().recomputed_tokens) == (1, 1, 0)


def test_what_the_host_has_is_not_copied_again(pager):
    sequence = admit_committed(pager, TOKENS)
    arrive(pager, pager.offload_committed(sequence))
    plan = sequence.swap_out()
    assert pairs(plan) == [(2, 2)]
    assert line(pager, "sequence").endswith("host path 0-1")
    arrive(pager, plan)
    assert line(pager, "sequence").endswith("host path 0-1; host own 2")


def test_what_the_device_has_is_not_copied_back(pager):
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    plan = sequence.swap_in()
    assert pairs(plan) == [(2, 2)]
    assert line(pager, "sequence").endswith("path 0-1; table 0-2; publishes yes; pinned no; host path 0-1; host own 2")
    arrive(pager, plan)
    assert line(pager, "host free: ") == "host free: 2-7"
    assert line(pager, "host queue lru") == "host queue lru: 1 0"


def test_it_publishes_again_what_the_device_has_lost(pager):
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    pager.admit([0] * 32).release()
    assert pager.match(TOKENS).num_tokens == 0
    arrive(pager, sequence.swap_in())
    assert pager.match(TOKENS).num_tokens == 8
    assert sequence.append(3) == ids(sequence)[2] * 4 + 1


def test_blocks_that_were_not_published_are_the_sequences_own(implementation):
    pager = implementation(8, 4, num_host_blocks=8, prefix_cache=False)
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    assert line(pager, "sequence").endswith("host path -; host own 0-2")
    arrive(pager, sequence.swap_in())
    assert pager.stats().host_free_blocks == 8


def test_a_duplicate_goes_as_the_path_says(pager):
    """Two sequences computed the same: the second holds the indexed blocks and its own, and the former are copied."""
    first, second = pager.admit(TOKENS), pager.admit(TOKENS)
    first.commit()
    second.commit()
    assert ids(second) == [3, 4, 5]
    assert pairs(second.swap_out()) == [(0, 0), (1, 1), (5, 2)]
    first.release()


def test_uncommitted_positions_are_not_copied(pager):
    sequence = pager.admit(TOKENS)
    sequence.commit(5)
    plan = sequence.swap_out()
    assert pairs(plan) == [(0, 0), (1, 1)]
    arrive(pager, plan)
    assert (len(sequence), sequence.num_committed) == (9, 5)
    plan = sequence.swap_in()
    assert pairs(plan) == [(1, 1)]
    assert ids(sequence) == [0, 1, 2]
    arrive(pager, plan)
    assert sequence.slots(5, 9).tolist()[-1] == ids(sequence)[2] * 4


@pytest.mark.parametrize("end", ["cancel", "fail", "abandon"])
def test_a_swap_out_that_did_not_succeed_changes_nothing_for_the_sequence(pager, end):
    sequence = admit_committed(pager, TOKENS)
    batch = in_batch(pager, sequence)
    plan = sequence.swap_out()
    assert batch.num_rows == 0
    if end != "cancel":
        pager.start(plan)
    assert getattr(pager, end)(plan)
    assert (sequence.state, ids(sequence), sequence.num_committed) == ("running", [0, 1, 2], 9)
    assert batch.row_of(sequence) is None
    assert pager.stats().host_quarantined_blocks == (3 if end == "abandon" else 0)
    assert sequence.append(4) == 9
    if end == "abandon":
        assert pager.reclaim(plan)
    assert line(pager, "host free: ") == "host free: 0-7"


@pytest.mark.parametrize("end", ["cancel", "fail", "abandon"])
def test_a_swap_in_that_did_not_succeed_leaves_it_swapped(pager, end):
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    pager.admit([0] * 32).release()
    before = line(pager, "sequence")
    plan = sequence.swap_in()
    if end != "cancel":
        pager.start(plan)
    assert getattr(pager, end)(plan)
    assert line(pager, "sequence") == before
    assert pager.stats().quarantined_blocks == (3 if end == "abandon" else 0)
    if end == "abandon":
        assert not set(plan.destination_ids.tolist()) & set(ids(pager.admit([0] * 20)))
        assert pager.reclaim(plan)
    arrive(pager, sequence.swap_in())
    assert sequence.state == "running"


def test_it_announces_again(pager):
    sequence = pager.admit(TOKENS)
    assert line(pager, "sequence").endswith("computing")
    plan = sequence.swap_out()
    assert "computing" not in line(pager, "sequence")
    pager.cancel(plan)
    assert line(pager, "sequence").endswith("computing")


def test_resume_instead_of_swap_in(pager):
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    pager.forget(TOKENS[:8])
    sequence.resume()
    assert (sequence.state, sequence.num_cached, sequence.num_committed) == ("running", 4, 4)
    assert pager.stats().recomputed_tokens == 5
    # Its own block first, then the forgotten end of its path, then the cached rest.
    assert line(pager, "host free: ") == "host free: 1-7"
    assert line(pager, "host queue lru") == "host queue lru: 0"


def test_a_resume_that_is_refused_leaves_it_on_the_host(pager):
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    held = pager.admit([0] * 28)
    with nothing_changes(pager):
        assert sequence.try_resume() is None
        assert sequence.try_swap_in() is None
        with refuses(OutOfBlocks) as refused:
            sequence.swap_in()
    assert refused.value.args == (2, 0, 0, 8, (), 0, "device")
    held.release()
    arrive(pager, sequence.swap_in())


def test_a_full_host_refuses_before_anything_moves(implementation):
    """L13."""
    pager = implementation(8, 4, num_host_blocks=4)
    other, sequence = admit_committed(pager, [9] * 5), admit_committed(pager, TOKENS)
    swapped(pager, other)
    with nothing_changes(pager), refuses(OutOfBlocks, "host blocks") as refused:
        sequence.swap_out()
    assert refused.value.args == (3, 2, 0, 4, (), 0, "host")
    assert sequence.try_swap_out() is None
    assert pager.stats().refused_calls == 2
    sequence.preempt()
    sequence.resume()


@pytest.mark.parametrize("is_there", [False, True])
def test_what_the_whole_host_cannot_hold_never_fits(implementation, is_there):
    """Waiting would not help, even where the host has all but the tail already."""
    pager = implementation(8, 4, num_host_blocks=2)
    sequence = admit_committed(pager, TOKENS)
    if is_there:
        arrive(pager, pager.offload_committed(sequence))
    for call in (sequence.swap_out, sequence.try_swap_out):
        with nothing_changes(pager), refuses(NeverFits, "3 host blocks.* has 2: preempt.*num_host_blocks") as refused:
            call()
        assert refused.value.args == (3, 2, "host")
    assert pager.stats().refused_calls == 2
    (child,) = sequence.fork()
    child.append(4)
    for call in (child.swap_out, sequence.swap_out):
        with nothing_changes(pager), refuses(TransferError, "take_copies"):
            call()
    pager.take_copies()
    sequence.preempt()
    assert sequence.resume().num_cached == 8


def test_its_own_copies_do_not_count_as_room(implementation):
    """The hold on what the host has already is undone, and has moved nothing."""
    pager = implementation(8, 4, num_host_blocks=3)
    sequence = admit_committed(pager, TOKENS)
    arrive(pager, pager.offload_committed(sequence))
    other = admit_committed(pager, [9] * 2)
    swapped(pager, other)
    with nothing_changes(pager), refuses(OutOfBlocks) as refused:
        sequence.swap_out()
    assert refused.value.args == (1, 0, 0, 3, (), 0, "host")


def test_the_host_evicts_for_a_swap(implementation):
    pager = implementation(8, 4, num_host_blocks=3)
    cache(pager, [7] * 5)
    offloaded(pager, 1)
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    assert pager.stats().host_evicted_blocks == 1
    assert on_host(pager, [7] * 5) == 0


def test_released_while_it_goes_out(pager):
    """W2: the plan goes on reading, so it holds the blocks until it ends."""
    sequence = admit_committed(pager, TOKENS)
    plan = sequence.swap_out()
    pager.start(plan)
    sequence.release()
    assert (pager.stats().running_sequences, pager.stats().clock_ticks) == (0, 1)
    assert pager.stats().active_blocks == 3
    assert "2 blocks 0-1: tokens 1 1 1 1; holders 1; hits 0\n" in pager.dump()
    other = pager.admit([0] * 20)
    assert ids(other) == [3, 4, 5, 6, 7]
    assert pager.try_admit([0]) is None
    assert pager.complete(plan)
    assert "2 blocks 0-1: tokens 1 1 1 1; holders 0; hits 0; idle since 1\n" in pager.dump()
    assert (free_ids(pager), line(pager, "queue lru")) == ("2", "queue lru: 1 0")
    assert (pager.stats().host_free_blocks, pager.stats().swap_outs, pager.stats().clock_ticks) == (8, 1, 1)


def test_released_while_it_comes_in(pager):
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    pager.admit([0] * 32).release()
    plan = sequence.swap_in()
    pager.start(plan)
    sequence.release()
    assert (pager.num_free_blocks, pager.stats().writing_blocks, pager.stats().host_active_blocks) == (5, 3, 3)
    assert pager.complete(plan)
    assert (pager.num_free_blocks, pager.stats().host_active_blocks, pager.stats().swap_ins) == (8, 0, 1)
    assert pager.match(TOKENS).num_tokens == 0


def test_released_before_its_plan_was_started(pager):
    first, second = admit_committed(pager, TOKENS), admit_committed(pager, [9] * 5)
    swapped(pager, second)
    plans = first.swap_out(), second.swap_in()
    first.release()
    second.release()
    assert pager.plans() == []
    assert [pager.complete(plan) for plan in plans] == [False, False]
    assert pager.stats().host_active_blocks == pager.stats().active_blocks == 0


def test_a_swapped_sequence_that_is_aborted_gives_its_host_blocks_back(pager):
    """L12."""
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    sequence.release("aborted")
    assert line(pager, "host free: ") == "host free: 2-7"
    assert line(pager, "host queue lru") == "host queue lru: 1 0"
    assert pager.stats().swapped_sequences == 0


def test_after_a_reset_all_comes_from_the_host(pager):
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    pager.reset(b"other weights")
    cache(pager, TOKENS)  # the same tokens, and other KV
    plan = sequence.swap_in()
    assert len(plan) == 3
    arrive(pager, plan)
    assert "publishes no" in line(pager, "sequence")
    assert not set(ids(sequence)) & {int(each) for each in line(pager, "queue lru").split()[2:]}


def test_a_reset_while_it_goes_out(pager):
    sequence = admit_committed(pager, TOKENS)
    plan = sequence.swap_out()
    pager.reset()
    arrive(pager, plan)
    assert line(pager, "sequence").endswith("host path -; host own 0-2")
    assert on_host(pager, TOKENS) == 0


def test_a_forget_while_it_goes_out(pager):
    sequence = admit_committed(pager, TOKENS)
    plan = sequence.swap_out()
    pager.forget(TOKENS[:8])
    arrive(pager, plan)
    assert line(pager, "sequence").endswith("host path 0; host own 1-2")
    back = sequence.swap_in()
    assert pairs(back) == [(1, 1), (2, 2)]
    arrive(pager, back)
    assert pager.match(TOKENS).num_tokens == 4


def test_a_sequence_in_an_open_step_stays(pager):
    sequence = admit_committed(pager, TOKENS)
    sequence.append(4)
    step = in_batch(pager, sequence).step(1)
    with nothing_changes(pager), refuses(StepError):
        sequence.swap_out()
    step.commit()
    assert len(sequence.swap_out()) == 3


def test_copies_of_an_open_step_come_first(pager):
    """A child's block is the target of a copy that runs with a step of other sequences, which may not be launched."""
    sequence = admit_committed(pager, TOKENS)
    child = sequence.fork()[0]
    child.append(4)
    other = pager.admit([9] * 2)
    step = in_batch(pager, other).step(2)
    assert step.copies.tolist() == [[2, 3]]
    with nothing_changes(pager), refuses(TransferError, "open step"):
        child.swap_out()
    plan = sequence.swap_out()
    assert len(plan) == 3
    step.commit()
    assert pairs(child.swap_out())[-1][0] == 3


def test_only_a_swapped_sequence_comes_in(pager):
    sequence = pager.admit(TOKENS)
    for state in ("running", "preempted"):
        assert sequence.state == state
        with nothing_changes(pager), refuses(StaleHandle):
            sequence.swap_in()
        if state == "running":
            sequence.preempt()
    with nothing_changes(pager), refuses(StaleHandle):
        sequence.swap_out()


def test_a_swap_in_waits_for_fenced_blocks(implementation):
    pager = implementation(4, 4, num_host_blocks=8)
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    other = pager.admit([0] * 16)
    step = in_batch(pager, other).step(16)
    other.release()
    with nothing_changes(pager), refuses(OutOfBlocks) as refused:
        sequence.swap_in()
    assert refused.value.args == (3, 0, 0, 4, (), 0, "device")
    step.commit()
    arrive(pager, sequence.swap_in())


def test_the_watermark_binds_a_swap_in(implementation):
    pager = implementation(8, 4, num_host_blocks=8, watermark=0.25)
    sequence = admit_committed(pager, TOKENS)
    swapped(pager, sequence)
    other = pager.admit([0] * 16)
    with nothing_changes(pager), refuses(OutOfBlocks) as refused:
        sequence.swap_in()
    assert refused.value.reserve == 2
    other.release()
    arrive(pager, sequence.swap_in())


def test_the_drawing(pager):
    """Everything at once: what is in quarantine, a sequence that comes in, one that is swapped, an offload, a fence."""
    lost = admit_committed(pager, [9] * 3)
    plan = lost.swap_out()
    pager.start(plan, 3)
    pager.abandon(plan)
    lost.release()
    first, second = admit_committed(pager, TOKENS), admit_committed(pager, [4] * 2)
    swapped(pager, first)
    swapped(pager, second)
    cache(pager, [5] * 5)
    cache(pager, [6] * 5)
    pager.start(pager.offload(9), 5)
    running = pager.admit([8] * 2)
    step = in_batch(pager, running).step(2)
    pager.admit([8] * 3).release()
    first.swap_in()
    assert pager.dump(full=True) == DRAWING
    step.commit()


DRAWING = """\
pool: 8 blocks of 4 tokens: 2 free, 0 cached, 5 active, 0 reserved, 1 writing
host: 8 blocks: 1 free, 0 cached, 4 active, 2 writing, 1 quarantined
namespace b''
├─ 2 blocks 0-1: tokens 1 1 1 1; holders 1; hits 0
├─ 1 block 3: tokens 5 5 5 5; holders 1; hits 0; idle since 1
└─ 1 block 2: tokens 6 6 6 6; holders 1; hits 0; idle since 2
host namespace b''
└─ 2 blocks 1-2: tokens 1 1 1 1; holders 1; hits 0
free: 5 7
host free: 7
queue lru: 3 2
host queue lru: -
host stored: -
fenced: 5
sequence 1: swapping_in; namespace b''; cached 0; committed 9; planned 9; len 9; preempted 1; path 0-1;\
 table 0-1 6; publishes yes; pinned no; host path 1-2; host own 3
sequence 2: swapped; namespace b''; cached 0; committed 2; planned 2; len 2; preempted 1; host path -; host own 4
sequence 5: running; namespace b''; cached 0; committed 0; planned 2; len 2; path -; table 4; publishes yes; pinned no
batch 0: rows 5; open 0; next step 1
plan 0.0: swap_out; abandoned at 3; 0->0
plan 1.2: offload; started at 5; 3->5 2->6
plan 2.0: swap_in; planned; 3->6
copies: -
clock: 4
next sequence: 7
stats: admitted_sequences=7 queried_tokens=29 hit_tokens=0 evicted_blocks=0 evicted_idle_ticks=0 evicted_hits=0\
 copies=0 preemptions=0 recomputed_tokens=0 dropped_handles=0
transfers: host_evicted_blocks=0 offloaded_blocks=0 fetched_blocks=0 swap_outs=2 swap_ins=0\
 saved_blocks=0 loaded_blocks=0
"""
