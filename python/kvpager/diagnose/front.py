"""A request id or a timestamp in front of a text that prompts share: no prefix cache finds anything behind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..traces import Trace
from .case import Case
from .finding import Effect, Finding, Look, nothing, unseen
from .shared_text import Group, moved_behind, varying_fronts

KIND = "varying-front"
MIN_GAIN = 0.05
"""Of the prompt tokens: what has to be found in addition when the front is moved."""


def look(case: Case) -> Finding | Look:
    trace, now = case.trace, case.as_it_is
    if trace.form == "lengths":
        return unseen(KIND, "the trace has lengths only, no text")
    if trace.form == "ids":
        return unseen(KIND, _ids(trace))
    groups = varying_fronts(trace.prompts)
    if not groups:
        return nothing(KIND, "no text of 64 tokens or more stands behind beginnings that vary")
    case.moved_trace = moved_behind(trace, groups)
    moved = replace(now, moved=True)
    tokens = int(trace.input_lengths.sum())
    found, would_find = (case.shared_tokens(setting) / tokens for setting in (now, moved))
    if would_find - found < MIN_GAIN:
        case.moved_trace = None
        text = f"text behind beginnings that vary is worth {max(0.0, would_find - found):.1%} of the prompt tokens"
        return nothing(KIND, text)
    numbers = _numbers(trace, groups) | {"hit_rate": found, "hit_rate_moved": would_find}
    return Finding(
        kind=KIND,
        text=_text(trace, numbers),
        numbers=numbers,
        change=f"Put what varies ({_span(numbers)}) behind the text that is shared. It is a request id, the time, or"
        " the like: whatever differs belongs last.",
        base=now,
        setting=moved,
        effect=Effect(case.measure(now), case.measure(moved)),
    )


def _numbers(trace: Trace, groups: list[Group]) -> dict[str, int | float]:
    largest = groups[0]
    at = [int(trace.prompts.row(int(i))[largest.front]) for i in largest.members]
    return {
        "position": largest.front,
        "front_tokens": largest.front_tokens,
        "values_there": len(set(at)),
        "prompts_there": len(at),
        "shared_tokens": len(largest.text),
        "prompts": sum(len(group.members) for group in groups),
        "all_prompts": trace.num_requests,
        "texts": len(groups),
    }


def _text(trace: Trace, numbers: dict[str, int | float]) -> str:
    n = numbers
    texts = "a text" if n["texts"] == 1 else f"one of {n['texts']} texts"
    return (
        f"{n['prompts']:,} of {n['all_prompts']:,} prompts hold {texts} that others hold too, behind tokens that vary."
        f" The first position that varies is {n['position']}: {n['values_there']:,} different tokens in"
        f" {n['prompts_there']:,} prompts that share {n['shared_tokens']:,} tokens from position"
        f" {n['position'] + n['front_tokens']} on. A prefix is found by all tokens up to its end, so nothing behind"
        f" position {n['position']} hits: {n['hit_rate']:.1%} of the prompt tokens are found in a pool without end, and"
        f" {n['hit_rate_moved']:.1%} with what varies moved behind the shared text."
    )


def _span(numbers: dict[str, int | float]) -> str:
    if numbers["front_tokens"] == 1:
        return f"position {numbers['position']}"
    return f"positions {numbers['position']} to {numbers['position'] + numbers['front_tokens'] - 1}"


def _ids(trace: Trace) -> str:
    """An id stands for all tokens before it: one that varies in front gives new ids to everything behind."""
    with_blocks = trace.prompts.lengths > 0
    firsts = trace.prompts.values[trace.prompts.offsets[:-1][with_blocks]]
    once = int(np.count_nonzero(np.unique(firsts, return_counts=True)[1] == 1)) if len(firsts) else 0
    return (
        "the trace names blocks by ids, which stand for all tokens before them: what prompts share behind a varying"
        f" front has different ids and cannot be seen ({once:,} of {len(firsts):,} first blocks occur once); a trace"
        " with tokens tells"
    )
