"""`kvpager prefix`: every statement about the play is worked out from what the pager answered."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import kvpager.reference
from kvpager import prefix_play
from kvpager.cli import main
from kvpager.prefix_play import AGAIN, AT_ONCE, BLOCK_SIZE, NUM_BLOCKS, STRANGERS, SYSTEM, USERS, Act, Play, play

PLAYS = {"lru": play("lru"), "pinned": play("lru", pinned=True), "slru": play("slru")}
SYSTEM_BLOCKS = len(SYSTEM.split()) // BLOCK_SIZE

each_play = pytest.mark.parametrize("found", PLAYS.values(), ids=PLAYS)


def acts(found: Play) -> dict[str, Act]:
    names = ["users", "leave", "flood", "again"]
    return dict(zip(names, found.acts[-4:], strict=True))


class TestSetting:
    def test_four_prompts_share_a_system_prompt_of_eight_tokens(self) -> None:
        assert (len(USERS), len(SYSTEM.split()), NUM_BLOCKS) == (4, 8, 12)
        assert len(SYSTEM.split()) % BLOCK_SIZE == 0

    def test_two_users_ask_the_same_and_all_leave_a_partial_block(self) -> None:
        assert USERS["ana"] == USERS["cho"]
        assert all(len(f"{SYSTEM} {question}".split()) % BLOCK_SIZE for question in (USERS | AGAIN).values())


@each_play
class TestEveryPlay:
    def test_users_hit_at_least_twice_and_the_first_prompt_misses(self, found: Play) -> None:
        users = acts(found)["users"]
        assert users.hits >= 2
        assert users.hits + users.misses == len(USERS)
        assert (found.acts[0].misses, found.acts[0].hit_tokens > 0) == (1, not found.pinned)

    def test_the_flood_hits_nothing_and_evicts(self, found: Play) -> None:
        flood = acts(found)["flood"]
        assert (flood.hits, flood.misses) == (0, STRANGERS)
        assert flood.evictions > NUM_BLOCKS / 2

    def test_nothing_is_evicted_before_the_flood(self, found: Play) -> None:
        assert acts(found)["users"].evictions == acts(found)["leave"].evictions == 0

    def test_evictions_seen_in_the_blocks_are_those_the_pager_counted(self, found: Play) -> None:
        for act in found.acts:
            assert act.evictions == sum(len(moment.evicted) for moment in act.moments)

    def test_no_block_with_a_holder_is_evicted(self, found: Play) -> None:
        assert found.evicted_while_held == 0
        # And once more from the drawings: what was held keeps its content, unless its holder has left.
        for before, after in pairwise(found.moments):
            for was, now in zip(before.blocks, after.blocks, strict=True):
                if was.holders and (was.owner, was.words) != (now.owner, now.words):
                    left = f"s{int(after.name[1:]) - AT_ONCE}" if after.name[1:].isdigit() else was.owner
                    assert was.owner == left
                    assert after.name not in USERS

    def test_the_partial_tail_is_never_shared(self, found: Play) -> None:
        assert found.partial_shared == 0
        tails = [block for block in acts(found)["users"].moments[-1].blocks if block.partial]
        # One a user, though Ana's and Cho's hold the same word.
        assert sorted(block.owner for block in tails) == sorted(USERS)
        assert [block.words for block in tails if block.owner in ("ana", "cho")] == [("fault",)] * 2
        assert {block.holders for block in tails} == {1}

    def test_the_drawing_is_what_the_pager_says(self, found: Play) -> None:
        for act in found.acts:
            blocks = act.moments[-1].blocks
            assert sum(block.holders > 0 for block in blocks) == act.active
            assert sum(block.cached for block in blocks) == act.cached
            assert sum(not block.owner for block in blocks) == act.free
            assert act.active + act.cached + act.free == NUM_BLOCKS
            assert not any(block.cached and block.partial for block in blocks)

    def test_when_users_leave_their_full_blocks_stay(self, found: Play) -> None:
        before, after = (acts(found)[name].moments[-1].blocks for name in ("users", "leave"))
        for was, now in zip(before, after, strict=True):
            assert now.owner == ("" if was.partial else was.owner)

    def test_nothing_is_read(self, found: Play) -> None:
        assert found.read_calls in (0, None)
        if sys.platform == "linux" and Path("/proc/self/io").exists():
            assert found.read_calls == 0

    def test_the_reference_plays_the_same(self, found: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefix_play, "Pager", kvpager.reference.Pager)
        again = play(found.policy, pinned=found.pinned)
        assert again.acts == found.acts


class TestWhatDiffers:
    def test_lru_loses_the_system_prompt_to_the_flood(self) -> None:
        again = acts(PLAYS["lru"])["again"]
        assert (again.hits, again.hit_tokens) == (0, 0)
        assert [owner for moment in PLAYS["lru"].moments for owner in moment.evicted].count("sys") == SYSTEM_BLOCKS

    @pytest.mark.parametrize("name", ["pinned", "slru"])
    def test_pinned_or_with_slru_it_stays(self, name: str) -> None:
        again = acts(PLAYS[name])["again"]
        assert again.hits == 1
        assert again.hit_tokens == len(SYSTEM.split())
        assert "sys" not in [owner for moment in PLAYS[name].moments for owner in moment.evicted]

    def test_who_pins_computes_it_and_then_every_user_hits(self) -> None:
        first, users = PLAYS["pinned"].acts[:2]
        assert (first.misses, first.computed_tokens) == (1, len(SYSTEM.split()))
        assert (users.hits, users.misses) == (len(USERS), 0)
        assert all(act.active >= SYSTEM_BLOCKS for act in PLAYS["pinned"].acts)

    def test_slru_also_keeps_the_question_that_was_asked_twice(self) -> None:
        kept = [block.owner for block in acts(PLAYS["slru"])["again"].moments[-1].blocks]
        assert kept.count("ana") == 1
        assert "ben" not in kept


def test_no_file_is_opened() -> None:
    """Seen from inside the process; the only file is the one in which Linux counts reads."""
    program = (
        "import sys\n"
        "from kvpager.prefix_play import play\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, arguments: opened.append(arguments[0]) if event == 'open' else None)\n"
        "play('lru')\n"
        "print(sorted(set(opened)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['/proc/self/io']\n"


class TestCommand:
    @pytest.fixture(autouse=True)
    def _capture(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def good(self, *arguments: str) -> str:
        assert main(["prefix", *arguments]) == 0
        out, err = self.capsys.readouterr()
        assert err == ""
        return out

    def refused(self, *arguments: str) -> str:
        assert main(["prefix", *arguments]) == 2
        out, err = self.capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    def test_json(self) -> None:
        found = json.loads(self.good("--json"))
        assert found["command"] == "prefix"
        assert found["pool"] == {"num_blocks": 12, "block_size": BLOCK_SIZE, "system_tokens": 8}
        assert [each["play"] for each in found["plays"]] == ["lru", "pinned", "slru"]
        for each in found["plays"]:
            expected = PLAYS[each["play"]]
            assert (each["policy"], each["pinned"]) == (expected.policy, expected.pinned)
            for act, real in zip(each["acts"], expected.acts, strict=True):
                counts = (real.hits, real.misses, real.evictions)
                assert (act["hits"], act["misses"], act["evictions"]) == counts
                assert len(act["moments"][-1]["blocks"]) == NUM_BLOCKS

    def test_text(self) -> None:
        lines = self.good().splitlines()
        dan = acts(PLAYS["lru"])["users"].moments[-1]
        cells = next(line for line in lines if line.split()[:1] == ["dan"]).split()
        assert cells[1] == f"sys*{dan.blocks[0].holders}" == "sys*4"
        assert cells[1:].count(".") == acts(PLAYS["lru"])["users"].free
        left = next(line for line in lines if line.startswith(" all leave"))
        assert left.count("(") == acts(PLAYS["lru"])["leave"].cached
        assert "Blocks evicted while somebody held them: 0. Partial blocks shared: 0." in lines
        again = acts(PLAYS["slru"])["again"]
        assert f"{again.computed_tokens} of {again.computed_tokens + again.hit_tokens} tokens with slru" in "\n".join(
            lines
        )
        assert all(line == line.rstrip() for line in lines)

    def test_only(self) -> None:
        assert "pinned" not in self.good("--only", "slru,lru")
        assert "play 'fifo': expected one of lru, pinned, slru" in self.refused("--only", "fifo")

    def test_help_teaches(self) -> None:
        text = self.good("--help")
        assert "Examples:" in text
        assert text.count("  kvpager prefix") >= 3

    def test_plot(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
        png, svg = tmp_path / "a.png", tmp_path / "a.svg"
        assert json.loads(self.good("--plot", str(png), "--json"))["plot"] == str(png)
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        self.good("--only", "slru", "--plot", str(svg))
        assert "<svg" in svg.read_text(encoding="utf-8")
        assert "there is no folder" in self.refused("--plot", str(tmp_path / "none" / "a.png"))
