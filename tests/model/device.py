"""The device: KV memory in blocks, full of NaN wherever nothing was written, and what runs on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .llama import Floats, Llama, computed

PLACEHOLDER = -1


@dataclass(eq=False)
class Row:
    """The positions ``start..stop`` of one sequence, which a launch is to compute."""

    tokens: list[int]
    start: int
    stop: int
    table: npt.NDArray[np.int32]


class Device:
    """Pools of K and V [layers, blocks, block_size, kv_heads, head_dim]. Nothing is found in them but by block ids."""

    def __init__(self, model: Llama, num_blocks: int, block_size: int, dtype: npt.DTypeLike = np.float32) -> None:
        self.model = model
        self.block_size = block_size
        self.keys = np.full((model.LAYERS, num_blocks, block_size, model.KV_HEADS, model.HEAD_DIM), np.nan, dtype)
        self.values = self.keys.copy()

    def copy(self, pairs: npt.NDArray[np.int32]) -> None:
        """Whole blocks, in any order: last first here."""
        for source, target in pairs[::-1].tolist():
            self.keys[:, target], self.values[:, target] = self.keys[:, source], self.values[:, source]

    def poison(self, blocks: Iterable[int], offset: int = 0) -> None:
        """What was in these blocks from an offset on is gone: who reads it gets NaN."""
        chosen = list(blocks)
        self.keys[:, chosen, offset:] = self.values[:, chosen, offset:] = np.nan

    def gather(self, table: npt.NDArray[np.int32], stop: int) -> tuple[Floats, Floats]:
        """K and V of a sequence's first positions through a block table: [layers, positions, kv_heads, head_dim]."""
        blocks = table[: -(-stop // self.block_size)]
        tail = (self.model.KV_HEADS, self.model.HEAD_DIM)
        return (
            self.keys[:, blocks].reshape(self.model.LAYERS, -1, *tail)[:, :stop],
            self.values[:, blocks].reshape(self.model.LAYERS, -1, *tail)[:, :stop],
        )

    def launch(self, rows: list[Row], slots: npt.NDArray[np.int64]) -> list[Floats]:
        """Compute these positions of all rows in one forward pass; the logits of each row."""
        for row in rows:
            # What is in a block from the first position to write on is not the row's, nor anybody's.
            first, last = row.start // self.block_size, -(-row.stop // self.block_size)
            self.poison(row.table[first : first + 1], row.start % self.block_size)
            self.poison(row.table[first + 1 : last])
        tokens = np.array([token for row in rows for token in row.tokens[row.start : row.stop]], np.int64)
        positions = np.array([position for row in rows for position in range(row.start, row.stop)], np.int64)
        assert PLACEHOLDER not in tokens
        assert len(slots) == len(tokens)
        logits = self.model.forward(tokens, positions, Paged(self, rows, slots))
        ends = np.cumsum([row.stop - row.start for row in rows])
        return np.split(logits, ends[:-1])


class Paged:
    """The KV of one launch: written to slots, read through block tables."""

    def __init__(self, device: Device, rows: list[Row], slots: npt.NDArray[np.int64]) -> None:
        self.device = device
        self.slots = slots
        self.places = [(row, position) for row in rows for position in range(row.start, row.stop)]
        self.gathered: dict[int, tuple[Floats, Floats]] = {}

    def write(self, layer: int, keys: Floats, values: Floats) -> None:
        for pool, new in ((self.device.keys, keys), (self.device.values, values)):
            pool[layer].reshape(-1, *new.shape[1:])[self.slots] = new
        self.gathered.clear()

    def read(self, layer: int, place: int) -> tuple[Floats, Floats]:
        row, position = self.places[place]
        if id(row) not in self.gathered:
            keys, values = self.device.gather(row.table, row.stop)
            self.gathered[id(row)] = keys[layer], values[layer]
        keys, values = self.gathered[id(row)]
        return computed(keys[: position + 1]), computed(values[: position + 1])
