"""Resident memory of a cached block, measured in a process of its own.

Only a fresh process tells what a pool costs: in a used one the allocator has memory left over from other things.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_SIZE = 16
SHAPES = ("chains", "mixed")


def bytes_per_cached_block(shape: str, *, reference: bool = False, num_blocks: int = 200_000) -> float | None:
    """Growth of resident memory from before the pool exists until it is full of cached blocks, per block.

    *chains*: prompts of 512 blocks that share nothing. *mixed*: 50 system prompts of 32 blocks, below them chains of
    1 to 64 blocks (geometric, mean 8). None where the system does not tell the resident memory.
    """
    if _resident() is None:
        return None
    implementation = "reference" if reference else "core"
    program = f"from {__name__} import measure; print(measure({shape!r}, {num_blocks}, {implementation!r}))"
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _trimmed() -> int:
    gc.collect()
    # Without glibc, what the allocator keeps back is counted as the pool's.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    resident = _resident()
    assert resident is not None
    return resident


def _fill(pager: Any, shape: str, rng: np.random.Generator) -> None:
    def text(blocks: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(0, 32_000, blocks * BLOCK_SIZE, dtype=np.int32)

    systems = [text(32) for _ in range(50)]
    while free := pager.num_free_blocks:
        if shape == "chains":
            prompt = text(min(512, free))
        else:
            system = systems[rng.integers(len(systems))]
            prompt = np.concatenate([system, text(min(64, int(rng.geometric(1 / 8))))])
            if len(prompt) // BLOCK_SIZE > free:
                prompt = text(free)
        with pager.admit(prompt) as sequence:
            sequence.commit()


def measure(shape: str, num_blocks: int, implementation: str) -> float:
    """What `bytes_per_cached_block` runs in its process."""
    from .. import Pager, reference

    pager_class: Any = reference.Pager if implementation == "reference" else Pager
    rng = np.random.Generator(np.random.PCG64(0))
    _fill(pager_class(2048, BLOCK_SIZE), shape, rng)  # imports and first-time allocations are not the pool's
    before = _trimmed()
    pager = pager_class(num_blocks, BLOCK_SIZE)
    _fill(pager, shape, rng)
    after = _trimmed()
    cached: int = pager.stats().cached_blocks
    assert cached == num_blocks
    return (after - before) / cached
