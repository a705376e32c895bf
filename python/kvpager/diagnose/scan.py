"""Prompts that nobody sends twice, and the shared prefix that they push out of the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..traces import Trace
from .case import Case, Setting, chosen
from .finding import Effect, Finding, Look, nothing, unseen
from .thrashing import NO_POOL

KIND = "scan"
MIN_LOST = 0.02
"""Of the prompt tokens of those who share: what they find less because of the others."""
MIN_REGAINED = 0.25
"""Of what is lost: what the other policy has to bring back."""
WATERMARKS = (0.1, 0.2, 0.3)


def look(case: Case) -> Finding | Look:
    if not case.has_pool:
        return unseen(KIND, NO_POOL)
    trace, now = case.trace, case.as_it_is
    if trace.form == "lengths":
        return unseen(KIND, "the trace has lengths only: nothing is known of what is shared")
    once = one_offs(trace, now.block_size)
    sharing = np.flatnonzero(~once)
    if not once.any() or not len(sharing):
        which = "every prompt shares" if len(sharing) else "no prompt shares"
        return nothing(KIND, f"{which} its first block with another")
    base = case.run(now)
    alone = case.run_of(chosen(trace, sharing))
    tokens = int(trace.input_lengths[sharing].sum())
    hit, would_hit = base.hit_tokens / tokens, alone.hit_tokens / tokens
    text = f"{int(once.sum()):,} of {trace.num_requests:,} prompts share nothing"
    if would_hit - hit < MIN_LOST:
        return nothing(KIND, f"{text}; without them the others would find {would_hit:.1%}, with them {hit:.1%}")
    if now.eviction == "slru":
        return nothing(KIND, f"{text} and cost the others {would_hit - hit:.1%}; slru is set, which is what helps")
    least = base.hit_tokens + MIN_REGAINED * (alone.hit_tokens - base.hit_tokens)
    # While one-offs run they have the room whatever is evicted: then some of the pool has to be kept from them, too.
    marks = [now.watermark, *(share for share in WATERMARKS if share > now.watermark)]
    ways = (replace(now, eviction="slru", watermark=share) for share in marks)
    setting = next((way for way in ways if case.run(way).hit_tokens >= least), None)
    if setting is None:
        return nothing(
            KIND,
            f"{text} and take room that others need while they run ({hit:.1%} found, {would_hit:.1%} without them), but"
            " they do not flush the cache: slru would not keep more",
        )
    flood, pool = longest_flood(trace, once, now.block_size), case.blocks(now)
    numbers = {
        "one_offs": int(once.sum()),
        "requests": trace.num_requests,
        "one_off_token_share": float(trace.input_lengths[once].sum() / trace.input_lengths.sum()),
        "hit_rate_of_others": hit,
        "hit_rate_of_others_alone": would_hit,
        "hit_rate_of_others_slru": case.run(setting).hit_tokens / tokens,
        "watermark": setting.watermark,
        "longest_flood_blocks": flood,
        "num_blocks": pool,
    }
    return Finding(
        kind=KIND,
        text=f"{text} and bring {numbers['one_off_token_share']:.0%} of the prompt tokens. They pass through the cache"
        " and push out prefixes that come back: the other prompts find"
        f" {hit:.1%} of their tokens, and would find {would_hit:.1%} without them. Up to {flood:,} blocks of such"
        f" prompts come between two prompts that share; the pool has {pool:,}.",
        numbers=numbers,
        change=_change(now, setting),
        base=now,
        setting=setting,
        effect=Effect(case.measure(now), case.measure(setting)),
    )


def _change(now: Setting, setting: Setting) -> str:
    kept = ""
    if setting.watermark > now.watermark:
        kept = f", and keep {100 * setting.watermark:g}% of the pool out of the reach of admissions (a watermark)"
    return (
        "Evict by slru, which keeps what was hit apart from what was not (Pager(policy='slru'))"
        f"{kept}; or hold the hot prefix yourself (admit(pin=True))."
    )


def one_offs(trace: Trace, block_size: int) -> NDArray[np.bool_]:
    """Which prompts share not even their first block with any other: no cache can do anything for them."""
    size = block_size if trace.form == "tokens" else 1
    firsts = [trace.prompts.row(index)[:size].tobytes() for index in range(trace.num_requests)]
    seen: dict[bytes, int] = {}
    for first in firsts:
        seen[first] = seen.get(first, 0) + 1
    whole = trace.prompts.lengths >= size
    return np.array([seen[first] == 1 for first in firsts]) | ~whole


def longest_flood(trace: Trace, once: NDArray[np.bool_], block_size: int) -> int:
    """Most blocks of one-off prompts between two returns of one shared first block."""
    size = block_size if trace.form == "tokens" else 1
    so_far = np.cumsum(np.where(once, trace.input_lengths // block_size, 0))
    last: dict[bytes, int] = {}
    most = 0
    for index in np.flatnonzero(~once).tolist():
        first = trace.prompts.row(index)[:size].tobytes()
        most = max(most, int(so_far[index]) - last.get(first, int(so_far[index])))
        last[first] = int(so_far[index])
    return most
