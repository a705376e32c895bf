"""Who goes first, and what the statistics say of it (rules.md 8)."""

from __future__ import annotations

from implementations import admit_committed, cache, each_implementation, ids, line

pytestmark = each_implementation


def queue(pager, name):
    return line(pager, f"queue {name}: ").removeprefix(f"queue {name}: ")


def test_the_clock_counts_releases_only(implementation):
    pager = implementation(16, 4)
    sequence = admit_committed(pager, [1] * 9)
    child = sequence.fork()[0]
    child.append(1)
    child.truncate(3)
    sequence.preempt()
    sequence.resume()
    pager.take_copies()
    pager.forget([1] * 4)
    pager.reset()
    assert pager.stats().clock_ticks == 0
    child.release()
    sequence.release("aborted")
    sequence.release()
    assert pager.stats().clock_ticks == 2


def test_blocks_age_from_the_moment_their_last_holder_left(implementation):
    pager = implementation(16, 4)
    parent = admit_committed(pager, [1] * 8)
    longer = admit_committed(pager, [1] * 12)
    cache(pager, [2] * 4)
    parent.release()
    assert pager.stats().cached_blocks == 1, "the longer one holds the whole prefix of the other"
    cache(pager, [3] * 4)
    longer.release()
    assert pager.dump().splitlines()[1:] == [
        "namespace b''",
        "├─ 2 blocks 0-1: tokens 1 1 1 1; holders 0; hits 1; idle since 3",
        "│  └─ 1 block 2: tokens 1 1 1 1; holders 0; hits 0; idle since 3",
        "├─ 1 block 3: tokens 2 2 2 2; holders 0; hits 0; idle since 0",
        "└─ 1 block 4: tokens 3 3 3 3; holders 0; hits 0; idle since 2",
    ]


def test_lru_evicts_what_became_cached_first_the_deeper_before(implementation):
    pager = implementation(6, 4)
    cache(pager, [1] * 8)
    cache(pager, [2] * 8)
    cache(pager, [3] * 8)
    assert queue(pager, "lru") == "1 0 3 2 5 4"
    assert ids(pager.admit([9] * 12)) == [1, 0, 3]
    assert (pager.match([2] * 9).num_tokens, pager.match([3] * 9).num_tokens) == (4, 8)


def test_a_hit_moves_the_whole_path_to_the_recent_end(implementation):
    pager = implementation(6, 4)
    cache(pager, [1] * 12)
    cache(pager, [2] * 8)
    pager.admit([1] * 9).release()
    assert queue(pager, "lru") == "2 4 3 1 0"


def test_idle_age_and_hits_are_summed_at_eviction(implementation):
    pager = implementation(3, 4)
    cache(pager, [1] * 4)  # idle since 0
    pager.admit([1] * 5).release()  # a hit; idle since 1
    cache(pager, [2] * 4)  # idle since 2
    assert ids(pager.admit([3] * 12)) == [2, 0, 1]
    stats = pager.stats()
    assert (stats.evicted_blocks, stats.evicted_idle_ticks, stats.evicted_hits) == (2, 2 + 1, 1)
    assert (stats.mean_evicted_idle_ticks, stats.mean_evicted_hits) == (1.5, 0.5)


class TestSlru:
    """rules.md 8.3, with 8 blocks: at most 4 of them protected."""

    def test_victims_are_probation_then_protected(self, implementation):
        pager = implementation(4, 4, policy="slru")
        cache(pager, [1] * 4)
        pager.admit([1] * 5).release()
        cache(pager, [2] * 8)
        assert (queue(pager, "probation"), queue(pager, "protected")) == ("2 1", "0")
        assert ids(pager.admit([9] * 16)) == [3, 2, 1, 0]

    def test_the_coldest_of_too_many_protected_is_demoted(self, implementation):
        pager = implementation(8, 4, policy="slru")
        for token in range(1, 6):
            cache(pager, [token] * 4)
        for token in range(1, 6):
            pager.admit([token] * 5).release()
        assert (queue(pager, "probation"), queue(pager, "protected")) == ("0", "1-4")
        tree = pager.dump().splitlines()
        assert tree[2] == "├─ 1 block 0: tokens 1 1 1 1; holders 0; hits 1; idle since 5"
        assert tree[3] == "├─ 1 block 1: tokens 2 2 2 2; holders 0; hits 1; marked; idle since 6"

    def test_a_demoted_block_needs_another_hit_to_return(self, implementation):
        pager = implementation(2, 4, policy="slru")
        cache(pager, [1] * 4)
        cache(pager, [2] * 4)
        assert (queue(pager, "probation"), queue(pager, "protected")) == ("0-1", "-")

    def test_a_mark_survives_until_the_demotion(self, implementation):
        pager = implementation(8, 4, policy="slru")
        cache(pager, [1] * 4)
        pager.admit([1] * 5).release()
        sequence = pager.admit([1] * 5)
        sequence.preempt()
        sequence.resume()
        sequence.preempt()
        assert queue(pager, "protected") == "0"
