"""What a step plans, takes and shows (rules.md 14.2 and 14.3), to the id."""

from __future__ import annotations

import numpy as np
import pytest
from implementations import (
    admit_committed,
    cache,
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


def test_a_prefill_and_a_decode_in_every_array(implementation):
    pager = implementation(16, 4)
    a, b, c = pager.admit(PROMPT), admit_committed(pager, [1, 2, 3]), pager.admit([5])
    batch = in_batch(pager, a, b, c)
    batch.remove(b)
    batch.remove(c)
    batch.add(b)
    c.release()
    b.extend([4, 5])
    assert (ids(a), ids(b)) == ([0, 1], [2, 3])
    step = batch.step([5, 2])
    assert (step.id, step.buffer, step.state, step.num_rows, step.num_tokens) == (0, 0, "open", 2, 7)
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert step.slot_mapping.tolist() == [0, 1, 2, 3, 4, 11, 12]
    assert step.token_ids.tolist() == [10, 11, 12, 13, 14, 4, 5]
    assert step.query_start_loc.tolist() == [0, 5, 7]
    assert step.seq_lens.tolist() == [5, 5]
    assert step.block_tables.tolist() == [[0, 1, *[0] * 6], [2, 3, *[0] * 6]]
    assert step.updates.tolist() == [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]
    assert step.copies.tolist() == []
    shapes = {"positions": (7,), "block_tables": (2, 8), "copies": (0, 2), "updates": (4, 3)}
    for name, shape in shapes.items():
        assert (getattr(step, name).shape, getattr(step, name).dtype) == (shape, np.int32)
    for name in ("seq_lens", "query_start_loc", "token_ids"):
        assert getattr(step, name).dtype == np.int32
    assert step.slot_mapping.dtype == np.int64
    assert (a.num_planned, b.num_planned, a.num_committed, b.num_committed) == (5, 5, 0, 3)


def test_empty_rows_are_padded_and_left_out_rows_are_shown(implementation):
    pager = implementation(16, 4)
    a, b, c = (admit_committed(pager, [each] * 5) for each in range(3))
    batch = pager.batch(4, 3, pad_block=-7, pad_slot=-9, pad_seq_len=1)
    for each in (a, b, c):
        batch.add(each)
    batch.remove(b)
    step = batch.step([0, 0, 1], [8])
    assert step.block_tables.tolist() == [[0, 1, -7], [-7, -7, -7], [4, 5, -7]]
    assert step.seq_lens.tolist() == [5, 1, 6]
    assert step.query_start_loc.tolist() == [0, 0, 0, 1]
    assert plan(step) == ([5], [21])


def test_an_integer_counts_for_all_rows_in_use(implementation):
    pager = implementation(16, 4)
    a, b, c = (pager.admit([each] * 3) for each in range(3))
    batch = in_batch(pager, a, b, c)
    batch.remove(b)
    assert batch.step(np.int64(2)).query_start_loc.tolist() == [0, 2, 2, 4]
    assert batch.step(1).positions.tolist() == [2, 2]
    assert in_batch(pager).step(1).num_tokens == 0


def test_the_next_step_begins_where_the_last_one_ends(implementation):
    """Two chunks of a prefill, both open (W5)."""
    pager = implementation(16, 4)
    a = pager.admit(PROMPT)
    batch = in_batch(pager, a)
    first, second = batch.step(3), batch.step(3)
    assert (plan(first), plan(second)) == (([0, 1, 2], [0, 1, 2]), ([3, 4, 5], [3, 4, 5]))
    assert (first.seq_lens.tolist(), second.seq_lens.tolist()) == ([3], [6])
    assert (first.buffer, second.buffer, [each.id for each in batch.open_steps]) == (0, 1, [0, 1])
    assert line(pager, "batch 0") == "batch 0: rows 0; open 0 1; next step 2"


def test_open_positions_are_nobody_elses(implementation):
    pager = implementation(16, 4)
    a = pager.admit(PROMPT)
    batch = in_batch(pager, a)
    step = batch.step(4)
    with nothing_changes(pager), refuses(ValueError, "num_planned"):
        a.slots(3, 6)
    with nothing_changes(pager), refuses(kvpager.StepError):
        a.commit(2)
    assert a.slots(4, 6).tolist() == [4, 5]
    step.commit()
    a.commit()
    assert a.num_committed == 6


def test_a_step_takes_missing_blocks_by_rows(implementation):
    pager = implementation(16, 4)
    a, b = admit_committed(pager, [1] * 4), admit_committed(pager, [2] * 3)
    batch = in_batch(pager, a, b)
    assert batch.blocks_needed([5, 6], list(range(11))) == 4
    assert batch.blocks_needed([0, 1], [1]) == 0
    step = batch.step([5, 6], list(range(11)))
    assert (ids(a), ids(b)) == ([0, 2, 3], [1, 4, 5])
    assert plan(step)[1] == [8, 9, 10, 11, 12, 7, 16, 17, 18, 19, 20]
    assert (len(a), len(b)) == (9, 9)


def test_the_last_token_has_no_block_until_it_is_planned(implementation):
    """L7: the need of a batch is counted in blocks, and a token that a commit adds is none."""
    pager = implementation(2, 4)
    a, b = pager.admit([1] * 4), pager.admit([2] * 4)
    batch = in_batch(pager, a, b)
    batch.step(4).commit([7, 8])
    assert (len(a), ids(a), pager.num_free_blocks) == (5, [0], 0)
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        batch.step()
    assert refused.value.args == (2, 0, 0, 2, (0, 1), 0, "device")
    assert batch.try_step() is None
    assert pager.stats().refused_calls == 2
    with nothing_changes(pager), refuses(ValueError, "block"):
        a.commit()
    b.release()
    assert ids(a) == [0]
    assert plan(batch.step([1])) == ([4], [4])
    assert ids(a) == [0, 1]


def test_append_and_slots_take_the_block_of_the_last_token(implementation):
    pager = implementation(8, 4)
    a, b = pager.admit([1] * 4), pager.admit([2] * 4)
    batch = in_batch(pager, a, b)
    batch.step(4).commit([7, 8])
    assert a.extend([]).tolist() == a.slots(5, 5).tolist() == []
    assert (ids(a), ids(b)) == ([0], [1])
    assert a.append(9) == 2 * 4 + 1
    assert b.slots(4, 5).tolist() == [3 * 4]
    assert (a.slots(4, 6).tolist(), ids(a), ids(b)) == ([8, 9], [0, 2], [1, 3])


def test_the_rows_of_out_of_blocks_are_those_that_found_no_room(implementation):
    """Skipped rows take nothing, and without them the step fits."""
    pager = implementation(6, 4)
    a, b, c = (pager.admit([each] * 4) for each in range(3))
    batch = in_batch(pager, a, b, c)
    batch.step(4).commit()
    counts = [8, 13, 1]
    tokens = list(range(sum(counts)))
    assert batch.blocks_needed(counts, tokens) == 2 + 4 + 1
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        batch.step(counts, tokens)
    assert refused.value.args == (7, 3, 0, 6, (1,), 0, "device")
    step = batch.step([8, 0, 1], tokens[:8] + tokens[-1:])
    assert (ids(a), ids(b), ids(c)) == ([0, 3, 4], [1], [2, 5])
    step.cancel()
    assert batch.reserve([8, 0, 1]) is None
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks):
        batch.reserve(5)
    assert batch.try_reserve(5) is False


