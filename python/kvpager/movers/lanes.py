"""The two directions of a GPU mover: what each has under way, which plan touched a block last, and how it copies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import TransferError
from ..plans import Plan, Tier
from .base import Ticket
from .cupy_pool import IndexBuffer
from .device import Addresses, Event, Stream

__all__ = ["Lane", "Path", "Slot", "UnderWay", "choose_path", "merged"]

Path: TypeAlias = Literal["direct", "staged"]

DIRECT_BYTES = 64 << 10
"""Mean length of a piece from which one driver call for all of them beats a kernel. Not measured yet."""
DIRECT_BYTES_ONE_BY_ONE = 1 << 20
"""The same where the driver takes a call for each piece."""


class Slot(NamedTuple):
    """Device memory for some records."""

    address: int
    owner: object
    filled: Event
    emptied: Event


class UnderWay(NamedTuple):
    """A plan in a lane."""

    number: int
    """Counts the lane's plans from 1."""
    ticket: Ticket
    event: Event
    """Happens when all is copied."""
    error: TransferError | None
    """Why not all of it could be queued."""
    buffer: IndexBuffer | None


@dataclass(eq=False)
class Lane:
    """One direction. In each of its streams plans run one behind the other."""

    bus: Stream
    kernels: Stream
    slots: list[Slot]
    touched: dict[Tier, npt.NDArray[np.int64]]
    """For each block of each tier, the last plan of this lane that names it; 0: none."""
    count: int = 0
    next_slot: int = 0
    under_way: deque[UnderWay] = field(default_factory=deque)

    def last_in_common(self, plan: Plan) -> UnderWay | None:
        """The last plan here that has a block in common with `plan` and has not ended."""
        numbers = (
            self.touched[plan.source][plan.source_ids].max(initial=0),
            self.touched[plan.destination][plan.destination_ids].max(initial=0),
        )
        return next((each for each in self.under_way if each.number == max(numbers)), None)

    def touch(self, plan: Plan) -> None:
        """Counts a plan."""
        self.count += 1
        self.touched[plan.source][plan.source_ids] = self.count
        self.touched[plan.destination][plan.destination_ids] = self.count


def choose_path(piece_bytes: int, batched: bool) -> Path:
    """How to copy blocks with pieces of this mean length."""
    return "direct" if piece_bytes >= (DIRECT_BYTES if batched else DIRECT_BYTES_ONE_BY_ONE) else "staged"


def merged(
    targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies with neighbours made one: copies that follow each other in the lists and in both memories."""
    follows = (targets[1:] == targets[:-1] + sizes[:-1]) & (sources[1:] == sources[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return (
        targets[first].astype(np.uint64),
        sources[first].astype(np.uint64),
        np.add.reduceat(sizes, first).astype(np.uint64),
    )
