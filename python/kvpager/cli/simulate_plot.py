"""The pictures of `kvpager simulate`: the pool over time, tax against steps, latency against load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..simulate import Result
from .plots import heading, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

ACTIVE, CACHED, FREE, PREEMPTED = "#37507d", "#9db8d9", "#e8ebee", "#c8553d"
WIDTH = 11.0
PANEL_HEIGHT, CHART_HEIGHT = 2.3, 4.0
ACROSS = 3
MOST_PANELS, FIRST_PANELS = 12, 6
"""Runs whose pools are drawn: all, and of more than so many the first few."""
CHART_POINTS = 740, 235
LETTER_WIDTH, LINE_HEIGHT = 5, 12
"""About the size of a chart, and of its names, in typographic points."""


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
    drawn = full if len(full) <= MOST_PANELS else full[:FIRST_PANELS]
    first = f" Of {len(full)} runs the first {len(drawn)}." if drawn != full else ""
    yield Picture(
        f"The pool over time{at}",
        "Blocks that somebody holds, blocks that are cached and can be had, and free ones; preemptions so far in red."
        + first,
        PANEL_HEIGHT * -(-len(drawn) // ACROSS) + 0.4,
        lambda figure: _draw_pools(figure, drawn, names),
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
Side = Literal["left", "right"]


def _key(result: Result) -> Key:
    return result.admission, result.victims, result.chunk


def policy_names(results: Sequence[Result]) -> dict[Key, str]:
    """What to call each policy: its admission; what happens when the pool is full, and the chunk, if it has several."""
    keys = list(dict.fromkeys(map(_key, results)))
    # The first of the three always, the others where one and the same admission has several of them.
    admissions = len({key[0] for key in keys})
    differ = [True, *(len({(key[0], key[part]) for key in keys}) > admissions for part in (1, 2))]
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
    labels = [(result, number) for number, members in enumerate(kinds.values()) for result in members]
    to_axes = axes.transData - axes.transAxes
    places = to_axes.transform([(result.steps, 100 * result.tax) for result, _ in labels]).tolist()
    words = [policy_name(result, names) for result, _ in labels]
    for (result, number), word, (side, up) in zip(labels, words, _spread(places, words), strict=True):
        axes.annotate(
            word,
            (result.steps, 100 * result.tax),
            (6 if side == "left" else -6, up),
            textcoords="offset points",
            ha=side,
            fontsize="small",
            color=f"C{number}",
            # Readable on top of whatever crosses it.
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            zorder=4,
        )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("steps")
    axes.set_ylabel("recomputed, % of all computed tokens")
    axes.set_title("Tax against steps: down and left is better", loc="left", fontsize="medium")
    axes.grid(alpha=0.3)


def _spread(places: Sequence[tuple[float, float]], words: Sequence[str]) -> list[tuple[Side, int]]:
    """Where each point's name goes: the side of it that is at the point, and how many typographic points up.

    `places` are shares of the chart. One name after the other takes the nearest place where it covers no other and no
    point.
    """
    wide, high = 4 / CHART_POINTS[0], LINE_HEIGHT / 2 / CHART_POINTS[1]
    taken = [(x - wide, x + wide, y - high) for x, y in places]  # left, right and lower edge; the points come first
    ups = sorted((5 + LINE_HEIGHT * level for level in range(-len(places), len(places) + 1)), key=abs)
    found: list[tuple[Side, int]] = []
    for (x, y), word in zip(places, words, strict=True):
        width, height = len(word) * LETTER_WIDTH / CHART_POINTS[0], LINE_HEIGHT / CHART_POINTS[1]
        lefts: dict[Side, float] = {
            "left": x + 6 / CHART_POINTS[0],
            "right": x - 6 / CHART_POINTS[0] - width,
        }

        def fits(left: float, bottom: float, width: float = width, height: float = height) -> bool:
            return (
                0 <= left <= 1 - width
                and 0 <= bottom <= 1 - height
                and all(
                    abs(bottom - other) >= height or left + width <= start or left >= end for start, end, other in taken
                )
            )

        choices = ((side, up) for up in ups for side in lefts if fits(lefts[side], y + up / CHART_POINTS[1]))
        side, up = next(choices, ("left", 5))  # there may be more names than the chart has room for
        taken.append((lefts[side], lefts[side] + width, y + up / CHART_POINTS[1]))
        found.append((side, up))
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
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the lines, not over them
