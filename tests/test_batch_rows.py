"""Which sequence is in which row of a batch (rules.md 14.1)."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from implementations import (
    admit_committed,
    assert_nothing_leaked,
    each_with_batch,
    ids,
    in_batch,
    line,
    nothing_changes,
    refuses,
)

import kvpager

pytestmark = each_with_batch


def rows(pager):
    return line(pager, "batch 0").split("rows ")[1].split(";")[0]


def test_a_sequence_gets_the_lowest_empty_row(implementation):
    pager = implementation(16, 4)
    batch = pager.batch(4, 8)
    a, b, c, d = (pager.admit([each]) for each in range(4))
    assert [batch.add(each) for each in (a, b, c)] == [0, 1, 2]
    assert (batch.num_rows, len(batch)) == (3, 3)
    assert batch.remove(b) == 1
    assert (batch.num_rows, len(batch), batch.row_of(b), batch.row_of(c)) == (3, 2, None, 2)
    assert rows(pager) == "0 - 2"
    assert batch.add(d) == 1
    assert rows(pager) == "0 3 2"
    assert pager.check() == []


def test_num_rows_ends_with_the_last_one_in_use(implementation):
    pager = implementation(16, 4)
    a, b, c = (pager.admit([each]) for each in range(3))
    batch = in_batch(pager, a, b, c)
    batch.remove(b)
    assert batch.remove(c) == 2
    assert (batch.num_rows, rows(pager)) == (1, "0")
    batch.remove(a)
    assert (batch.num_rows, len(batch), rows(pager)) == (0, 0, "-")


@pytest.mark.parametrize("end", ["release", "preempt", "drop"])
def test_who_leaves_the_pool_leaves_the_batch(implementation, end):
    pager = implementation(16, 4)
    held = [pager.admit([each]) for each in range(3)]
    batch = in_batch(pager, *held)
    if end == "drop":
        del held[1]
        gc.collect()
        assert rows(pager) == "0 1 2", "the next mutating call releases it"
        pager.take_copies()
    else:
        getattr(held[1], end)()
    assert (rows(pager), len(batch)) == ("0 - 2", 2)
    if end == "preempt":
        assert batch.row_of(held[1].resume()) is None, "resume does not fill the row again"


def test_condense_moves_the_last_into_the_lowest(implementation):
    pager = implementation(16, 4)
    a, b, c, d, e = held = [pager.admit([each]) for each in range(5)]
    batch = in_batch(pager, *held)
    batch.remove(a)
    batch.remove(c)
    moves = batch.condense()
    assert (moves.dtype, moves.tolist()) == (np.int32, [[4, 0], [3, 2]])
    assert rows(pager) == "4 1 3"
    assert [batch.row_of(each) for each in held] == [None, 1, None, 2, 0]
    assert batch.condense().shape == (0, 2)
    batch.remove(e)
    batch.remove(b)
    assert batch.condense().tolist() == [[2, 0]]
    batch.remove(d)
    assert batch.condense().shape == (0, 2)


def test_condense_passes_over_rows_that_are_empty_at_the_end(implementation):
    pager = implementation(16, 4)
    a, b, c, d = held = [pager.admit([each]) for each in range(4)]
    batch = in_batch(pager, *held)
    for each in (a, c, b):
        batch.remove(each)
    assert batch.condense().tolist() == [[3, 0]]
    assert batch.num_rows == 1
    batch.remove(d)


def test_moving_or_removing_a_row_changes_no_open_step(implementation):
    pager = implementation(16, 4)
    a, b = pager.admit([1, 2]), pager.admit([3])
    batch = in_batch(pager, a, b)
    step = batch.step([2, 1])
    tables = step.block_tables.tolist()
    batch.remove(a)
    assert batch.condense().tolist() == [[1, 0]]
    assert (step.num_rows, step.block_tables.tolist()) == (2, tables)
    assert step.token_ids.tolist() == [1, 2, 3]
    assert step.commit([7, 8]).tolist() == [True, True]
    assert (a.tokens.tolist(), b.tokens.tolist()) == ([1, 2, 7], [3, 8])
    assert batch.step(1).positions.tolist() == [1]


def test_two_batches_never_share_a_sequence(implementation):
    pager = implementation(16, 4)
    a = pager.admit([1, 2])
    one, other = in_batch(pager, a), in_batch(pager)
    with nothing_changes(pager), refuses(ValueError, "batch"):
        other.add(a)
    with nothing_changes(pager), refuses(ValueError, "batch"):
        one.add(a)
    with nothing_changes(pager), refuses(ValueError):
        other.remove(a)
    assert (one.row_of(a), other.row_of(a)) == (0, None)
    step = one.step(2)
    one.remove(a)
    with nothing_changes(pager), refuses(ValueError, "step"):
        other.add(a)
    assert one.add(a) == 0, "the batch of the step takes it back"
    one.remove(a)
    step.commit()
    assert other.add(a) == 0
    assert line(pager, "batch 1") == "batch 1: rows 0; open -; next step 0"


def test_what_add_and_remove_refuse(implementation):
    pager, stranger = implementation(32, 4), implementation(16, 4)
    batch = pager.batch(1, 2)
    long, foreign, released, preempted = pager.admit([1] * 9), stranger.admit([1]), pager.admit([1]), pager.admit([1])
    released.release()
    preempted.preempt()
    for wrong, error in [
        (long, ValueError),
        (foreign, ValueError),
        (released, kvpager.StaleHandle),
        (preempted, kvpager.StaleHandle),
        (None, TypeError),
        (0, TypeError),
    ]:
        with nothing_changes(pager), refuses(error):
            batch.add(wrong)
        with nothing_changes(pager), refuses(TypeError if error is TypeError else ValueError):
            batch.remove(wrong)
    assert batch.row_of(released) is None
    long.truncate(8)
    batch.add(long)
    another = pager.admit([3])
    with nothing_changes(pager), refuses(ValueError, "1 rows"):
        batch.add(another)


def test_fork_fills_empty_rows_parents_in_order(implementation):
    pager = implementation(16, 4)
    a, b, c = (admit_committed(pager, [each] * 5) for each in range(3))
    batch = in_batch(pager, a, b, c)
    batch.remove(b)
    children = batch.fork([2, 0], 2)
    assert [child.id for child in children] == [3, 4, 5, 6]
    assert [child.tokens.tolist() for child in children] == [[2] * 5, [2] * 5, [0] * 5, [0] * 5]
    assert [batch.row_of(child) for child in children] == [1, 3, 4, 5]
    assert ids(children[0]) == ids(c)
    assert batch.fork(np.array([], np.int64), 1) == []


def test_fork_is_all_or_nothing(implementation):
    pager = implementation(16, 4)
    a, b, c = (pager.admit([each]) for each in range(3))
    batch = pager.batch(4, 8)
    for each in (a, b, c):
        batch.add(each)
    batch.remove(b)
    for rows_given, n, error in [
        ([0, 2], 2, ValueError),
        ([0], 3, ValueError),
        ([1], 1, ValueError),
        ([0, 0], 1, ValueError),
        ([3], 1, ValueError),
        ([-1], 1, ValueError),
        ([0], 0, ValueError),
        ([], 0, ValueError),
        ([0], 65_537, ValueError),
        ([0.0], 1, kvpager.TokenTypeError),
        ([True], 1, kvpager.TokenTypeError),
        (0, 1, kvpager.TokenTypeError),
        ([0], 1.0, TypeError),
    ]:
        with nothing_changes(pager), refuses(error):
            batch.fork(rows_given, n)
    assert len(batch.fork([2, 0], 1)) == 2


def test_a_dropped_batch_cancels_its_steps_and_empties_its_rows(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, [1, 2, 3, 4])
    (child,) = a.fork()
    before = pager.dump(full=True)
    batch = in_batch(pager, a, child)
    batch.step(1, [5, 6])
    batch.step(1)
    del batch
    gc.collect()
    assert line(pager, "batch 0") == "batch 0: rows 0 1; open 0 1; next step 2", "the next mutating call ends it"
    pager.take_copies()
    assert pager.dump(full=True) == before
    assert (a.num_planned, pager.stats().dropped_handles) == (4, 0)
    assert pager.batch(1, 1).add(a) == 0


def test_a_step_keeps_its_batch(implementation):
    pager = implementation(16, 4)
    a = pager.admit([1, 2, 3])
    step = in_batch(pager, a).step(3)
    gc.collect()
    pager.take_copies()
    assert step.commit([4]).tolist() == [True]
    assert a.tokens.tolist() == [1, 2, 3, 4]


def test_nothing_is_left_behind(implementation):
    pager = implementation(16, 4)
    held = [pager.admit([each] * 6) for each in range(2)]
    batch = in_batch(pager, *held)
    held += batch.fork([0], 2)
    step = batch.step([6, 6, 6, 6])
    for each in held:
        each.release()
    assert step.commit([1, 2, 3, 4]).tolist() == [False] * 4
    assert_nothing_leaked(pager)
    del step, batch
    assert_nothing_leaked(pager)
    assert "batch" not in pager.dump(full=True)


LIMITS = {
    "max_seqs": [0, -1, 65_537, 2**70],
    "max_blocks": [0, 2**31, 2**70],
    "max_tokens": [0, 2**31],
    "buffers": [0, 5],
    "pad_block": [2**31, -(2**31) - 1],
    "pad_seq_len": [2**31],
    "pad_slot": [2**63, -(2**63) - 1],
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_of_a_batch(implementation, name):
    pager = implementation(16, 4)
    for value in LIMITS[name]:
        options = {"max_seqs": 1, "max_blocks": 1, name: value}
        with nothing_changes(pager), refuses(kvpager.ConfigError, name):
            pager.batch(**options)
    for value in (1.0, "1", None, True):
        options = {"max_seqs": 1, "max_blocks": 1, name: value}
        with nothing_changes(pager), refuses(TypeError):
            pager.batch(**options)


def test_the_products_of_the_limits(implementation):
    pager = implementation(16, 4)
    for options in ({"max_seqs": 2**16, "max_blocks": 2**14}, {"max_seqs": 1, "max_blocks": 1, "max_tokens": 2**30}):
        with nothing_changes(pager), refuses(kvpager.ConfigError, "2147483648"):
            pager.batch(**options)


def test_a_batch_tells_its_limits(implementation):
    batch = implementation(16, 4).batch(3, 5, 7, buffers=4)
    assert (batch.max_seqs, batch.max_blocks, batch.max_tokens, batch.buffers) == (3, 5, 7, 4)
    batch = implementation(16, 4).batch(3, 5)
    assert (batch.max_tokens, batch.buffers, batch.num_rows, len(batch), batch.open_steps) == (8192, 2, 0, 0, [])


def test_the_drawing_of_batches(implementation):
    """Rows in order, never as ranges; only with ``full``, and no line where there is no batch (rules.md 12)."""
    pager = implementation(16, 4)
    held = [pager.admit([each] * 2) for each in range(4)]
    other = in_batch(pager)
    batch = in_batch(pager, *held)
    batch.remove(held[2])
    batch.step([2, 0, 0, 1])
    batch.step([1, 0, 0, 0])
    text = pager.dump(full=True)
    assert "batch" not in pager.dump()
    lines = text.splitlines()
    place = lines.index("batch 0: rows -; open -; next step 0")
    assert lines[place - 1].startswith("sequence 3: running; namespace b''; cached 0; committed 0; planned 1; len 2;")
    assert lines[place + 1] == "batch 1: rows 0 1 - 3; open 0 1; next step 2"
    assert lines[place + 2] == "copies: -"
    assert len(other) == 0


def test_copies_of_an_open_step_are_holders(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, [1] * 8)
    a.truncate(6)
    batch = in_batch(pager, a)
    step = batch.step(1, [7])
    assert pager.dump().splitlines()[2:] == [
        "└─ 1 block 0: tokens 1 1 1 1; holders 2; hits 0",
        "   └─ 1 block 1: tokens 1 1 1 1; holders 1; hits 0",
    ]
    step.commit()
    assert pager.dump().splitlines()[3] == "   └─ 1 block 1: tokens 1 1 1 1; holders 0; hits 0; idle since 0"
