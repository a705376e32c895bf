"""How fast NumpyMover copies scattered blocks, beside one memcpy of the same bytes, in one run.

The memcpy runs in a worker thread too: on a machine whose cores have other work, a thread that has just been woken is
slower at anything (a memcpy in the main thread was up to 1.6 times as fast here).

    python benches/numpy_copy.py [--mib 256] [--rounds 9] [--json]

2026-11-30, AMD EPYC (2 shared cores, 32 MiB L3), Python 3.11.7, numpy 2.4.6:

    a plan of 128 MiB, median of 11        pieces of 16     32     64    256   1024 KiB      (1 = memcpy)
    one piece a block                out          0.66   0.80   0.94   1.05   1.06
                                     in           0.63   0.78   0.97   0.97   0.95
    K and V, [2, blocks, ...]        out          0.84   0.94   0.91   1.11   1.01
                                     in           0.99   0.84   0.87   1.04   0.93
    [16, 2, blocks, ...]             out          0.98   1.05   1.02   1.20   1.01
                                     in           0.89   0.97   0.98   1.03   1.01

The machine had other work (load 10), so a tenth of any of these is noise: the 64 KiB of the second layout came to 0.93
and 0.91 a minute later.

Conclusion: from 256 KiB on, and where one array holds many pieces of a block (one assignment copies them all), it is a
memcpy, give or take the noise. At 64 KiB it is 0.87 to 0.97: an assignment costs 0.4 us besides, 3 % of such a piece,
the worker 0.15 us more, and contiguous memory that is copied in pieces of 64 KiB comes to 0.93 already. What did not
pay: sorting a plan by destination and words of 8 bytes (both within the noise), gathering through a buffer in the cache
(0.6), copies that keep the interpreter lock (as fast, but a thread that wants the lock back waits 5 ms each time). What
did: records that do not begin where pages do (0.20 before, see HostArena), a private mapping, which gets large pages
(0.05 to 0.1), and looking up from the copy once in a MiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from kvpager.movers import HostArena, NumpyMover, NumpyPool, Plan

SHAPES: dict[str, Callable[[int, int], tuple[tuple[int, ...], int, int]]] = {
    "one piece a block": lambda blocks, piece: ((blocks, piece), 0, 1),
    "K and V, [2, blocks, ...]": lambda blocks, piece: ((2, blocks, piece), 1, 2),
    "[16, 2, blocks, ...]": lambda blocks, piece: ((16, 2, blocks, piece), 2, 32),
}
"""Shape and block axis of the one array for a number of blocks and a length of pieces; and pieces of a block."""


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, piece: int, total: int, rounds: int) -> dict[str, Any]:
    """Medians; mover and memcpy take turns, so that both see the same machine."""
    pieces = SHAPES[name](1, piece)[2]
    count = max(1, total // (piece * pieces))
    shape, axis, _ = SHAPES[name](2 * count, piece)
    pool = NumpyPool([np.ones(shape, np.uint8)], axis)
    host = HostArena(2 * count, pool.layout.bytes_per_block)
    host.records[...] = 2
    rng = np.random.default_rng(0)
    here, there = (rng.permutation(2 * count)[:count].astype(np.int32) for _ in range(2))
    plans = {
        "out": Plan(0, 0, "swap_out", "device", here, "host", there),
        "in": Plan(1, 0, "swap_in", "host", there, "device", here),
    }
    source, target = (np.ones(count * pool.layout.bytes_per_block, np.uint8) for _ in range(2))
    times: dict[str, list[float]] = {"out": [], "in": [], "memcpy": []}
    with NumpyMover(pool, host) as mover, ThreadPoolExecutor(1) as thread:

        def copy(plan: Plan) -> None:
            ticket = mover.submit(plan)
            mover.wait(60.0)
            assert ticket.state == "done", ticket.error

        for number in range(rounds + 1):
            taken = {way: seconds(partial(copy, plan)) for way, plan in plans.items()}
            taken["memcpy"] = seconds(lambda: thread.submit(np.copyto, target, source).result())
            if number:
                for way, each in taken.items():
                    times[way].append(each)
    floor = statistics.median(times["memcpy"])
    return {
        "layout": name,
        "piece_kib": piece / 1024,
        "memcpy_gb_per_s": source.nbytes / floor / 1e9,
        "out": floor / statistics.median(times["out"]),
        "in": floor / statistics.median(times["in"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="NumpyMover's scattered blocks against one memcpy of the same bytes.")
    parser.add_argument("--mib", type=int, default=128, help="bytes of a plan, in MiB (default: 128)")
    parser.add_argument("--rounds", type=int, default=9, help="medians of so many (default: 9)")
    parser.add_argument("--pieces", type=int, nargs="+", default=[16, 32, 64, 256, 1024], help="lengths in KiB")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    args = parser.parse_args()
    rows = []
    if not args.json:
        print(f"{'layout':26} {'piece':>9} {'memcpy GB/s':>12} {'out':>6} {'in':>6}   (1 = memcpy)")
    for name in SHAPES:
        for piece in args.pieces:
            rows.append(row := measure(name, piece << 10, args.mib << 20, args.rounds))
            if not args.json:
                print(
                    f"{name:26} {piece:5} KiB {row['memcpy_gb_per_s']:12.2f} {row['out']:6.2f} {row['in']:6.2f}",
                    flush=True,
                )
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
