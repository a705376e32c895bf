"""`kvpager simulate`: what admission policies make of a load, on an engine without a model."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from ..cost import CostModel, parse_device, parse_link, parse_seconds
from ..replay.runs import MAX_BLOCKS, POLICIES
from ..simulate import (
    REQUESTS,
    SCENARIOS,
    Admission,
    BestLimit,
    Chunk,
    EngineConfig,
    Fixed,
    Load,
    Newest,
    Result,
    Run,
    Speed,
    compare,
    idle_itl,
    load_from_trace,
    parse_chunk,
    parse_policy,
)
from ..traces import read_trace
from .cost import model_shape, parsed
from .options import comma_list, json_option, one_of, plot_option, seed_option
from .output import Bar, counted, note_hurry, print_json, print_table, print_text, printable
from .plots import check_plot_path
from .simulate_plot import at_the_highest_load, plot_results, policy_name, policy_names
from .simulate_report import write_report

LOADS = {"mixed": 0.8, "burst": 0.3}
"""Of scenarios whose arrivals are a rhythm, unless told otherwise."""
ARGUMENTS = "kvpager.arguments"
DEFAULT_POLICIES = "first-come,watermark:1%,watermark:5%,watermark:20%,reserve,adaptive"


@dataclass(frozen=True, slots=True)
class Study:
    """What was asked, and what came out."""

    load: Load
    config: EngineConfig
    speed: Speed
    results: list[Result]
    by_victims: bool
    """Whether it was asked what happens when the pool is full."""
    idle_itl_p99: float | None
    """On an engine that serves one request at a time, where a limit was found by it."""

    @property
    def title(self) -> str:
        """What was served, then by what."""
        load, config = self.load, self.config
        limits = f"{config.max_step_tokens:,} tokens a step, at most {config.max_running:,} running"
        return (
            f"{printable(Path(load.name).name)}: {counted(load.num_requests, 'request')},"
            f" on average {load.input_lengths.mean():,.0f} tokens in and {load.output_lengths.mean():,.0f} out;"
            f" {config.num_blocks:,} blocks of {counted(config.block_size, 'token')}, {limits}; {self.speed.name}"
        )

    @property
    def shares(self) -> bool:
        """Whether any prompt found anything of another."""
        return any(result.hit_tokens for result in self.results)


def load_factor(text: str) -> float:
    """`0.8` or `80%`."""
    found = re.fullmatch(r"([0-9]{1,4}(\.[0-9]{1,9})?)(%?)", text.strip())
    factor = 0.0 if found is None else float(Fraction(found[1]) / (100 if found[3] else 1))
    if not 0.001 <= factor <= 100:
        raise ValueError(f"load {text.strip()!r}: expected a share of the load that fills the pool, such as 0.8 or 80%")
    return factor


def _checked_html(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None:
        check_plot_path(value, "--html", (".html",))
    return value


class Remembering(click.Command):
    """A command that knows how it was called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=Remembering, short_help="What admission policies make of a load: steps, tax, latencies.")
