"""docs/os-lens.md says what is so: its commands are run, its Python is run, its numbers and pictures are looked up.

`python tests/test_os_lens.py` writes what the commands print now into the page.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "os-lens.md"
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LARGEST_PICTURE = 100_000


def blocks(kind: str) -> list[Any]:
    """Line and text of each fenced block of a kind, as parameters of a test."""
    text = PAGE.read_text(encoding="utf-8")
    found = (match for match in BLOCK.finditer(text) if match["kind"] == kind)
    placed = [(text.count("\n", 0, match.start()) + 2, match["body"]) for match in found]
    return [pytest.param(line, body, id=f"line-{line}") for line, body in placed]


def commands(body: str) -> list[str]:
    return [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]


def shown(body: str, folder: Path) -> str:
    """A block as it has to read: each command, and under it what it prints when it is run in this folder."""
    lines = []
    for command in commands(body):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        # A reader that has seen enough (`| head`) ends a writer with 1.
        assert done.returncode == 0 or "| head" in command, done.stdout
        lines += [f"$ {command}", *(line.rstrip() for line in done.stdout.splitlines())]
    return "\n".join(lines) + "\n"


def environment(folder: Path) -> dict[str, str]:
    """One in which `kvpager` is the package under test, installed as a script or not."""
    scripts = folder / "bin"
    if not scripts.exists():
        scripts.mkdir()
        script = scripts / "kvpager"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvpager "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"}


@pytest.mark.parametrize(("line", "body"), blocks("console"))
def test_commands_print_what_the_page_shows(line: int, body: str, tmp_path: Path) -> None:
    if "read()" in body and not Path("/proc/self/io").exists():
        pytest.skip("nobody counts reads here")
    assert body == shown(body, tmp_path), f"docs/os-lens.md, line {line}"


@pytest.mark.parametrize(("line", "body"), blocks("pycon"))
@pytest.mark.filterwarnings("ignore:sequence .* was dropped:ResourceWarning")
def test_python_answers_what_the_page_shows(line: int, body: str) -> None:
    test = doctest.DocTestParser().get_doctest(body, {}, f"line {line}", str(PAGE), line)
    runner = doctest.DocTestRunner(verbose=False)
    with warnings.catch_warnings():
        # Requests that a reader would go on with are dropped at the end of a block.
        warnings.simplefilter("ignore", ResourceWarning)
        report: list[str] = []
        result = runner.run(test, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_each_claim_has_its_command() -> None:
    """Every section but the table shows something."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for section in sections:
        title = section.splitlines()[0]
        assert "```" in section or title == "The translation table", title
    misunderstandings = sections[-1]
    assert len(re.findall(r'^\*\*"', misunderstandings, re.MULTILINE)) == misunderstandings.count("```") / 2


def test_contents_name_every_section() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert [f"[{title}](#{anchor})" in text for title, anchor in zip(titles, anchors, strict=True)] == [True] * len(
        titles
    )


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert pictures
    for name in pictures:
        content = (PAGE.parent / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) < LARGEST_PICTURE, name


def test_the_script_makes_every_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    script = ROOT / "docs" / "plots.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120, stdout=subprocess.DEVNULL)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in (ROOT / "docs" / "img").iterdir()}
    assert all(path.stat().st_size < LARGEST_PICTURE for path in tmp_path.iterdir())


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
