"""`kvpager blocksize`: what each block size costs, and which one to take."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import click

from ..blocksize import BlockSizeRow, LengthDistribution, Load, Recommendation, measure, recommend
from ..blocksize.rule import DEFAULT_WITHIN
from ..traces import read_trace
from .blocksize_plot import plot_block_sizes
from .options import comma_list, json_option, plot_option, seed_option
from .output import Bar, counted, note, print_json, print_table, print_text, printable

DEFAULT_SAMPLES = 10_000


def block_size(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise ValueError(f"block size {text.strip()!r}: expected tokens a block, such as 16")
    return int(text)


def share(text: str) -> float:
    """A percentage as a share, with or without its sign."""
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?%?", text.strip()):
        raise click.BadParameter(f"{text.strip()!r}: expected a share such as 2%")
    return float(text.strip().removesuffix("%")) / 100


def distribution(text: str) -> LengthDistribution:
    try:
        return LengthDistribution.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(short_help="What each block size costs on a trace, and which one to take.")
@click.argument("trace", type=click.Path(path_type=str), required=False)
@click.option(
    "--lengths",
    type=distribution,
    metavar="DIST",
    help="Lengths of sequences in place of a trace: uniform:LO:HI, lognormal:MEDIAN:SIGMA, fixed:N, or file:PATH with"
    " one a line.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help=f"Sequences to draw from --lengths.  [default: {DEFAULT_SAMPLES}; all of a file]",
)
@click.option(
    "--sizes",
    metavar="SIZES",
    callback=comma_list(block_size),
    help="Block sizes, comma-separated.  [default: 1,2,4,..,256; for an id trace 1, 2, 4, 8, 16 times its own]",
)
@click.option(
    "--pool",
    type=click.IntRange(1, 2**31 - 1),
    metavar="TOKENS",
    help="Memory of the pool in tokens, the same at every size.  [default: without end, so that nothing is evicted]",
)
@click.option(
    "--within",
    type=share,
    metavar="SHARE",
    default=f"{DEFAULT_WITHIN:.0%}",
    help="How much of all tokens a larger block may cost more than the best.",
)
@seed_option
@plot_option
@json_option
def blocksize(
    trace: str | None,
    lengths: LengthDistribution | None,
    samples: int | None,
    sizes: list[int] | None,
    pool: int | None,
    within: float,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compare block sizes: waste, table entries, gathers, shared tokens, hit rate; and say which one to take.

    \b
    waste          slots of the last block that hold no token, its answer complete: of a sequence, and as a share of
                   all tokens (of prompts and answers)
    table entries  blocks of a sequence
    gathers        blocks that a decode step reads for a sequence, over all steps
    shared         prompt tokens that were cached when their request came, and their share of all prompt tokens
    hit rate       share of the full prompt blocks, as kvpager replay counts it
    lost           tokens that the size that shares most shares, and this one does not, as a share of all tokens

    A trace with tokens is replayed through the pager at every size. One with hash_ids can only be told at multiples of
    its own block size. Lengths alone say nothing of sharing; with --pool, how many sequences fit at once is counted.

    The rule: the largest block whose waste and lost sharing together are at most 2% (--within) of all tokens above the
    least. Both are tokens of memory, and they shrink less and less as blocks get smaller, while table entries and
    gathers double each time. It knows nothing of kernels: one that wants blocks of 64 has a reason of its own.

    \b
    Examples:
      kvpager generate chat -o chat.jsonl
      kvpager blocksize chat.jsonl --plot sizes.png
      kvpager blocksize chat.jsonl --sizes 16,32,64 --pool 65536
          the hit rates of one and the same memory
      kvpager blocksize --lengths lognormal:800:0.9 --pool 262144 --json
          no trace: how many sequences of such lengths fit
      kvpager blocksize --lengths uniform:100:4000 --within 0.5%
    """
    if (trace is None) == (lengths is None):
        raise click.UsageError("either TRACE or --lengths is needed" + (", not both" if trace is not None else ""))
    if samples is not None and (lengths is None or lengths.text.startswith("file:")):
        raise click.UsageError("--samples is how many lengths to draw; a trace, or a file of lengths, has its own")
    with Bar(quiet=as_json) as bar:
        if lengths is not None:
            load = Load.of_lengths(lengths.text, lengths.draw(seed, samples or DEFAULT_SAMPLES))
        else:
            assert trace is not None
            load = Load.of_trace(read_trace(trace, bar.stage("reading")))
        rows = measure(load, sizes, pool_tokens=pool, progress=bar.stage("block sizes"))
    choice = recommend(rows, within)
    title = _title(load, pool)
    if plot is not None:
        plot_block_sizes(rows, choice, title, plot)
    if as_json:
        _print_json(load, rows, choice, pool, None if lengths is None else seed, plot)
    else:
        for text in load.notes:
            note(text)
        _print(load, title, rows, choice)


