"""Which block comes next: the free stack, holders, writable blocks and copies (rules.md 1 to 5), to the id."""

from __future__ import annotations

import numpy as np
import pytest
from implementations import admit_committed, cache, each_implementation, free_ids, ids, line

pytestmark = each_implementation

PROMPT = list(range(10, 20))  # with blocks of 4: two full ones and half of the third


def test_the_lowest_id_is_on_top_at_construction(implementation):
    pager = implementation(6, 4)
    assert free_ids(pager) == "0-5"
    assert ids(pager.admit(PROMPT)) == [0, 1, 2]


def test_the_null_block_is_never_handed_out(implementation):
    pager = implementation(4, 4, null_block=True)
    assert ids(pager.admit(PROMPT)) == [1, 2, 3]
    assert pager.stats().reserved_blocks == 1
    assert pager.check() == []


def test_frees_push_the_deepest_first(implementation):
    pager = implementation(8, 4)
    first, second = pager.admit(PROMPT), pager.admit(PROMPT)
    second.release()
    first.release()
    assert free_ids(pager) == "0-7"
    third, fourth = pager.admit(PROMPT), pager.admit(PROMPT)
    third.release()
    fourth.release()
    assert free_ids(pager) == "3-5 0-2 6-7"


def test_free_blocks_go_before_victims(implementation):
    pager = implementation(5, 4)
    cache(pager, PROMPT)
    # Blocks 0 and 1 are cached, the tail 1 colder; 2 is free and on top.
    assert ids(pager.admit([1] * 20)) == [2, 3, 4, 1, 0]


def test_truncate_frees_and_regrows(implementation):
    pager = implementation(6, 4)
    sequence = pager.admit(list(range(20)))
    sequence.truncate(5)
    assert (ids(sequence), free_ids(pager)) == ([0, 1], "2-5")
    assert sequence.append(7) == 1 * 4 + 1
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4, 7]


def test_truncate_cuts_every_position(implementation):
    pager = implementation(8, 4)
    cache(pager, list(range(12)))
    sequence = pager.admit(list(range(20)))
    sequence.commit(18)
    assert (sequence.num_cached, sequence.num_committed, len(sequence)) == (12, 18, 20)
    sequence.truncate(10)
    assert (sequence.num_cached, sequence.num_committed, sequence.num_planned, len(sequence)) == (10, 10, 10, 10)


def test_truncate_leaves_what_it_cut_off_cached(implementation):
    pager = implementation(8, 4)
    sequence = admit_committed(pager, list(range(16)))
    sequence.truncate(4)
    assert line(pager, "queue lru") == "queue lru: 3 2 1"
    assert pager.match(list(range(16))).num_tokens == 12


def test_slots_are_block_times_size_plus_offset(implementation):
    pager = implementation(8, 4)
    cache(pager, [1] * 8)
    sequence = pager.admit(PROMPT)
    assert ids(sequence) == [2, 3, 4]
    slots = sequence.slots(0, 10)
    assert slots.dtype == np.int64
    assert slots.tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    assert sequence.slots(3, 6).tolist() == [11, 12, 13]
    assert sequence.extend([1, 2, 3]).tolist() == [18, 19, 20]
    assert sequence.append(4) == 21


def test_an_empty_range_or_extension_gives_an_empty_array(implementation):
    pager = implementation(8, 4)
    sequence = pager.admit(PROMPT)
    sequence.fork()[0].release()
    for empty in (sequence.slots(4, 4), sequence.extend([])):
        assert (empty.dtype, empty.shape) == (np.int64, (0,))
    assert len(sequence) == 10


def test_a_fork_shares_every_block_and_takes_none(implementation):
    pager = implementation(8, 4)
    parent = admit_committed(pager, PROMPT)
    one, two = parent.fork(2)
    assert ids(one) == ids(two) == ids(parent) == [0, 1, 2]
    assert (one.id, two.id) == (1, 2)
    assert (one.num_cached, one.num_committed, len(one)) == (0, 10, 10)
    assert pager.stats().active_blocks == 3
    assert pager.stats().admitted_sequences == 1


def test_the_first_divergent_write_copies_the_partial_block(implementation):
    pager = implementation(8, 4)
    parent = admit_committed(pager, PROMPT)
    (child,) = parent.fork()
    assert child.append(5) == 3 * 4 + 2
    assert parent.append(6) == 2 * 4 + 2, "the last holder keeps the original"
    assert pager.take_copies().tolist() == [[2, 3]]
    assert pager.take_copies().tolist() == []
    assert pager.stats().copies == 1


def test_nothing_is_copied_from_a_block_without_committed_tokens(implementation):
    pager = implementation(8, 4)
    parent = pager.admit(PROMPT)
    parent.commit(8)
    (child,) = parent.fork()
    assert child.append(5) == 3 * 4 + 2
    assert line(pager, "copies") == "copies: -"


