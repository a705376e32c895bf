"""`kvpager.cost`: shapes on paper, the textbook case, break-evens by brute force, calibration, and what is refused."""

from __future__ import annotations

import doctest
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvpager
from kvpager.cost import (
    DEVICES,
    LINKS,
    MAX_TOKENS,
    MODELS,
    CostModel,
    Device,
    Experts,
    Latent,
    Link,
    ModelShape,
    Rates,
    parse_device,
    parse_link,
    parse_seconds,
    read_config,
)
from kvpager.cost.crossing import last_negative
from kvpager.cost.fit import fit

LLAMA = MODELS["llama-3.1-8b"]
DEEPSEEK = MODELS["deepseek-v3"]
TINY = ModelShape(
    name="tiny", layers=3, query_heads=4, kv_heads=2, head_dim=5, hidden=7, intermediate=11, vocab=13, params=1000
)
LATENT = replace(TINY, kv_heads=4, head_dim=6, value_dim=4, latent=Latent(rank=3, rope=2, query_rank=8))
PLAIN_QUERY = replace(LATENT, latent=Latent(rank=3, rope=2))
EXPERTS = replace(TINY, experts=Experts(total=6, per_token=2, intermediate=5, shared=1, dense_layers=1))
TEXTBOOK = CostModel.of("llama-3.1-8b", "h100", "25GB/s")
# One block, one way, takes a second; so does a token, and attention nothing: seconds are counts.
COUNTING = CostModel(
    shape=TINY,
    device=DEVICES["h100"],
    link=Link("one", 4 * TINY.kv_bytes_per_token),
    block_size=4,
    rates=Rates(1.0, 0.0),
)

LLAMA_CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK_CONFIG = {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def approximately(value: float) -> Any:
    return pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", ["shapes", "devices", "model", "crossing", "step"])
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"kvpager.cost.{name}"))
    assert result.failed == 0
    assert result.attempted >= 1


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "kib"),
        [
            ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2 / 1024),
            ("llama-3.1-70b", 320),
            ("llama-2-7b", 512),
            ("qwen2.5-7b", 2 * 28 * 4 * 128 * 2 / 1024),
            ("qwen3-8b", 144),
            ("qwen3-30b-a3b", 96),
            ("deepseek-v3", 61 * (512 + 64) * 2 / 1024),
        ],
    )
    def test_kv_of_a_token(self, name: str, kib: float) -> None:
        assert MODELS[name].kv_bytes_per_token == 1024 * kib
        assert MODELS[name].with_kv("fp8").kv_bytes_per_token == 512 * kib
        assert replace(MODELS[name], kv_dtype_bytes=0.5).kv_bytes_per_token == 256 * kib

    @pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
    def test_the_matrices_add_up_to_the_published_total(self, shape: ModelShape) -> None:
        """Embedding and output head apart; what is missing are norms and biases."""
        counted = shape.all_layer_params + 2 * shape.vocab * shape.hidden
        assert 0.9999 < counted / shape.params <= 1
        assert shape.source

    def test_what_a_token_meets_of_experts_as_published(self) -> None:
        # 36.6e9 with the output head (DeepSeek-V3's README_WEIGHTS), 3.3e9 with both tables (Qwen3-30B-A3B's card).
        assert (DEEPSEEK.layer_params + DEEPSEEK.vocab * DEEPSEEK.hidden) / 1e9 == pytest.approx(36.6, abs=0.1)
        qwen = MODELS["qwen3-30b-a3b"]
        assert (qwen.layer_params + 2 * qwen.vocab * qwen.hidden) / 1e9 == pytest.approx(3.3, abs=0.1)

    @pytest.mark.parametrize(
        ("shape", "attention", "forward"),
        [
            (TINY, [(7, 20), (7, 10), (7, 10), (20, 7)], [[(7, 11), (7, 11), (11, 7)]] * 3),
            (LATENT, [(7, 8), (8, 24), (7, 5), (3, 16), (3, 16), (16, 7)], [[(7, 11), (7, 11), (11, 7)]] * 3),
            (PLAIN_QUERY, [(7, 24), (7, 5), (3, 16), (3, 16), (16, 7)], [[(7, 11), (7, 11), (11, 7)]] * 3),
            (
                EXPERTS,
                [(7, 20), (7, 10), (7, 10), (20, 7)],
                [[(7, 11), (7, 11), (11, 7)], *[[(7, 6), *[(7, 5), (7, 5), (5, 7)] * 3]] * 2],
            ),
        ],
        ids=["grouped", "latent", "latent, plain queries", "experts"],
    )
    def test_operations_matrix_by_matrix(
        self, shape: ModelShape, attention: list[tuple[int, int]], forward: list[list[tuple[int, int]]]
    ) -> None:
        """Each token through each matrix, then each head's scores and sums, one by one."""
        start, end = 3, 9
        operations = 0
        for layer in range(shape.layers):
            for token in range(start, end):
                operations += sum(2 * rows * columns for rows, columns in attention + forward[layer])
                operations += (token + 1) * shape.query_heads * 2 * (shape.head_dim + shape.value_width)
        expanded = 2 * 3 * 32 * start * 3 if shape.latent else 0
        assert shape.prefill_flops(start, end) == operations + expanded

    @given(st.sampled_from([*MODELS.values(), TINY, LATENT]), *[st.integers(0, 200_000)] * 3)
    def test_a_prefill_in_two_parts(self, shape: ModelShape, a: int, b: int, c: int) -> None:
        """The same work, but that MLA expands the first part once more."""
        start, middle, end = sorted((a, b, c))
        whole = shape.prefill_flops(start, end)
        parts = shape.prefill_flops(start, middle) + shape.prefill_flops(middle, end)
        if start < middle < end:
            assert parts - whole == shape.flops_per_cached_token * middle
        else:
            assert parts == whole
        assert shape.prefill_flops(end, end) == 0

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"layers": 0}, "layers is 0; it must be a whole number of at least 1"),
            ({"layers": 1.5}, "layers is 1.5; it must be a whole number"),
            ({"layers": True}, "layers is True; it must be a whole number"),
            ({"hidden": "wide"}, "hidden is 'wide'; it must be a whole number"),
            ({"kv_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
            ({"kv_dtype_bytes": 0}, "kv_dtype_bytes is 0; it must be a finite number above 0"),
            ({"kv_dtype_bytes": float("inf")}, "kv_dtype_bytes is inf; it must be a finite number above 0"),
            ({"value_dim": 0}, "value_dim is 0"),
            ({"latent": Latent(3, 5)}, "head_dim is 5: it includes the 5 rotary elements, and more"),
            ({"experts": Experts(4, 1, 5, dense_layers=3)}, "dense_layers is 3, but there are 3 layers"),
        ],
    )
    def test_shapes_that_are_none(self, change: dict[str, Any], problem: str) -> None:
        with pytest.raises(kvpager.ConfigError) as refused:
            replace(TINY, **change)
        assert problem in str(refused.value)

    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda: Latent(0, 4), "rank is 0"),
            (lambda: Latent(4, 4, 0), "query_rank is 0"),
            (lambda: Experts(4, 5, 8), "per_token is 5, but there are 4 experts in total"),
            (lambda: Experts(4, 1, 8, shared=-1), "shared is -1"),
            (lambda: TINY.prefill_flops(3, 2), "tokens [3, 2) are no range"),
            (lambda: TINY.prefill_flops(-1, 2), "start is -1"),
        ],
    )
    def test_other_numbers_that_are_none(self, make: Callable[[], object], problem: str) -> None:
        with pytest.raises(kvpager.ConfigError) as refused:
            make()
        assert problem in str(refused.value)


