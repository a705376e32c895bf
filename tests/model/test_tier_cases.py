"""What other engines got wrong with two tiers: wrong bytes (W..), and plans that fail, never end or find no room (L..).

Each is a scene that is right, and mostly the same scene with the mistake, which the comparisons must see.
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
from .test_sharing import PROMPT, check_answer
from .test_tiers import OTHER, SEEDS, compute, decode, fetch, offloaded
from .tiered import TieredEngine

WRONG = r"nothing in block|something else in block|the host is wrong"


def is_seen(error: AssertionError, fault: bool) -> bool:
    """Whether wrong bytes were found where there is a fault. Anything else is raised."""
    if not fault or not re.search(WRONG, str(error)):
        raise error
    return True


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


def test_w4_the_room_for_a_fetch_is_not_made_of_what_it_reads() -> None:
    """Both tiers are full: the device evicts to make room, and an offload wants room on the host meanwhile."""
    for seed in SEEDS:
        engine = TieredEngine(16, 4, num_host_blocks=9, seed=seed)
        offloaded(engine, PROMPT[:36])
        compute(engine, OTHER[:60]).release()
        assert (engine.pager.stats().free_blocks, engine.pager.stats().host_free_blocks) == (1, 0)
        sequence = fetch(engine, PROMPT)
        assert engine.pager.offload(100) is None
        assert engine.pager.stats().host_evicted_blocks == 0
        engine.finish_plans()
        decode(engine, sequence, 2)
        check_answer(sequence, PROMPT, 2)
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


@pytest.mark.parametrize("fault", [False, True])
def test_a_fetch_that_is_reported_at_once_is_ordered_before_the_kernels(fault: bool) -> None:
    """No need to wait for the copy, where the mover makes the compute stream wait: ``order``."""
    wrong = 0
    for seed in SEEDS:
        engine = TieredEngine(20, 4, seed=seed, late=True)
        offloaded(engine, PROMPT[:36])
        sequence = fetch(engine, PROMPT)
        plan = sequence.fetch
        try:
            assert engine.pager.start(plan)
            ticket = engine.mover.submit(plan)
            if not fault:
                engine.mover.order(engine.kernels, ticket)
            # There as soon as the stream gets here, for all that is asked on the CPU.
            engine.promise(lambda: None, set(plan.destination_ids.tolist()))
            assert engine.pager.complete(plan)
            engine.planned_plans.remove(plan)
            sequence.append(engine.compute(sequence, ahead=True))
            engine.compute(sequence)
            check_answer(sequence, PROMPT, 1)
            assert engine.mover.wait(1.0) == [ticket]
            engine.finish()
        except AssertionError as error:
            wrong += is_seen(error, fault)
    assert bool(wrong) == fault


def test_sequences_whose_fetch_failed_share_blocks_that_none_may_write() -> None:
    """Who joined a fetch holds its destinations: without their content, each but the last needs others to write."""
    engine = TieredEngine(20, 4)
    offloaded(engine, PROMPT[:36])
    first, second = fetch(engine, PROMPT), fetch(engine, [*PROMPT[:36], 5])
    assert first.block_ids[:9].tolist() == second.block_ids[:9].tolist()
    engine.cancel_plan(first.fetch)
    assert (first.state, second.state) == ("running", "running")
    with pytest.raises(kvpager.OutOfBlocks):
        first.slots(0, 45)
    second.release()
    engine.compute(first)
    engine.finish()


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


@pytest.mark.parametrize("state", ["swapping_out", "swapped", "swapping_in", "fetching"])
@pytest.mark.parametrize("started", [False, True])
def test_l12_a_sequence_leaves_in_the_middle(state: str, started: bool) -> None:
    """What it has in either tier comes back, once the mover is done with it; nothing of it is spoiled for others."""
    for seed in SEEDS:
        engine = TieredEngine(24, 4, seed=seed)
        offloaded(engine, PROMPT[:36])
        other = compute(engine, [*PROMPT[:8], *OTHER[:20]])
        sequence = fetch(engine, PROMPT) if state == "fetching" else compute(engine, PROMPT)
        plan = sequence.fetch if state == "fetching" else engine.adopt_plan(sequence.swap_out())
        if state in ("swapped", "swapping_in"):
            engine.finish_plans()
        if state == "swapping_in":
            compute(engine, OTHER[:60]).release()
            plan = engine.adopt_plan(sequence.swap_in())
        assert sequence.state == state
        if started and plan in engine.planned_plans:
            engine.send(plan)
        sequence.release("aborted")
        engine.settle()
        engine.finish_plans()
        stats = engine.pager.stats()
        assert stats.host_active_blocks == stats.host_writing_blocks == stats.writing_blocks == 0
        assert stats.active_blocks == len(other.block_ids)
        decode(engine, other, 3)
        engine.finish()


def test_l13_a_swap_out_that_the_host_has_no_room_for() -> None:
    """A typed refusal before anything moves, each time; the way out is to recompute."""
    engine = TieredEngine(32, 4, num_host_blocks=20)
    other = compute(engine, OTHER[:40])
    engine.move(other.swap_out())
    sequence = engine.admit(PROMPT)
    engine.step(45)
    for _ in range(3):
        before = engine.pager.dump(full=True)
        with pytest.raises(kvpager.OutOfBlocks) as refused:
            sequence.swap_out()
        assert (refused.value.tier, refused.value.needed, refused.value.free) == ("host", 12, 10)
        assert engine.pager.dump(full=True) == before
    sequence.preempt()
    compute(engine, OTHER[:60]).release()
    sequence.resume()
    decode(engine, sequence, 3)
    check_answer(sequence, PROMPT, 4)
    other.release()
    engine.finish()
