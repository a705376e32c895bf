"""How a step ends: commit, rows that are void by then, and cancel (rules.md 14.4 and 14.5), to the id."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from implementations import (
    admit_committed,
    assert_nothing_leaked,
    each_with_batch,
    free_ids,
    ids,
    in_batch,
    line,
    nothing_changes,
    plan,
    refuses,
)

import kvpager

pytestmark = each_with_batch

PROMPT = list(range(10, 16))  # one full block of 4 and half of the second


# Commit.


def test_commit_publishes_and_adds_the_next_token(implementation):
    pager = implementation(8, 4)
    a, b = pager.admit(PROMPT), pager.admit([1, 2, 3])
    batch = in_batch(pager, a, b)
    step = batch.step([6, 2])
    assert pager.match(PROMPT).num_tokens == 0
    applied = step.commit([7, 8])
    assert (applied.dtype, applied.tolist()) == (np.bool_, [True, True])
    assert (a.tokens.tolist(), a.num_committed, ids(a)) == ([*PROMPT, 7], 6, [0, 1])
    assert (b.tokens.tolist(), b.num_committed) == ([1, 2, 3], 2), "a row inside its prompt has its next token already"
    assert pager.match(PROMPT).num_tokens == 4
    assert step.state == "committed"


@pytest.mark.parametrize("none", [None, [-1], np.array([-1])])
def test_commit_without_a_token_is_kv_only(implementation, none):
    pager = implementation(8, 4)
    a = pager.admit(PROMPT)
    assert in_batch(pager, a).step(6).commit(none).tolist() == [True]
    assert (a.tokens.tolist(), a.num_committed) == (PROMPT, 6)


def test_rows_that_are_left_out_are_not_applied(implementation):
    pager = implementation(8, 4)
    a, b, c = (pager.admit([each]) for each in range(3))
    batch = in_batch(pager, a, b, c)
    batch.remove(b)
    assert batch.step([1, 0, 0]).commit([7, 8, 9], [0, 55, 66]).tolist() == [True, False, False]
    assert (len(a), len(b), len(c)) == (2, 1, 1)


def test_only_the_oldest_step_is_committed(implementation):
    pager = implementation(8, 4)
    a = pager.admit(PROMPT)
    batch = in_batch(pager, a)
    first, second = batch.step(3), batch.step(3)
    with nothing_changes(pager), refuses(kvpager.StepError, "oldest"):
        second.commit()
    with nothing_changes(pager), refuses(kvpager.StepError, "newest"):
        first.cancel()
    first.commit()
    for call in (first.commit, first.cancel):
        with nothing_changes(pager), refuses(kvpager.StepError, "committed"):
            call()
    second.cancel()
    for call in (second.commit, second.cancel):
        with nothing_changes(pager), refuses(kvpager.StepError, "cancelled"):
            call()
    assert (a.num_committed, a.num_planned) == (3, 3)


def test_steps_of_two_batches_end_in_any_order(implementation):
    pager = implementation(8, 4)
    a, b = pager.admit(PROMPT), pager.admit([1, 2])
    one, other = in_batch(pager, a), in_batch(pager, b)
    first, second = one.step(6), other.step(2)
    second.commit([3])
    first.commit([4])
    assert (a.num_committed, b.num_committed) == (6, 2)


# Drafts.


@pytest.mark.parametrize("accepted", range(4))
def test_rejected_drafts_are_cut_off(implementation, accepted):
    """Published blocks are as if no drafts had existed."""
    pager = implementation(16, 4)
    a = admit_committed(pager, PROMPT)
    batch = in_batch(pager, a)
    batch.step(1, [7]).commit([8])
    step = batch.step(4, [20, 21, 22])
    assert step.token_ids.tolist() == [8, 20, 21, 22]
    assert ids(a) == [0, 1, 2]
    assert step.commit([9], [accepted]).tolist() == [True]
    kept = [20, 21, 22][:accepted]
    assert a.tokens.tolist() == [*PROMPT, 7, 8, *kept, 9]
    assert (a.num_committed, a.num_planned) == (8 + accepted, 8 + accepted)
    assert ids(a) == ([0, 1, 2] if accepted else [0, 1])
    assert pager.match([*PROMPT, 7, 8, 0]).num_tokens == 8
    assert pager.check() == []


@pytest.mark.parametrize("token", [-1, 9])
@pytest.mark.parametrize("accepted", range(4))
def test_rejected_drafts_are_cut_off_unseen(implementation, accepted, token):
    """Nobody looks at the sequence before; with none accepted, the commit fills a block exactly."""
    pager = implementation(16, 4)
    a = admit_committed(pager, PROMPT)
    batch = in_batch(pager, a)
    batch.step(1, [7]).commit([8])
    batch.step(4, [20, 21, 22]).commit([token], [accepted])
    assert (pager.stats().active_blocks, pager.num_free_blocks) == (3 - (accepted == 0), 13 + (accepted == 0))
    kept = [20, 21, 22][:accepted]
    assert a.tokens.tolist() == [*PROMPT, 7, 8, *kept, *([9] if token == 9 else [])]
    assert (a.num_committed, a.num_planned, ids(a)) == (8 + accepted, 8 + accepted, [0, 1, 2][: 2 + (accepted > 0)])
    assert pager.check() == []


def test_what_rejected_drafts_leave_is_shared_if_it_was_forked_meanwhile(implementation):
    pager = implementation(8, 16)
    a = pager.admit([1, 2, 3, 4])
    batch = in_batch(pager, a)
    first = batch.step(4)
    second = batch.step(3, [5, 6, 7])
    children = a.fork()
    first.commit()
    second.commit([9], [1])
    assert batch.blocks_needed() == 1, "the child holds the block, too"
    assert batch.step().copies.tolist() == [[0, 1]]
    assert (a.num_committed, a.tokens.tolist()) == (5, [1, 2, 3, 4, 5, 9])
    assert [ids(child) for child in children] == [[0]]


def test_all_drafts_are_accepted_unless_told_otherwise(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, PROMPT)
    in_batch(pager, a).step(2, [20, 21]).commit([9])
    assert a.tokens.tolist() == [*PROMPT, 20, 21, 9]


def test_a_step_of_drafts_alone_may_keep_none(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, PROMPT)
    assert in_batch(pager, a).step(2, [20, 21]).commit([9], [0]).tolist() == [True]
    assert (a.tokens.tolist(), a.num_committed) == ([*PROMPT, 9], 6)


def test_rejected_drafts_void_the_next_step(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, PROMPT)
    batch = in_batch(pager, a)
    first, second = batch.step(2, [20, 21]), batch.step(1)
    assert first.commit([9], [1]).tolist() == [True]
    assert (a.tokens.tolist(), a.num_planned) == ([*PROMPT, 20, 9], 7)
    assert second.token_ids.tolist() == [-1]
    assert second.commit([30]).tolist() == [False]
    assert (a.tokens.tolist(), a.num_committed) == ([*PROMPT, 20, 9], 7)
    assert plan(batch.step(1)) == ([7], [7])


def test_accepted_drafts_leave_the_next_step_alone(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, PROMPT)
    batch = in_batch(pager, a)
    first, second = batch.step(2, [20, 21]), batch.step(2, [-1, 22])
    assert first.commit([9], [2]).tolist() == [True]
    assert second.token_ids.tolist() == [9, 22]
    assert second.commit([30], [0]).tolist() == [True]
    assert a.tokens.tolist() == [*PROMPT, 20, 21, 9, 30]


# Void rows, in the synchronous loop and one step ahead.


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("end", ["release", "abort", "preempt", "resume", "drop", "truncate", "truncate and extend"])
def test_a_row_is_void_when_its_sequence_is_not_what_it_was(implementation, end, ahead):
    """W5, W6: no block is ever hit that was not computed, whatever comes between plan and commit."""
    pager = implementation(16, 4)
    held = [pager.admit([1] * 8), pager.admit([2] * 8)]
    batch = in_batch(pager, *held)
    steps = [batch.step(8)]
    if ahead:
        steps.append(batch.step(1))
    a = held[0]
    if end == "release":
        a.release()
    elif end == "abort":
        a.release("aborted")
    elif end == "preempt":
        a.preempt()
    elif end == "resume":
        a.preempt()
        a.resume()
    elif end == "drop":
        del a
        held[0] = None
        gc.collect()
    else:
        a.truncate(7)
        if end != "truncate":
            a.extend([5, 6])
    assert steps[0].commit([7, 8]).tolist() == [False, True]
    if ahead:
        assert steps[1].commit([7, 9]).tolist() == [False, True]
    assert pager.match([1] * 8 + [7]).num_tokens == 0
    assert pager.match([2] * 8 + [8]).num_tokens == 8
    assert held[1].tokens.tolist() == [2] * 8 + [8, 9][: 1 + ahead]
    if end in ("preempt", "resume", "truncate"):
        assert a.tokens.tolist() == [1] * (7 if end == "truncate" else 8)
    assert pager.check() == []
    for each in held:
        if each is not None:
            each.release()
    del steps, batch
    assert_nothing_leaked(pager)


def test_a_truncate_behind_the_row_voids_nothing(implementation):
    pager = implementation(16, 4)
    a = pager.admit([1] * 8)
    batch = in_batch(pager, a)
    first, second = batch.step(4), batch.step(2)
    a.truncate(5)
    assert (a.num_planned, second.token_ids.tolist()) == (4, [-1, -1])
    assert first.commit().tolist() == [True]
    assert second.commit().tolist() == [False]
    assert (a.num_committed, pager.match([1] * 8).num_tokens) == (4, 4)


def test_a_fork_between_plan_and_commit_has_nothing_written(implementation):
    pager = implementation(16, 4)
    a = pager.admit([1] * 6)
    batch = in_batch(pager, a)
    first, second = batch.step(6), batch.step(1)
    (child,) = a.fork()
    assert (child.num_committed, child.num_planned, child.tokens.tolist()) == (0, 0, [1] * 6)
    assert first.commit([7]).tolist() == [True]
    child.commit(6)
    assert second.commit([8]).tolist() == [True]
    assert (ids(a), ids(child)) == ([0, 1], [0, 1])
    assert batch.add(child) == 1
    step = batch.step([1, 1], [9])
    assert step.copies.tolist() == [[1, 2]]
    assert (ids(a), ids(child)) == ([0, 2], [0, 1])


def test_a_child_goes_on_when_its_parent_is_aborted(implementation):
    """The open step of the parent named the block; the child copied what was written and writes for itself."""
    pager = implementation(16, 4)
    a = admit_committed(pager, [1] * 5)
    batch = in_batch(pager, a)
    step = batch.step(1, [7])
    (child,) = a.fork()
    batch.add(child)
    second = batch.step([0, 1])
    assert (second.copies.tolist(), plan(second)) == ([[1, 2]], ([5], [9]))
    a.release("aborted")
    assert step.commit([8]).tolist() == [False]
    assert second.commit([-1, 9]).tolist() == [False, True]
    assert child.tokens.tolist() == [1] * 5 + [7, 9]
    child.release()
    del step, second, batch
    assert_nothing_leaked(pager)


# Cancel.


def scenes(pager):
    """A batch in the middle of things, and what a step there plans: growth, copies, drafts, placeholders, chunks."""
    a = admit_committed(pager, [1] * 6)
    (b,) = a.fork()
    c = pager.admit([3] * 9)
    d = admit_committed(pager, [4] * 8)
    d.truncate(6)
    e = admit_committed(pager, [5] * 3)
    (f,) = e.fork()
    f.append(7)
    batch = in_batch(pager, a, b, c, d, e, buffers=3)
    return batch, (a, b, c, d, e, f)


PLANS = {
    "one each": (1, [7, 7, 7, 7]),
    "drafts": ([4, 7, 2, 3, 1], list(range(15))),
    "chunk": ([0, 0, 9, 0, 0], None),
    "nothing": (0, None),
    "a copy": ([1, 0, 0, 0, 0], [8]),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_cancel_leaves_everything_as_it_was(implementation, what):
    pager = implementation(32, 4)
    batch, held = scenes(pager)
    with nothing_changes(pager):
        batch.step(*PLANS[what]).cancel()
    first = batch.step([0, 0, 4, 0, 0])
    with nothing_changes(pager):
        second = batch.step(*PLANS[what]) if what != "chunk" else batch.step([0, 0, 5, 0, 0])
        batch.step([0, 0, 1, 0, 0]) if what == "nothing" else batch.step(0)
        batch.open_steps[-1].cancel()
        second.cancel()
    first.cancel()
    assert len(held) == 6


def test_cancel_takes_placeholders_back(implementation):
    pager = implementation(16, 4)
    a, b = pager.admit([1] * 4), pager.admit([2] * 4)
    batch = in_batch(pager, a, b)
    first = batch.step(4)
    with nothing_changes(pager):
        batch.step(3, [-1, 5, 6, -1, 7, 8]).cancel()
    assert (len(a), ids(a), free_ids(pager)) == (4, [0], "2-15")
    first.cancel()
    assert (a.num_planned, batch.open_steps) == (0, [])


def test_a_token_that_was_found_stays_after_a_cancel(implementation):
    """The placeholder was the cancelled step's, the token is not."""
    pager = implementation(16, 4)
    a = pager.admit([1] * 4)
    batch = in_batch(pager, a)
    first, second = batch.step(4), batch.step(2, [-1, 5])
    first.commit([7])
    assert a.tokens.tolist() == [1] * 4 + [7, 5]
    second.cancel()
    assert (a.tokens.tolist(), a.num_planned, ids(a)) == ([1] * 4 + [7], 4, [0])
    assert batch.step(1).token_ids.tolist() == [7]