class TestConfigurations:
    @pytest.mark.parametrize(
        ("config", "shape"), [(LLAMA_CONFIG, LLAMA), (DEEPSEEK_CONFIG, DEEPSEEK)], ids=["llama", "deepseek"]
    )
    def test_as_in_the_table(self, config: dict[str, Any], shape: ModelShape) -> None:
        read = ModelShape.from_config(config, shape.name, shape.params)
        assert replace(read, source=shape.source) == shape

    def test_parameters_are_counted_where_nobody_says(self) -> None:
        read = ModelShape.from_config(LLAMA_CONFIG, "mine")
        assert read.params == pytest.approx(LLAMA.params, rel=1e-4)
        tied = ModelShape.from_config(LLAMA_CONFIG | {"tie_word_embeddings": True}, "mine")
        assert read.params - tied.params == 128256 * 4096

    def test_a_window_that_is_not_used_is_none(self) -> None:
        unused = LLAMA_CONFIG | {"sliding_window": 4096, "use_sliding_window": False}
        assert ModelShape.from_config(unused, "mine") == ModelShape.from_config(LLAMA_CONFIG, "mine")

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"vocab_size": None}, "mine: the configuration has no vocab_size: not a decoder that this knows"),
            ({"sliding_window": 4096}, "mine: attends to windows of 4096 tokens"),
            ({"num_attention_heads": 0}, "num_attention_heads is 0"),
            ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
            ({"num_key_value_heads": 5}, "32 query heads cannot share 5 KV heads"),
        ],
    )
    def test_unknown_ones(self, change: dict[str, Any], problem: str) -> None:
        with pytest.raises(kvpager.ConfigError) as refused:
            ModelShape.from_config(LLAMA_CONFIG | change, "mine")
        assert problem in str(refused.value)

    def test_files(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(LLAMA_CONFIG), encoding="utf-8")
        assert read_config(path).kv_bytes_per_token == 131072
        for content, problem in [("{", "no JSON"), ("[]", "expected a JSON object")]:
            path.write_text(content, encoding="utf-8")
            with pytest.raises(kvpager.ConfigError, match=problem):
                read_config(path)
        with pytest.raises(kvpager.ConfigError, match="cannot be read: No such file"):
            read_config(tmp_path / "missing.json")


