"""What a mover is asked to copy: plain values, the same in every process of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Plan", "PlanKind", "PlanState", "PlanStatus", "StoreKeys", "Tier"]

Tier: TypeAlias = Literal["device", "host", "store"]
"""Where a block's bytes are. Block ids of two tiers have nothing to do with each other.

A store is no pool of the pager's: blocks have keys there, and a plan's ids of that side just count its records."""

PlanKind: TypeAlias = Literal["swap_out", "swap_in", "offload", "fetch", "save", "load"]
"""Why a plan was made: `swap_out` and `offload` go from the device to the host, `swap_in` and `fetch` come back;
`save` goes from the host to a store, `load` comes back."""

PlanState: TypeAlias = Literal["planned", "started", "abandoned"]
"""How far a plan is that has not ended."""


class StoreKeys(NamedTuple):
    """What blocks are called in a store, and what proves that a record there is the block that is meant.

    A key says where to look. A record is the right one only if it was stored with the same meta, byte by byte.
    """

    keys: npt.NDArray[np.uint8]
    """uint8 [n, 32], read-only: a digest of the pager's identity and block size, the namespace, and all tokens up to
    and including the block. Where a run of content tokens goes on into other blocks, it covers the whole run."""
    metas: npt.NDArray[np.uint8]
    """uint8 [n, 32 + 4 * block_size], read-only: the key of the block above (for a first block a digest of identity,
    block size and namespace), then the block's own tokens as little-endian int32."""


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
    """int32 [n], read-only: blocks of the tier `source`; 0 to n - 1 where that is a store."""
    destination: Tier
    destination_ids: npt.NDArray[np.int32]
    """int32 [n], read-only: blocks of the tier `destination`; 0 to n - 1 where that is a store."""
    records: StoreKeys | None = None
    """Of a `save` or `load` the keys and metas of its n blocks, in the order of the ids; None for other kinds."""

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
            and (self.records is None) == (other.records is None)
            and all(map(np.array_equal, self.records or (), other.records or ()))
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