def test_a_cancel_takes_a_placeholder_whose_row_was_cut(implementation):
    """A truncate between placeholder and draft voids the row, and leaves the position to the step before."""
    pager = implementation(16, 4)
    a = pager.admit([1] * 4)
    batch = in_batch(pager, a)
    first, second = batch.step(4), batch.step(2, [-1, 5])
    a.truncate(5)
    assert a.tokens.tolist() == [1] * 4 + [-1]
    second.cancel()
    assert a.tokens.tolist() == [1] * 4 + [-1]
    first.cancel()
    assert (a.tokens.tolist(), a.num_planned) == ([1] * 4, 0)
    assert pager.check() == []


def test_a_placeholder_whose_row_was_cut_is_planned_again(implementation):
    pager = implementation(16, 4)
    a = pager.admit([1] * 4)
    batch = in_batch(pager, a, buffers=3)
    first, second = batch.step(4), batch.step(2, [-1, 5])
    a.truncate(5)
    third = batch.step(1)
    assert third.positions.tolist() == [4]
    assert first.commit([7]).tolist() == [True]
    assert (second.token_ids.tolist(), third.token_ids.tolist()) == ([-1, -1], [7])
    third.cancel()
    second.cancel()
    assert (a.tokens.tolist(), a.num_planned) == ([1] * 4 + [7], 4)