class TestTables:
    def test_pcie_as_specified(self) -> None:
        """Transfers a second x lanes x 128 of 130 bits, and the share that copies reach."""
        for name, transfers, lanes in [("pcie3", 8e9, 16), ("pcie4", 16e9, 16), ("pcie5", 32e9, 16), ("nvme", 16e9, 4)]:
            assert LINKS[name].bytes_per_second == pytest.approx(0.8 * transfers * lanes * 128 / 130 / 8, rel=1e-3)

    @pytest.mark.parametrize("each", [*DEVICES.values(), *LINKS.values()], ids=lambda each: each.name)
    def test_each_has_its_source(self, each: Device | Link) -> None:
        assert each.source

    @pytest.mark.parametrize(
        ("text", "speed"),
        [
            ("25GB/s", 25e9),
            (" 2.5 gb/s ", 2.5e9),
            ("24GiB/s", 24 * 2**30),
            ("100Gbit/s", 12.5e9),
            ("900 B/s", 900),
            ("1TB/s", 1e12),
            ("PCIe4", LINKS["pcie4"].bytes_per_second),
        ],
    )
    def test_links(self, text: str, speed: float) -> None:
        assert parse_link(text).bytes_per_second == speed
        assert parse_link(text, 1e-5).seconds_per_piece == 1e-5

    @pytest.mark.parametrize("text", ["", "25", "25GB", "-1GB/s", "25GHz/s", "0GB/s", "1e3GB/s", "nanGB/s", "pcie9"])
    def test_no_links(self, text: str) -> None:
        with pytest.raises(kvpager.ConfigError):
            parse_link(text)

    @pytest.mark.parametrize(("text", "peak"), [("400TFLOP/s", 4e14), ("1.5 pflops", 1.5e15), ("H100", 989.4e12)])
    def test_devices(self, text: str, peak: float) -> None:
        assert parse_device(text).bf16_flops == peak

    @pytest.mark.parametrize("text", ["", "fast", "400", "0TFLOP/s", "400TB/s"])
    def test_no_devices(self, text: str) -> None:
        with pytest.raises(kvpager.ConfigError):
            parse_device(text)

    @pytest.mark.parametrize(
        ("text", "seconds"), [("10us", 1e-5), ("10µs", 1e-5), ("0.5 ms", 5e-4), ("2s", 2), ("3ns", 3e-9)]
    )
    def test_times(self, text: str, seconds: float) -> None:
        assert parse_seconds(text) == approximately(seconds)

    @pytest.mark.parametrize("text", ["", "10", "us", "-1us", "10min"])
    def test_no_times(self, text: str) -> None:
        with pytest.raises(kvpager.ConfigError):
            parse_seconds(text)

    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda: Link("x", 0), "bytes_per_second is 0"),
            (lambda: Link("x", 1, -1), "seconds_per_piece is -1; it must be a finite number at least 0"),
            (lambda: Link("x", "fast"), "bytes_per_second is 'fast'"),
            (lambda: Device("x", 0, None, 1), "bf16_flops is 0"),
            (lambda: Device("x", 1, -1, 1), "fp8_flops is -1"),
            (lambda: Device("x", 1, 1, 0), "bytes_per_second is 0"),
            (lambda: Device("x", 1, 1, 1, 1.01), "utilisation is 1.01; it is a share of the peak, at most 1"),
            (lambda: Device("x", 1, 1, 1, 0), "utilisation is 0"),
        ],
    )
    def test_hardware_that_is_none(self, make: Callable[[], object], problem: str) -> None:
        with pytest.raises(kvpager.ConfigError) as refused:
            make()
        assert problem in str(refused.value)


