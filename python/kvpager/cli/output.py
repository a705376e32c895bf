"""What commands print: tables and JSON to stdout, progress and notes to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import __version__

SHOW_AFTER_S = 0.5
DRAW_EVERY_S = 0.1
HURRIED_REQUESTS, HURRIED_PER_S = 20, 1000
"""So many at such a rate are no rhythm that a server has seen."""


def print_json(command: str, **content: Any) -> None:
    """One JSON object: the command, the version that made it, and the command's own fields."""
    click.echo(json.dumps({"command": command, "version": __version__, **content}, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """A table under a line of text; the first `left` columns are words, the others numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=number >= left)
    for row in rows:
        table.add_row(*row)
    # Wider than any table here: in a narrow terminal a wrapped line is ugly, a number cut off is lost.
    console = Console(markup=False, highlight=False, width=200)
    with console.capture() as captured:
        console.print(table)
    click.echo(title)
    # Padding at the end of a line only gets in the way where the output is kept in a file.
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip() + "\n")


def print_text(text: str) -> None:
    """Lines under a table."""
    click.echo(text)


def note(text: str) -> None:
    """Something the user should know about the result that is not the result."""
    click.echo(f"kvpager: note: {text}", err=True)


def note_hurry(num_requests: int, seconds: float) -> None:
    """Requests that all come in so little time: nothing else betrays a trace whose timestamps are seconds."""
    if num_requests >= HURRIED_REQUESTS and 0 < seconds * HURRIED_PER_S < num_requests:
        note(f"{num_requests:,} requests in {seconds:.3g} seconds: timestamps are taken for milliseconds")


def printable(text: str) -> str:
    """The text with what no terminal or picture can show written out: control characters, bytes that are no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def counted(number: int, noun: str) -> str:
    """`1 request`, `1,278 requests`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class Bar:
    """A progress bar on stderr for what takes long: nothing is drawn in the first half second, nor without a terminal.

    `bar.stage("reading")` begins a stage and returns the function that reports (done, total) of it.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._next_drawing = time.monotonic() + SHOW_AFTER_S
        if not quiet and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,
            )

    def stage(self, label: str) -> Callable[[int, int], None]:
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(label, total=None)
        return self._update

    def _update(self, done: int, total: int) -> None:
        if self._progress is None or self._task is None:
            return
        self._progress.update(self._task, completed=done, total=total)
        # Drawn from here and by no thread, which would wake up in the middle of what `bench` measures.
        if time.monotonic() < self._next_drawing:
            return
        self._next_drawing = time.monotonic() + DRAW_EVERY_S
        self._progress.start()
        self._progress.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
