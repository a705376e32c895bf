"""Images in a store: none is served from the records of another that begins alike (rules 9, 16.1.7, 17.1.2)."""

from __future__ import annotations

import random
from typing import Any

from test_tiers_content import Memory, images, prompt_of
from tiers import each_with_store

pytestmark = each_with_store


class StoreMemory(Memory):
    """Both tiers, and a store: (meta, content) by key."""

    def __init__(self, pager: Any) -> None:
        super().__init__(pager)
        self.store: dict[bytes, tuple[bytes, Any]] = {}

    def num_tokens(self, tokens: list[int]) -> int:
        """How much of a prompt the store has."""
        keys, metas = self.pager.store_keys(tokens)
        there = [
            self.store.get(key.tobytes(), (b"",))[0] == meta.tobytes() for key, meta in zip(keys, metas, strict=True)
        ]
        return [*there, False].index(False) * int(self.pager.block_size)

    def save(self, plan: Any, done: list[bool]) -> None:
        self.pager.start(plan)
        for key, meta, block, is_done in zip(*plan.records, plan.source_ids.tolist(), done, strict=True):
            if is_done:
                record = meta.tobytes(), self.tiers["host"][block]
                assert self.store.setdefault(key.tobytes(), record) == record, "two contents with one key"
        self.pager.fail(plan, done)

    def load(self, plan: Any, tokens: list[int], lost: list[bool]) -> None:
        self.pager.start(plan)
        found = []
        for key, meta, block, is_lost in zip(*plan.records, plan.destination_ids.tolist(), lost, strict=True):
            there, content = self.store.get(key.tobytes(), (b"", None))
            found.append(there == meta.tobytes() and not is_lost)
            self.tiers["host"][block] = content if found[-1] else "torn"
        size = self.pager.block_size
        path = range(-(-(len(tokens)) // size))
        rights = [self.right(tokens, number) for number in path]
        for block, is_found in zip(plan.destination_ids.tolist(), found, strict=True):
            assert not is_found or self.tiers["host"][block] in rights, "another image's record"
        self.pager.fail(plan, found)


def test_no_image_is_loaded_from_the_records_of_another(implementation, seed, runs):
    num_loaded = 0
    for number in range(seed, seed + (runs or 60)):
        draw = random.Random(number)
        pager = implementation(draw.randint(8, 14), draw.choice([2, 4]), num_host_blocks=draw.choice([3, 6, 20]))
        memory, pictures, held = StoreMemory(pager), images(draw), []
        for _ in range(60):
            tokens = prompt_of(draw, pictures)
            if -(-len(tokens) // pager.block_size) > pager.num_blocks:
                continue
            plan = pager.load(tokens, memory.num_tokens(tokens))
            if plan is not None:
                memory.load(plan, tokens, [draw.random() < 0.1 for _ in range(len(plan))])
            sequence = pager.try_admit(tokens, fetch=True)
            if sequence is None:
                while held:
                    held.pop().release()
                continue
            if (plan := sequence.fetch) is not None:
                memory.move(plan, [draw.random() < 0.9 for _ in range(len(plan))])
            memory.compute(sequence, tokens)
            sequence.commit()
            if draw.random() < 0.7:
                sequence.release()
            else:
                held.append(sequence)
            if (plan := pager.offload(draw.randint(1, 6))) is not None:
                memory.move(plan, [draw.random() < 0.9 for _ in range(len(plan))])
            if (plan := pager.save(draw.randint(1, 6))) is not None:
                memory.save(plan, [draw.random() < 0.9 for _ in range(len(plan))])
            assert pager.check() == [], number
        num_loaded += pager.stats().loaded_blocks
        while held:
            held.pop().release()
    assert num_loaded > 0
