"""A command run in this process: what it prints, and how it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpager.cli import main


class Says:
    """What a command prints: stdout, notes, or the one line of a refusal."""

    def __init__(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._command, self._capsys = command, capsys

    def both(self, *arguments: str) -> tuple[str, str]:
        """stdout and stderr."""
        assert main([self._command, *arguments]) == 0
        out, err = self._capsys.readouterr()
        return out, err

    def text(self, *arguments: str) -> str:
        """stdout, where nothing is noted."""
        out, err = self.both(*arguments)
        assert err == ""
        return out

    def json(self, *arguments: str) -> Any:
        return json.loads(self.text(*arguments, "--json"))

    def refused(self, *arguments: str) -> str:
        assert main([self._command, *arguments]) == 2
        out, err = self._capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("kvpager")
        return err.strip()
