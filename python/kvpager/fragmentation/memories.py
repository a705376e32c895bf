"""Two memories of token slots: contiguous places found by first fit, and pages of the real pager."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .. import Pager, Sequence

SlotMap = NDArray[np.int32]
"""Who uses each slot: a request's number, or one of the two values below."""
FREE = -1
WASTED = -2
"""Held by a request and not used by it."""


class Memory(Protocol):
    """Token slots that requests take and give back. A request is a number that nobody else has."""

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""

    @property
    def largest_request(self) -> int:
        """The longest request for which there is room now."""

    @property
    def table_entries(self) -> int:
        """What all requests together have to remember about where their slots are."""

    def admit(self, request: int, length: int) -> bool:
        """Room for a request, or False if there is none now."""

    def release(self, request: int) -> None:
        """Take its slots back."""

    def slot_map(self) -> SlotMap:
        """Every slot, with who uses it."""


class Contiguous:
    """One stretch of slots for each request, the first that is large enough.

    Every request takes `reserve` slots, or as many as it needs if there is no reservation. What is free lies in holes,
    and two that touch are one.
    """

    def __init__(self, slots: int, reserve: int | None = None) -> None:
        self._slots = slots
        self._reserve = reserve
        self._holes = [(0, slots)]
        """Start and size of each hole, in order; no two of them touch."""
        self._places: dict[int, tuple[int, int, int]] = {}
        """Start, size and length in use of each request's place."""

    @property
    def free_slots(self) -> int:
        return sum(size for _, size in self._holes)

    @property
    def largest_request(self) -> int:
        return max((size for _, size in self._holes), default=0)

    @property
    def table_entries(self) -> int:
        # A base and a length, as in a segment table.
        return len(self._places)

    def admit(self, request: int, length: int) -> bool:
        need = length if self._reserve is None else self._reserve
        for position, (start, size) in enumerate(self._holes):
            if size >= need:
                rest = [(start + need, size - need)] if size > need else []
                self._holes[position : position + 1] = rest
                self._places[request] = (start, need, length)
                return True
        return False

    def release(self, request: int) -> None:
        start, size, _ = self._places.pop(request)
        first = last = bisect_left(self._holes, (start, 0))
        end = start + size
        if first > 0 and sum(self._holes[first - 1]) == start:
            first -= 1
            start = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end:
            end = sum(self._holes[last])
            last += 1
        self._holes[first:last] = [(start, end - start)]

    def slot_map(self) -> SlotMap:
        slots = np.full(self._slots, FREE, dtype=np.int32)
        for request, (start, size, length) in self._places.items():
            slots[start : start + length] = request
            slots[start + length : start + size] = WASTED
        return slots


class Pages:
    """As many blocks for each request as its tokens fill, wherever they are, by `kvpager.Pager`.

    Without a prefix cache: what sharing gains comes on top, and is not what is measured here.
    """

    def __init__(self, slots: int, block_size: int) -> None:
        self._pager = Pager(slots // block_size, block_size, prefix_cache=False)
        self._sequences: dict[int, Sequence] = {}

    @property
    def free_slots(self) -> int:
        return self._pager.num_free_blocks * self._pager.block_size

    @property
    def largest_request(self) -> int:
        # Any free block will do, so the largest place is all of them.
        return self.free_slots

    @property
    def table_entries(self) -> int:
        return sum(len(sequence.block_ids) for sequence in self._sequences.values())

    def admit(self, request: int, length: int) -> bool:
        sequence = self._pager.try_admit(np.zeros(length, dtype=np.int32))
        if sequence is None:
            return False
        self._sequences[request] = sequence
        return True

    def release(self, request: int) -> None:
        self._sequences.pop(request).release()

    def slot_map(self) -> SlotMap:
        size = self._pager.block_size
        blocks = np.full((self._pager.num_blocks, size), FREE, dtype=np.int32)
        for request, sequence in self._sequences.items():
            owned = np.full(len(sequence.block_ids) * size, WASTED, dtype=np.int32)
            owned[: len(sequence)] = request
            blocks[sequence.block_ids] = owned.reshape(-1, size)
        return blocks.ravel()