def test_copy_targets_come_before_growth(implementation):
    pager = implementation(8, 4)
    parent = admit_committed(pager, PROMPT)
    (child,) = parent.fork()
    assert child.extend([1, 2, 3, 4]).tolist() == [14, 15, 16, 17]
    assert ids(child) == [0, 1, 3, 4]


def test_slots_replace_every_shared_block_of_the_range(implementation):
    pager = implementation(8, 4)
    parent = pager.admit(PROMPT)
    parent.commit(2)
    (child,) = parent.fork()
    assert child.slots(3, 9).tolist() == [15, 16, 17, 18, 19, 20]
    assert ids(child) == [3, 4, 5]
    assert line(pager, "copies") == "copies: 0->3", "only block 0 holds committed tokens"
    assert pager.check() == []


def test_a_copy_from_a_pending_target_starts_at_its_source(implementation):
    pager = implementation(8, 4)
    parent = admit_committed(pager, PROMPT)
    (child,) = parent.fork()
    child.append(5)
    (grandchild,) = child.fork()
    assert grandchild.append(6) == 4 * 4 + 3
    # The child's own token at 10 is not committed yet, so the grandchild has to write it again.
    assert line(pager, "copies") == "copies: 2->3 2->4"
    assert pager.check() == []


def test_a_queued_copy_holds_its_source(implementation):
    pager = implementation(8, 4)
    parent = admit_committed(pager, PROMPT)
    (child,) = parent.fork()
    child.append(5)
    parent.release()
    assert free_ids(pager) == "4-7", "block 2 waits for its copy"
    pager.take_copies()
    assert free_ids(pager) == "2 4-7"


def test_freeing_a_target_withdraws_its_copy(implementation):
    pager = implementation(8, 4)
    parent = admit_committed(pager, PROMPT)
    (child,) = parent.fork()
    child.append(5)
    parent.release()
    child.release()
    # Block 3 is pushed first, then its source 2, then the cached path joins the queue.
    assert free_ids(pager) == "2-7"
    assert line(pager, "copies") == "copies: -"
    assert line(pager, "queue lru") == "queue lru: 1 0"
    assert pager.take_copies().shape == (0, 2)
    assert pager.stats().copies == 0


def test_evicting_a_target_withdraws_its_copy(implementation):
    pager = implementation(5, 4)
    parent = admit_committed(pager, [1, 2, 3])
    (child,) = parent.fork()
    child.append(4)
    child.commit()
    child.release()
    parent.release()
    assert line(pager, "copies") == "copies: 0->1"
    assert line(pager, "queue lru") == "queue lru: 1"
    assert free_ids(pager) == "2-4", "block 0 is held by the queued copy"
    # Four blocks are needed; the fourth is the victim 1, and only then block 0 comes free.
    assert ids(pager.admit([9] * 16)) == [2, 3, 4, 1]
    assert free_ids(pager) == "0"
    assert line(pager, "copies") == "copies: -"
    assert pager.check() == []


def test_truncate_into_an_indexed_block_leaves_a_shared_partial(implementation):
    pager = implementation(8, 4)
    sequence = admit_committed(pager, list(range(8)))
    sequence.truncate(6)
    assert ids(sequence) == [0, 1]
    assert line(pager, "sequence 0").split("; ")[6:8] == ["path 0", "table 0-1"]
    assert sequence.append(99) == 2 * 4 + 2
    assert pager.take_copies().tolist() == [[1, 2]]
    assert pager.match(list(range(9))).num_tokens == 8, "the indexed block kept its content"
    assert pager.check() == []


def test_whoever_holds_an_indexed_block_holds_the_blocks_above_it(implementation):
    """A child holds blocks in its table only; when the parent leaves, no block of that prefix may count as cached."""
    pager = implementation(8, 4)
    parent = pager.admit(list(range(8)))
    (child,) = parent.fork()
    parent.commit()
    # Block 0 is indexed now, so the child gets another one; block 1 stays in its table, and 0 lies above it.
    assert child.slots(0, 1).tolist() == [8]
    assert ids(child) == [2, 1]
    parent.release()
    stats = pager.stats()
    assert (stats.active_blocks, stats.cached_blocks) == (3, 0)
    assert pager.check() == []
    child.release()
    assert line(pager, "queue lru") == "queue lru: 1 0"
    assert free_ids(pager) == "2-7"


@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
def test_any_block_size_is_allowed(implementation, block_size):
    pager = implementation(8, block_size)
    sequence = admit_committed(pager, list(range(2 * block_size + 1)))
    assert ids(sequence) == [0, 1, 2]
    assert pager.match(list(range(2 * block_size + 1))).num_blocks == 2
