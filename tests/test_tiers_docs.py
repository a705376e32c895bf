"""The code in docs/tiers.md runs."""

from __future__ import annotations

import pathlib
import re

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "tiers.md"


def test_the_code_in_the_page_runs() -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, PAGE.name, "exec"), names)
        pager = names["pager"]
        assert pager.check() == []  # type: ignore[attr-defined]
        assert pager.stats().late_reports == 0  # type: ignore[attr-defined]
