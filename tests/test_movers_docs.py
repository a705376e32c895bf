"""The code in docs/movers.md runs."""

from __future__ import annotations

import pathlib
import re

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "movers.md"


def test_the_code_in_the_page_runs(capsys):
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    said = "1,000 blocks of 131,072 bytes in 4 arrays; pieces of a block: 8 of 16,384 bytes"
    assert capsys.readouterr().out.strip() == said
    assert said in PAGE.read_text(encoding="utf-8")
