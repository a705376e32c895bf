"""Two tiers, one scene at a time: swaps, offloads, fetches, joins, failures, and what must not happen meanwhile.

What other engines got wrong with bytes (W2, W11, W12, W13), and with plans that fail or never end (L3, L4), is told
here as a scene that is right, and as the same scene with the mistake, which the comparisons see.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import kvpager
import kvpager.reference
from kvpager import Plan
from kvpager.reference.pool import Pool

from .engine import TRUTH
from .llama import Llama
from .test_sharing import PROMPT, check_answer
from .tiered import TieredEngine

SEEDS = range(12)
OTHER = np.random.default_rng(4).integers(0, Llama.VOCABULARY, 60).tolist()
FILLER = np.random.default_rng(6).integers(0, Llama.VOCABULARY, 160).tolist()
WRONG = r"nothing in block|something else in block|the host is wrong"


def compute(engine: TieredEngine, prompt: list[int], **how: Any) -> Any:
    """A sequence alone with all of its prompt computed."""
    sequence = engine.admit(prompt, into_batch=False)
    engine.compute(sequence, **how)
    return sequence


def offloaded(engine: TieredEngine, prompt: list[int]) -> None:
    """The prompt's full blocks are on the host, and not on the device any more."""
    compute(engine, prompt).release()
    engine.move(engine.pager.offload(1000))
    engine.settle()
    whole = len(prompt) // engine.block_size * engine.block_size
    compute(engine, FILLER[: engine.pager.num_blocks * engine.block_size]).release()
    engine.pager.forget(FILLER[: engine.block_size])
    engine.settle()
    assert engine.pager.match([*prompt[:whole], 1])[:2] == (0, 0)
    assert engine.pager.match([*prompt[:whole], 1]).num_host_tokens == whole


def fetch(engine: TieredEngine, prompt: list[int], **how: Any) -> Any:
    sequence = engine.admit(prompt, into_batch=False, fetch=True, **how)
    assert sequence.state == "fetching"
    engine.adopt_plan(sequence.fetch)
    return sequence


def decode(engine: TieredEngine, sequence: Any, number: int) -> None:
    engine.batch.add(sequence)
    for _ in range(number):
        engine.step({sequence: len(sequence) - sequence.num_planned})


def is_seen(error: AssertionError, fault: bool) -> bool:
    """Whether wrong bytes were found where there is a fault. Anything else is raised."""
    if not fault or not re.search(WRONG, str(error)):
        raise error
    return True


