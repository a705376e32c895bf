"""Cached prefixes that were taken for free memory: others have their room, and what comes back is computed again."""

from __future__ import annotations

from dataclasses import replace

from .case import Case, Measures, Setting
from .finding import Effect, Finding, Look, nothing, unseen
from .metrics import Server
from .thrashing import NO_POOL

KIND = "cache-crowded-out"
MIN_LOST = 0.05
"""Of the prompt tokens: what would be found in addition if nothing were ever evicted."""
MIN_SAVED = 0.02
"""Of the computed tokens: what leaving room for the cache has to save."""
MOST_SECONDS = 1.02
LOOKS_EMPTY, MIN_SAVED_BY_MORE = 0.7, 0.1
"""Usage of a pool that seems to have room, and what twice its blocks have to save of the computed tokens."""
WATERMARKS = (0.1, 0.2, 0.3, 0.5)
LIMITS = (0.75, 0.5, 0.35)
"""Of the requests that run on average."""


def look(case: Case, base: Setting, server: Server | None) -> Finding | Look:
    """`base` is what the other findings make of the engine: what they cure is not found a second time."""
    if not case.has_pool:
        return unseen(KIND, NO_POOL)
    if case.trace.form == "lengths":
        return unseen(KIND, "the trace has lengths only: nothing is known of what is shared")
    now = case.measure(base)
    kept = case.run(base, _without_end(case, base))
    lost = (kept.hit_tokens - now.hit_tokens) / now.prompt_tokens
    seen = f"{now.hit_rate:.1%} of the prompt tokens are found, {kept.hit_rate:.1%} if nothing were ever evicted"
    if lost < MIN_LOST:
        return nothing(KIND, seen)
    return (
        _crowded(case, base, now, seen, server)
        or _too_small(case, base, now, seen, server)
        or nothing(KIND, f"{seen}; neither fewer requests at once nor twice the pool brings much of it back")
    )


def _crowded(case: Case, base: Setting, now: Measures, seen: str, server: Server | None) -> Finding | None:
    """Running requests have the room: whether fewer of them, each with less to compute, are as fast."""
    assert now.running_mean is not None
    assert now.seconds is not None
    tried = [replace(base, watermark=share) for share in WATERMARKS if share > base.watermark]
    limits = {max(1, round(share * now.running_mean)) for share in LIMITS}
    tried += [replace(base, max_running=limit) for limit in sorted(limits, reverse=True) if limit < base.max_running]
    good = [one for one in tried if case.run(one).seconds <= MOST_SECONDS * now.seconds]
    best = min(good, key=lambda one: case.run(one).computed_tokens, default=base)
    effect = Effect(now, case.measure(best))
    if effect.saved_share < MIN_SAVED:
        return None
    way = f"Let at most {best.max_running} run at once"
    if best.watermark > base.watermark:
        way = f"Keep {100 * best.watermark:g}% of the pool out of their reach (a watermark)"
    return Finding(
        kind=KIND,
        text=f"Prefix cache was taken for free memory: {now.running_mean:.0f} requests run in {now.usage_mean:.0%} of"
        " the pool on average, and each that comes in takes its room from cached prefixes, which others come back for."
        f" {seen[0].upper()}{seen[1:]}.{_server(server)}",
        numbers=_numbers(case, base, now, best),
        change=f"{way}: fewer at once, each with less to compute.",
        setting=best,
        effect=effect,
    )


def _too_small(case: Case, base: Setting, now: Measures, seen: str, server: Server | None) -> Finding | None:
    """The pool looks half empty, as cached blocks do not count as used, and has no room for what comes back."""
    assert now.usage_mean is not None
    larger = replace(base, pool=2 * base.pool)
    effect = Effect(now, case.measure(larger))
    if now.usage_mean > LOOKS_EMPTY or effect.saved_share < MIN_SAVED_BY_MORE:
        return None
    return Finding(
        kind=KIND,
        text=f"Prefix cache was taken for free memory: requests hold {now.usage_mean:.0%} of the pool on average, and"
        " the rest looks free. It is not: it holds prefixes that come back, and not all of them."
        f" {seen[0].upper()}{seen[1:]}.{_server(server)}",
        numbers=_numbers(case, base, now, larger),
        change="Size the pool for what comes back, not for what is in use: twice the blocks, or a host tier to keep"
        " what is evicted (docs/tiers.md).",
        setting=larger,
        effect=effect,
    )


def _numbers(case: Case, base: Setting, now: Measures, better: Setting) -> dict[str, float | int | None]:
    return {
        "hit_rate": now.hit_rate,
        "hit_rate_without_end": case.run(base, _without_end(case, base)).hit_rate,
        "usage_mean": now.usage_mean,
        "running_mean": now.running_mean,
        "watermark": better.watermark,
        "limit": better.max_running,
        "pool": better.pool,
    }


def _without_end(case: Case, setting: Setting) -> int:
    """Blocks with which nothing is ever evicted."""
    return max(int(case.load(setting).blocks_needed(setting.block_size).sum()), case.blocks(setting))


def _server(server: Server | None) -> str:
    if server is None or server.hit_rate is None:
        return ""
    return f" The server says {server.hit_rate:.1%}."
