"""The code in docs/tiers.md and docs/stores.md runs."""

from __future__ import annotations

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["tiers.md", "stores.md"])
def test_the_code_in_the_page_runs(page: str) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(program, page, "exec"), names)
    pager = names["pager"]
    assert pager.check() == []  # type: ignore[attr-defined]
    assert pager.stats().late_reports == 0  # type: ignore[attr-defined]