class TestTextbook:
    """128 KiB a token, 500 MiB in 4,000 tokens, some 40 ms over 25 GB/s, and a prefill in the same tens of ms."""

    def test_swap(self) -> None:
        decision = TEXTBOOK.preempt(4000)
        assert LLAMA.kv_bytes_per_token == 128 * 1024
        assert decision.move_bytes == 2 * 500 * 1024**2
        assert decision.move_seconds == approximately(2 * 500 * 1024**2 / 25e9)
        assert 0.040 < decision.move_seconds < 0.043

    def test_prefill(self) -> None:
        decision = TEXTBOOK.preempt(4000)
        assert 0.010 <= decision.recompute_seconds < 0.100
        # By hand: the matrices of a layer, and attention over n(n+1)/2 pairs.
        matrices = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336
        operations = 4000 * 2 * 32 * matrices + 32 * 32 * (2 * 128 + 2 * 128) * 4000 * 4001 / 2
        assert decision.recompute_seconds == approximately(operations / (0.65 * 989.4e12))
        assert TEXTBOOK.attention_seconds(0, 4000) == approximately(32 * 32 * 512 * 8_002_000 / (0.65 * 989.4e12))
        in_fp8 = replace(TEXTBOOK, dtype="fp8").preempt(4000).recompute_seconds
        assert 0.010 <= in_fp8 < decision.recompute_seconds

    def test_a_fetch_is_one_way(self) -> None:
        swap, fetch = TEXTBOOK.preempt(4000), TEXTBOOK.fetch(0, 4000)
        assert fetch.move_seconds == approximately(swap.move_seconds / 2)
        assert (fetch.action, fetch.recompute_seconds) == ("fetch", swap.recompute_seconds)
        assert fetch.margin_seconds == approximately(fetch.recompute_seconds - fetch.move_seconds)

    def test_without_grouped_queries_the_answer_turns_round(self) -> None:
        assert CostModel.of("llama-2-7b", "h100", "25GB/s").preempt(4000).action == "recompute"

    def test_ranks(self) -> None:
        """Eight ranks compute and copy an eighth each; of MLA each copies all."""
        for model, copied in [(MODELS["llama-3.1-70b"], 8), (MODELS["qwen3-8b"], 8), (DEEPSEEK, 1)]:
            one = CostModel.of(model, "h100", "25GB/s").preempt(5000)
            eight = CostModel.of(model, "h100", "25GB/s", ranks=8).preempt(5000)
            assert eight.move_seconds == approximately(one.move_seconds / copied)
            assert eight.recompute_seconds == approximately(one.recompute_seconds / 8)
        four_heads = CostModel.of("qwen2.5-7b", "h100", "25GB/s", ranks=8)
        assert four_heads.bytes_per_block == 16 * MODELS["qwen2.5-7b"].kv_bytes_per_token / 4

    def test_alone(self) -> None:
        """A prefill of one token reads 16 GB at 3.35 TB/s; a long one is bound by its operations as before."""
        alone = replace(TEXTBOOK, alone=True)
        assert alone.prefill_seconds(0, 1) == approximately(2 * 8_030_261_248 / 3.35e12)
        assert alone.prefill_seconds(0, 4000) == TEXTBOOK.prefill_seconds(0, 4000)
        assert alone.prefill_seconds(7, 7) == 0


class TestBlocks:
    """What moves is what the pager moves."""

    @pytest.mark.parametrize(
        ("tokens", "cached", "host", "blocks"),
        [
            (1, 0, 0, 2),
            (4, 0, 0, 2),
            (5, 0, 0, 4),
            (9, 4, 0, 5),
            (9, 4, 8, 3),
            (12, 0, 12, 3),
            (12, 12, 12, 0),
            (0, 0, 0, 0),
        ],
    )
    def test_by_hand(self, tokens: int, cached: int, host: int, blocks: int) -> None:
        assert COUNTING.swap_seconds(tokens, num_cached=cached, num_host_tokens=host) == approximately(blocks)
        decision = COUNTING.preempt(tokens, num_cached=cached, num_host_tokens=host)
        assert decision.move_seconds == approximately(blocks)
        assert decision.move_bytes == approximately(blocks * 4 * TINY.kv_bytes_per_token)
        assert decision.recompute_seconds == tokens - cached

    @pytest.mark.parametrize(
        ("tokens", "shared"), [(n, s) for n in (1, 3, 4, 5, 8, 9, 11, 23) for s in (0, 4, 8) if s < n]
    )
    def test_as_the_pager(self, tokens: int, shared: int) -> None:
        """Out what the host lacks, back what the device lost: the plans of a pager have so many blocks."""
        pager = kvpager.Pager(num_blocks=32, block_size=4, num_host_blocks=32)
        prompt = list(range(100, 100 + tokens))
        holder = pager.admit([*prompt[:shared], 7])
        holder.commit()
        victim = pager.admit(prompt)
        victim.commit()
        assert victim.num_cached == shared
        out = victim.swap_out()
        pager.start(out)
        pager.complete(out)
        flood = pager.admit(list(range(1000, 1000 + 4 * (32 - len(holder.block_ids)))))  # leaves what somebody holds
        flood.commit()
        flood.release()
        back = victim.swap_in()
        moved = COUNTING.swap_seconds(tokens, num_cached=shared)
        assert moved == approximately(len(out) + len(back))
        pager.cancel(back)
        victim.release()
        holder.release()

    def test_pieces(self) -> None:
        slow = replace(COUNTING, link=replace(COUNTING.link, seconds_per_piece=0.25), pieces_per_block=6)
        assert slow.block_seconds() == approximately(1 + 6 * 0.25)
        assert slow.fetch_seconds(0, 9) == approximately(3 * 2.5)
        assert slow.block_seconds(Link("instant", 1e30)) == pytest.approx(0, abs=1e-20)

    def test_nothing_to_do_is_a_recompute_of_nothing(self) -> None:
        for decision in (COUNTING.preempt(8, num_cached=8), COUNTING.preempt(0), COUNTING.fetch(3, 3)):
            assert decision.action == "recompute"
            assert decision.recompute_seconds == 0


