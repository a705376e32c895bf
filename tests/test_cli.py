"""The command line as a user meets it: a process, its output, its exit status, and files that are broken."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import kvpager
from kvpager.cli import main
from kvpager.cli.demo import CALLS
from kvpager.cli.plots import heading
from kvpager.traces import reading

REQUEST = {"timestamp": 0, "input_length": 32, "output_length": 4, "block_size": 16, "hash_ids": [0, 1]}
COMMANDS = [
    "demo",
    "replay",
    "bench",
    "fragmentation",
    "blocksize",
    "prefix",
    "generate",
    "cost",
    "simulate",
    "diagnose",
    "tier",
]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvpager", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def good(*arguments: str) -> str:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def refused(*arguments: str) -> str:
    """Bad input: nothing on stdout, one line on stderr, status 2."""
    done = run(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("kvpager"), done.stderr
    return done.stderr.strip()


def run_in_shell(command: str, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit status, output and errors of a command line that does what only a shell can to its streams."""
    line = f"{shlex.quote(sys.executable)} -m kvpager {command}"
    done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The trace of `test_replay.test_lru_by_hand`: a pool of 4 blocks hits 5 of 13 and evicts 5."""
    chains = [[0, 1, 2], [0, 1, 3], [4], [0, 1], [5, 6], [0, 1]]
    path = tmp_path / "by-hand.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for ids in chains:
            request = {"timestamp": 0, "input_length": 16 * len(ids), "output_length": 0, "block_size": 16}
            file.write(json.dumps(request | {"hash_ids": ids}) + "\n")
    return path


class TestHelp:
    def test_without_arguments(self) -> None:
        text = good()
        assert text == good("--help") == good("-h")
        for command in COMMANDS:
            assert f"kvpager {command}" in text

    @pytest.mark.parametrize("command", COMMANDS)
    def test_teaches_with_examples(self, command: str) -> None:
        text = good(command, "--help")
        assert "Examples:" in text
        assert text.count(f"  kvpager {command}") >= 3
        assert "--json" in text

    def test_version(self) -> None:
        assert good("--version") == f"kvpager, version {kvpager.__version__}\n"

    def test_is_installed_as_a_script(self) -> None:
        (script,) = entry_points(group="console_scripts", name="kvpager")
        assert script.load() is main


class TestReplay:
    def test_table(self, trace: Path) -> None:
        text = good("replay", str(trace), "--blocks", "4,7")
        first, *_ = text.splitlines()
        counts = "6 requests, 13 full prompt blocks of 16 tokens, 7 of them unique"
        assert first == f"by-hand.jsonl: {counts}; outputs none, service none"
        rows = [line.split() for line in text.splitlines() if line.strip().startswith("lru")]
        assert rows[0][:6] == ["lru", "4", "4", "38.46%", "80", "5"]
        assert rows[1][:4] == ["lru", "7", "7", "46.15%"]
        assert all(line == line.rstrip() for line in text.splitlines())

    def test_json(self, trace: Path) -> None:
        result = json.loads(good("replay", str(trace), "--policy", "lru,slru", "--sizes", "60%", "--json"))
        rows = result.pop("rows")
        assert result == {
            "command": "replay",
            "version": kvpager.__version__,
            "trace": {
                "path": str(trace),
                "form": "ids",
                "requests": 6,
                "block_size": 16,
                "prompt_blocks": 13,
                "unique_prompt_blocks": 7,
            },
            "outputs": "none",
            "service": "none",
            "notes": [],
            "plot": None,
        }
        assert [row["policy"] for row in rows] == ["lru", "slru"]
        row = rows[0]
        assert row.pop("seconds") > 0
        assert row.pop("requests_per_second") > 0
        assert row == {
            "policy": "lru",
            "size": "60%",
            "num_blocks": 4,
            "block_size": 16,
            "requests": 6,
            "prompt_blocks": 13,
            "hit_blocks": 5,
            "hit_rate": 5 / 13,
            "saved_tokens": 80,
            "evicted_blocks": 5,
            "cached_blocks": 3,
            "active_blocks_max": 4,
        }

    @pytest.mark.parametrize(("suffix", "pack"), [(".jsonl.gz", gzip.compress), (".jsonl.xz", lzma.compress)])
    def test_packed(self, trace: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
        packed = trace.with_suffix(suffix)
        packed.write_bytes(pack(trace.read_bytes()))
        plain = json.loads(good("replay", str(trace), "--blocks", "4", "--json"))
        assert json.loads(good("replay", str(packed), "--blocks", "4", "--json"))["trace"]["requests"] == 6
        assert plain["rows"][0]["hit_blocks"] == 5

    @pytest.mark.parametrize("pack", ["cat", "gzip -c", "xz -c"])
    def test_through_a_pipe(self, trace: Path, pack: str) -> None:
        if shutil.which(pack.partition(" ")[0]) is None:
            pytest.skip(f"no {pack} here")
        shell = (
            f"{pack} {shlex.quote(str(trace))} | {shlex.quote(sys.executable)} -m kvpager replay /dev/stdin --blocks 4"
        )
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert " 38.46% " in done.stdout

    def test_tokens(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens.jsonl"
        requests = [{"timestamp": at, "tokens": list(range(40)), "output_tokens": [7] * 30} for at in range(3)]
        path.write_text("\n".join(map(json.dumps, requests)), encoding="utf-8")
        result = json.loads(
            good("replay", str(path), "--blocks", "100", "--block-size", "8", "--outputs", "recorded", "--json")
        )
        assert result["trace"]["form"] == "tokens"
        (row,) = result["rows"]
        assert (row["block_size"], row["prompt_blocks"], row["hit_blocks"], row["saved_tokens"]) == (8, 15, 10, 80)
        assert row["cached_blocks"] == 8

    def test_default_sizes_are_those_that_fit_and_the_rest_is_said(self, trace: Path) -> None:
        done = run("replay", str(trace))
        assert done.returncode == 0
        assert done.stderr == "kvpager: note: left out 1%, 2%, 5%, 10%, 20%, 50%: line 1 alone needs 4 blocks\n"
        assert json.loads(good("replay", str(trace), "--json"))["rows"][0]["num_blocks"] == 4

    def test_lengths_only_is_said(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths.jsonl"
        path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 9}\n', encoding="utf-8")
        done = run("replay", str(path), "--blocks", "10")
        assert done.returncode == 0
        assert "all prompts differ and nothing can hit" in done.stderr

    def test_plot(self, trace: Path) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        png, svg = trace.with_suffix(".png"), trace.with_suffix(".svg")
        result = json.loads(good("replay", str(trace), "--blocks", "4,7", "--plot", str(png), "--json"))
        assert result["plot"] == str(png)
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        good("replay", str(trace), "--sizes", "60%,100%", "--policy", "lru,slru", "--plot", str(svg))
        assert "<svg" in svg.read_text(encoding="utf-8")

    def test_plot_that_cannot_be_written_is_refused_first(self, trace: Path) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        folder = trace.parent / "folder.png"
        folder.mkdir()
        for name, problem in {
            str(trace.parent / "no such folder" / "a.png"): "there is no folder",
            "picture.docx": "the name has to end in one of .png, .svg, .pdf",
            str(folder): "is a folder",
        }.items():
            assert problem in refused("replay", str(trace), "--plot", name)

    def test_plot_of_a_disk_that_is_full(self, trace: Path) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        full = trace.with_name("full.png")
        full.symlink_to("/dev/full")
        assert "cannot be written: No space left on device" in refused(
            "replay", str(trace), "--blocks", "4", "--plot", str(full)
        )

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            ("日本語.jsonl", "日本語.jsonl"),
            ("$\\frac$.jsonl", "$\\frac$.jsonl"),  # a formula, and a broken one, to whoever looks for formulas
            ("a\n\x1b[31mb.jsonl", r"a\n\x1b[31mb.jsonl"),
            (os.fsdecode(b"bytes \xff.jsonl"), r"bytes \udcff.jsonl"),
            ("n" * 240 + ".jsonl", "n" * 240 + ".jsonl"),
        ],
    )
    def test_odd_names(self, trace: Path, name: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        odd = trace.with_name(name)
        try:
            trace.rename(odd)
        except OSError:
            pytest.skip("no such name in this file system")
        plot = trace.with_suffix(".png")
        assert main(["replay", str(odd), "--blocks", "4", "--plot", str(plot)]) == 0
        assert capsys.readouterr().out.startswith(f"{shown}: 6 requests, ")
        assert main(["blocksize", str(odd), "--plot", str(plot), "--json"]) == 0
        assert capsys.readouterr().err == ""
        odd.rename(trace)
        assert main(["replay", str(odd)]) == 2
        assert capsys.readouterr().err.removesuffix("\n").isprintable()

    def test_one_is_no_plural(self, tmp_path: Path) -> None:
        path = write(tmp_path / "one.jsonl", {"timestamp": 0, "tokens": [5], "output_length": 0})
        text = good("replay", str(path), "--blocks", "2", "--block-size", "1")
        assert text.startswith("one.jsonl: 1 request, 1 full prompt block of 1 token, 1 of them unique;")
        assert text.splitlines()[2].split()[-1] == "replayed/s"

    def test_heading(self) -> None:
        assert heading("c: t.jsonl: 6 requests, 2 blocks; a; b") == "c: t.jsonl\n6 requests, 2 blocks\na\nb"
        assert heading("t" * 200 + ": r").splitlines() == ["t" * 77 + "...", "r"]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


class TestBrokenFiles:
    """Each is one line that names the file and, where there is one, the line and the field."""

    @pytest.mark.parametrize(
        ("bad", "problem"),
        [
            ("{", "line 2: not JSON"),
            ("[]", "line 2: expected an object"),
            (
                REQUEST | {"input_length": "long"},
                "line 2: input_length: expected a whole number from 1 to 2147483647, fo",
            ),
            (REQUEST | {"hash_ids": [0, -4]}, "line 2: hash_ids[1]: expected a whole number"),
            (REQUEST | {"hash_ids": [0]}, "line 2: hash_ids: expected 2 ids, found 1"),
            (REQUEST | {"timestamp": -3}, "line 2: timestamp: expected a number >= 0, found -3"),
            (REQUEST | {"hash_ids": [1, 0]}, "line 2: hash_ids[0]: this id came after another id"),
            ({"timestamp": 1, "tokens": [5], "output_length": 0}, "line 2: this request has tokens, the first one has"),
        ],
    )
    @pytest.mark.parametrize("json_too", [[], ["--json"]])
    def test_lines(self, tmp_path: Path, bad: Any, problem: str, json_too: list[str]) -> None:
        path = write(tmp_path / "bad.jsonl", REQUEST, bad)
        assert f"{path}, {problem}" in refused("replay", str(path), *json_too)

    def test_whole_files(self, tmp_path: Path) -> None:
        cut = tmp_path / "cut.xz"
        cut.write_bytes(lzma.compress(b"\n".join([json.dumps(REQUEST).encode()] * 99))[:-20])
        binary = tmp_path / "binary.jsonl"
        binary.write_bytes(bytes(range(255, 0, -1)) * 99)
        cases = {
            tmp_path / "missing.jsonl": "cannot be read: No such file or directory",
            tmp_path: "cannot be read: Is a directory",
            write(tmp_path / "empty.jsonl"): "holds no request",
            write(tmp_path / "plain.gz", REQUEST): "cannot be decompressed",
            cut: "the compressed file ends too early",
            binary: "not UTF-8 text",
        }
        for path, problem in cases.items():
            assert problem in refused("replay", str(path))
            assert str(path) in refused("bench", "--only", "replay", "--trace", str(path))

    def test_a_byte_order_mark_is_no_part_of_the_first_line(self, tmp_path: Path) -> None:
        path = tmp_path / "bom.jsonl"
        path.write_text("\ufeff" + json.dumps(REQUEST), encoding="utf-8")
        assert good("replay", str(path), "--blocks", "4").startswith("bom.jsonl: 1 request")
        path.write_text("\ufeff\n" + json.dumps(REQUEST), encoding="utf-8")
        assert good("replay", str(path), "--blocks", "4").startswith("bom.jsonl: 1 request")
        path.write_text(json.dumps(REQUEST) + "\n\ufeff" + json.dumps(REQUEST), encoding="utf-8")
        assert "line 2: not JSON" in refused("replay", str(path))

    @pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
    def test_a_line_without_end(
        self,
        pack: Callable[[bytes], bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        line = json.dumps(REQUEST).encode() + b"\n"
        monkeypatch.setattr(reading, "MAX_LINE", len(line))
        path = tmp_path / "long.jsonl"
        path.write_bytes(pack(line))
        assert main(["replay", str(path), "--blocks", "4"]) == 0
        path.write_bytes(pack(line + b" " + line))
        assert main(["replay", str(path), "--blocks", "4"]) == 2
        assert f"line 2: longer than {len(line)} bytes" in capsys.readouterr().err

    @pytest.mark.parametrize("outputs", ["none", "fresh"])
    def test_more_blocks_than_there_are_numbers(self, tmp_path: Path, outputs: str) -> None:
        endless = {"timestamp": 0, "input_length": 1, "output_length": 2**31 - 1, "block_size": 1}
        if outputs == "none":
            endless |= {"input_length": 2**31 - 1, "output_length": 0}
        path = write(tmp_path / "endless.jsonl", endless)
        message = refused("replay", str(path), "--blocks", "4", "--outputs", outputs)
        assert message.endswith("a replay can number that many blocks")

    def test_a_pool_in_which_a_request_never_fits(self, trace: Path) -> None:
        message = refused("replay", str(trace), "--blocks", "9,3")
        assert message.endswith(
            "by-hand.jsonl, line 1: this request needs 4 blocks and would never fit in a pool of 3 blocks"
        )
        assert "a pool of 0 blocks (1% of 7 unique prompt blocks)" in refused("replay", str(trace), "--sizes", "1%")

    def test_a_pool_larger_than_there_are_ids(self, trace: Path) -> None:
        assert "at most 2147483647" in refused("replay", str(trace), "--blocks", "4000000000")

    def test_bench_wants_ids(self, tmp_path: Path) -> None:
        path = write(tmp_path / "tokens.jsonl", {"timestamp": 0, "tokens": [1], "output_length": 1})
        assert "bench replays block ids" in refused("bench", "--only", "replay", "--trace", str(path))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["fly"], "kvpager: No such command 'fly'. (see kvpager --help)"),
        (["--fly"], "kvpager: No such option"),
        (["replay"], "kvpager replay: Missing argument 'TRACE'. (see kvpager replay --help)"),
        (["replay", "t", "--fly"], "kvpager replay: No such option"),
        (["replay", "t", "u"], "kvpager replay: Got unexpected extra argument"),
        (["replay", "t", "--sizes", "5"], "pool size '5': expected a share above 0%, such as 2.5% (--blocks takes"),
        (["replay", "t", "--sizes", "x%"], "pool size 'x%': expected a share above 0%, such as 2.5%"),
        (["replay", "t", "--sizes", "0.0%"], "pool size '0.0%': expected a share above 0%"),
        (["replay", "t", "--sizes", ""], "pool size '': expected a share"),
        (
            ["replay", "t", "--blocks", "5%"],
            "pool size '5%': expected a number of blocks from 1 to 2147483647",
        ),
        (["replay", "t", "--blocks", "4,,5"], "pool size '': expected a number of blocks"),
        (["replay", "t", "--blocks", "0"], "pool size '0': expected a number of blocks"),
        (["replay", ""], "kvpager: '': cannot be read"),
        (["replay", "t", "--blocks", "4", "--sizes", "5%"], "--sizes and --blocks exclude each other"),
        (["replay", "t", "--policy", "fifo"], "policy 'fifo': expected one of lru, slru"),
        (["replay", "t", "--outputs", "all"], "'all' is not one of"),
        (["replay", "t", "--service", "fast"], "'fast' is not one of"),
        (["replay", "t", "--block-size", "0"], "0 is not in the range 1<=x<=1024"),
        (["demo", "--seed", "-1"], "-1 is not in the range"),
        (["demo", "--seed", "one"], "'one' is not a valid integer"),
        (["demo", "--chats", "3"], "3 is not in the range 100<=x<=5000"),
        (["bench", "--only", "everything"], "row 'everything': expected one of hit_8k"),
    ],
)
def test_bad_options(arguments: list[str], problem: str) -> None:
    assert problem in refused(*arguments)


class TestDemo:
    def test_json(self) -> None:
        result = json.loads(good("demo", "--chats", "100", "--seed", "5", "--json"))
        assert set(result) == {
            "command",
            "version",
            "seed",
            "pool",
            "workload",
            "schemes",
            "calls",
            "clock_us",
            "same_answers",
        }
        assert result["seed"] == 5
        assert result["same_answers"] is True
        schemes = {scheme["scheme"]: scheme for scheme in result["schemes"]}
        assert list(schemes) == ["reserved", "paged", "shared", "kept"]
        assert schemes["reserved"]["running_max"] == 16
        assert schemes["reserved"]["steps"] > schemes["paged"]["steps"] >= schemes["kept"]["steps"]
        prefilled = [schemes[name]["prefilled_tokens"] for name in ("kept", "shared", "paged")]
        assert prefilled == sorted(prefilled)
        assert result["workload"]["prompt_tokens"] == schemes["reserved"]["prefilled_tokens"]
        calls = {call["call"]: call["count"] for call in result["calls"]}
        requests = result["workload"]["requests"]
        assert calls["admit"] == calls["commit a prompt"] == calls["release"] == requests
        assert calls["append a token"] == calls["commit a token"] == result["workload"]["answer_tokens"]
        assert set(calls) <= set(CALLS)
        assert result["clock_us"] > 0
        for call in result["calls"]:
            assert set(call) == {"call", "count", "kvpager_us", "reference_us", "ratio"}
            assert min(call["count"], call["kvpager_us"], call["reference_us"], call["ratio"]) > 0
        again = json.loads(good("demo", "--chats", "100", "--seed", "5", "--json"))
        assert again["schemes"] == result["schemes"]

    def test_text(self) -> None:
        text = good("demo", "--chats", "100")
        for words in ("reserve the longest context", "Paging:", "Sharing:", "Eviction:", "append a token"):
            assert words in text
        assert "Both handed out the same blocks and counted the same." in text


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
class TestProgress:
    """A bar on stderr where that is a terminal and the work takes a while; never in the output, never with --json."""

    def stderr_on_a_terminal(self, *arguments: str) -> tuple[str, str]:
        import pty

        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "kvpager", *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment | {"TERM": "xterm"}
        ) as process:
            os.close(theirs)
            drawn = b""
            while True:
                try:
                    part = os.read(ours, 65_536)
                except OSError:  # Linux says EIO when the other side has gone
                    break
                if not part:
                    break
                drawn += part
            assert process.stdout is not None
            output = process.stdout.read()
            assert process.wait(timeout=60) == 0
        os.close(ours)
        return output, drawn.decode("utf-8", "replace")

    def test_bar(self) -> None:
        output, drawn = self.stderr_on_a_terminal("demo", "--chats", "400")
        assert "%" in drawn
        assert "the same on the reference" in drawn
        assert "\x1b" not in output

    def test_no_bar_with_json(self) -> None:
        output, drawn = self.stderr_on_a_terminal("demo", "--chats", "400", "--json")
        assert drawn == ""
        assert json.loads(output)["command"] == "demo"


class TestMissingExtras:
    def without(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # None in sys.modules is how Python itself says that an import is not to be had.
        program = (
            f"import sys; sys.modules[{module!r}] = None; from kvpager.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
        )

    @pytest.mark.parametrize("module", ["click", "rich"])
    def test_cli(self, module: str) -> None:
        done = self.without(module, "replay", "x")
        expected = f"kvpager: the command line needs {module}: pip install '.[cli]' in a clone of kvpager\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)

    def test_plot(self, trace: Path) -> None:
        done = self.without("matplotlib", "replay", str(trace), "--plot", "a.png")
        expected = "kvpager: --plot needs matplotlib: pip install '.[plot]' in a clone of kvpager\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)

    def test_the_package_needs_neither(self) -> None:
        program = (
            "import sys, kvpager, kvpager.cli, kvpager.replay, kvpager.traces, kvpager.workload;"
            "print(sorted({'click', 'rich', 'matplotlib'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"


class TestEndings:
    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        import kvpager.cli.replay

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(kvpager.cli.replay, "read_trace", interrupt)
        assert main(["replay", "t"]) == 130
        assert capsys.readouterr().err.strip() == "kvpager: interrupted"

    def test_interrupted_before_it_began(self) -> None:
        program = (
            "import sys, builtins; from kvpager.cli import main; real = builtins.__import__\n"
            "def imports(name, *rest):\n"
            "    if name == 'click': raise KeyboardInterrupt\n"
            "    return real(name, *rest)\n"
            "builtins.__import__ = imports; sys.exit(main(['prefix']))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nkvpager: interrupted\n")

    def test_no_memory(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        import kvpager.cli.replay

        def exhausted(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(kvpager.cli.replay, "read_trace", exhausted)
        assert main(["replay", "t"]) == 2
        assert capsys.readouterr().err == "kvpager: the machine has not enough memory for this\n"

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    @pytest.mark.parametrize("arguments", ["prefix", "prefix --json", "prefix --help", "--version"])
    def test_a_full_disk(self, arguments: str) -> None:
        done = run_in_shell(f"{arguments} > /dev/full")
        assert done == (1, "", "kvpager: the output cannot be written: No space left on device\n")

    @pytest.mark.parametrize("arguments", ["prefix", "generate chat -o t.jsonl", "--help"])
    def test_output_closed(self, arguments: str, tmp_path: Path) -> None:
        assert run_in_shell(f"{arguments} >&-", tmp_path) == (1, "", "kvpager: standard output is closed\n")
        assert list(tmp_path.iterdir()) == []
        assert run_in_shell(f"{arguments} >&- 2>&-", tmp_path) == (1, "", "")

    @pytest.mark.parametrize("arguments", ["prefix", "demo --chats 100", "replay by-hand.jsonl"])
    def test_errors_closed(self, arguments: str, trace: Path) -> None:
        code, text, errors = run_in_shell(f"{arguments} 2>&-", trace.parent)
        assert (code, errors) == (0, "")
        assert text.endswith("\n")

    def test_errors_closed_and_an_error(self) -> None:
        assert run_in_shell("replay missing 2>&-") == (2, "", "")

    def test_a_narrow_terminal_cuts_no_number_off(self, trace: Path) -> None:
        narrow = run("replay", str(trace), "--blocks", "4", env=os.environ | {"COLUMNS": "10", "NO_COLOR": "1"})
        assert " 38.46% " in narrow.stdout

    def test_a_terminal_that_knows_ascii_only(self, trace: Path) -> None:
        done = run("replay", str(trace), "--blocks", "4", env=os.environ | {"PYTHONIOENCODING": "ascii"})
        assert (done.returncode, done.stderr) == (0, "")
        assert " 38.46% " in done.stdout

    def test_a_reader_that_goes_away(self) -> None:
        ours, theirs = os.pipe()
        os.close(ours)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "kvpager", "replay", "--help"],
                stdout=theirs,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            os.close(theirs)
        assert (done.returncode, done.stderr) == (1, "")

    def test_a_bug_is_not_dressed_up_as_bad_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import kvpager.cli.replay

        def broken(*_: object) -> None:
            raise IndexError("a bug")

        monkeypatch.setattr(kvpager.cli.replay, "read_trace", broken)
        with pytest.raises(IndexError, match="a bug"):
            main(["replay", "t"])
