"""All findings on one case, the largest effect first, and what they do together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import block_size, cache, front, scan, thrashing
from .admission import best_that_stops, controlled, limit_with_room
from .case import Case, Measures, Setting
from .finding import Finding, Look
from .metrics import Server

Stage = Callable[[str], None]
LETTING_IN = ("thrashing", "limit")
WORTH_IT = 0.9
"""Of the wait for the first token: what a higher limit has to leave of it to be named."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run for the table: what was changed, and what came out."""

    name: str
    setting: Setting
    measures: Measures


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, largest effect first; what was looked at beside; and the runs behind it."""

    findings: tuple[Finding, ...]
    looks: tuple[Look, ...]
    rows: tuple[Row, ...]
    """As it is, each change by itself, all together."""
    together: str | None
    """What is left of the changes once all are made, where that is not the sum of them."""
    notes: tuple[str, ...]


def diagnose(
    case: Case, server: Server | None = None, *, limit_given: bool = False, stage: Stage | None = None
) -> Diagnosis:
    """Look for everything. `limit_given` says that `max_running` was chosen by somebody; `stage` hears what begins."""
    begin = stage or _unheard
    answers: list[Finding | Look] = []
    looks: list[tuple[str, Callable[[], Finding | Look]]] = [
        ("what varies in front", lambda: front.look(case)),
        ("block size", lambda: block_size.look(case)),
        ("preemptions", lambda: thrashing.look(case, server)),
        ("limit", lambda: thrashing.look_at_limit(case, limit_given)),
        ("one-off prompts", lambda: scan.look(case)),
    ]
    for label, look in looks:
        begin(label)
        answers.append(look())
    begin("room for the cache")
    base = case.as_it_is
    for answer in answers:
        if isinstance(answer, Finding) and answer.kind != "limit":
            base = _with(base, case.as_it_is, answer.setting)
    answers.append(cache.look(case, base, server))
    # Of equal effects, in the order in which things are looked at.
    findings = sorted(
        (answer for answer in answers if isinstance(answer, Finding)), key=lambda found: -found.effect.saved_share
    )
    begin("all together")
    rows, together = _rows(case, findings, limit_given)
    others = tuple(answer for answer in answers if isinstance(answer, Look))
    return Diagnosis(tuple(findings), others, rows, together, _notes(case, server, findings))


def _unheard(label: str) -> None:
    pass


def _with(base: Setting, now: Setting, changed: Setting) -> Setting:
    """What one finding changes, on top of what others did."""
    names = ("block_size", "max_running", "watermark", "eviction", "moved", "pool", "risk")
    return replace(base, **{n: getattr(changed, n) for n in names if getattr(changed, n) != getattr(now, n)})


def _rows(case: Case, findings: list[Finding], limit_given: bool) -> tuple[tuple[Row, ...], str | None]:
    now = case.as_it_is
    rows = [Row("as it is", now, case.measure(now))]
    for finding in findings:
        rows.append(Row(named(now, finding.setting), finding.setting, finding.effect.after))
        rows += [Row(name, setting, case.measure(setting)) for name, setting in finding.also.items()]
    rows = list({row.setting: row for row in rows}.values())
    if len(findings) < 2:
        return tuple(rows), None
    together, text = now, None
    for finding in findings:
        if finding.kind not in LETTING_IN and finding.setting.pool == now.pool:  # more memory is another server
            together = _with(together, now, finding.setting)
    if any(finding.kind in LETTING_IN for finding in findings) and together != now:
        together, text = _let_in(case, together, limit_given)
    all_of_it = [together] if text is None else [together, controlled(together)]
    for setting in all_of_it:
        if setting not in {row.setting for row in rows}:
            name = ", ".join(filter(None, ["all together", _admission(now, setting)]))
            rows.append(Row(name, setting, case.measure(setting)))
    return tuple(rows), text


def _let_in(case: Case, others: Setting, limit_given: bool) -> tuple[Setting, str]:
    """Watermark and limit were found on the load as it was: with the other changes made they are others."""
    if thrashing.is_preempted(case, others):
        stopped = best_that_stops(case, others)
        return stopped, f"With the other changes made, what stops the preemptions is {_admission(others, stopped)}."
    text = "With the other changes made hardly anything is computed twice, and who is let in can stay as it is."
    higher = limit_with_room(case, others) if limit_given else others
    waited, waits = case.run(others).ttft.p99, case.run(higher).ttft.p99
    if waits > WORTH_IT * waited:
        return others, text
    return higher, (
        f"With the other changes made hardly anything is computed twice, and a limit of {others.max_running} is too"
        f" low: {higher.max_running} may run. The 99th percentile of TTFT is then {waits:,.1f} s, not {waited:,.1f}."
        f" kvpager.Admission, with no number to find: {case.run(controlled(others)).ttft.p99:,.1f} s."
    )


def named(now: Setting, changed: Setting) -> str:
    """What differs from the engine as it is, in a few words."""
    words = []
    if changed.moved != now.moved:
        words.append("front moved")
    if changed.block_size != now.block_size:
        words.append(f"blocks of {changed.block_size}")
    if changed.eviction != now.eviction:
        words.append(changed.eviction)
    if changed.pool != now.pool:
        words.append(f"{changed.pool:g} times the pool")
    admission = _admission(now, changed)
    return ", ".join([*words, *([admission] if admission else [])])


def _admission(now: Setting, changed: Setting) -> str:
    if changed.risk is not None:
        return "Admission"
    words = []
    if changed.watermark != now.watermark:
        words.append(f"watermark {100 * changed.watermark:g}%")
    if changed.max_running != now.max_running:
        words.append(f"limit {changed.max_running}")
    return ", ".join(words)


def _notes(case: Case, server: Server | None, findings: list[Finding]) -> tuple[str, ...]:
    """Where the server's own numbers say something that the replay does not."""
    if server is None:
        return ()
    notes = []
    if server.preemptions and not any(finding.kind == "thrashing" for finding in findings):
        why = "this trace in this pool computes hardly anything twice: is it the same load, the same pool?"
        if not case.has_pool:
            why = "give --blocks to see what stops that"
        notes.append(f"the server preempts ({server.last.counter}: {server.preemptions:,.0f}); {why}")
    if server.cached_share is not None and server.cached_share >= 0.5 and not server.preemptions:
        notes.append(
            f"{server.cached_share:.0%} of the server's pool is prefix cache, which nobody holds: it goes when room is"
            " needed, and is no shortage"
        )
    return tuple(notes)
