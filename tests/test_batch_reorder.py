"""Beams: rows go on from other rows (rules.md 14.7), to the id."""

from __future__ import annotations

import gc
import warnings

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


def three_rows(implementation, num_blocks=16, **options):
    """Rows 0, 1 and 2: blocks 0-1 (the first of them indexed), 2 and 3, all committed."""
    pager = implementation(num_blocks, 4)
    held = [admit_committed(pager, tokens) for tokens in ([1] * 6, [2] * 3, [3] * 2)]
    return pager, in_batch(pager, *held, **options), held


def rows(pager):
    return line(pager, "batch 0").split("rows ")[1].split(";")[0]


def test_the_first_beam_keeps_row_and_sequence(implementation):
    pager, batch, (a, b, c) = three_rows(implementation)
    places, sequences = batch.reorder([0, 0, 2, 0], [7, 8, 9, 6])
    assert (places.dtype, places.tolist()) == (np.int32, [0, 1, 2, 3])
    assert [None if each is None else each.id for each in sequences] == [None, 3, None, 4]
    assert (rows(pager), b.state, pager.stats().clock_ticks) == ("0 3 2 4", "released", 1)
    assert [each.tokens.tolist() for each in (a, sequences[1], sequences[3], c)] == [
        [*[1] * 6, 7],
        [*[1] * 6, 8],
        [*[1] * 6, 6],
        [3, 3, 9],
    ]
    assert [(each.num_cached, each.num_committed) for each in (a, sequences[1], c)] == [(0, 6), (0, 6), (0, 2)]
    assert ids(a) == ids(sequences[1]) == ids(sequences[3]) == [0, 1]
    assert (ids(c), free_ids(pager)) == ([3], "2 4-15")
    assert pager.check() == []


def test_the_next_step_copies_what_the_beams_share(implementation):
    """Three beams write behind position 6 in block 1: the last of them may keep it."""
    pager, batch, held = three_rows(implementation)
    _, sequences = batch.reorder([0, 0, 2, 0], [7, 8, 9, 6])
    step = batch.step()
    assert step.copies.tolist() == [[1, 2], [1, 4]]
    assert plan(step) == ([6, 6, 2, 6], [2 * 4 + 2, 4 * 4 + 2, 3 * 4 + 2, 1 * 4 + 2])
    assert step.token_ids.tolist() == [7, 8, 9, 6]
    assert step.commit().tolist() == [True] * 4
    assert (ids(held[0]), ids(sequences[1]), ids(sequences[3])) == ([0, 2], [0, 4], [0, 1])
    assert pager.check() == []


def test_beams_that_change_nothing_but_their_tokens(implementation):
    pager, batch, held = three_rows(implementation)
    places, sequences = batch.reorder((2, 0, 1), np.array([9, 7, 8]))
    assert (places.tolist(), sequences) == ([2, 0, 1], [None] * 3)
    assert [each.tokens.tolist()[-1] for each in held] == [7, 8, 9]
    assert (rows(pager), pager.stats().clock_ticks) == ("0 1 2", 0)


def test_a_token_that_fills_the_block_behind_it_needs_none(implementation):
    """The pool has no block left for it: that is for the next step to ask for."""
    pager = implementation(2, 4)
    a, b = admit_committed(pager, [1] * 4), admit_committed(pager, [2] * 4)
    batch = in_batch(pager, a, b)
    batch.reorder([0, 1], [5, 6])
    assert (len(a), ids(a), ids(b)) == (5, [0], [1])
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        batch.step()
    assert (refused.value.needed, refused.value.rows) == (2, (0, 1))


def test_who_is_nobodys_parent_is_released_rows_in_order(implementation):
    pager, batch, held = three_rows(implementation)
    places, sequences = batch.reorder([], [], [2, 1])
    assert (places.dtype, places.shape, sequences) == (np.int32, (0,), [])
    assert [each.state for each in held] == ["running", "released", "released"]
    assert (free_ids(pager), rows(pager), len(batch)) == ("3 2 4-15", "0", 1), "block 2 first, 3 on top of it"
    batch.reorder([], [])
    assert (rows(pager), pager.num_evictable_blocks, pager.stats().clock_ticks) == ("-", 1, 3)
    assert_nothing_leaked(pager)


