"""`kvpager.diagnose`: each finding on a load that has this fault, and on one that has it not."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnose_support import SPEED, case, length_trace, made, token_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.diagnose import (
    KINDS,
    Case,
    Diagnosis,
    Finding,
    Look,
    cache,
    diagnose,
    front,
    moved_behind,
    scan,
    thrashing,
    varying_fronts,
)
from kvpager.diagnose import block_size as block_size_finding
from kvpager.diagnose.case import busiest, chosen, part
from kvpager.errors import ConfigError, KvPagerError
from kvpager.replay import TokenChains
from kvpager.simulate import Adaptive, ConcurrencyLimit, Engine, EngineConfig, Watermark, load_from_trace
from kvpager.traces import Trace

TEXT = np.random.Generator(np.random.PCG64(7)).integers(0, 30_000, 5_000, dtype=np.int32)


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def found(answer: Finding | Look) -> Finding:
    assert isinstance(answer, Finding), answer
    return answer


def not_found(answer: Finding | Look, state: str = "nothing found") -> str:
    assert isinstance(answer, Look), answer
    assert answer.state == state
    return answer.text


class TestVaryingFronts:
    """Where prompts begin to differ, and what they share behind that."""

    @pytest.mark.parametrize(("before", "width", "shared"), [(0, 1, 64), (0, 8, 400), (50, 3, 300), (500, 40, 1000)])
    def test_position_front_and_text(self, before: int, width: int, shared: int, seed: int) -> None:
        draw = rng(seed)
        text = TEXT[1000 : 1000 + shared]
        prompts = [
            np.concatenate([TEXT[:before], draw.integers(0, 30_000, width), text, draw.integers(0, 30_000, 30)])
            for _ in range(60)
        ]
        groups = varying_fronts(token_trace(prompts).prompts)
        # A text as short as one fingerprint in 16 allows may have none.
        if shared == 64 and not groups:
            return
        (group,) = groups
        assert (group.front, group.front_tokens) == (before, width)
        assert group.text.tolist() == text.tolist()
        assert group.members.tolist() == list(range(60))

    def test_fronts_of_different_lengths_and_prompts_without(self, seed: int) -> None:
        draw = rng(seed)
        widths = draw.integers(0, 12, 80)
        prompts = [
            np.concatenate([draw.integers(0, 30_000, width), TEXT[:600], draw.integers(0, 30_000, 20)])
            for width in widths
        ]
        (group,) = varying_fronts(token_trace(prompts).prompts)
        assert (group.front, len(group.text)) == (0, 600)
        assert group.starts.tolist() == widths.tolist()

    def test_a_time_in_front_differs_where_its_digits_do(self) -> None:
        """Nearly all digits of a time are the same within an hour; the position is that of the first that is not."""
        minutes = [[2, 0, 2, 6, 1, 1, 3, 0, minute // 10, minute % 10] for minute in range(60)]
        prompts = [np.concatenate([[99, *m], TEXT[:300], [500 + i] * 9]) for i, m in enumerate(minutes)]
        (group,) = varying_fronts(token_trace(prompts).prompts)
        assert group.front in (9, 10)
        assert group.text.tolist() == TEXT[:300].tolist()

    def test_each_text_is_a_group(self) -> None:
        draw = rng(0)
        texts = [TEXT[:500], TEXT[1000:1300], TEXT[2000:2900]]
        prompts = [
            np.concatenate([draw.integers(0, 30_000, 8), texts[i % 3], draw.integers(0, 30_000, 10)]) for i in range(90)
        ]
        groups = varying_fronts(token_trace(prompts).prompts)
        assert sorted(len(group.text) for group in groups) == [300, 500, 900]
        assert {len(group.members) for group in groups} == {30}

    @pytest.mark.parametrize("kind", ["chat", "agent", "burst"])
    def test_none_in_a_healthy_trace(self, kind: str, seed: int) -> None:
        sessions = 10 if kind == "agent" else 80
        assert varying_fronts(made(kind, seed, sessions=sessions).prompts) == []

    def test_none_without_a_front(self, seed: int) -> None:
        assert varying_fronts(made("varfront", seed, sessions=100, front=0).prompts) == []

    def test_moved_is_as_good_as_left_out(self, seed: int) -> None:
        """The generator's own pair: the same requests with a front and without."""
        shape: dict[str, Any] = {"sessions": 80, "systems": 3}
        with_front, without = made("varfront", seed, **shape), made("varfront", seed, front=0, **shape)
        moved = moved_behind(with_front, varying_fronts(with_front.prompts))
        shared = [case(trace).shared_tokens(case(trace).as_it_is) for trace in (with_front, moved, without)]
        assert shared[0] < 0.01 * shared[2]
        assert shared[1] >= 0.97 * shared[2]

    def test_moving_changes_the_order_of_tokens_and_nothing_else(self, seed: int) -> None:
        trace = made("varfront", seed, sessions=50)
        values = trace.prompts.values.copy()
        groups = varying_fronts(trace.prompts)
        moved = moved_behind(trace, groups)
        assert (trace.prompts.values == values).all()
        assert (moved.prompts.offsets == trace.prompts.offsets).all()
        for index in range(trace.num_requests):
            assert sorted(moved.prompts.row(index)) == sorted(trace.prompts.row(index))
        (group, *_) = groups
        for index in group.members.tolist():
            assert moved.prompts.row(index)[: len(group.text)].tolist() == group.text.tolist()

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 2**31 - 1), max_size=6),
                st.integers(0, 200),
                st.integers(0, 200),
                st.lists(st.integers(0, 3), min_size=1, max_size=50),
            ),
            min_size=1,
            max_size=12,
        )
    )
    def test_any_prompts(self, shapes: list[tuple[list[int], int, int, list[int]]]) -> None:
        prompts = [np.concatenate([front, TEXT[a : a + b], rest]).astype(np.int64) for front, a, b, rest in shapes]
        trace = token_trace(prompts)
        groups = varying_fronts(trace.prompts)
        moved = moved_behind(trace, groups)
        for index in range(trace.num_requests):
            assert sorted(moved.prompts.row(index)) == sorted(trace.prompts.row(index))
        again = varying_fronts(trace.prompts)
        assert [(g.front, g.members.tolist(), g.text.tolist()) for g in groups] == [
            (g.front, g.members.tolist(), g.text.tolist()) for g in again
        ]

    def test_many_requests_are_read_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trace = made("varfront", sessions=40)
        whole = varying_fronts(trace.prompts)
        monkeypatch.setattr("kvpager.diagnose.shared_text.CHUNK_TOKENS", 2_500)
        parts = varying_fronts(trace.prompts)
        assert [g.members.tolist() for g in parts] == [g.members.tolist() for g in whole]


