"""What a store of blocks is, and the checks of arguments that all stores share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError

__all__ = ["KEY_BYTES", "ROOT", "Arguments", "Bytes", "Shape", "Store", "without"]

KEY_BYTES = 32
"""Bytes of a key, and of the parent's key at the start of a meta."""

ROOT = bytes(8)
"""How the key of what is above a first block begins, and no block's."""

Bytes = npt.NDArray[np.uint8]


class Store(Protocol):
    """A mapping from keys of 32 bytes to *records*: a *meta*, exact bytes that say what the block is, and a *payload*.

    A key is a hint, the meta proves: a record is read only where its meta equals the one that the caller expects,
    byte by byte. The first 32 bytes of a meta are the key of the parent block; behind them are the block's tokens,
    little-endian int32, so ``meta_bytes`` is ``32 + 4 * block_size``. Nothing else is known here of either.

    Arguments: ``keys`` uint8 [n, 32]; ``metas`` uint8 [n, meta_bytes]; ``rows`` uint8 [num_rows, row_bytes],
    C-contiguous; ``row_ids`` int32 [n], which rows of it. TypeError for another type or dtype, ValueError for another
    shape, a row id out of range, one that comes twice in ``get_many``, or read-only rows there; then nothing has
    happened. The rows are lent to the call until it returns: to write to them meanwhile spoils their bytes, and
    nothing else.

    One thread may read while another writes; copies and I/O run with the interpreter lock released. After ``close``,
    every call but ``close`` and ``stats`` raises TransferError.
    """

    @property
    def meta_bytes(self) -> int:
        """Bytes of a meta."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a payload."""

    @property
    def is_local(self) -> bool:
        """True if ``contains_many`` answers from memory, in the calling thread: no I/O, no wait."""

    def contains_many(self, keys: Bytes) -> npt.NDArray[np.bool_]:
        """Which keys are there: bool [n]. A hint, since no meta is compared. Never raises for a store out of reach."""

    def get_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Read records into ``rows[row_ids]`` and mark them as used.

        bool [n]: True where the record of that key and that meta was read whole, with a right checksum. Where False,
        the row's bytes are undefined.
        """

    def put_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Store ``rows[row_ids]``. A record that is there already is not written again; one of another meta is
        replaced.

        bool [n]: True where the record is stored now. False where it was dropped, which is counted: the limit, a full
        disk, a dead server. Raises for nothing that the caller cannot help.
        """

    def delete_many(self, keys: Bytes) -> int:
        """Delete these records and every record below them, for good: after a restart they are gone, too.

        What stays are the records whose chains of parent keys lead to a root (a key that begins with eight zero bytes,
        and of which there is no record) without any of `keys`. So what hangs in the air goes as well: where a record
        between was lost (evicted, say), nobody knows what it was below. Of a root that is among `keys` all is below; a
        store may take all records for that. Answers how many were deleted. Linear in the number of records.
        TransferError if it cannot be made durable.
        """

    def clear(self) -> None:
        """Delete everything, for good. TransferError if it cannot be made durable."""

    def close(self) -> None:
        """Write what is left to write and let go of the medium. Idempotent."""

    def stats(self) -> dict[str, int]:
        """Numbers of the store since it was opened.

        Every store has ``records`` and ``bytes`` that are there, the limit ``max_bytes``, and counts of records:
        ``hits`` and ``misses`` of ``get_many``; ``stored``, ``present`` (there already) and ``dropped`` of
        ``put_many``; ``corrupt`` (found damaged, a miss), ``evicted`` for room, ``deleted``. Others are the store's
        own.
        """


@dataclass(frozen=True, slots=True)
class Arguments:
    """Checked arguments of ``get_many`` and ``put_many``: keys, metas and row ids C-contiguous, rows as they are."""

    keys: Bytes
    metas: Bytes
    rows: Bytes
    row_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a store's records, and the checks that follow from them."""

    row_bytes: int
    meta_bytes: int

    @classmethod
    def of(cls, row_bytes: int, block_size: int) -> Shape:
        """The shape for blocks of `block_size` tokens. ConfigError outside the limits."""
        for name, value, high in (("row_bytes", row_bytes, 2**30), ("block_size", block_size, 1024)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if not 1 <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be 1 to {high}")
        return cls(int(row_bytes), KEY_BYTES + 4 * int(block_size))

    def keys(self, keys: Bytes) -> Bytes:
        """Keys, checked and C-contiguous."""
        return np.ascontiguousarray(_checked("keys", keys, np.uint8, (None, KEY_BYTES)))

    def records(
        self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32], *, writes_rows: bool
    ) -> Arguments:
        """Arguments of ``get_many`` (which writes to rows) or ``put_many``, checked."""
        keys = self.keys(keys)
        metas = np.ascontiguousarray(_checked("metas", metas, np.uint8, (len(keys), self.meta_bytes)))
        row_ids = np.ascontiguousarray(_checked("row_ids", row_ids, np.int32, (len(keys),)))
        rows = _checked("rows", rows, np.uint8, (None, self.row_bytes))
        if not rows.flags.c_contiguous:
            raise ValueError("rows must be C-contiguous: give the arena itself, not a part of its columns")
        if len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < len(rows):
            wrong = row_ids[(row_ids < 0) | (row_ids >= len(rows))][0]
            raise ValueError(f"row id {wrong} is outside 0..{len(rows) - 1}")
        if writes_rows:
            if not rows.flags.writeable:
                raise ValueError("rows are read-only: get_many writes to them")
            if len(np.unique(row_ids)) < len(row_ids):
                raise ValueError("a row id comes twice: each record needs a row of its own")
        return Arguments(keys, metas, rows, row_ids)


def _checked(name: str, array: Any, dtype: type[np.generic], shape: tuple[int | None, ...]) -> Any:
    expected = f"{np.dtype(dtype).name} [{', '.join('n' if size is None else str(size) for size in shape)}]"
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be an array, {expected}, not {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be {expected}, not of dtype {array.dtype}")
    if array.ndim != len(shape) or any(
        size is not None and size != there for size, there in zip(shape, array.shape, strict=True)
    ):
        raise ValueError(f"{name} must be {expected}, not {list(array.shape)}")
    return array


def told(answer: Any, number: int) -> npt.NDArray[np.bool_]:
    """What a store answered of so many records. TransferError for anything but bool [n]: nobody knows what it means."""
    if not (isinstance(answer, np.ndarray) and answer.dtype == np.bool_ and answer.shape == (number,)):
        what = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, np.ndarray) else type(answer).__name__
        raise TransferError(f"the store answered {what}, not bool [{number}]: nothing of it is believed")
    return answer


def without(keys: Bytes, parents: dict[bytes, bytes]) -> set[bytes]:
    """What goes with `keys` (see `Store.delete_many`), of records whose parents these are."""
    doomed = {key.tobytes() for key in keys}
    children: dict[bytes, list[bytes]] = {}
    for key, parent in parents.items():
        children.setdefault(parent, []).append(key)
    kept = set[bytes]()
    open_ = [parent for parent in children if parent.startswith(ROOT) and parent not in doomed]
    while open_:
        found = [child for child in children.get(open_.pop(), ()) if child not in doomed]
        kept.update(found)
        open_ += found
    return parents.keys() - kept
