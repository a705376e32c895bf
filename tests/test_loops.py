"""The loops of the examples, which people copy: they come to an end and answer right, whatever they are asked."""

from __future__ import annotations

import pathlib
import random
import runpy

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.usefixtures("watchdog")
each_loop = pytest.mark.parametrize("name", ["batch_loop.py", "ahead_loop.py", "swap_loop.py", "admission_loop.py"])


def serve(name: str, lengths: list[int]) -> None:
    example = runpy.run_path(str(EXAMPLES / name))
    slots = example["NUM_BLOCKS"] * example["BLOCK_SIZE"]
    assert slots == 96
    prompts = [[place % 7 + number for place in range(length)] for number, length in enumerate(lengths)]
    answers = example["serve"](prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        # The last token of an answer needs no slot.
        assert answer == example["alone"](prompt)[: max(0, slots - len(prompt) + 1)]
    assert example["pager"].check() == []
    assert example["pager"].stats().active_blocks == 0
    assert not example["batch"].open_steps
    assert example["batch"].num_rows == 0


@each_loop
@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [1],
        [95],  # two tokens of answer fit, of 12
        [96],  # fills the pool: one token does
        [97],  # could never be admitted
        [60, 60],  # each fits, both do not
        [90, 90, 90],  # each outgrows the pool alone
        [40, 97, 50, 95, 3, 96, 84, 85],
        [1] * 40,  # more than there are rows
    ],
    ids=str,
)
def test_requests_that_outgrow_the_pool(name: str, lengths: list[int]) -> None:
    serve(name, lengths)


@each_loop
def test_many_mixes(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        serve(name, [rng.randint(1, 100) for _ in range(rng.randint(1, 12))])


def test_a_step_that_does_not_fit_is_answered_by_recompute_or_by_a_swap() -> None:
    lengths = [20, 30, 25, 35, 15, 20, 40]
    prompts = [[place % 7 + number for place in range(length)] for number, length in enumerate(lengths)]
    example = runpy.run_path(str(EXAMPLES / "swap_loop.py"))
    expected = [example["alone"](prompt) for prompt in prompts]
    assert example["serve"](prompts, swaps=False) == expected
    recomputed = example["pager"].stats()
    assert recomputed.preemptions > 0
    assert recomputed.recomputed_tokens > 0
    assert recomputed.swap_outs == 0
    example["pager"].reset()
    assert example["serve"](prompts, swaps=True) == expected
    swapped = example["pager"].stats()
    assert (swapped.preemptions, swapped.recomputed_tokens) == (recomputed.preemptions, recomputed.recomputed_tokens)
    assert swapped.swap_outs == swapped.swap_ins > 0
    assert example["pager"].check() == []
    assert (swapped.active_blocks, swapped.host_active_blocks, example["pager"].plans()) == (0, 0, [])


def test_a_host_without_room_falls_back_to_recompute() -> None:
    example = runpy.run_path(str(EXAMPLES / "swap_loop.py"))
    pager = example["pager"]
    kept = []
    for first, length in [(0, 92), (200, 64)]:  # two that are swapped out leave one block of 40
        seq = pager.admit(range(first, first + length))
        seq.slots(0, length)
        seq.commit()
        plan = seq.swap_out()
        pager.start(plan)
        pager.complete(plan)
        kept.append(seq)
    assert pager.stats().host_active_blocks == 39
    prompts = [[number] * 40 for number in range(4)]
    assert example["serve"](prompts) == [example["alone"](prompt) for prompt in prompts]
    assert pager.stats().preemptions > 0
    assert pager.stats().swap_outs == len(kept)
    for seq in kept:
        seq.release()
    assert pager.check() == []