class TestFront:
    def test_found(self) -> None:
        trace = made("varfront", sessions=60, systems=1, system=(800, 800))
        answer = found(front.look(case(trace)))
        assert answer.numbers | {"hit_rate_moved": None, "values_there": None} == {
            "position": 0,
            "front_tokens": 8,
            "values_there": None,
            "prompts_there": 60,
            "shared_tokens": 800,
            "prompts": 60,
            "all_prompts": 60,
            "texts": 1,
            "hit_rate": 0.0,
            "hit_rate_moved": None,
        }
        # All but the first prompt find 50 blocks of 16.
        assert answer.numbers["hit_rate_moved"] == pytest.approx(59 * 800 / trace.input_lengths.sum(), rel=0.001)
        assert "The first position that varies is 0: " in answer.text
        assert "share 800 tokens from position 8 on" in answer.text
        assert "positions 0 to 7" in answer.change
        assert answer.severity == "high"
        assert answer.effect.after.hit_tokens == 59 * 800

    def test_not_found_without(self) -> None:
        text = not_found(front.look(case(made("varfront", sessions=60, front=0))))
        assert "no text of 64 tokens" in text

    def test_what_is_worth_little_is_not_found(self) -> None:
        """A phrase of 70 tokens in prompts of 3,000 stands behind different beginnings; moving it saves 2 %."""
        draw = rng(1)
        prompts = [
            np.concatenate([draw.integers(0, 30_000, 1500), TEXT[:70], draw.integers(0, 30_000, 1430)])
            for _ in range(20)
        ]
        one = case(token_trace(prompts))
        text = not_found(front.look(one))
        assert "no text" in text or "worth 2." in text or "worth 1." in text
        assert one.moved_trace is None

    def test_two_beginnings_are_no_front(self) -> None:
        """Two long system prompts with the same tools behind: to move these gains one copy, so nothing is said."""
        draw = rng(2)
        prompts = [
            np.concatenate([TEXT[1000 * (i % 2) : 1000 * (i % 2) + 900], TEXT[3000:3400], draw.integers(0, 9, 20)])
            for i in range(40)
        ]
        not_found(front.look(case(token_trace(prompts))))

    def test_ids_hide_it_and_lengths_too(self) -> None:
        ids = as_ids(made("varfront", sessions=30), 16)
        text = not_found(front.look(case(ids)), "not looked at")
        assert "cannot be seen (30 of 30 first blocks occur once)" in text
        assert "lengths only" in not_found(front.look(case(length_trace([9], [9]))), "not looked at")


