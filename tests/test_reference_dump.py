"""The drawing, letter by letter (rules.md 12 and 13)."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache, each_implementation, line

pytestmark = each_implementation


def test_an_empty_pager(implementation):
    assert implementation(12, 16).dump() == "pool: 12 blocks of 16 tokens: 12 free, 0 cached, 0 active, 0 reserved\n"
    assert implementation(12, 16, null_block=True).dump(full=True) == (
        "pool: 12 blocks of 16 tokens: 11 free, 0 cached, 0 active, 1 reserved\n"
        "free: 1-11\n"
        "queue lru: -\n"
        "copies: -\n"
        "clock: 0\n"
        "next sequence: 0\n"
        "stats: admitted_sequences=0 queried_tokens=0 hit_tokens=0 evicted_blocks=0 evicted_idle_ticks=0 evicted_hits=0"
        " copies=0 preemptions=0 recomputed_tokens=0 dropped_handles=0\n"
    )


def test_a_tree_and_everything_else(implementation):
    pager = implementation(16, 5, policy="slru")
    held = admit_committed(pager, list(range(17)))
    cache(pager, [*range(10), 7, 7, 7, 7, 7, 8])
    child = held.fork()[0]
    child.append(99)
    cache(pager, [1] * 6, namespace=(("lora", b"x"), ("tenant", b"")))
    waiting = pager.admit([5] * 3)
    waiting.preempt()
    assert pager.dump(full=True) == (
        "pool: 16 blocks of 5 tokens: 9 free, 2 cached, 5 active, 0 reserved\n"
        "namespace b''\n"
        "└─ 2 blocks 0-1: tokens 0 1 2 3 ..; holders 2; hits 1; marked\n"
        "   ├─ 1 block 2: tokens 10 11 12 13 ..; holders 2; hits 0\n"
        "   └─ 1 block 4: tokens 7 7 7 7 ..; holders 0; hits 0; idle since 0\n"
        "namespace (('lora', b'x'), ('tenant', b''))\n"
        "└─ 1 block 6: tokens 1 1 1 1 ..; holders 0; hits 0; idle since 1\n"
        "free: 7-15\n"
        "queue probation: 4 6\n"
        "queue protected: -\n"
        "sequence 0: running; namespace b''; cached 0; committed 17; planned 17; len 17;"
        " path 0-2; table 0-3; publishes yes; pinned no\n"
        "sequence 2: running; namespace b''; cached 0; committed 17; planned 17; len 18;"
        " path 0-2; table 0-2 5; publishes yes; pinned no\n"
        "sequence 4: preempted; namespace b''; cached 0; committed 0; planned 0; len 3; preempted 1\n"
        "copies: 3->5\n"
        "clock: 2\n"
        "next sequence: 5\n"
        "stats: admitted_sequences=4 queried_tokens=42 hit_tokens=10 evicted_blocks=0 evicted_idle_ticks=0"
        " evicted_hits=0 copies=0 preemptions=1 recomputed_tokens=0 dropped_handles=0\n"
    )


def test_a_segment_ends_where_its_blocks_begin_to_differ(implementation):
    pager = implementation(16, 2)
    cache(pager, [1] * 6)
    pager.admit([1] * 3).release()
    held = pager.admit([1] * 5)
    assert pager.dump().splitlines()[1:] == [
        "namespace b''",
        "└─ 1 block 0: tokens 1 1; holders 1; hits 2",
        "   └─ 1 block 1: tokens 1 1; holders 1; hits 1",
        "      └─ 1 block 2: tokens 1 1; holders 0; hits 0; idle since 0",
    ]
    held.release()
    assert pager.dump().splitlines()[2] == "└─ 1 block 0: tokens 1 1; holders 0; hits 2; idle since 2"


def test_a_block_counts_each_sequence_once(implementation):
    """A sequence holds the indexed block and, elsewhere in its table, others; a queued copy is a holder of its own."""
    pager = implementation(16, 4)
    parent = admit_committed(pager, [1] * 8)
    (child,) = parent.fork()
    child.truncate(6)
    child.append(2)
    assert line(pager, "copies") == "copies: 1->2"
    # Of block 0: parent, child, and the copy, which reads block 1 below it. Of block 1: parent and copy.
    assert pager.dump().splitlines()[2:] == [
        "└─ 1 block 0: tokens 1 1 1 1; holders 3; hits 0",
        "   └─ 1 block 1: tokens 1 1 1 1; holders 2; hits 0",
    ]
    pager.take_copies()
    assert pager.dump().splitlines()[2:] == [
        "└─ 1 block 0: tokens 1 1 1 1; holders 2; hits 0",
        "   └─ 1 block 1: tokens 1 1 1 1; holders 1; hits 0",
    ]


def test_ids_are_drawn_in_position_order_as_ascending_ranges(implementation):
    pager = implementation(6, 1)
    one, two, three = pager.admit([1, 1]), pager.admit([2]), pager.admit([3, 3])
    one.release()
    three.release()
    assert line(pager, "free") == "free: 3-4 0-1 5"
    sequence = admit_committed(pager, [4, 5, 6, 7, 8])
    assert "table 3-4 0-1 5;" in line(pager, f"sequence {sequence.id}")
    assert "5 blocks 3-4 0-1 5: tokens 4;" in pager.dump()
    assert line(pager, "free") == "free: -"
    assert two.state == "running"


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, None])
def test_nothing_depends_on_the_seed(implementation, seed):
    pager = implementation(16, 2, seed=seed)
    for token in range(5):
        cache(pager, [token] * 4)
    assert line(pager, "queue lru") == "queue lru: 1 0 3 2 5 4 7 6 9 8"


def test_namespaces_are_sorted_by_their_encoding(implementation):
    pager = implementation(16, 2)
    names = [(), (("b", b""),), b"b", (("a", b"2"),), b"", (("a", b"1"), ("a", b"1")), b"a"]
    for name in names:
        cache(pager, [1, 2], namespace=name)
    shown = [text.removeprefix("namespace ") for text in pager.dump().splitlines() if text.startswith("namespace ")]
    assert shown == [
        "b''",
        "b'a'",
        "b'b'",
        "()",
        "(('a', b'1'), ('a', b'1'))",
        "(('a', b'2'),)",
        "(('b', b''),)",
    ]


def test_a_namespace_goes_with_its_last_block(implementation):
    pager = implementation(2, 2)
    cache(pager, [1, 2], namespace=b"a")
    cache(pager, [1, 2, 3, 4], namespace=b"b")
    assert "namespace b'a'" not in pager.dump()


def test_the_repr_shows_how_to_build_it_again(implementation):
    pager = implementation(12, 4, policy="slru", watermark=0.5, identity=b"m", seed=7, null_block=True)
    text = repr(pager)
    assert text.endswith(
        "Pager(num_blocks=12, block_size=4, policy='slru', watermark=0.5, identity=b'm',"
        " null_block=True, prefix_cache=True)"
    )
