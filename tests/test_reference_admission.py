"""Admission, resume and publishing (rules.md 6 and 7)."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache, each_implementation, free_ids, ids, line, nothing_changes, refuses

import kvpager

pytestmark = each_implementation


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)])
def test_the_last_token_is_never_hit(implementation, length, hit):
    pager = implementation(16, 4)
    cache(pager, list(range(12)))
    prompt = list(range(length))
    assert pager.match(prompt) == kvpager.PrefixMatch(num_tokens=hit, num_blocks=hit // 4)
    sequence = pager.admit(prompt)
    assert (sequence.num_cached, sequence.num_committed, sequence.num_planned) == (hit, hit, hit)


def test_what_a_hit_holds_is_not_evicted_for_the_rest_of_the_same_request(implementation):
    pager = implementation(4, 4)
    cache(pager, list(range(8)))
    cache(pager, [7] * 8)
    assert line(pager, "queue lru") == "queue lru: 1 0 3 2"
    assert ids(pager.admit([*range(8), 1, 2, 3, 4])) == [0, 1, 3]


def test_the_error_does_not_count_what_the_request_would_hit(implementation):
    pager = implementation(4, 4)
    cache(pager, list(range(8)))
    other = pager.admit([7] * 4)
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        pager.admit([*range(8), 1, 2, 3, 4, 5])
    error = refused.value
    assert (error.needed, error.free, error.evictable, error.total, error.rows) == (2, 1, 0, 4, ())
    other.release()
    assert ids(pager.admit([*range(8), 1, 2, 3, 4, 5])) == [0, 1, 2, 3]


def test_statistics_count_at_success_only(implementation):
    pager = implementation(4, 4)
    cache(pager, list(range(8)))
    holder = pager.admit([7] * 8)
    for _ in range(3):
        assert pager.try_admit([*range(8), 1]) is None
    stats = pager.stats()
    assert (stats.admitted_sequences, stats.queried_tokens, stats.hit_tokens) == (2, 16, 0)
    assert stats.refused_calls == 3
    holder.release()
    _kept = pager.admit([*range(8), 1])
    stats = pager.stats()
    assert (stats.admitted_sequences, stats.queried_tokens, stats.hit_tokens) == (3, 25, 8)
    assert stats.hit_rate == 8 / 25


def test_sequence_ids_count_over_admits_and_forks_at_success_only(implementation):
    pager = implementation(4, 4)
    first = pager.admit([1] * 8)
    assert pager.try_admit([2] * 12) is None
    children = first.fork(2)
    first.release()
    assert [first.id, *(child.id for child in children), pager.admit([3]).id] == [0, 1, 2, 3]


class TestWatermark:
    """rules.md 6.3: 10 usable blocks, a reserve of ceil(0.25 * 10) = 3."""

    def test_the_first_sequence_may_use_everything(self, implementation):
        pager = implementation(10, 4, watermark=0.25)
        assert len(ids(pager.admit([1] * 40))) == 10

    def test_the_next_must_leave_the_reserve(self, implementation):
        pager = implementation(10, 4, watermark=0.25)
        first = pager.admit([1] * 4)
        with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
            pager.admit([2] * 28)
        assert first.state == "running"
        assert (refused.value.needed, refused.value.free, refused.value.evictable) == (10, 9, 0)
        assert not pager.can_admit([2] * 28)
        assert pager.can_admit([2] * 24)
        assert len(ids(pager.admit([2] * 24))) == 6

    def test_the_error_reports_the_need_alone_where_that_is_too_much(self, implementation):
        pager = implementation(10, 4, watermark=0.25)
        _first = pager.admit([1] * 4)
        with refuses(kvpager.OutOfBlocks) as refused:
            pager.admit([2] * 40)
        assert refused.value.needed == 10

    def test_pinned_and_preempted_sequences_are_not_running(self, implementation):
        pager = implementation(10, 4, watermark=0.25)
        pinned = pager.admit([1] * 4, pin=True)
        waiting = pager.admit([2] * 4)
        waiting.preempt()
        assert pinned.pinned
        assert not waiting.pinned
        assert len(ids(pager.admit([3] * 36))) == 9

    def test_cached_blocks_count_towards_the_reserve(self, implementation):
        pager = implementation(10, 4, watermark=0.25)
        cache(pager, [9] * 40)
        _first = pager.admit([1] * 4)
        assert pager.can_admit([2] * 24)
        assert not pager.can_admit([2] * 25)

    def test_growth_is_not_bound_by_it(self, implementation):
        pager = implementation(10, 4, watermark=0.25)
        first, second = pager.admit([1] * 4), pager.admit([2] * 24)
        assert len(first.extend([1] * 12)) == 12
        assert pager.num_free_blocks == 0
        assert second.state == "running"

    def test_resume_leaves_the_reserve_too(self, implementation):
        pager = implementation(10, 4, watermark=0.25)
        first, second = pager.admit([1] * 4), pager.admit([2] * 24)
        second.preempt()
        first.extend([1] * 4)
        with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
            second.resume()
        assert refused.value.needed == 9
        first.release()
        assert second.try_resume() is second

    def test_the_reserve_is_taken_from_the_usable_blocks(self, implementation):
        # ceil(0.5 * 9) = 5 of the 9 blocks beside the null block.
        pager = implementation(10, 4, watermark=0.5, null_block=True)
        _first = pager.admit([1] * 4)
        assert pager.can_admit([2] * 12)
        assert not pager.can_admit([2] * 13)


class TestResume:
    """rules.md 6.6 and 3.5."""

    def test_a_preempted_sequence_keeps_its_tokens_and_nothing_else(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, list(range(10)))
        sequence.preempt()
        assert (sequence.state, len(sequence), sequence.tokens.tolist()) == ("preempted", 10, list(range(10)))
        assert (sequence.num_cached, sequence.num_committed, sequence.num_planned) == (0, 0, 0)
        assert (line(pager, "queue lru"), free_ids(pager)) == ("queue lru: 1 0", "2-7")
        assert pager.stats().preemptions == 1
        assert pager.stats().clock_ticks == 0, "a preempt is no release"

    def test_resume_finds_again_what_stayed_cached(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, list(range(10)))
        sequence.preempt()
        assert sequence.resume() is sequence
        assert (sequence.state, sequence.num_cached, ids(sequence)) == ("running", 8, [0, 1, 2])
        stats = pager.stats()
        assert (stats.recomputed_tokens, stats.queried_tokens, stats.hit_tokens) == (2, 10, 0)
        assert (stats.admitted_sequences, stats.running_sequences, stats.preempted_sequences) == (1, 1, 0)

    def test_resume_counts_what_has_to_be_computed_again(self, implementation):
        pager = implementation(4, 4)
        sequence = pager.admit(list(range(10)))
        sequence.commit(9)
        sequence.preempt()
        cache(pager, [7] * 12)  # evicts block 1, the tail
        assert pager.match(list(range(10))).num_tokens == 4
        assert sequence.resume().num_cached == 4
        assert pager.stats().recomputed_tokens == 9 - 4

    def test_what_was_never_committed_is_not_recomputed(self, implementation):
        pager = implementation(8, 4)
        sequence = pager.admit(list(range(10)))
        sequence.preempt()
        sequence.resume()
        assert pager.stats().recomputed_tokens == 0

    def test_a_resume_is_no_hit(self, implementation):
        pager = implementation(8, 4)
        sequence = admit_committed(pager, list(range(9)))
        sequence.preempt()
        sequence.resume()
        assert "hits 0" in pager.dump()


class TestPublishing:
    """rules.md 7."""

    def test_only_full_committed_blocks_are_indexed(self, implementation):
        pager = implementation(8, 4)
        sequence = pager.admit(list(range(10)))
        for end, indexed in [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (10, 8)]:
            sequence.commit(end)
            assert (sequence.num_committed, pager.match(list(range(12))).num_tokens) == (end, indexed)

    def test_commit_is_monotone_and_idempotent(self, implementation):
        pager = implementation(8, 4)
        sequence = pager.admit(list(range(10)))
        sequence.commit(9)
        with nothing_changes(pager):
            sequence.commit(9)
            sequence.commit(2)
        sequence.commit()
        assert sequence.num_committed == 10

    def test_the_second_of_two_equal_sequences_keeps_its_own_blocks(self, implementation):
        pager = implementation(10, 4)
        prompt = list(range(9))
        first, second = pager.admit(prompt), pager.admit(prompt)
        first.commit()
        second.commit()
        assert (ids(first), ids(second)) == ([0, 1, 2], [3, 4, 5])
        assert "path 0-1; table 3-5" in line(pager, "sequence 1")
        assert "2 blocks 0-1: tokens 0 1 2 3; holders 2; hits 0" in pager.dump()
        first.release()
        assert pager.stats().cached_blocks == 0, "the second still holds the indexed blocks"
        second.release()
        # The duplicates are freed first, deepest first; block 2 went to the stack when the first was released.
        assert (free_ids(pager), line(pager, "queue lru")) == ("3-5 2 6-9", "queue lru: 1 0")

    def test_a_follower_publishes_below_what_it_follows(self, implementation):
        pager = implementation(10, 4)
        first, second = pager.admit([1] * 4), pager.admit([1] * 8)
        first.commit()
        second.commit()
        assert "path 0 2; table 1-2" in line(pager, "sequence 1")
        assert pager.match([1] * 9).num_tokens == 8
        assert pager.check() == []

    def test_following_is_no_hit(self, implementation):
        pager = implementation(10, 4, policy="slru")
        first, second = admit_committed(pager, [1] * 4), admit_committed(pager, [1] * 4)
        first.release()
        second.release()
        assert line(pager, "queue protected") == "queue protected: -"
        assert "hits 0" in pager.dump()

    def test_a_fork_follows_its_parent_without_a_duplicate(self, implementation):
        pager = implementation(10, 4)
        parent = pager.admit([1] * 8)
        (child,) = parent.fork()
        parent.commit()
        child.commit()
        assert ids(child) == [0, 1]
        assert "path 0-1; table 0-1" in line(pager, "sequence 1")
        parent.release()
        child.release()
        assert line(pager, "queue lru") == "queue lru: 1 0"

    def test_a_cached_block_that_is_followed_becomes_active(self, implementation):
        pager = implementation(10, 4)
        second = pager.admit([1] * 4)
        cache(pager, [1] * 4)
        assert pager.stats().cached_blocks == 1
        second.commit()
        assert pager.stats().cached_blocks == 0

    def test_without_a_prefix_cache_nothing_is_published(self, implementation):
        pager = implementation(8, 4, prefix_cache=False)
        cache(pager, list(range(12)))
        assert pager.match(list(range(12))).num_tokens == 0
        assert pager.num_free_blocks == 8
        assert pager.forget(list(range(4))) == 0


def test_pinning_holds_a_prefix(implementation):
    pager = implementation(6, 4)
    held = admit_committed(pager, list(range(8)), pin=True)
    cache(pager, [7] * 16)
    cache(pager, [8] * 16)
    assert pager.match([*range(8), 1]).num_tokens == 8
    assert "pinned yes" in line(pager, f"sequence {held.id}")
    assert "pinned no" in line(pager, f"sequence {held.fork()[0].id}"), "a fork was not admitted to pin anything"
