"""Blocks that several sequences read: prefix hits, forks, beams, copy-on-write; and blocks that change hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvpager

from .engine import TRUTH, Engine
from .llama import Llama

PROMPT = np.random.default_rng(2).integers(0, Llama.VOCABULARY, 45).tolist()
each_block_size = pytest.mark.parametrize("block_size", [4, 8, 16])
each_mirror = pytest.mark.parametrize("mirror", [False, True], ids=["tables", "updates"])


def answer(sequence: Any, prompt: list[int]) -> list[int]:
    assert sequence.tokens.tolist()[: len(prompt)] == prompt
    found: list[int] = sequence.tokens.tolist()[len(prompt) :]
    return found


def check_answer(sequence: Any, prompt: list[int], number: int, rank: int = 0) -> None:
    assert answer(sequence, prompt) == TRUTH.generate(prompt, number, rank)


@each_block_size
@pytest.mark.parametrize("shared", [1, 16, 44, 45])
def test_prefix_hits_between_prompts(block_size: int, shared: int) -> None:
    engine = Engine(256 // block_size, block_size)
    first = engine.admit(PROMPT)
    engine.step(len(PROMPT))
    other = [*PROMPT[:shared], *range(70, 80)]
    second = engine.admit(other)
    assert second.num_cached == shared // block_size * block_size
    engine.step([1, len(other) - second.num_cached])
    for _ in range(10):
        engine.step()
    check_answer(first, PROMPT, 12)
    check_answer(second, other, 11)
    engine.finish()


@each_block_size
def test_an_answer_is_hit_by_the_next_turn(block_size: int) -> None:
    """What was sampled is cached as what was prefilled."""
    engine = Engine(256 // block_size, block_size)
    first = engine.admit(PROMPT)
    engine.step(len(PROMPT))
    for _ in range(20):
        engine.step()
    turn = [*first.tokens.tolist(), 1, 2, 3]
    first.release()
    second = engine.admit(turn)
    assert second.num_cached == 65 // block_size * block_size
    engine.step(len(turn) - second.num_cached)
    engine.step()
    check_answer(second, turn, 2)
    engine.finish()


def test_namespaces_share_nothing_and_answer_alike() -> None:
    engine = Engine()
    first = engine.admit(PROMPT, namespace=b"a")
    engine.step(45)
    second = engine.admit(PROMPT, namespace=b"b")
    assert second.num_cached == 0
    assert not set(first.block_ids.tolist()) & set(second.block_ids.tolist())
    engine.step([1, 45])
    check_answer(second, PROMPT, 1)
    engine.finish()


@each_block_size
@each_mirror
@pytest.mark.parametrize("length", [43, 44, 45, 48])
def test_samples_diverge_by_fork(block_size: int, mirror: bool, length: int) -> None:
    """n samples of one prompt, each with another first token: the partial block is copied, whole ones are not."""
    engine = Engine(256 // block_size, block_size, mirror=mirror)
    prompt = (PROMPT * 2)[:length]
    first = engine.admit(prompt)
    engine.step(length, sampled=False)
    samples = [first, *map(engine.adopt, engine.batch.fork([0], 3))]
    for rank, sample in enumerate(samples):
        sample.append(TRUTH.generate(prompt, 1, rank)[0])
    copies = engine.pager.stats().copies
    for _ in range(10):
        engine.step()
    assert engine.pager.stats().copies - copies == (3 if length % block_size else 0)
    tables = [set(sample.block_ids.tolist()) for sample in samples]
    assert len(set.intersection(*tables)) == length // block_size
    for rank, sample in enumerate(samples):
        check_answer(sample, prompt, 11, rank)
    engine.finish()


@pytest.mark.parametrize("writers", [[0], [1, 2], [0, 1, 2], [3], [0, 1, 2, 3], [2, 3]])
def test_several_rows_copy_one_shared_partial_block_in_one_step(writers: list[int]) -> None:
    """k of h holders write: k copies if k < h, else the last one keeps the original."""
    engine = Engine(block_size=8)
    first = engine.admit(PROMPT)
    engine.step(45, sampled=False)
    rows = [first, *map(engine.adopt, engine.batch.fork([0], 3))]
    shared = int(first.block_ids[5])
    launch = engine.plan([int(row in writers) for row in range(4)], [50 + row for row in writers])
    assert len(launch.copies) == (len(writers) if len(writers) < 4 else 3)
    assert set(launch.copies[:, 0].tolist()) == {shared}
    engine.commit()  # these drafts are refused: cut back into blocks of their own, or the shared one
    engine.step([int(len(each) > each.num_planned) for each in rows])
    engine.finish()


def test_a_chain_of_forks_before_any_copy_is_made() -> None:
    """A copy from a block that is itself still to be copied comes from that one's source."""
    engine = Engine(block_size=16)
    first = engine.admit(PROMPT)
    engine.step(45, sampled=False)
    chain = [first]
    for number in range(4):
        chain.append(engine.adopt(chain[-1].fork()[0]))
        chain[-1].append(number)
    for each in chain[1:]:
        engine.batch.add(each)
    first.release()
    for _ in range(2):
        engine.step({each: len(each) - each.num_planned for each in chain[1:]})
    for number, each in enumerate(chain[1:]):
        assert answer(each, PROMPT)[: number + 1] == list(range(number + 1))
    engine.finish()


