"""`kvpager blocksize`: the command, its numbers on a trace small enough for paper, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Says

import kvpager
from kvpager.cli import main

# Three requests: the second repeats the first with its answer, the third agrees with both in 5 tokens.
BY_HAND = [
    {"timestamp": 0, "tokens": list(range(1, 11)), "output_tokens": [11, 12]},
    {"timestamp": 1, "tokens": [*range(1, 13), 50], "output_tokens": [60, 61, 62]},
    {"timestamp": 2, "tokens": [1, 2, 3, 4, 5, 70], "output_tokens": []},
]
# The same in blocks of two, as ids.
BY_HAND_IDS = [
    {"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1, 2, 3, 4, 5], "output_hash_ids": [6]},
    {"timestamp": 1, "input_length": 13, "output_length": 3, "hash_ids": [1, 2, 3, 4, 5, 6], "output_hash_ids": [7, 8]},
    {"timestamp": 2, "input_length": 6, "output_length": 0, "hash_ids": [1, 2, 9], "output_hash_ids": []},
]
LENGTHS_ONLY = [{"timestamp": 0, "input_length": 30, "output_length": 3}]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, requests: list[dict[str, Any]], **more: Any) -> str:
    Path(name).write_text("\n".join(json.dumps(request | more) for request in requests), encoding="utf-8")
    return name


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    return Says("blocksize", capsys)


def columns(result: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in result["rows"]]


class TestByHand:
    def test_what_each_share_is_of(self, says: Says) -> None:
        text, _ = says.both(write("t.jsonl", BY_HAND), "--sizes", "4")
        assert "Waste and lost sharing are shares of all 34 tokens, shared is one of the 29 prompt tokens." in text

    def test_the_largest_text_token(self, says: Says) -> None:
        largest = [{"timestamp": 0, "tokens": [2**30 - 1] * 9, "output_length": 2}] * 2
        assert columns(says.json(write("t.jsonl", largest), "--sizes", "4"), "shared_tokens") == [(8,)]

    def test_tokens(self, says: Says) -> None:
        result = says.json(write("t.jsonl", BY_HAND), "--sizes", "8,4,2,1")
        assert columns(result, "block_size", "table_entries", "waste_tokens", "shared_tokens", "lost_tokens") == [
            (1, 34, 0, 17, 0),
            (2, 17, 0, 16, 1),
            (4, 9, 2, 16, 1),
            (8, 5, 6, 8, 9),
        ]
        rates = [(17 / 29, 68 / 5), (8 / 14, 35 / 5), (4 / 6, 18 / 5), (1 / 2, 10 / 5)]
        assert columns(result, "hit_rate", "gathers_mean") == rates
        assert columns(result, "overhead_share") == [(0,), (1 / 34,), (3 / 34,), (15 / 34,)]

    def test_json(self, says: Says) -> None:
        result = says.json(write("t.jsonl", BY_HAND), "--sizes", "4", "--pool", "30")
        assert result == {
            "command": "blocksize",
            "version": kvpager.__version__,
            "load": {
                "name": "t.jsonl",
                "form": "tokens",
                "sequences": 3,
                "tokens": 34,
                "prompt_tokens": 29,
                "unit": 1,
            },
            "seed": None,
            "pool_tokens": 30,
            "rows": [
                {
                    "block_size": 4,
                    "table_entries": 9,
                    "table_entries_mean": 3.0,
                    "waste_tokens": 2,
                    "waste_mean": 2 / 3,
                    "waste_share": 2 / 34,
                    "gathers_mean": 3.6,
                    "shared_tokens": 16,
                    "shared_share": 16 / 29,
                    "hit_rate": 4 / 6,
                    "lost_tokens": 0,
                    "overhead_share": 2 / 34,
                    "num_blocks": 7,
                    "evicted_blocks": 0,
                    "fit_at_once": None,
                }
            ],
            "recommendation": result["recommendation"],
            "notes": [],
            "plot": None,
        }
        assert result["recommendation"]["block_size"] == 4

    @pytest.mark.parametrize(("within", "size", "larger"), [("0", 1, 2), ("2.9%", 1, 2), ("3", 2, 4), ("9%", 4, 8)])
    def test_the_rule(self, says: Says, within: str, size: int, larger: int) -> None:
        result = says.json(write("t.jsonl", BY_HAND), "--sizes", "1,2,4,8", "--within", within)
        choice = result["recommendation"]
        assert (choice["block_size"], choice["least_overhead_size"], choice["next_larger"]) == (size, 1, larger)
        assert choice["within"] == float(within.removesuffix("%")) / 100

    def test_text(self, says: Says) -> None:
        out, err = says.both(write("t.jsonl", BY_HAND), "--sizes", "1,2,4,8", "--within", "9%")
        assert err == ""
        assert out.startswith("t.jsonl: 3 sequences, 34 tokens, 11 each; a pool without end\n")
        rows = [line.split() for line in out.splitlines()]
        assert ["8", "2.0", "17.65%", "1.7", "2.0", "8", "27.59%", "50.00%", "26.47%", "44.12%"] in rows
        assert [row[1] for row in rows if row and row[0] == ">"] == ["4"]
        reason = out.splitlines()[-1]
        assert reason.startswith("Recommended: 4 tokens a block. The rule: the largest block whose waste and lost")
        assert "at most 9% of all tokens above the least of all sizes (0.00% = 0.00% + 0.00% at 1)" in reason
        assert "At 4 they are 8.82% = 5.88% + 2.94%. At 8 they are 44.12% = 17.65% + 26.47%." in reason
        assert "A table then has 3.0 entries on average, in place of 11.3 at 1." in reason


class TestIdTraces:
    def test_multiples_of_its_own_block_and_it_says_so(self, says: Says) -> None:
        path = write("ids.jsonl", BY_HAND_IDS, block_size=2)
        result = says.json(path)
        assert [row["block_size"] for row in result["rows"]] == [2, 4, 8, 16, 32]
        assert result["load"]["unit"] == 2
        (said,) = result["notes"]
        assert "the trace names blocks of 2 tokens: only multiples of 2 can be told" in said
        assert f"kvpager: note: {said}\n" == says.both(path)[1]

    def test_the_numbers_are_those_of_the_tokens(self, says: Says) -> None:
        by_ids = says.json(write("ids.jsonl", BY_HAND_IDS, block_size=2), "--sizes", "2,4,8")
        by_tokens = says.json(write("t.jsonl", BY_HAND), "--sizes", "2,4,8")
        assert by_ids["rows"] == by_tokens["rows"]

    @pytest.mark.parametrize("size", ["1", "3", "6,9"])
    def test_other_sizes_are_refused(self, says: Says, size: str) -> None:
        message = says.refused(write("ids.jsonl", BY_HAND_IDS, block_size=2), "--sizes", size)
        assert "ids.jsonl: blocks of " in message
        assert "the trace names blocks of 2, so only multiples can be told; other sizes need a token trace" in message

    def test_blocks_that_no_pager_has_are_shown_and_not_recommended(self, says: Says) -> None:
        request = {"timestamp": 0, "input_length": 5000, "output_length": 0}
        huge = says.json(write("a.jsonl", [request | {"hash_ids": [0, 1]}], block_size=2048))
        assert huge["recommendation"]["block_size"] is None
        assert "a pager's block holds at most 1024 tokens" in huge["recommendation"]["reason"]
        mooncake = says.json(write("b.jsonl", [request | {"hash_ids": list(range(9))}]), "--within", "100")
        assert [row["block_size"] for row in mooncake["rows"]] == [512, 1024, 2048, 4096, 8192]
        assert mooncake["recommendation"]["block_size"] == 1024
        assert "No larger one that a pager could have was measured." in mooncake["recommendation"]["reason"]


class TestLengths:
    def test_a_lengths_trace_says_that_nothing_is_known_of_sharing(self, says: Says) -> None:
        path = write("lengths.jsonl", LENGTHS_ONLY)
        result = says.json(path)
        assert [row["block_size"] for row in result["rows"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
        unknown = ("shared_tokens", "shared_share", "hit_rate", "lost_tokens", "num_blocks", "evicted_blocks")
        assert set(columns(result, *unknown)) == {(None,) * 6}
        out, err = says.both(path)
        assert "nothing is known of sharing, the waste alone decides" in err
        assert "shared" not in out
        assert "the largest block whose waste is at most 2%" in out

    def test_fixed_by_hand(self, says: Says) -> None:
        result = says.json("--lengths", "fixed:10", "--samples", "7", "--sizes", "1,4,16", "--pool", "64")
        assert columns(result, "block_size", "waste_mean", "table_entries_mean", "num_blocks", "fit_at_once") == [
            (1, 0, 10, 64, 6),
            (4, 2, 3, 16, 5),
            (16, 6, 1, 4, 4),
        ]
        # One decode step is counted, the last: it reads the whole table.
        assert columns(result, "gathers_mean") == columns(result, "table_entries_mean")
        assert (result["load"]["form"], result["load"]["prompt_tokens"], result["seed"]) == ("lengths", None, 0)

    def test_a_file(self, says: Says) -> None:
        Path("lengths.txt").write_text("3\n\n 5\n16\n", encoding="utf-8")
        result = says.json("--lengths", "file:lengths.txt", "--sizes", "4")
        assert result["load"]["sequences"] == 3
        assert columns(result, "table_entries", "waste_tokens") == [(1 + 2 + 4, 1 + 3)]

    def test_a_file_with_a_byte_order_mark(self, says: Says) -> None:
        Path("lengths.txt").write_text("\ufeff3\r\n5\r\n", encoding="utf-8")
        assert says.json("--lengths", "file:lengths.txt")["load"]["tokens"] == 8

    def test_seeds(self, says: Says) -> None:
        def rows(*more: str) -> Any:
            return says.json("--lengths", "lognormal:300:0.8", "--samples", "500", *more)["rows"]

        assert rows() == rows("--seed", "0") != rows("--seed", "1")


def test_a_pool_is_the_same_memory_at_every_size_and_counts_as_replay_does(
    says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "chat", "-o", "chat.jsonl", "--sessions", "30"]) == 0
    capsys.readouterr()
    result = says.json("chat.jsonl", "--sizes", "4,16,64", "--pool", "10000")
    assert columns(result, "num_blocks") == [(2500,), (625,), (156,)]
    for row in result["rows"]:
        arguments = ["--blocks", str(row["num_blocks"]), "--block-size", str(row["block_size"])]
        assert main(["replay", "chat.jsonl", "--outputs", "recorded", *arguments, "--json"]) == 0
        (replayed,) = json.loads(capsys.readouterr().out)["rows"]
        assert replayed["saved_tokens"] == row["shared_tokens"]
        assert replayed["hit_rate"] == row["hit_rate"]
        assert replayed["evicted_blocks"] == row["evicted_blocks"] > 0


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("load", ["tokens", "ids", "lengths"])
def test_plot(says: Says, load: str, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    arguments = {
        "tokens": [write("t.jsonl", BY_HAND)],
        "ids": [write("ids.jsonl", BY_HAND_IDS, block_size=2)],
        "lengths": ["--lengths", "uniform:1:100"],
    }[load]
    result = says.json(*arguments, "--plot", f"sizes{suffix}")
    assert result["plot"] == f"sizes{suffix}"
    drawn = Path(f"sizes{suffix}").read_bytes()
    assert drawn.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in drawn


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocksize", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("  kvpager blocksize") >= 3
    assert "The rule: the largest block whose waste and lost sharing together" in " ".join(text.split())
    assert "[default: 2%]" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "kvpager blocksize: either TRACE or --lengths is needed (see"),
        (["t", "--lengths", "fixed:5"], "either TRACE or --lengths is needed, not both"),
        (["t", "--samples", "5"], "--samples is how many lengths to draw"),
        (["--lengths", "file:x", "--samples", "5"], "--samples is how many lengths to draw"),
        (["t", "--sizes", "4,x"], "block size 'x': expected tokens a block"),
        (["t", "--sizes", ""], "block size '': expected"),
        (["t", "--within", "much"], "'much': expected a share such as 2%"),
        (["t", "--within", "nan"], "'nan': expected a share such as 2%"),
        (["t", "--pool", "0"], "0 is not in the range"),
        (["t"], "kvpager: t: cannot be read: No such file or directory"),
        (["--lengths", "fixed:9", "--sizes", "2048"], "blocks of 2048 tokens: a pager has 1 to 1024"),
        (["--lengths", "fixed:9", "--sizes", "0"], "blocks of 0 tokens: a pager has 1 to 1024"),
        (
            ["--lengths", "fixed:9", "--sizes", "4", "--pool", "11"],
            "fixed:9: the longest sequence, 9 tokens, needs 3 b",
        ),
        (["--lengths", "fixed:0"], "lengths 'fixed:0': '0' is no whole number from 1"),
        (["--lengths", "fixed:1:2"], "expected uniform:LO:HI, lognormal:MEDIAN:SIGMA, fixed:N or file:PATH"),
        (["--lengths", "poisson:4"], "lengths 'poisson:4': expected uniform:LO:HI"),
        (["--lengths", "file:"], "lengths 'file:': expected"),
        (["--lengths", "uniform:9:8"], "lengths 'uniform:9:8': 9 is more than 8"),
        (["--lengths", "uniform:1:9999999999"], "is no whole number from 1 to 2147483647"),
        (["--lengths", "lognormal:8:nan"], "'nan' is no number from 0 to 10"),
        (["--lengths", "lognormal:8:11"], "'11' is no number from 0 to 10"),
        (["--lengths", "file:missing.txt"], "missing.txt: cannot be read: No such file"),
    ],
)
def test_bad_options(says: Says, arguments: list[str], problem: str) -> None:
    assert problem in says.refused(*arguments)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"5\nfive\n", "bad.txt, line 2: expected a whole number from 1 to 2147483647, found 'five'"),
        (b"0\n", "bad.txt, line 1: expected a whole number"),
        (b"9999999999\n", "bad.txt, line 1: expected a whole number"),
        (b"\n", "bad.txt: holds no length"),
        (b"\xff\xfe", "bad.txt: not UTF-8 text"),
    ],
)
def test_bad_files_of_lengths(says: Says, content: bytes, problem: str) -> None:
    Path("bad.txt").write_bytes(content)
    assert problem in says.refused("--lengths", "file:bad.txt")


def test_a_pool_in_which_a_request_never_fits(says: Says) -> None:
    message = says.refused(write("t.jsonl", BY_HAND), "--sizes", "4", "--pool", "16")
    assert message == (
        "kvpager: t.jsonl, line 2: this request needs 5 blocks of 4 tokens and would never fit in a pool of 4"
    )
