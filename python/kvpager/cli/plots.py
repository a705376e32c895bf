"""Drawing, with matplotlib from the extra `plot`, which is imported only when a plot is asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..replay import ReplayRow


FORMATS = (".png", ".svg", ".pdf")
LINE = 80
"""Characters of a heading's line, in the narrowest figure."""


def new_figure(width: float = 7.0, height: float = 4.5, option: str = "--plot") -> Figure:
    """An empty figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        hint = "pip install '.[plot]' in a clone of kvpager"
        raise click.ClickException(f"{option} needs matplotlib: {hint}") from None
    return Figure(figsize=(width, height), layout="constrained")


def check_plot_path(path: Path, option: str = "--plot", formats: Sequence[str] = FORMATS) -> None:
    """Refuse a file that could not be written, before the work whose result it is to show."""
    new_figure(option=option)
    if path.suffix.lower() not in formats:
        expected = f"one of {', '.join(formats)}" if len(formats) > 1 else formats[0]
        raise click.ClickException(f"{option} {path}: the name has to end in {expected}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise click.ClickException(f"{option} {path}: there is no folder {folder}")
    if path.is_dir():
        raise click.ClickException(f"{option} {path}: is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise click.ClickException(f"{option} {path}: cannot be written: Permission denied")


def save(figure: Figure, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            # A trace's name may hold letters that the font lacks: boxes in a title are no reason to alarm anybody.
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise click.ClickException(f"--plot {path}: cannot be written: {error.strerror or error}") from None


def heading(title: str) -> str:
    """A title in lines that fit a figure: what stands before the first colon, then the rest at its semicolons.

    To be drawn with `parse_math=False`: the name of a file is no formula, whatever dollars it has.
    """
    name, _, rest = title.rpartition(": ")
    return "\n".join(part if len(part) <= LINE else f"{part[: LINE - 3]}..." for part in (name, *rest.split("; ")))


def plot_hit_rates(rows: Sequence[ReplayRow], title: str, path: Path) -> None:
    """Hit rate over pool size, one line a policy."""
    figure = new_figure(8.0, 4.8)
    axes = figure.subplots()
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((row.num_blocks, 100 * row.hit_rate) for row in rows if row.policy == policy)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=policy)
    axes.set_xscale("log")
    sizes = sorted({(row.num_blocks, row.size) for row in rows})
    labels = [size if size.endswith("%") else f"{blocks:,}" for blocks, size in sizes]
    axes.set_xticks([blocks for blocks, _ in sizes], labels)
    axes.minorticks_off()
    axes.set_xlabel("pool size" + (", share of the unique prompt blocks" if sizes[0][1].endswith("%") else ", blocks"))
    axes.set_ylabel("hit rate, % of the full prompt blocks")
    axes.set_ylim(0, max(1.0, 108 * max(row.hit_rate for row in rows)))
    axes.set_title(heading(title), fontsize="medium", loc="left", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
