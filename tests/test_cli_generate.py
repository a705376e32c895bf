"""`kvpager generate`: files that are the same for the same seed, that a replay takes, and that are there or not."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpager
import kvpager.cli.generate
from kvpager.cli import main
from kvpager.traces import TokenRequest, TraceError, read_trace, write_trace
from kvpager.workload import KINDS

SMALL = {
    "chat": ["--sessions", "20"],
    "agent": ["--sessions", "3", "--max-context", "8000"],
    "burst": ["--sessions", "60", "--burst", "10"],
    "varfront": ["--sessions", "30"],
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kvpager_says(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str, status: int = 0) -> str:
        assert main(arguments) == status
        out, err = capsys.readouterr()
        if status:
            assert out == ""
            assert err.count("\n") == 1
            return str(err)
        assert err == ""
        return str(out)

    return call


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="ascii").splitlines()]


@pytest.mark.parametrize("kind", list(KINDS))
class TestEachKind:
    def test_a_seed_is_a_file(self, kind: str, kvpager_says: Any) -> None:
        for name, seed in (("one.jsonl", "3"), ("same.jsonl", "3"), ("other.jsonl", "4")):
            kvpager_says("generate", kind, "-o", name, "--seed", seed, *SMALL[kind])
        one, same, other = (Path(f"{name}.jsonl").read_bytes() for name in ("one", "same", "other"))
        assert one == same
        assert one != other

    def test_the_form(self, kind: str, kvpager_says: Any) -> None:
        kvpager_says("generate", kind, "-o", "t.jsonl", *SMALL[kind])
        requests = lines("t.jsonl")
        for request in requests:
            assert list(request) == ["timestamp", "input_length", "output_length", "tokens", "output_tokens"]
            assert len(request["tokens"]) == request["input_length"] >= 1
            assert len(request["output_tokens"]) == request["output_length"] >= 1
            assert request["input_length"] + request["output_length"] <= KINDS[kind]().max_context
        times = [request["timestamp"] for request in requests]
        assert times == sorted(times)

    def test_a_replay_takes_it_and_so_does_the_reader(self, kind: str, kvpager_says: Any) -> None:
        summary = json.loads(kvpager_says("generate", kind, "-o", "t.jsonl.gz", *SMALL[kind], "--json"))
        trace = read_trace("t.jsonl.gz")
        assert trace.form == "tokens"
        assert trace.num_requests == summary["requests"]
        assert trace.has_output.all()
        replayed = json.loads(
            kvpager_says("replay", "t.jsonl.gz", "--sizes", "100%", "--outputs", "recorded", "--json")
        )
        (row,) = replayed["rows"]
        assert row["requests"] == summary["requests"]
        # Who shares a system prompt, or repeats a chat, hits; who has something variable in front does not.
        assert (row["hit_blocks"] > 0) == (kind != "varfront")

    def test_json(self, kind: str, kvpager_says: Any) -> None:
        summary = json.loads(kvpager_says("generate", kind, "-o", "t.jsonl", *SMALL[kind], "--seed", "5", "--json"))
        assert list(summary) == [
            *("command", "version", "kind", "seed", "shape", "path", "bytes", "requests", "seconds"),
            *("prompt_tokens", "output_tokens", "input_length", "output_length"),
        ]
        assert (summary["command"], summary["version"]) == ("generate", kvpager.__version__)
        assert (summary["kind"], summary["seed"], summary["path"]) == (kind, 5, "t.jsonl")
        assert summary["bytes"] == Path("t.jsonl").stat().st_size
        assert summary["shape"]["sessions"] == int(SMALL[kind][1])
        requests = lines("t.jsonl")
        assert summary["requests"] == len(requests)
        assert summary["seconds"] == requests[-1]["timestamp"] / 1000
        lengths = [request["input_length"] for request in requests]
        assert summary["prompt_tokens"] == sum(lengths)
        assert summary["output_tokens"] == sum(request["output_length"] for request in requests)
        assert summary["input_length"] == {
            "mean": round(float(np.mean(lengths)), 1),
            "median": float(np.median(lengths)),
            "max": max(lengths),
        }

    def test_requests_cuts_the_end_off(self, kind: str, kvpager_says: Any) -> None:
        kvpager_says("generate", kind, "-o", "all.jsonl", *SMALL[kind])
        kvpager_says("generate", kind, "-o", "some.jsonl", *SMALL[kind], "--requests", "7")
        assert lines("some.jsonl") == lines("all.jsonl")[:7]


def test_table(kvpager_says: Any) -> None:
    text = kvpager_says("generate", "chat", "-o", "t.jsonl", "--sessions", "5", "--seed", "2")
    count = len(lines("t.jsonl"))
    size = Path("t.jsonl").stat().st_size
    assert re.fullmatch(
        rf"t\.jsonl: chat, seed 2: {count} requests in \d+ seconds, {size:,} bytes\.", text.split("\n")[0]
    )
    assert "kvpager replay t.jsonl" in text


def test_packing_follows_the_suffix(kvpager_says: Any) -> None:
    for name in ("t.jsonl", "t.jsonl.gz", "t.jsonl.xz", "t.gz", "again.gz"):
        kvpager_says("generate", "burst", "-o", name, "--sessions", "20")
    plain = Path("t.jsonl").read_bytes()
    assert gzip.decompress(Path("t.jsonl.gz").read_bytes()) == plain
    assert lzma.decompress(Path("t.jsonl.xz").read_bytes()) == plain
    # Neither the name nor the time of day is in the packed file.
    assert Path("t.gz").read_bytes() == Path("again.gz").read_bytes() == Path("t.jsonl.gz").read_bytes()


def test_help_teaches(kvpager_says: Any) -> None:
    text = kvpager_says("generate", "--help")
    assert text.count("  kvpager generate") >= 3
    assert all(f"  {kind}  " in text for kind in KINDS)
    assert "log-normal" in " ".join(text.split()).replace("log- normal", "log-normal")
    assert "[default: chat 300, agent 20, burst 1000, varfront 500]" in " ".join(text.split())
    assert "kvpager generate" in kvpager_says("--help")


def test_a_front_is_all_that_differs(kvpager_says: Any) -> None:
    kvpager_says("generate", "varfront", "-o", "front.jsonl", "--sessions", "20", "--front", "5")
    kvpager_says("generate", "varfront", "-o", "plain.jsonl", "--sessions", "20", "--front", "0")
    fronts, plain = lines("front.jsonl"), lines("plain.jsonl")
    assert [request["tokens"][5:] for request in fronts] == [request["tokens"] for request in plain]
    for field in ("timestamp", "output_tokens"):
        assert [request[field] for request in fronts] == [request[field] for request in plain]
    assert len({tuple(request["tokens"][:5]) for request in fronts}) == 20


class TestTheFile:
    def test_nothing_is_overwritten_unasked(self, kvpager_says: Any) -> None:
        Path("t.jsonl").write_text("mine", encoding="ascii")
        message = kvpager_says("generate", "chat", "-o", "t.jsonl", "--sessions", "2", status=2)
        assert message == "kvpager: t.jsonl: is there already (--force replaces it)\n"
        assert Path("t.jsonl").read_text(encoding="ascii") == "mine"
        kvpager_says("generate", "chat", "-o", "t.jsonl", "--sessions", "2", "--force")
        assert lines("t.jsonl")

    def test_it_has_the_rights_of_any_new_file_and_leaves_no_other(self, kvpager_says: Any) -> None:
        kvpager_says("generate", "chat", "-o", "t.jsonl", "--sessions", "2")
        Path("plain").touch()
        assert Path("t.jsonl").stat().st_mode == Path("plain").stat().st_mode
        assert sorted(os.listdir()) == ["plain", "t.jsonl"]

    def test_a_link_stays_a_link(self, kvpager_says: Any) -> None:
        Path("real.jsonl").touch()
        Path("link.jsonl").symlink_to("real.jsonl")
        kvpager_says("generate", "chat", "-o", "link.jsonl", "--sessions", "2", "--force")
        assert Path("link.jsonl").is_symlink()
        assert lines("real.jsonl")

    @pytest.mark.parametrize("force", [[], ["--force"]])
    def test_only_where_a_file_can_be(self, force: list[str], kvpager_says: Any) -> None:
        Path("folder.jsonl").mkdir()
        os.mkfifo("pipe.jsonl")
        for name, problem in {
            "t.json": "the name has to end in one of .jsonl, .gz, .xz",
            "folder.jsonl": "is there and no regular file",
            "pipe.jsonl": "is there and no regular file",
            "missing/t.jsonl": "there is no folder",
            "t.jsonl/": "t.jsonl/: is the name of a folder",
            "x" * 300 + ".gz": "cannot be written: File name too long",
        }.items():
            assert problem in kvpager_says("generate", "chat", "-o", name, "--sessions", "2", *force, status=2)
        assert sorted(os.listdir()) == ["folder.jsonl", "pipe.jsonl"]

    @pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
    def test_an_unfinished_file_never_appears(self, failure: Any) -> None:
        tokens = np.arange(9, dtype=np.int32)
        Path("t.jsonl").write_text("old", encoding="ascii")

        def requests() -> Iterator[TokenRequest]:
            yield TokenRequest(0, tokens, tokens)
            assert Path("t.jsonl").read_text(encoding="ascii") == "old"
            assert len(os.listdir()) == 2
            raise failure

        with pytest.raises((KeyboardInterrupt, TraceError)) as caught:
            write_trace("t.jsonl", requests(), force=True)
        if caught.type is TraceError:
            assert str(caught.value) == "t.jsonl: cannot be written: No space left on device"
        assert os.listdir() == ["t.jsonl"]
        assert Path("t.jsonl").read_text(encoding="ascii") == "old"

    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(kvpager.cli.generate, "token_requests", interrupt)
        assert main(["generate", "chat", "-o", "t.jsonl"]) == 130
        assert os.listdir() == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["generate"], "Missing argument 'KIND'"),
        (["generate", "chat"], "Missing option '-o' / '--output'"),
        (["generate", "poem", "-o", "t.jsonl"], "'poem' is not one of"),
        (["generate", "chat", "-o", "t.jsonl", "--sessions", "0"], "0 is not in the range"),
        (["generate", "chat", "-o", "t.jsonl", "--rate", "nan"], "rate nan: expected a finite number above 0"),
        (["generate", "chat", "-o", "t.jsonl", "--rate", "1e-300"], "1e-300 is not in the range"),
        (["generate", "chat", "-o", "t.jsonl", "--think", "nan"], "think nan: expected a finite number"),
        (["generate", "chat", "-o", "t.jsonl", "--system", "800"], "'800': expected LO:HI in tokens"),
        (["generate", "chat", "-o", "t.jsonl", "--system", "9:8"], "system 9:8: expected 1 <= LO <= HI"),
        (["generate", "chat", "-o", "t.jsonl", "--system", "0:8"], "system 0:8: expected 1 <= LO <= HI"),
        (["generate", "chat", "-o", "t.jsonl", "--max-context", "1000"], "max_context 1000: at least 1024"),
        (["generate", "varfront", "-o", "t.jsonl", "--front", "9000"], "a system prompt may take 11000 of them"),
        (["generate", "burst", "-o", "t.jsonl", "--turns", "3"], "--turns means nothing to burst, which has --sess"),
        (["generate", "chat", "-o", "t.jsonl", "--one-off", "3"], "--one-off means nothing to chat"),
    ],
)
def test_bad_options(arguments: list[str], problem: str, kvpager_says: Any) -> None:
    assert problem in kvpager_says(*arguments, status=2)
    assert os.listdir() == []
