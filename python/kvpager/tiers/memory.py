"""The store interface in plain Python: what the others are tested against, and a store for tests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError
from .store import KEY_BYTES, Bytes, Shape, without

__all__ = ["MemoryStore"]


class MemoryStore:
    """A `Store` in this process's memory: a dictionary that forgets what was used longest ago.

    A record counts as its key, meta and payload; ``max_bytes`` is for all of them. ConfigError if not one fits.
    """

    def __init__(self, row_bytes: int, block_size: int, max_bytes: int) -> None:
        self._shape = Shape.of(row_bytes, block_size)
        self._record_bytes = KEY_BYTES + self.meta_bytes + self.row_bytes
        if max_bytes < self._record_bytes:
            raise ConfigError(f"max_bytes is {max_bytes}; one record has {self._record_bytes} bytes")
        self._max_bytes = max_bytes
        self._records: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._counts = dict.fromkeys(("hits", "misses", "stored", "present", "evicted", "deleted"), 0)
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def meta_bytes(self) -> int:
        """Bytes of a meta."""
        return self._shape.meta_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a payload."""
        return self._shape.row_bytes

    @property
    def is_local(self) -> bool:
        """True: see `Store`."""
        return True

    def contains_many(self, keys: Bytes) -> npt.NDArray[np.bool_]:
        """Which keys are there."""
        keys = self._shape.keys(keys)
        with self._lock:
            self._check_open()
            return np.array([key.tobytes() in self._records for key in keys], bool)

    def get_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Copy records into ``rows[row_ids]``."""
        asked = self._shape.records(keys, metas, rows, row_ids, writes_rows=True)
        found = np.zeros(len(asked.keys), bool)
        with self._lock:
            self._check_open()
            for i, (key, meta) in enumerate(_each(asked.keys, asked.metas)):
                record = self._records.get(key)
                if record is not None and record[0] == meta:
                    asked.rows[asked.row_ids[i]] = np.frombuffer(record[1], np.uint8)
                    self._records.move_to_end(key)
                    found[i] = True
            self._counts["hits"] += int(found.sum())
            self._counts["misses"] += int((~found).sum())
        return found

    def put_many(self, keys: Bytes, metas: Bytes, rows: Bytes, row_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Copy ``rows[row_ids]``. All True: what does not fit any more is evicted, and that may be of this call's."""
        given = self._shape.records(keys, metas, rows, row_ids, writes_rows=False)
        with self._lock:
            self._check_open()
            for i, (key, meta) in enumerate(_each(given.keys, given.metas)):
                record = self._records.get(key)
                if record is not None and record[0] == meta:
                    self._counts["present"] += 1
                else:
                    self._records[key] = (meta, given.rows[given.row_ids[i]].tobytes())
                    self._counts["stored"] += 1
                self._records.move_to_end(key)
                while len(self._records) * self._record_bytes > self._max_bytes:
                    self._records.popitem(last=False)
                    self._counts["evicted"] += 1
            return np.array([key.tobytes() in self._records for key in given.keys], bool)

    def delete_many(self, keys: Bytes) -> int:
        """Delete records, all below them, and what hangs in the air."""
        keys = self._shape.keys(keys)
        with self._lock:
            self._check_open()
            if not len(keys):
                return 0
            gone = without(keys, {key: meta[:KEY_BYTES] for key, (meta, _) in self._records.items()})
            for key in gone:
                del self._records[key]
            self._counts["deleted"] += len(gone)
            return len(gone)

    def clear(self) -> None:
        """Delete everything."""
        with self._lock:
            self._check_open()
            self._counts["deleted"] += len(self._records)
            self._records.clear()

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._is_closed = True
            self._records.clear()

    def stats(self) -> dict[str, int]:
        """As `Store.stats` says; ``dropped`` and ``corrupt`` are 0."""
        with self._lock:
            return {
                "records": len(self._records),
                "bytes": len(self._records) * self._record_bytes,
                "max_bytes": self._max_bytes,
                **self._counts,
                "dropped": 0,
                "corrupt": 0,
            }

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError("the store is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _each(keys: Bytes, metas: Bytes) -> list[tuple[bytes, bytes]]:
    return [(key.tobytes(), meta.tobytes()) for key, meta in zip(keys, metas, strict=True)]