def test_later_tokens_keep_their_block(implementation):
    """The slot of an appended token was given away: the block that it lies in stays after a cancel."""
    pager = implementation(16, 4)
    a = pager.admit([1] * 4)
    batch = in_batch(pager, a)
    batch.step(4).commit([7])
    step = batch.step(1)
    assert a.append(8) == 5
    step.cancel()
    assert (a.tokens.tolist(), ids(a), a.num_planned) == ([1] * 4 + [7, 8], [0, 1], 4)
    assert pager.check() == []


def test_what_came_behind_cancelled_tokens_goes_with_them(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, [1] * 4)
    batch = in_batch(pager, a)
    step = batch.step(1, [7])
    a.extend([8] * 4)
    assert ids(a) == [0, 1, 2]
    step.cancel()
    assert (a.tokens.tolist(), ids(a)) == ([1] * 4, [0, 1, 2])
    a.truncate(4)
    assert ids(a) == [0]


def test_a_fork_in_between_keeps_the_copy(implementation):
    """The child maps the target, so its copy has to be done after all: it goes to the queue."""
    pager = implementation(8, 4)
    a = admit_committed(pager, [1] * 2)
    (b,) = a.fork()
    batch = in_batch(pager, a)
    step = batch.step(1, [7])
    assert step.copies.tolist() == [[0, 1]]
    (child,) = a.fork()
    step.cancel()
    assert (ids(a), ids(b), ids(child), line(pager, "copies")) == ([1], [0], [1], "copies: 0->1")
    assert a.tokens.tolist() == [1, 1]
    assert pager.take_copies().tolist() == [[0, 1]]


