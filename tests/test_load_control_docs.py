"""docs/load-control.md says what is so: its commands are run, its Python is run, its numbers are looked up.

`python tests/test_load_control_docs.py` writes what the commands print now into the page.
"""

from __future__ import annotations

import doctest
import re
import tempfile
from pathlib import Path

import pytest
from test_os_lens import BLOCK, ROOT, shown

PAGE = ROOT / "docs" / "load-control.md"


def blocks(kind: str) -> list[str]:
    found = BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    return [match["body"] for match in found if match["kind"] == kind]


@pytest.mark.parametrize("body", blocks("console"), ids=lambda body: body.splitlines()[0][2:])
def test_commands_print_what_the_page_shows(body: str, tmp_path: Path) -> None:
    assert body == shown(body, tmp_path)


@pytest.mark.parametrize("body", blocks("pycon"))
def test_python_answers_what_the_page_shows(body: str) -> None:
    test = doctest.DocTestParser().get_doctest(body, {}, "pycon", str(PAGE), 0)
    report: list[str] = []
    assert doctest.DocTestRunner(verbose=False).run(test, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("body", blocks("python"))
def test_the_policy_of_your_own_runs(body: str) -> None:
    exec(compile(body, str(PAGE), "exec"), {})


def test_what_the_text_says_of_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first, curve, others, *_ = blocks("console")
    rows = {line[1:14].strip(): line[14:].split() for line in (first + curve).splitlines() if line.startswith(" ")}
    come, reserve = rows["first come"], rows["reserve"]
    assert f"preempts {come[2]} times, one request nine times" in text
    assert come[4] == "9)"
    assert f"{100 - float(reserve[3].rstrip('%')):.0f}% of the pool stays unused" in text
    steps = {name: int(row[0].replace(",", "")) for name, row in rows.items() if row[0][0].isdigit()}
    assert f"at {steps['limit 40'] / steps['first come']:.2f} times the steps" in text
    ours = [line[1:14].strip().split() + line[14:].split() for line in others.splitlines() if line.startswith(" limit")]
    assert f"next to nothing, and {ours[1][5]} are preempted" in text
    assert f"{steps['watermark 5%'] / steps['first come'] - 1:.0%} more steps" in text


def test_what_the_text_says_of_the_time_between_tokens() -> None:
    *_, chunks, limits = blocks("console")
    rows = {line[15:28].strip(): line.split()[-8:] for line in chunks.splitlines() if line.startswith(" adaptive")}
    itl = {name: float(row[-1]) for name, row in rows.items()}
    useful = {name: int(row[-5].replace(",", "")) for name, row in rows.items()}
    # "a tenth of the ITL, more throughput", "256 happens to be it", "512 makes the ITL two thirds longer".
    assert itl["roofline"] < 0.11 * itl["whole step"]
    assert useful["roofline"] > useful["whole step"]
    assert itl["256"] == pytest.approx(itl["roofline"], rel=0.02)
    assert itl["512"] / itl["roofline"] == pytest.approx(5 / 3, rel=0.05)
    assert itl["8 ms"] < 8.05
    # The goal, row by row: at least 98% of the throughput of the best limit, at most 1.05 times its ITL.
    found = {
        (match[1], match[2]): match[3].split()
        for match in re.finditer(
            r"^ (limit|adaptive) .*?(?:whole step|1\.2 x alone) +(\d+)% (.*)$", limits, re.MULTILINE
        )
        if (match[1] == "limit") == ("whole step" in match[0])
    }
    for load in ("60", "80", "95", "110"):
        ours, best = found["adaptive", load], found["limit", load]
        assert int(ours[-5].replace(",", "")) >= 0.98 * int(best[-5].replace(",", ""))
        assert float(ours[-1]) <= 1.05 * float(best[-1])


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert pictures
    assert all((PAGE.parent / name).is_file() for name in pictures)


def rewrite() -> None:
    """Run every command and write what it prints into the page."""

    def renewed(match: re.Match[str]) -> str:
        if match["kind"] != "console":
            return match[0]
        with tempfile.TemporaryDirectory() as folder:
            return f"```console\n{shown(match['body'], Path(folder))}```"

    PAGE.write_text(BLOCK.sub(renewed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
