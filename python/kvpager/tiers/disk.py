"""The disk store: a directory that outlives the process."""

from __future__ import annotations

import operator
import os
import warnings
from types import TracebackType
from typing import Literal, Self, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from .._core import LogStore
from ..errors import ConfigError
from .store import Bytes, Shape

__all__ = ["DiskStore", "Sync"]

Sync: TypeAlias = Literal["segment", "always", "never"]
"""When a `DiskStore` makes the system write: at the end of each segment, in each ``put_many``, or not at all."""


class DiskStore:
    """A `Store` in a directory, which outlives the process; one process has it open at a time.

    ``path`` is made if it is not there. ``identity`` says whose blocks these are (weights, dtype, layout, rank): a
    store of another identity, ``row_bytes`` or ``block_size`` is refused with ConfigError, which names both.

    All files of the store together never have more than ``max_bytes``, each counted in whole pages of 4,096; where
    there is no room, the *segment* (file of records) that was used longest ago is dropped whole; of those that one call
    used, the newest, since blocks lie behind their parents. A segment has ``segment_bytes`` but at least 8 records;
    None takes a sixteenth of the limit, at most 64 MiB (of a store above 16 GiB a 256th). When segments were used is
    kept in memory only: after a restart the oldest goes first.

    What ``put_many`` has answered survives the end of the process, however it ends. ``sync`` says what survives a
    loss of power: ``"segment"`` full segments and what was there at ``close``; ``"always"`` what ``put_many`` has
    answered; ``"never"`` what the system happened to write. What was torn is a miss in any case.

    ConfigError as above and for sizes outside their limits; TransferError if another process writes to the directory,
    or the system refuses (permissions, a read-only disk). A full disk is no error but ``dropped`` and
    ``write_errors``.

    Memory: some 40 bytes a record and 60 at most (24 of them for each slot of the segment being filled, used or not).
    Opening reads 24 bytes a record, or looks through the last segment of a process that did not close.

    >>> import tempfile, numpy as np
    >>> rows = np.arange(3 * 4096, dtype=np.uint8).reshape(3, 4096)      # a host arena: a block is a row
    >>> keys, metas = np.full((2, 32), 7, np.uint8), np.zeros((2, 32 + 4 * 16), np.uint8)
    >>> keys[1], metas[1, :32], metas[1, 32] = 8, keys[0], 99            # the second block's parent is the first
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with DiskStore(path, row_bytes=4096, block_size=16, max_bytes=1 << 24, identity=b"llama bf16") as store:
    ...         print(store.put_many(keys, metas, rows, np.array([0, 2], np.int32)))
    ...     with DiskStore(path, row_bytes=4096, block_size=16, max_bytes=1 << 24, identity=b"llama bf16") as store:
    ...         print(store.get_many(keys, metas, rows, np.array([1, 0], np.int32)), store.delete_many(keys[:1]))
    [ True  True]
    [ True  True] 2
    """

    _log: LogStore
    _is_closed = True  # until it has been opened

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        row_bytes: SupportsIndex,
        block_size: SupportsIndex,
        max_bytes: SupportsIndex,
        identity: bytes = b"",
        sync: Sync = "segment",
        segment_bytes: SupportsIndex | None = None,
    ) -> None:
        self._shape = Shape.of(operator.index(row_bytes), operator.index(block_size))
        self._path = os.fspath(path)
        self._process = os.getpid()
        self._log = LogStore(
            self._path,
            self._shape.row_bytes,
            self._shape.meta_bytes,
            _size("max_bytes", max_bytes),
            identity,
            sync,
            None if segment_bytes is None else _size("segment_bytes", segment_bytes),
        )
        self._is_closed = False

    @property
    def path(self) -> str:
        """The directory."""
        return self._path

    @property
    def meta_bytes(self) -> int:
        """Bytes of a meta."""
        return self._shape.meta_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a payload."""
        return self._shape.row_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment."""
        return self._log.segment_bytes

    @property
    def is_local(self) -> bool:
        """True: see `Store`."""
        return True

    def contains_many(self, keys: Bytes) -> npt.NDArray[np.bool_]:
        """Which keys are there. Looks at the index only, and at half of each key."""
        return self._log.contains_many(self._shape.keys(keys).reshape(-1))

    def get_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Read records into ``rows[row_ids]``, in the order of the disk; large payloads straight into their rows."""
        asked = self._shape.records(keys, metas, rows, row_ids, writes_rows=True)
        return self._log.get_many(asked.keys.reshape(-1), asked.metas.reshape(-1), asked.rows, asked.row_ids)

    def put_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Append ``rows[row_ids]`` to the last segment. Of what is there already, key and meta are compared."""
        given = self._shape.records(keys, metas, rows, row_ids, writes_rows=False)
        return self._log.put_many(given.keys.reshape(-1), given.metas.reshape(-1), given.rows, given.row_ids)

    def delete_many(self, keys: Bytes) -> int:
        """Delete records and all below them: zeros over their heads, on the disk when this returns (but for sync
        "never").

        Their space comes back with their segment, at once if no other record is in it. Needs 17 bytes for each record
        of the store meanwhile.
        """
        return self._log.delete_many(self._shape.keys(keys).reshape(-1))

    def clear(self) -> None:
        """Delete all segments."""
        self._log.clear()

    def close(self) -> None:
        """Sync (but for "never"), write the keys of the last segment, and let others open the directory."""
        if not self._is_closed:
            self._log.close()
            self._is_closed = True

    def stats(self) -> dict[str, int]:
        """As `Store.stats` says, and of this store:

        ``bytes`` is what is taken of the limit: the files, and what the segment being filled will have. ``segments``;
        ``index_bytes`` of memory; ``discarded_segments`` that were unusable when the store was opened;
        ``read_errors`` and ``write_errors``: operations that the system refused. After ``close``, 0 records and
        segments.
        """
        return self._log.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DiskStore({self._path!r}, row_bytes={self.row_bytes}, meta_bytes={self.meta_bytes})"

    def __del__(self) -> None:
        # A child of fork drops its copy in silence: the store is its parent's.
        if not self._is_closed and os.getpid() == self._process:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)
            self.close()


def _size(name: str, value: SupportsIndex) -> int:
    size = operator.index(value)
    if not 1 <= size < 2**63:
        raise ConfigError(f"{name} is {size}; it must be 1 to {2**63 - 1}")
    return size