RATE = st.floats(1e-6, 10)
MODELS_DRAWN = st.builds(
    CostModel,
    shape=st.sampled_from([TINY, LATENT]),
    device=st.builds(Device, st.just("d"), st.just(1e12), st.just(None), st.floats(10, 1e4)),
    link=st.builds(Link, st.just("l"), st.floats(1e2, 1e4), st.sampled_from([0.0, 0.3, 2.0])),
    block_size=st.sampled_from([1, 3, 4, 16]),
    load=st.sampled_from([0.0, 0.5, 0.9]),
    pieces_per_block=st.sampled_from([1, 3]),
    alone=st.booleans(),
    rates=st.builds(Rates, RATE, st.sampled_from([0.0, 1e-4, 1e-2, 0.1])),
)


class TestProperties:
    @given(MODELS_DRAWN, *[st.integers(0, 300)] * 3)
    def test_more_tokens_take_longer_and_cached_ones_spare(self, model: CostModel, a: int, b: int, c: int) -> None:
        low, middle, high = sorted((a, b, c))
        assert model.prefill_seconds(low, middle) <= model.prefill_seconds(low, high)
        assert model.swap_seconds(middle) <= model.swap_seconds(high)
        assert model.swap_seconds(high, num_cached=middle) <= model.swap_seconds(high, num_cached=low)
        assert model.swap_seconds(high, num_host_tokens=middle) <= model.swap_seconds(high, num_host_tokens=low)
        assert model.fetch_seconds(middle, high) <= model.fetch_seconds(low, high)
        if model.shape.latent is None:  # MLA expands what is cached: that may cost more than it spares
            assert model.prefill_seconds(middle, high) <= model.prefill_seconds(low, high)

    @given(MODELS_DRAWN, st.integers(1, 500), st.floats(0, 0.99), st.floats(0, 0.99))
    def test_load(self, model: CostModel, tokens: int, one: float, other: float) -> None:
        low, high = sorted((one, other))
        alone = model.prefill_seconds(0, tokens, load=0)
        assert model.prefill_seconds(0, tokens, load=high) == pytest.approx(alone / (1 - high))
        assert model.preempt(tokens, load=low).recompute_seconds <= model.preempt(tokens, load=high).recompute_seconds
        assert model.preempt(tokens, load=low).move_seconds == model.preempt(tokens, load=high).move_seconds
        earlier, later = (model.break_even_tokens(load=load) or MAX_TOKENS + 1 for load in (high, low))
        assert earlier <= later

    @given(MODELS_DRAWN, st.integers(1, 500), st.floats(1.01, 100))
    def test_units(self, model: CostModel, tokens: int, factor: float) -> None:
        """Twice the bytes a second is half the seconds; twice the bytes is twice; and break-evens follow."""
        bare = replace(model, link=replace(model.link, seconds_per_piece=0.0))
        faster = replace(bare, link=replace(bare.link, bytes_per_second=bare.link.bytes_per_second * factor))
        larger = replace(bare, shape=replace(bare.shape, kv_dtype_bytes=2 * factor))
        assert faster.swap_seconds(tokens) * factor == pytest.approx(bare.swap_seconds(tokens))
        assert larger.swap_seconds(tokens) == pytest.approx(bare.swap_seconds(tokens) * factor)
        assert larger.preempt(tokens).move_bytes == pytest.approx(bare.preempt(tokens).move_bytes * factor)
        assert (faster.break_even_tokens() or MAX_TOKENS + 1) <= (bare.break_even_tokens() or MAX_TOKENS + 1)

    @given(MODELS_DRAWN, st.integers(0, 60), st.integers(1, 200), st.integers(0, 200), st.sampled_from([0.0, 0.7]))
    def test_decisions_agree_with_the_policy(
        self, model: CostModel, start: int, tokens: int, host: int, load: float
    ) -> None:
        class Victim:
            num_cached, num_committed = start, start + tokens

        swap = model.preempt(start + tokens, num_cached=start, num_host_tokens=min(host, start + tokens), load=load)
        assert model.should_swap(Victim(), num_host_tokens=host, load=load) == (swap.action == "swap")
        fetch = model.fetch(start, start + tokens, load=load)
        assert model.should_fetch(start, tokens, load=load) == (fetch.action == "fetch")
        for decision in (swap, fetch):
            assert (decision.action == "recompute") == (decision.recompute_seconds < decision.move_seconds)
        if tokens >= model.fetch_min_tokens(start=start, load=load):
            assert fetch.action == "fetch"


