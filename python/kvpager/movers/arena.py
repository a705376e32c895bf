"""The host tier's memory: one mapping, a record for each block."""

from __future__ import annotations

import mmap
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = ["HostArena"]


class HostArena:
    """``records``: uint8 [num_blocks, bytes_per_block]. A block is one row, so another tier can write it as it is.

    The memory is one anonymous mapping of exactly this size, page-aligned, with large pages where the system has them,
    and touched when it is first written (or pinned: a mover for a GPU does that). ``memory=`` takes a writable buffer
    of the caller's instead: shared memory, or a mapped file. ConfigError if a size is below 1 or the buffer is too
    small or read-only; MemoryError or OSError if the system refuses the mapping.
    """

    records: npt.NDArray[np.uint8]

    def __init__(self, num_blocks: SupportsIndex, bytes_per_block: SupportsIndex, memory: Any = None) -> None:
        blocks, size = int(num_blocks), int(bytes_per_block)
        if blocks < 1 or size < 1:
            raise ConfigError(f"a host arena of {blocks} blocks of {size} bytes holds nothing")
        if memory is None:
            memory = mmap.mmap(-1, blocks * size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        if view.readonly:
            raise ConfigError("the host arena's memory is read-only")
        if view.nbytes < blocks * size:
            raise ConfigError(
                f"the host arena's memory has {view.nbytes:,} bytes, but {blocks:,} blocks of {size:,} need"
                f" {blocks * size:,}"
            )
        self.records = np.frombuffer(view, np.uint8, blocks * size).reshape(blocks, size)

    @property
    def num_blocks(self) -> int:
        """Rows of ``records``."""
        return len(self.records)

    @property
    def bytes_per_block(self) -> int:
        """Length of a row."""
        return int(self.records.shape[1])

    def __repr__(self) -> str:
        return f"HostArena({self.num_blocks}, {self.bytes_per_block})"
