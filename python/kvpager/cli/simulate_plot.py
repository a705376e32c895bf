"""The pictures of `kvpager simulate`: the pool over time, tax against steps, latency against load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..simulate import Result
from .plots import heading, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

ACTIVE, CACHED, FREE, PREEMPTED = "#37507d", "#9db8d9", "#e8ebee", "#c8553d"
WIDTH = 11.0
PANEL_HEIGHT, CHART_HEIGHT = 2.3, 4.0
ACROSS = 3
PANELS = 12
"""Runs whose pools are drawn."""
LABEL_WIDTH, LABEL_HEIGHT = 0.2, 0.05
"""About what a policy's name takes of the chart of tax against steps."""


class Picture(NamedTuple):
    """What to draw, how high it is, and what to say about it."""

    caption: str
    words: str
    height: float
    draw: Callable[[FigureBase], None]


def plot_results(results: Sequence[Result], title: str, path: Path) -> None:
    """Everything there is to draw, one below the other."""
    found = list(pictures(results))
    heights = [picture.height for picture in found]
    figure = new_figure(WIDTH, sum(heights) + 0.7)
    for part, picture in zip(
        figure.subfigures(len(found), 1, height_ratios=heights, squeeze=False), found, strict=True
    ):
        picture.draw(part[0])
    figure.suptitle(heading(title), fontsize="medium", x=0.01, ha="left", parse_math=False)
    save(figure, path)


