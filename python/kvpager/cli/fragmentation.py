"""`kvpager fragmentation`: how many requests fit into the same memory, contiguously and in pages."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..fragmentation import FINISHES, LENGTH_MEDIAN, LENGTH_SIGMA, MAX_CONTEXT, SLOTS, Result, Scheme, measure
from .fragmentation_plot import plot_slots
from .options import json_option, plot_option, seed_option
from .output import Bar, print_json, print_table, print_text

PLOTTED_BLOCK_SIZE = 16


@click.command(short_help="How many requests fit, reserved, exact and in pages.")
@seed_option
@plot_option
@json_option
def fragmentation(seed: int, plot: Path | None, as_json: bool) -> None:
    """Put the same requests into memory for 32,768 tokens in three ways, and count what is lost to each.

    \b
    reserved  the longest context, 4,096 slots, for each: nobody knows how long an answer will be
    exact     a contiguous place of just the right size, the first that is large enough: if somebody knew
    pages     blocks of 1 to 256 tokens anywhere, by the pager, without sharing

    Requests wait in one queue; their lengths, answer included, are log-normal (median 400, sigma 0.8), cut at 4,096.
    First the memory is filled until one does not fit: that is what the first columns count. Then 1,000 requests finish
    in random order, each time the queue moves up until its head does not fit again, and that is one refusal.

    \b
    used           slots with a token
    wasted         slots that a request holds and does not use
    table entries  what all requests together keep about where their slots are
    running        requests in memory on average, over all refusals
    though free    refusals although enough slots were free in total

    \b
    Examples:
      kvpager fragmentation
      kvpager fragmentation --plot slots.png
          the slots as a map, the three schemes one above the other
      kvpager fragmentation --seed 7 --json
    """
    with Bar(quiet=as_json) as bar:
        result = measure(seed, bar.stage("filling and emptying"))
    if plot is not None:
        plot_slots(result, PLOTTED_BLOCK_SIZE, plot)
    if as_json:
        _print_json(result, plot)
    else:
        _print(result)


def _print_json(result: Result, plot: Path | None) -> None:
    last = result.exact.churned.last
    print_json(
        "fragmentation",
        seed=result.seed,
        slots=SLOTS,
        max_context=MAX_CONTEXT,
        lengths={"median": LENGTH_MEDIAN, "sigma": LENGTH_SIGMA},
        finishes=FINISHES,
        **_fields("cont_", result.reserved),
        **_fields("exact_", result.exact),
        exact_last={"length": last.length, "free": last.free, "largest_hole": last.largest_request},
        paged={str(size): _fields("", scheme) for size, scheme in result.paged.items()},
        plot=None if plot is None else str(plot),
    )


def _fields(prefix: str, scheme: Scheme) -> dict[str, int | float]:
    churned = scheme.churned
    counted: dict[str, int | float] = {
        **asdict(scheme.filled),
        "fail": churned.fail,
        "fail_with_free": churned.fail_with_free,
        "running_mean": round(churned.running_mean, 2),
    }
    return {prefix + name: value for name, value in counted.items()}


def _print(result: Result) -> None:
    schemes = [(f"reserve {MAX_CONTEXT:,}", result.reserved), ("exact, first fit", result.exact)]
    schemes += [(f"pages of {size}", scheme) for size, scheme in result.paged.items()]
    print_table(
        f"{SLOTS:,} token slots; the longest context is {MAX_CONTEXT:,}; requests of seed {result.seed}.\n"
        f"Filled until one does not fit; then {FINISHES:,} finish in random order, with a refusal after each.",
        ["scheme", "admitted", "used", "wasted", "free", "table entries", "running", "though free"],
        [_row(words, scheme) for words, scheme in schemes],
    )
    last = result.exact.churned.last
    reserved = result.reserved.filled
    paged = result.paged[PLOTTED_BLOCK_SIZE].filled
    print_text(
        f"Reserved: {reserved.wasted / SLOTS:.0%} of the memory is held and has no token.\n"
        f"Exact:    the last request refused has {last.length:,} tokens; {last.free:,} slots are free, the largest hole"
        f" is {last.largest_request:,}.\n"
        f"Pages:    {paged.admitted / reserved.admitted:.1f} times as many requests as reserved with blocks of"
        f" {PLOTTED_BLOCK_SIZE}, {paged.wasted / paged.admitted:.1f} slots wasted each."
    )


def _row(words: str, scheme: Scheme) -> list[str]:
    filled, churned = scheme.filled, scheme.churned
    counts = (filled.admitted, filled.used, filled.wasted, filled.free, filled.table_entries)
    return [words, *(f"{count:,}" for count in counts), f"{churned.running_mean:.1f}", f"{churned.fail_with_free:,}"]
