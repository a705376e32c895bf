"""The picture of `kvpager prefix`: a column a block, a row a moment, one panel a play."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..prefix_play import AGAIN, BLOCK_SIZE, NUM_BLOCKS, Block, Play
from .plots import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SYSTEM = "#1f5a94"
USER = "#2a8c7f"
STRANGER = "#f28e2b"
GROUND = "#eef1f3"
EVICTED = "#b3122a"
GAP = 0.06
"""Between a block and its cell's edge."""


def plot_plays(plays: dict[str, Play], path: Path) -> None:
    rows = [len(found.moments) for found in plays.values()]
    figure = new_figure(8.6, 0.9 + sum(0.235 * count + 0.5 for count in rows))
    panels = figure.subplots(len(plays), 1, squeeze=False, height_ratios=rows)
    figure.set_layout_engine("constrained", h_pad=0.08)
    for axes, (title, found) in zip(panels[:, 0], plays.items(), strict=True):
        _draw(axes, title, found)
    figure.suptitle(
        f"A pool of {NUM_BLOCKS} blocks, from top to bottom: who computed what is in each", x=0.01, ha="left"
    )
    figure.legend(handles=_legend(), loc="outside lower left", ncols=6, frameon=False, fontsize="small")
    save(figure, path)


def _draw(axes: Axes, title: str, found: Play) -> None:
    moments = found.moments
    for row, moment in enumerate(moments):
        for column, block in enumerate(moment.blocks):
            _draw_block(axes, column, row, block)
        if moment.evicted:
            text = "evicts " + ", ".join(moment.evicted)
            axes.text(NUM_BLOCKS + 0.15, row + 0.5, text, va="center", fontsize="small", color=EVICTED)
    # A line between acts.
    row = 0
    for act in found.acts[:-1]:
        row += len(act.moments)
        axes.axhline(row, color="#607d8b", linewidth=0.8)
    axes.set_xlim(0, NUM_BLOCKS + 1.9)
    axes.set_ylim(len(moments), 0)
    axes.set_yticks([row + 0.5 for row in range(len(moments))], [moment.name for moment in moments])
    axes.set_xticks([column + 0.5 for column in range(NUM_BLOCKS)], [str(column) for column in range(NUM_BLOCKS)])
    axes.tick_params(length=0, labelsize="small", labeltop=True, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)
    last = found.acts[-1]
    axes.set_title(title, loc="left", fontsize="medium", weight="bold")
    tokens = last.hit_tokens + last.computed_tokens
    axes.set_title(f"{' and '.join(AGAIN)} finds {last.hit_tokens} of {tokens} tokens", loc="right", fontsize="small")


def _colour(owner: str) -> str:
    if owner == "sys":
        return SYSTEM
    return STRANGER if owner[1:].isdigit() else USER


def _draw_block(axes: Axes, column: int, row: int, block: Block) -> None:
    """Filled as far as it has tokens; solid if held, pale if cached."""
    from matplotlib.patches import Rectangle

    side = 1 - 2 * GAP
    axes.add_patch(Rectangle((column + GAP, row + GAP), side, side, color=GROUND, linewidth=0))
    if not block.owner:
        return
    filled = side * len(block.words) / BLOCK_SIZE
    colour = _colour(block.owner)
    alpha = 0.3 if block.cached else 1.0
    axes.add_patch(Rectangle((column + GAP, row + GAP), filled, side, color=colour, alpha=alpha, linewidth=0))
    text = block.owner + (f" ×{block.holders}" if block.holders > 1 else "")  # noqa: RUF001
    ink = "white" if not block.cached and not block.partial else "#22313a"
    # What is not full is written beside its filled part.
    place = column + 0.5 if not block.partial else column + GAP + filled + (side - filled) / 2
    axes.text(place, row + 0.52, text, ha="center", va="center", fontsize="x-small", color=ink)


def _legend() -> list[object]:
    from matplotlib.patches import Patch

    return [
        Patch(color=SYSTEM, label="system prompt"),
        Patch(color=USER, label="a user's own"),
        Patch(color=STRANGER, label="a stranger's"),
        Patch(color=STRANGER, alpha=0.3, label="pale: cached, nobody holds it"),
        Patch(color=GROUND, label="no token"),
    ]
