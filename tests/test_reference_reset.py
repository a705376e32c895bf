"""reset and forget (rules.md 10)."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache, each_implementation, free_ids, ids, line, nothing_changes, refuses

pytestmark = each_implementation


class TestReset:
    def test_cached_blocks_go_below_the_free_ones_in_eviction_order(self, implementation):
        pager = implementation(8, 4)
        cache(pager, [1] * 8)
        cache(pager, [2] * 4)
        assert (free_ids(pager), line(pager, "queue lru")) == ("3-7", "queue lru: 1 0 2")
        pager.reset()
        assert free_ids(pager) == "3-7 1 0 2"
        assert (pager.num_free_blocks, pager.num_evictable_blocks) == (8, 0)
        assert pager.match([1] * 9).num_tokens == 0
        assert pager.dump().count("\n") == 1
        assert pager.check() == []

    def test_a_second_reset_puts_its_blocks_below_those_of_the_first(self, implementation):
        pager = implementation(8, 4)
        cache(pager, [1] * 8)
        pager.reset()
        cache(pager, [3] * 8)
        assert free_ids(pager) == "4-7 1 0"
        pager.reset()
        assert free_ids(pager) == "4-7 1 0 3 2"

    def test_slru_gives_probation_before_protected(self, implementation):
        pager = implementation(8, 4, policy="slru")
        cache(pager, [1] * 4)
        pager.admit([1] * 5).release()
        cache(pager, [2] * 4)
        pager.reset()
        assert free_ids(pager) == "2-7 1 0"
        cache(pager, [1] * 4)
        assert line(pager, "queue protected") == "queue protected: -", "the hits went with the blocks"

    def test_no_eviction_is_counted_and_statistics_stay(self, implementation):
        pager = implementation(8, 4)
        cache(pager, [1] * 8)
        before = pager.stats()
        pager.reset()
        after = pager.stats()
        assert (after.evicted_blocks, after.clock_ticks) == (0, 1)
        assert (after.queried_tokens, after.admitted_sequences) == (before.queried_tokens, before.admitted_sequences)

    def test_running_sequences_go_on_and_publish_nothing_more(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, [1] * 9)
        pager.reset()
        assert ids(sequence) == [0, 1, 2]
        assert pager.stats().active_blocks == 3
        sequence.extend([1] * 7)
        (child,) = sequence.fork()
        for each in (sequence, child):
            each.commit()
        assert pager.match([1] * 16).num_tokens == 0
        assert "publishes no" in line(pager, "sequence 1")
        child.release()
        sequence.release()
        assert free_ids(pager) == "0-7"
        assert pager.check() == []

    def test_resume_publishes_again(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, [1] * 9)
        pager.reset()
        sequence.preempt()
        assert sequence.resume().num_cached == 0
        sequence.commit()
        assert pager.match([1] * 9).num_tokens == 8

    def test_a_new_sequence_starts_from_an_empty_index(self, implementation):
        pager = implementation(8, 4)
        old = admit_committed(pager, [1] * 4)
        pager.reset()
        new = admit_committed(pager, [1] * 4)
        assert pager.match([1] * 5).num_tokens == 4
        old.release()
        assert pager.match([1] * 5).num_tokens == 4
        assert "block 1:" in pager.dump()
        new.release()
        assert pager.check() == []

    def test_a_block_that_was_indexed_stays_unwritable(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, [1] * 8)
        pager.reset()
        sequence.truncate(6)
        assert sequence.append(2) == 2 * 4 + 2
        assert pager.take_copies().tolist() == [[1, 2]]

    def test_a_new_identity_is_kept(self, implementation):
        pager = implementation(8, 4, identity=b"one")
        pager.reset()
        assert pager.identity == b"one"
        pager.reset(b"two")
        assert pager.identity == b"two"

    def test_a_copy_into_a_freed_block_is_withdrawn_when_that_is_handed_out(self, implementation):
        """Finding the copies into freed blocks would cost as much as there are copies; rules.md 5.3 puts it off."""
        pager = implementation(8, 4)
        parent = admit_committed(pager, [1, 2, 3])
        (child,) = parent.fork()
        child.append(4)
        child.commit()
        child.release()
        parent.release()
        pager.reset()
        assert line(pager, "copies") == "copies: 0->1"
        assert free_ids(pager) == "2-7 1", "the target went below all; the copy still holds its source 0"
        assert pager.stats().active_blocks == 1
        sequence = pager.admit([9] * 28)
        assert line(pager, "copies") == "copies: -"
        assert (ids(sequence), free_ids(pager)) == ([2, 3, 4, 5, 6, 7, 1], "0")
        assert pager.check() == []


class TestForget:
    def tree(self, pager):
        """1 - (2 - 4, 3), in blocks 0 - (1 - 2, 3)."""
        cache(pager, [1] * 4 + [2] * 4 + [4] * 4)
        cache(pager, [1] * 4 + [3] * 4)
        assert free_ids(pager) == "4-11"

    def test_children_go_before_their_parent_and_siblings_by_creation(self, implementation):
        pager = implementation(12, 4)
        self.tree(pager)
        assert pager.forget([1] * 4) == 4
        assert free_ids(pager) == "0 3 1-2 4-11", "pushed 2, 1, 3, 0"
        assert pager.dump().count("\n") == 1
        assert pager.check() == []

    def test_only_the_last_block_and_what_is_below_goes(self, implementation):
        pager = implementation(12, 4)
        self.tree(pager)
        assert pager.forget([1] * 4 + [2] * 4) == 2
        assert free_ids(pager) == "1-2 4-11"
        assert line(pager, "queue lru") == "queue lru: 3 0"
        assert pager.match([1] * 4 + [3] * 5).num_tokens == 8

    def test_a_path_that_is_not_indexed_as_a_whole_is_left_alone(self, implementation):
        pager = implementation(12, 4)
        self.tree(pager)
        with nothing_changes(pager):
            assert pager.forget([1] * 4 + [9] * 4) == 0
            assert pager.forget([1] * 4 + [2] * 4 + [4] * 8) == 0
            assert pager.forget([1] * 4, namespace=b"other") == 0

    @pytest.mark.parametrize("length", [0, 1, 3, 5])
    def test_tokens_must_be_whole_blocks(self, implementation, length):
        pager = implementation(12, 4)
        self.tree(pager)
        with nothing_changes(pager), refuses(ValueError, match=str(length)):
            pager.forget([1] * length)

    def test_held_blocks_stay_until_their_last_holder_leaves(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, [1] * 13)
        assert pager.forget([1] * 8) == 2
        assert pager.stats().active_blocks == 4
        assert pager.match([1] * 13).num_tokens == 4
        assert "publishes no" in line(pager, "sequence 0")
        sequence.extend([1] * 3)
        sequence.commit()
        assert pager.match([1] * 17).num_tokens == 4
        sequence.release()
        # 3 is pushed, then 2 and 1, deepest first; 0 is still indexed and becomes cached.
        assert (free_ids(pager), line(pager, "queue lru")) == ("1-7", "queue lru: 0")
        assert pager.stats().evicted_blocks == 0
        assert pager.check() == []

    def test_a_block_that_only_a_path_held_goes_when_truncate_cuts_it_off(self, implementation):
        pager = implementation(8, 4)
        first, second = pager.admit([1] * 8), pager.admit([1] * 8)
        first.commit()
        second.commit()
        first.release()
        assert pager.forget([1] * 4) == 2
        assert pager.stats().active_blocks == 4
        second.truncate(4)
        assert free_ids(pager) == "1 3-7"
        second.release()
        assert free_ids(pager) == "0 2 1 3-7", "the table's block first, then the path's"
        assert pager.check() == []

    def test_truncate_does_not_make_it_publish_again(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, [1] * 8)
        pager.forget([1] * 8)
        sequence.truncate(4)
        sequence.extend([1] * 4)
        sequence.commit()
        assert pager.match([1] * 9).num_tokens == 4
        assert "publishes no" in line(pager, "sequence 0")

    def test_a_forgotten_block_is_not_published_a_second_time(self, implementation):
        pager = implementation(8, 4)
        parent = pager.admit([1] * 8)
        (child,) = parent.fork()
        parent.commit()
        assert pager.forget([1] * 4) == 2
        child.commit()
        assert pager.match([1] * 9).num_tokens == 0
        assert "path -; table 0-1; publishes yes" in line(pager, "sequence 1")
        other = admit_committed(pager, [1] * 4)
        child.extend([2] * 4)
        child.commit()
        assert "path 2; table 0-1 3" in line(pager, "sequence 1"), "another's block at this place can be followed"
        assert pager.check() == []
        for sequence in (parent, child, other):
            sequence.release()
        assert pager.check() == []

    def test_forgotten_content_can_be_computed_and_cached_anew(self, implementation):
        pager = implementation(8, 4)
        cache(pager, [1] * 8)
        pager.forget([1] * 4)
        cache(pager, [1] * 8)
        assert pager.match([1] * 9).num_tokens == 8