class TestBlockSize:
    def shared(self, system: int) -> Trace:
        return made("varfront", sessions=60, front=0, systems=1, system=(system, system), answer=30.0)

    def test_too_coarse_for_lengths_and_prefix(self) -> None:
        answer = found(block_size_finding.look(case(self.shared(500), block_size=256)))
        assert answer.numbers["waste_share"] > 0.05
        assert answer.numbers["lost_share"] > 0.2  # 244 of 500 tokens of each prompt
        assert answer.setting.block_size == answer.numbers["recommended"] <= 32
        assert answer.effect.after.hit_tokens > answer.effect.before.hit_tokens
        assert "both are" in answer.text

    def test_not_where_it_fits(self) -> None:
        assert "not too coarse" in not_found(block_size_finding.look(case(self.shared(500), block_size=16)))
        long = made("varfront", sessions=30, front=0, systems=1, system=(3072, 3072), question=900.0)
        text = not_found(block_size_finding.look(case(long, block_size=32)))
        assert text.startswith("blocks of 32 cost ")

    def test_a_front_that_varies_hides_what_is_lost(self) -> None:
        trace = made("varfront", sessions=60, systems=1, system=(500, 500), answer=30.0)
        one = case(trace, block_size=256)
        before = found(block_size_finding.look(one))
        assert before.numbers["lost_share"] == 0
        found(front.look(one))
        behind = found(block_size_finding.look(one))
        assert behind.numbers["front_moved"]
        assert behind.numbers["lost_share"] > 0.2
        assert behind.base.moved
        assert behind.setting.moved

    def test_lengths_alone_say_what_is_wasted(self) -> None:
        answer = found(block_size_finding.look(case(length_trace([100] * 50, [30] * 50), block_size=128)))
        assert answer.numbers["waste_share"] == 126 / 130
        assert answer.numbers["lost_share"] == 0
        assert "share" not in answer.text


