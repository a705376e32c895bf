"""`kvpager bench`: what each call costs on this machine."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict

import click
import numpy as np

from ..benchmarks import ROWS, Row, Settings, Subject, measure_rows
from ..replay import build_columns
from ..traces import TraceError, read_trace
from .options import comma_list, json_option, one_of, seed_option
from .output import Bar, print_json, print_table, print_text


@click.command(short_help="What each call costs on this machine.")
@click.option(
    "--only",
    metavar="ROWS",
    callback=comma_list(one_of("row", ROWS)),
    help=f"Measure these rows only, comma-separated: {', '.join(ROWS)}.",
)
@click.option("--quick", is_flag=True, help="A fifth of the time, and 1 M blocks in place of 10 M.")
@click.option("--reference/--no-reference", default=True, help="Measure kvpager.reference beside it.")
@click.option(
    "--trace",
    type=click.Path(),
    help="Id trace for the replay row, e.g. conversation_trace.jsonl.  [default: a made-up one of that shape]",
)
@seed_option
@json_option
def bench(only: list[str] | None, quick: bool, reference: bool, trace: str | None, seed: int, as_json: bool) -> None:
    """Measure every call against its goal, its floor and the pure-Python reference.

    Prompts are int32 arrays, blocks hold 16 tokens, the pool has 100,000 of them and is used: its free and its cached
    blocks are scattered. Each figure is the fastest of many samples. Floors (comparing or copying the tokens once) are
    measured in the same run. The reference is no rival but the specification in plain Python.

    \b
    Examples:
      kvpager bench                              all rows; about half a minute
      kvpager bench --quick --no-reference       a first look
      kvpager bench --only hit_128k,cold_128k    two rows
      kvpager bench --only replay --trace conversation_trace.jsonl

    A missed goal does not change the exit status: another machine is another machine.
    """
    settings = Settings(seed=seed, large_blocks=1_000_000 if quick else 10_000_000)
    with Bar(quiet=as_json) as bar:
        if trace is not None:
            loaded = read_trace(trace, bar.stage("reading"))
            if loaded.form == "tokens":
                raise TraceError(trace, None, None, "bench replays block ids; this trace holds tokens")
            settings = Settings(seed, large_blocks=settings.large_blocks, columns=build_columns(loaded))
        progress = bar.stage("measuring")
        progress(0, len(only or ROWS))
        rows = list(
            measure_rows(
                Subject.core(settings),
                Subject.reference(settings) if reference else None,
                only=only or ROWS,
                seconds=0.1 if quick else 0.5,
                progress=progress,
            )
        )
    if as_json:
        print_json("bench", seed=seed, quick=quick, machine=_machine(), rows=[asdict(row) for row in rows])
    else:
        _print(rows, reference=reference)


def _machine() -> dict[str, str | int | None]:
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _print(rows: list[Row], *, reference: bool) -> None:
    columns = ["call", "unit", "kvpager", "x floor", "goal", "met"]
    print_table(
        ", ".join(f"{name} {value}" for name, value in _machine().items()),
        [*columns, "reference", "ratio"] if reference else columns,
        [_cells(row)[: None if reference else len(columns)] for row in rows],
        left=2,
    )
    print_text("The fastest of many samples.")
    if any(row.times_floor is not None for row in rows):
        print_text("x floor: how many times what comparing (memcmp) or copying (memcpy) the tokens once took just now.")
    if reference:
        print_text("ratio: how many times better than kvpager.reference.")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.what,
        row.unit,
        _number(row.value),
        _number(row.times_floor),
        row.goal,
        {True: "yes", False: "NO", None: "-"}[row.met],
        _number(row.reference),
        "-" if row.reference_ratio is None else f"{row.reference_ratio:,.1f}x",
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0 or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.3g}"