def test_only_the_named_rows_take_part(implementation):
    """Row 1 has tokens that are not committed, and stays as it is; row 0 makes room for the child of row 2."""
    pager, batch, (a, b, c) = three_rows(implementation)
    b.append(5)
    places, sequences = batch.reorder([2, 2], [7, 8], rows=[0, 2])
    assert (places.tolist(), [each and each.id for each in sequences]) == ([2, 0], [None, 3])
    assert (rows(pager), a.state, b.tokens.tolist()) == (
        "3 1 2",
        "released",
        [2, 2, 2, 5],
    )
    assert (ids(c), ids(sequences[1])) == ([3], [3])


def test_who_is_released_knows_it(implementation):
    """It is no handle that was dropped live, and to release it is a no-op, whatever the reason."""
    pager, batch, held = three_rows(implementation)
    batch.reorder([0], [7], [0, 1, 2])
    held[1].release("no reason at all")
    assert pager.stats().noop_calls == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del held[1:]
        gc.collect()
    assert [str(each.message) for each in caught] == []
    pager.take_copies()
    assert (pager.stats().dropped_handles, pager.stats().running_sequences) == (0, 1)


def test_who_is_released_may_have_tokens_that_are_not_committed(implementation):
    pager, batch, (_a, b, _c) = three_rows(implementation)
    b.append(5)
    batch.reorder([0, 2], [7, 8])
    assert (rows(pager), b.state) == ("0 - 2", "released")


def test_children_take_the_lowest_empty_rows(implementation):
    """A hole from before, the row of one that is released, then the rows behind the last."""
    pager, batch, (a, _b, _c) = three_rows(implementation)
    d = admit_committed(pager, [4])
    batch.add(d)
    batch.remove(a)
    places, _ = batch.reorder([1, 1, 1, 1, 2], [0, 1, 2, 3, 4])
    assert rows(pager) == "4 1 2 5 6"
    assert places.tolist() == [1, 0, 3, 4, 2]
    assert (a.state, d.state) == ("running", "released")
    assert pager.check() == []


def test_a_full_batch_has_the_rows_of_those_that_it_releases(implementation):
    pager = implementation(16, 4)
    a, b = admit_committed(pager, [1]), admit_committed(pager, [2])
    batch = pager.batch(2, 4)
    batch.add(a)
    batch.add(b)
    for parents, given in (([0, 0, 1], None), ([1, 1], [1]), ([0] * 3, None)):
        with nothing_changes(pager), refuses(ValueError, "empty"):
            batch.reorder(parents, [5] * len(parents), given)
    assert batch.reorder([1, 1], [5, 6])[0].tolist() == [1, 0]
    assert (rows(pager), a.state) == ("2 1", "released")