@click.argument("workload", type=click.Path(path_type=str), metavar="TRACE|SCENARIO")
@click.option(
    "--policy",
    "policies",
    metavar="POLICIES",
    default=DEFAULT_POLICIES,
    callback=comma_list(parse_policy),
    help="Who may start: first-come, watermark:SHARE%, limit:N, reserve, adaptive, ...; comma-separated.",
)
@click.option(
    "--when-full",
    "hows",
    metavar="HOWS",
    callback=comma_list(one_of("--when-full", ("recompute", "swap", "stall"))),
    help="What happens when the rows of a step do not fit: recompute, swap, stall; comma-separated. Unless given,"
    " adaptive and known preempt who loses least, all others the newest.",
)
@click.option(
    "--chunk",
    "chunks",
    metavar="CHUNKS",
    default="full",
    callback=comma_list(parse_chunk),
    help="Prompt tokens a step beside those who write: full, N, roofline, itl:TIME, slowdown:FACTOR; comma-separated.",
)
@click.option(
    "--load",
    "loads",
    metavar="SHARES",
    callback=comma_list(load_factor),
    help="Rate of the requests, as shares of the load that fills the pool, such as 0.5,0.8.  [default: mixed 0.8,"
    " burst 0.3, a trace as it was recorded]",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help="So many requests of a scenario, or the first N of a trace.  [default: thrash 256, the others 2000, a trace"
    " all]",
)
@click.option("--blocks", type=click.IntRange(1, MAX_BLOCKS), default=3999, metavar="N", help="Blocks of the pool.")
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, metavar="N", help="Tokens a block.")
@click.option(
    "--max-running", type=click.IntRange(1, 65_536), default=256, metavar="N", help="Requests that run at once."
)
@click.option(
    "--max-step-tokens", type=click.IntRange(1, 2**24), default=8192, metavar="N", help="Tokens that a step computes."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 2**24),
    metavar="N",
    help="What clients allow every answer, which is all that reserve knows.  [default: its true length]",
)
@click.option(
    "--host-blocks", type=click.IntRange(0, MAX_BLOCKS), metavar="N", help="Blocks of the host tier.  [default: none]"
)
@click.option("--evict", type=click.Choice(POLICIES), default="lru", help="Eviction policy of the prefix cache.")
@click.option("--no-prefix-cache", is_flag=True, help="Nothing is shared, and a victim finds nothing of its own.")
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
    "--link", default="25GB/s", metavar="LINK", callback=parsed(parse_link), help="What swapped blocks move over."
)
@click.option(
    "--overhead",
    default="1ms",
    metavar="TIME",
    callback=parsed(parse_seconds),
    help="What every step takes besides: launches, sampling, the scheduler. An assumption.",
)
@seed_option
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    callback=_checked_html,
    help="Write a report with tables and pictures into one HTML file; needs the extra plot.",
)
@plot_option
@json_option
def simulate(
    workload: str,
    policies: list[Admission | BestLimit],
    hows: list[Any] | None,
    chunks: list[Chunk],
    loads: list[float] | None,
    requests: int | None,
    blocks: int,
    block_size: int,
    max_running: int,
    max_step_tokens: int,
    max_tokens: int | None,
    host_blocks: int | None,
    evict: str,
    no_prefix_cache: bool,
    shape: Any,
    device: Any,
    link: Any,
    overhead: float,
    seed: int,
    html: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Serve a load with an engine that has no model but a real pager, once for each policy, side by side.

    A full pool with too many requests is thrashing: requests are preempted and their prompts computed again faster than
    work finishes. Admission decides that: whoever is let in has to grow.

    \b
    TRACE|SCENARIO is a trace (as for kvpager replay), or made up by --seed:
      thrash  256 requests at once, prompts of 256 to 767 tokens, answers of 768 to 2,303
      mixed   short and long requests behind one system prompt, Poisson arrivals
      burst   one-off prompts in bursts over a steady stream behind a hot system prompt

    \b
    --policy: who may start, first come, first served
      first-come      whoever fits now
      watermark:5%    whoever fits and leaves 5% of the pool for those who run
      limit:64        whoever fits while fewer than 64 run
      limit:1.2x      the best limit, found by trying: most requests a second with an ITL p99 of at most 1.2 times that
                      of an engine that serves one request at a time
      reserve         whoever fits with the longest answer he may get, beside all others with theirs
      adaptive:28%    whoever fits without those who run being expected to run out: kvpager.Admission, at a risk of 28%.
                      Where all are there from the beginning the last come in longest first
      known:28%       the same, told how long each answer will be

    \b
    --chunk: how much of a prompt a step computes beside those who write. They wait for each step: this sets the ITL
      full            as much as --max-step-tokens has room for
      512             so many tokens
      roofline        what is computed while the step reads weights and KV anyway: hardly anybody notices
      itl:8ms         what fits into steps of 8 ms; who would make the reading alone longer waits outside
      slowdown:1.2    roofline; who would make steps longer than 1.2 times those of a request alone waits outside

    \b
    steps        steps of the engine until all have their answers
    tax          recomputed among all computed tokens
    preempted    times that somebody lost his blocks, and the most that happened to one request
    hits         share of the prompt tokens found in the prefix cache
    in use       share of the pool's blocks that somebody holds, over time
    useful/s     tokens of prompts and answers a second, each counted once
    TTFT, ITL    time to the first token, and between tokens, waits included: median and 99th percentile

    A step takes max(FLOPs / peak, bytes / bandwidth) + overhead: weights are read once a step, KV once a sequence.
    Models and GPUs are those of kvpager cost. Steps, preemptions and tax of what is all there at once do not depend on
    them, but for swaps. --load 0.8 is 80% of the requests a second that this engine serves while its queue is never
    empty.

    \b
    Examples:
      kvpager simulate thrash
          what a watermark buys, and what it costs
      kvpager simulate thrash --policy first-come,limit:30,limit:35,limit:40,limit:45 --plot curve.png
          the curve of tax against steps, and the pool over time
      kvpager simulate thrash --policy first-come --when-full recompute,swap,stall --host-blocks 20000
          three ways to make room
      kvpager simulate mixed --load 0.5,0.7,0.9,1.1 --policy first-come,watermark:5% --html mixed.html
          latency against load, as a report
      kvpager simulate mixed --load 0.95 --policy adaptive --chunk full,512,roofline,itl:8ms
          what prompts do to the time between tokens
      kvpager simulate trace.jsonl.gz --blocks 20000 --requests 10000 --json
    """
    config = EngineConfig(
        num_blocks=blocks,
        block_size=block_size,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        num_host_blocks=host_blocks or 0,
        eviction=evict,
        prefix_cache=not no_prefix_cache,
    )
    if hows and "swap" in hows and not host_blocks:
        raise click.UsageError("--when-full swap needs a host tier: give it --host-blocks")
    speed = Speed.of(CostModel(shape=shape, device=device, link=link, block_size=block_size), overhead)
    with Bar(quiet=as_json) as bar:
        load = _load(workload, requests, seed, bar)
        if max_tokens is not None:
            load = replace(load, max_tokens=max_tokens)
        factors: list[float | None] = list(loads) if loads else [LOADS.get(load.name)]
        if loads and load.is_batch:
            raise click.UsageError(f"--load means nothing to {printable(load.name)}, where all requests arrive at once")
        ways = [None] if hows is None else [Newest(how) for how in hows]
        runs = [
            Run(policy, way, factor, chunk)
            for policy in policies
            for way in ways
            for chunk in chunks
            for factor in factors
        ]
        results = list(compare(load, config, speed, runs, bar.stage("serving")))
        found = any(isinstance(policy, BestLimit) for policy in policies)
        study = Study(load, config, speed, results, hows is not None, idle_itl(load, speed).p99 if found else None)
        _draw(study, plot, html, bar)
    if as_json:
        _print_json(study, None if workload not in SCENARIOS else seed, plot, html)
    else:
        if workload not in SCENARIOS:
            note_hurry(load.num_requests, float(load.arrivals_s[-1] - load.arrivals_s[0]))
        _print(study)


def _load(workload: str, requests: int | None, seed: int, bar: Bar) -> Load:
    if workload in SCENARIOS:
        return SCENARIOS[workload](seed, requests or REQUESTS[workload])
    if not Path(workload).exists():
        name = printable(workload)
        raise click.UsageError(f"{name}: there is no such file, and the scenarios are {', '.join(SCENARIOS)}")
    load = load_from_trace(read_trace(workload, bar.stage("reading")))
    return load if requests is None else load.first(requests)


def _draw(study: Study, plot: Path | None, html: Path | None, bar: Bar) -> None:
    """Write the files that were asked for. The pictures of many runs take seconds."""
    files = (plot is not None) + (html is not None)
    drawn = bar.stage("drawing")
    if plot is not None:
        drawn(0, files)
        plot_results(study.results, study.title, plot)
    if html is not None:
        drawn(files - 1, files)
        all_three = ("p50", "p90", "p99")
        command = shlex.join(["kvpager", "simulate", *click.get_current_context().meta[ARGUMENTS]])
        write_report(study.results, study.title, command, _columns(study, all_three), _rows(study, all_three), html)


def _columns(study: Study, percentiles: Sequence[str] = ("p50", "p99")) -> list[str]:
    chunks = {result.chunk for result in study.results} != {Fixed().name}
    rates = any(result.load_factor is not None for result in study.results)
    first, *others = percentiles
    return [
        *(
            "policy",
            *(["when full"] if study.by_victims else []),
            *(["chunk"] if chunks else []),
            *(["load"] if rates else []),
        ),
        *("steps", "tax", "preempted", *(["hits"] if study.shares else []), "in use", "running", "useful/s"),
        *(f"TTFT {first}, s", *others, f"ITL {first}, ms", *others),
    ]


def _rows(study: Study, percentiles: Sequence[str] = ("p50", "p99")) -> list[list[str]]:
    columns = _columns(study, percentiles)
    rows = []
    for result in study.results:
        cells = {
            "policy": result.admission,
            "when full": result.victims,
            "chunk": result.chunk,
            "load": "" if result.load_factor is None else f"{result.load_factor:.0%}",
            "steps": f"{result.steps:,}",
            "tax": f"{result.tax:.1%}",
            "preempted": f"{result.preemptions:,}" + (f" (max {result.preemptions_max})" if result.preemptions else ""),
            "hits": f"{result.hit_rate:.1%}",
            "in use": f"{result.active_mean:.1%}",
            "running": f"{result.running_mean:.1f}",
            "useful/s": f"{result.useful_tokens_per_s:,.0f}",
        }
        ttft = [f"{getattr(result.ttft, name):,.3f}" for name in percentiles]
        itl = [_ms(getattr(result.itl, name)) for name in percentiles]
        rows.append([*(cells[column] for column in columns if column in cells), *ttft, *itl])
    return rows


def _ms(seconds: float) -> str:
    """Milliseconds; a dash where no answer has a second token."""
    return "-" if math.isnan(seconds) else f"{1000 * seconds:,.2f}"


def _number(value: float | None) -> float | None:
    """None for what is not there, in JSON."""
    return None if value is None or math.isnan(value) else value


def _print(study: Study) -> None:
    columns = _columns(study)
    left = 1 + ("when full" in columns) + ("chunk" in columns)
    print_table(study.title.replace("; ", ";\n", 1), columns, _rows(study), left=left)
    results = study.results
    if not study.shares:
        bound = results[0].lower_bound_steps
        print_text(f"Nothing is shared: no policy needs fewer than {bound:,} steps, for want of blocks.")
    if (full := results[0].capacity_per_s) is not None:
        print_text(f"The load that fills the pool, 100%: {full:,.2f} requests a second.")
    if study.idle_itl_p99 is not None:
        print_text(f"One request at a time: ITL p99 {_ms(study.idle_itl_p99)} ms.")
    busiest = at_the_highest_load(results)
    worst, best = max(busiest, key=lambda r: r.tax), min(busiest, key=lambda r: (r.tax, r.steps))
    if worst.tax > best.tax:
        names = policy_names(results)
        print_text(
            f"{policy_name(worst, names)} computes {worst.tax:.1%} of its tokens again;"
            f" {policy_name(best, names)} {best.tax:.1%}, in {best.steps / worst.steps:.2f} times the steps."
        )


def _print_json(study: Study, seed: int | None, plot: Path | None, html: Path | None) -> None:
    load = study.load
    print_json(
        "simulate",
        workload={
            "name": load.name,
            "seed": seed,
            "requests": load.num_requests,
            "input_tokens": int(load.input_lengths.sum()),
            "output_tokens": int(load.output_lengths.sum()),
            "max_tokens": load.max_tokens,
        },
        engine=asdict(study.config),
        speed=asdict(study.speed),
        idle_itl_p99=_number(study.idle_itl_p99),
        rows=[result.as_dict() for result in study.results],
        plot=None if plot is None else str(plot),
        html=None if html is None else str(html),
    )
