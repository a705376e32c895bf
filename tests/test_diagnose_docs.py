"""docs/diagnose.md says what is so: its commands are run, its Python is run, its numbers are looked up.

`python tests/test_diagnose_docs.py` writes what the commands print now into the page.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_os_lens import BLOCK, ROOT, commands, shown

from kvpager.diagnose import KINDS
from kvpager.diagnose.admission import WATERMARKS
from kvpager.diagnose.case import DEFAULT_REQUESTS
from kvpager.diagnose.metrics import CONFIG, SUMS, USAGE, known_names

PAGE = ROOT / "docs" / "diagnose.md"
TEXT = PAGE.read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return [match["body"] for match in BLOCK.finditer(TEXT) if match["kind"] == kind]


@pytest.mark.parametrize("body", blocks("console"), ids=lambda body: commands(body)[0].split()[2])
def test_commands_print_what_the_page_shows(body: str, tmp_path: Path) -> None:
    assert body == shown(body, tmp_path)


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generate = commands(blocks("console")[0])[0].replace("kvpager", f"{sys.executable} -m kvpager", 1)
    subprocess.run(generate, shell=True, check=True, stdout=subprocess.DEVNULL, timeout=120)
    (body,) = blocks("python")
    exec(compile(body, str(PAGE), "exec"), {})


def test_what_the_text_says_of_the_outputs() -> None:
    case, burst, chat = (" ".join(body.split()) for body in blocks("console"))
    for kind in ("varying-front", "thrashing", "limit", "block-size"):
        assert re.search(rf"\d\. {kind} \(\w+\)", case), kind
    shared, front, total = 1000, 8, int(found(r"on average ([\d,]+) tokens in", case).replace(",", ""))
    assert f"{shared / total:.0%} of each prompt" in TEXT
    assert f"from position {front} on" in case
    assert 1 / 7 < float(found(r"requests, up to \d+ of one; ([\d.]+)% of all computed", case)) / 100 < 1 / 5
    assert "comes in with 9 blocks and leaves with 16" in TEXT
    assert round(float(found(r"come in, ([\d.]+) each", case))) == 9
    assert round(float(found(r"would take [\d,]+, ([\d.]+) each", case))) == 16
    assert shared // 128 * 128 == 896
    assert float(found(r"Effect: ([\d.]+)% fewer", case)) > 50
    assert "a limit of 64 is too low" in case
    assert "The server agrees: vllm:num_preemptions_total grew by 356" in case
    assert re.search(r"1\. scan \(\w+\)", burst)
    assert re.search(r"1\. cache-as-free \(\w+\)", chat)
    assert int(found(r"requests hold (\d+)% of the pool", chat)) in range(8, 13)


def test_every_kind_has_its_paragraph() -> None:
    assert re.findall(r"^\*\*`([a-z-]+)`\*\*", TEXT, re.MULTILINE) == list(KINDS)


def test_names_and_numbers_are_those_of_the_code() -> None:
    known = {name for names in SUMS.values() for name in names} | set(USAGE) | set(CONFIG)
    table = TEXT.partition("| what you look for")[2].partition("\n\n")[0]
    for name in re.findall(r"`(vllm:\w+)`", table):
        assert {name, f"{name}_sum"} & known, name
    own = re.findall(r"`(\w+)`", " ".join(line.split("|")[2] for line in table.splitlines()[2:]))
    assert len(own) == 7
    for name in own:
        assert set(known_names(name, {})) <= known, name
    tried = [f"{100 * share:g}" for share in WATERMARKS]
    assert f"{', '.join(tried[:-1])} and {tried[-1]}%" in TEXT
    assert f"busiest {DEFAULT_REQUESTS:,} requests" in TEXT


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]


def rewrite() -> None:
    """Run every command and write what it prints into the page."""

    def renewed(match: re.Match[str]) -> str:
        if match["kind"] != "console":
            return match[0]
        with tempfile.TemporaryDirectory() as folder:
            return f"```console\n{shown(match['body'], Path(folder))}```"

    PAGE.write_text(BLOCK.sub(renewed, TEXT), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