def pictures(results: Sequence[Result]) -> Iterator[Picture]:
    """Those that say something about these runs. Where there are several loads, the pools are those of the highest."""
    full = at_the_highest_load(results)
    at = f" at {full[0].load_factor:.0%} load" if full[0].load_factor else ""
    names = policy_names(results)
    first = f" Of {len(full)} runs the first {PANELS}." if len(full) > PANELS else ""
    yield Picture(
        f"The pool over time{at}",
        "Blocks that somebody holds, blocks that are cached and can be had, and free ones; preemptions so far in red."
        + first,
        PANEL_HEIGHT * -(-len(full[:PANELS]) // ACROSS) + 0.4,
        lambda figure: _draw_pools(figure, full[:PANELS], names),
    )
    several = len(set(names.values())) > 1
    if several:
        yield Picture(
            f"Tax against steps{at}",
            "Down and to the left is better. What lets in less computes less again, and leaves room unused.",
            CHART_HEIGHT,
            lambda figure: _draw_tax(figure.subplots(), full, names),
        )
    if len({result.load_factor for result in results}) > 1:
        yield Picture(
            "Time to the first token against load",
            "100% is the rate that the engine serves when its queue never empties: above it the queue grows for ever.",
            CHART_HEIGHT,
            lambda figure: _draw_latency(
                figure.subplots(),
                results,
                names,
                "Time to the first token",
                "seconds",
                lambda result: (result.ttft.p99, result.ttft.p50),
            ),
        )
        yield Picture(
            "Time between tokens against load",
            "Who writes waits for the whole of each step: for all that is read, and for the prompts computed beside.",
            CHART_HEIGHT,
            lambda figure: _draw_latency(
                figure.subplots(),
                results,
                names,
                "Time between tokens",
                "milliseconds",
                lambda result: (1000 * result.itl.p99, 1000 * result.itl.p50),
            ),
        )


def at_the_highest_load(results: Sequence[Result]) -> list[Result]:
    """The results whose engines were asked most; all of them if no load was named."""
    highest = max(result.load_factor or 0.0 for result in results)
    return [result for result in results if (result.load_factor or 0.0) == highest]


Key = tuple[str, str, str]


def _key(result: Result) -> Key:
    return result.admission, result.victims, result.chunk


def policy_names(results: Sequence[Result]) -> dict[Key, str]:
    """What to call each policy: its admission; what happens when the pool is full, and the chunk, where they differ."""
    keys = list(dict.fromkeys(map(_key, results)))
    # The first of the three always, the others where they differ.
    differ = [True, *(len(set(values)) > 1 for values in list(zip(*keys, strict=True))[1:])]
    return {key: ", ".join(word for word, shown in zip(key, differ, strict=True) if shown) for key in keys}


def policy_name(result: Result, names: dict[Key, str]) -> str:
    return names[_key(result)]


def _draw_pools(figure: FigureBase, results: Sequence[Result], names: dict[Key, str]) -> None:
    """A panel a run, all at the same scales."""
    across = min(len(results), ACROSS)
    panels = figure.subplots(-(-len(results) // across), across, sharey=True, squeeze=False)
    most = max(1, *(result.preemptions for result in results))
    end = max(float(result.timeline.seconds[-1]) for result in results)
    for number, axes in enumerate(panels.flat):
        if number >= len(results):
            axes.set_visible(False)
            continue
        result, line = results[number], results[number].timeline
        total = int(line.active[0] + line.cached[0] + line.free[0])
        shares = [100 * blocks / total for blocks in (line.active, line.cached, line.free)]
        axes.stackplot(line.seconds, *shares, colors=[ACTIVE, CACHED, FREE], labels=["active", "cached", "free"])
        axes.set(xlim=(0, end), ylim=(0, 100))
        axes.set_title(policy_name(result, names), loc="left", fontsize="small", weight="bold")
        axes.set_title(f"{result.preemptions:,} preempted", loc="right", fontsize="small", color=PREEMPTED)
        axes.tick_params(labelsize="small")
        beside = axes.twinx()
        beside.plot(line.seconds, line.preemptions, color="white", linewidth=3.4)
        beside.plot(line.seconds, line.preemptions, color=PREEMPTED, linewidth=1.8, label="preemptions so far")
        beside.set_ylim(0, 1.08 * most)
        last = number % across == across - 1 or number == len(results) - 1
        beside.tick_params(labelsize="small", colors=PREEMPTED, labelright=last)
        if number % across == 0:
            axes.set_ylabel("% of the blocks", fontsize="small")
        if number >= len(results) - across:
            axes.set_xlabel("simulated seconds", fontsize="small")
    handles = [*panels.flat[0].get_legend_handles_labels()[0], beside.lines[1]]
    words = ["active", "cached", "free", "preemptions so far"]
    figure.legend(handles, words, loc="outside upper right", ncols=4, fontsize="small", frameon=False)


def _draw_tax(axes: Axes, results: Sequence[Result], names: dict[Key, str]) -> None:
    """Each kind of policy is a curve of its own; first come is a watermark of nothing."""
    kinds: dict[Key, list[Result]] = {}
    for result in results:
        kind = result.admission.partition(" ")[0].replace("first", "watermark")
        kinds.setdefault((kind, result.victims, result.chunk), []).append(result)
    for number, members in enumerate(kinds.values()):
        points = sorted((result.steps, 100 * result.tax) for result in members)
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", color=f"C{number}", linewidth=1.2, zorder=3)
    labels = [(result, number) for number, members in enumerate(kinds.values()) for result in members]
    for (result, number), (level, leftwards) in zip(labels, _spread([result for result, _ in labels]), strict=True):
        axes.annotate(
            policy_name(result, names),
            (result.steps, 100 * result.tax),
            (-6 if leftwards else 6, 5 + 12 * level),
            textcoords="offset points",
            ha="right" if leftwards else "left",
            fontsize="small",
            color=f"C{number}",
            # Readable on top of whatever crosses it.
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            zorder=4,
        )
    if not any(result.hit_tokens for result in results):
        bound = results[0].lower_bound_steps
        axes.axvline(bound, color="gray", linestyle=":", linewidth=1.4)
        axes.annotate(
            f"no policy needs fewer: {bound:,}",
            (bound, 0.5),
            (-4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="center",
            fontsize="small",
            color="gray",
        )
    axes.margins(x=0.12, y=0.15)
    axes.set_ylim(bottom=-0.04 * axes.get_ylim()[1])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("steps")
    axes.set_ylabel("recomputed, % of all computed tokens")
    axes.set_title("Tax against steps: down and left is better", loc="left", fontsize="medium")
    axes.grid(alpha=0.3)


def _spread(results: Sequence[Result]) -> list[tuple[int, bool]]:
    """How many lines above its point each name goes, as others are there already, and whether to the left of it."""
    steps, taxes = [result.steps for result in results], [result.tax for result in results]
    width, height = max(steps) - min(steps) or 1, max(taxes) - min(taxes) or 1.0
    places = [((result.steps - min(steps)) / width, result.tax / height) for result in results]
    # What reaches to the right edge has its name on the left.
    sides = [x > 1 - LABEL_WIDTH / 2 for x, _ in places]
    found: list[tuple[int, bool]] = []
    for (x, y), leftwards in zip(places, sides, strict=True):
        taken = {
            level
            for (other_x, other_y), (level, side) in zip(places, found, strict=False)
            if side == leftwards and abs(x - other_x) < LABEL_WIDTH and abs(y - other_y) < LABEL_HEIGHT
        }
        found.append((next(level for level in range(len(results)) if level not in taken), leftwards))
    return found


def _draw_latency(
    axes: Axes,
    results: Sequence[Result],
    names: dict[Key, str],
    words: str,
    unit: str,
    percentiles: Callable[[Result], tuple[float, float]],
) -> None:
    """A line a policy, at the 99th percentile, and a thin one at the median."""
    for number, name in enumerate(names.values()):
        points = sorted(
            (100 * (result.load_factor or 0.0), *percentiles(result))
            for result in results
            if policy_name(result, names) == name
        )
        loads, tails, medians = zip(*points, strict=True)
        axes.plot(loads, tails, marker="o", color=f"C{number}", label=name)
        axes.plot(loads, medians, marker=".", color=f"C{number}", linestyle="--", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("load, % of what fills the pool")
    axes.set_ylabel(f"{unit}, log scale")
    axes.set_title(f"{words}: p99, and p50 dashed", loc="left", fontsize="medium")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