class TestThrashing:
    """Requests of 100 tokens with answers of 200 to 400, all there at once."""

    trace = length_trace([100] * 40, [200 + 5 * i for i in range(40)])

    def test_found_with_what_stops_it(self) -> None:
        one = case(self.trace, num_blocks=250)
        answer = found(thrashing.look(one, None))
        run = Engine(load_from_trace(self.trace), EngineConfig(num_blocks=250), SPEED).run()
        assert answer.numbers["preemptions"] == run.preemptions > 0
        assert answer.numbers["tax"] == run.tax >= 0.05
        assert answer.text.startswith(f"Thrashing: {run.preemptions} preemptions of 40 requests")
        # What it names stops it; of the limit the next one does not.
        limit = answer.numbers["limit_that_stops"]
        for limited, expected in ((limit, False), (limit + 1, True)):
            policy = ConcurrencyLimit(limited)
            ran = Engine(load_from_trace(self.trace), EngineConfig(num_blocks=250), SPEED, policy).run()
            assert (ran.preemptions > 0) == expected
        if (share := answer.numbers["watermark_that_stops"]) is not None:
            ran = Engine(load_from_trace(self.trace), EngineConfig(num_blocks=250), SPEED, Watermark(share)).run()
            assert ran.preemptions == 0
        assert answer.effect.after.preemptions == 0

    @pytest.mark.parametrize("limit", [30, 300])
    def test_admission_is_proposed_in_place_of_limit_and_watermark(self, limit: int) -> None:
        one = case(self.trace, num_blocks=250, max_running=limit, watermark=0.004)
        answer = found(thrashing.look(one, None))
        setting = answer.also["Admission"]
        assert (setting.risk, setting.watermark, setting.max_running) == (0.28, 0.0, max(limit, 256))
        ran = Engine(load_from_trace(self.trace), EngineConfig(num_blocks=250), SPEED, Adaptive()).run()
        assert one.run(setting).preemptions == ran.preemptions < answer.numbers["preemptions"]
        assert f"no number to find: {ran.preemptions} preemptions, {ran.tax:.1%} recomputed." in answer.change
        (row,) = [row for row in diagnose(one).rows if row.name == "Admission"]
        assert (row.setting, row.measures.preemptions) == (setting, ran.preemptions)

    def test_not_in_a_pool_that_is_large_enough(self) -> None:
        one = case(self.trace, num_blocks=2000)
        assert not_found(thrashing.look(one, None)).startswith("preemptions: 0, of 40 requests")
        not_found(thrashing.look_at_limit(case(self.trace, num_blocks=2000, max_running=40), True))

    def test_not_with_a_watermark_that_holds(self) -> None:
        share = found(thrashing.look(case(self.trace, num_blocks=250), None)).setting.watermark
        if share:
            not_found(thrashing.look(case(self.trace, num_blocks=250, watermark=share), None))

    def test_a_limit_from_an_empty_cache(self) -> None:
        # 30 times 7 blocks fit in 250; grown they would be 30 times 25.
        answer = found(thrashing.look_at_limit(case(self.trace, num_blocks=250, max_running=30), True))
        assert answer.numbers["blocks_entering"] == 7
        assert answer.numbers["fit_entering"] == 35
        assert "chosen on an empty cache: 30 requests take 210 of the 250 blocks" in answer.text
        assert answer.setting.max_running == answer.numbers["limit_that_stops"] < 30

    def test_a_limit_that_limits_nothing(self) -> None:
        answer = found(thrashing.look_at_limit(case(self.trace, num_blocks=250, max_running=100), True))
        assert "A limit of 100 limits nothing: 35 requests fill the pool" in answer.text
        assert "With their answers complete 100 would take" in answer.text

    def test_a_limit_that_nobody_chose_is_not_blamed(self) -> None:
        assert "no limit was given" in not_found(
            thrashing.look_at_limit(case(self.trace, num_blocks=250), False), "not looked at"
        )

    def test_without_a_pool(self) -> None:
        one = case(self.trace, block_size=16)
        assert "give --blocks" in not_found(thrashing.look(one, None), "not looked at")

    def test_a_run_that_ends_early_leaves_nothing_behind(self) -> None:
        one = case(self.trace, num_blocks=250)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert one.preempts(one.as_it_is)
            assert one.preempts(one.as_it_is)
            assert not one.preempts(replace(one.as_it_is, max_running=3))


class TestScan:
    def load(self) -> Trace:
        return made("burst", sessions=800, systems=20, burst=20.0, answer=20.0)

    def test_found(self) -> None:
        answer = found(scan.look(case(self.load(), num_blocks=2000)))
        assert answer.numbers["one_offs"] == 400
        assert answer.numbers["hit_rate_of_others"] < answer.numbers["hit_rate_of_others_alone"] - 0.02
        assert answer.numbers["longest_flood_blocks"] > answer.numbers["num_blocks"] == 2000
        assert answer.setting.eviction == "slru"
        assert answer.effect.after.hit_tokens > answer.effect.before.hit_tokens

    def test_not_in_a_large_pool(self) -> None:
        assert "400 of 800 prompts share nothing" in not_found(scan.look(case(self.load(), num_blocks=30_000)))

    def test_not_where_slru_is_set(self) -> None:
        assert "slru is set" in not_found(scan.look(case(self.load(), num_blocks=2000, eviction="slru")))

    def test_not_without_one_offs_and_not_of_one_offs_alone(self) -> None:
        shared = made("varfront", sessions=60, front=0, systems=1)
        assert "every prompt shares" in not_found(scan.look(case(shared, num_blocks=2000)))
        assert "no prompt shares" in not_found(scan.look(case(made("varfront", sessions=30), num_blocks=2000)))

    def test_one_offs_and_floods_by_hand(self) -> None:
        a, b = TEXT[:40], TEXT[100:140]
        prompts = [a, b, a, TEXT[200:300], TEXT[300:400], [1, 2], b, a]
        trace = token_trace(prompts)
        once = scan.one_offs(trace, 16)
        assert once.tolist() == [False, False, False, True, True, True, False, False]
        assert scan.longest_flood(trace, once, 16) == 12  # 6 and 6 blocks; two tokens fill none
        assert scan.one_offs(as_ids(trace, 16), 16).tolist() == once.tolist()