def by_forks(engine: Engine, beams: list[Any], parents: list[int], tokens: list[int]) -> list[Any]:
    """Beam i goes on from beam ``parents[i]`` with ``tokens[i]``, by single calls."""
    following: list[Any] = []
    for parent in parents:
        survives = beams[parent] not in following
        following.append(beams[parent] if survives else engine.adopt(beams[parent].fork()[0]))
    for beam in beams:
        if beam not in following:
            beam.release()
    for beam, token in zip(following, tokens, strict=True):
        if engine.batch.row_of(beam) is None:
            engine.batch.add(beam)
        beam.append(token)
    return following


def by_reorder(engine: Engine, beams: list[Any], parents: list[int], tokens: list[int]) -> list[Any]:
    """The same in one call."""
    in_row = {engine.batch.row_of(beam): beam for beam in beams}
    rows, new = engine.batch.reorder([engine.batch.row_of(beams[parent]) for parent in parents], tokens, [*in_row])
    return [
        in_row[row] if child is None else engine.adopt(child) for row, child in zip(rows.tolist(), new, strict=True)
    ]


def best_beams(histories: list[list[int]], scores: list[float], width: int) -> list[tuple[float, int, int]]:
    """The best continuations of all beams: (score, parent, token)."""
    found = []
    for parent, (tokens, score) in enumerate(zip(histories, scores, strict=True)):
        logits = TRUTH.of(tokens).logits[len(tokens) - 1].astype(np.float64)
        logits -= np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        for token in np.argsort(-logits, kind="stable")[:width].tolist():
            found.append((score + float(logits[token]), parent, token))
    return sorted(found, reverse=True)[:width]


