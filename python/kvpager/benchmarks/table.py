"""The table of goals: what is measured, in which unit, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .measure import TOKENS_128K, best_ns, floors
from .operations import OPERATIONS, Subject
from .rss import bytes_per_cached_block

Measure = Callable[["_Meter"], float | None]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound in the row's unit, or a multiple of a floor measured in the same run."""

    bound: float
    floor: str | None = None
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class RowSpec:
    key: str
    what: str
    unit: str
    goal: Goal
    measure: Measure
    core_only: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line of the table."""

    key: str
    what: str
    unit: str
    value: float | None
    goal: str
    met: bool | None
    """None where the value is missing."""
    times_floor: float | None
    reference: float | None
    reference_ratio: float | None
    """How many times the reference's cost is: above 1, kvpager is better."""


class _Meter:
    """Measures operations of one subject, each once, whichever rows need it."""

    def __init__(self, subject: Subject, seconds: float, *, is_reference: bool) -> None:
        self.subject, self.seconds, self.is_reference = subject, seconds, is_reference
        self._done: dict[str, float] = {}

    def ns(self, key: str) -> float:
        if key not in self._done:
            self._done[key] = best_ns(OPERATIONS[key](self.subject), self.seconds)
        return self._done[key]

    def memory(self, shape: str) -> float | None:
        # The reference needs many times the memory and time; its cost a block is the same in a smaller pool.
        num_blocks = 20_000 if self.is_reference else 200_000
        return bytes_per_cached_block(shape, reference=self.is_reference, num_blocks=num_blocks)


def _us(key: str) -> Measure:
    return lambda meter: meter.ns(key) / 1e3


def _on_top(key: str) -> Measure:
    return lambda meter: max(0.0, meter.ns(key) - meter.ns("match_128k")) / TOKENS_128K


def _flat(name: str) -> Measure:
    return lambda meter: meter.ns(f"{name}_1k_large") / meter.ns(f"{name}_1k_small")


def _times(key: str, other: str) -> Measure:
    return lambda meter: meter.ns(key) / meter.ns(other)


