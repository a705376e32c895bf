"""Who was preempted, and why."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from ..types import Preemption
from .inputs import as_number, shown

LOG_MAX = 256
REASON_MAX = 200


@dataclass(frozen=True, slots=True)
class Why:
    """What the caller says of a preemption."""

    reason: str = ""
    cost: float = 0.0

    @classmethod
    def of(cls, reason: object, cost: object) -> Why:
        """The arguments of a call."""
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a str, not {type(reason).__name__}")
        reason.encode()  # half a surrogate pair is refused
        if len(reason) > REASON_MAX:
            raise ValueError(f"reason has {len(reason)} characters; it must have {REASON_MAX} at most")
        number = as_number("cost", cost)
        if not 0 <= number < math.inf:
            raise ValueError(f"cost is {shown(cost)}; it must be a finite number, 0 or more")
        return cls(reason, number)


class Log:
    """The last preemptions."""

    def __init__(self) -> None:
        self.entries: deque[Preemption] = deque(maxlen=LOG_MAX)
        self._next = 0

    def add(
        self, tick: int, sequence_id: int, action: Literal["recompute", "swap"], blocks: int, tokens: int, why: Why
    ) -> None:
        self.entries.append(Preemption(self._next, tick, sequence_id, action, blocks, tokens, why.cost, why.reason))
        self._next += 1
