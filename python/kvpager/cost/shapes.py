"""What a model costs: bytes of KV for a token, operations of a prefill; and a table of models.

The count is the usual one (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1; Chowdhery et al.
2022, "PaLM", appendix B): a token costs 2 operations for each weight of the layers that it meets, and attention costs
2 x (width of a key + width of a value) operations for each layer, query head and pair of a token and one that it
attends to. Prefill needs the output head for one position only, so embedding and head are left out, and so are norms,
rotary embeddings and softmax: they are bound by memory and part of what `Device.utilisation` allows for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .checks import at_least, number

Dtype = Literal["bf16", "fp8"]
DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): one compressed vector for all heads is kept in place of keys and values.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1): kept are ``rank + rope`` elements a token and layer; keys and values
    are expanded from them before a prefill attends, for the cached tokens, too.
    """

    rank: int
    """Elements of the compressed vector (``kv_lora_rank``)."""
    rope: int
    """Elements of the one rotary key that all heads share (``qk_rope_head_dim``)."""
    query_rank: int | None = None
    """Elements of the compressed query (``q_lora_rank``); None if queries are not compressed."""

    def __post_init__(self) -> None:
        for name in ("rank", "rope"):
            at_least(1, name, getattr(self, name))
        if self.query_rank is not None:
            at_least(1, "query_rank", self.query_rank)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the feed-forward part, in all layers but the first ``dense_layers``."""

    total: int
    per_token: int
    """Routed experts that a token meets; those that every token meets are ``shared``."""
    intermediate: int
    """Width of one expert."""
    shared: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("total", "per_token", "intermediate"):
            at_least(1, name, getattr(self, name))
        for name in ("shared", "dense_layers"):
            at_least(0, name, getattr(self, name))
        if self.per_token > self.total:
            raise ConfigError(f"per_token is {self.per_token}, but there are {self.total} experts in total")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder that decide what its KV costs to keep, to move and to compute.

    Every number can be overridden: ``dataclasses.replace(MODELS["llama-3.1-8b"], layers=40)``.

    >>> MODELS["llama-3.1-8b"].kv_bytes_per_token
    131072
    >>> MODELS["llama-3.1-8b"].with_kv("fp8").kv_bytes_per_token
    65536
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    """Heads of keys and of values: as many as ``query_heads``, or fewer (grouped-query). MLA has no use for it."""
    head_dim: int
    """Elements of one head's query and key. With MLA: those that are compressed, and the rotary ones."""
    hidden: int
    intermediate: int
    """Width of the feed-forward part, which is gated: three matrices."""
    vocab: int
    params: int
    """All parameters, as published: what a step that runs alone has to read. `layer_params` are those a token meets."""
    value_dim: int | None = None
    """Elements of one head's value, where that is not ``head_dim``."""
    latent: Latent | None = None
    experts: Experts | None = None
    kv_dtype_bytes: float = 2
    """Bytes of an element of KV: 2 for bf16, 1 for fp8, 0.5 for 4 bits (scales not counted)."""
    source: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        for name in ("layers", "query_heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocab", "params"):
            at_least(1, name, getattr(self, name))
        if self.value_dim is not None:
            at_least(1, "value_dim", self.value_dim)
        number("kv_dtype_bytes", self.kv_dtype_bytes, above=0)
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly: "
                "query_heads must be a multiple of kv_heads"
            )
        if self.latent is not None and self.latent.rope >= self.head_dim:
            raise ConfigError(
                f"head_dim is {self.head_dim}: it includes the {self.latent.rope} rotary elements, and more"
            )
        if self.experts is not None and self.experts.dense_layers >= self.layers:
            raise ConfigError(f"dense_layers is {self.experts.dense_layers}, but there are {self.layers} layers")

    def with_kv(self, dtype: Dtype) -> ModelShape:
        """The same model with KV of another type."""
        return replace(self, kv_dtype_bytes=DTYPE_BYTES[dtype])

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that a token leaves behind in all layers: keys and values of the KV heads, or the latent vector."""
        if self.latent is not None:
            return self.layers * (self.latent.rank + self.latent.rope)
        return self.layers * self.kv_heads * (self.head_dim + self.value_width)

    @property
    def kv_bytes_per_token(self) -> float:
        size = self.kv_elements_per_token * self.kv_dtype_bytes
        return int(size) if size == int(size) else size

    @property
    def layer_params(self) -> int:
        """Weights of all layers that one token is multiplied with. Those of experts it does not meet do not count."""
        gated = 3 * self.hidden
        if self.experts is None:
            return self.layers * (self._attention_params + gated * self.intermediate)
        experts = self.experts
        met = gated * experts.intermediate * (experts.per_token + experts.shared) + self.hidden * experts.total
        return (
            self.layers * self._attention_params
            + experts.dense_layers * gated * self.intermediate
            + (self.layers - experts.dense_layers) * met
        )

    @property
    def _attention_params(self) -> int:
        outputs = self.query_heads * self.value_width * self.hidden
        if self.latent is None:
            keys_and_values = self.kv_heads * (self.head_dim + self.value_width)
            return self.hidden * (self.query_heads * self.head_dim + keys_and_values) + outputs
        queries, latent = self.query_heads * self.head_dim, self.latent
        if latent.query_rank is None:
            queries *= self.hidden
        else:
            queries = latent.query_rank * (self.hidden + queries)
        return queries + self.hidden * (latent.rank + latent.rope) + self._expansion_params + outputs

    @property
    def _expansion_params(self) -> int:
        """Weights that make keys and values out of one layer's latent vector."""
        if self.latent is None:
            return 0
        return self.latent.rank * self.query_heads * (self.head_dim - self.latent.rope + self.value_width)

    @property
    def flops_per_token(self) -> int:
        """The linear part: operations of one token, wherever it stands."""
        return 2 * self.layer_params

    @property
    def flops_per_pair(self) -> int:
        """The quadratic part: operations of one token's attention to one other, or to itself, in all layers."""
        return 2 * self.layers * self.query_heads * (self.head_dim + self.value_width)

    @property
    def flops_per_cached_token(self) -> int:
        """What a cached token in front costs beside being attended to: MLA expands its keys and values again."""
        return 2 * self.layers * self._expansion_params

    def prefill_flops(self, start: int, end: int) -> int:
        """Operations that compute tokens [start, end) behind ``start`` cached ones, in one go, causal.

        >>> MODELS["llama-3.1-8b"].prefill_flops(0, 4000) / 1e12
        60.029927424
        """
        span(start, end)
        if start == end:
            return 0
        return (
            self.flops_per_token * (end - start)
            + self.flops_per_pair * pairs(start, end)
            + self.flops_per_cached_token * start
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str, params: int | None = None) -> ModelShape:
        """The shape that a ``config.json`` of the Transformers library describes.

        Known are gated decoders with full attention in every layer: Llama, Mistral, Qwen and alike, their mixtures of
        experts, and DeepSeek's MLA. ``params`` defaults to what the matrices add up to. A ConfigError says what is
        missing or unknown.
        """

        def read(*keys: str, default: int | None = None) -> int:
            for key in keys:
                if config.get(key) is not None:
                    return at_least(0, key, config[key])
            if default is None:
                raise ConfigError(f"{name}: the configuration has no {keys[0]}: not a decoder that this knows")
            return default

        window = config.get("sliding_window")
        if window and config.get("use_sliding_window", True):
            raise ConfigError(f"{name}: attends to windows of {window} tokens, which this count knows nothing of")
        hidden, heads, layers = read("hidden_size"), read("num_attention_heads"), read("num_hidden_layers")
        at_least(1, "num_attention_heads", heads)
        latent = experts = value_dim = None
        if config.get("kv_lora_rank"):
            rope = read("qk_rope_head_dim")
            head_dim, value_dim = read("qk_nope_head_dim") + rope, read("v_head_dim")
            latent = Latent(read("kv_lora_rank"), rope, config.get("q_lora_rank"))
        else:
            head_dim = read("head_dim", default=hidden // heads)
        total = read("n_routed_experts", "num_local_experts", "num_experts", default=0)
        if total:
            width = read("moe_intermediate_size", "intermediate_size")
            shared, dense = read("n_shared_experts", default=0), read("first_k_dense_replace", default=0)
            experts = Experts(total, read("num_experts_per_tok"), width, shared, dense)
        shape = cls(
            name=name,
            layers=layers,
            query_heads=heads,
            kv_heads=read("num_key_value_heads", default=heads),
            head_dim=head_dim,
            hidden=hidden,
            intermediate=read("intermediate_size"),
            vocab=read("vocab_size"),
            params=1 if params is None else params,
            value_dim=value_dim,
            latent=latent,
            experts=experts,
            source=name,
        )
        if params is not None:
            return shape
        tables = 1 if config.get("tie_word_embeddings") else 2
        return replace(shape, params=shape.all_layer_params + tables * shape.vocab * hidden)

    @property
    def all_layer_params(self) -> int:
        """Weights of all layers, those of every expert included; norms and biases not counted."""
        if self.experts is None:
            return self.layer_params
        unmet = self.experts.total - self.experts.per_token
        moe_layers = self.layers - self.experts.dense_layers
        return self.layer_params + moe_layers * unmet * 3 * self.hidden * self.experts.intermediate


def span(start: int, end: int) -> None:
    """Refuse what is no range of tokens."""
    at_least(0, "start", start)
    at_least(0, "end", end)
    if end < start:
        raise ConfigError(f"tokens [{start}, {end}) are no range: it ends before it starts")


def pairs(start: int, end: int) -> int:
    """Pairs of a token of [start, end) and one at or before it.

    >>> pairs(0, 3), pairs(2, 3)
    (6, 3)
    """
    return (end * (end + 1) - start * (start + 1)) // 2


def read_config(path: Path) -> ModelShape:
    """The shape in a ``config.json``; whatever is wrong with it is a ConfigError that names the file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, as in a model's config.json")
    return ModelShape.from_config(config, str(path))


def _huggingface(repository: str) -> str:
    return f"config.json of {repository} on the Hugging Face hub; parameters as its weights' index counts them"


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama-3.1-8b",
            layers=32,
            query_heads=32,
            kv_heads=8,
            head_dim=128,
            hidden=4096,
            intermediate=14336,
            vocab=128_256,
            params=8_030_261_248,
            source=_huggingface("meta-llama/Llama-3.1-8B"),
        ),
        ModelShape(
            name="llama-3.1-70b",
            layers=80,
            query_heads=64,
            kv_heads=8,
            head_dim=128,
            hidden=8192,
            intermediate=28672,
            vocab=128_256,
            params=70_553_706_496,
            source=_huggingface("meta-llama/Llama-3.1-70B"),
        ),
        ModelShape(
            name="llama-2-7b",
            layers=32,
            query_heads=32,
            kv_heads=32,
            head_dim=128,
            hidden=4096,
            intermediate=11008,
            vocab=32_000,
            params=6_738_415_616,
            source=_huggingface("meta-llama/Llama-2-7b-hf"),
        ),
        ModelShape(
            name="qwen2.5-7b",
            layers=28,
            query_heads=28,
            kv_heads=4,
            head_dim=128,
            hidden=3584,
            intermediate=18944,
            vocab=152_064,
            params=7_615_616_512,
            source=_huggingface("Qwen/Qwen2.5-7B"),
        ),
        ModelShape(
            name="qwen3-8b",
            layers=36,
            query_heads=32,
            kv_heads=8,
            head_dim=128,
            hidden=4096,
            intermediate=12288,
            vocab=151_936,
            params=8_190_735_360,
            source=_huggingface("Qwen/Qwen3-8B"),
        ),
        ModelShape(
            name="qwen3-30b-a3b",
            layers=48,
            query_heads=32,
            kv_heads=4,
            head_dim=128,
            hidden=2048,
            intermediate=6144,
            vocab=151_936,
            params=30_532_122_624,
            experts=Experts(total=128, per_token=8, intermediate=768),
            source=_huggingface("Qwen/Qwen3-30B-A3B"),
        ),
        ModelShape(
            name="deepseek-v3",
            layers=61,
            query_heads=128,
            kv_heads=128,
            head_dim=192,
            value_dim=128,
            hidden=7168,
            intermediate=18432,
            vocab=129_280,
            params=671_026_419_200,
            latent=Latent(rank=512, rope=64, query_rank=1536),
            experts=Experts(total=256, per_token=8, intermediate=2048, shared=1, dense_layers=3),
            source="config.json of deepseek-ai/DeepSeek-V3 on the Hugging Face hub; arXiv 2412.19437, section 4.2",
        ),
    )
}
"""Models by name. What a token meets is counted from the matrices; the tests hold the sum to the published total."""
