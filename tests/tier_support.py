"""A pager with a pool, a host arena, and a tier behind them, whose bytes say which tokens they are of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvpager
from kvpager.movers import HostArena, NumpyMover, NumpyPool
from kvpager.tiers import MemoryStore, Store, Tier

BLOCK_SIZE = 4
WIDTH = 16  # bytes of a token's KV


class History:
    """What was forgotten and reset, in all lives: KV that is computed after it is other KV."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[tuple[bytes, kvpager.Namespace], list[int]]] = []
        self.num_resets = 0

    def kv_of(self, namespace: kvpager.Namespace, identity: bytes, prompt: Sequence[int], position: int) -> np.ndarray:
        """What the KV of a position is, if it is computed now."""
        end = (position // BLOCK_SIZE + 1) * BLOCK_SIZE
        covers = [
            name == namespace and prompt[: len(path)] == path and len(path) <= end for name, path in self.forgotten
        ]
        what = (namespace, identity, list(map(int, prompt[: position + 1])), self.num_resets, sum(covers))
        return np.frombuffer(np.random.default_rng(zlib.crc32(repr(what).encode())).bytes(WIDTH), np.uint8)


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
        history: History | None = None,
        **options: Any,
    ) -> None:
        self.history = history or History()
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

    def forget(self, path: list[int], namespace: kvpager.Namespace = b"") -> None:
        self.pager.forget(path, namespace=namespace)
        self.history.forgotten.append(((self.pager.identity, namespace), path))

    def reset(self) -> None:
        self.pager.reset()
        self.history.num_resets += 1

    def serve(self, prompt: list[int], namespace: kvpager.Namespace = b"", *, loads: bool = True) -> int:
        """Answers how many tokens were not computed. Each byte of these is looked at."""
        if loads and (loading := self.tier.load(prompt, namespace=namespace)) is not None:
            assert self.tier.wait(10.0, [loading])
        with self.pager.admit(prompt, namespace=namespace, fetch=True) as seq:
            self.carry_out(seq.fetch)
            assert seq.state == "running"
            for position in range(seq.num_cached):
                block, offset = divmod(position, BLOCK_SIZE)
                seen = self.memory[seq.block_ids[block], offset]
                expected = self.history.kv_of(namespace, self.pager.identity, prompt, position)
                assert (seen == expected).all(), f"position {position} of {prompt} has other KV"
            for slot, position in zip(
                seq.slots(seq.num_cached, len(seq)), range(seq.num_cached, len(seq)), strict=True
            ):
                block, offset = divmod(int(slot), BLOCK_SIZE)
                self.memory[block, offset] = self.history.kv_of(namespace, self.pager.identity, prompt, position)
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
