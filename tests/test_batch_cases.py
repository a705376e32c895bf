"""The failures of ``test_cases.py`` once more, where a batch is how they would come about."""

from __future__ import annotations

import pytest
from implementations import (
    assert_nothing_leaked,
    cache,
    each_with_batch,
    free_ids,
    ids,
    in_batch,
    line,
    nothing_changes,
    refuses,
)

import kvpager

pytestmark = each_with_batch


@pytest.mark.parametrize("end", ["abort", "preempt"])
@pytest.mark.parametrize("done", range(4))
def test_w5_an_unfinished_chunked_prefill_is_hit_as_far_as_it_was_committed(implementation, done, end):
    """A prompt of 64 in chunks of 20, two of them open at a time, and an end after some of them."""
    pager = implementation(8, 16)
    prompt = list(range(64))
    sequence = pager.admit(prompt)
    batch = in_batch(pager, sequence)
    for chunk in (20, 20, 20, 4)[: done + 2]:
        batch.step(chunk)
        if len(batch.open_steps) == 2:
            if batch.open_steps[0].id == done:
                break
            batch.open_steps[0].commit()
    while batch.open_steps[0].id < done:
        batch.open_steps[0].commit()
    sequence.release("aborted") if end == "abort" else sequence.preempt()
    for step in batch.open_steps:
        assert not step.commit().any()
    assert pager.match([*prompt, 1]).num_tokens == 20 * done // 16 * 16
    assert pager.check() == []


@pytest.mark.parametrize("when", range(5))
def test_w6_an_abort_before_commit_leaves_no_entry_and_no_leak(implementation, when):
    """One step ahead; the abort falls after each call in turn."""
    pager = implementation(16, 4)
    sequence, other = pager.admit([1] * 9), pager.admit([2] * 3)
    batch = in_batch(pager, sequence, other)
    calls = [
        lambda alive: batch.step([9 * alive, 3]),
        lambda alive: batch.step([1 * alive, 1]),
        lambda alive: batch.reserve([8 * alive, 0]),
        lambda alive: sequence.extend([3] * 5) if alive else None,
    ]
    for number, call in enumerate(calls):
        if number == when:
            sequence.release("aborted")
        call(number < when)
    sequence.release("aborted")
    for token, step in zip((5, 6), batch.open_steps, strict=True):
        assert step.commit([token] * 2).tolist() == [False, True]
    assert pager.match([1] * 9).num_tokens == 0
    assert other.tokens.tolist() == [2, 2, 2, 5, 6]
    other.release()
    assert_nothing_leaked(pager)
    assert pager.match([2, 2, 2, 5, 6]).num_tokens == 4


def test_w10_two_equal_prompts_in_one_step_keep_their_blocks(implementation):
    """The first row is indexed; the second follows it and goes on holding its own: nothing that is mapped is freed."""
    pager = implementation(16, 4)
    prompt = [1] * 6
    a, b = pager.admit(prompt), pager.admit(prompt)
    batch = in_batch(pager, a, b)
    step = batch.step(6)
    tables = step.block_tables[:, :2].tolist()
    step.commit([7, 8])
    assert tables == [[0, 1], [2, 3]] == [ids(a), ids(b)]
    assert [line(pager, f"sequence {each.id}").split("path ")[1][0] for each in (a, b)] == ["0", "0"]
    assert batch.step().block_tables[:, :2].tolist() == tables
    a.release()
    assert ids(b) == [2, 3]
    assert pager.match(prompt).num_tokens == 4


@pytest.mark.parametrize("order", ["abort, finish", "finish, abort", "preempt, release"])
def test_l1_a_sequence_ends_once_whoever_ends_it(implementation, order):
    pager = implementation(8, 4)
    a, b = pager.admit([1] * 4), pager.admit([2] * 4)
    batch = in_batch(pager, a, b)
    step = batch.step(4)
    for how in order.split(", "):
        if how == "preempt":
            a.preempt()
        else:
            a.release("aborted" if how == "abort" else "finished")
    a.release()
    assert step.commit([7, 8]).tolist() == [False, True]
    assert pager.stats().noop_calls == (1 if "preempt" in order else 2)
    with nothing_changes(pager), refuses(ValueError):
        batch.remove(a)
    assert (batch.row_of(a), batch.num_rows, len(batch)) == (None, 2, 1)
    assert pager.check() == []


def test_l7_the_need_of_a_batch_is_counted_in_blocks(implementation):
    """Nine sequences that each need one token: only those at a block boundary need a block."""
    pager = implementation(14, 4)
    held = [pager.admit([number] * (number % 4 + 1)) for number in range(9)]
    batch = pager.batch(9, 4)
    for each in held:
        batch.add(each)
    batch.step([len(each) for each in held]).commit([7] * 9)
    assert batch.blocks_needed() == 2, "the rows with 4 tokens"
    assert pager.num_free_blocks == 5
    blocker = pager.admit([9] * 16)
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        batch.step()
    assert (refused.value.needed, refused.value.free, refused.value.rows) == (2, 1, (7,))
    blocker.release()
    batch.step()
    assert pager.num_free_blocks == 3


def test_l15_the_last_sequence_outgrows_the_pool(implementation):
    pager = implementation(2, 4)
    a = pager.admit([1] * 8)
    batch = in_batch(pager, a)
    batch.step(8).commit([2])
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks, "needed 1 blocks") as refused:
        batch.step()
    assert (refused.value.needed, refused.value.total, refused.value.rows) == (1, 2, (0,))
    assert batch.try_step() is None
    a.preempt()
    with nothing_changes(pager), refuses(kvpager.NeverFits):
        a.resume()


def test_e5_rejected_drafts_push_nothing_out_of_the_cache(implementation):
    """Blocks that held drafts only are free again, on top of the stack, and are taken before anything cached."""
    pager = implementation(6, 4)
    cache(pager, [9] * 9)
    a = pager.admit([1] * 4)
    batch = in_batch(pager, a)
    batch.step(4).commit([5])
    for _ in range(3):
        batch.step(8, [0] * 7).commit([5], [0])
        assert free_ids(pager) == "4-5"
    assert (pager.stats().evicted_blocks, pager.match([9] * 9).num_tokens) == (0, 8)
