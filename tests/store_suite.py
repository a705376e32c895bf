"""Stores, and blocks to keep in them. A store that is added to `STORES` is held to all of tests/test_stores.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvpager.tiers import DiskStore, MemoryStore, Store, ValkeyStore

ROW_BYTES = 200
BLOCK_SIZE = 4
META_BYTES = 32 + 4 * BLOCK_SIZE


def memory(request: pytest.FixtureRequest) -> Store:
    return MemoryStore(ROW_BYTES, BLOCK_SIZE, 1 << 20)


def disk(request: pytest.FixtureRequest) -> Store:
    path: Path = request.getfixturevalue("tmp_path") / "store"
    return DiskStore(path, row_bytes=ROW_BYTES, block_size=BLOCK_SIZE, max_bytes=1 << 20, sync="never")


def valkey(request: pytest.FixtureRequest) -> Store:
    server = request.getfixturevalue("valkey_server")
    return ValkeyStore(server.url, row_bytes=ROW_BYTES, block_size=BLOCK_SIZE, timeout_seconds=30)


STORES: dict[str, Callable[[pytest.FixtureRequest], Store]] = {"memory": memory, "disk": disk, "valkey": valkey}
"""How to open each, empty, with room for some hundreds of records of `ROW_BYTES` and `BLOCK_SIZE`."""

UNKNOWN = -1
"""What a store says of `records`, `bytes` and `max_bytes` where others may write beside it."""


ROOTS = 1 << 40


def key(name: int) -> npt.NDArray[np.uint8]:
    """The key of a block: 32 bytes that look random. Numbers from `ROOTS` on are roots'."""
    key = np.random.default_rng((1, name)).integers(0, 256, 32, np.uint8)
    key[:8] = 0 if name >= ROOTS else key[:8] | 1
    return key


def meta(name: int, parent: int, token: int = 0, block_size: int = BLOCK_SIZE) -> npt.NDArray[np.uint8]:
    """The meta of a block: its parent's key and its tokens."""
    tokens = np.full(block_size, token, "<i4")
    tokens[0] = name
    return np.concatenate([key(parent), tokens.view(np.uint8)])


def payload(name: int, token: int = 0, row_bytes: int = ROW_BYTES) -> npt.NDArray[np.uint8]:
    """The bytes of a block; no two blocks have the same."""
    return np.random.default_rng((2, name, token)).integers(0, 256, row_bytes, np.uint8)


@dataclass
class Blocks:
    """Blocks of a store, by name. Each is the first of a path unless `parents` says otherwise."""

    store: Store
    parents: dict[int, int] = field(default_factory=dict)
    block_size: int = BLOCK_SIZE

    def keys(self, names: Iterable[int]) -> npt.NDArray[np.uint8]:
        return np.array([key(name) for name in names], np.uint8).reshape(-1, 32)

    def metas(self, names: Iterable[int], token: int = 0) -> npt.NDArray[np.uint8]:
        metas = [meta(name, self.parents.get(name, ROOTS + name), token, self.block_size) for name in names]
        return np.array(metas, np.uint8).reshape(-1, self.store.meta_bytes)

    def put(self, names: Iterable[int], token: int = 0) -> list[bool]:
        names = list(names)
        rows = np.array([payload(name, token, self.store.row_bytes) for name in names], np.uint8)
        rows = rows.reshape(-1, self.store.row_bytes)
        ids = np.arange(len(names), dtype=np.int32)
        stored: list[bool] = self.store.put_many(self.keys(names), self.metas(names, token), rows, ids).tolist()
        return stored

    def get(self, names: Iterable[int], token: int = 0) -> list[bool]:
        """Which are read. The bytes of those that are, are compared."""
        names = list(names)
        rows = np.full((len(names) + 3, self.store.row_bytes), 0xEE, np.uint8)
        ids = np.arange(len(names), dtype=np.int32)[::-1] + 2
        found: list[bool] = self.store.get_many(self.keys(names), self.metas(names, token), rows, ids).tolist()
        for name, row, is_hit in zip(names, ids, found, strict=True):
            if is_hit:
                assert (rows[row] == payload(name, token, self.store.row_bytes)).all(), f"wrong bytes for {name}"
        assert (rows[:2] == 0xEE).all()
        assert (rows[len(names) + 2 :] == 0xEE).all()
        return found

    def contains(self, names: Iterable[int]) -> list[bool]:
        found: list[bool] = self.store.contains_many(self.keys(names)).tolist()
        return found

    def delete(self, names: Iterable[int]) -> int:
        return self.store.delete_many(self.keys(names))