def test_a_copy_from_a_cancelled_target_starts_at_its_source(implementation):
    pager = implementation(8, 4)
    a = admit_committed(pager, [1] * 2)
    (b,) = a.fork()
    batch = in_batch(pager, a)
    step = batch.step(1, [7])
    (child,) = a.fork()
    assert child.append(5) // 4 == 2
    assert line(pager, "copies") == "copies: 1->2"
    step.cancel()
    assert (ids(a), ids(b), ids(child)) == ([0], [0], [2])
    assert (line(pager, "copies"), free_ids(pager)) == ("copies: 0->2", "1 3-7")


def test_a_freed_target_lets_go_of_its_source(implementation):
    pager = implementation(8, 4)
    a = admit_committed(pager, [1] * 2)
    (b,) = a.fork()
    batch = in_batch(pager, a)
    step = batch.step(1, [7])
    a.release()
    b.release()
    assert (free_ids(pager), pager.stats().active_blocks) == ("1-7", 1), "the step holds the source"
    step.cancel()
    assert free_ids(pager) == "0-7"
    assert pager.stats().copies == 0


def test_a_cancel_gives_the_queue_back(implementation):
    pager = implementation(16, 4)
    a, b = admit_committed(pager, [1] * 2), admit_committed(pager, [2] * 2)
    one, two = a.fork()[0], b.fork()[0]
    one.append(5)
    two.append(6)
    batch = in_batch(pager, a, b)
    with nothing_changes(pager):
        step = batch.step(1, [7, 8])
        assert step.copies.tolist() == [[0, 2], [1, 3]]
        step.cancel()
    assert line(pager, "copies") == "copies: 0->2 1->3"


