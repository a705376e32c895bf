"""`kvpager simulate`: the command, its tables and files, and what it refuses."""

from __future__ import annotations

import base64
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli_support import Says

from kvpager.cli.simulate_plot import WIDTH, pictures
from kvpager.cost import CostModel
from kvpager.simulate import SCENARIOS, Engine, EngineConfig, Speed, Watermark, parse_admission


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    return Says("simulate", capsys)


SMALL = ("thrash", "--requests", "24", "--blocks", "600")


class TestTables:
    def test_side_by_side(self, says: Says) -> None:
        out = says.text(*SMALL, "--policy", "first-come,watermark:20%,reserve")
        title, engine, *_ = out.splitlines()
        assert title == "thrash: 24 requests, on average 522 tokens in and 1,380 out;"
        assert engine == "600 blocks of 16 tokens, 8,192 tokens a step, at most 256 running; llama-3.1-8b on h100"
        rows = {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}
        assert set(rows) >= {"first come", "watermark 20%", "reserve"}
        speed = Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))
        marked = Engine(SCENARIOS["thrash"](0, 24), EngineConfig(num_blocks=600), speed, Watermark(0.2)).run()
        found = [
            f"{marked.steps:,}",
            f"{marked.tax:.1%}",
            f"{marked.preemptions}",
            "(max",
            f"{marked.preemptions_max})",
        ]
        assert rows["watermark 20%"][2:7] == found
        assert rows["reserve"][2:4] == ["0.0%", "0"]
        assert f"no policy needs fewer than {marked.lower_bound_steps:,} steps" in out
        assert re.search(r"first come computes \d+\.\d% of its tokens again; reserve 0.0%, in \d\.\d\d times", out)
        assert "hits" not in out  # nothing is shared

    def test_loads_and_ways(self, says: Says) -> None:
        out = says.text(
            *("mixed", "--requests", "100", "--load", "0.5,120%", "--policy", "first-come,limit:9", "--blocks", "1000"),
            *("--when-full", "recompute,swap", "--host-blocks", "4000"),
        )
        header = next(line for line in out.splitlines() if "steps" in line)
        assert header.split()[:6] == ["policy", "when", "full", "load", "steps", "tax"]
        assert "hits" in header
        rows = [line.split() for line in out.splitlines() if " recompute " in line or " swap " in line]
        assert [row[2:4] for row in rows[:4]] == [[w, s] for w in ("recompute", "swap") for s in ("50%", "120%")]
        assert len(rows) >= 8
        assert re.search(r"The load that fills the pool, 100%: \d+\.\d\d requests a second\.", out)

    def test_a_scenario_has_a_load_of_its_own(self, says: Says) -> None:
        quick = ("--requests", "60", "--policy", "first-come")
        for name, share in (("mixed", 0.8), ("burst", 0.3)):
            (row,) = says.json(name, *quick)["rows"]
            assert row["load_factor"] == share

    def test_chunks(self, says: Says) -> None:
        asked = (
            "mixed",
            "--requests",
            "60",
            "--load",
            "0.9",
            "--policy",
            "first-come,adaptive",
            "--chunk",
            "full,64,roofline",
        )
        out = says.text(*asked)
        header = next(line for line in out.splitlines() if "steps" in line)
        assert header.split()[:3] == ["policy", "chunk", "load"]
        assert re.findall(r"^ (?:first come|adaptive 28%) +(whole step|64|roofline) +90% ", out, re.MULTILINE) == [
            *("whole step", "64", "roofline") * 2
        ]
        rows = says.json(*asked)["rows"]
        assert [row["chunk"] for row in rows] == ["whole step", "64", "roofline"] * 2
        assert rows[2]["itl"]["p99"] < rows[0]["itl"]["p99"]
        # Who does not ask sees nothing of it.
        assert "chunk" not in says.text(*SMALL, "--policy", "reserve")

    def test_the_best_limit(self, says: Says) -> None:
        asked = ("mixed", "--requests", "60", "--load", "0.9,1.2", "--policy", "limit:1.2x")
        result = says.json(*asked)
        for row in result["rows"]:
            assert re.fullmatch(r"limit \d+", row["admission"])
            assert row["itl"]["p99"] <= 1.2 * result["idle_itl_p99"] * (1 + 1e-9)
        assert f"One request at a time: ITL p99 {1000 * result['idle_itl_p99']:.2f} ms." in says.text(*asked)
        assert says.json(*SMALL, "--policy", "reserve")["idle_itl_p99"] is None

    def test_a_trace(self, says: Says, tmp_path: Path) -> None:
        lines = [
            {"timestamp": 1000 * i, "input_length": 40, "output_length": 5, "block_size": 16, "hash_ids": [0, 1]}
            for i in range(5)
        ]
        path = tmp_path / "a trace.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        out = says.text(str(path), "--policy", "first-come", "--requests", "4")
        assert out.startswith("a trace.jsonl: 4 requests, on average 40 tokens in and 5 out;\n")
        assert " 60.0% " in out  # three of four find 32 of their 40 tokens
        result = says.json(str(path), "--policy", "first-come")
        assert (result["workload"]["seed"], result["rows"][0]["load_factor"]) == (None, None)
        assert result["rows"][0]["seconds"] > 4


