"""Images in both tiers: a block whose placeholders agree with those of another image is not taken for it.

The KV of a placeholder depends on its whole image, so two images that agree in their first tokens have different blocks
there. Prompts are made of text and whole images, and every copy is followed, as in ``tier_stream.py`` (whose contents
know nothing of images).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from implementations import admit_committed, cache, ids, line
from tiers import arrive, each_with_tiers, offloaded, on_host, pairs

FIRST_CONTENT_TOKEN = 2**30

pytestmark = each_with_tiers

# Two images, in three blocks with the text behind them, that agree in the first block, and more.
LIKE = [FIRST_CONTENT_TOKEN] * 6
ONE, OTHER = [*LIKE, *[FIRST_CONTENT_TOKEN + 1] * 5, 1], [*LIKE, *[FIRST_CONTENT_TOKEN + 2] * 5, 1]


def test_an_image_is_not_copied_below_the_block_of_another(implementation):
    """What the host has of one image only looks like the beginning of the other."""
    pager = implementation(4, 4, num_host_blocks=16)
    cache(pager, [*ONE, 1])
    offloaded(pager, 9)
    cache(pager, [*OTHER, 1])  # takes all frames of the first
    assert on_host(pager, [*ONE, 7]) == 12
    assert pager.offload(9) is None
    assert on_host(pager, [*OTHER, 7]) == 0


def test_an_image_goes_as_a_whole_even_if_less_was_asked_for(implementation):
    pager = implementation(8, 4, num_host_blocks=8)
    cache(pager, [5, 5, 5, 5, *ONE, 1])
    plan = pager.offload(2)
    assert plan.source_ids.tolist() == [0, 1, 2, 3]
    assert pager.offload(1) is None


def test_an_image_that_ends_with_its_path_may_go_on(implementation):
    """Nobody knows what is behind it, so it waits for that."""
    pager = implementation(8, 4, num_host_blocks=8)
    sequence = admit_committed(pager, [5] * 4 + LIKE[:4])
    assert pairs(pager.offload_committed(sequence)) == [(0, 0)]
    assert pager.offload_committed(sequence) is None
    sequence.extend([7] * 4)
    sequence.commit()
    assert pairs(pager.offload_committed(sequence)) == [(1, 1), (2, 2)]


def test_an_image_larger_than_the_host_is_passed_over(implementation):
    pager = implementation(8, 4, num_host_blocks=2)
    cache(pager, [*ONE, 1])
    cache(pager, [7] * 5)
    plan = pager.offload(4)
    assert plan.source_ids.tolist() == [3]


def test_a_block_that_failed_takes_its_image_along(implementation):
    pager = implementation(8, 4, num_host_blocks=8)
    cache(pager, [5, 5, 5, 5, *ONE, 1])
    plan = pager.offload(4)
    pager.start(plan)
    assert pager.fail(plan, [True, True, False, True])
    assert "host namespace b''\n└─ 1 block 0: tokens 5 5 5 5;" in pager.dump()
    assert pager.stats().offloaded_blocks == 1


def test_a_swapped_image_is_its_sequences_own_where_the_host_has_the_beginning_of_another(implementation):
    """The host has lost the end of the first image, and what is left looks like the beginning of the second."""
    pager = implementation(4, 4, num_host_blocks=6)
    cache(pager, [*ONE, 1])
    offloaded(pager, 3)
    for number, length in ((3, 4), (4, 8), (5, 4)):
        cache(pager, [number] * (length + 1))
        offloaded(pager, length // 4)
    assert "host namespace b''\n├─ 2 blocks 0-1: tokens 1073741824 1073741824" in pager.dump()
    for number in (3, 4, 5):
        pager.forget([number] * 4)
    sequence = admit_committed(pager, [*OTHER, 1])
    plan = sequence.swap_out()
    assert plan.source_ids.tolist() == ids(sequence)
    arrive(pager, plan)
    assert line(pager, "sequence").endswith("host path -; host own 2 4-5 3")
    sequence.release()


class Memory:
    """Both tiers, block by block: (namespace, tokens up to and including the block, and on to the end of its image)."""

    def __init__(self, pager: Any) -> None:
        self.pager = pager
        self.tiers: dict[str, dict[int, Any]] = {"device": {}, "host": {}}

    def right(self, tokens: list[int], number: int) -> tuple[int, ...]:
        end = (number + 1) * self.pager.block_size
        while end < len(tokens) and min(tokens[end - 1], tokens[end]) >= FIRST_CONTENT_TOKEN:
            end += 1
        return tuple(tokens[:end])

    def compute(self, sequence: Any, tokens: list[int]) -> None:
        size = self.pager.block_size
        for number in range(len(tokens) // size):
            block = int(sequence.block_ids[number])
            if number < sequence.num_cached // size:
                assert self.tiers["device"][block] == self.right(tokens, number), (tokens, number)
            else:
                self.tiers["device"][block] = self.right(tokens, number)

    def move(self, plan: Any, done: list[bool] | None = None) -> None:
        """Start a plan, copy what is to arrive, and end it."""
        self.pager.start(plan)
        done = [True] * len(plan) if done is None else done
        source, destination = self.tiers[plan.source], self.tiers[plan.destination]
        for (here, there), arrived in zip(pairs(plan), done, strict=True):
            destination[there] = source.get(here) if arrived else "torn"
        if all(done):
            self.pager.complete(plan)
        else:
            self.pager.fail(plan, done)


def images(draw: random.Random) -> list[list[int]]:
    """A few images of which most agree in their beginning."""
    like = [FIRST_CONTENT_TOKEN + draw.randrange(2) for _ in range(draw.randint(1, 7))]
    return [like + [FIRST_CONTENT_TOKEN + 2 + number] * draw.randint(1, 9) for number in range(draw.randint(2, 4))]


def prompt_of(draw: random.Random, pictures: list[list[int]]) -> list[int]:
    prompt: list[int] = []
    for _ in range(draw.randint(1, 3)):
        prompt += [draw.randrange(2)] * draw.randint(0, 4)
        prompt += draw.choice(pictures)
        prompt += [draw.randrange(2)]
    return prompt


@pytest.mark.parametrize("kind", ["offload", "swap"])
def test_no_image_is_served_from_the_blocks_of_another(implementation, seed, runs, kind):
    for number in range(seed, seed + (runs or 60)):
        draw = random.Random(number)
        pager = implementation(draw.randint(8, 14), draw.choice([2, 4]), num_host_blocks=draw.choice([3, 6, 20]))
        memory, pictures, held = Memory(pager), images(draw), []
        for _ in range(60):
            tokens = prompt_of(draw, pictures)
            if -(-len(tokens) // pager.block_size) > pager.num_blocks:
                continue
            sequence = pager.try_admit(tokens, fetch=True)
            if sequence is None:
                while held:
                    held.pop()[0].release()
                continue
            if (plan := sequence.fetch) is not None:
                memory.move(plan, [draw.random() < 0.9 for _ in range(len(plan))])
            memory.compute(sequence, tokens)
            sequence.commit()
            fits = len(sequence.block_ids) <= pager.num_host_blocks
            if kind == "swap" and fits and (plan := sequence.try_swap_out()) is not None:
                memory.move(plan)
                while held and draw.random() < 0.7:
                    held.pop()[0].release()
                if draw.random() < 0.8 and (plan := sequence.try_swap_in()) is not None:
                    memory.move(plan)
                    for block in range(len(tokens) // pager.block_size):
                        found = memory.tiers["device"][int(sequence.block_ids[block])]
                        assert found == memory.right(tokens, block), (number, tokens, block)
            if draw.random() < 0.7:
                sequence.release()
            else:
                held.append((sequence, tokens))
            if (plan := pager.offload(draw.randint(1, 6))) is not None:
                memory.move(plan, [draw.random() < 0.9 for _ in range(len(plan))])
            assert pager.check() == [], number
        while held:
            held.pop()[0].release()