def test_a_void_row_gives_nothing_back_but_its_copy(implementation):
    """Cut below its end the row is void: what the truncate left in the table stays, and still wants its content."""
    pager = implementation(16, 4)
    a = admit_committed(pager, [1] * 2)
    (b,) = a.fork()
    batch = in_batch(pager, a)
    step = batch.step(4, [7] * 4)
    a.truncate(3)
    step.cancel()
    assert (a.tokens.tolist(), ids(a), ids(b), line(pager, "copies")) == ([1, 1, 7], [1], [0], "copies: 0->1")
    assert pager.check() == []


def test_an_eviction_is_not_undone(implementation):
    pager = implementation(3, 4)
    admit_committed(pager, [9] * 8).release()
    a = admit_committed(pager, [1] * 4)
    batch = in_batch(pager, a)
    batch.step(1, [2]).cancel()
    assert (pager.stats().evicted_blocks, pager.num_free_blocks, pager.num_evictable_blocks) == (1, 1, 1)


def test_an_entry_replaced_without_a_copy_keeps_its_new_block(implementation):
    pager = implementation(8, 4)
    a = pager.admit([1] * 2)
    (b,) = a.fork()
    in_batch(pager, a).step(2).cancel()
    assert (ids(a), ids(b), a.num_planned) == ([1], [0], 0)


def test_updates_after_a_cancel_include_the_reversal(implementation):
    pager = implementation(8, 4)
    a = admit_committed(pager, [1] * 2)
    (b,) = a.fork()
    batch = in_batch(pager, a)
    assert batch.step(1, [7]).updates.tolist() == [[0, 0, 1]]
    batch.open_steps[0].cancel()
    mirror = {(0, 0): 1}
    mirror.update({(row, column): block for row, column, block in batch.step(0).updates.tolist()})
    assert mirror == {(0, 0): 0}
    assert ids(a) == ids(b) == [0]


# What was handed out since (rules.md 14.5.1).


def two_batches(implementation):
    pager = implementation(16, 4)
    a, b = admit_committed(pager, [1] * 6), admit_committed(pager, [2] * 6)
    return pager, (a, b), (in_batch(pager, a), in_batch(pager, b))


def test_a_step_of_another_batch_stops_a_cancel(implementation):
    pager, _held, (one, other) = two_batches(implementation)
    first, second = one.step(1, [7]), other.step(1, [8])
    with nothing_changes(pager), refuses(kvpager.StepError):
        first.cancel()
    assert (first.state, one.open_steps[0].id) == ("open", 0)
    second.cancel()
    first.cancel()
    assert (first.state, second.state) == ("cancelled", "cancelled")


