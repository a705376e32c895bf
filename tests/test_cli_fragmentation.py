"""`kvpager fragmentation`: what is claimed of reservation, first fit and pages holds for many seeds."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.cli import main
from kvpager.fragmentation import (
    BLOCK_SIZES,
    FINISHES,
    FREE,
    MAX_CONTEXT,
    SLOTS,
    WASTED,
    Contiguous,
    Pages,
    Result,
    measure,
    request_lengths,
)

SEEDS = range(50)


@cache
def result(seed: int) -> Result:
    return measure(seed)


@pytest.mark.parametrize("seed", SEEDS)
class TestManySeeds:
    def test_reservation_admits_eight_and_wastes_more_than_it_uses(self, seed: int) -> None:
        filled = result(seed).reserved.filled
        assert filled.admitted == SLOTS // MAX_CONTEXT == 8
        assert filled.used == sum(islice(request_lengths(seed), 8))
        assert filled.wasted > filled.used
        assert filled.free == 0
        assert result(seed).reserved.churned.running_mean == 8

    def test_exact_fit_fails_although_the_free_total_would_do(self, seed: int) -> None:
        churned = result(seed).exact.churned
        assert churned.fail == FINISHES
        # Not now and then: after a while hardly any refusal is for want of slots.
        assert churned.fail >= churned.fail_with_free > churned.fail / 2
        assert churned.last.largest_request < churned.last.length
        assert result(seed).exact.filled.wasted == 0

    def test_pages_of_16_admit_several_times_more(self, seed: int) -> None:
        paged = result(seed).paged[16]
        assert paged.filled.admitted >= 4 * result(seed).reserved.filled.admitted
        assert paged.churned.running_mean >= 4 * result(seed).reserved.churned.running_mean
        assert paged.churned.running_mean > result(seed).exact.churned.running_mean

    def test_paged_waste_is_under_one_block_a_sequence(self, seed: int) -> None:
        for size, scheme in result(seed).paged.items():
            assert 0 <= scheme.filled.wasted < scheme.filled.admitted * size or scheme.filled.wasted == 0
        assert result(seed).paged[1].filled.wasted == 0

    def test_a_page_is_never_refused_while_enough_slots_are_free(self, seed: int) -> None:
        for scheme in result(seed).paged.values():
            assert (scheme.churned.fail, scheme.churned.fail_with_free) == (FINISHES, 0)

    def test_every_slot_is_used_wasted_or_free_and_tables_add_up(self, seed: int) -> None:
        everything = [result(seed).reserved, result(seed).exact, *result(seed).paged.values()]
        for scheme in everything:
            filled = scheme.filled
            assert filled.used + filled.wasted + filled.free == SLOTS
            assert filled.used == sum(islice(request_lengths(seed), filled.admitted))
        for size, scheme in result(seed).paged.items():
            lengths = islice(request_lengths(seed), scheme.filled.admitted)
            assert scheme.filled.table_entries == sum(-(-length // size) for length in lengths)


def test_smaller_blocks_waste_less_and_have_longer_tables() -> None:
    for seed in SEEDS:
        filled = [scheme.filled for scheme in result(seed).paged.values()]
        each = [block.wasted / block.admitted for block in filled]
        tables = [block.table_entries / block.admitted for block in filled]
        assert each == sorted(each)
        assert tables == sorted(tables, reverse=True)


def test_lengths_are_whole_requests_of_a_seed() -> None:
    drawn = list(islice(request_lengths(3), 5000))
    assert drawn == list(islice(request_lengths(3), 5000))
    assert drawn != list(islice(request_lengths(4), 5000))
    assert min(drawn) >= 1
    assert max(drawn) == MAX_CONTEXT
    assert np.median(drawn) == pytest.approx(400, rel=0.05)


class TestContiguous:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60), st.sampled_from([None, 12]))
    def test_is_first_fit_on_an_array(self, steps: list[tuple[bool, int]], reserve: int | None) -> None:
        """Against an array in which places are looked for slot by slot."""
        memory = Contiguous(40, reserve)
        naive = np.full(40, FREE)
        places: dict[int, slice] = {}
        for number, (finish, value) in enumerate(steps):
            if finish and places:
                request = sorted(places)[value % len(places)]
                memory.release(request)
                naive[places.pop(request)] = FREE
            else:
                size = reserve or value
                start = next((at for at in range(41 - size) if (naive[at : at + size] == FREE).all()), None)
                assert memory.admit(number, value) == (start is not None)
                if start is not None:
                    places[number] = slice(start, start + size)
                    naive[start : start + value] = number
                    naive[start + value : start + size] = WASTED
            assert memory.slot_map().tolist() == naive.tolist()
            assert memory.free_slots == int((naive == FREE).sum())
            runs = "".join("." if slot == FREE else "x" for slot in naive).split("x")
            assert memory.largest_request == max(map(len, runs))
            assert memory.table_entries == len(places)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_map_of_pages_is_that_of_the_pager(size: int) -> None:
    memory = Pages(1024, size)
    lengths = {1: 3, 2: 256, 3: 300}
    for request, length in lengths.items():
        assert memory.admit(request, length)
    memory.release(2)
    assert memory.admit(4, 70)
    slots = memory.slot_map()
    held = {request: int((slots == request).sum()) for request in np.unique(slots[slots >= 0]).tolist()}
    assert held == {1: 3, 3: 300, 4: 70}
    assert int((slots == FREE).sum()) == memory.free_slots
    assert int((slots == WASTED).sum()) == sum(-length % size for length in held.values())
    for request in held:
        memory.release(request)
    assert memory.free_slots == 1024


class TestCommand:
    @pytest.fixture(autouse=True)
    def _capture(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def good(self, *arguments: str) -> str:
        assert main(arguments) == 0
        out, err = self.capsys.readouterr()
        assert err == ""
        return out

    def refused(self, *arguments: str) -> str:
        assert main(arguments) == 2
        out, err = self.capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    def test_json(self) -> None:
        found = json.loads(self.good("fragmentation", "--seed", "7", "--json"))
        expected = result(7)
        assert (found["command"], found["seed"], found["slots"], found["max_context"]) == (
            "fragmentation",
            7,
            SLOTS,
            MAX_CONTEXT,
        )
        reserved = expected.reserved.filled
        assert (found["cont_admitted"], found["cont_used"], found["cont_wasted"]) == (8, reserved.used, reserved.wasted)
        churned = expected.exact.churned
        assert (found["exact_fail"], found["exact_fail_with_free"]) == (churned.fail, churned.fail_with_free)
        assert found["exact_last"]["largest_hole"] < found["exact_last"]["length"]
        assert list(found["paged"]) == [str(size) for size in BLOCK_SIZES]
        for size, scheme in expected.paged.items():
            row = found["paged"][str(size)]
            filled = scheme.filled
            assert (row["admitted"], row["wasted"], row["table_entries"]) == (
                filled.admitted,
                filled.wasted,
                filled.table_entries,
            )

    def test_the_same_seed_says_the_same(self) -> None:
        assert self.good("fragmentation", "--seed", "2") == self.good("fragmentation", "--seed", "2")
        assert self.good("fragmentation") == self.good("fragmentation", "--seed", "0")

    def test_table(self) -> None:
        text = self.good("fragmentation")
        rows = {line.strip().split("  ")[0]: line.split() for line in text.splitlines()}
        filled = result(0).paged[16].filled
        assert rows["pages of 16"][3:8] == [
            f"{count:,}" for count in (filled.admitted, filled.used, filled.wasted, filled.free, filled.table_entries)
        ]
        assert f"{filled.admitted / 8:.1f} times as many requests" in text

    def test_help_teaches(self) -> None:
        text = self.good("fragmentation", "--help")
        assert "Examples:" in text
        assert text.count("  kvpager fragmentation") >= 3
        assert "kvpager fragmentation" in self.good("--help")

    def test_bad_options(self, tmp_path: Path) -> None:
        assert "-1 is not in the range" in self.refused("fragmentation", "--seed", "-1")
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        assert "there is no folder" in self.refused("fragmentation", "--plot", str(tmp_path / "none" / "a.png"))

    def test_plot(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        png, svg = tmp_path / "a.png", tmp_path / "a.svg"
        assert json.loads(self.good("fragmentation", "--plot", str(png), "--json"))["plot"] == str(png)
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        self.good("fragmentation", "--plot", str(svg))
        assert "<svg" in svg.read_text(encoding="utf-8")


def test_the_picture_shows_each_slot_as_what_it_is() -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from matplotlib.colors import to_rgb

    from kvpager.cli.fragmentation_plot import EMPTY, UNUSED, USED, WIDTH, _colours

    scale = MAX_CONTEXT // WIDTH
    slots = np.repeat(np.array([5, 5, WASTED, FREE, 9, FREE, 9, 2], dtype=np.int32), scale)
    slots = np.resize(slots, MAX_CONTEXT)
    expected = [USED[0], USED[0], UNUSED, EMPTY, USED[1], EMPTY, USED[1], USED[0]]
    found = _colours(slots)[: len(expected)].tolist()
    assert found == [[round(255 * part) for part in to_rgb(colour)] for colour in expected]