def test_updates_after_a_reorder_bring_a_mirror_up_to_date(implementation):
    pager, batch, _held = three_rows(implementation)
    mirror = np.full((8, 8), -7)

    def update(step):
        for row, column, block in step.updates.tolist():
            mirror[row, column] = block
        for row, blocks in enumerate(step.block_tables.tolist()):
            if batch.num_rows > row and step.seq_lens[row]:
                used = -(-int(step.seq_lens[row]) // 4)
                assert mirror[row, :used].tolist() == blocks[:used]
        step.commit()

    update(batch.step(0))
    _, first = batch.reorder([1, 1, 2, 2], [7] * 4)
    update(batch.step())
    _, second = batch.reorder([3, 3, 0, 3], [8] * 4)
    update(batch.step())
    assert (rows(pager), len(first), len(second)) == ("3 5 6 4", 4, 4)
    assert pager.check() == []


def test_a_beam_search_leaks_nothing(implementation):
    pager = implementation(32, 4)
    handles = {0: admit_committed(pager, [1] * 7)}
    batch = in_batch(pager, handles[0])
    places = [0]
    for turn in range(9):
        width = min(4, turn + 1)
        parents = [places[turn * beam % len(places)] for beam in range(width)]
        found, sequences = batch.reorder(parents, range(turn, turn + width))
        places = found.tolist()
        handles.update((row, each) for row, each in zip(places, sequences, strict=True) if each is not None)
        assert (len(batch), len(set(places))) == (width, width)
        batch.step([int(row in places) for row in range(batch.num_rows)]).commit()
        assert pager.check() == []
    assert pager.stats().copies > 0
    batch.reorder([], [])
    assert_nothing_leaked(pager)


REFUSED = {
    "fewer tokens": (([0, 1], [7]), ValueError),
    "more tokens": (([0], [7, 8]), ValueError),
    "an empty row": (([0, 1], [7, 8], [0, 3]), ValueError),
    "a row out of range": (([0], [7], [8]), ValueError),
    "a row below 0": (([0], [7], [0, -1]), ValueError),
    "a row twice": (([0], [7], [0, 0]), ValueError),
    "a parent that takes no part": (([0, 1], [7, 8], [0, 2]), ValueError),
    "a parent below 0": (([-1], [7]), ValueError),
    "a parent that is an empty row": (([3], [7]), ValueError),
    "a parent with tokens that are not committed": (([0, 2, 2], [7] * 3), ValueError),
    "too many beams": (([0] * 9, [7] * 9), ValueError),
    "no token": (([0], [-1]), kvpager.TokenError),
    "a token beyond 2^31": (([0], [2**31]), kvpager.TokenError),
    "a parent beyond 2^31": (([2**31], [7]), kvpager.TokenError),
    "a row beyond 2^31": (([0], [7], [2**31]), kvpager.TokenError),
    "one number": ((0, [7]), kvpager.TokenTypeError),
    "text": (([0], "7"), kvpager.TokenTypeError),
    "a bool": (([0], [7], [False]), kvpager.TokenTypeError),
    "a float": (([0.0], [7]), kvpager.TokenTypeError),
    "no parents": ((None, [7]), kvpager.TokenTypeError),
    "no tokens": (([0], None), kvpager.TokenTypeError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_reorder_changes_nothing(implementation, what):
    pager, batch, held = three_rows(implementation)
    held[2].append(5)
    arguments, error = REFUSED[what]
    with nothing_changes(pager), refuses(ValueError if error is ValueError else error) as refused:
        batch.reorder(*arguments)
    assert type(refused.value) is error
    assert [each.state for each in held] == ["running"] * 3


def test_a_reorder_waits_for_the_steps_of_its_batch(implementation):
    """Whatever else is wrong; steps of another batch are no matter."""
    pager, batch, _held = three_rows(implementation)
    d = pager.admit([4])
    other = in_batch(pager, d)
    other.step()
    batch.reorder([0, 1, 2], [7] * 3)
    step = batch.step()
    for arguments in (([0, 1, 2], [7] * 3), ([], [], []), ([0], []), ([-1], [-1])):
        with nothing_changes(pager), refuses(kvpager.StepError, "open"):
            batch.reorder(*arguments)
    step.commit()
    assert batch.reorder([0, 1, 2], [7] * 3)[0].tolist() == [0, 1, 2]


def test_the_order_of_a_reorders_checks(implementation):
    """Types and ranges, arguments in order; open steps; lengths; tokens below 0; rows."""
    pager, batch, _held = three_rows(implementation)
    step = batch.step(0)
    for arguments, error, position in (
        (([2**31], ["x"], ["x"]), kvpager.TokenError, 0),
        (([0, "x"], [2**31], [2**31]), kvpager.TokenTypeError, 1),
        (([0], [1, 2, -2], ["x"]), kvpager.TokenError, 2),
        (([0], [1, 2], [0, 0, 0, "x"]), kvpager.TokenTypeError, 3),
        (([0], [1, -1], [5]), kvpager.StepError, None),
        (([0], [1, -1], [5]), ValueError, None),
        (([0, 9], [1, -1], [5]), kvpager.TokenError, 1),
    ):
        if error is ValueError:
            step.cancel()
        with nothing_changes(pager), refuses(error) as refused:
            batch.reorder(*arguments)
        assert (type(refused.value), getattr(refused.value, "position", None)) == (error, position)


def test_a_reorder_drains_what_was_dropped(implementation):
    pager, batch, held = three_rows(implementation)
    held.pop(1)
    gc.collect()
    assert rows(pager) == "0 1 2"
    with refuses(ValueError):
        batch.reorder([1], [7])
    assert rows(pager) == "0 - 2"
    assert pager.stats().dropped_handles == 1


def test_a_child_inherits_as_by_fork(implementation):
    """No pin, the parent's hits, and no step."""
    pager = implementation(16, 4)
    admit_committed(pager, [1] * 6).release()
    a = pager.admit([1] * 6, pin=True, namespace=b"")
    a.commit()
    batch = in_batch(pager, a)
    _, (_, child) = batch.reorder([0, 0], [7, 8])
    assert (a.pinned, child.pinned, child.num_cached, child.num_planned) == (True, False, 4, 6)
    assert line(pager, "sequence 2").endswith("path 0; table 0-1; publishes yes; pinned no")
