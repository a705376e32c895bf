"""A Llama of two small layers with seeded random weights, and arithmetic that does not depend on the batch.

Each linear layer multiplies row by row, and attention takes one query at a time over exactly the positions it may see:
no mask, no padding. So prefill, chunks, hits, decode, any batch and a recompute do the same operations in the same
order, and their results can be compared bit for bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Cache(Protocol):
    """Where the KV of one launch is. The only place that knows about pages, if there are any."""

    def write(self, layer: int, keys: Floats, values: Floats) -> None:
        """Keep K and V of all positions of the launch: [positions, kv_heads, head_dim]."""

    def read(self, layer: int, place: int) -> tuple[Floats, Floats]:
        """K and V of all positions up to the launch's place-th one, itself included."""


class Llama:
    """Weights and forward pass.

    The gains, and a head of its own, keep greedy answers from falling into loops, which would hide a wrong cache.
    """

    LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 2, 64, 4, 2, 128, 256
    HEAD_DIM = WIDTH // HEADS
    POSITIONS, THETA = 512, 1e4

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)

        def weights(gain: float, out: int, into: int) -> Floats:
            return (draw.standard_normal((out, into)) * gain / np.sqrt(into)).astype(np.float32)

        kv_width = self.KV_HEADS * self.HEAD_DIM
        self.embedding = draw.standard_normal((self.VOCABULARY, self.WIDTH)).astype(np.float32)
        self.layers = [
            {
                "q": weights(2, self.WIDTH, self.WIDTH),
                "k": weights(2, kv_width, self.WIDTH),
                "v": weights(2, kv_width, self.WIDTH),
                "o": weights(2, self.WIDTH, self.WIDTH),
                "gate": weights(1, self.HIDDEN, self.WIDTH),
                "up": weights(1, self.HIDDEN, self.WIDTH),
                "down": weights(1, self.WIDTH, self.HIDDEN),
            }
            for _ in range(self.LAYERS)
        ]
        self.head = weights(4, self.VOCABULARY, self.WIDTH)
        half = self.HEAD_DIM // 2
        angles = np.outer(np.arange(self.POSITIONS), self.THETA ** (-np.arange(half) / half))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def forward(self, tokens: npt.NDArray[Any], positions: npt.NDArray[Any], cache: Cache) -> Floats:
        """Logits behind each of these positions; their K and V go to the cache."""
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            hidden = norm(x)
            queries = self.turn(linear(hidden, layer["q"]), positions)
            cache.write(
                number, self.turn(linear(hidden, layer["k"]), positions), self.split(linear(hidden, layer["v"]))
            )
            seen = np.empty_like(x)
            for place, query in enumerate(queries):
                seen[place] = attend(query, *cache.read(number, place))
            x = x + linear(seen, layer["o"])
            hidden = norm(x)
            gate = linear(hidden, layer["gate"])
            x = x + linear(gate / (1 + np.exp(-gate)) * linear(hidden, layer["up"]), layer["down"])
        return linear(norm(x), self.head)

    def split(self, x: Floats) -> Floats:
        return x.reshape(len(x), -1, self.HEAD_DIM)

    def turn(self, x: Floats, positions: npt.NDArray[Any]) -> Floats:
        """Rotary position embedding, halves of a head as pairs."""
        left, right = np.split(self.split(x), 2, axis=-1)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        return np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def computed(kept: npt.NDArray[Any]) -> Floats:
    """K or V as attention computes with them: float32, whatever they are kept in."""
    result: Floats = kept.astype(np.float32, copy=False)
    return result


def linear(x: Floats, weight: Floats) -> Floats:
    """``x @ weight.T``, one row at a time: the same matrix-vector product whatever the number of rows."""
    result: Floats = (x[:, None, :] @ weight.T)[:, 0]
    return result


def norm(x: Floats) -> Floats:
    result: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-5))
    return result


def attend(query: Floats, keys: Floats, values: Floats) -> Floats:
    """One query [heads, head_dim] over all these positions; a KV head serves a group of queries."""
    grouped = query.reshape(keys.shape[1], -1, keys.shape[2])
    scores = grouped @ keys.transpose(1, 2, 0) / np.float32(np.sqrt(keys.shape[2]))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Floats = (scores / scores.sum(axis=-1, keepdims=True) @ values.transpose(1, 0, 2)).reshape(-1)
    return result
