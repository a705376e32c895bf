"""The reference's checker is tested itself: one broken structure for each promise, and it names the promise."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache

import kvpager.reference

pytestmark = pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning")


@pytest.fixture
def pager():
    """Free, cached, active and reserved blocks, a preempted sequence, a fork and a queued copy."""
    pager = kvpager.reference.Pager(24, 4, null_block=True)
    cache(pager, [1] * 12)
    running = admit_committed(pager, [2] * 10)
    (child,) = running.fork()
    child.append(3)
    waiting = pager.admit([4] * 5)
    waiting.preempt()
    assert pager.check() == []
    yield pager
    del running, child, waiting


def reached(pager, promise):
    """The violations of one promise, of which there must be at least one."""
    faults = pager.check()
    assert [fault for fault in faults if fault.startswith(f"{promise}: ")], faults
    return faults


def a_cached_node(pager):
    return next(node for node in pager._index.nodes() if not pager._pool.holds[node.block])


def a_record(pager):
    return pager._records[1]


def test_i1_a_lost_block(pager):
    pager._pool.free.pop()
    assert len(reached(pager, "I1")) == 1


def test_i2_a_block_on_the_free_stack_twice(pager):
    pager._pool.free[0] = pager._pool.free[1]
    reached(pager, "I2")


def test_i2_a_free_block_that_is_held(pager):
    pager._pool.free[0] = a_record(pager).table[0]
    reached(pager, "I2")


def test_i2_a_free_block_that_is_indexed(pager):
    pager._pool.free[0] = a_cached_node(pager).block
    reached(pager, "I2")


def test_i2_a_free_block_that_is_reserved(pager):
    pager._pool.free[0] = 0
    reached(pager, "I2")


def test_i2_a_count_that_is_too_high(pager):
    pager._pool.holds[a_record(pager).table[-1]] += 1
    assert len(reached(pager, "I2")) == 1


def test_i2_a_copy_that_holds_nothing(pager):
    pager._pool.copies[a_record(pager).table[0]] = a_record(pager).table[1]
    reached(pager, "I2")


def test_i2_a_block_twice_in_one_table(pager):
    record = a_record(pager)
    record.table[2] = record.table[0]
    reached(pager, "I2")


def test_i3_a_block_under_other_tokens(pager):
    a_cached_node(pager).tokens = (9, 9, 9, 9)
    reached(pager, "I3")


def test_i3_a_path_of_other_tokens(pager):
    a_record(pager).tokens[0] = 99
    reached(pager, "I3")


def test_i4_more_indexed_than_committed(pager):
    a_record(pager).num_committed = 7
    reached(pager, "I4")


def test_i4_a_forgotten_block_that_can_be_reached(pager):
    a_cached_node(pager).indexed = False
    reached(pager, "I4")


def test_i5_a_partial_block_in_the_index(pager):
    node = a_cached_node(pager)
    del node.parent.children[node.tokens]
    node.tokens = node.tokens[:3]
    node.parent.children[node.tokens] = node
    reached(pager, "I5")


def test_i6_a_block_without_its_parent(pager):
    top = a_cached_node(pager)
    pager._index.detach(top)
    reached(pager, "I6")


def test_i6_a_parent_that_is_evicted_first(pager):
    (queue,) = pager._policy.queues().values()
    queue.move_to_end(next(iter(queue)))
    reached(pager, "I6")


def test_i6_a_broken_path(pager):
    record = a_record(pager)
    record.path.reverse()
    reached(pager, "I6")


def test_i8_a_cached_block_that_no_queue_has(pager):
    (queue,) = pager._policy.queues().values()
    queue.popitem(last=True)
    reached(pager, "I8")


def test_i10_positions_out_of_order(pager):
    a_record(pager).num_cached = 11
    reached(pager, "I10")


def test_i10_a_table_of_another_length(pager):
    a_record(pager).tokens.extend([5] * 9)
    reached(pager, "I10")


@pytest.fixture
def stepped(pager):
    """A batch with an empty row and two open steps, a copy and a placeholder in them, and what was queued."""
    held = [admit_committed(pager, [6] * 2), pager.admit([7] * 2), admit_committed(pager, [8] * 3)]
    held += held[0].fork()
    batch = pager.batch(4, 4)
    for sequence in held[:3]:
        batch.add(sequence)
    batch.remove(held[1])
    steps = [batch.step([1, 0, 1], [1, 2]), batch.step([1, 0, 0])]
    assert pager.check() == []
    yield pager
    del held, batch, steps


def the_rows(pager):
    return pager._batches[0]


def test_i2_a_copy_of_a_step_that_holds_nothing(stepped):
    copy = the_rows(stepped).steps[0].copies()[-1]
    stepped._pool.holds[copy.source] -= 1
    reached(stepped, "I2")


def test_i2_a_copy_of_a_step_that_counts_for_a_writer(stepped):
    copy = the_rows(stepped).steps[0].copies()[-1]
    stepped._pool.reads[copy.source] -= 1
    assert len(reached(stepped, "I2")) == 1


def test_i2_a_target_that_is_withdrawn_and_is_not(stepped):
    stepped._pool.given.clear()
    assert len(reached(stepped, "I2")) == 1


def test_i10_a_placeholder_that_no_step_finds(stepped):
    the_rows(stepped).records[2].tokens.append(-1)
    the_rows(stepped).records[2].tokens.append(-1)
    assert "[5]" in reached(stepped, "I10")[-1]


def test_i10_a_row_of_another_sequence(stepped):
    rows = the_rows(stepped)
    rows.records[1] = a_record(stepped)
    assert len(reached(stepped, "I10")) == 2


def test_i10_a_sequence_that_believes_to_be_in_a_row(stepped):
    a_record(stepped).home = the_rows(stepped)
    assert len(reached(stepped, "I10")) == 1


def test_i10_an_empty_last_row(stepped):
    the_rows(stepped).records.append(None)
    assert len(reached(stepped, "I10")) == 1


def test_i10_an_open_row_that_its_sequence_forgot(stepped):
    the_rows(stepped).records[2].open_rows.clear()
    reached(stepped, "I10")


def test_i10_open_rows_with_a_gap(stepped):
    the_rows(stepped).records[0].open_rows[1].start += 1
    assert len(reached(stepped, "I10")) == 1


def test_all_violations_are_reported(pager):
    pager._pool.free.pop()
    a_record(pager).num_cached = 11
    a_cached_node(pager).tokens = (9, 9, 9, 9)
    assert {fault.split(":")[0] for fault in pager.check()} >= {"I1", "I3", "I10"}
