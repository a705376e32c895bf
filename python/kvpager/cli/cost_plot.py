"""The picture of `kvpager cost`: time against length, and where the lines cross."""

from __future__ import annotations

from pathlib import Path

from ..cost import CostModel
from .plots import heading, new_figure, save

RECOMPUTE = "#c8553d"
SWAP = "#37507d"
FETCH = "#2a7f3f"
POINTS = 400
LONGEST = 2**22
"""No break-even beyond this stretches the picture."""


def plot_costs(model: CostModel, tokens: int, cached: int, on_host: int, title: str, path: Path) -> None:
    """Time against the tokens behind the cached ones, both logarithmic.

    A dot and its length at each break-even, a line at the length that was asked for.
    """
    crossings = {
        "swap": model.break_even_tokens("swap", start=cached, num_host_tokens=on_host),
        "fetch": model.break_even_tokens("fetch", start=cached),
    }
    marked = [at for at in crossings.values() if at is not None and 1 < at <= LONGEST]
    high = max(16 * tokens, *(2 * at for at in marked), 2)
    lengths = sorted({round(high ** (place / POINTS)) for place in range(POINTS + 1)} | {*marked})

    def swap(length: int) -> float:
        end = cached + length
        return 1000 * model.swap_seconds(end, num_cached=cached, num_host_tokens=min(on_host, end))

    def fetch(length: int) -> float:
        return 1000 * model.fetch_seconds(cached, cached + length)

    figure = new_figure(7.5, 5.0)
    axes = figure.subplots()
    recompute = [1000 * model.prefill_seconds(cached, cached + length) for length in lengths]
    axes.plot(lengths, recompute, color=RECOMPUTE, linewidth=2, label="recompute: prefill")
    for way, color, seconds, words in (
        ("swap", SWAP, swap, "swap: out and back"),
        ("fetch", FETCH, fetch, "fetch: one way"),
    ):
        axes.plot(lengths, [seconds(length) for length in lengths], color=color, linewidth=1.6, label=words)
        at = crossings[way]
        if at in marked:
            axes.plot([at], [seconds(at)], marker="o", color=color, zorder=3)
            axes.annotate(
                f"break-even {at:,}",
                (at, seconds(at)),
                (8, -14) if way == "fetch" else (-8, 10),
                textcoords="offset points",
                ha="left" if way == "fetch" else "right",
                size=9,
                color=color,
            )
    axes.axvline(tokens - cached, color="#777777", linestyle=":", linewidth=1.2, label=f"{tokens:,} tokens")
    axes.set_xscale("log")
    axes.set_yscale("log")
    from matplotlib.ticker import StrMethodFormatter

    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel("tokens behind the cached ones" if cached else "length of the sequence, tokens")
    axes.set_ylabel("ms")
    axes.set_title(heading(title), fontsize="medium", loc="left", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    save(figure, path)
