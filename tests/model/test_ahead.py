"""One step ahead: while a step runs, the next is planned, with placeholders for the tokens that nobody knows yet.

With ``late`` every kernel runs as late as possible: whatever the host does between plan and commit happens before the
kernel reads its step's arrays.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import kvpager

from .engine import TRUTH, Engine
from .llama import Llama
from .test_sharing import PROMPT, check_answer

OTHER = np.random.default_rng(4).integers(0, Llama.VOCABULARY, 30).tolist()
# Tables of a step are read as late as they may be, and updates as early: each is the harder way for what it reads.
pytestmark = pytest.mark.parametrize(("late", "mirror"), [(True, False), (False, True)], ids=["tables", "updates"])


def two(late: bool, mirror: bool, **how: Any) -> tuple[Engine, Any, Any]:
    """Two sequences past their prompts, and one step open that plans a position of each."""
    engine = Engine(**{"num_blocks": 64, "block_size": 4, **how}, late=late, mirror=mirror)
    first, second = engine.admit(PROMPT), engine.admit(OTHER)
    engine.plan({first: 45, second: 30})
    engine.plan()
    assert engine.commit() == [True, True]
    return engine, first, second


@pytest.mark.parametrize("buffers", [2, 3, 4])
@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_answers_are_those_of_the_synchronous_loop(late: bool, mirror: bool, buffers: int, block_size: int) -> None:
    engine, first, second = two(late, mirror, block_size=block_size, buffers=buffers)
    for _ in range(20):
        while len(engine.open) < buffers:
            engine.plan()
        engine.commit()
    engine.finish_steps()
    check_answer(first, PROMPT, 20 + buffers)
    check_answer(second, OTHER, 20 + buffers)
    engine.finish()


def test_chunks_are_planned_ahead_of_each_other(late: bool, mirror: bool) -> None:
    engine, first, second = two(late, mirror, buffers=3)
    third = engine.admit([*PROMPT[:20], *OTHER])
    assert third.num_cached == 20
    for chunk in (7, 11, 12):
        while len(engine.open) > 1:
            engine.commit()
        engine.plan({first: 1, second: 1, third: chunk})
    engine.plan()
    engine.finish_steps()
    check_answer(third, [*PROMPT[:20], *OTHER], 2)
    check_answer(first, PROMPT, len(first) - 45)
    engine.finish()


@pytest.mark.parametrize("reason", ["finished", "aborted"])
def test_a_sequence_ends_between_plan_and_commit(late: bool, mirror: bool, reason: str) -> None:
    """Its row is void; its frames go to another, which is planned while the old step is still to run."""
    engine, first, second = two(late, mirror, num_blocks=24)
    freed, committed = set(first.block_ids.tolist()), first.num_committed
    first.release(reason)
    known = engine.pager.match([*PROMPT, *TRUTH.generate(PROMPT, 9)])
    assert known.num_tokens == committed // 4 * 4, "what was planned and not committed is no hit"
    third = engine.admit(range(40))
    assert set(third.block_ids.tolist()) & freed
    engine.plan({second: 1, third: 40})
    assert engine.commit() == [False, True]
    assert engine.pager.match([*PROMPT, *TRUTH.generate(PROMPT, 9)]).num_tokens <= 44, (
        "what was not committed is no hit"
    )
    engine.plan()
    engine.finish_steps()
    check_answer(second, OTHER, 4)
    check_answer(third, list(range(40)), 2)
    engine.finish()


def test_the_stop_token_is_seen_one_step_late(late: bool, mirror: bool) -> None:
    """A step is already planned behind the last token: it is computed in vain and leaves nothing to hit."""
    engine, first, second = two(late, mirror)
    for _ in range(5):
        engine.plan()
        engine.commit()
    engine.plan()
    committed = first.num_committed
    first.release()
    assert engine.commit()[0] is False
    assert engine.commit()[0] is False
    again = engine.admit([*PROMPT, *TRUTH.generate(PROMPT, 20)])
    assert again.num_cached == committed // 4 * 4 == 48
    engine.plan({second: 1, again: 65 - again.num_cached})
    engine.finish_steps()
    check_answer(again, PROMPT, 21)
    engine.finish()


@pytest.mark.parametrize("resume", ["at once", "after the commit"])
def test_a_sequence_is_preempted_between_plan_and_commit(late: bool, mirror: bool, resume: str) -> None:
    engine, first, second = two(late, mirror)
    first.preempt()
    engine.settle()
    if resume == "at once":
        first.resume()
        assert engine.batch.add(first) == 0
        engine.plan({first: len(first) - first.num_planned, second: 1})
        assert engine.commit() == [False, True], "the row was planned before the preempt"
    else:
        engine.plan({second: 1})
        assert engine.commit() == [False, True]
        first.resume()
        engine.batch.add(first)
        engine.plan({first: len(first) - first.num_planned, second: 1})
        engine.commit()
    for _ in range(5):
        engine.plan()
        engine.commit()
    engine.finish_steps()
    check_answer(first, PROMPT, len(first) - 45)
    check_answer(second, OTHER, len(second) - 30)
    assert len(first) > 50
    engine.finish()


@pytest.mark.parametrize("by", ["batch", "sequence"])
def test_a_sequence_is_forked_between_plan_and_commit(late: bool, mirror: bool, by: str) -> None:
    """The child starts from the committed end, with blocks that the open step still writes."""
    engine, first, second = two(late, mirror)
    if by == "batch":
        child = engine.adopt(engine.batch.fork([0], 1)[0], rank=2)
    else:
        child = engine.adopt(first.fork()[0], rank=2)
        engine.batch.add(child)
    known = len(child)
    assert child.tokens.tolist() == first.tokens.tolist()[:known]
    assert known == 46
    engine.plan({first: 1, second: 1, child: 1})
    for _ in range(6):
        engine.commit()
        engine.plan()
    engine.finish_steps()
    check_answer(first, PROMPT, len(first) - 45)
    prompt = child.tokens.tolist()[:known]
    check_answer(child, prompt, len(child) - known, 2)
    assert child.tokens.tolist()[known] != first.tokens.tolist()[known]
    engine.finish()


def test_all_forks_of_an_open_step_write_in_the_next(late: bool, mirror: bool) -> None:
    """Four holders of the block that the running step writes: what it writes is copied too."""
    engine, first, second = two(late, mirror, block_size=16)
    children = [engine.adopt(each, rank) for rank, each in enumerate(engine.batch.fork([0], 3), start=1)]
    engine.plan(dict.fromkeys((first, second, *children), 1))
    engine.commit()
    engine.plan()
    engine.finish_steps()
    for rank, child in enumerate(children, start=1):
        check_answer(child, child.tokens.tolist()[:46], len(child) - 46, rank)
    check_answer(first, PROMPT, len(first) - 45)
    engine.finish()


@pytest.mark.parametrize("length", [20, 43, 45])
def test_a_sequence_is_cut_between_plan_and_commit(late: bool, mirror: bool, length: int) -> None:
    engine, first, second = two(late, mirror)
    first.truncate(length)
    engine.settle()
    first.extend([7, 7])
    engine.plan({first: length + 2 - first.num_planned, second: 1})
    assert engine.commit() == [False, True]
    engine.plan()
    engine.finish_steps()
    check_answer(first, [*PROMPT[:length], 7, 7], 2)
    engine.finish()


@pytest.mark.parametrize("good", range(4))
@pytest.mark.parametrize("block_size", [4, 16])
def test_drafts_one_step_ahead(late: bool, mirror: bool, good: int, block_size: int) -> None:
    """The next step is planned as if all drafts were right: its row is void if they were not."""
    engine, first, second = two(late, mirror, block_size=block_size)
    right = TRUTH.generate(PROMPT, 60)
    engine.commit()
    for _ in range(4):
        done = len(first) - 45
        drafts = right[done : done + 3]
        drafts[good:] = [(token + 1) % Llama.VOCABULARY for token in drafts[good:]]
        engine.plan({first: 4, second: 1}, drafts)
        engine.plan()  # a placeholder for each
        assert engine.commit() == [True, True]
        assert engine.commit() == [good == 3, True]
        assert len(first) - 45 == done + good + 1 + (good == 3)
    check_answer(first, PROMPT, len(first) - 45)
    check_answer(second, OTHER, len(second) - 30)
    engine.finish()


def test_placeholders_and_drafts_in_one_row(late: bool, mirror: bool) -> None:
    """The token that is not known yet, and drafts behind it."""
    engine, first, second = two(late, mirror)
    right = TRUTH.generate(PROMPT, 60)
    for _ in range(3):
        done = first.num_planned - 45
        engine.plan({first: 4, second: 1}, [-1, *right[done + 1 : done + 4], -1])
        assert engine.commit() == [True, True]
    engine.plan({first: 3, second: 1}, [-1, 0, 0, -1])
    engine.finish_steps()
    check_answer(first, PROMPT, len(first) - 45)
    check_answer(second, OTHER, len(second) - 30)
    engine.finish()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_step_is_cancelled(late: bool, mirror: bool, block_size: int) -> None:
    """It was never launched. What it took goes back, and the next step plans the same again."""
    engine, first, second = two(late, mirror, num_blocks=256 // block_size, block_size=block_size)
    for _ in range(6):
        engine.plan(launch=False)
        engine.cancel()
        engine.plan()
        engine.commit()
    engine.finish_steps()
    check_answer(first, PROMPT, 8)
    check_answer(second, OTHER, 8)
    engine.finish()


def test_a_step_with_copies_is_cancelled(late: bool, mirror: bool) -> None:
    """Its copies are made by the next one, or are not needed any more."""
    engine, first, second = two(late, mirror, block_size=16)
    child = engine.adopt(engine.batch.fork([0], 1)[0], 1)
    single = engine.adopt(second.fork()[0], 1)
    single.append(3)  # queued, handed out by the step that is cancelled
    engine.batch.add(single)
    launch = engine.plan({first: 1, second: 1, child: 1, single: 0}, launch=False)
    assert len(launch.copies) > 1
    engine.cancel()
    engine.commit()
    engine.plan({first: 1, second: 1, child: 1, single: len(single) - single.num_planned})
    engine.plan()
    engine.finish_steps()
    check_answer(first, PROMPT, len(first) - 45)
    check_answer(child, child.tokens.tolist()[:46], len(child) - 46, 1)
    engine.finish()


def test_reset_and_forget_between_plan_and_commit(late: bool, mirror: bool) -> None:
    engine, first, second = two(late, mirror)
    engine.pager.forget(PROMPT[:8])
    engine.plan()
    engine.commit()
    engine.pager.reset()
    engine.plan()
    engine.commit()
    third = engine.admit(PROMPT)
    assert third.num_cached == 0
    engine.plan({first: 1, second: 1, third: 45})
    engine.finish_steps()
    check_answer(first, PROMPT, len(first) - 45)
    check_answer(third, PROMPT, 1)
    engine.finish()


def churn(engine: Engine, draw: random.Random, number: int) -> list[tuple[list[int], list[int]]]:
    """A server one step ahead whose clients come, leave, fork and are preempted at any moment; answers that ended."""
    prompts: dict[Any, list[int]] = {}
    done: list[tuple[list[int], list[int]]] = []
    while number or engine.open:
        number = max(0, number - 1)
        running = [each for each in engine.sequences if each.state == "running"]
        event = draw.random()
        if number and event < 0.3 and len(running) < 8:
            prompt = PROMPT[: draw.randint(0, 20)] + [draw.randrange(256) for _ in range(draw.randint(1, 12))]
            if (sequence := engine.pager.try_admit(prompt)) is not None:
                engine.batch.add(engine.adopt(sequence))
                prompts[sequence] = prompt
        elif number and event < 0.4 and len(running) < 8 and running:
            parent = draw.choice(running)
            child = engine.adopt(parent.fork()[0])
            engine.batch.add(child)
            prompts[child] = prompts[parent]
        elif event < 0.5 and running:
            draw.choice(running).release("aborted")
        elif event < 0.6 and running:
            draw.choice(running).preempt()
        engine.settle()
        for each in engine.sequences:
            if each.state == "preempted" and len(engine.batch) < 8 and each.try_resume():
                engine.batch.add(each)
        running = [each for each in engine.sequences if each.state == "running"]
        counts = {each: max(1, min(len(each) - each.num_planned, draw.choice([4, 30]))) for each in running}
        for each in running:
            if len(each) == each.num_planned == each.num_committed:
                del counts[each]  # a child of which no step is open: its next token was its parent's
                each.truncate(len(each) - 1)
                engine.settle()
                counts[each] = 1
        if number and len(engine.open) < engine.batch.buffers:
            while True:
                try:
                    engine.plan(counts)
                    break
                except kvpager.OutOfBlocks as refused:
                    rows = list(refused.rows)
                counts = {each: count for each, count in counts.items() if engine.batch.row_of(each) not in rows}
        if len(engine.open) == engine.batch.buffers or not number or draw.random() < 0.2:
            if engine.open:
                engine.commit()
            for each in list(engine.sequences):
                if each.state == "running" and len(each) >= len(prompts[each]) + 10:
                    tokens = each.tokens.tolist()
                    done.append((tokens[: tokens.index(-1)] if -1 in tokens else tokens, prompts[each]))
                    each.release()
    return done


@pytest.mark.parametrize("block_size", [4, 8])
def test_churn_one_step_ahead(late: bool, mirror: bool, block_size: int, seed: int) -> None:
    engine = Engine(120 // block_size, block_size, late=late, mirror=mirror, buffers=2)
    done = churn(engine, random.Random(seed), 80)
    assert done
    for tokens, prompt in done:
        assert tokens == prompt + TRUTH.generate(prompt, len(tokens) - len(prompt))
    engine.finish()