class TestCacheAsFree:
    def load(self) -> Trace:
        return made("chat", sessions=150, rate=15.0, think=5.0, answer=30.0)

    def test_found(self) -> None:
        one = case(self.load(), num_blocks=1000)
        answer = found(cache.look(one, one.as_it_is, None))
        assert answer.numbers["usage_mean"] < 0.7
        assert answer.numbers["hit_rate"] < answer.numbers["hit_rate_twice"] <= answer.numbers["hit_rate_without_end"]
        assert answer.effect.saved_share >= 0.1
        assert "taken for free memory" in answer.text

    def test_not_where_all_has_room(self) -> None:
        one = case(self.load(), num_blocks=20_000)
        assert not_found(cache.look(one, one.as_it_is, None)).endswith("if nothing were ever evicted")

    def test_says_that_it_was_measured_with_the_other_changes(self) -> None:
        one = case(self.load(), num_blocks=20_000)
        text = not_found(cache.look(one, replace(one.as_it_is, eviction="slru"), None))
        assert text.endswith("if nothing were ever evicted (with the other changes made)")

    def test_not_where_the_pool_is_full_of_requests(self) -> None:
        busy = made("chat", sessions=150, rate=200.0, think=0.2, answer=80.0)
        one = case(busy, num_blocks=500)
        assert "does not look free" in not_found(cache.look(one, one.as_it_is, None))


def as_ids(trace: Trace, size: int) -> Trace:
    """The same requests with block ids in place of tokens."""
    columns = TokenChains(trace, "none", size).columns("none")
    lengths = columns.prompt_blocks
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    prompts = type(trace.prompts)(columns.ids, offsets)
    outputs = type(trace.outputs)(np.empty(0, np.int32), np.zeros(trace.num_requests + 1, np.int64))
    none = np.zeros(trace.num_requests, np.bool_)
    return replace(trace, form="ids", block_size=size, prompts=prompts, outputs=outputs, has_output=none)


# The design case: a request id in front of a long system prompt, blocks of 128, a limit tuned on an empty cache.
DESIGN: dict[str, Any] = {"sessions": 400, "rate": 12.0, "systems": 1, "system": (1000, 1000), "answer": 800.0}
ENGINE: dict[str, Any] = {"block_size": 128, "num_blocks": 700, "max_running": 64}


@pytest.fixture(scope="module")
def design() -> Diagnosis:
    return diagnose(case(made("varfront", **DESIGN), **ENGINE), limit_given=True)


