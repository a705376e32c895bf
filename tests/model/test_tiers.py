"""Two tiers, one scene at a time: what swaps, offloads, fetches and joins bring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .llama import Llama
from .test_sharing import PROMPT, check_answer
from .tiered import TieredEngine

SEEDS = range(8)
OTHER = np.random.default_rng(4).integers(0, Llama.VOCABULARY, 60).tolist()
FILLER = np.random.default_rng(6).integers(0, Llama.VOCABULARY, 160).tolist()


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
    """W1, L3: what arrived in front of the first gap is a hit, the rest is computed; the plan ends once."""
    lengths = set()
    for seed in range(40):
        engine = TieredEngine(20, 4, seed=seed)
        offloaded(engine, PROMPT[:36])
        engine.mover._fail = 0.9
        hit_tokens = engine.pager.stats().hit_tokens
        sequence = fetch(engine, PROMPT)
        plan = sequence.fetch
        ticket = engine.send(plan)
        assert ticket is not None
        engine.wait(ticket)
        arrived = [*ticket.done.tolist(), False].index(False)
        assert sequence.state == "running"
        assert sequence.num_cached == sequence.num_committed == 4 * arrived
        assert engine.pager.match(PROMPT).num_tokens == 4 * arrived
        assert engine.pager.stats().hit_tokens == hit_tokens + 4 * arrived
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
