"""Requests that lose their blocks and compute them again, and the limit that let them all in."""

from __future__ import annotations

from typing import Any

import numpy as np

from .admission import controlled, limit_that_stops, watermark_that_stops
from .case import Case, Measures, Setting
from .finding import Effect, Finding, Look, nothing, unseen
from .metrics import Server

KIND, LIMIT = "thrashing", "limit"
NO_POOL = "nothing says how large the pool is: give --blocks, or --metrics that name it"
THRASHING_TAX = 0.05
MIN_TAX = 0.01
"""Recomputed among computed tokens: below that it is no finding, however many were preempted."""

AS_FAST, SLOWER = 1.05, 1.02


def look(case: Case, server: Server | None) -> Finding | Look:
    if not case.has_pool:
        return unseen(KIND, NO_POOL)
    now = case.as_it_is
    seen = case.measure(now)
    assert seen.tax is not None
    assert seen.preemptions is not None
    requests = case.trace.num_requests
    if not is_preempted(case):
        text = (
            f"preemptions: {seen.preemptions:,}, of {requests:,} requests; {seen.tax:.1%} of the tokens computed twice"
        )
        return nothing(KIND, f"{text}; usage {seen.usage_mean:.0%} on average")
    marked, limited = watermark_that_stops(case, now), limit_that_stops(case, now)
    setting = marked or limited
    limit = f"at most {limited.max_running} run at once"
    if marked is None:
        change = f"Let {limit}: nobody is preempted then. No watermark up to 40% is enough."
    else:
        change = (
            f"Keep {100 * marked.watermark:g}% of the pool for those who run (a watermark): nobody is preempted then."
        )
        change += f" The same comes of letting {limit}." if as_fast(case, limited, marked) else ""
    change += slower(case, now, setting) + _by_controller(case, now)
    return Finding(
        kind=KIND,
        text=_text(seen, requests, server),
        numbers={
            "preemptions": seen.preemptions,
            "preemptions_max": seen.preemptions_max,
            "requests": requests,
            "tax": seen.tax,
            "usage_mean": seen.usage_mean,
            "usage_median": seen.usage_median,
            "usage_max": seen.usage_max,
            "running_mean": seen.running_mean,
            "watermark_that_stops": None if marked is None else marked.watermark,
            "limit_that_stops": limited.max_running,
        },
        change=change,
        base=now,
        setting=setting,
        effect=Effect(seen, case.measure(setting)),
        also=(
            {f"limit {limited.max_running}": limited} if marked is not None and as_fast(case, limited, marked) else {}
        )
        | {"Admission": controlled(now)},
    )


def look_at_limit(case: Case, given: bool) -> Finding | Look:
    """The limit of an engine against what the pool holds of its requests when they come, and when they have grown."""
    if not case.has_pool:
        return unseen(LIMIT, NO_POOL)
    if not given:
        return unseen(LIMIT, "no limit was given (--max-running)")
    now = case.as_it_is
    if not is_preempted(case):
        return nothing(LIMIT, f"hardly anything is computed twice with a limit of {now.max_running}")
    limited = limit_that_stops(case, now)
    numbers = _room(case, now) | {"limit": now.max_running, "limit_that_stops": limited.max_running}
    return Finding(
        kind=LIMIT,
        text=_limit_text(numbers),
        numbers=numbers,
        change=f"Let at most {limited.max_running} run at once: nobody is preempted then. A limit is right for the load"
        f" it was measured on; a watermark asks the pool, and kvpager.Admission what it will hold."
        f"{slower(case, now, limited)}",
        base=now,
        setting=limited,
        effect=Effect(case.measure(now), case.measure(limited)),
    )


def _by_controller(case: Case, now: Setting) -> str:
    """What comes of it that nobody has to tune anything."""
    ran = case.run(controlled(now))
    return (
        f" Or use kvpager.Admission in place of a limit, with no number to find: {ran.preemptions:,} preemptions,"
        f" {ran.tax:.1%} recomputed.{slower(case, now, controlled(now))}"
    )


def as_fast(case: Case, one: Setting, other: Setting) -> bool:
    return case.run(one).seconds <= AS_FAST * case.run(other).seconds


def slower(case: Case, now: Setting, changed: Setting) -> str:
    """What a change costs in time, where it does."""
    times = case.run(changed).seconds / case.run(now).seconds
    return f" All requests together take {times:.2f} times as long." if times >= SLOWER else ""


def is_preempted(case: Case, setting: Setting | None = None) -> bool:
    """Whether more is computed twice than a pool that is full now and then explains."""
    return case.run(setting or case.as_it_is).tax >= MIN_TAX


def _room(case: Case, now: Setting) -> dict[str, Any]:
    """What a request takes on average beyond what it shares, when it comes in and when it has its answer."""
    load, size = case.load(now), now.block_size
    shared = case.measure(now).hit_tokens / size
    blocks = case.blocks(now)
    entering = (float((-(-load.input_lengths // size)).sum()) - shared) / load.num_requests
    grown = (float(load.blocks_needed(size).sum()) - shared) / load.num_requests
    return {
        "num_blocks": blocks,
        "blocks_entering": entering,
        "blocks_grown": grown,
        "fit_entering": int(np.floor(blocks / entering)) if entering else blocks,
        "fit_grown": int(np.floor(blocks / grown)) if grown else blocks,
    }


def _limit_text(n: dict[str, Any]) -> str:
    limit = n["limit"]
    at_first, later = limit * n["blocks_entering"], limit * n["blocks_grown"]
    text, who = f"A limit of {limit} ", "they"
    if limit <= n["fit_entering"]:
        text += (
            f"was chosen on an empty cache: {limit} requests take {at_first:,.0f} of the {n['num_blocks']:,} blocks"
            f" when they come in, {n['blocks_entering']:,.1f} each"
        )
    else:
        text += f"limits nothing: {n['fit_entering']} requests fill the pool when they come in"
        who = f"{limit}"
    return f"{text}. With their answers complete {who} would take {later:,.0f}, {n['blocks_grown']:,.1f} each."


def _text(seen: Measures, requests: int, server: Server | None) -> str:
    assert seen.tax is not None
    name = "Thrashing" if seen.tax >= THRASHING_TAX else "Preemptions"
    text = (
        f"{name}: {seen.preemptions:,} preemptions of {requests:,} requests, up to {seen.preemptions_max} of one;"
        f" {seen.tax:.1%} of all computed tokens were computed before. Half of the time {seen.usage_median:.0%}"
        f" of the pool and more is in use ({seen.usage_max:.0%} at most), by {seen.running_mean:.0f} requests. First"
        f" tokens come after {seen.ttft_p99_s:,.1f} s and the next ones after {_ms(seen.itl_p99_s)} (99th percentile)."
    )
    return text if server is None else text + server.on_preemptions()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.0f} ms"