class TestBreakEven:
    LOOKED_AT = 600

    @given(MODELS_DRAWN, st.sampled_from(["swap", "fetch"]), st.integers(0, 50), st.integers(0, 80))
    def test_is_where_the_lines_cross(self, model: CostModel, way: Any, start: int, host: int) -> None:
        """Computing is cheaper with one token less, and with no length from there on: looked at one by one."""

        def computing_is_cheaper(tokens: int) -> bool:
            end = start + tokens
            if way == "fetch":
                move = model.fetch_seconds(start, end)
            else:
                size = model.block_size
                blocks = -(-end // size)
                move = (blocks - start // size + max(0, blocks - host // size)) * model.block_seconds()
            return model.prefill_seconds(start, end) < move

        found = model.break_even_tokens(way, start=start, num_host_tokens=host)
        if found is None:
            assert computing_is_cheaper(MAX_TOKENS - start)
            return
        if found > 1:
            assert computing_is_cheaper(found - 1)
        near = range(found, found + self.LOOKED_AT)
        assert [tokens for tokens in near if computing_is_cheaper(tokens)] == []

    def test_by_hand(self) -> None:
        # A block of 4 costs 2 out and back; a token costs 1. One token: 1 < 2. Two: 2 = 2. Five: 5 > 4.
        assert COUNTING.break_even_tokens("swap") == 2
        assert COUNTING.break_even_tokens("fetch") == 1
        # A block now costs 3: with 4k + 1 tokens, 6(k + 1) against 4k + 1. Never.
        slow = replace(COUNTING, link=replace(COUNTING.link, bytes_per_second=COUNTING.link.bytes_per_second / 3))
        assert slow.break_even_tokens("swap") is None
        # One way, 3 a block: computing wins at 1 and 2 tokens (3) and at 5 (6); 9 are even, and then never.
        assert slow.break_even_tokens("fetch") == 6
        # Out and back with 1.5 a token: whole blocks are even, and one token more is cheaper to compute, for ever.
        assert replace(slow, rates=Rates(1.5, 0.0)).break_even_tokens("swap") is None

    def test_always_and_never(self) -> None:
        free = replace(COUNTING, link=Link("free", 1e30))
        hopeless = replace(COUNTING, link=Link("hopeless", 1e-3))
        assert (free.break_even_tokens(), free.fetch_min_tokens()) == (1, 1)
        assert hopeless.break_even_tokens() is None
        assert hopeless.fetch_min_tokens() == MAX_TOKENS
        # Attention's square wins against any link, in the end.
        assert replace(hopeless, rates=Rates(0.0, 1.0)).break_even_tokens() is not None

    def test_on_the_other_side_of_what_the_host_has(self) -> None:
        """Up to 80 tokens nothing is copied out, and swapping is cheaper; behind them computing is, for ever."""
        model = replace(COUNTING, rates=Rates(0.4, 0.0))
        assert model.preempt(80, num_host_tokens=80).action == "swap"
        assert model.break_even_tokens(num_host_tokens=80) is None
        # With attention it turns once more.
        turning = replace(model, rates=Rates(0.4, 0.0001))
        assert turning.preempt(80, num_host_tokens=80).action == "swap"
        found = turning.break_even_tokens(num_host_tokens=80)
        assert found is not None
        assert found > 80

    @given(st.integers(-50, 50), st.integers(0, 120), *[st.integers(-40, 40)] * 2, st.integers(0, 3))
    def test_last_negative(self, low: int, length: int, root: int, level: int, steep: int) -> None:
        def f(x: int) -> float:
            return steep * abs(x - root) + level

        high = low + length
        expected = max((x for x in range(low, high + 1) if f(x) < 0), default=None)
        assert last_negative(f, low, high) == expected


class TestCalibration:
    @given(
        st.sampled_from([LLAMA, DEEPSEEK]),
        st.floats(1e-8, 1e-3),
        st.floats(1e-12, 1e-7),
        st.sampled_from([0.0, 0.5]),
        st.lists(st.tuples(st.integers(0, 100_000), st.integers(64, 100_000)), max_size=4),
    )
    def test_recovers_the_coefficients(
        self, shape: ModelShape, a: float, b: float, load: float, more: list[tuple[int, int]]
    ) -> None:
        assume(1e-3 < 1e4 * b / a < 1e3)  # both parts have to show in what is measured
        true = CostModel.of(shape, "h100", "25GB/s", rates=Rates(a, b), load=load)
        lengths = [(0, 512), (0, 32768), *more]
        points = [(start, tokens, true.prefill_seconds(start, start + tokens)) for start, tokens in lengths]
        fitted = CostModel.of(shape, "a100", "1GB/s").calibrate(points, load=load)
        assert fitted.rates is not None
        assert fitted.rates.seconds_per_token == pytest.approx(a, rel=1e-6)
        assert fitted.rates.seconds_per_pair == pytest.approx(b, rel=1e-6)
        assert fitted.prefill_seconds(1000, 5000) == pytest.approx(true.prefill_seconds(1000, 5000, load=0))

    @given(st.lists(st.tuples(st.floats(1, 1e3), st.floats(1, 1e6), st.floats(1e-3, 1e3)), min_size=2, max_size=6))
    def test_no_allowed_pair_fits_better(self, rows: list[tuple[float, float, float]]) -> None:
        try:
            a, b = fit(rows)
        except kvpager.ConfigError:
            return

        def errors(a: float, b: float) -> float:
            return sum(((a * x + b * y) / s - 1) ** 2 for x, y, s in rows)

        assert a >= 0
        assert b >= 0
        least = errors(a, b)
        for left in (0, a / 2, 0.99 * a, 1.01 * a, 2 * a + 1e-9):
            for right in (0, b / 2, 0.99 * b, 1.01 * b, 2 * b + 1e-9):
                assert errors(left, right) >= least - 1e-6

    def test_coefficients_below_zero_become_zero(self) -> None:
        falling = TEXTBOOK.calibrate([(0, 100, 0.10), (0, 10_000, 1.0)])
        assert falling.rates is not None
        assert falling.rates.seconds_per_pair == 0
        steep = TEXTBOOK.calibrate([(0, 100, 0.0001), (0, 10_000, 10.0)])
        assert steep.rates is not None
        assert steep.rates.seconds_per_token == 0

    @pytest.mark.parametrize(
        ("points", "problem"),
        [
            ([], "0 points cannot tell two coefficients apart"),
            ([(0, 100, 1.0)], "1 points cannot tell two coefficients apart"),
            ([(0, 100, 1.0), (0, 100, 1.1)], "the points are all of one kind"),
            ([(0, 4096, 1.0), (0, 4096, 1.1), (0, 4097, 1.1)], "the points are all of one kind"),
            ([(0, 100, 0.0), (0, 200, 1.0)], "seconds is 0.0; it must be a finite number above 0"),
            ([(0, 100, float("nan")), (0, 200, 1.0)], "seconds is nan"),
            ([(0, 0, 1.0), (0, 200, 1.0)], "tokens is 0"),
            ([(-1, 10, 1.0), (0, 200, 1.0)], "start is -1"),
            ([(0, 10)], "point (0, 10): expected (start, tokens, seconds)"),
        ],
    )
    def test_points_that_do_not_do(self, points: Any, problem: str) -> None:
        with pytest.raises(kvpager.ConfigError) as refused:
            TEXTBOOK.calibrate(points)
        assert problem in str(refused.value)

    def test_a_measured_run(self) -> None:
        """A pretended engine moves a pretended clock; the first run of a length is slow, and the others wobble."""
        now, runs = [0.0], dict[tuple[int, int], int]()

        def prefill(start: int, tokens: int) -> None:
            nth = runs[start, tokens] = runs.get((start, tokens), 0) + 1
            wobble = {1: 10.0, 2: 1.5, 3: 1.0}.get(nth, 1.2)
            now[0] += wobble * TEXTBOOK.prefill_seconds(start, start + tokens)

        lengths = [(0, 512), (2048, 512), (0, 8192)]
        measured = CostModel.of("llama-3.1-8b", "a100", "25GB/s").calibrate_run(prefill, lengths, clock=lambda: now[0])
        assert set(runs.values()) == {4}
        assert measured.prefill_seconds(0, 4000) == pytest.approx(TEXTBOOK.prefill_seconds(0, 4000))
        with pytest.raises(kvpager.ConfigError, match="repeats is 0"):
            TEXTBOOK.calibrate_run(prefill, lengths, repeats=0)


class TestPolicy:
    def test_admit_takes_the_threshold(self) -> None:
        pager = kvpager.Pager(num_blocks=16, block_size=4, num_host_blocks=16)
        prompt = list(range(1, 34))
        with pager.admit(prompt) as first:
            first.commit()
        plan = pager.offload(8)
        assert plan is not None
        pager.start(plan)
        pager.complete(plan)
        with pager.admit(list(range(1000, 1064))) as flood:
            flood.commit()
        found = pager.match(prompt)
        assert (found.num_tokens, found.num_host_tokens) == (0, 32)
        hopeless = replace(COUNTING, link=Link("hopeless", 1e-3))
        assert not hopeless.should_fetch(found.num_tokens, found.num_host_tokens)
        with pager.admit(prompt, fetch=True, fetch_min_tokens=hopeless.fetch_min_tokens()) as computed:
            assert computed.state == "running"
        assert COUNTING.should_fetch(found.num_tokens, found.num_host_tokens)
        with pager.admit(prompt, fetch=True, fetch_min_tokens=COUNTING.fetch_min_tokens()) as fetched:
            assert fetched.state == "fetching"

    def test_another_link_and_block_size(self) -> None:
        disk = parse_link("nvme")
        at_16, at_64 = (TEXTBOOK.fetch_min_tokens(disk, block_size=size) for size in (16, 64))
        assert at_16 == TEXTBOOK.fetch_min_tokens(disk)
        assert at_16 < at_64
        assert TEXTBOOK.fetch_min_tokens(disk, start=50_000) < at_16
        assert TEXTBOOK.fetch(0, 4000, link=disk).move_seconds == TEXTBOOK.fetch_seconds(0, 4000, link=disk)

    def test_a_victim(self) -> None:
        pager = kvpager.Pager(num_blocks=64, block_size=4)
        victim = pager.admit(list(range(40)))
        assert not COUNTING.should_swap(victim)  # nothing is computed: nothing is lost
        victim.commit()
        assert COUNTING.should_swap(victim)
        twin = pager.admit(list(range(41)))
        twin.commit()
        assert (twin.num_cached, len(twin)) == (40, 41)
        assert not COUNTING.should_swap(twin)  # one token to compute, and 11 blocks to copy out
        assert not COUNTING.should_swap(twin, num_host_tokens=1000)  # still one block out and back
        assert COUNTING.should_swap(twin, num_cached=0)
        twin.release()
        victim.release()
        with pytest.raises(kvpager.StaleHandle):
            COUNTING.should_swap(victim)

    @pytest.mark.parametrize(
        ("call", "problem"),
        [
            (lambda: TEXTBOOK.preempt(-1), "num_tokens is -1"),
            (lambda: TEXTBOOK.preempt(10, num_cached=11), "num_cached is 11, but the sequence has 10 tokens"),
            (lambda: TEXTBOOK.preempt(10, num_host_tokens=11), "num_host_tokens is 11, but the sequence has 10"),
            (lambda: TEXTBOOK.preempt(10, load=1), "load is 1; it must be a finite number at least 0 and below 1"),
            (lambda: TEXTBOOK.fetch(5, 4), "tokens [5, 4) are no range"),
            (lambda: TEXTBOOK.fetch(0.5, 4), "start is 0.5"),
            (lambda: TEXTBOOK.break_even_tokens("move"), "way is 'move'; expected swap or fetch"),
            (lambda: TEXTBOOK.break_even_tokens(start=-1), "start is -1"),
            (lambda: TEXTBOOK.should_fetch(-1, 3), "num_device_tokens is -1"),
            (lambda: TEXTBOOK.should_fetch(1, -3), "num_host_tokens is -3"),
            (lambda: TEXTBOOK.fetch_min_tokens(block_size=0), "block_size is 0"),
            (lambda: replace(TEXTBOOK, load=-0.1), "load is -0.1"),
            (lambda: replace(TEXTBOOK, ranks=0), "ranks is 0"),
            (lambda: replace(TEXTBOOK, dtype="int4"), "dtype is 'int4'; expected one of bf16, fp8"),
            (lambda: replace(TEXTBOOK, rates=Rates(0.0, 0.0)), "both rates are 0"),
            (lambda: replace(TEXTBOOK, rates=Rates(-1.0, 0.0)), "seconds_per_token is -1"),
            (lambda: CostModel.of("llama-3.1-8b", "a100", "pcie4", dtype="fp8"), "device a100 has no fp8"),
            (lambda: CostModel.of("gpt-5", "a100", "pcie4"), "model 'gpt-5': expected one of llama-3.1-8b,"),
        ],
    )
    def test_bad_questions(self, call: Callable[[], object], problem: str) -> None:
        with pytest.raises(kvpager.ConfigError) as refused:
            call()
        assert problem in str(refused.value)