def test_a_skipped_row_gives_up_no_share(implementation):
    """Both hold a block: the first to write copies, unless it is left out; then it is the second who copies."""
    pager = implementation(4, 4)
    a = admit_committed(pager, [1] * 6)
    (child,) = a.fork()
    other = pager.admit([5])
    batch = in_batch(pager, a, child)
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        batch.step([7, 1], [0] * 8)
    assert refused.value.args == (3, 1, 0, 4, (0,), 0, "device")
    assert batch.step([0, 1], [9]).copies.tolist() == [[1, 3]]
    other.release()


@pytest.mark.parametrize(("writers", "copies"), [(1, [[0, 1]]), (2, [[0, 1], [0, 2]]), (3, [[0, 1], [0, 2]])])
def test_k_of_h_holders_write(implementation, writers, copies):
    """k copies if k < h, else k - 1, and the last row keeps the original."""
    pager = implementation(8, 4)
    a = admit_committed(pager, [1, 2])
    children = a.fork(2)
    batch = in_batch(pager, a, *children)
    counts = [1] * writers + [0] * (3 - writers)
    assert batch.blocks_needed(counts, [7] * writers) == len(copies)
    step = batch.step(counts, [7] * writers)
    assert step.copies.tolist() == copies
    assert [table[0] for table in step.block_tables.tolist()] == [1, 2 if writers > 1 else 0, 0]
    assert pager.check() == []