@each_block_size
@each_mirror
@pytest.mark.parametrize("reorder", [by_forks, by_reorder])
def test_beams(block_size: int, mirror: bool, reorder: Callable[..., list[Any]]) -> None:
    """A beam search through shared blocks finds the beams that one with copied caches finds."""
    width = 4
    engine = Engine(512 // block_size, block_size, mirror=mirror)
    beams = [engine.admit(PROMPT)]
    scores = [0.0]
    engine.step(45, sampled=False)
    expected, expected_scores, forks = [PROMPT], [0.0], 0
    for _ in range(14):
        chosen = best_beams([each.tokens.tolist() for each in beams], scores, width)
        forks += width - len({parent for _, parent, _ in chosen})
        scores = [score for score, _, _ in chosen]
        beams = reorder(engine, beams, [parent for _, parent, _ in chosen], [token for _, _, token in chosen])
        right = best_beams(expected, expected_scores, width)
        expected = [[*expected[parent], token] for _, parent, token in right]
        expected_scores = [score for score, _, _ in right]
        assert [each.tokens.tolist() for each in beams] == expected
        copies = engine.pager.stats().copies
        engine.step(dict.fromkeys(beams, 1), sampled=False)
        assert engine.pager.stats().copies - copies < width, "no more than the partial blocks of those that part"
    assert forks > 6, "no beam ever had two children"
    engine.finish()


def test_beams_of_two_requests_beside_a_sample() -> None:
    """Rows that take no part stay as they are; one request's beams are reordered while the other's wait."""
    engine = Engine(128, 4)
    sample, *beams = engine.admit(PROMPT[:7]), engine.admit(PROMPT), engine.admit(PROMPT[:30])
    engine.step({sample: 7})
    engine.step(dict(zip(beams, [45, 30], strict=True)), sampled=False)
    groups, right = [[beam] for beam in beams], [[PROMPT], [PROMPT[:30]]]
    scores = [[0.0], [0.0]]
    for turn in range(8):
        which = turn % 2
        for group in (which, which) if turn < 4 else (0, 1):
            chosen = best_beams(right[group], scores[group], 3)
            parents, tokens = [parent for _, parent, _ in chosen], [token for _, _, token in chosen]
            scores[group] = [score for score, _, _ in chosen]
            groups[group] = by_reorder(engine, groups[group], parents, tokens)
            right[group] = [[*right[group][parent], token] for parent, token in zip(parents, tokens, strict=True)]
            assert [beam.tokens.tolist() for beam in groups[group]] == right[group]
            engine.step(dict.fromkeys(groups[group], 1), sampled=False)
        engine.step({sample: 1})
    check_answer(sample, PROMPT[:7], 9)
    engine.finish()


@each_block_size
def test_eviction_under_pressure(block_size: int) -> None:
    """Prompts that together need more than the pool: what was evicted is computed again, what is left is hit."""
    draw = np.random.default_rng(3)
    engine = Engine(96 // block_size, block_size)
    prefixes = [draw.integers(0, Llama.VOCABULARY, 32).tolist() for _ in range(4)]
    for number in range(24):
        prompt = [*prefixes[int(draw.choice(4, p=[0.55, 0.15, 0.15, 0.15]))], number, number + 1]
        sequence = engine.admit(prompt)
        engine.step(len(prompt) - sequence.num_cached)
        for _ in range(4):
            engine.step()
        check_answer(sequence, prompt, 5)
        sequence.release()
    stats = engine.pager.stats()
    assert stats.evicted_blocks > 8
    assert stats.hit_tokens > 100
    engine.finish()


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_decode_that_evicts_what_others_left(policy: str) -> None:
    """Growth takes the blocks of cached prompts one by one, which the next admit finds shorter."""
    engine = Engine(20, 4, policy=policy)
    engine.admit(PROMPT)
    engine.step(45)
    engine.sequences[0].release()
    other = engine.admit(range(100, 110))
    engine.step(10)
    for _ in range(38):
        engine.step()
    assert engine.pager.stats().evicted_blocks
    hits = engine.pager.match(PROMPT).num_tokens
    assert 0 < hits < 44
    again = engine.pager.try_admit(PROMPT)
    assert again is None, "12 blocks for the other, 20 in all"
    other.release()
    again = engine.admit(PROMPT)
    assert again.num_cached == hits
    engine.step(45 - hits)
    check_answer(again, PROMPT, 1)
    engine.finish()


def test_what_was_reset_or_forgotten_is_computed_again() -> None:
    engine = Engine()
    for end in (lambda: engine.pager.forget(PROMPT[:8]), engine.pager.reset):
        first = engine.admit(PROMPT)
        engine.step(45 - first.num_cached)
        end()
        second = engine.admit(PROMPT)
        assert second.num_cached < 8
        engine.step([1, 45 - second.num_cached])
        engine.step()
        check_answer(first, PROMPT, 3)
        check_answer(second, PROMPT, 2)
        first.release()
        second.release()
    engine.finish()


def test_duplicates_computed_side_by_side() -> None:
    """Two equal prompts in one step: the second keeps its own blocks, whoever comes third hits the first's."""
    engine = Engine()
    first, second = engine.admit(PROMPT), engine.admit(PROMPT)
    engine.step(45)
    third = engine.admit(PROMPT)
    assert third.block_ids[:11].tolist() == first.block_ids[:11].tolist() != second.block_ids[:11].tolist()
    first.release()
    engine.step([0, 1, 1])
    engine.step([0, 1, 1])
    check_answer(second, PROMPT, 3)
    check_answer(third, PROMPT, 2)
    engine.finish()


def test_identical_prompts_at_once_cost_one_prefill() -> None:
    """Who would compute what another is computing waits, and then hits it chunk by chunk."""
    engine = Engine(64, 4)
    first = engine.admit(PROMPT)
    computed, waiting = 0, 5
    for chunk in (20, 20, 5):
        assert isinstance(engine.pager.admit(PROMPT, wait=True), kvpager.Computing)
        engine.step({first: chunk})
        computed += chunk
    while waiting and isinstance(sequence := engine.pager.admit(PROMPT, wait=True), kvpager.Sequence):
        waiting -= 1
        engine.batch.add(engine.adopt(sequence, rank=waiting))
        computed += 45 - sequence.num_cached
    engine.step()
    assert (waiting, computed) == (0, 45 + 5)
    for rank, sequence in zip((4, 3, 2, 1, 0), engine.sequences[1:], strict=True):
        check_answer(sequence, PROMPT, 1, rank)
    engine.finish()


def test_a_mid_prefill_fork_shares_no_uncomputed_block() -> None:
    """A child of a half computed prompt computes the rest by itself, in blocks of its own where both write."""
    engine = Engine(64, 8)
    first = engine.admit(PROMPT)
    engine.step(20)
    child = engine.batch.fork([0], 1)[0]
    engine.adopt(child, 1)
    engine.step([10, 7])
    engine.step([15, 18])
    check_answer(first, PROMPT, 1)
    check_answer(child, PROMPT, 1, 1)
    engine.step()
    engine.finish()


def test_out_of_blocks_changes_nothing() -> None:
    engine = Engine(12, 4)
    first, second = engine.admit(PROMPT[:20]), engine.admit(PROMPT[20:45])
    engine.step([20, 25])
    with pytest.raises(kvpager.OutOfBlocks) as refused:
        engine.plan()
    assert list(refused.value.rows) == [0]
    engine.step([0, 1])
    second.preempt()
    engine.step({first: 1})
    check_answer(first, PROMPT[:20], 2)
    engine.finish()
