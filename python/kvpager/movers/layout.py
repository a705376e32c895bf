"""Where the bytes of a block are: arrays and a block axis in, pieces out. Arithmetic only: no memory is touched.

A server's KV pool is one array or many, K and V together or apart, block after block or layer after layer. All of that
comes to the same: a block has a share in each array, and a share is one or more *pieces*, runs of bytes without a gap::

    one array [layers, 2, num_blocks, block_size, heads, dim], block_axis=2

    layer 0  K  [ b0 | b1 | b2 | ... ]
             V  [ b0 | b1 | b2 | ... ]       block 1 = 2 x layers pieces of block_size x heads x dim elements
    layer 1  K  [ b0 | b1 | b2 | ... ]
             ...
    record of block 1 on the host:  [ 0 K | 0 V | 1 K | ... ]        bytes_per_block, in one piece

The *record* is how a block is kept outside the pool: its shares in the order of the arrays, each in the order of its
addresses. Axes may be in any order in memory (a transposed view is fine), and elements may have any type.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .memory import Memory

__all__ = ["Layout", "Share"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one array holds of every block."""

    memory: Memory
    axes: tuple[int, ...]
    """The block axis, then the others from the largest stride to the smallest."""
    block_stride: int
    """Bytes from one block to the next."""
    piece_offsets: npt.NDArray[np.int64]
    """int64 [p]: bytes from the start of block 0 to each of its pieces, ascending."""
    piece_bytes: int
    """Length of each piece in bytes."""
    record_offset: int
    """Bytes of the record that come before this share."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the share, for each block."""
        return len(self.piece_offsets) * self.piece_bytes


class Layout:
    """All shares of a pool. ``print(layout)`` tells blocks, bytes and pieces."""

    shares: tuple[Share, ...]
    num_blocks: int
    bytes_per_block: int
    """Over all arrays: the length of a record."""

    def __init__(self, memories: Sequence[Memory], block_axis: SupportsIndex | Iterable[SupportsIndex] = 0) -> None:
        """`block_axis` numbers the axis that counts blocks: one for all arrays, or one for each. Negative counts back.

        Raises ConfigError where an array has no such axis, is empty, read-only, overlaps itself, or is given twice, and
        where two arrays disagree about the number of blocks.
        """
        if not memories:
            raise ConfigError("a layout needs at least one array")
        axes = _axes(block_axis, len(memories))
        shares: list[Share] = []
        offset = 0
        for number, (memory, axis) in enumerate(zip(memories, axes, strict=True)):
            share = _share(memory, axis, offset, f"array {number} of shape {memory.shape}")
            shares.append(share)
            offset += share.num_bytes
        self.shares = tuple(shares)
        self.bytes_per_block = offset
        self.num_blocks = _agreed(shares)
        addresses = [memory.address for memory in memories]
        for number, address in enumerate(addresses):
            if address in addresses[:number]:
                first = addresses.index(address)
                raise ConfigError(f"array {number} begins where array {first} does: was it given twice?")

    def pieces(self) -> npt.NDArray[np.int64]:
        """int64 [p, 4], a row for each piece: address in block 0, bytes to the next block, offset in the record, bytes.

        Piece p of block b is at ``pieces[p, 0] + b * pieces[p, 1]``, and at ``pieces[p, 2]`` of the record.
        """
        rows = []
        for share in self.shares:
            rows.append(table := np.empty((len(share.piece_offsets), 4), np.int64))
            table[:, 0] = share.memory.address + share.piece_offsets
            table[:, 1] = share.block_stride
            table[:, 2] = share.record_offset + np.arange(len(table)) * share.piece_bytes
            table[:, 3] = share.piece_bytes
        return np.concatenate(rows)

    def __str__(self) -> str:
        kinds = [(len(share.piece_offsets), share.piece_bytes) for share in self.shares]
        lengths = sorted({length for _, length in kinds}, reverse=True)
        pieces = " and ".join(f"{sum(n for n, each in kinds if each == size)} of {size:,} bytes" for size in lengths)
        arrays = "1 array" if len(self.shares) == 1 else f"{len(self.shares)} arrays"
        return f"{self.num_blocks:,} blocks of {self.bytes_per_block:,} bytes in {arrays}; pieces of a block: {pieces}"

    def __repr__(self) -> str:
        return f"<Layout: {self}>"


def _axes(block_axis: SupportsIndex | Iterable[SupportsIndex], count: int) -> list[int]:
    """A block axis for each array."""
    if isinstance(block_axis, Iterable):
        axes = [operator.index(axis) for axis in block_axis]
        if len(axes) != count:
            raise ConfigError(f"{len(axes)} block axes were given for {count} arrays: give one for all or one for each")
        return axes
    return [operator.index(block_axis)] * count


def _share(memory: Memory, axis: int, record_offset: int, name: str) -> Share:
    """One array's part of every block."""
    rank = len(memory.shape)
    if not -rank <= axis < rank:
        raise ConfigError(f"{name} has no axis {axis} to count blocks")
    if memory.read_only:
        raise ConfigError(f"{name} is read-only: blocks are copied into it as well")
    if 0 in memory.shape:
        raise ConfigError(f"{name} is empty")
    axis %= rank
    others = sorted((other for other in range(rank) if other != axis), key=lambda a: (-memory.strides[a], a))
    _check_overlap(memory, name)
    piece_bytes = memory.itemsize
    outer = [other for other in others if memory.shape[other] > 1]
    while outer and memory.strides[outer[-1]] == piece_bytes:
        piece_bytes *= memory.shape[outer.pop()]
    offsets = np.zeros(1, np.int64)
    for other in outer:
        steps = np.arange(memory.shape[other], dtype=np.int64) * memory.strides[other]
        offsets = (offsets[:, None] + steps).ravel()
    return Share(memory, (axis, *others), memory.strides[axis], offsets, piece_bytes, record_offset)


def _check_overlap(memory: Memory, name: str) -> None:
    """Every element has bytes of its own: each stride is at least the span of all smaller ones."""
    span = memory.itemsize
    for stride, size in sorted((s, n) for s, n in zip(memory.strides, memory.shape, strict=True) if n > 1):
        if stride < span:
            how = "runs backwards" if stride < 0 else "overlaps itself"
            raise ConfigError(f"{name}, strides {memory.strides}, {how}: give the array that it is a view of")
        span += stride * (size - 1)


def _agreed(shares: Sequence[Share]) -> int:
    """The number of blocks of all arrays."""
    counts = [share.memory.shape[share.axes[0]] for share in shares]
    for number, count in enumerate(counts):
        if count != counts[0]:
            raise ConfigError(
                f"array {number} of shape {shares[number].memory.shape} has {count} blocks along axis"
                f" {shares[number].axes[0]}, but array 0 of shape {shares[0].memory.shape} has {counts[0]} along axis"
                f" {shares[0].axes[0]}: is block_axis right?"
            )
    return counts[0]
