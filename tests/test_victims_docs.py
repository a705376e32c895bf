"""The code in docs/victims.md runs, and the page names metrics that there are."""

from __future__ import annotations

import pathlib
import re

import kvpager
from kvpager.metrics import METRICS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "victims.md"


def test_the_code_in_the_page_runs(capsys) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(program, PAGE.name, "exec"), names)
    pager = names["pager"]
    assert isinstance(pager, kvpager.Pager)
    assert pager.check() == []
    assert pager.stats().running_sequences == 0
    shown = capsys.readouterr().out
    known = set(re.findall(r"^# TYPE (\S+) ", shown, flags=re.MULTILINE))
    assert {f"kvpager_{metric.name}" for metric in METRICS} <= known
    assert set(re.findall(r"\bkvpager_[a-z_]+", text)) <= known
