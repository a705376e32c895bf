"""How fast DiskStore is, beside plain sequential reads and writes of the same rows, in one run.

python benches/disk_store.py [--mib 256] [--rounds 9] [--records 1000000] [--directory DIR] [--json]

"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvpager.tiers import DiskStore

BLOCK_SIZE = 16
Sync = Literal["segment", "always", "never"]
CASES: tuple[tuple[Sync, bool], ...] = (("never", False), ("segment", False), ("segment", True))


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def records(count: int, seed: int = 0) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 256, (count, 32), np.uint8)
    metas = rng.integers(0, 256, (count, 32 + 4 * BLOCK_SIZE), np.uint8)
    metas[1:, :32] = keys[:-1]
    return keys, metas


def write_plain(path: Path, rows: npt.NDArray[np.uint8], syncs: bool) -> None:
    with open(path, "wb", buffering=0) as file:
        for row in rows:
            assert file.write(row.data) == row.nbytes
        if syncs:
            os.fdatasync(file.fileno())


def read_plain(path: Path, rows: npt.NDArray[np.uint8]) -> None:
    with open(path, "rb", buffering=0) as file:
        for row in rows:
            assert file.readinto(row.data) == row.nbytes


def drop_from_cache(directory: Path) -> None:
    """Clean pages of these files leave the page cache, so that the next read is one of the disk."""
    for path in directory.iterdir():
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def opened(path: Path, row_bytes: int, sync: Sync) -> DiskStore:
    return DiskStore(path, row_bytes=row_bytes, block_size=BLOCK_SIZE, max_bytes=8 << 30, sync=sync)


def put_and_close(store: DiskStore, *records: Any) -> None:
    assert store.put_many(*records).all()
    store.close()


def speed(directory: Path, row_bytes: int, total: int, rounds: int, sync: Sync, cold: bool) -> dict[str, Any]:
    """Best times; store and plain file take turns, so that both see the same machine."""
    count = total // row_bytes
    keys, metas = records(count)
    rows = np.random.default_rng(1).integers(0, 256, (count, row_bytes), np.uint8)
    back = np.ones_like(rows)
    ids = np.arange(count, dtype=np.int32)
    taken: dict[str, list[float]] = {"put": [], "write": [], "get": [], "read": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            plain, path = Path(folder, "plain"), Path(folder, "store")
            taken["write"].append(seconds(partial(write_plain, plain, rows, sync != "never")))
            taken["put"].append(seconds(partial(put_and_close, opened(path, row_bytes, sync), keys, metas, rows, ids)))
            with opened(path, row_bytes, sync) as store:
                for _ in range(1 if cold else 3):
                    if cold:
                        drop_from_cache(Path(folder))
                        drop_from_cache(path)
                    taken["read"].append(seconds(partial(read_plain, plain, back)))
                    taken["get"].append(seconds(partial(store.get_many, keys, metas, back, ids)))
                assert (back == rows).all()
    best = {what: min(times) for what, times in taken.items()}
    return {
        "row_kib": row_bytes / 1024,
        "sync": sync,
        "cache": "cold" if cold else "warm",
        "write_gb_per_s": rows.nbytes / best["write"] / 1e9,
        "put": best["write"] / best["put"],
        "read_gb_per_s": rows.nbytes / best["read"] / 1e9,
        "get": best["read"] / best["get"],
    }


def index_and_start(directory: Path, count: int) -> dict[str, Any]:
    """Memory of the index, at its worst while it grows to so many records; and the time to open them.

    While the table of keys grows it also holds its old self, half as large, which `stats` does not see: it is added.
    """
    row_bytes, step, worst, before = 64, 1000, 0.0, 0
    keys, metas = records(count)
    rows = np.zeros((1, row_bytes), np.uint8)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder)
        with opened(path, row_bytes, "never") as store:
            for at in range(0, count, step):
                part = slice(at, at + step)
                ids = np.zeros(len(keys[part]), np.int32)
                assert store.put_many(keys[part], metas[part], rows, ids).all()
                index_bytes = store.stats()["index_bytes"]
                # The entries of a segment are reserved at its start: with few records, that is all there is.
                if at >= count // 2:
                    grown = max(index_bytes - before, 0)
                    worst = max(worst, (index_bytes + grown) / (at + step))
                before = index_bytes
        clean = min(seconds(lambda: opened(path, row_bytes, "never").close()) for _ in range(3))
        drop_from_cache(path)
        cold = seconds(lambda: opened(path, row_bytes, "never").close())
        for keys_file in path.glob("*.keys"):
            keys_file.unlink()
        torn = seconds(lambda: opened(path, row_bytes, "never").close())
    return {
        "records": count,
        "index_bytes": before / count,
        "worst": worst,
        "open_s": clean,
        "open_cold_s": cold,
        "open_without_keys_s": torn,
    }


def sqlite(directory: Path, row_bytes: int, total: int) -> dict[str, Any]:
    """The embedded engine of the standard library, with the same rows: what a log of our own is measured against."""
    count = total // row_bytes
    keys, metas = records(count)
    rows = np.random.default_rng(1).integers(0, 256, (count, row_bytes), np.uint8)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        base = sqlite3.connect(Path(folder, "base"))
        base.execute("pragma journal_mode=wal")
        base.execute("pragma synchronous=normal")
        base.execute("create table blocks (key blob primary key, meta blob, payload blob)")

        def put() -> None:
            with base:
                base.executemany(
                    "insert into blocks values (?, ?, ?)",
                    ((keys[i].tobytes(), metas[i].tobytes(), rows[i].data) for i in range(count)),
                )

        def get() -> None:
            for i in range(count):
                (payload,) = base.execute("select payload from blocks where key = ?", (keys[i].tobytes(),)).fetchone()
                back[i] = np.frombuffer(payload, np.uint8)

        back = np.ones_like(rows)
        taken = seconds(put)
        read = min(seconds(get) for _ in range(3))
        base.close()
    return {
        "row_kib": row_bytes / 1024,
        "put_gb_per_s": rows.nbytes / taken / 1e9,
        "get_gb_per_s": rows.nbytes / read / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="DiskStore against plain sequential reads and writes of the same rows."
    )
    parser.add_argument("--mib", type=int, default=256, help="bytes of the rows, in MiB (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="best of so many (default: 5)")
    parser.add_argument("--records", type=int, default=1_000_000, help="records to open (default: 1000000)")
    parser.add_argument("--directory", type=Path, help="where to write (default: that of temporary files)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.gettempdir())
    total = args.mib << 20
    result: dict[str, Any] = {"speed": [], "sqlite": []}
    if not args.json:
        print(
            f"{'row':>10} {'sync':>8} {'cache':>6} {'write GB/s':>11} {'put':>6} {'read GB/s':>10} {'get':>6}"
            "   (1 = plain file)"
        )
    for row_bytes in (1 << 20, 64 << 10):
        for sync, cold in CASES:
            row = speed(directory, row_bytes, total, args.rounds, sync, cold)
            result["speed"].append(row)
            if not args.json:
                print(
                    f"{row['row_kib']:6.0f} KiB {sync:>8} {row['cache']:>6} {row['write_gb_per_s']:11.2f}"
                    f" {row['put']:6.2f} {row['read_gb_per_s']:10.2f} {row['get']:6.2f}",
                    flush=True,
                )
    for row_bytes in (1 << 20, 64 << 10):
        result["sqlite"].append(row := sqlite(directory, row_bytes, total))
        if not args.json:
            print(
                f"sqlite3, {row['row_kib']:.0f} KiB: put {row['put_gb_per_s']:.2f} GB/s,"
                f" get {row['get_gb_per_s']:.2f} GB/s"
            )
    result["start"] = row = index_and_start(directory, args.records)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"{row['records']:,} records: index {row['index_bytes']:.1f} bytes a record (worst {row['worst']:.1f}),"
            f" opened in {row['open_s']:.2f} s, from the disk in {row['open_cold_s']:.2f} s,"
            f" without keys in {row['open_without_keys_s']:.2f} s"
        )


if __name__ == "__main__":
    main()
