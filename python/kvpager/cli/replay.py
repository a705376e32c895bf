"""`kvpager replay`: a request trace through the pager."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..replay import PoolSize, ReplayRow
from ..replay.columns import Outputs, Service
from ..replay.runs import MAX_BLOCKS, POLICIES, Replays
from ..traces import Trace, read_trace
from .options import blocks, comma_list, json_option, one_of, percent, plot_option
from .output import Bar, counted, note, note_hurry, print_json, print_table, printable
from .plots import plot_hit_rates

DEFAULT_SIZES = [PoolSize.parse(f"{share}%") for share in (1, 2, 5, 10, 20, 50)]


@click.command(short_help="Hit rates of a request trace at several pool sizes.")
@click.argument("trace", type=click.Path(path_type=str))
@click.option(
    "--policy",
    "policies",
    metavar="POLICIES",
    callback=comma_list(one_of("policy", POLICIES)),
    default="lru",
    help=f"Eviction policies, comma-separated: {', '.join(POLICIES)}.",
)
@click.option(
    "--sizes",
    metavar="SHARES",
    callback=comma_list(percent),
    help="Pool sizes as shares of the trace's unique full prompt blocks, comma-separated, such as 1%,2.5%.  "
    "[default: those of 1%,2%,5%,10%,20%,50% in which every request fits]",
)
@click.option(
    "--blocks",
    "block_counts",
    metavar="COUNTS",
    callback=comma_list(blocks),
    help="Pool sizes as numbers of blocks, comma-separated, such as 4096,16384, instead of --sizes.",
)
@click.option(
    "--outputs",
    type=click.Choice(["none", "fresh", "recorded"]),
    default="none",
    help="Blocks of the answers: none; fresh ones nobody else has; or the trace's own, fresh where it has none.",
)
@click.option(
    "--service",
    type=click.Choice(["none", "model"]),
    default="none",
    help="How long a request holds its blocks: not at all, or the trace's service_ms, else a modelled time.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, 1024),
    help="Tokens a block, for traces that hold tokens.  [default: the trace's block_size, else 16]",
)
@plot_option
@json_option
def replay(
    trace: str,
    policies: list[str],
    sizes: list[PoolSize] | None,
    block_counts: list[PoolSize] | None,
    outputs: Outputs,
    service: Service,
    block_size: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay a request trace through the pager: hit rate, saved prefill, evictions.

    TRACE (/dev/stdin for a pipe) has one JSON object a line, plain or packed with gzip or xz, in arrival order. Fields:
    timestamp (ms), input_length, output_length (tokens), and hash_ids, the chained ids of the prompt's blocks (512
    tokens a block unless block_size says otherwise). Or, in place of hash_ids, tokens: the prompt itself. Where it is
    known: output_hash_ids or output_tokens, of the answer, and service_ms, how long it took. Other fields are ignored.

    \b
    Examples:
      kvpager replay trace.jsonl
          hit rates of LRU at pools of 1% to 50% of what the trace touches
      kvpager replay trace.jsonl.xz --policy lru,slru --sizes 1%,5% --plot hits.png
          two policies side by side, and a picture
      kvpager replay trace.jsonl --outputs fresh --service model --blocks 20000
          answers take blocks too, and requests hold them while they run
      kvpager replay tokens.jsonl.gz --block-size 16 --json
          a trace with the tokens themselves, as JSON for a script

    Hits count in full prompt blocks: the longest cached prefix of each prompt. A pool in which some request could never
    fit is refused. "replayed/s" is how many requests a second this replay took: no server's throughput.
    """
    if sizes is not None and block_counts is not None:
        raise click.UsageError("--sizes and --blocks exclude each other")
    with Bar(quiet=as_json) as bar:
        loaded = read_trace(trace, bar.stage("reading"))
        replays = Replays(loaded, outputs=outputs, service=service, block_size=block_size)
        wanted = sizes or block_counts
        notes: list[str] = []
        if wanted is None:
            wanted = _default_sizes(replays, notes)
        for size in wanted:
            replays.num_blocks(size)
        if loaded.form == "lengths":
            notes.append("the trace has neither hash_ids nor tokens: all prompts differ and nothing can hit")
        rows = []
        for policy in policies:
            for size in wanted:
                rows.append(replays.run(policy, size, bar.stage(f"{policy} {size.text}")))
    for text in notes:
        if not as_json:
            note(text)
    if service == "model" and not as_json:
        note_hurry(loaded.num_requests, loaded.seconds)
    title = _title(loaded, replays)
    if plot is not None:
        plot_hit_rates(rows, title, plot)
    if as_json:
        _print_json(replays, rows, notes, plot)
    else:
        _print_rows(title, rows)


def _default_sizes(replays: Replays, notes: list[str]) -> list[PoolSize]:
    """The default sizes in which every request fits; a short trace may leave few of them, or only the smallest pool."""
    fitting = [
        size
        for size in DEFAULT_SIZES
        if replays.smallest_pool <= size.resolve(replays.unique_prompt_blocks) <= MAX_BLOCKS
    ]
    left_out = [size.text for size in DEFAULT_SIZES if size not in fitting]
    if left_out:
        line = int(replays.trace.lines[replays.largest_request])
        notes.append(f"left out {', '.join(left_out)}: line {line} alone needs {replays.smallest_pool} blocks")
    return fitting or [PoolSize.parse(str(replays.smallest_pool))]


def _title(trace: Trace, replays: Replays) -> str:
    prompt_blocks = int(replays.columns.prompt_blocks.sum())
    return (
        f"{printable(Path(trace.path).name)}: {counted(trace.num_requests, 'request')},"
        f" {counted(prompt_blocks, 'full prompt block')} of {counted(replays.block_size, 'token')},"
        f" {replays.unique_prompt_blocks:,} of them unique;"
        f" outputs {replays.outputs}, service {replays.service}"
    )


def _print_rows(title: str, rows: list[ReplayRow]) -> None:
    print_table(
        title,
        ["policy", "size", "blocks", "hit rate", "saved prefill tokens", "evicted blocks", "replayed/s"],
        [
            (
                row.policy,
                row.size,
                f"{row.num_blocks:,}",
                f"{row.hit_rate:.2%}",
                f"{row.saved_tokens:,}",
                f"{row.evicted_blocks:,}",
                f"{row.requests_per_second:,.0f}",
            )
            for row in rows
        ],
    )


def _print_json(replays: Replays, rows: list[ReplayRow], notes: list[str], plot: Path | None) -> None:
    trace = replays.trace
    print_json(
        "replay",
        trace={
            "path": trace.path,
            "form": trace.form,
            "requests": trace.num_requests,
            "block_size": replays.block_size,
            "prompt_blocks": int(replays.columns.prompt_blocks.sum()),
            "unique_prompt_blocks": replays.unique_prompt_blocks,
        },
        outputs=replays.outputs,
        service=replays.service,
        rows=[asdict(row) for row in rows],
        notes=notes,
        plot=None if plot is None else str(plot),
    )
