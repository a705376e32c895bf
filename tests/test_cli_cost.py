"""`kvpager cost`: the command, its numbers beside those of `kvpager.cost`, its picture, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import Says

from kvpager.cli import main
from kvpager.cost import DEVICES, LINKS, MODELS, CostModel, parse_seconds


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    return Says("cost", capsys)


TEXTBOOK = ("--model", "llama-3.1-8b", "--gpu", "h100", "--link", "25GB/s", "--tokens", "4000")


class TestTextbook:
    def test_text(self, says: Says) -> None:
        out = says.text(*TEXTBOOK)
        assert out.startswith("llama-3.1-8b on h100 in bf16 at 65% of its peak: 25GB/s, blocks of 16 tokens\n")
        rows = [line.split() for line in out.splitlines()]
        assert [">", "4,000", "500.0", "MiB", "41.9", "21.0", "93.3", "7.0%", "swap", "fetch"] in rows
        assert "A victim: swap, 51.4 ms less. From 8 tokens on the swap is never dearer." in out
        assert "A hit: fetch, 72.4 ms less. From 4 tokens on the fetch is never dearer." in out

    def test_these_are_the_defaults(self, says: Says) -> None:
        assert says.text() == says.text(*TEXTBOOK)

    def test_json(self, says: Says) -> None:
        result = says.json(*TEXTBOOK)
        model = CostModel.of("llama-3.1-8b", "h100", "25GB/s")
        swap = result["asked"]["preempt"]
        decision = model.preempt(4000)
        assert swap == {
            "action": "swap",
            "move_seconds": decision.move_seconds,
            "recompute_seconds": decision.recompute_seconds,
            "move_bytes": 1_048_576_000,
            "break_even_tokens": 8,
            "margin_seconds": decision.margin_seconds,
        }
        assert result["model"]["kv_bytes_per_token"] == 131_072
        assert result["asked"]["kv_bytes"] == 500 * 2**20
        assert result["asked"]["fetch"]["action"] == "fetch"
        assert [row["tokens"] for row in result["rows"]] == [250 * 2**step for step in range(9)]
        assert (result["command"], result["calibrated"], result["plot"]) == ("cost", False, None)


class TestOptions:
    def test_all_of_them_reach_the_model(self, says: Says) -> None:
        options = "--gpu h200 --link pcie5 --tokens 9000 --cached 4000 --on-host 6000 --block-size 32 --kv-dtype fp8"
        options += " --dtype fp8 --utilisation 50% --load 25% --ranks 2 --latency 10us --pieces 64 --alone"
        result = says.json("--model", "qwen3-8b", *options.split())
        model = CostModel(
            shape=MODELS["qwen3-8b"].with_kv("fp8"),
            device=replace(DEVICES["h200"], utilisation=0.5),
            link=replace(LINKS["pcie5"], seconds_per_piece=parse_seconds("10us")),
            block_size=32,
            dtype="fp8",
            load=0.25,
            ranks=2,
            pieces_per_block=64,
            alone=True,
        )
        decision = model.preempt(9000, num_cached=4000, num_host_tokens=6000)
        for name in ("action", "move_seconds", "recompute_seconds", "move_bytes", "break_even_tokens"):
            assert result["asked"]["preempt"][name] == getattr(decision, name)
        assert result["asked"]["fetch"]["move_seconds"] == model.fetch(4000, 9000).move_seconds
        assert [row["tokens"] for row in result["rows"]][:2] == [4500, 9000]
        out = says.text("--model", "qwen3-8b", *options.split())
        title = "qwen3-8b on 2 h200 in fp8 at 50% of its peak: pcie5, blocks of 32 tokens; 25% of the GPU is others';"
        assert out.startswith(f"{title} 4,000 tokens stay cached; 6,000 tokens are on the host\n")
        assert "tokens behind the cached ones on the swap" in out

    def test_points(self, says: Says) -> None:
        true = CostModel.of("llama-3.1-8b", "a100", "25GB/s")
        points = [f"--point=0:{n}:{1e3 * true.prefill_seconds(0, n):.12f}ms" for n in (512, 8192)]
        result = says.json(*points)
        assert result["calibrated"]
        assert result["asked"]["preempt"]["recompute_seconds"] == pytest.approx(true.prefill_seconds(0, 4000))
        assert says.text(*points).startswith("llama-3.1-8b as measured at 2 points: 25GB/s,")

    def test_words_for_always_and_never(self, says: Says) -> None:
        assert "A hit: fetch" in (out := says.text("--link", "100TB/s"))
        assert "The swap pays at every length." in out
        assert "The fetch pays at every length." in out
        assert "At no length does the swap pay." in says.text("--link", "1B/s")

    def test_a_configuration_of_ones_own(self, says: Says) -> None:
        config = {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
        Path("config.json").write_text(json.dumps(config), encoding="utf-8")
        assert says.text("--model", "config.json").partition("\n")[2] == says.text().partition("\n")[2]

    def test_list(self, says: Says) -> None:
        out = says.text("--list")
        for table in (MODELS, DEVICES, LINKS):
            for name, each in table.items():
                assert f"{name}: {each.source}\n" in out
        listed = says.json("--list")
        assert {table: {each["name"] for each in listed[table]} for table in ("models", "devices", "links")} == {
            "models": set(MODELS),
            "devices": set(DEVICES),
            "links": set(LINKS),
        }


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--model", "llama-2-7b"],
        ["--link", "1B/s"],
        ["--link", "100TB/s"],
        ["--cached", "3000", "--on-host", "3999"],
    ],
    ids=["textbook", "late", "never", "always", "cached"],
)
def test_plot(says: Says, options: list[str], suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    result = says.json(*options, "--plot", f"cost{suffix}")
    assert result["plot"] == f"cost{suffix}"
    drawn = Path(f"cost{suffix}").read_bytes()
    assert drawn.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in drawn


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("  kvpager cost") >= 5
    text = " ".join(text.split())
    assert "moving is never dearer" in text
    assert "[default: 4000;" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "gpt-5"], "model 'gpt-5': expected one of llama-3.1-8b, llama-3.1-70b"),
        (["--model", "missing.json"], "missing.json: cannot be read: No such file"),
        (["--gpu", "abacus"], "device 'abacus': expected one of a100, h100"),
        (["--link", "wire"], "link 'wire': expected one of pcie3"),
        (["--tokens", "0"], "0 is not in the range"),
        (["--cached", "4000"], "--cached 4000: of 4000 tokens none is left to move or to compute"),
        (["--on-host", "4001"], "--on-host 4001: the sequence has 4000 tokens"),
        (["--cached", "-1"], "-1 is not in the range"),
        (["--load", "100%"], "load is 1.0; it must be a finite number at least 0 and below 1"),
        (["--load", "much"], "'much': expected a share such as 50%"),
        (["--utilisation", "101%"], "utilisation is 1.01; it is a share of the peak, at most 1"),
        (["--utilisation", "0"], "utilisation is 0.0; it must be"),
        (["--latency", "soon"], "time 'soon': expected seconds with a unit"),
        (["--gpu", "a100", "--dtype", "fp8"], "device a100 has no fp8: compute in bf16"),
        (["--dtype", "int4"], "'int4' is not one of"),
        (["--point", "0:512"], "'0:512': expected START:TOKENS:TIME, such as 0:4096:95ms"),
        (["--point", "0:512:13"], "time '13': expected seconds with a unit"),
        (["--point", "0:512:13ms"], "1 points cannot tell two coefficients apart"),
        (["--point", "0:512:1ms", "--point", "0:512:2ms"], "the points are all of one kind"),
    ],
)
def test_bad_options(says: Says, arguments: list[str], problem: str) -> None:
    assert problem in says.refused(*arguments)
