"""The picture of `kvpager blocksize`: the bargain, what large blocks are good for, and what is shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..blocksize import BlockSizeRow, Recommendation
from .plots import heading, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHOSEN = "#2a7f3f"
WASTE = "#c8553d"
LOST = "#e9b44c"


def plot_block_sizes(rows: Sequence[BlockSizeRow], choice: Recommendation, title: str, path: Path) -> None:
    """Two panels one above the other, three where something is known of sharing; sizes evenly spaced."""
    sharing = rows[0].shared_tokens is not None
    figure = new_figure(7.5, 8.0 if sharing else 6.0)
    panels = list(figure.subplots(3 if sharing else 2, 1, sharex=True))
    for axes in panels:
        axes.grid(axis="y", alpha=0.3)
        for place, row in enumerate(rows):
            if row.block_size == choice.block_size:
                axes.axvspan(place - 0.5, place + 0.5, color=CHOSEN, alpha=0.12, zorder=0, label="recommended")
    _draw_overhead(panels[0], rows, choice)
    _draw_tables(panels[1], rows)
    if sharing:
        _draw_shared(panels[2], rows)
    panels[-1].set_xticks(range(len(rows)), [f"{row.block_size:,}" for row in rows])
    panels[-1].set_xlabel("tokens a block")
    figure.suptitle(heading(title), fontsize="medium", x=0.01, ha="left", parse_math=False)
    save(figure, path)


def _draw_overhead(axes: Axes, rows: Sequence[BlockSizeRow], choice: Recommendation) -> None:
    places = range(len(rows))
    waste = [100 * row.waste_share for row in rows]
    lost = [100 * (row.overhead_share - row.waste_share) for row in rows]
    axes.bar(places, waste, color=WASTE, label="waste", zorder=2)
    if rows[0].lost_tokens is not None:
        axes.bar(places, lost, bottom=waste, color=LOST, label="lost sharing", zorder=2)
    for place, row in enumerate(rows):
        text = f"{row.overhead_share:.1%}"
        _annotate(axes, text, place, 100 * row.overhead_share)
    if choice.least_overhead_size is not None:
        least = next(row for row in rows if row.block_size == choice.least_overhead_size)
        limit = 100 * (least.overhead_share + choice.within)
        label = f"least + {100 * choice.within:.3g}%"
        axes.axhline(limit, color=CHOSEN, linestyle="--", linewidth=1.2, label=label, zorder=3)
    axes.margins(y=0.15)
    axes.set_ylabel("% of all tokens")
    _head(axes, "What large blocks cost")


def _draw_tables(axes: Axes, rows: Sequence[BlockSizeRow]) -> None:
    places = list(range(len(rows)))
    axes.plot(places, [row.table_entries_mean for row in rows], marker="o", label="table entries")
    gathers = [row.gathers_mean for row in rows if row.gathers_mean is not None]
    if len(gathers) == len(rows) and gathers != [row.table_entries_mean for row in rows]:
        axes.plot(places, gathers, marker="s", linestyle="--", label="blocks read by a decode step")
    # Imported here, where a figure is there already and matplotlib with it.
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    # Halving the size doubles both, so powers of two make even steps of it.
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("blocks, log scale")
    _head(axes, "What they spare")


def _draw_shared(axes: Axes, rows: Sequence[BlockSizeRow]) -> None:
    shares = [100 * (row.shared_share or 0.0) for row in rows]
    axes.plot(range(len(rows)), shares, marker="o", color="#37507d")
    for place, share in enumerate(shares):
        _annotate(axes, f"{share:.1f}%", place, share)
    axes.set_ylim(0, 119)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("% of the prompt tokens")
    axes.set_title("What is shared: prompt tokens found in the cache", fontsize="medium", loc="left")


def _annotate(axes: Axes, text: str, x: float, y: float) -> None:
    """A number above a point, readable on top of whatever crosses it."""
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    axes.annotate(text, (x, y), (0, 5), textcoords="offset points", ha="center", size=8, bbox=ground, zorder=4)


def _head(axes: Axes, title: str) -> None:
    """The title, and the legend beside it, where it can hide nothing."""
    axes.set_title(title, fontsize="medium", loc="left")
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=4,
        fontsize="small",
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1.2,
        handlelength=1.8,
    )