class TestJson:
    def test_all_of_it(self, says: Says) -> None:
        result = says.json(*SMALL, "--policy", "first-come", "--seed", "5", "--max-tokens", "4000")
        (row,) = result.pop("rows")
        assert result["workload"] == {
            "name": "thrash",
            "seed": 5,
            "requests": 24,
            "input_tokens": int(SCENARIOS["thrash"](5, 24).input_lengths.sum()),
            "output_tokens": row["output_tokens"],
            "max_tokens": 4000,
        }
        assert result["engine"]["num_blocks"] == 600
        assert result["speed"]["overhead_s"] == 0.001
        assert (result["plot"], result["html"]) == (None, None)
        assert row["computed_tokens"] == row["useful_tokens"] - row["hit_tokens"] + row["recomputed_tokens"]
        assert row["tax"] == row["recomputed_tokens"] / row["computed_tokens"]
        assert 0 < row["ttft"]["p50"] <= row["ttft"]["p90"] <= row["ttft"]["p99"]
        assert len({len(values) for values in row["timeline"].values()}) == 1

    def test_the_same_twice(self, says: Says) -> None:
        asked = ("burst", "--requests", "80", "--load", "0.9", "--seed", "3")
        assert says.text(*asked, "--json") == says.text(*asked, "--json")
        assert says.text(*asked, "--json") != says.text(*asked[:-1], "4", "--json")

    def test_a_limit_is_all_that_reserve_knows(self, says: Says) -> None:
        known = says.json(*SMALL, "--policy", "reserve")["rows"][0]
        unknown = says.json(*SMALL, "--policy", "reserve", "--max-tokens", "4096")["rows"][0]
        assert unknown["steps"] > known["steps"]

    def test_speed_changes_time_and_nothing_else(self, says: Says) -> None:
        asked = (*SMALL, "--policy", "watermark:5%")
        fast, slow = says.json(*asked)["rows"][0], says.json(*asked, "--gpu", "l40s", "--overhead", "3ms")["rows"][0]
        assert (fast["steps"], fast["preemptions"], fast["tax"]) == (slow["steps"], slow["preemptions"], slow["tax"])
        assert fast["seconds"] < slow["seconds"]

    def test_without_a_prefix_cache_nothing_hits(self, says: Says) -> None:
        asked = ("mixed", "--requests", "60", "--policy", "first-come")
        assert says.json(*asked)["rows"][0]["hit_tokens"] > 0
        assert says.json(*asked, "--no-prefix-cache")["rows"][0]["hit_tokens"] == 0


class Page(HTMLParser):
    """What a browser would fetch for a page, and how its tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self._open.append(tag)
        for name, value in attrs:
            assert name not in ("href", "srcset", "onload")
            if name == "src":
                self.images.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th", "code", "h1", "h2"):
            self.cells.append(data)


class TestFiles:
    @pytest.mark.parametrize("name", ["curve.png", "curve.svg", "curve.pdf"])
    def test_plot(self, says: Says, name: str) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        out = says.text(*SMALL, "--policy", "first-come,watermark:20%,reserve", "--plot", name)
        assert out.startswith("thrash: ")
        head = Path(name).read_bytes()[:5]
        assert head.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[name[-3:]])

    def test_names_of_points_that_fall_together_can_be_read(self) -> None:
        matplotlib = pytest.importorskip("matplotlib.figure", reason="the extra `plot` is not installed")
        load, speed = SCENARIOS["thrash"](0, 40), Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))
        # Where all fit, three of these do the same; the last takes the most steps, at the right edge.
        admissions = [parse_admission(text) for text in ("first-come", "watermark:1%", "limit:40", "limit:5")]
        results = [Engine(load, EngineConfig(), speed, admission).run() for admission in admissions]
        assert [result.steps == results[0].steps for result in results] == [True, True, True, False]
        (chart,) = [picture for picture in pictures(results) if picture.caption == "Tax against steps"]
        figure = matplotlib.Figure(figsize=(WIDTH, chart.height), layout="constrained")
        chart.draw(figure)
        figure.canvas.draw()
        (axes,) = figure.axes
        boxes = {t.get_text(): t.get_window_extent() for t in axes.texts if not t.get_text().startswith("no policy")}
        assert sorted(boxes) == sorted(admission.name for admission in admissions)
        for one, other in itertools.combinations(boxes.values(), 2):
            assert not one.overlaps(other)
        assert all(axes.get_window_extent().fully_containsx(box.x1) for box in boxes.values())

    def test_all_pools_of_a_chart_are_drawn_or_it_says_so(self) -> None:
        load, speed = SCENARIOS["thrash"](0, 2), Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))
        results = [
            Engine(load, EngineConfig(), speed, parse_admission(f"limit:{limit + 1}")).run() for limit in range(13)
        ]
        assert "Of 13 runs the first 6." in next(pictures(results)).words
        assert "runs" not in next(pictures(results[:12])).words

    @pytest.mark.parametrize(
        ("more", "captions"),
        [
            (("thrash", "--policy", "first-come"), ["The pool over time"]),
            (("thrash",), ["The pool over time", "Tax against steps"]),
            (
                ("mixed", "--load", "0.3,0.9", "--policy", "first-come,limit:9"),
                [
                    "The pool over time at 90% load",
                    "Tax against steps at 90% load",
                    "Time to the first token against load",
                    "Time between tokens against load",
                ],
            ),
        ],
    )
    def test_html_holds_all_that_it_shows(self, says: Says, more: tuple[str, ...], captions: list[str]) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        out = says.text(*more, "--requests", "40", "--blocks", "900", "--html", "a <b>.html")
        text = Path("a <b>.html").read_text(encoding="utf-8")
        page = Page()
        page.feed(text)
        assert len(page.images) == len(captions)
        for image in page.images:
            kind, _, content = image.partition(",")
            assert kind == "data:image/png;base64"
            assert base64.b64decode(content, validate=True).startswith(b"\x89PNG")
        assert "http" not in re.sub(r"base64,[^\"]*", "", text)
        assert [cell for cell in page.cells if cell in captions] == captions
        assert "script" not in page.tags
        # The tables say what the terminal said, and the command can be run again.
        assert any(cell.startswith("kvpager simulate " + more[0]) and "'a <b>.html'" in cell for cell in page.cells)
        for number in re.findall(r"\d[\d,]*\.\d+%?", out.split("─\n")[1].split("\n\n")[0]):
            assert number in page.cells

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--html", "report.txt"), "--html report.txt: the name has to end in .html"),
            (("--html", "nowhere/report.html"), "--html nowhere/report.html: there is no folder"),
            (("--plot", "report.html"), "--plot report.html: the name has to end in one of .png, .svg, .pdf"),
        ],
    )
    def test_files_that_cannot_be_written(self, says: Says, arguments: tuple[str, ...], problem: str) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        assert problem in says.refused("thrash", *arguments)


class TestNotes:
    @pytest.mark.parametrize(("step", "noted"), [(500, False), (1.1, False), (0.5, True), (0, False)])
    def test_seconds_in_place_of_milliseconds(self, says: Says, step: float, noted: bool) -> None:
        request = {"input_length": 3, "output_length": 3}
        lines = [json.dumps({"timestamp": 1e9 + step * number, **request}) for number in range(50)]
        Path("t.jsonl").write_text("\n".join(lines), encoding="utf-8")
        _, err = says.both("t.jsonl", "--policy", "first-come")
        note = "kvpager: note: 50 requests in 0.0245 seconds: timestamps are taken for milliseconds\n"
        assert err == (note if noted else "")
        assert says.json("t.jsonl", "--policy", "first-come")["workload"]["requests"] == 50


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("nosuch.jsonl",), "nosuch.jsonl: there is no such file, and the scenarios are thrash, mixed, burst"),
            (("",), "'': cannot be read: No such file or directory"),
            (("thrash", "--policy", "adaptive:5"), "limit:1.2x, reserve, adaptive, adaptive:28%, known or"),
            (("thrash", "--blocks", "30"), "would never fit in a pool of 30"),
            (("thrash", "--load", "0.5"), "--load means nothing to thrash, where all requests arrive at once"),
            (("mixed", "--load", "0"), "load '0': expected a share of the load that fills the pool"),
            (("mixed", "--load", "0.5,x"), "load 'x': expected a share"),
            (("thrash", "--policy", "first-come,watermark"), "policy 'watermark': expected first-come, watermark:5%"),
            (("thrash", "--policy", "watermark:200%"), "a watermark of 2.0: expected a share from 0 to 1"),
            (("thrash", "--when-full", "kill"), "'kill': expected one of recompute, swap, stall"),
            (("thrash", "--when-full", "swap"), "needs a host tier: give it --host-blocks"),
            (("thrash", "--model", "gpt"), "model 'gpt': expected one of"),
            (("thrash", "--gpu", "abacus"), "device 'abacus': expected one of"),
            (
                ("thrash", "--policy", "limit:0.5x"),
                "a limit at 0.5 times the ITL of an idle engine: expected at least 1",
            ),
            (("thrash", "--chunk", "full,half"), "chunk 'half': expected full, 512, roofline, itl:8ms or slowdown:1.2"),
            (("thrash", "--chunk", "itl:8"), "time '8': expected seconds with a unit"),
            (("thrash", "--overhead", "3"), "time '3': expected seconds with a unit"),
            (("thrash", "--max-running", "0"), "0 is not in the range"),
        ],
    )
    def test_one_line(self, says: Says, arguments: tuple[str, ...], problem: str) -> None:
        assert problem in says.refused(*arguments)

    def test_a_broken_trace(self, says: Says) -> None:
        Path("t.jsonl").write_text('{"timestamp": 0, "input_length": 5}\n', encoding="utf-8")
        assert "t.jsonl, line 1: output_length: missing" in says.refused("t.jsonl")
