"""`kvpager prefix`: what a prefix cache keeps and loses, block by block, in a pool small enough to see."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..prefix_play import BLOCK_SIZE, NUM_BLOCKS, SYSTEM, Act, Block, Moment, Play, play
from .options import comma_list, json_option, one_of, plot_option
from .output import print_json, print_table, print_text
from .prefix_plot import plot_plays

PLAYS = {
    "lru": ("lru", False, "lru: the least recently used goes first"),
    "pinned": ("lru", True, "lru, the system prompt pinned: somebody always holds it"),
    "slru": ("slru", False, "slru: what was hit goes last"),
}


@click.command(short_help="A system prompt in a prefix cache, before and after a flood.")
@click.option(
    "--only",
    metavar="PLAYS",
    callback=comma_list(one_of("play", tuple(PLAYS))),
    default=",".join(PLAYS),
    help="Which of the plays, comma-separated.",
)
@plot_option
@json_option
def prefix(only: list[str], plot: Path | None, as_json: bool) -> None:
    """Watch a prefix cache: four users share a system prompt, leave, strangers flood in, the prompt comes back.

    The pool has 12 blocks of 4 tokens; a token is a word here. Four users whose prompts begin with the same eight words
    come, one after the other, and leave. Eight strangers, who share nothing, come and go, three at a time. Then a fifth
    user comes with the same eight words. The same is played three times:

    \b
    lru     evicts what was not used for longest: the flood takes the system prompt
    pinned  the system prompt is admitted on its own with pin=True: what somebody holds is never evicted
    slru    keeps what was hit apart from what was not: the flood evicts itself

    \b
    Reading a row of the pool:
      sys*4   a block of the system prompt that four sequences hold
      ana~    Ana's last block, not full: nobody else can find it
      (ana)   cached: nobody holds it, it can be hit and it can be evicted
      .       free

    A hit is a prompt that found something, a miss one that found nothing.

    \b
    Examples:
      kvpager prefix
      kvpager prefix --only lru,slru --plot pool.png
          the pool over time as a picture
      kvpager prefix --json
    """
    plays = {name: play(PLAYS[name][0], pinned=PLAYS[name][1]) for name in only}
    if plot is not None:
        plot_plays({PLAYS[name][2]: found for name, found in plays.items()}, plot)
    if as_json:
        _print_json(plays, plot)
    else:
        _print(plays)


def _print_json(plays: dict[str, Play], plot: Path | None) -> None:
    print_json(
        "prefix",
        pool={"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "system_tokens": len(SYSTEM.split())},
        plays=[{"play": name, **asdict(found)} for name, found in plays.items()],
        plot=None if plot is None else str(plot),
    )


def _print(plays: dict[str, Play]) -> None:
    for name, found in plays.items():
        print_table(
            PLAYS[name][2],
            ["act", "hits", "misses", "hit tokens", "computed", "evictions", "active", "cached", "free"],
            [_counts(act) for act in found.acts],
        )
        print_table(
            "The pool after each arrival; when three strangers run, the first leaves before the next comes:",
            ["", *map(str, range(NUM_BLOCKS)), "evicted"],
            [_row(moment) for moment in found.moments],
            left=2 + NUM_BLOCKS,
        )
    last = {name: found.acts[-1] for name, found in plays.items()}
    again = "; ".join(
        f"{act.computed_tokens} of {act.computed_tokens + act.hit_tokens} tokens with {name}"
        for name, act in last.items()
    )
    held = sum(found.evicted_while_held for found in plays.values())
    partial = sum(found.partial_shared for found in plays.values())
    print_text(f"The prompt that came again had to compute {again}.")
    print_text(f"Blocks evicted while somebody held them: {held}. Partial blocks shared: {partial}.")
    reads = [found.read_calls for found in plays.values() if found.read_calls is not None]
    if reads:
        print_text(
            f"Calls to read() meanwhile: {sum(reads)}. What was evicted is computed again, not read from a disk."
        )


def _counts(act: Act) -> list[str]:
    counts = (act.hits, act.misses, act.hit_tokens, act.computed_tokens, act.evictions, act.active, act.cached)
    return [act.name, *map(str, counts), str(act.free)]


def _row(moment: Moment) -> list[str]:
    return [moment.name, *map(cell, moment.blocks), " ".join(moment.evicted)]


def cell(block: Block) -> str:
    """A block in a few characters."""
    if not block.owner:
        return "."
    if block.cached:
        return f"({block.owner})"
    shared = f"*{block.holders}" if block.holders > 1 else ""
    return block.owner + ("~" if block.partial else "") + shared
