"""The picture of `kvpager fragmentation`: the memory slot by slot, the three schemes one above the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..fragmentation import FREE, MAX_CONTEXT, SLOTS, WASTED, Result, Scheme, SlotMap
from .plots import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Two shades in turn, so that neighbours can be told apart; with the orange also by those who see no red or green.
USED = ("#1f5a94", "#6fa3d6")
UNUSED = "#f28e2b"
EMPTY = "#dfe5e8"
REFUSED = "#b3122a"
WIDTH = 1024
"""Pixels of a row; each stands for some neighbouring slots."""


def plot_slots(result: Result, block_size: int, path: Path) -> None:
    """Each map is read like text: a row is as many slots as the longest context has."""
    figure = new_figure(9.0, 8.2)
    panels = list(figure.subplots(3, 1, sharex=True))
    exact, paged = result.exact.churned.last, result.paged[block_size]
    _draw(panels[0], result.reserved, f"Reserved: {MAX_CONTEXT:,} slots each, whatever a request needs")
    _draw(panels[1], result.exact, "Exact first fit, after many have finished: holes")
    _draw(panels[2], paged, f"Pages of {block_size} slots, after as many have finished: any free page will do")
    if exact.length > exact.largest_request:
        _draw_refused(panels[1], exact.length, exact.free, exact.largest_request)
    panels[2].set_xlabel(f"a row is {MAX_CONTEXT:,} slots, the longest context", fontsize="small")
    panels[2].set_xticks(range(0, MAX_CONTEXT, MAX_CONTEXT // 8))
    _draw_legend(figure)
    figure.set_layout_engine("constrained", h_pad=0.08)
    figure.suptitle(f"The same requests in the same {SLOTS:,} token slots (seed {result.seed})", x=0.01, ha="left")
    save(figure, path)


def _draw(axes: Axes, scheme: Scheme, title: str) -> None:
    slots = scheme.churned.last.slots
    image = _colours(slots).reshape(SLOTS // MAX_CONTEXT, WIDTH, 3)
    rows = image.shape[0]
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, MAX_CONTEXT, rows, 0))
    # Thin lines of ground between the rows: without them eight rows look like one area.
    for row in range(1, rows):
        axes.axhline(row, color="white", linewidth=2.5)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelsize="small")
    axes.set_yticks([])
    running = len(np.unique(slots[slots >= 0]))
    shares = [int((slots >= 0).sum()), int((slots == WASTED).sum()), int((slots == FREE).sum())]
    used, wasted, free = (f"{share / SLOTS:.1%}" for share in shares)
    axes.set_title(title, loc="left", fontsize="medium", weight="bold")
    numbers = f"{running} requests · used {used} · wasted {wasted} · free {free}"
    axes.set_title(numbers, loc="right", fontsize="small")


def _colours(slots: SlotMap) -> NDArray[np.uint8]:
    """RGB of each pixel. It covers several slots and mixes their colours, so that a few wasted ones still tint it."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(EMPTY), to_rgb(UNUSED), *(to_rgb(colour) for colour in USED)])
    kinds = np.where(slots == FREE, 0, np.where(slots == WASTED, 1, 2 + _shade(slots)))
    pixels = palette[kinds].reshape(-1, MAX_CONTEXT // WIDTH, 3).mean(axis=1)
    colours: NDArray[np.uint8] = np.rint(255 * pixels).astype(np.uint8)
    return colours


def _shade(slots: SlotMap) -> NDArray[np.int64]:
    """0 or 1 for each slot in use, changing wherever the next slot in use belongs to somebody else."""
    used = np.flatnonzero(slots >= 0)
    changes = np.diff(slots[used], prepend=slots[used[:1]]) != 0
    shades = np.zeros(len(slots), dtype=np.int64)
    shades[used] = np.cumsum(changes) % 2
    return shades


def _draw_refused(axes: Axes, length: int, free: int, largest: int) -> None:
    """The request that does not fit, at the scale of the map."""
    rows = SLOTS // MAX_CONTEXT
    axes.set_ylim(rows + 1.6, 0)
    axes.barh(rows + 0.75, length, height=0.7, color="none", edgecolor=REFUSED, hatch="////", linewidth=1.2)
    text = f"refused: {length:,} slots; {free:,} are free, the largest hole is {largest:,}"
    axes.text(length + 40, rows + 0.75, text, va="center", fontsize="small", color=REFUSED)


def _draw_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=USED[0], label="used (shades tell requests apart)"),
        Patch(color=UNUSED, label="wasted: held, no token"),
        Patch(color=EMPTY, label="free"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize="small")
