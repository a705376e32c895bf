"""A pager with a pool, a host arena, and a tier behind them, whose bytes say which tokens they are of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

import kvpager
from kvpager.movers import HostArena, NumpyMover, NumpyPool
from kvpager.tiers import MemoryStore, Store, Tier

BLOCK_SIZE = 4
WIDTH = 16  # bytes of a token's KV


def kv_of(namespace: kvpager.Namespace, identity: bytes, tokens: Sequence[int]) -> np.ndarray:
    """What the KV of the last of these tokens is."""
    seed = zlib.crc32(repr((namespace, identity, list(map(int, tokens)))).encode())
    return np.frombuffer(np.random.default_rng(seed).bytes(WIDTH), np.uint8)


class Server:
    """Serves prompts, one after the other, and looks at each byte that a hit serves."""

    def __init__(
        self,
        store: Store,
        *,
        num_blocks: int = 32,
        num_host_blocks: int = 64,
        identity: bytes = b"model",
        make_tier: Callable[..., Tier] = Tier,
        **options: int,
    ) -> None:
        self.memory = np.zeros((num_blocks, BLOCK_SIZE, WIDTH), np.uint8)
        self.pager = kvpager.Pager(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks, identity=identity)
        self.host = HostArena(num_host_blocks, BLOCK_SIZE * WIDTH)
        self.mover = NumpyMover(NumpyPool([self.memory]), self.host)
        self.tier = make_tier(self.pager, self.host, store, **options)

    def carry_out(self, plan: kvpager.Plan | None) -> None:
        """A plan between the device and the host, to its end."""
        if plan is not None and self.pager.start(plan):
            self.mover.submit(plan)
            for ticket in self.mover.wait(10.0):
                assert ticket.state == "done"
                self.pager.complete(ticket.plan)

    def serve(self, prompt: Sequence[int], namespace: kvpager.Namespace = b"", *, loads: bool = True) -> int:
        """Answers how many tokens were not computed. Each byte of these is looked at."""
        if loads and (loading := self.tier.load(prompt, namespace=namespace)) is not None:
            assert self.tier.wait(10.0, [loading])
        with self.pager.admit(prompt, namespace=namespace, fetch=True) as seq:
            self.carry_out(seq.fetch)
            assert seq.state == "running"
            for position in range(seq.num_cached):
                block, offset = divmod(position, BLOCK_SIZE)
                seen = self.memory[seq.block_ids[block], offset]
                expected = kv_of(namespace, self.pager.identity, prompt[: position + 1])
                assert (seen == expected).all(), f"position {position} of {list(prompt)} has other KV"
            for slot, position in zip(
                seq.slots(seq.num_cached, len(seq)), range(seq.num_cached, len(seq)), strict=True
            ):
                block, offset = divmod(int(slot), BLOCK_SIZE)
                self.memory[block, offset] = kv_of(namespace, self.pager.identity, prompt[: position + 1])
            num_cached = seq.num_cached
            seq.commit()
        return num_cached

    def save_all(self) -> None:
        """All that is cached goes to the host, and to the store."""
        while (plan := self.pager.offload(8)) is not None:
            self.carry_out(plan)
        while self.tier.save(8) is not None:
            assert self.tier.wait(10.0)

    def close(self) -> None:
        self.mover.close()
        self.tier.close()
        assert self.pager.check() == []
        assert self.pager.plans() == []


def memory_store(max_bytes: int = 1 << 20) -> MemoryStore:
    return MemoryStore(row_bytes=BLOCK_SIZE * WIDTH, block_size=BLOCK_SIZE, max_bytes=max_bytes)