def test_a_position_that_nothing_is_planned_below_is_not_copied(implementation):
    pager = implementation(8, 4)
    a = pager.admit(PROMPT)
    (child,) = a.fork()
    batch = in_batch(pager, a, child)
    step = batch.step(6)
    assert step.copies.tolist() == []
    assert (ids(a), ids(child)) == ([2, 3], [0, 1])


def test_what_an_open_step_writes_is_copied(implementation):
    """The fork comes between plan and commit: the next step of the parent must not write where the child reads."""
    pager = implementation(8, 4)
    a = pager.admit([1, 2, 3])
    batch = in_batch(pager, a)
    batch.step(2)
    (child,) = a.fork()
    step = batch.step(1)
    assert (ids(a), ids(child), step.copies.tolist()) == ([1], [0], [[0, 1]])
    assert plan(step) == ([2], [6])


def test_copies_of_the_queue_come_first_and_are_taken_over(implementation):
    pager = implementation(16, 4)
    a = admit_committed(pager, [1, 2])
    one, two = a.fork(2)
    one.append(3)
    assert line(pager, "copies") == "copies: 0->1"
    batch = in_batch(pager, a, two)
    step = batch.step(1, [7, 8])
    assert step.copies.tolist() == [[0, 1], [0, 2]]
    assert line(pager, "copies") == "copies: -"
    assert pager.take_copies().tolist() == []
    assert pager.stats().copies == 0
    step.commit()
    assert pager.stats().copies == 2


def test_a_step_holds_the_sources_of_its_copies(implementation):
    """The source of a copy is not handed out before the step is committed, nor does that hold make it unwritable."""
    pager = implementation(3, 4)
    a = admit_committed(pager, [1, 2])
    (child,) = a.fork()
    batch = in_batch(pager, a, child)
    step = batch.step([1, 0], [7])
    assert step.copies.tolist() == [[0, 1]]
    assert child.append(5) == 2, "the child alone maps the source now"
    child.release()
    assert (free_ids(pager), pager.stats().active_blocks) == ("2", 2)
    step.commit()
    assert free_ids(pager) == "0 2"


def test_a_copy_from_a_copy_that_waits_begins_at_its_source(implementation):
    pager = implementation(8, 4)
    a = admit_committed(pager, [1, 2])
    (b,) = a.fork()
    b.append(3)
    (c,) = b.fork()
    batch = in_batch(pager, b, c)
    step = batch.step([0, 1])
    assert step.copies.tolist() == [[0, 1], [0, 2]], "order-free: no block is both source and target"


def test_a_truncated_indexed_block_is_copied(implementation):
    pager = implementation(8, 4)
    a = admit_committed(pager, [1] * 8)
    a.truncate(6)
    step = in_batch(pager, a).step(1, [9])
    assert (step.copies.tolist(), plan(step)) == ([[1, 2]], ([6], [10]))


def test_step_evicts_the_exact_shortfall(implementation):
    pager = implementation(4, 4)
    cache(pager, [9] * 13)
    a = pager.admit([1] * 4)
    batch = in_batch(pager, a)
    batch.step(4).commit([2])
    assert batch.step(1).block_tables[0, :2].tolist() == [3, 2]
    assert (pager.stats().evicted_blocks, pager.match([9] * 9).num_tokens) == (1, 8)


# Placeholders and drafts.


