"""The KV pool, and attention through block tables: the only place that knows of pages."""

from __future__ import annotations

import numpy as np

import kvpager
from kvpager.movers import NumpyPool

from .llama import Config, Floats


class PagedKV:
    """Keys and values of all blocks: [layers, blocks, block_size, kv_heads, head_dim] each."""

    def __init__(self, config: Config, num_blocks: int, block_size: int, *, is_exact: bool = True) -> None:
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        # The same memory by slots: block * block_size + offset.
        by_slot = (config.num_layers, num_blocks * block_size, *shape[3:])
        self.k_slots, self.v_slots = self.k.reshape(by_slot), self.v.reshape(by_slot)
        self.block_size, self.is_exact = block_size, is_exact

    def pool(self) -> NumpyPool:
        """The same memory as a mover sees it."""
        return NumpyPool([self.k, self.v], block_axis=1)

    def begin(self, step: kvpager.Step) -> None:
        """Take over a step: carry out its copies, and keep what `attend` reads."""
        sources, targets = step.copies.T
        # No block is both source and target, so all can be copied at once.
        self.k[:, targets], self.v[:, targets] = self.k[:, sources], self.v[:, sources]
        self.slots = step.slot_mapping
        self.rows = []
        starts, lens, tables = step.query_start_loc.tolist(), step.seq_lens.tolist(), step.block_tables
        for row in range(step.num_rows):
            if starts[row] < starts[row + 1]:
                table = tables[row, : -(-lens[row] // self.block_size)]
                self.rows.append((starts[row], starts[row + 1], lens[row], table))

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Write the new keys and values, then let each query see its own sequence up to itself."""
        self.k_slots[layer, self.slots], self.v_slots[layer, self.slots] = k, v
        mixed = np.empty_like(q)
        for start, stop, seq_len, table in self.rows:
            # [kv_heads, tokens, head_dim]: what the row's blocks hold, put together for this layer only.
            keys, values = (
                pool[layer][table].reshape(-1, *k.shape[1:])[:seq_len].swapaxes(0, 1) for pool in (self.k, self.v)
            )
            queries = q[start:stop].reshape(stop - start, keys.shape[0], -1, q.shape[2])
            mix = attend_each if self.is_exact else attend_together
            mixed[start:stop] = mix(queries, keys, values).reshape(stop - start, *q.shape[1:])
        return mixed


def attend_each(q: Floats, keys: Floats, values: Floats) -> Floats:
    """Each position by itself over exactly what it sees: the same operations in a prefill, a chunk and a decode."""
    mixed = np.empty_like(q)
    first = keys.shape[1] - len(q)
    for at in range(len(q)):
        seen = first + at + 1
        weights = _softmax(q[at] @ keys[:, :seen].swapaxes(1, 2) * q.dtype.type(q.shape[-1] ** -0.5))
        mixed[at] = weights @ values[:, :seen]
    return mixed


def attend_together(q: Floats, keys: Floats, values: Floats) -> Floats:
    """All positions in one product, those behind a query masked."""
    num_queries, _, group, dim = q.shape
    flat = q.swapaxes(0, 1).reshape(len(keys), num_queries * group, dim)
    scores = (flat @ keys.swapaxes(1, 2) * q.dtype.type(dim**-0.5)).reshape(len(keys), num_queries, group, -1)
    position = np.arange(keys.shape[1])
    behind = position > position[-num_queries:, None]
    weights = _softmax(np.where(behind[:, None], q.dtype.type(-np.inf), scores))
    mixed: Floats = weights.reshape(len(keys), num_queries * group, -1) @ values
    return mixed.reshape(len(keys), num_queries, group, dim).swapaxes(0, 1)


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normed: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return normed