def _title(load: Load, pool: int | None) -> str:
    memory = "a pool without end" if pool is None else f"a pool of {counted(pool, 'token')}"
    return (
        f"{printable(load.name.rpartition('/')[2])}: {counted(len(load.lengths), 'sequence')},"
        f" {counted(load.tokens, 'token')}, {load.lengths.mean():,.0f} each; {memory}"
    )


def _print_json(
    load: Load,
    rows: list[BlockSizeRow],
    choice: Recommendation,
    pool: int | None,
    seed: int | None,
    plot: Path | None,
) -> None:
    print_json(
        "blocksize",
        load={
            "name": load.name,
            "form": load.form,
            "sequences": len(load.lengths),
            "tokens": load.tokens,
            "prompt_tokens": load.prompt_tokens,
            "unit": load.unit,
        },
        seed=seed,
        pool_tokens=pool,
        rows=[asdict(row) for row in rows],
        recommendation=asdict(choice),
        notes=list(load.notes),
        plot=None if plot is None else str(plot),
    )


def _print(load: Load, title: str, rows: list[BlockSizeRow], choice: Recommendation) -> None:
    columns = ["block size", "waste each", "waste", "table entries", "gathers"]
    sharing = rows[0].shared_tokens is not None
    if sharing:
        columns += ["shared tokens", "shared", "hit rate", "lost", "waste + lost"]
    if rows[0].num_blocks is not None:
        columns += ["pool blocks", "evicted"] if sharing else ["pool blocks", "fit at once"]
    print_table(title, columns, [_cells(row, choice.block_size) for row in rows], left=0)
    if sharing:
        assert load.prompt_tokens is not None
        print_text(
            f"Waste and lost sharing are shares of all {load.tokens:,} tokens, shared is one of the"
            f" {load.prompt_tokens:,} prompt tokens."
        )
    print_text(choice.reason)


def _cells(row: BlockSizeRow, chosen: int | None) -> list[str]:
    cells = [
        f"{'> ' if row.block_size == chosen else ''}{row.block_size}",
        f"{row.waste_mean:,.1f}",
        f"{row.waste_share:.2%}",
        f"{row.table_entries_mean:,.1f}",
        "-" if row.gathers_mean is None else f"{row.gathers_mean:,.1f}",
    ]
    if row.shared_tokens is not None:
        assert row.shared_share is not None
        assert row.hit_rate is not None
        cells += [
            f"{row.shared_tokens:,}",
            f"{row.shared_share:.2%}",
            f"{row.hit_rate:.2%}",
            f"{row.overhead_share - row.waste_share:.2%}",
            f"{row.overhead_share:.2%}",
        ]
    if row.num_blocks is not None:
        count = row.fit_at_once if row.evicted_blocks is None else row.evicted_blocks
        cells += [f"{row.num_blocks:,}", f"{count:,}"]
    return cells
