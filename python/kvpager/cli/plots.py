"""Drawing, with matplotlib from the extra `plot`, which is imported only when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..replay import ReplayRow


def new_figure(width: float = 7.0, height: float = 4.5) -> Figure:
    """An empty figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise click.ClickException('--plot needs matplotlib: pip install "kvpager[plot]"') from None
    return Figure(figsize=(width, height), layout="constrained")


def check_plot_path(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to show."""
    formats = new_figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise click.ClickException(f"--plot {path}: the name has to end in one of {', '.join(sorted(formats))}")
    if not path.absolute().parent.is_dir():
        raise click.ClickException(f"--plot {path}: there is no folder {path.absolute().parent}")


def save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise click.ClickException(f"--plot {path}: cannot be written: {error.strerror or error}") from None


def plot_hit_rates(rows: Sequence[ReplayRow], title: str, path: Path) -> None:
    """Hit rate over pool size, one line a policy."""
    figure = new_figure()
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
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
