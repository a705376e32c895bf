"""The loops of the examples, which people copy: they come to an end and answer right, whatever they are asked."""

from __future__ import annotations

import pathlib
import random
import runpy

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
pytestmark = [
    pytest.mark.usefixtures("watchdog"),
    pytest.mark.parametrize("name", ["batch_loop.py", "ahead_loop.py"]),
]


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


def test_many_mixes(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        serve(name, [rng.randint(1, 100) for _ in range(rng.randint(1, 12))])