class TestTheDesignCase:
    def test_all_four_are_found_and_nothing_else(self, design: Diagnosis) -> None:
        kinds = [finding.kind for finding in design.findings]
        assert kinds[0] == "varying-front"
        assert sorted(kinds) == ["block-size", "limit", "thrashing", "varying-front"]
        assert [look.kind for look in design.looks] == ["scan", "cache-as-free"]
        shares = [finding.effect.saved_share for finding in design.findings]
        assert shares == sorted(shares, reverse=True)
        assert min(shares) > 0.02

    def test_its_numbers(self, design: Diagnosis) -> None:
        by_kind = {finding.kind: finding for finding in design.findings}
        assert by_kind["varying-front"].numbers["position"] == 0
        assert by_kind["varying-front"].numbers["shared_tokens"] == 1000
        assert by_kind["thrashing"].numbers["preemptions"] > 200
        assert by_kind["thrashing"].numbers["usage_max"] > 0.99
        assert by_kind["block-size"].numbers["block_size"] == 128
        assert by_kind["limit"].numbers["limit"] == 64
        assert by_kind["limit"].numbers["limit_that_stops"] < 64

    def test_each_change_by_itself_and_all_together(self, design: Diagnosis) -> None:
        rows = {row.name: row.measures for row in design.rows}
        now, moved = rows["as it is"], rows["front moved"]
        assert now.hit_tokens == 0
        assert moved.hit_rate > 0.8
        assert moved.preemptions == 0
        together = next(measures for name, measures in rows.items() if name.startswith("all together"))
        assert together.computed_tokens == min(measures.computed_tokens for measures in rows.values())
        assert (together.preemptions, together.tax) == (0, 0.0)
        waits = [measures.ttft_p99_s for measures in (together, moved, now)]
        assert waits == sorted(waits, key=lambda wait: wait or 0.0)
        assert (together.itl_p99_s or 1.0) < (now.itl_p99_s or 0.0)
        assert "a limit of 64 is too low" in (design.together or "")
        by_controller, all_of_it = rows["Admission"], rows["all together, Admission"]
        assert (by_controller.preemptions or 0) < (now.preemptions or 0) / 10
        assert (by_controller.seconds or 0.0) < (now.seconds or 0.0)
        assert all_of_it.computed_tokens < 1.1 * together.computed_tokens
        assert f"with no number to find: {all_of_it.ttft_p99_s:.1f} s" in (design.together or "")

    def test_healthy_once_cured(self, design: Diagnosis) -> None:
        """The same load without the front, in small blocks, in a pool with room: nothing to say."""
        healthy = case(made("varfront", front=0, **DESIGN), block_size=16, num_blocks=9000, max_running=64)
        cured = diagnose(healthy, limit_given=True)
        assert cured.findings == ()
        assert sorted(look.kind for look in cured.looks) == sorted(KINDS)
        assert len(cured.rows) == 1
        assert cured.together is None

    def test_the_same_twice(self, design: Diagnosis) -> None:
        again = diagnose(case(made("varfront", **DESIGN), **ENGINE), limit_given=True)
        assert [finding.as_dict() for finding in again.findings] == [finding.as_dict() for finding in design.findings]
        assert again.rows == design.rows


class TestCase:
    @pytest.mark.parametrize("kind", ["chat", "agent"])
    def test_healthy_traces(self, kind: str) -> None:
        trace = made(kind, sessions=8 if kind == "agent" else 60)
        assert diagnose(case(trace, num_blocks=20_000)).findings == ()

    def test_the_busiest_part(self) -> None:
        trace = length_trace([10] * 6, [5] * 6)
        trace = replace(trace, timestamps_ms=np.array([0.0, 100, 200, 210, 220, 900]))
        assert busiest(trace, 3) == 2
        assert busiest(trace, 6) == busiest(trace, 100) == 0
        one = case(trace, requests=3)
        assert (one.first, one.trace.num_requests, one.whole) == (2, 3, 6)
        assert one.trace.lines.tolist() == [3, 4, 5]

    def test_parts_of_a_trace(self) -> None:
        trace = made("chat", sessions=10)
        some = chosen(trace, np.array([1, 4]))
        assert some.prompts.row(1).tolist() == trace.prompts.row(4).tolist()
        assert some.outputs.row(0).tolist() == trace.outputs.row(1).tolist()
        assert part(trace, 0, trace.num_requests) is trace

    def test_a_request_that_never_fits(self) -> None:
        with pytest.raises(KvPagerError, match=r"line 2: this request needs 13 blocks .* in a pool of 10"):
            case(length_trace([10, 100], [5, 100]), num_blocks=10)

    def test_a_pool_without_speed(self) -> None:
        with pytest.raises(ConfigError, match="speed is None"):
            Case(length_trace([9], [9]), block_size=16, num_blocks=9)

    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("form", ["tokens", "ids", "lengths"])
    def test_few_short_requests(self, count: int, form: str) -> None:
        trace = token_trace([[5]] * count, output=0)
        if form == "ids":
            trace = as_ids(trace, 512)
        elif form == "lengths":
            trace = length_trace([1] * count, [0] * count)
        for engine in ({}, {"num_blocks": 4, "max_running": 1}):
            assert diagnose(case(trace, **engine), limit_given=True).findings == ()
