"""What is right: the model with each sequence's KV in one piece, and no pager."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .llama import Floats, Llama, computed


class Contiguous:
    """K, V and logits of a list of tokens that only grows: arrays [layers, positions, kv_heads, head_dim].

    K and V are kept in the pool's element type, and attention reads what was kept: rounded alike, they are equal.
    """

    CAPACITY = 192

    def __init__(self, model: Llama, dtype: npt.DTypeLike = np.float32) -> None:
        self.model = model
        self.dtype = dtype
        self.tokens = np.empty(self.CAPACITY, np.int32)
        self.length = 0
        self.keys = np.empty((model.LAYERS, self.CAPACITY, model.KV_HEADS, model.HEAD_DIM), dtype)
        self.values = np.empty_like(self.keys)
        self.logits = np.empty((self.CAPACITY, model.VOCABULARY), np.float32)

    def branch(self, length: int) -> Contiguous:
        """Another one that has only the first of the tokens."""
        other = Contiguous(self.model, self.dtype)
        other.length = length
        other.tokens[:length], other.logits[:length] = self.tokens[:length], self.logits[:length]
        other.keys[:, :length], other.values[:, :length] = self.keys[:, :length], self.values[:, :length]
        return other

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        self.start, self.length = self.length, self.length + len(tokens)
        self.tokens[self.start : self.length] = tokens
        span = np.arange(self.start, self.length)
        self.logits[self.start : self.length] = self.model.forward(self.tokens[span], span, self)

    def write(self, layer: int, keys: Floats, values: Floats) -> None:
        self.keys[layer, self.start : self.length] = keys
        self.values[layer, self.start : self.length] = values

    def read(self, layer: int, place: int) -> tuple[Floats, Floats]:
        stop = self.start + place + 1
        return computed(self.keys[layer, :stop]), computed(self.values[layer, :stop])


class Truth:
    """Contiguous KV of any tokens. What was computed is kept: the KV of a position follows from the tokens up to it."""

    KEPT = 64

    def __init__(self, model: Llama, dtype: npt.DTypeLike = np.float32) -> None:
        self.model = model
        self.known = [Contiguous(model, dtype) for _ in range(self.KEPT)]
        self.tokens = np.full((self.KEPT, Contiguous.CAPACITY), -1, np.int32)
        self.last_used = np.zeros(self.KEPT, np.int64)

    def of(self, tokens: Sequence[int]) -> Contiguous:
        """One whose first tokens are these; it may have more."""
        wanted = np.asarray(tokens, np.int32)
        differs = self.tokens[:, : len(wanted)] != wanted
        agreed = np.where(differs.any(axis=1), differs.argmax(axis=1), len(wanted))
        number = int(agreed.argmax())
        best, common = self.known[number], int(agreed[number])
        if common < len(wanted):
            if common < best.length:
                best, number = best.branch(common), int(self.last_used.argmin())
                self.known[number], self.tokens[number] = best, -1
            best.extend(wanted[common:])
            self.tokens[number, : len(wanted)] = wanted
        self.last_used[number] = self.last_used.max() + 1
        return best

    def generate(self, prompt: Sequence[int], number: int, rank: int = 0) -> list[int]:
        """Greedy tokens behind a prompt, but for the first, which is the rank-th best."""
        tokens = list(prompt)
        for _ in range(number):
            tokens.append(choose(self.of(tokens).logits[len(tokens) - 1], rank if len(tokens) == len(prompt) else 0))
        return tokens[len(prompt) :]


def choose(logits: Floats, rank: int = 0) -> int:
    """The best token, or the second best, and so on."""
    assert not np.isnan(logits).any()
    return int(np.argsort(-logits, kind="stable")[rank])