SPECS = [
    RowSpec("hit_8k", "full hit, admit + block ids, 8k", "us", Goal(3), _us("hit_8k")),
    RowSpec("hit_128k", "full hit, admit + block ids, 128k", "us", Goal(2, "memcmp_128k"), _us("hit_128k")),
    RowSpec("match_128k", "peek (match), 128k", "us", Goal(1.8, "memcmp_128k"), _us("match_128k")),
    RowSpec("cold_8k", "cold, admit + commit, 8k", "us", Goal(3.5), _us("cold_8k")),
    RowSpec("cold_128k", "cold, admit + commit, 128k", "us", Goal(3, "memcpy_128k"), _us("cold_128k")),
    RowSpec("evict_chains_8k", "cold 8k, every block evicted: idle chains", "us", Goal(5), _us("evict_chains_8k")),
    RowSpec("evict_leaves_8k", "cold 8k, every block evicted: leaves", "us", Goal(90), _us("evict_leaves_8k")),
    # 0.5 us and 6 ns for each of the 16 nodes that 128k tokens make up.
    RowSpec("release_128k", "release, 128k (16 nodes)", "us", Goal(0.596), _us("release_128k")),
    RowSpec("chat_match", "256 turns of chat, 128k: match", "us", Goal(3, "memcmp_128k"), _us("chat_match")),
    RowSpec("chat_admit", "256 turns of chat, 128k: admit again", "us", Goal(3, "memcmp_128k"), _us("chat_admit")),
    RowSpec("append", "append", "us", Goal(0.080), _us("append")),
    RowSpec("empty_call", "empty call", "us", Goal(0.040), _us("empty_call")),
    RowSpec("step_256", "step, 256 rows, no block boundary", "us", Goal(2), _us("step_256")),
    RowSpec("step_1024", "step, 1,024 rows, no block boundary", "us", Goal(6), _us("step_1024")),
    RowSpec("step_usual_256", "step, 256 rows, one in 16 crosses", "us", Goal(3), _us("step_usual_256")),
    RowSpec("step_usual_1024", "step, 1,024 rows, one in 16 crosses", "us", Goal(10), _us("step_usual_1024")),
    RowSpec("step_cross_256", "step, 256 rows, all cross", "us", Goal(15), _us("step_cross_256")),
    RowSpec("step_cross_1024", "step, 1,024 rows, all cross", "us", Goal(80), _us("step_cross_1024")),
    RowSpec("commit_usual_1024", "commit, 1,024 rows, one in 16 crosses", "us", Goal(4), _us("commit_usual_1024")),
    RowSpec("drafts_256", "256 rows, 4 drafts each, step + commit", "us", Goal(12), _us("drafts_256")),
    RowSpec("mixed_64", "step, 64 rows, 4 prefill 512 tokens each", "us", Goal(6), _us("mixed_64")),
    RowSpec("beams_64", "beam reorder, 64 requests of 4", "us", Goal(20), _us("beams_64")),
    RowSpec(
        "pages_1024",
        "FlashInfer form, 1,024 rows of 512 blocks",
        "us",
        Goal(1.5, "memcpy_pages"),
        _us("pages_1024"),
        core_only=True,
    ),
    RowSpec("try_admit_1024", "load control, 1,024 running", "us", Goal(50), _us("try_admit_1024"), core_only=True),
    RowSpec(
        "try_admit_known_1024",
        "the same, half of known length",
        "us",
        Goal(50),
        _us("try_admit_known_1024"),
        core_only=True,
    ),
    RowSpec(
        "try_admit_kinds_1024",
        "load control, 1,024 running of 8 kinds",
        "us",
        Goal(50),
        _us("try_admit_kinds_1024"),
        core_only=True,
    ),
    RowSpec(
        "try_admit_kinds_known_1024",
        "the same, half of known length, 8 kinds",
        "us",
        Goal(50),
        _us("try_admit_kinds_known_1024"),
        core_only=True,
    ),
    RowSpec(
        "swap_out_8k", "plan a swap-out of 8k, against an admit", "x", Goal(3), _times("swap_out_8k", "tier_admit_8k")
    ),
    RowSpec(
        "swap_in_8k", "plan a swap-in of 8k, against an admit", "x", Goal(3), _times("swap_in_8k", "tier_admit_8k")
    ),
    RowSpec(
        "offload_8k", "plan an offload of 8k, against an admit", "x", Goal(4), _times("offload_8k", "tier_admit_8k")
    ),
    RowSpec("save_8k", "plan a save of 8k, keys included", "us", Goal(200), _us("save_8k")),
    RowSpec("load_8k", "plan a load of 8k, keys included", "us", Goal(200), _us("load_8k")),
    RowSpec("tier_hit", "full hit 8k, with a host tier against none", "x", Goal(1.1), _times("tier_hit_8k", "hit_8k")),
    RowSpec("tier_fetch", "the same, willing to fetch", "x", Goal(1.2), _times("tier_hit_fetch_8k", "hit_8k")),
    RowSpec("flat_match", "match 1k, large pool against small", "x", Goal(1.3), _flat("match"), core_only=True),
    RowSpec("flat_admit", "admit 1k, large pool against small", "x", Goal(1.3), _flat("admit"), core_only=True),
    RowSpec("memory_chains", "memory a cached block, chains", "B", Goal(75), lambda m: m.memory("chains")),
    RowSpec("memory_mixed", "memory a cached block, mixed", "B", Goal(110), lambda m: m.memory("mixed")),
    RowSpec("construct", "construct 1 M blocks", "ms", Goal(50), lambda m: m.ns("construct") / 1e6),
    RowSpec("list_prompt", "list prompt, a token on top", "ns", Goal(6), _on_top("match_128k_list")),
    RowSpec("int64_prompt", "int64 array, a token on top", "ns", Goal(0.2), _on_top("match_128k_int64")),
    RowSpec("replay", "replay by ids", "replayed/s", Goal(1e6, at_least=True), lambda m: 1e9 / m.ns("replay")),
]
ROWS = tuple(spec.key for spec in SPECS)


def measure_rows(
    core: Subject,
    reference: Subject | None = None,
    *,
    only: Sequence[str] = ROWS,
    seconds: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Row]:
    """Measure the rows in the order of the table; `seconds` is spent on each operation."""
    floor_ns = floors(seconds, core.settings.seed)
    ours = _Meter(core, seconds, is_reference=False)
    theirs = None if reference is None else _Meter(reference, seconds, is_reference=True)
    specs = [spec for spec in SPECS if spec.key in only]
    for done, spec in enumerate(specs, 1):
        value = spec.measure(ours)
        other = None if theirs is None or spec.core_only else spec.measure(theirs)
        if progress is not None:
            progress(done, len(specs))
        yield _row(spec, value, other, floor_ns)


def _row(spec: RowSpec, value: float | None, other: float | None, floor_ns: dict[str, float]) -> Row:
    goal = spec.goal
    floor = None if goal.floor is None else floor_ns[goal.floor] / 1e3
    bound = goal.bound if floor is None else goal.bound * floor
    met = None
    if value is not None:
        met = value >= bound if goal.at_least else value <= bound
    ratio = None
    if value and other:
        ratio = value / other if goal.at_least else other / value
    return Row(
        key=spec.key,
        what=spec.what,
        unit=spec.unit,
        value=value,
        goal=_goal_words(goal, spec.unit),
        met=met,
        times_floor=value / floor if value is not None and floor else None,
        reference=other,
        reference_ratio=ratio,
    )


def _goal_words(goal: Goal, unit: str) -> str:
    sign = ">=" if goal.at_least else "<="
    if goal.floor is not None:
        return f"{sign} {goal.bound:g}x {goal.floor.partition('_')[0]}"
    return f"{sign} {goal.bound:,.10g} {unit}"
