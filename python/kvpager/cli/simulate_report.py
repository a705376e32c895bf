"""The report of `kvpager simulate`: one HTML file with its tables and pictures in it, that needs nothing else."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import click

from .. import __version__
from ..simulate import Result
from .plots import new_figure
from .simulate_plot import WIDTH, Picture, pictures

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 72rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p { max-width: 48rem; }
code { background: #f1f4f7; padding: .1rem .3rem; border-radius: 3px; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #dfe5ea; white-space: nowrap; }
th:first-child, td:first-child, .words td { text-align: left; }
th { border-bottom: 2px solid #37507d; }
div { overflow-x: auto; }
img { max-width: 100%; }
"""

WORDS = [
    ("steps", "steps of the engine until all requests have their answers"),
    ("tax", "recomputed among all computed tokens"),
    ("preempted", "times that somebody lost his blocks, and the most that happened to one request"),
    ("hits", "share of the prompt tokens that were found in the prefix cache"),
    ("in use", "share of the pool's blocks that somebody holds, over time"),
    ("running", "requests in a step, on average"),
    ("useful/s", "tokens of prompts and answers a simulated second, each counted once"),
    ("TTFT", "time from arrival to the first token"),
    ("ITL", "time from one token to the next, waits and preemptions included"),
]


def write_report(
    results: Sequence[Result],
    title: str,
    command: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    path: Path,
) -> None:
    """Write it, or say why it cannot be written."""
    name, _, rest = title.rpartition(": ")
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}: kvpager simulate</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(name)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in rest.split("; ")),
        f"<p>Made by <code>{escape(command)}</code>, kvpager {escape(__version__)}.</p>",
        _table(columns, rows),
    ]
    for picture in pictures(results):
        parts += [f"<h2>{escape(picture.caption)}</h2>", f"<p>{escape(picture.words)}</p>", _image(picture)]
    parts.append('<h2>Words</h2><table class="words">')
    parts += [f"<tr><td>{escape(word)}</td><td>{escape(meaning)}</td></tr>" for word, meaning in WORDS]
    parts.append("</table></body></html>")
    try:
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--html {path}: cannot be written: {error.strerror or error}") from None


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div><table><tr>{head}</tr>\n{body}\n</table></div>"


def _image(picture: Picture) -> str:
    figure = new_figure(WIDTH, picture.height, option="--html")
    picture.draw(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    encoded = base64.b64encode(content.getvalue()).decode("ascii")
    return f'<img alt="{escape(picture.caption)}" src="data:image/png;base64,{encoded}">'
