"""The host tier's memory: one mapping, a record for each block."""

from __future__ import annotations

import contextlib
import mmap
import operator
import sys
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = ["HostArena"]

_OFFSET = 512


class HostArena:
    """``records``: uint8 [num_blocks, bytes_per_block]. A block is one row, so another tier can write it as it is.

    The memory is one private mapping, with large pages where the system has them, and touched when it is first
    written (or pinned: a mover for a GPU does that). ``memory=`` takes a writable buffer of the caller's instead:
    shared memory, or a mapped file. ConfigError if a size is below 1 or the buffer is too small or read-only;
    MemoryError or OSError if the system refuses the mapping.

    The first record is ``offset`` bytes into the memory. 512 suits direct I/O on most disks, and keeps records away
    from where NumPy's large arrays begin, 16 bytes into a page: a processor takes a load for one of a store just before
    it if their addresses end in the same 12 bits, and copies that stay some bytes behind each other in that sense run
    at a fifth of the speed (measured: 0.20 of memcpy at an offset of 0, 0.95 at 512).
    """

    records: npt.NDArray[np.uint8]

    def __init__(
        self,
        num_blocks: SupportsIndex,
        bytes_per_block: SupportsIndex,
        memory: Any = None,
        *,
        offset: int | None = None,
    ) -> None:
        """`offset`: None is 512 in memory of its own, and 0 in the caller's."""
        blocks, size = operator.index(num_blocks), operator.index(bytes_per_block)
        if blocks < 1 or size < 1:
            raise ConfigError(f"a host arena of {blocks} blocks of {size} bytes holds nothing")
        start = (_OFFSET if memory is None else 0) if offset is None else offset
        if start < 0:
            raise ConfigError(f"offset {start} of a host arena is negative")
        if memory is None:
            # Private, since large pages are seldom given to shared memory: 0.08 of memcpy faster.
            if start + blocks * size > sys.maxsize:
                raise MemoryError(f"no machine has {start + blocks * size:,} bytes for a host arena")
            memory = mmap.mmap(-1, start + blocks * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A wish: a kernel may be built without large pages.
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        if view.readonly:
            raise ConfigError("the host arena's memory is read-only")
        if view.nbytes < start + blocks * size:
            raise ConfigError(
                f"the host arena's memory has {view.nbytes:,} bytes, but {blocks:,} blocks of {size:,} from"
                f" {start:,} on need {start + blocks * size:,}"
            )
        self.records = np.frombuffer(view, np.uint8, blocks * size, start).reshape(blocks, size)

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