# What a swap, an offload and a fetch bring.


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_sequence_goes_out_and_comes_back(block_size: int, dtype: Any) -> None:
    """Whoever had its blocks meanwhile: it goes on as if nothing had been."""
    for seed in SEEDS:
        engine = TieredEngine(64 // block_size, block_size, num_host_blocks=64 // block_size, seed=seed, dtype=dtype)
        sequence = engine.admit(PROMPT)
        engine.step(45)
        engine.step()
        engine.move(sequence.swap_out())
        assert sequence.state == "swapped"
        compute(engine, OTHER[:60]).release()
        engine.move(sequence.swap_in())
        decode(engine, sequence, 6)
        right = engine.truth.generate(PROMPT, 8)
        assert sequence.tokens.tolist() == [*PROMPT, *right]
        engine.finish()


def test_a_swapped_sequence_shares_what_it_can_on_both_ways() -> None:
    """Two sequences with one prefix: the host keeps it once, and so does the device afterwards."""
    engine = TieredEngine(64, 4)
    first, second = compute(engine, PROMPT), compute(engine, [*PROMPT[:20], *OTHER[:20]])
    engine.move(first.swap_out())
    plan = second.swap_out()
    assert len(plan) == 5, "five blocks are on the host already"
    engine.move(plan)
    engine.move(first.swap_in())
    plan = second.swap_in()
    assert len(plan) <= 5
    engine.move(plan)
    assert first.block_ids[:5].tolist() == second.block_ids[:5].tolist()
    engine.finish()


def test_forks_of_a_sequence_that_came_back() -> None:
    """Children share what arrived, the partial block included: who writes first copies it."""
    for seed in SEEDS:
        engine = TieredEngine(64, 8, seed=seed)
        sequence = engine.admit(PROMPT)
        engine.step(45)
        engine.move(sequence.swap_out())
        engine.pager.forget(PROMPT[:8])  # in both tiers: the sequence keeps what is its own
        engine.settle()
        engine.move(sequence.swap_in())
        engine.batch.add(sequence)
        children = [engine.adopt(each, rank) for rank, each in enumerate(engine.batch.fork([0], 2), start=1)]
        for each in children:
            each.truncate(44)
            each.append(PROMPT[44])
        for _ in range(5):
            engine.step({each: len(each) - each.num_planned for each in [sequence, *children]})
        check_answer(sequence, PROMPT, 6)
        for rank, each in enumerate(children, start=1):
            check_answer(each, PROMPT, 5, rank)
        engine.finish()


def test_a_fork_while_its_sibling_is_swapped_out() -> None:
    """Both hold the partial block. The one that stays writes, and copies it first, for the mover still reads it."""
    for seed in SEEDS:
        engine = TieredEngine(64, 8, seed=seed)
        sequence = compute(engine, PROMPT)
        child = engine.adopt(sequence.fork()[0])
        plan = engine.adopt_plan(sequence.swap_out())
        assert plan is not None
        ticket = engine.send(plan)
        child.append(7)
        engine.compute(child, ahead=True)
        assert child.block_ids[5] != plan.source_ids[-1]
        assert ticket is not None
        engine.wait(ticket)
        engine.move(sequence.swap_in())
        assert sequence.state == "running"
        engine.finish()


@pytest.mark.parametrize("chunk", [3, 8, 40])
def test_a_chunked_prefill_behind_a_fetch(chunk: int) -> None:
    for seed in SEEDS:
        engine = TieredEngine(20, 4, seed=seed)
        offloaded(engine, PROMPT[:36])
        sequence = fetch(engine, PROMPT)
        engine.finish_plans()
        assert (sequence.state, sequence.num_cached, sequence.num_committed) == ("running", 36, 36)
        engine.batch.add(sequence)
        while sequence.num_planned < 45:
            engine.step({sequence: min(chunk, 45 - sequence.num_planned)})
        engine.step()
        check_answer(sequence, PROMPT, 2)
        engine.finish()


def test_prompts_join_a_fetch() -> None:
    """They hold the same blocks, each up to where they agree, and the copy is made once."""
    for seed in SEEDS:
        engine = TieredEngine(40, 4, seed=seed)
        offloaded(engine, PROMPT[:36])
        first = fetch(engine, PROMPT)
        second = fetch(engine, [*PROMPT[:22], *OTHER[:9]])
        assert second.fetch == first.fetch
        gone = fetch(engine, PROMPT[:30])
        gone.release()
        engine.finish_plans()
        assert (first.num_cached, second.num_cached) == (36, 20)
        assert engine.pager.stats().fetched_blocks == 9
        for sequence in (first, second):
            decode(engine, sequence, 3)
        check_answer(second, [*PROMPT[:22], *OTHER[:9]], 3)
        engine.finish()


def test_a_fetch_that_fails_in_some_blocks() -> None:
    """L3: what arrived in front of the first gap is a hit, the rest is computed; the plan ends once."""
    lengths = set()
    for seed in range(40):
        engine = TieredEngine(20, 4, seed=seed)
        offloaded(engine, PROMPT[:36])
        engine.mover._fail = 0.9
        sequence = fetch(engine, PROMPT)
        plan = sequence.fetch
        ticket = engine.send(plan)
        assert ticket is not None
        engine.wait(ticket)
        arrived = [*ticket.done.tolist(), False].index(False)
        assert sequence.state == "running"
        assert sequence.num_cached == sequence.num_committed == 4 * arrived
        assert engine.pager.match(PROMPT).num_tokens == 4 * arrived
        assert engine.pager.complete(plan) is False
        lengths.add(arrived)
        decode(engine, sequence, 2)
        check_answer(sequence, PROMPT, 2)
        engine.finish()
    assert len(lengths) > 3


def test_both_tiers_under_pressure() -> None:
    """Eight prompts take turns on a device with room for two and a host with room for five."""
    draw = np.random.default_rng(5)
    prompts = [draw.integers(0, Llama.VOCABULARY, 33).tolist() for _ in range(8)]
    for seed in range(3):
        engine = TieredEngine(20, 4, num_host_blocks=40, seed=seed)
        for turn in range(40):
            sequence = engine.admit(prompts[turn * 5 % 8 if turn % 3 else turn % 2], into_batch=False, fetch=True)
            if sequence.fetch is not None:
                engine.adopt_plan(sequence.fetch)
                engine.finish_plans()
            engine.compute(sequence, ahead=turn % 2 == 0)
            sequence.release()
            if (plan := engine.pager.offload(8)) is not None:
                engine.adopt_plan(plan)
                engine.send(plan)
            engine.poll()
        stats = engine.pager.stats()
        assert stats.fetched_blocks > 20
        assert stats.host_evicted_blocks > 0
        engine.finish()


# What must not happen meanwhile.


@pytest.mark.parametrize("fault", [False, True])
def test_w2_a_block_is_not_handed_out_while_it_is_copied(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """X-out(b) in flight; R(b); A by another: the copy reads what was there, for b is not handed out before it ends."""
    if fault:
        monkeypatch.setattr(Pool, "pin", lambda pool, block: None)
        monkeypatch.setattr(Pool, "unpin", lambda pool, block: None)
        monkeypatch.setattr(kvpager.reference.Pager, "check", lambda pager: [])
    wrong = 0
    for seed in SEEDS:
        engine = TieredEngine(16, 4, seed=seed, pager=kvpager.reference.Pager)
        try:
            compute(engine, PROMPT).release()
            plan = engine.adopt_plan(engine.pager.offload(100))
            assert plan is not None
            engine.send(plan)
            room = engine.pager.stats().free_blocks + engine.pager.stats().evictable_blocks
            assert room == (16 if fault else 5)
            other = engine.admit(OTHER[: 4 * room], into_batch=False)
            engine.compute(other, ahead=True)
            assert fault or not set(other.block_ids.tolist()) & set(plan.source_ids.tolist())
            other.release()
            engine.finish_plans()
            engine.drain()
            engine.pager.forget(OTHER[:4])
            again = engine.admit([*PROMPT[:44], 1], into_batch=False, fetch=True)
            engine.adopt_plan(again.fetch)
            engine.finish_plans()
            engine.finish()
        except AssertionError as error:
            wrong += is_seen(error, fault)
    assert bool(wrong) == fault


def test_w2_a_sequence_that_is_released_while_it_is_swapped_out() -> None:
    """Its blocks come back when the copy has ended, in both tiers, and not before."""
    for seed in SEEDS:
        engine = TieredEngine(16, 4, seed=seed)
        sequence = compute(engine, PROMPT)
        plan = engine.adopt_plan(sequence.swap_out())
        assert plan is not None
        engine.send(plan)
        sequence.release()
        assert engine.pager.try_admit(OTHER[:17]) is None
        engine.wait()
        compute(engine, OTHER).release()
        engine.finish()


@pytest.mark.parametrize("fault", [False, True])
def test_w11_a_copy_does_not_write_what_an_open_step_reads(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's sequence is released while its kernel has still to run; a fetch wants frames."""
    if fault:
        monkeypatch.setattr(Pool, "is_fenced", lambda pool, block: False)
        monkeypatch.setattr(kvpager.reference.Pager, "check", lambda pager: [])
    wrong = 0
    for seed in SEEDS:
        engine = TieredEngine(24, 4, seed=seed, late=True, pager=kvpager.reference.Pager)
        offloaded(engine, PROMPT[:36])
        sequence = engine.admit(OTHER[:50])
        engine.step({sequence: 50})
        engine.plan({sequence: 1})
        sequence.release()
        try:
            if not fault:
                assert engine.pager.num_fenced_blocks == 13
            waiting = engine.pager.try_admit(PROMPT, fetch=True)
            assert waiting is not None
            engine.adopt_plan(engine.adopt(waiting).fetch)
            engine.finish_plans()
            engine.commit()
            engine.finish()
        except AssertionError as error:
            wrong += is_seen(error, fault)
    assert bool(wrong) == fault


def test_w11_a_fetch_waits_where_nothing_but_fenced_blocks_is_left() -> None:
    """All or nothing: it is refused until the step is committed."""
    engine = TieredEngine(13, 4, late=True)
    offloaded(engine, PROMPT[:36])
    sequence = engine.admit(OTHER[:40])
    engine.step({sequence: 40})
    engine.plan({sequence: 1})
    sequence.release()
    with pytest.raises(kvpager.OutOfBlocks) as refused:
        engine.pager.admit(PROMPT, fetch=True)
    assert refused.value.needed == 9
    engine.commit()
    fetch(engine, PROMPT)
    engine.finish()


@pytest.mark.parametrize("fault", [False, True])
def test_w12_a_copy_comes_behind_the_kernel_that_fills_its_source(fault: bool) -> None:
    """A prefill that is committed ahead of its kernel, and swapped out at once: only ``after=`` tells the mover."""

    class Engine(TieredEngine):
        def after(self, plan: Plan) -> Any:
            return None if fault else super().after(plan)

    wrong = 0
    for seed in SEEDS:
        engine = Engine(32, 4, seed=seed, late=True)
        try:
            sequence = compute(engine, PROMPT, ahead=True)
            engine.move(sequence.swap_out())
            engine.move(sequence.swap_in())
            engine.finish()
        except AssertionError as error:
            wrong += is_seen(error, fault)
    assert bool(wrong) == fault


@pytest.mark.parametrize("fault", ["", "the last blocks", "another order"])
def test_w13_a_fetch_fills_the_positions_that_it_was_planned_for(fault: str) -> None:
    """[p, p+n) of the table, not its last n blocks; a plan names them one by one."""

    class Engine(TieredEngine):
        def told(self, plan: Plan) -> Plan:
            if plan.kind != "fetch" or not fault:
                return plan
            turned = np.roll(plan.destination_ids, 1)
            last = sequence.block_ids[-len(plan) :]
            return dataclasses.replace(plan, destination_ids=last if fault == "the last blocks" else turned)

    engine = Engine(20, 4)
    offloaded(engine, PROMPT[:36])
    sequence = fetch(engine, PROMPT)
    table, plan = sequence.block_ids.tolist(), sequence.fetch
    assert plan.destination_ids.tolist() == table[:9] != table[-9:]
    if fault:
        with pytest.raises(AssertionError, match=f"K of layer 0, position 0: .*{WRONG}"):
            engine.finish_plans()
    else:
        engine.finish_plans()
        decode(engine, sequence, 2)
        check_answer(sequence, PROMPT, 2)
        engine.finish()


@pytest.mark.parametrize("how", ["abandon", "fail", "reclaim"])
def test_l4_a_mover_that_never_answers_cannot_spoil_what_comes_later(how: str) -> None:
    """The deadline passes, the frames go to quarantine, and the mover writes there, late.

    Where the caller says that the plan failed, or vouches for the mover too early, somebody else has these frames then.
    """
    wrong = 0
    for seed in SEEDS:
        engine = TieredEngine(20, 4, seed=seed)
        offloaded(engine, PROMPT[:36])
        engine.mover._never = 1.0
        sequence = fetch(engine, PROMPT)
        plan = sequence.fetch
        engine.send(plan)
        engine.poll()
        if how == "fail":
            assert engine.pager.fail(plan)
        else:
            engine.give_up(plan)
            assert sequence.state == "preempted"
            assert engine.pager.stats().quarantined_blocks == 9
            if how == "reclaim":
                assert engine.pager.reclaim(plan)
        sequence.release()
        try:
            room = engine.pager.stats().free_blocks
            assert room == (11 if how == "abandon" else 20)
            other = compute(engine, OTHER[: 4 * room - 10])
            engine.mover.thaw()
            while engine.mover.run_some(1):
                pass
            engine.settle()
            other.release()
            engine.finish_plans()
            assert engine.pager.fail(plan) is False
            engine.finish()
        except AssertionError as error:
            wrong += is_seen(error, how != "abandon")
    assert bool(wrong) == (how != "abandon")


def test_a_swap_out_that_never_ends_leaves_the_sequence_where_it_was() -> None:
    for seed in SEEDS:
        engine = TieredEngine(20, 4, seed=seed, never=1.0)
        sequence = compute(engine, PROMPT)
        plan = engine.adopt_plan(sequence.swap_out())
        assert plan is not None
        engine.send(plan)
        engine.give_up(plan)
        assert sequence.state == "running"
        assert engine.pager.stats().host_quarantined_blocks == 12
        sequence.append(TRUTH.generate(PROMPT, 1)[0])
        decode(engine, sequence, 3)
        check_answer(sequence, PROMPT, 4)
        engine.finish()