def test_a_committed_step_of_another_batch_stops_a_cancel_for_good(implementation):
    pager, _held, (one, other) = two_batches(implementation)
    first, second = one.step(1, [7]), other.step(1, [8])
    second.commit()
    other.step(1, [9]).cancel()
    with nothing_changes(pager), refuses(kvpager.StepError):
        first.cancel()
    assert first.commit([9]).tolist() == [True]
    one.step(1).cancel()


def test_an_earlier_step_of_another_batch_is_no_matter(implementation):
    pager, _held, (one, other) = two_batches(implementation)
    first, second = one.step(1, [7]), other.step(1, [8])
    first.commit()
    second.cancel()
    assert pager.check() == []


@pytest.mark.parametrize("later", [0, 1])
def test_a_step_that_plans_nothing_stops_a_cancel_too(implementation, later):
    """It may have taken the queue over."""
    pager, _held, (one, other) = two_batches(implementation)
    first = one.step(1, [7])
    other.step(0) if later else other.step(1, [8])
    with nothing_changes(pager), refuses(kvpager.StepError):
        first.cancel()


def test_steps_of_two_batches_are_cancelled_newest_first(implementation):
    pager, _held, (one, other) = two_batches(implementation)
    with nothing_changes(pager):
        steps = [one.step(1, [7]), other.step(1, [8]), one.step(1), other.step(1)]
        for each in (0, 1, 2):
            with refuses(kvpager.StepError):
                steps[each].cancel()
        for each in (3, 2, 1, 0):
            steps[each].cancel()


def test_copies_that_were_taken_stop_a_cancel(implementation):
    """They may read what the step's copies bring."""
    pager = implementation(8, 4)
    a = admit_committed(pager, [1] * 2)
    (b,) = a.fork()
    batch = in_batch(pager, a)
    step = batch.step(1, [7])
    assert step.copies.tolist() == [[0, 1]]
    assert pager.take_copies().tolist() == [], "and an empty answer brings nothing"
    (child,) = a.fork()
    child.append(5)
    assert line(pager, "copies") == "copies: 1->2"
    assert pager.take_copies().tolist() == [[1, 2]]
    with nothing_changes(pager), refuses(kvpager.StepError):
        step.cancel()
    assert step.commit([8]).tolist() == [True]
    second = batch.step(1)
    assert pager.take_copies().tolist() == []
    second.cancel()
    assert (ids(a), ids(b), ids(child)) == ([1], [0], [2])
    assert pager.check() == []


def test_copies_that_were_taken_before_are_no_matter(implementation):
    pager = implementation(8, 4)
    a = admit_committed(pager, [1] * 2)
    (b,) = a.fork()
    b.append(5)
    assert pager.take_copies().tolist() == [[0, 1]]
    in_batch(pager, a).step(1, [7]).cancel()
    assert pager.check() == []


@pytest.mark.parametrize("which", ["later", "earlier"])
def test_a_dropped_batch_cancels_its_steps_whatever_came_later(implementation, which):
    """And what it had planned later stops nobody any more."""
    pager, held, (one, other) = two_batches(implementation)
    first, second = one.step(1, [7]), other.step(1, [8])
    if which == "later":
        del second, other
        gc.collect()
        first.cancel()
        assert [len(each) for each in held] == [6, 6]
    else:
        del first, one
        gc.collect()
        second.commit()
        assert [len(each) for each in held] == [6, 7]
    assert pager.check() == []


def test_a_cancel_that_gives_a_block_back_to_some_takes_it_from_another(implementation):
    """A row that had been the last holder meanwhile wrote to the block without a copy: the others' KV was lost."""
    pager = implementation(16, 2)
    a = pager.admit([5, 6])
    a.commit(1)
    b, c = a.fork(2)
    batch = in_batch(pager, a, b, c)
    shared = ids(c)
    step = batch.step([1, 1, 0], [])
    batch.reserve([0, 5, 1])
    assert ids(c) == shared, "the copies read it before anybody writes"
    assert batch.blocks_needed([0, 0, 1], []) == 0
    step.cancel()
    (d,) = a.fork(1)
    assert ids(a) == ids(b)[:1] == ids(c) == ids(d) == shared
    assert batch.blocks_needed(1, []) == 3
    batch.step(1, [])
    assert ids(c) != shared
    for each in (a, b, c, d):
        each.release()
