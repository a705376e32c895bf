"""Steps that are each committed before the next is planned: chunks, drafts, cuts, preemption, and mixes of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import kvpager

from .engine import TRUTH, Engine
from .llama import Llama
from .test_sharing import PROMPT, answer, check_answer, each_block_size, each_mirror


@each_block_size
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 13, 17, 33, 44, 45])
def test_chunked_prefill(block_size: int, chunk: int) -> None:
    """Chunks of any size, while another sequence decodes; a third hits what is committed before the end."""
    engine = Engine(256 // block_size, block_size)
    other = engine.admit(range(60, 70))
    engine.step(10)
    first, third = engine.admit(PROMPT), None
    while first.num_planned < 45:
        engine.step({first: min(chunk, 45 - first.num_planned), other: 1})
        if third is None and first.num_committed >= 23:
            third = engine.admit([*PROMPT[:40], 1, 2])
            assert third.num_cached == min(first.num_committed, 40) // block_size * block_size
    assert third is not None
    engine.step({first: 1, other: 1, third: 42 - third.num_cached})
    check_answer(first, PROMPT, 2)
    check_answer(third, [*PROMPT[:40], 1, 2], 1)
    check_answer(other, list(range(60, 70)), len(other) - 10)
    engine.finish()


def test_chunks_of_every_size_at_once() -> None:
    """Eight rows of one prompt, each cut otherwise, in tenants that share nothing."""
    engine = Engine(128, 4)
    rows = [engine.admit(PROMPT, namespace=bytes([chunk])) for chunk in range(3, 11)]
    while any(each.num_planned < 45 for each in rows):
        engine.step({each: min(chunk, 45 - each.num_planned) for chunk, each in enumerate(rows, start=3)})
    for each in rows:
        check_answer(each, PROMPT, 1)
    engine.finish()


@each_block_size
@pytest.mark.parametrize("good", range(5))
def test_drafts(block_size: int, good: int) -> None:
    """Four drafts a step, so many of them right: answers and cached blocks are those of a loop without drafts."""
    engine = Engine(256 // block_size, block_size)
    first = engine.admit(PROMPT)
    engine.step(45)
    right = TRUTH.generate(PROMPT, 40)
    for _ in range(5):
        done = len(first) - 45
        drafts = right[done : done + 4]
        drafts[good:] = [(token + 1) % Llama.VOCABULARY for token in drafts[good:]]
        engine.step(5, drafts)
        assert len(first) - 45 == done + good + 1
    check_answer(first, PROMPT, 6 + 5 * good)
    again = engine.admit([*first.tokens.tolist(), 1])
    assert again.num_cached == first.num_committed // block_size * block_size
    engine.step({first: 1, again: len(again) - again.num_cached})
    engine.finish()


@each_block_size
def test_drafts_behind_nothing_sampled(block_size: int) -> None:
    """Drafts alone, when the last commit brought no token."""
    engine = Engine(256 // block_size, block_size)
    first = engine.admit(PROMPT)
    engine.step(45, sampled=False)
    right = TRUTH.generate(PROMPT, 10)
    engine.step(3, [*right[:2], right[2] ^ 1])
    assert answer(first, PROMPT) == right[:3]
    engine.step(2, [right[3] ^ 1])
    check_answer(first, PROMPT, 4)
    engine.finish()


@each_block_size
def test_drafts_of_a_fork_are_written_to_blocks_of_its_own(block_size: int) -> None:
    engine = Engine(256 // block_size, block_size)
    first = engine.admit(PROMPT)
    engine.step(45)
    right = TRUTH.generate(PROMPT, 20)
    child = engine.adopt(engine.batch.fork([0], 1)[0])
    engine.step({first: 4, child: 4}, [*right[1:4], 1, 2, 3])
    assert len(first) == 45 + 5
    engine.step({first: 1, child: 4}, right[len(child) - 45 : len(child) - 42])
    check_answer(first, PROMPT, 6)
    check_answer(child, PROMPT, len(child) - 45)
    engine.finish()


@each_block_size
@pytest.mark.parametrize("length", [1, 15, 16, 17, 44, 45, 46, 50])
def test_truncation(block_size: int, length: int) -> None:
    """Cut anywhere, into published blocks too, and go on with other tokens; who shares the blocks notices nothing."""
    engine = Engine(256 // block_size, block_size)
    first = engine.admit(PROMPT)
    engine.step(45)
    for _ in range(6):
        engine.step()
    before = first.tokens.tolist()
    child = engine.adopt(engine.batch.fork([0], 1)[0])
    child.truncate(length)
    child.extend([3, 1, 4])
    engine.step({first: 1, child: len(child) - child.num_planned})
    for _ in range(3):
        engine.step()
    check_answer(first, PROMPT, 11)
    check_answer(child, [*before[:length], 3, 1, 4], 4)
    first.truncate(length)
    first.extend([9, 9])
    engine.step({first: len(first) - first.num_planned, child: 1})
    check_answer(first, [*before[:length], 9, 9], 1)
    engine.finish()


@each_block_size
@pytest.mark.parametrize("done", [0, 7, 45, 50])
def test_preempt_and_resume(block_size: int, done: int) -> None:
    """Preempted in the prompt or in the answer, its blocks used by another, resumed and computed again."""
    engine = Engine(80 // block_size, block_size)
    first = engine.admit(PROMPT)
    if done:
        engine.step(min(done, 45))
    while first.num_planned < done:
        engine.step()
    first.preempt()
    other = engine.admit(range(100, 160))
    engine.step(60)
    engine.step()
    assert first.try_resume() is None
    other.release()
    first.resume()
    cached = first.num_cached
    assert cached < 45
    engine.batch.add(first)
    engine.step(len(first) - cached)
    while len(first) < 45 + 8:
        engine.step()
    check_answer(first, PROMPT, 8)
    engine.finish()


def test_preempted_and_resumed_with_its_blocks_still_cached() -> None:
    engine = Engine()
    first = engine.admit(PROMPT)
    engine.step(45)
    first.preempt()
    first.resume()
    assert first.num_cached == 44
    engine.batch.add(first)
    engine.step(2)
    check_answer(first, PROMPT, 2)
    assert engine.pager.stats().recomputed_tokens == 1
    engine.finish()


@each_mirror
def test_reserve(mirror: bool) -> None:
    """Blocks ahead of the tokens: the slots that a device would compute from the table are those of the steps."""
    engine = Engine(64, 4, mirror=mirror)
    first, second = engine.admit(PROMPT), engine.admit(PROMPT[:6])
    engine.step({first: 45, second: 6})
    child = engine.adopt(engine.batch.fork([1], 1)[0])
    engine.batch.reserve(10)
    ahead = {each: (each.num_planned, each.block_ids.tolist()) for each in (first, second, child)}
    needed = engine.batch.blocks_needed()
    assert needed == 0
    for _ in range(10):
        engine.step()
    for each, (start, table) in ahead.items():
        assert len(table) == -(-(start + 10) // 4)
        assert each.block_ids[: len(table)].tolist() == table, "reserved blocks are those that are written"
    check_answer(first, PROMPT, 11)
    check_answer(second, PROMPT[:6], 11)
    engine.finish()


def test_reserved_and_never_used() -> None:
    """Blocks that were only reserved go back with a truncate or a preempt, and hold nothing that is read."""
    engine = Engine(20, 4)
    first = engine.admit(PROMPT[:9])
    engine.step(9)
    engine.batch.reserve(30)
    child = engine.adopt(engine.batch.fork([0], 1)[0])
    engine.step()
    assert engine.pager.try_admit(range(60)) is None
    first.truncate(7)
    first.append(5)
    assert engine.pager.can_admit(range(60))
    engine.step()
    engine.batch.reserve([30, 0])
    assert not engine.pager.can_admit(range(60))
    first.preempt()
    assert engine.pager.can_admit(range(60))
    engine.step({child: 1})
    check_answer(child, PROMPT[:9], 4)
    engine.finish()


@each_mirror
def test_rows_move(mirror: bool) -> None:
    """Sequences end, rows are condensed, others take their places: tables follow."""
    engine = Engine(128, 4, mirror=mirror)
    rows = [engine.admit([number, *PROMPT[:number]]) for number in range(8)]
    engine.step({each: len(each) for each in rows})
    for number in (0, 3, 5):
        rows[number].release()
    engine.step({each: 1 for each in rows if each.state == "running"})
    assert len(engine.batch.condense()) == 2
    engine.step()
    new = engine.admit(PROMPT)
    removed = rows[6]
    engine.batch.remove(removed)
    engine.step({new: 45, rows[1]: 1})
    engine.batch.add(removed)
    engine.step()
    check_answer(removed, [6, *PROMPT[:6]], len(removed) - 7)
    check_answer(rows[7], [7, *PROMPT[:7]], len(rows[7]) - 8)
    engine.finish()


@each_mirror
@pytest.mark.parametrize("late", [False, True])
def test_two_batches_on_one_device(mirror: bool, late: bool) -> None:
    """One prefills, the other decodes one step ahead; who is through moves over. Steps run as they were planned."""
    engine = Engine(64, 8, batches=2, mirror=mirror, late=late)
    prefill, decode = engine.batches
    first = engine.admit(PROMPT[:20])
    engine.step(20)
    prefill.remove(first)
    decode.add(first)
    second, third = engine.admit(PROMPT), engine.admit(range(40))
    assert second.num_cached == 16
    for chunk in (10, 10, 9):
        engine.batch = prefill
        engine.plan({second: chunk, third: chunk})
        engine.batch = decode
        engine.plan()
        engine.commit()
        engine.commit()
    for each in (second, third):
        prefill.remove(each)
        decode.add(each)
    engine.plan({first: 1, second: 1, third: 40 - third.num_planned})
    for _ in range(4):
        engine.plan()
        engine.commit()
    engine.finish_steps()
    for each, prompt in ((first, PROMPT[:20]), (second, PROMPT), (third, list(range(40)))):
        check_answer(each, prompt, len(each) - len(prompt))
        assert len(each) >= len(prompt) + 5
    engine.finish()


def test_single_calls_among_steps() -> None:
    """A sequence computed alone, by append and commit, beside a batch, and then in its row."""
    engine = Engine()
    first, alone = engine.admit(PROMPT), engine.admit(PROMPT[:30], into_batch=False)
    engine.step(45)
    alone.append(engine.compute(alone))
    child = engine.adopt(alone.fork()[0])
    for _ in range(5):
        engine.step()
        alone.append(engine.compute(alone))
        child.append(engine.compute(child) ^ 1)
    engine.batch.add(alone)
    engine.batch.add(child)
    engine.step()
    check_answer(alone, PROMPT[:30], 7)
    check_answer(first, PROMPT, 7)
    engine.finish()


def mixed(engine: Engine, draw: random.Random, number: int) -> list[tuple[Any, list[int]]]:
    """Prefill chunks, decodes and drafts in the same steps, with sequences that come and go; those that are done."""
    prefixes = [[draw.randrange(256) for _ in range(16)] for _ in range(2)]
    prompts: dict[Any, list[int]] = {}
    done: list[tuple[Any, list[int]]] = []
    for _ in range(number):
        running = [each for each in engine.sequences if each.state == "running"]
        waiting = [each for each in engine.sequences if each.state == "preempted"]
        if waiting and len(running) < 8 and waiting[0].try_resume():
            engine.batch.add(waiting[0])
            running.append(waiting[0])
        elif len(running) < 8 and draw.random() < 0.4:
            prompt = draw.choice(prefixes)[: draw.randint(0, 16)] + [
                draw.randrange(256) for _ in range(draw.randint(1, 20))
            ]
            if (sequence := engine.pager.try_admit(prompt)) is not None:
                engine.batch.add(engine.adopt(sequence))
                prompts[sequence] = prompt
                running.append(sequence)
        counts, drafts = {}, {}
        for each in running:
            known = len(each) - each.num_planned
            counts[each] = min(known, draw.choice([1, 3, 30]))
            if counts[each] == known and draw.random() < 0.4:
                right = TRUTH.generate(each.tokens.tolist(), draw.randint(1, 3))
                drafts[each] = [token if draw.random() < 0.7 else 0 for token in right]
                counts[each] += len(right)
        while True:
            in_order = sorted(counts, key=lambda each: engine.batch.row_of(each))
            try:
                engine.step(counts, [token for each in in_order for token in drafts.get(each, [])])
                break
            except kvpager.OutOfBlocks:
                youngest = max(counts, key=lambda each: each.id)
                youngest.preempt()
                del counts[youngest]
        for each in running:
            if each.state == "running" and len(each) >= len(prompts[each]) + 12:
                done.append((each.tokens.tolist(), prompts[each]))
                each.release()
    return done


@each_block_size
@each_mirror
def test_mixed_batches_under_pressure(block_size: int, mirror: bool, seed: int) -> None:
    engine = Engine(144 // block_size, block_size, mirror=mirror)
    done = mixed(engine, random.Random(seed), 60)
    assert len(done) > 5
    for tokens, prompt in done:
        assert tokens == prompt + TRUTH.generate(prompt, len(tokens) - len(prompt))
    engine.finish()


@each_block_size
def test_updates_alone_keep_a_table_right(block_size: int) -> None:
    """Rows that a step leaves out as well."""
    engine = Engine(144 // block_size, block_size, mirror=True)
    launches = []
    plan = engine.plan

    def plan_and_compare(*args: Any, **how: Any) -> Any:
        launch = plan(*args, **how)
        for each in engine.sequences:
            if each.state == "running":
                table = each.block_ids.tolist()
                assert engine.mirror[engine.batch.row_of(each), : len(table)].tolist() == table
        launches.append(len(launch.step.updates))
        return launch

    engine.plan = plan_and_compare  # type: ignore[method-assign]
    mixed(engine, random.Random(5), 40)
    engine.finish()
    assert np.mean(launches) < 10, "updates are those entries that changed"
