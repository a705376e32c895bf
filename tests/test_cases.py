"""One test a failure that users of other engines met: wrong bytes (W), lost capacity (L), eviction and accounting (E).

Each name starts with the id of its row. What a row shows only with transfers, events or a second tier has no test yet.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from implementations import (
    admit_committed,
    cache,
    each_implementation,
    free_ids,
    ids,
    line,
    nothing_changes,
    refuses,
)

import kvpager

pytestmark = each_implementation


# Wrong bytes.


@pytest.mark.parametrize("end", ["release", "abort", "preempt"])
def test_w5_blocks_of_an_unfinished_prefill_are_never_hit(implementation, end):
    """A(64 tokens), C(20), then the request ends before the rest is computed: only whole committed blocks stay (I4)."""
    pager = implementation(8, 16)
    prompt = list(range(64))
    sequence = pager.admit(prompt)
    sequence.commit(20)
    if end == "preempt":
        sequence.preempt()
    else:
        sequence.release("aborted" if end == "abort" else "finished")
    assert pager.match([*prompt, 1]).num_tokens == 16
    assert (pager.stats().cached_blocks, pager.stats().free_blocks) == (1, 7)
    assert pager.check() == []


def test_w5_an_uncommitted_tail_is_cut_off_at_every_position(implementation):
    prompt = list(range(12))
    for committed in range(13):
        pager = implementation(8, 4)
        sequence = pager.admit(prompt)
        sequence.commit(committed)
        sequence.release("aborted")
        assert pager.match([*prompt, 1]).num_tokens == committed // 4 * 4


@pytest.mark.parametrize("steps", range(6))
def test_w6_an_abort_before_commit_leaves_no_entry_and_no_leak(implementation, steps):
    """The abort falls after each of the steps in turn."""
    pager = implementation(16, 4)
    sequence = pager.admit(list(range(10)))
    children = []
    walk = [
        lambda: sequence.slots(0, 10),
        lambda: sequence.append(7),
        lambda: children.extend(sequence.fork(2)),
        lambda: children[0].append(8),
        lambda: sequence.truncate(3),
    ]
    for step in walk[:steps]:
        step()
    for each in (sequence, *children):
        each.release("aborted")
    assert pager.match(list(range(10))).num_tokens == 0
    assert (pager.stats().free_blocks, pager.stats().active_blocks) == (16, 0)
    assert pager.check() == []


def test_w7_a_write_goes_to_a_block_with_one_holder_only(implementation):
    """Whoever writes into a block that somebody else maps gets another one first."""
    pager = implementation(16, 4)
    parent = admit_committed(pager, list(range(6)))
    children = parent.fork(3)
    sequences = [parent, *children]
    slots = [sequence.append(100 + number) for number, sequence in enumerate(sequences)]
    written = [slot // 4 for slot in slots]
    assert len(set(written)) == 4
    for sequence, block in zip(sequences, written, strict=True):
        holders = [other for other in sequences if block in ids(other)]
        assert holders == [sequence]
    targets = pager.take_copies()[:, 1].tolist()
    assert targets == written[:-1], "the last writer kept the original"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"", b"a"),
        (b"a", (("tenant", b"a"),)),
        (b"", ()),
        ((("tenant", b"a"),), (("lora", b"a"),)),
        ((("tenant", b"ab"),), (("tenant", b"a"), ("b", b""))),
        ((("ab", b"c"),), (("a", b"bc"),)),
        ((("a", b"1"), ("b", b"2")), (("b", b"2"), ("a", b"1"))),
        (b"\x01", ()),
    ],
)
def test_w8_equal_tokens_in_two_namespaces_never_share(implementation, one, other):
    pager = implementation(16, 4)
    prompt = list(range(9))
    first = admit_committed(pager, prompt, namespace=one)
    assert pager.match(prompt, namespace=other).num_tokens == 0
    second = admit_committed(pager, prompt, namespace=other)
    assert not set(ids(first)) & set(ids(second))
    assert pager.forget(prompt[:8], namespace=other) == 1
    assert pager.match(prompt, namespace=one).num_tokens == 8


def test_w8_two_images_never_share(implementation):
    """Placeholders made of a digest differ where the images do, and the text behind them is not shared either."""
    pager = implementation(64, 4)
    cat, dog = kvpager.content_tokens(b"c" * 32, 9), kvpager.content_tokens(b"d" * 32, 9)
    text = np.arange(6, dtype=np.int32)
    cache(pager, np.concatenate([text, cat, text]))
    assert pager.match(np.concatenate([text, dog, text])).num_tokens == 4
    assert pager.match(np.concatenate([text, cat, text])).num_tokens == 20


def test_w8_a_reset_for_another_model_version_shares_nothing(implementation):
    pager = implementation(16, 4, identity=b"model 1")
    cache(pager, list(range(9)))
    pager.reset(b"model 2")
    assert pager.match(list(range(9))).num_tokens == 0


def test_w9_the_content_of_an_indexed_block_never_changes(implementation):
    pager = implementation(16, 4)
    sequence = admit_committed(pager, list(range(8)))
    with nothing_changes(pager), refuses(ValueError, "num_(committed|planned)"):
        sequence.slots(4, 8)
    sequence.truncate(5)
    assert sequence.slots(5, 5).size == 0
    assert sequence.extend([90, 91, 92]).tolist() == [9, 10, 11], "block 2 takes the place of block 1"
    sequence.commit()
    assert pager.match([*range(8), 1]).num_tokens == 8
    assert pager.match([0, 1, 2, 3, 4, 90, 91, 92, 1]).num_tokens == 8
    assert pager.check() == []


def test_w9_a_block_is_indexed_once(implementation):
    """Not under other tokens, and not again after it was forgotten."""
    pager = implementation(16, 4)
    parent = pager.admit(list(range(8)))
    (child,) = parent.fork()
    parent.commit()
    pager.forget(list(range(4)))
    child.commit()
    assert pager.match(list(range(9))).num_tokens == 0
    assert pager.check() == []


def test_w10_two_equal_prompts_of_one_step_keep_their_blocks(implementation):
    pager = implementation(16, 4)
    prompt = list(range(10))
    first, second = pager.admit(prompt), pager.admit(prompt)
    tables = ids(first), ids(second)
    first.commit()
    second.commit()
    assert (ids(first), ids(second)) == tables == ([0, 1, 2], [3, 4, 5])
    first.release()
    assert ids(second) == [3, 4, 5]
    fresh = pager.admit([9] * 40)
    assert not set(ids(fresh)) & {0, 1, 3, 4, 5}, "nothing that the second maps or follows was handed out"


# Leaks, hangs, lost capacity.


def test_l1_releases_are_idempotent_by_handle_and_counted(implementation):
    pager = implementation(8, 4)
    sequence = admit_committed(pager, list(range(9)))
    sequence.release()
    before = pager.dump(full=True)
    sequence.release()
    sequence.release("aborted")
    assert pager.dump(full=True) == before
    assert pager.stats().noop_calls == 2
    other = admit_committed(pager, list(range(9)))
    other.preempt()
    other.release()
    other.release()
    assert (pager.stats().noop_calls, pager.stats().clock_ticks) == (3, 2)
    assert pager.check() == []


def test_l2_admission_is_all_or_nothing(implementation):
    """Two waiting requests cannot each hold half of what they need: a refused one holds nothing."""
    pager = implementation(8, 4)
    running = pager.admit([0] * 12)
    with nothing_changes(pager):
        assert pager.try_admit([1] * 24) is None
        assert pager.try_admit([2] * 24) is None
    running.release()
    waiting = pager.admit([1] * 24)
    assert pager.try_admit([2] * 24) is None
    waiting.release()
    assert pager.can_admit([2] * 24)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_l5_a_pool_full_of_cached_blocks_admits_by_evicting_the_exact_shortfall(implementation, policy):
    pager = implementation(12, 4, policy=policy)
    for token in range(3):
        cache(pager, [token] * 16)
    assert (pager.num_free_blocks, pager.num_evictable_blocks) == (0, 12)
    running = []
    for blocks in (1, 2, 3, 6):
        prompt = [100 + blocks] * 4 * blocks
        assert pager.can_admit(prompt)
        running.append(pager.admit(prompt))
        taken = sum(len(ids(sequence)) for sequence in running)
        assert (pager.stats().evicted_blocks, pager.stats().cached_blocks) == (taken, 12 - taken)
    assert not pager.can_admit([9])


def test_l6_a_request_larger_than_the_pool_never_fits(implementation):
    pager = implementation(4, 4)
    for make_used in (lambda: None, lambda: cache(pager, [1] * 16)):
        make_used()
        with nothing_changes(pager):
            with refuses(kvpager.NeverFits) as refused:
                pager.admit([2] * 17)
            assert (refused.value.needed, refused.value.usable) == (5, 4)
            with refuses(kvpager.NeverFits):
                pager.try_admit([2] * 17)
            assert not pager.can_admit([2] * 17)
        assert pager.can_admit([2] * 16)
    assert pager.stats().evicted_blocks == 0
    with refuses(kvpager.NeverFits):
        implementation(4, 4, null_block=True).admit([2] * 13)


def test_l7_the_need_of_a_call_is_counted_in_blocks(implementation):
    """Sequences at a block boundary need a block for one token; the others need none."""
    pager = implementation(6, 4)
    sequences = [pager.admit([token] * length) for token, length in enumerate((4, 4, 3, 4))]
    assert pager.num_free_blocks == 2
    assert [sequence.try_append(9) is not None for sequence in sequences] == [True, True, True, False]
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        sequences[3].append(9)
    assert (refused.value.needed, refused.value.free, refused.value.evictable) == (1, 0, 0)
    (child,) = sequences[0].fork()
    with nothing_changes(pager), refuses(kvpager.OutOfBlocks) as refused:
        child.extend([9] * 4)
    assert refused.value.needed == 2, "one to replace the shared partial block, one to grow"


def test_l10_a_reset_drops_what_is_cached_and_live_sequences_go_on(implementation):
    pager = implementation(16, 4)
    cache(pager, [1] * 8)
    live = admit_committed(pager, [2] * 9)
    pager.reset()
    assert pager.stats().cached_blocks == 0
    assert live.append(3) == ids(live)[2] * 4 + 1
    live.commit()
    assert pager.match([2] * 9).num_tokens == 0
    assert pager.match([1] * 9).num_tokens == 0
    live.release()
    assert pager.num_free_blocks == 16
    assert pager.check() == []


def test_l11_a_stale_handle_is_never_another_sequences(implementation):
    pager = implementation(4, 4)
    old = admit_committed(pager, [1] * 8)
    old.release()
    pager.reset()
    new = pager.admit([2] * 8)
    assert old.id != new.id
    before = pager.dump(full=True)
    for call in (lambda: old.block_ids, lambda: old.tokens, lambda: old.append(1), lambda: old.preempt()):
        with refuses(kvpager.StaleHandle, "released") as refused:
            call()
        assert refused.value.sequence_id == 0
    old.release()
    assert pager.dump(full=True) == before


def test_l14_namespaces_that_come_and_go_leave_no_memory_behind(implementation):
    if implementation is kvpager.Pager:
        pytest.skip("the core's memory is not Python's: its own tests weigh it")
    pager = implementation(16, 4)

    def churn(rounds):
        for number in rounds:
            cache(pager, [1] * 8, namespace=(("lora", number.to_bytes(8, "little") * 100),))

    churn(range(100))
    tracemalloc.start()
    churn(range(100, 200))
    settled = tracemalloc.get_traced_memory()[0]
    churn(range(200, 1200))
    grown = tracemalloc.get_traced_memory()[0] - settled
    tracemalloc.stop()
    assert grown < 20_000, "a thousand namespaces of 800 bytes each went by"


def test_l14_a_namespace_leaves_the_index_with_its_last_block(implementation):
    pager = implementation(4, 4)
    for number in range(50):
        cache(pager, [1] * 8, namespace=f"lora-{number}".encode())
    assert pager.dump().count("namespace") == 2
    pager.forget([1] * 4, namespace=b"lora-49")
    pager.reset()
    assert pager.dump().count("namespace") == 0


def test_l15_the_last_sequence_outgrows_the_pool(implementation):
    pager = implementation(4, 4, watermark=0.5)
    sequence = admit_committed(pager, [1] * 16)
    for call in (
        lambda: sequence.append(2),
        lambda: sequence.extend([2] * 9),
    ):
        with nothing_changes(pager), refuses(kvpager.OutOfBlocks):
            call()
    with refuses(kvpager.OutOfBlocks) as refused:
        sequence.extend([2] * 9)
    error = refused.value
    assert (error.needed, error.free, error.evictable, error.total) == (3, 0, 0, 4)
    assert sequence.try_append(2) is None
    assert (len(sequence), sequence.tokens.tolist()) == (16, [1] * 16)
    sequence.truncate(15)
    assert sequence.try_append(2) is None, "the last block is indexed, and no block is left to copy it to"


# Eviction and accounting.


def test_e1_a_hit_moves_the_whole_path_and_the_tail_goes_first(implementation):
    pager = implementation(8, 4)
    cache(pager, [1] * 12)
    cache(pager, [2] * 12)
    pager.admit([1] * 13).release()
    assert line(pager, "queue lru") == "queue lru: 5 4 3 2 1 0"
    assert pager.match([2] * 13).num_tokens == 12
    assert ids(pager.admit([3] * 16)) == [6, 7, 5, 4]
    assert (pager.match([1] * 13).num_tokens, pager.match([2] * 13).num_tokens) == (12, 4)


def test_e2_looking_changes_nothing(implementation):
    pager = implementation(8, 4)
    cache(pager, [1] * 12)
    running = pager.admit([2] * 5)
    before = pager.stats()
    with nothing_changes(pager):
        for _ in range(10):
            pager.match([1] * 13)
            pager.match([3])
            pager.can_admit([1] * 13)
            pager.can_admit([1] * 99)
            pager.stats()
            pager.check()
            pager.dump()
            repr(pager)
            len(running), running.tokens, running.block_ids, running.num_cached, running.state, repr(running)
    assert pager.stats() == before


def test_e3_a_hot_prefix_survives_a_scan_under_the_scan_resistant_policy(implementation):
    """A system prompt used 50 times, then unique prompts worth one pool."""
    left = {}
    for policy in ("lru", "slru"):
        pager = implementation(64, 4, policy=policy)
        hot = list(range(1000, 1064))
        for number in range(50):
            cache(pager, [*hot, number])
        for number in range(16):
            cache(pager, [2000 + number] * 16)
        left[policy] = pager.match([*hot, 1]).num_tokens
    assert left == {"lru": 0, "slru": 64}


def test_e4_a_retried_admission_counts_once(implementation):
    pager = implementation(4, 4)
    cache(pager, [1] * 4)
    running = pager.admit([2] * 12)
    for _ in range(100):
        assert pager.try_admit([1] * 12) is None
    running.release()
    admitted = pager.admit([1] * 12)
    stats = pager.stats()
    assert (stats.admitted_sequences, stats.queried_tokens, stats.hit_tokens) == (3, 4 + 12 + 12, 4)
    assert stats.refused_calls == 100
    assert "1 block 0: tokens 1 1 1 1; holders 1; hits 1" in pager.dump()
    assert admitted.num_cached == 4


def test_e5_a_partial_block_pushes_no_indexed_one_out(implementation):
    pager = implementation(4, 4)
    cache(pager, [1] * 12)
    for _ in range(10):
        cache(pager, [2] * 3)
    assert pager.match([1] * 13).num_tokens == 12
    assert (pager.stats().evicted_blocks, free_ids(pager)) == (0, "3")


def test_e6_idle_age_and_hits_at_eviction_are_counted(implementation):
    pager = implementation(4, 4)
    cache(pager, [1] * 8)
    for _ in range(3):
        pager.admit([1] * 9).release()
    for _ in range(5):
        pager.admit([2]).release()
    taken = pager.admit([3] * 16)
    stats = pager.stats()
    # Both blocks were hit three times and are idle since tick 3; the clock stands at 9.
    assert (stats.evicted_blocks, stats.evicted_idle_ticks, stats.evicted_hits) == (2, 2 * 6, 2 * 3)
    assert (stats.mean_evicted_idle_ticks, stats.mean_evicted_hits) == (6.0, 3.0)
    assert len(ids(taken)) == 4
