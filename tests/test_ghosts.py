"""Ghosts: evicted blocks that are asked for again (docs/design/rules.md 18.5), on core and reference."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import each_implementation, refuses

import kvpager

pytestmark = each_implementation


def serve(pager: Any, tokens: list[int], **options: Any) -> None:
    with pager.admit(tokens, **options) as sequence:
        sequence.commit()


def counts(pager: Any) -> tuple[int, int]:
    stats = pager.stats()
    return stats.refaulted_blocks, stats.refault_distance


def test_an_evicted_prefix_that_is_asked_for_again_is_a_refault(implementation):
    pager = implementation(4, 2, num_ghost_blocks=8)
    serve(pager, [1, 2, 3, 4, 5])  # two full blocks
    serve(pager, [9] * 8)  # evicts both, the deeper one first
    assert (pager.stats().evicted_blocks, counts(pager)) == (2, (0, 0))
    serve(pager, [1, 2, 3, 4, 7])
    # One block was evicted after the second, none after the first.
    assert counts(pager) == (2, 1)
    assert pager.stats().mean_refault_distance == 0.5


def test_a_refault_is_counted_once(implementation):
    pager = implementation(4, 2, num_ghost_blocks=8)
    serve(pager, [1, 2, 3])
    serve(pager, [9] * 8)
    serve(pager, [1, 2, 3])
    serve(pager, [1, 2, 3])
    assert counts(pager) == (1, 0)


def test_only_so_many_evictions_are_remembered(implementation):
    for kept, refaults in ((0, 0), (2, 0), (3, 1)):
        pager = implementation(2, 2, num_ghost_blocks=kept)
        assert pager.num_ghost_blocks == kept
        serve(pager, [1, 2, 3])
        serve(pager, [4, 4, 4, 4])
        serve(pager, [5, 5, 5])
        assert pager.stats().evicted_blocks == 3
        serve(pager, [1, 2, 3])
        assert pager.stats().refaulted_blocks == refaults


def test_it_takes_the_same_path_in_the_same_namespace(implementation):
    pager = implementation(4, 2, num_ghost_blocks=8)
    serve(pager, [1, 2, 3, 4, 5])
    serve(pager, [9] * 8)
    serve(pager, [3, 4, 5])  # the second block's tokens, elsewhere
    serve(pager, [1, 2, 3], namespace=b"other")
    assert counts(pager) == (0, 0)


def test_a_reset_is_no_eviction_and_nothing_of_before_is_asked_for(implementation):
    pager = implementation(4, 2, num_ghost_blocks=8)
    serve(pager, [1, 2, 3])
    serve(pager, [9] * 8)
    pager.reset()
    serve(pager, [1, 2, 3])
    assert counts(pager) == (0, 0)


def test_peeks_and_refused_admits_ask_for_nothing(implementation):
    pager = implementation(4, 2, num_ghost_blocks=8)
    serve(pager, [1, 2, 3])
    serve(pager, [9] * 8)
    pager.match([1, 2, 3])
    pager.can_admit([1, 2, 3])
    with pager.admit([8] * 8), refuses(kvpager.OutOfBlocks):
        pager.admit([1, 2, 3])
    assert pager.stats().refaulted_blocks == 0


def test_what_a_resume_finds_no_more_is_a_refault(implementation):
    pager = implementation(4, 2, num_ghost_blocks=8)
    with pager.admit([1, 2, 3, 4, 5]) as sequence:
        sequence.commit()
        sequence.preempt()
        serve(pager, [9] * 8)
        sequence.resume()
        assert (pager.stats().recomputed_tokens, pager.stats().refaulted_blocks) == (5, 2)


def test_a_split_and_a_grown_path_are_remembered_as_they_were(implementation):
    """The core keeps one trace a node and takes it back block by block: through splits, growth, partial evictions."""
    pager = implementation(12, 2, num_ghost_blocks=40)
    long = list(range(1, 10))
    with pager.admit(long[:3]) as sequence:
        for token in long[3:]:
            sequence.commit()
            sequence.append(token)
        sequence.commit()
    serve(pager, [1, 2, 3, 4, 50, 51, 52])  # splits it behind two blocks
    for size in (8, 10, 12, 14, 24):
        serve(pager, [size] * size)
    evicted = pager.stats().evicted_blocks
    assert evicted > 5
    serve(pager, long)
    assert pager.stats().refaulted_blocks == 4
    serve(pager, [1, 2, 3, 4, 50, 51, 52])
    assert pager.stats().refaulted_blocks == 5


def test_the_argument_has_limits(implementation):
    for bad in (-1, 2**31):
        with refuses(kvpager.ConfigError, "num_ghost_blocks"):
            implementation(4, 2, num_ghost_blocks=bad)
    with refuses(TypeError):
        implementation(4, 2, num_ghost_blocks=1.5)
    assert "num_ghost_blocks=3" in repr(implementation(4, 2, num_ghost_blocks=3))


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_pool_that_is_too_small_for_a_loop_says_by_how_much(implementation, policy):
    """Ten prefixes of four blocks in turn, in a pool for eight of them: each comes back just after it was evicted."""
    pager = implementation(36, 2, policy=policy, num_ghost_blocks=100)
    for _ in range(10):
        for number in range(10):
            serve(pager, [number] * 9)
    stats = pager.stats()
    assert stats.refaulted_blocks > 100
    assert stats.mean_refault_distance <= 4 * (10 - 8) + 4
