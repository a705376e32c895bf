"""The rule that picks a block size.

Waste and lost sharing are counted in the same unit, tokens of KV: a slot that holds nothing is memory for a token, and
a token that could have been shared is in memory twice (and computed twice). Their sum is the overhead of a size. It
falls as blocks get smaller, but by less and less, while table entries and gathers double with each halving. So the rule
takes **the largest block whose overhead is at most `within` (2% of all tokens, unless said otherwise) above the least
overhead of all sizes measured**. It knows nothing of kernels: one that wants blocks of 64 has a reason of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .load import MAX_BLOCK_SIZE
from .measure import BlockSizeRow

DEFAULT_WITHIN = 0.02


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A block size, or None where no pager has any of those measured, and the reason in numbers."""

    block_size: int | None
    within: float
    least_overhead_size: int | None
    next_larger: int | None
    """The next size measured that a pager could have; its overhead is too large."""
    reason: str


def recommend(rows: Sequence[BlockSizeRow], within: float = DEFAULT_WITHIN) -> Recommendation:
    """The largest block whose overhead is at most `within` above the least."""
    possible = [row for row in rows if row.block_size <= MAX_BLOCK_SIZE]
    if not possible:
        reason = f"No recommendation: a pager's block holds at most {MAX_BLOCK_SIZE} tokens, all measured are larger."
        return Recommendation(None, within, None, None, reason)
    # Of equals the larger one, which is as good in one way and better in the other.
    least = min(possible, key=lambda row: (row.overhead_share, -row.block_size))
    chosen = max(
        (row for row in possible if row.overhead_share <= least.overhead_share + within),
        key=lambda row: row.block_size,
    )
    larger = next((row for row in possible if row.block_size > chosen.block_size), None)
    return Recommendation(
        chosen.block_size,
        within,
        least.block_size,
        None if larger is None else larger.block_size,
        _reason(possible, chosen, least, larger, within),
    )


def _reason(
    rows: Sequence[BlockSizeRow],
    chosen: BlockSizeRow,
    least: BlockSizeRow,
    larger: BlockSizeRow | None,
    within: float,
) -> str:
    waste_only = chosen.lost_tokens is None
    what, it = ("waste is", "it is") if waste_only else ("waste and lost sharing together are", "they are")
    sentences = [
        f"Recommended: {chosen.block_size} tokens a block. The rule: the largest block whose {what} at most"
        f" {100 * within:.3g}% of all tokens above the least of all sizes ({_overhead(least)} at {least.block_size})."
    ]
    if chosen is not least:
        sentences.append(f"At {chosen.block_size} {it} {_overhead(chosen)}.")
    if larger is None:
        sentences.append("No larger one that a pager could have was measured.")
    else:
        sentences.append(f"At {larger.block_size} {it} {_overhead(larger)}.")
    smallest = rows[0]
    if smallest.block_size < chosen.block_size:
        sentences.append(
            f"A table then has {chosen.table_entries_mean:,.1f} entries on average, in place of"
            f" {smallest.table_entries_mean:,.1f} at {smallest.block_size}."
        )
    return " ".join(sentences)


def _overhead(row: BlockSizeRow) -> str:
    if row.lost_tokens is None:
        return f"{row.waste_share:.2%}"
    lost = row.overhead_share - row.waste_share
    return f"{row.overhead_share:.2%} = {row.waste_share:.2%} + {lost:.2%}"
