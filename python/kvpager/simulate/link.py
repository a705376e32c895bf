"""Copies between the tiers, beside the steps: one after the other in each direction."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from .. import Plan
from .rows import Request


class Copy(NamedTuple):
    """Ordered by its end."""

    end_s: float
    number: int
    plan: Plan
    request: Request


class Link:
    """What is on its way between device and host."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self.copies: list[Copy] = []
        self._free_s = {"swap_out": 0.0, "swap_in": 0.0}
        self._number = 0

    def begin(self, plan: Plan, request: Request, now_s: float) -> None:
        """A copy comes behind those of its direction."""
        end_s = max(now_s, self._free_s[plan.kind]) + len(plan) * self.block_s
        self._free_s[plan.kind] = end_s
        self._number += 1
        bisect.insort(self.copies, Copy(end_s, self._number, plan, request))

    def next_ended(self, now_s: float) -> Copy | None:
        """A copy that is over, the first to end first."""
        return self.copies.pop(0) if self.copies and self.copies[0].end_s <= now_s else None

    @property
    def swaps_out(self) -> bool:
        """Whether blocks will be free when something that is on its way has arrived."""
        return any(copy.plan.kind == "swap_out" for copy in self.copies)