def test_a_placeholder_follows_an_open_step(implementation):
    pager = implementation(8, 4)
    a = pager.admit([1, 2, 3])
    batch = in_batch(pager, a, buffers=3)
    with nothing_changes(pager), refuses(ValueError):
        batch.step(4)
    batch.step(3)
    for wrong in ((2,), (1, [-1, 5]), (2, [-1, -1]), (2, [5, -1])):
        with nothing_changes(pager), refuses(ValueError):
            batch.step(*wrong)
    step = batch.step(1)
    assert (len(a), a.tokens.tolist(), a.num_planned) == (4, [1, 2, 3, -1], 4)
    assert (plan(step), step.token_ids.tolist()) == (([3], [3]), [-1])
    assert batch.step(3, [-1, 8, 9]).token_ids.tolist() == [-1, 8, 9]
    assert a.tokens.tolist() == [1, 2, 3, -1, -1, 8, 9]


def test_no_placeholder_behind_a_token_that_is_known(implementation):
    pager = implementation(8, 4)
    a = pager.admit([1, 2, 3])
    batch = in_batch(pager, a)
    batch.step(2)
    with nothing_changes(pager), refuses(ValueError):
        batch.step(2)
    with nothing_changes(pager), refuses(ValueError):
        batch.step(2, [-1])
    assert batch.step(2, [7]).token_ids.tolist() == [3, 7]


def test_a_commit_fills_the_placeholder(implementation):
    pager = implementation(8, 4)
    a, b = pager.admit([1, 2, 3]), pager.admit([5, 6])
    batch = in_batch(pager, a, b)
    first = batch.step([3, 2])
    second = batch.step()
    assert second.token_ids.tolist() == [-1, -1]
    with nothing_changes(pager), refuses(ValueError, "row 0"):
        first.commit()
    with nothing_changes(pager), refuses(ValueError, "row 1"):
        first.commit([7, -1])
    assert first.commit([7, 8]).tolist() == [True, True]
    assert second.token_ids.tolist() == [7, 8]
    assert (a.tokens.tolist(), a.num_committed, a.num_planned) == ([1, 2, 3, 7], 3, 4)
    third = batch.step()
    assert second.commit([9, 10]).tolist() == [True, True]
    assert pager.match([1, 2, 3, 7, 0]).num_tokens == 4
    assert third.commit([11, 12]).tolist() == [True, True]
    assert a.tokens.tolist() == [1, 2, 3, 7, 9, 11]


def test_a_fork_and_a_preempted_sequence_have_no_placeholder(implementation):
    pager = implementation(8, 4)
    a = pager.admit([1, 2, 3, 4])
    batch = in_batch(pager, a)
    batch.step(4)
    batch.step(1)
    (child,) = a.fork()
    assert (child.tokens.tolist(), ids(a), ids(child)) == ([1, 2, 3, 4], [0, 1], [0])
    assert (child.num_planned, child.num_committed) == (0, 0)
    a.preempt()
    assert (a.tokens.tolist(), len(a), a.num_planned) == ([1, 2, 3, 4], 4, 0)
    assert pager.check() == []


# Buffers, tables and updates.


def test_a_cancelled_id_is_used_again(implementation):
    pager = implementation(8, 4)
    a = pager.admit(PROMPT)
    batch = in_batch(pager, a, buffers=3)
    buffers = []
    for _ in range(5):
        step = batch.step(1)
        buffers.append((step.id, step.buffer))
        step.commit()
    assert buffers == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]
    batch.step(1).cancel()
    assert batch.step(1).id == 5


def test_all_buffers_open_is_an_error_of_its_own(implementation):
    pager = implementation(8, 4)
    a = pager.admit(PROMPT)
    batch = in_batch(pager, a, buffers=1)
    step = batch.step(1)
    for call in (batch.step, batch.try_step, batch.blocks_needed):
        with nothing_changes(pager), refuses(kvpager.StepError):
            call("whatever")
    step.commit()
    assert batch.blocks_needed(1) == 0
    assert a.num_committed == 1


def test_the_arrays_of_a_step_end_with_it(implementation):
    pager = implementation(8, 4)
    a = pager.admit(PROMPT)
    batch = in_batch(pager, a)
    names = (
        "block_tables",
        "seq_lens",
        "slot_mapping",
        "positions",
        "query_start_loc",
        "copies",
        "updates",
        "token_ids",
    )
    for end in ("commit", "cancel"):
        step = batch.step(1)
        getattr(step, end)()
        for name in names:
            with refuses(kvpager.StepError):
                getattr(step, name)
        assert (step.id, step.num_rows, step.num_tokens) == (0 if end == "commit" else 1, 1, 1)
        assert step.state == {"commit": "committed", "cancel": "cancelled"}[end]


