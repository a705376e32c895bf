"""What a mover is asked to copy: plain values, the same in every process of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Plan", "PlanKind", "PlanState", "PlanStatus", "Tier"]

Tier: TypeAlias = Literal["device", "host"]
"""Where a block's bytes are. Block ids of two tiers have nothing to do with each other."""

PlanKind: TypeAlias = Literal["swap_out", "swap_in", "offload", "fetch"]
"""Why a plan was made: `swap_out` and `offload` go from the device to the host, `swap_in` and `fetch` come back."""

PlanState: TypeAlias = Literal["planned", "started", "abandoned"]
"""How far a plan is that has not ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Blocks to copy from one tier to another: ``source_ids[i]`` to ``destination_ids[i]``, in any order.

    The pager makes it and guards its blocks, a mover copies, and the pager is told. A plan can be pickled: where each
    rank of a tensor-parallel group copies its own shard, every rank gets the same plan, and ``Pager.complete`` is
    called once, when all have copied. Two plans are equal if all their fields are.
    """

    id: int
    """The pager's number for the plan; used again once the plan has ended."""
    generation: int
    """How often that number had been used before: late reports of an ended plan are recognised by it."""
    kind: PlanKind
    source: Tier
    source_ids: npt.NDArray[np.int32]
    """int32 [n], read-only: blocks of the tier `source`."""
    destination: Tier
    destination_ids: npt.NDArray[np.int32]
    """int32 [n], read-only: blocks of the tier `destination`."""

    def __len__(self) -> int:
        """Number of blocks to copy."""
        return len(self.source_ids)

    def __eq__(self, other: object) -> bool:
        """True if all fields are equal."""
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            (self.id, self.generation, self.kind, self.source, self.destination)
            == (other.id, other.generation, other.kind, other.source, other.destination)
            and np.array_equal(self.source_ids, other.source_ids)
            and np.array_equal(self.destination_ids, other.destination_ids)
        )

    def __hash__(self) -> int:
        """By number and generation, which name a plan of one pager."""
        return hash((self.id, self.generation))


class PlanStatus(NamedTuple):
    """A plan that has not ended, as ``Pager.plans`` tells of it."""

    plan: Plan
    state: PlanState
    tick: int | None
    """When it was started, on the clock of the caller's choice (``Pager.start``); None before."""
