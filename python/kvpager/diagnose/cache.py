"""Prefix cache that was taken for free memory: the pool looks half empty and has no room for what comes back.

Cached blocks that nobody holds do not count as used, in kvpager's `active_blocks` as in the usage of other servers. Who
sizes a pool by what is in use sizes it without its cache.
"""

from __future__ import annotations

from dataclasses import replace

from .case import Case, Setting
from .finding import Effect, Finding, Look, nothing, unseen
from .metrics import Server
from .thrashing import NO_POOL

KIND = "cache-as-free"
MIN_LOST = 0.05
"""Of the prompt tokens: what would be found in addition if nothing were ever evicted."""
LOOKS_EMPTY = 0.7
"""Usage of a pool that seems to have room."""
MIN_SAVED = 0.1
"""Of the computed tokens: what twice the pool has to save."""


def look(case: Case, base: Setting, server: Server | None) -> Finding | Look:
    """`base` is what the other findings make of the engine: what they cure is not found a second time."""
    if not case.has_pool:
        return unseen(KIND, NO_POOL)
    if case.trace.form == "lengths":
        return unseen(KIND, "the trace has lengths only: nothing is known of what is shared")
    now = case.measure(base)
    assert now.usage_mean is not None
    # So many that nothing is ever evicted.
    without_end = max(int(case.load(base).blocks_needed(base.block_size).sum()), case.blocks(base))
    kept = case.run(base, without_end)
    lost = (kept.hit_tokens - now.hit_tokens) / now.prompt_tokens
    seen = f"{now.hit_rate:.1%} of the prompt tokens are found, {kept.hit_rate:.1%} if nothing were ever evicted"
    if base != case.as_it_is:
        seen += " (with the other changes made)"
    if lost < MIN_LOST:
        return nothing(KIND, seen)
    if now.usage_mean > LOOKS_EMPTY:
        return nothing(KIND, f"{seen}; the pool is in use by {now.usage_mean:.0%} and does not look free")
    larger = replace(base, pool=2 * base.pool)
    effect = Effect(now, case.measure(larger))
    if effect.saved_share < MIN_SAVED:
        return nothing(KIND, f"{seen}; twice the pool saves {max(0.0, effect.saved_share):.1%} of the computed tokens")
    return Finding(
        kind=KIND,
        text=f"Prefix cache was taken for free memory: requests hold {now.usage_mean:.0%} of the pool on average, and"
        " the rest looks free. It is not: it holds prefixes that come back, and not all of them."
        f" {seen[0].upper()}{seen[1:]}.{_server(server)}",
        numbers={
            "usage_mean": now.usage_mean,
            "hit_rate": now.hit_rate,
            "hit_rate_without_end": kept.hit_rate,
            "hit_rate_twice": effect.after.hit_rate,
            "num_blocks": case.blocks(base),
        },
        change="Size the pool for what comes back, not for what is in use: twice the blocks, or a host tier that keeps"
        " what is evicted (docs/tiers.md). Raise no limit because usage is low.",
        base=base,
        setting=larger,
        effect=effect,
    )


def _server(server: Server | None) -> str:
    if server is None or server.last.usage is None:
        return ""
    hits = "" if server.hit_rate is None else f" and {server.hit_rate:.1%} found"
    return f" The server says {server.last.usage:.0%} in use{hits}."