def test_the_arrays_of_an_open_step_stay_as_they_were(implementation):
    pager = implementation(16, 4)
    a, b = pager.admit(PROMPT), pager.admit([1, 2])
    batch = in_batch(pager, a, b)
    step = batch.step(2)
    names = ("block_tables", "seq_lens", "slot_mapping", "positions", "query_start_loc", "copies", "updates")
    before = {name: getattr(step, name).tolist() for name in names}
    batch.step([4, 0])
    b.release()
    a.truncate(1)
    batch.remove(a)
    assert {name: getattr(step, name).tolist() for name in names} == before


def test_updates_bring_a_mirror_up_to_date(implementation):
    pager = implementation(32, 4)
    held = [admit_committed(pager, [each] * 5) for each in range(3)]
    batch = in_batch(pager, *held)
    mirror = {}

    def step(*arguments):
        found = batch.step(*arguments)
        mirror.update({(row, column): block for row, column, block in found.updates.tolist()})
        for each in held:
            table = ids(each)
            row = batch.row_of(each)
            assert row is None or [mirror[row, column] for column in range(len(table))] == table
        return found

    step([1, 9, 0], list(range(10))).commit([7, 7, 7])
    held += batch.fork([1], 1)
    step(1, [5]).cancel()
    step([0, 1, 0, 1]).commit()
    batch.remove(held[0])
    held.pop(0).release()
    batch.condense()
    step([0, 1, 0], [3]).commit([1, 1, 1])
    assert step(0).updates.tolist() == []


def test_a_table_beyond_max_blocks_is_shown_in_part(implementation):
    pager = implementation(8, 4)
    a = pager.admit([1] * 8)
    batch = pager.batch(1, 2)
    batch.add(a)
    a.extend([2] * 4)
    step = batch.step(8)
    assert step.block_tables.tolist() == [[0, 1]]
    with nothing_changes(pager), refuses(ValueError, "max_blocks"):
        batch.step(1)


# Reserve.


def test_reserve_gives_blocks_and_no_positions(implementation):
    pager = implementation(16, 4)
    a, b = admit_committed(pager, [1, 2]), admit_committed(pager, [3] * 4)
    (child,) = a.fork()
    batch = in_batch(pager, a, b, child)
    batch.reserve([5, 4, 1])
    assert (ids(a), ids(b), ids(child)) == ([2, 3], [1, 4], [0])
    assert line(pager, "copies") == "copies: 0->2"
    assert (a.num_planned, len(a), len(b)) == (2, 2, 4)
    assert batch.blocks_needed([5, 4, 1], list(range(10))) == 0
    step = batch.step([1, 1, 1], [7, 8, 9])
    assert (step.copies.tolist(), plan(step)) == ([[0, 2]], ([2, 4, 2], [10, 16, 2]))
    assert step.block_tables[:, :2].tolist() == [[2, 3], [1, 4], [0, 0]]
    a.truncate(3)
    assert ids(a) == [2]
    assert pager.check() == []


def test_a_reservation_may_be_larger_than_a_step(implementation):
    """Where it finds all blocks in the tables, too."""
    pager = implementation(16, 4)
    a, b = pager.admit([1] * 5), pager.admit([2] * 5)
    batch = in_batch(pager, a, b, max_tokens=3)
    with nothing_changes(pager), refuses(ValueError, "max_tokens"):
        batch.step(2)
    batch.reserve(2)
    batch.reserve(2)
    assert (ids(a), ids(b), a.num_planned) == ([0, 1], [2, 3], 0)


def test_reserve_needs_no_buffer(implementation):
    pager = implementation(8, 4)
    a = pager.admit(PROMPT)
    batch = in_batch(pager, a, buffers=1)
    step = batch.step(6)
    assert batch.try_reserve(3) is True
    assert pager.num_free_blocks == 5
    step.commit()
    with nothing_changes(pager), refuses(ValueError, "max_blocks"):
        batch.reserve(27)
    assert ids(a) == [0, 1, 2]
