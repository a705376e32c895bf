"""`kvpager diagnose`: what is wrong with a load and the engine that serves it, and what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..cost import CostModel, parse_device, parse_link, parse_seconds
from ..diagnose import Case, Diagnosis, Finding, Measures, Server, Setting, diagnose, read_server
from ..diagnose.case import DEFAULT_REQUESTS
from ..diagnose.report import named
from ..replay.runs import DEFAULT_TOKEN_BLOCK_SIZE, MAX_BLOCKS, POLICIES
from ..simulate import Speed
from ..traces import Trace, read_trace
from .blocksize import share
from .cost import model_shape, parsed
from .options import json_option
from .output import Bar, counted, note, note_hurry, print_json, print_table, print_text, printable

WIDTH = 120
DEFAULT_MAX_RUNNING = 256
# The link to the host: nothing is swapped here.
LINK = parse_link("25GB/s")


@click.command(name="diagnose", short_help="What is wrong with a load and its engine, and what to change.")
@click.argument("trace", type=click.Path(path_type=str))
@click.option(
    "--metrics",
    "scrapes",
    multiple=True,
    type=click.Path(path_type=str),
    metavar="FILE",
    help="What the server says of itself: a scrape in Prometheus' text format (kvpager's names, or vLLM's). Twice: an"
    " earlier one and a later one.",
)
@click.option(
    "--blocks",
    type=click.IntRange(1, MAX_BLOCKS),
    metavar="N",
    help="Blocks of the pool.  [default: those of --metrics; else what needs a pool is not looked at]",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Tokens a block.  [default: those of --metrics, else of a trace with tokens, else 16]",
)
@click.option(
    "--max-running",
    type=click.IntRange(1, 65_536),
    metavar="N",
    help=f"The limit of requests that run at once.  [default: {DEFAULT_MAX_RUNNING}, which nobody chose]",
)
@click.option(
    "--max-step-tokens", type=click.IntRange(1, 2**24), default=8192, metavar="N", help="Tokens that a step computes."
)
@click.option(
    "--watermark", type=share, default="0%", metavar="SHARE", help="Share of the pool that admissions leave free."
)
@click.option("--evict", type=click.Choice(POLICIES), default="lru", help="Eviction policy of the prefix cache.")
@click.option(
    "--requests",
    type=click.IntRange(1, 10_000_000),
    default=DEFAULT_REQUESTS,
    metavar="N",
    help="Consecutive requests to look at: the busiest so many of the trace.",
)
@click.option(
    "--model",
    "shape",
    default="llama-3.1-8b",
    metavar="MODEL",
    callback=parsed(model_shape),
    help="A name (kvpager cost --list), or a path to a model's config.json.",
)
@click.option(
    "--gpu", "device", default="h100", metavar="GPU", callback=parsed(parse_device), help="A name, or a peak."
)
@click.option(
    "--overhead",
    default="1ms",
    metavar="TIME",
    callback=parsed(parse_seconds),
    help="What every step takes besides: launches, sampling, the scheduler. An assumption.",
)
@json_option
def diagnose_command(
    trace: str,
    scrapes: tuple[str, ...],
    blocks: int | None,
    block_size: int | None,
    max_running: int | None,
    max_step_tokens: int,
    watermark: float,
    evict: str,
    requests: int,
    shape: Any,
    device: Any,
    overhead: float,
    as_json: bool,
) -> None:
    """Say what is wrong with a load and the engine that serves it, with evidence, and what to change.

    TRACE (as for kvpager replay) is replayed as it is and with each change: what this trace has no evidence for is not
    reported. Say how your engine is set: --blocks, --block-size, --max-running. Findings are ordered by the share of
    the computed tokens that their change saves; the table shows each by itself and all together.

    \b
    varying-front      a request id or a time in front of text that prompts share: the first position that varies, and
                       the hit rate with it moved behind (needs a trace with tokens)
    block-size         blocks too coarse for the lengths, or for the prefix that is shared
    thrashing          preemptions: requests that lose their blocks and compute them again; the watermark or limit that
                       stops it, and what kvpager.Admission makes of it
    limit              a limit that was chosen on an empty cache, where requests have not grown yet
    scan               one-off prompts that push a shared prefix out of the cache
    cache-as-free      prefix cache taken for free memory: little is in use, and what comes back has no room

    The model of time is that of kvpager simulate. --metrics adds the server's own numbers as evidence: usage,
    preemptions, who waits; and the size of the pool, where the server names it. Give it twice, with minutes between the
    scrapes, to see what rises.

    \b
    Examples:
      kvpager diagnose trace.jsonl
          what can be told of the prompts alone
      kvpager diagnose trace.jsonl --blocks 700 --block-size 128 --max-running 64
      kvpager diagnose trace.jsonl --block-size 16 --metrics before.txt --metrics after.txt
          curl -s localhost:8000/metrics > before.txt, and some minutes later > after.txt
      kvpager diagnose trace.jsonl.xz --blocks 20000 --requests 10000 --json
    """
    if len(scrapes) > 2:
        raise click.UsageError(f"--metrics was given {len(scrapes)} times: one scrape, or an earlier and a later one")
    server = read_server(scrapes) if scrapes else None
    with Bar(quiet=as_json) as bar:
        loaded = read_trace(trace, bar.stage("reading"))
        size = block_size or (server.last.block_size if server else None) or _own_size(loaded)
        case = Case(
            loaded,
            block_size=size,
            num_blocks=blocks or (server.last.num_blocks if server else None),
            speed=Speed.of(CostModel(shape=shape, device=device, link=LINK, block_size=size), overhead),
            max_running=max_running or DEFAULT_MAX_RUNNING,
            max_step_tokens=max_step_tokens,
            watermark=watermark,
            eviction=evict,
            requests=requests,
            progress=bar.stage("diagnosing"),
        )
        found = diagnose(case, server, limit_given=max_running is not None, stage=lambda label: _none(bar.stage(label)))
    if as_json:
        _print_json(case, found, server)
    else:
        note_hurry(loaded.num_requests, loaded.seconds)
        _print(case, found)


def _none(_: object) -> None:
    """A stage hears its label; who reports progress keeps the function that it has."""


def _own_size(trace: Trace) -> int:
    """An id trace's blocks are those of who recorded it, and no engine's."""
    return (trace.block_size if trace.form == "tokens" else None) or DEFAULT_TOKEN_BLOCK_SIZE


def _title(case: Case) -> str:
    trace, now = case.trace, case.as_it_is
    load = f"{printable(Path(trace.path).name)}: {counted(trace.num_requests, 'request')}"
    if trace.num_requests < case.whole:
        load += f", the busiest of {case.whole:,} (from line {trace.lines[0]:,})"
    load += f", on average {trace.input_lengths.mean():,.0f} tokens in and {trace.output_lengths.mean():,.0f} out;"
    if case.num_blocks is None:
        return f"{load}\na pool without end, blocks of {counted(now.block_size, 'token')}"
    assert case.speed is not None
    limits = f"{case.max_step_tokens:,} tokens a step, at most {now.max_running:,} running"
    return f"{load}\n{case.num_blocks:,} blocks of {counted(now.block_size, 'token')}, {limits}; {case.speed.name}"


def _print(case: Case, found: Diagnosis) -> None:
    for text in found.notes:
        note(text)
    print_text(f"{_title(case)}\n")
    if not found.findings:
        print_text("Nothing found.\n")
    for number, finding in enumerate(found.findings, 1):
        print_text(f"{number}. {finding.kind} ({finding.severity})")
        for label, text in (
            ("", finding.text),
            ("Change: ", finding.change),
            ("Effect: ", effect_in_words(finding, case.as_it_is)),
        ):
            print_text(_wrapped(label + text, "   "))
        print_text("")
    if found.findings or case.has_pool:
        print_table("By replay of the same requests:", *_table(case, found))
    if found.together is not None:
        print_text(_wrapped(found.together, "") + "\n")
    for state in ("nothing found", "not looked at"):
        looks = [look for look in found.looks if look.state == state]
        if looks:
            print_text("Looked at, and nothing found:" if state == "nothing found" else "Not looked at:")
            for look in looks:
                print_text(_wrapped(f"{look.kind}: {look.text}", "  ", "    "))


def _wrapped(text: str, indent: str, following: str | None = None) -> str:
    after = indent if following is None else following
    return textwrap.fill(
        printable(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def effect_in_words(finding: Finding, now: Setting) -> str:
    """What a replay made of the change, by the numbers that moved."""
    before, after = finding.effect.before, finding.effect.after
    share = finding.effect.saved_share
    parts = [f"{abs(share):.1%} {'fewer' if share >= 0 else 'more'} tokens to compute"]
    shown = [
        ("hits", before.hit_rate, after.hit_rate, _percent),
        ("preemptions", before.preemptions, after.preemptions, lambda value: f"{value:,}"),
        ("recomputed", before.tax, after.tax, _percent),
        ("TTFT p99", before.ttft_p99_s, after.ttft_p99_s, lambda value: f"{value:,.2f} s"),
        ("ITL p99", before.itl_p99_s, after.itl_p99_s, lambda value: f"{1000 * value:,.1f} ms"),
    ]
    for name, one, other, text in shown:
        if one is not None and other is not None and text(one) != text(other):
            parts.append(f"{name} {text(one)} -> {text(other)}")
    base = named(now, finding.base)
    return "; ".join(parts) + (f" (before and after with: {base})." if base else ".")


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _table(case: Case, found: Diagnosis) -> tuple[list[str], Iterator[list[str]]]:
    columns = ["change", "computed", "hits"]
    if case.has_pool:
        columns += ["recomputed", "preempted", "in use", "running", "seconds", "TTFT p99, s", "ITL p99, ms"]
    return columns, ([row.name, *_cells(row.measures)] for row in found.rows)


def _cells(m: Measures) -> Iterator[str]:
    yield f"{m.computed_tokens:,}"
    yield f"{m.hit_rate:.1%}"
    if m.seconds is not None:
        yield f"{m.tax:.1%}"
        yield f"{m.preemptions:,}"
        yield f"{m.usage_mean:.1%}"
        yield f"{m.running_mean:.1f}"
        yield f"{m.seconds:,.1f}"
        yield "-" if m.ttft_p99_s is None else f"{m.ttft_p99_s:,.2f}"
        yield "-" if m.itl_p99_s is None else f"{1000 * m.itl_p99_s:,.1f}"


def _print_json(case: Case, found: Diagnosis, server: Server | None) -> None:
    trace = case.trace
    print_json(
        "diagnose",
        trace={
            "path": trace.path,
            "form": trace.form,
            "requests": case.whole,
            "first_line": int(trace.lines[0]),
            "looked_at": trace.num_requests,
            "input_tokens": int(trace.input_lengths.sum()),
            "output_tokens": int(trace.output_lengths.sum()),
        },
        engine={
            "num_blocks": case.num_blocks,
            "max_step_tokens": case.max_step_tokens,
            "speed": None if case.speed is None else asdict(case.speed),
            "as_it_is": asdict(case.as_it_is),
        },
        server=None if server is None else server.as_dict(),
        findings=[finding.as_dict() for finding in found.findings],
        looks=[asdict(look) for look in found.looks],
        rows=[asdict(row) for row in found.rows],
        together=found.together,
        notes=list(found.notes),
    )
