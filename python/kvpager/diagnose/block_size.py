"""Blocks that are too coarse: for the lengths (the last one stays half empty), or for the prefix that is shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..blocksize import Load, recommend
from ..blocksize.measure import BlockSizeRow, measure
from ..blocksize.rule import DEFAULT_WITHIN
from .case import Case
from .finding import Effect, Finding, Look, nothing

KIND = "block-size"
SMALLEST = 16
"""What nobody is told to go below."""


def look(case: Case) -> Finding | Look:
    now = case.as_it_is
    if now.block_size <= SMALLEST:
        return nothing(KIND, f"blocks of {now.block_size} tokens are not too coarse for anything")
    # A front that varies hides what is shared: as long as it stands there, no block size shares anything.
    behind = replace(now, moved=case.moved_trace is not None)
    sizes = [size for size in (SMALLEST << power for power in range(7)) if size < now.block_size] + [now.block_size]
    rows = measure(_load(case, behind.moved), sizes, progress=case.progress)
    choice = recommend(rows)
    by_size = {row.block_size: row for row in rows}
    coarse = by_size[now.block_size]
    least = min(row.overhead_share for row in rows)
    numbers = {
        "block_size": now.block_size,
        "waste_share": coarse.waste_share,
        "lost_share": coarse.overhead_share - coarse.waste_share,
        "overhead_share": coarse.overhead_share,
        "least_overhead_share": least,
        "within": DEFAULT_WITHIN,
        "recommended": choice.block_size,
        "front_moved": behind.moved,
    }
    if choice.block_size is None or choice.block_size >= now.block_size:
        text = f"blocks of {now.block_size} cost {coarse.overhead_share:.1%} of all tokens, the best {least:.1%}"
        return nothing(KIND, text)
    setting = replace(behind, block_size=choice.block_size)
    better = by_size[choice.block_size]
    return Finding(
        kind=KIND,
        text=_text(coarse, better, behind.moved),
        numbers=numbers | {"recommended_overhead_share": better.overhead_share},
        change=f"Take blocks of {choice.block_size} tokens.",
        base=behind,
        setting=setting,
        effect=Effect(case.measure(behind), case.measure(setting)),
    )


def _load(case: Case, moved: bool) -> Load:
    trace = case.moved_trace if moved else case.trace
    assert trace is not None
    if trace.form == "tokens":
        return Load.of_trace(trace)
    # Ids say nothing of blocks that are smaller than their own: the lengths decide.
    ends = trace.input_lengths + np.maximum(trace.output_lengths, 1)
    return Load(trace.path, "lengths", ends, trace.input_lengths, None, ())


def _text(coarse: BlockSizeRow, better: BlockSizeRow, moved: bool) -> str:
    text = (
        f"Blocks of {coarse.block_size} tokens are too coarse: they leave {coarse.waste_mean:,.0f} slots of each"
        f" request's last block empty, {coarse.waste_share:.1%} of all tokens"
    )
    if coarse.lost_tokens:
        where = ", once what varies stands behind it" if moved else ""
        lost = coarse.overhead_share - coarse.waste_share
        text += f", and share {lost:.1%} less than small ones would{where}, as only whole blocks are shared"
    both, together = ("both are", " together") if coarse.lost_tokens else ("it is", "")
    return f"{text}. At {better.block_size} tokens {both} {better.overhead_share:.1%}{together}."
