"""A Llama in NumPy that knows nothing of pages: it hands each layer's queries, keys and values to `attend`.

Two ways to multiply. `exact`: each row by itself, so that a row's result has the same bits whatever is computed with
it: alone or in a batch, prefill or decode, in any chunks. `fast`: one product for all rows, quicker for long prefills
and large batches; BLAS then chooses its order of sums by the number of rows, and the last bits vary with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Integers: TypeAlias = NDArray[np.integer[Any]]
Attend: TypeAlias = Callable[[int, Floats, Floats, Floats], Floats]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim]."""


@dataclass(frozen=True)
class Config:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    eps: float = 1e-5


class Llama:
    def __init__(self, name: str, config: Config, weights: Mapping[str, Floats], *, is_exact: bool = True) -> None:
        self.name, self.config, self.weights, self.is_exact = name, config, weights, is_exact
        # A tied model has no head of its own.
        self.head = weights.get("output.weight", weights["token_embd.weight"])
        frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.arange(config.context)[:, None] * frequencies
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def identity(self) -> bytes:
        """What KV that outlives the process depends on: all weights, and how it is computed."""
        digest = hashlib.sha256(f"{self.config} float32, exact: {self.is_exact}".encode())
        for name, weight in sorted(self.weights.items()):
            digest.update(f" {name} {weight.shape} ".encode())
            digest.update(np.ascontiguousarray(weight).data)
        return digest.digest()

    @classmethod
    def from_gguf(
        cls, name: str, keys: Mapping[str, Any], weights: Mapping[str, Floats], *, is_exact: bool = True
    ) -> Llama:
        if (architecture := keys["general.architecture"]) != "llama":
            raise ValueError(f"the file holds a model of architecture {architecture!r}; this example runs 'llama'")
        heads = keys["llama.attention.head_count"]
        config = Config(
            num_layers=keys["llama.block_count"],
            num_heads=heads,
            num_kv_heads=keys.get("llama.attention.head_count_kv", heads),
            head_dim=keys["llama.embedding_length"] // heads,
            context=keys["llama.context_length"],
            rope_theta=keys.get("llama.rope.freq_base", 1e4),
            eps=keys["llama.attention.layer_norm_rms_epsilon"],
        )
        return cls(name, config, weights, is_exact=is_exact)

    @classmethod
    def random(cls, seed: int = 0, *, context: int = 512, is_exact: bool = True) -> Llama:
        """A small model that says nothing sensible, but whose every token depends on all KV before it.

        Gains as below and a head of its own keep it from falling into a loop of two tokens, which would hide faults.
        """
        config = Config(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, context=context, rope_theta=1e4)
        d, d_kv, d_ff, vocabulary = 64, 32, 128, 256
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int, gain: float) -> Floats:
            return rng.normal(0, gain / columns**0.5, (rows, columns)).astype(np.float32)

        ones = np.ones(d, np.float32)
        weights = {"token_embd.weight": matrix(vocabulary, d, d**0.5), "output.weight": matrix(vocabulary, d, 4)}
        weights["output_norm.weight"] = ones
        for layer in range(config.num_layers):
            block = {"attn_norm": ones, "attn_q": matrix(d, d, 2), "attn_k": matrix(d_kv, d, 2)}
            block |= {"attn_v": matrix(d_kv, d, 2), "attn_output": matrix(d, d, 2), "ffn_norm": ones}
            block |= {"ffn_gate": matrix(d_ff, d, 1), "ffn_up": matrix(d_ff, d, 1), "ffn_down": matrix(d, d_ff, 1)}
            weights |= {f"blk.{layer}.{name}.weight": weight for name, weight in block.items()}
        return cls(f"random-{seed}", config, weights, is_exact=is_exact)

    def forward(self, tokens: Integers, positions: Integers, attend: Attend, wanted: Integers) -> Floats:
        """Logits of the tokens at the indices `wanted`, [wanted, vocabulary]. The head is a fifth of the work."""
        config = self.config
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(config.num_layers):
            h = self._norm(x, f"blk.{layer}.attn_norm")
            q = self._linear(h, f"blk.{layer}.attn_q").reshape(-1, config.num_heads, config.head_dim)
            k = self._linear(h, f"blk.{layer}.attn_k").reshape(-1, config.num_kv_heads, config.head_dim)
            v = self._linear(h, f"blk.{layer}.attn_v").reshape(-1, config.num_kv_heads, config.head_dim)
            mixed = attend(layer, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
            x = x + self._linear(mixed.reshape(len(tokens), -1), f"blk.{layer}.attn_output")
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate, up = self._linear(h, f"blk.{layer}.ffn_gate"), self._linear(h, f"blk.{layer}.ffn_up")
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, f"blk.{layer}.ffn_down")
        return self._product(self._norm(x[wanted], "output_norm"), self.head)

    def _linear(self, x: Floats, name: str) -> Floats:
        return self._product(x, self.weights[f"{name}.weight"])

    def _product(self, x: Floats, weight: Floats) -> Floats:
        product: Floats = (x[:, None] @ weight.T)[:, 0] if self.is_exact else x @ weight.T
        return product

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.config.eps))
        normed: Floats = x * scale * self.weights[f"{name}.weight"]
        return normed


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary embedding of neighbouring pairs: GGUF files of this architecture have their Q and K rows in this order."""
    turned = np.empty_like(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned
