"""`kvpager diagnose`: what it prints, its JSON, the server's own numbers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Says

import kvpager
from kvpager.cli import main
from kvpager.diagnose import KINDS, MetricsError, Scrape, parse_scrape, read_server

CASE = ("varfront", "--sessions", "250", "--rate", "12", "--systems", "1", "--system", "1000:1000", "--answer", "800")
ENGINE = ("--block-size", "128", "--blocks", "500", "--max-running", "50")

VLLM = """\
# HELP vllm:num_preemptions_total Cumulative number of preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="a b}} \\"c\\""}} {preemptions}
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.99
vllm:num_requests_running{{engine="0"}} 40.0
vllm:num_requests_running{{engine="1"}} 4 1700000000000
vllm:num_requests_waiting {waiting}
vllm:prefix_cache_queries_total 1e6
vllm:prefix_cache_hits_total 2.5e4
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {ttft_count}
vllm:time_to_first_token_seconds_sum {ttft}
vllm:time_to_first_token_seconds_count {ttft_count}
vllm:cache_config_info{{block_size="128",cache_dtype="auto",num_gpu_blocks="500"}} 1.0
python_gc_objects_collected_total{{generation="0"}} NaN
"""
BEFORE = VLLM.format(preemptions=1204, waiting=3, ttft=3000, ttft_count=1000)
AFTER = VLLM.format(preemptions=1560, waiting=97, ttft=8000, ttft_count=1200)
OWN = """\
kvpager_server_waiting 5
kvpager_server_running 12
kvpager_server_pager_total_blocks 1000
kvpager_server_pager_active_blocks 300
kvpager_server_pager_cached_blocks 690
kvpager_server_pager_preemptions 0
kvpager_server_pager_queried_tokens 2000
kvpager_server_pager_hit_tokens 500
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    return Says("diagnose", capsys)


@pytest.fixture
def design(capsys: pytest.CaptureFixture[str]) -> str:
    """The design case as a file: a request id in front of a system prompt of 1,000 tokens."""
    assert main(["generate", *CASE, "-o", "case.jsonl"]) == 0
    capsys.readouterr()
    return "case.jsonl"


def write(name: str, content: str) -> str:
    Path(name).write_text(content, encoding="utf-8")
    return name


def lengths(name: str, count: int = 20, **more: Any) -> str:
    requests = [{"timestamp": 100 * i, "input_length": 40, "output_length": 5} | more for i in range(count)]
    return write(name, "\n".join(map(json.dumps, requests)))


class TestText:
    def test_the_design_case(self, says: Says, design: str) -> None:
        out = says.text(design, *ENGINE)
        assert out.startswith("case.jsonl: 250 requests, on average ")
        assert "500 blocks of 128 tokens, 8,192 tokens a step, at most 50 running; llama-3.1-8b on h100" in out
        flat = " ".join(out.split())
        assert "1. varying-front (high) 250 of 250 prompts hold a text that others hold too" in flat
        assert "The first position that varies is 0:" in flat
        assert "share 1,000 tokens from position 8 on" in flat
        assert "Change: Put what varies (positions 0 to 7) behind the text that is shared." in flat
        assert "Thrashing: " in flat
        assert "A limit of 50 was chosen on an empty cache" in flat
        assert "Blocks of 128 tokens are too coarse" in flat
        assert "(before and after with: front moved)" in flat
        assert flat.count("Change: ") == flat.count("Effect: ") == 4
        assert "By replay of the same requests:" in out
        assert max(map(len, out.splitlines())) <= 140

    def test_a_healthy_trace_says_what_was_looked_at(self, says: Says, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", "chat", "--sessions", "40", "-o", "chat.jsonl"]) == 0
        capsys.readouterr()
        out = says.text("chat.jsonl", "--blocks", "20000", "--max-running", "64")
        assert "\nNothing found.\n" in out
        table = out.partition("By replay of the same requests:")[2].partition("\n\nLooked at")[0]
        assert [line.partition("  ")[0].strip() for line in table.splitlines() if line.strip()][2:] == ["as it is"]
        listed = out.partition("Looked at, and nothing found:\n")[2]
        assert [
            line.split(":")[0].strip() for line in listed.splitlines() if line.startswith("  ") and line[2] != " "
        ] == list(KINDS)

    def test_without_a_pool(self, says: Says, design: str) -> None:
        out = says.text(design, "--block-size", "128")
        assert "a pool without end, blocks of 128 tokens" in out
        not_looked_at = out.partition("Not looked at:\n")[2]
        for kind in ("thrashing", "limit", "scan", "cache-as-free"):
            assert f"  {kind}: nothing says how large the pool is: give --blocks" in not_looked_at

    def test_an_id_trace_says_what_it_hides(self, says: Says) -> None:
        path = lengths("ids.jsonl", block_size=16, hash_ids=[1, 2])
        out = " ".join(says.text(path, "--blocks", "100").split())
        assert "varying-front: the trace names blocks by ids" in out
        assert "a trace with tokens tells" in out

    def test_the_busiest_part(self, says: Says) -> None:
        out = says.text(lengths("l.jsonl", 50), "--blocks", "100", "--requests", "10")
        assert "l.jsonl: 10 requests, the busiest of 50 (from line 1)" in out

    def test_seconds_in_place_of_milliseconds(self, says: Says) -> None:
        lines = [json.dumps({"timestamp": number / 3, "input_length": 3, "output_length": 3}) for number in range(30)]
        Path("t.jsonl").write_text("\n".join(lines), encoding="utf-8")
        _, err = says.both("t.jsonl", "--blocks", "100")
        assert err == "kvpager: note: 30 requests in 0.00967 seconds: timestamps are taken for milliseconds\n"


class TestMetrics:
    def test_evidence_and_the_pool(self, says: Says, design: str) -> None:
        scrapes = ("--metrics", write("before", BEFORE), "--metrics", write("after", AFTER))
        out = says.text(design, "--max-running", "50", *scrapes)
        assert "500 blocks of 128 tokens" in out  # of cache_config_info
        flat = " ".join(out.split())
        assert (
            "The server agrees: vllm:num_preemptions_total grew by 356 between the two scrapes, usage is 99%, 44 run,"
            " 97 wait, the first token takes 25.0 s on average (3.0 before)."
        ) in flat

    def test_options_win(self, says: Says) -> None:
        scrape = write("scrape", AFTER)
        engine = says.json(lengths("l.jsonl"), "--metrics", scrape, "--blocks", "77", "--block-size", "32")["engine"]
        assert (engine["num_blocks"], engine["as_it_is"]["block_size"]) == (77, 32)

    def test_where_the_server_preempts_and_the_trace_does_not(self, says: Says) -> None:
        out, err = says.both(lengths("l.jsonl"), "--metrics", write("scrape", AFTER), "--block-size", "16")
        assert "Nothing found." in out
        assert "the server preempts (vllm:num_preemptions_total: 1,560)" in err
        assert "is it the same load, the same pool?" in err
        bare = write("bare", "vllm:num_preemptions_total 5\n")
        assert "give --blocks" in says.both(lengths("l.jsonl"), "--metrics", bare)[1]

    def test_a_pool_full_of_cache_is_no_shortage(self, says: Says) -> None:
        out, err = says.both(lengths("l.jsonl"), "--metrics", write("own", OWN))
        assert "1,000 blocks of 16 tokens" in out
        assert "69% of the server's pool is prefix cache" in err

    def test_names(self) -> None:
        own, vllm = parse_scrape(OWN, "own"), parse_scrape(AFTER, "vllm")
        assert own == Scrape(
            path="own",
            usage=0.3,
            preemptions=0,
            waiting=5,
            running=12,
            queried_tokens=2000,
            hit_tokens=500,
            active_blocks=300,
            cached_blocks=690,
            total_blocks=1000,
            num_blocks=1000,
            counter="kvpager_server_pager_preemptions",
        )
        assert (vllm.usage, vllm.preemptions, vllm.waiting, vllm.running) == (0.99, 1560, 97, 44)
        assert (vllm.hit_tokens, vllm.queried_tokens) == (25_000, 1_000_000)
        assert (vllm.num_blocks, vllm.block_size) == (500, 128)
        assert parse_scrape("kvpager:preemptions_total 3").preemptions == 3
        assert parse_scrape("kvpager_preemptions_total 3").preemptions == 3
        assert parse_scrape("vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_cache_usage_perc 0.7").usage == pytest.approx(0.6)

    def test_what_a_pager_writes_is_known(self) -> None:
        pager = kvpager.Pager(8, 4, num_host_blocks=4)
        with pager.admit([1, 2, 3, 4, 5]) as first, pager.admit([1] * 9) as second:
            first.commit()
            second.commit()
            first.preempt()
            text = pager.metrics(kvpager.Pressure(pager).read(), labels={"model_name": "m"})
        assert parse_scrape(text, "own") == Scrape(
            path="own",
            usage=0.375,
            preemptions=1,
            running=1,
            queried_tokens=14,
            hit_tokens=0,
            active_blocks=3,
            cached_blocks=1,
            total_blocks=8,
            num_blocks=8,
            block_size=4,
            counter="kvpager_num_preemptions_total",
        )

    def test_between_two(self) -> None:
        server = read_server([write("before", BEFORE), write("after", AFTER)])
        assert server.preemptions == 356
        assert server.ttft_mean_s == 25.0
        assert read_server(["after"]).preemptions == 1560
        assert read_server(["after"]).hit_rate == 0.025

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "holds no metric that is known"),
            ("# only a comment\n", "holds no metric that is known"),
            ("http_requests_total 5\n", "holds no metric that is known"),
            ("vllm:num_requests_waiting\n", "line 1: expected `name{labels} value`"),
            ("\nvllm:num_requests_waiting five\n", "line 2: expected"),
            ("<html>no such page</html>\n", "line 1: expected"),
            ('vllm:num_requests_waiting{a="b} 5\n', "line 1: expected"),
        ],
    )
    def test_refused(self, says: Says, text: str, problem: str) -> None:
        message = says.refused(lengths("l.jsonl"), "--metrics", write("scrape", text))
        assert message.startswith("kvpager: scrape")
        assert problem in message

    def test_odd_numbers_say_nothing(self) -> None:
        scrape = parse_scrape(
            "vllm:num_preemptions_total NaN\nvllm:num_requests_waiting +Inf\nvllm:num_requests_running 1"
        )
        assert (scrape.preemptions, scrape.waiting, scrape.running) == (None, None, 1)
        assert parse_scrape("vllm:kv_cache_usage_perc 97\nvllm:num_requests_running 1").usage is None
        config = 'vllm:cache_config_info{num_gpu_blocks="None",block_size="-3"} 1\nvllm:num_requests_running 1'
        assert (parse_scrape(config).num_blocks, parse_scrape(config).block_size) == (None, None)

    def test_the_wrong_way_round(self, says: Says) -> None:
        before, after = write("before", BEFORE), write("after", AFTER)
        message = says.refused(lengths("l.jsonl"), "--metrics", after, "--metrics", before)
        assert "preemptions fell from 1,560 to 1,204" in message
        assert "the earlier scrape comes first" in message
        message = says.refused(lengths("l.jsonl"), *(3 * ("--metrics", before)))
        assert "--metrics was given 3 times" in message

    def test_files_that_cannot_be_read(self, says: Says, tmp_path: Path) -> None:
        trace = lengths("l.jsonl")
        assert "nowhere: cannot be read" in says.refused(trace, "--metrics", "nowhere")
        assert "cannot be read" in says.refused(trace, "--metrics", str(tmp_path))
        Path("packed").write_bytes(b"\x1f\x8b\xff\xfe")
        assert "not UTF-8 text" in says.refused(trace, "--metrics", "packed")
        with pytest.raises(MetricsError, match="0 scrapes"):
            read_server([])


class TestJson:
    def test_all_of_it(self, says: Says, design: str) -> None:
        result = says.json(design, *ENGINE)
        assert list(result) == [
            *("command", "version", "trace", "engine", "server"),
            *("findings", "looks", "rows", "together", "notes"),
        ]
        assert (result["command"], result["version"]) == ("diagnose", kvpager.__version__)
        assert result["trace"] | {"input_tokens": 0, "output_tokens": 0} == {
            "path": "case.jsonl",
            "form": "tokens",
            "requests": 250,
            "first_line": 1,
            "looked_at": 250,
            "input_tokens": 0,
            "output_tokens": 0,
        }
        setting = {
            "block_size": 128,
            "max_running": 50,
            "watermark": 0.0,
            "eviction": "lru",
            "moved": False,
            "pool": 1.0,
            "risk": None,
        }
        assert result["engine"]["as_it_is"] == setting
        assert result["server"] is None
        for finding in result["findings"]:
            assert list(finding) == [
                *("kind", "severity", "text", "numbers", "change", "base", "setting", "effect"),
            ]
            assert set(finding["setting"]) == set(setting)
            assert list(finding["effect"]) == ["saved_share", "before", "after"]
            assert finding["severity"] in ("high", "medium", "low")
        measures = [
            *("computed_tokens", "hit_tokens", "prompt_tokens", "hit_rate", "tax", "preemptions", "preemptions_max"),
            *("usage_mean", "usage_median", "usage_max", "running_mean", "steps", "seconds"),
            *("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"),
        ]
        assert [list(row) for row in result["rows"]] == [["name", "setting", "measures"]] * len(result["rows"])
        assert all(list(row["measures"]) == measures for row in result["rows"])
        looked = [finding["kind"] for finding in result["findings"]] + [look["kind"] for look in result["looks"]]
        assert sorted(looked) == sorted(KINDS)

    def test_nothing_is_not_a_number(self, says: Says) -> None:
        """One request of one token: no time between tokens, and nothing to divide by."""
        path = write("one.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 0}\n')
        out = says.text(path, "--blocks", "4", "--json")
        assert "NaN" not in out
        assert json.loads(out)["rows"][0]["measures"]["itl_p50_s"] is None

    def test_the_server(self, says: Says) -> None:
        server = says.json(lengths("l.jsonl"), "--metrics", write("after", AFTER))["server"]
        assert server["preemptions"] == 1560
        assert [scrape["path"] for scrape in server["scrapes"]] == ["after"]

    def test_the_same_twice(self, says: Says, design: str) -> None:
        asked = (design, *ENGINE, "--requests", "60", "--json")
        assert says.text(*asked) == says.text(*asked)


class TestRefused:
    def test_a_pool_in_which_a_request_never_fits(self, says: Says) -> None:
        message = says.refused(lengths("l.jsonl"), "--blocks", "2")
        assert message == (
            "kvpager: l.jsonl, line 1: this request needs 3 blocks of 16 tokens before it ends and would never fit in a"
            " pool of 2"
        )

    def test_bad_options(self, says: Says) -> None:
        trace = lengths("l.jsonl")
        assert "--watermark" in says.refused(trace, "--blocks", "9", "--watermark", "much")
        assert "watermark of 2" in says.refused(trace, "--blocks", "9", "--watermark", "200%")
        assert "--blocks" in says.refused(trace, "--blocks", "0")
        assert "block-size" in says.refused(trace, "--block-size", "4096")
        assert "no-such" in says.refused(trace, "--gpu", "no-such")

    def test_bad_traces(self, says: Says) -> None:
        assert "cannot be read" in says.refused("nowhere.jsonl")
        assert "holds no request" in says.refused(write("empty.jsonl", ""))
        assert "line 1: not JSON" in says.refused(write("bad.jsonl", "hello\n"))
