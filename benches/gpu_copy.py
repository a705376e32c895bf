"""How fast a GPU mover copies KV blocks, beside one contiguous pinned copy of the same bytes.

    python benches/gpu_copy.py              # everything, some minutes; 12 GiB of GPU memory are plenty
    python benches/gpu_copy.py --help

Needs an NVIDIA driver, Python 3.11 or newer and `pip install '.[cupy]'` (with a wheel of kvpager in place of the clone
no Rust); no torch. Exit status 1 if bytes are wrong, 2 without a GPU.

Goal: 95 % of the contiguous copy, both ways, for scattered blocks of a Llama-8B pool (32 layers, 8 KV heads of 128,
bf16, 16 tokens a block: 64 pieces of 32 KiB), while a kernel on another stream loses at most 5 %.

Not measured yet: no GPU was at hand when this was written. Nothing in `kvpager.movers` about speed on a GPU (the 64 KiB
from which pieces go directly, 16 thread blocks, slots of 8 MiB) is more than an estimate until this has run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import statistics
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpager
from kvpager.movers import CupyMover, CupyPool, HostArena, Plan, Ticket
from kvpager.movers.cuda import CudaDevice

SECONDS = 120.0

LAYOUTS: dict[str, tuple[str, Callable[[argparse.Namespace, int, int], tuple[list[tuple[int, ...]], int]]]] = {
    "2-first": (
        "[2, blocks, tokens, heads, dim] a layer",
        lambda o, n, b: ([(2, n, b, o.heads, o.dim)] * o.layers, 1),
    ),
    "apart": (
        "[blocks, tokens, heads, dim] a layer, K and V",
        lambda o, n, b: ([(n, b, o.heads, o.dim)] * (2 * o.layers), 0),
    ),
    "blocks-2": (
        "[blocks, 2, tokens, heads, dim] a layer",
        lambda o, n, b: ([(n, 2, b, o.heads, o.dim)] * o.layers, 0),
    ),
    "whole": ("[blocks, layers, 2, tokens, heads, dim]", lambda o, n, b: ([(n, o.layers, 2, b, o.heads, o.dim)], 0)),
    "mla": ("[blocks, tokens, 576] a layer", lambda o, n, b: ([(n, b, 576)] * o.layers, 0)),
}
"""What it is, and shapes and block axis for options, blocks and tokens a block. Elements have two bytes."""

LOAD = r"""
extern "C" __global__ void arithmetic(float* out, int rounds)
{
    float a = threadIdx.x, b = 1.0001f;
    for (int i = 0; i < rounds; ++i) { a = a * b + 0.5f; b = b * 0.9999f + 0.0001f; }
    if (a == -1.0f) out[0] = a;
}
extern "C" __global__ void traffic(const float4* in, float4* out, unsigned long long count)
{
    for (unsigned long long i = blockIdx.x * (unsigned long long) blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long) gridDim.x * blockDim.x)
        out[i] = in[i];
}
"""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GPU copies of scattered KV blocks against one contiguous pinned copy of the same bytes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="layouts (two-byte elements):\n"
        + "\n".join(f"  {name:9} {what}" for name, (what, _) in LAYOUTS.items())
        + "\n\npaths:\n"
        "  direct   every piece for itself: one driver call for all where the driver has it, else a call a piece\n"
        "  staged   a kernel gathers pieces into slots on the GPU, and one record a block crosses the bus\n\n"
        "examples:\n"
        "  python benches/gpu_copy.py --layout 2-first --block-tokens 16        # the goal's row\n"
        "  python benches/gpu_copy.py --layout 2-first --block-tokens 4 8 16 32 64 128 --no-load   # the crossover\n"
        "  python benches/gpu_copy.py --thread-blocks 4 --slot-mib 16 --json > copy.json",
    )
    add = parser.add_argument
    add("--device", type=int, default=None, help="number of the GPU (default: the current one)")
    add("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="default: all")
    add("--path", nargs="+", choices=["direct", "staged"], default=["direct", "staged"], help="default: both")
    add("--block-tokens", nargs="+", type=int, default=[16, 64], help="tokens a block (default: 16 64)")
    add("--layers", type=int, default=32)
    add("--heads", type=int, default=8, help="KV heads (default: 8)")
    add("--dim", type=int, default=128, help="elements a head (default: 128)")
    add("--mib", type=int, default=512, help="bytes of a plan, in MiB (default: 512)")
    add("--pool", type=float, default=2.0, help="the pool is so many times as large as a plan (default: 2)")
    add("--repeat", type=int, default=9, help="plans of each row; the median counts (default: 9)")
    add("--in-order", action="store_true", help="blocks one behind the other instead of scattered")
    add("--no-batch", action="store_true", help="do not use the driver's batch call")
    add("--no-load", action="store_true", help="leave the kernels on another stream out")
    add("--thread-blocks", type=int, default=16, help="of the gather and scatter kernels (default: 16)")
    add("--slots", type=int, default=3, help="of staged copies (default: 3)")
    add("--slot-mib", type=int, default=8, help="size of a slot in MiB (default: 8)")
    add("--seed", type=int, default=0, help="of the scatter (default: 0)")
    add("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args()


class Bench:
    """A GPU, the contiguous copy it is held against, and the rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = CudaDevice(args.device, thread_blocks=args.thread_blocks, batch=not args.no_batch)
        self.cupy: Any = importlib.import_module("cupy")
        self.runtime = self.cupy.cuda.runtime
        self.cupy.cuda.Device(self.device.number).use()
        self.random = np.random.default_rng(args.seed)
        self.timer = self.cupy.cuda.Stream(non_blocking=True)

    def about(self) -> dict[str, Any]:
        """Date, device and driver: what a number means nothing without."""
        properties = self.runtime.getDeviceProperties(self.device.number)
        return {
            "date": datetime.date.today().isoformat(),
            "device": properties["name"].decode(),
            "driver": self.runtime.driverGetVersion(),
            "cupy": self.cupy.__version__,
            "kvpager": kvpager.__version__,
            "batch_call": self.device.batch_reason or "used",
            "pieces": "in order" if self.args.in_order else "scattered",
        }

    def milliseconds(self, work: Callable[[], None], before: Callable[[], object] = lambda: None) -> float:
        """Median time on the GPU between two events of the timing stream around `work`, after one for warming up.

        What the CPU needs to queue `work` counts where the GPU waits for it; what `before` does, does not.
        """
        times = []
        for number in range(self.args.repeat + 1):
            before()
            start, end = (self.cupy.cuda.Event() for _ in range(2))
            start.record(self.timer)
            work()
            end.record(self.timer)
            end.synchronize()
            if number:
                times.append(self.cupy.cuda.get_elapsed_time(start, end))
        return float(statistics.median(times))

    def contiguous(self, num_bytes: int) -> dict[str, float]:
        """ms of one pinned copy of so many bytes, each way."""
        host = HostArena(1, num_bytes)
        address, owner = self.device.allocate(num_bytes)
        self.device.pin(host.records.ctypes.data, num_bytes)
        times = {}
        try:
            for way, target, source in (
                ("out", host.records.ctypes.data, address),
                ("in", address, host.records.ctypes.data),
            ):
                copy = partial(self.runtime.memcpyAsync, target, source, num_bytes, 4, self.timer.ptr)
                times[way] = self.milliseconds(copy)
            return times
        finally:
            self.device.unpin(host.records.ctypes.data)
            del owner

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each layout, block size, path and direction."""
        for layout in self.args.layout:
            for tokens in self.args.block_tokens:
                shapes, axis = LAYOUTS[layout][1](self.args, 1, tokens)
                block_bytes = 2 * sum(int(np.prod(shape)) for shape in shapes)
                count = max(1, (self.args.mib << 20) // block_bytes)
                num_blocks = max(count, int(self.args.pool * count))
                shapes, axis = LAYOUTS[layout][1](self.args, num_blocks, tokens)
                arrays = self.arrays(shapes)
                pool = CupyPool(arrays, axis, self.device)
                host = HostArena(num_blocks, pool.layout.bytes_per_block)
                floor = self.contiguous(count * block_bytes)
                for path in self.args.path:
                    slot_bytes = self.args.slot_mib << 20
                    with CupyMover(pool, host, path=path, slots=self.args.slots, slot_bytes=slot_bytes) as mover:
                        for row in self.both_ways(mover, arrays, axis, host, count, floor):
                            yield {
                                "layout": layout,
                                "block_tokens": tokens,
                                "piece_kib": pool.layout.bytes_per_block / len(pool.pieces) / 1024,
                                "path": path,
                                **row,
                            }

    def arrays(self, shapes: list[tuple[int, ...]]) -> list[Any]:
        """A pool in which no two blocks are alike: random bytes, each array the first one turned by a few."""
        noise = self.random.integers(0, 1 << 16, int(np.prod(shapes[0])), np.uint16)
        arrays = []
        for number, shape in enumerate(shapes):
            arrays.append(array := self.cupy.empty(shape, np.uint16))
            array.set(np.roll(noise, 17 * number).reshape(shape))
        self.runtime.deviceSynchronize()
        return arrays

    def both_ways(
        self, mover: CupyMover, arrays: list[Any], axis: int, host: HostArena, count: int, floor: dict[str, float]
    ) -> Iterator[dict[str, Any]]:
        """Out and then in, to other blocks; the bytes are compared in between and at the end."""
        blocks, frames, others = (self.some(host.num_blocks, count) for _ in range(3))
        before = checksums(arrays, axis, blocks)
        out, back = plan("swap_out", blocks, frames), plan("swap_in", frames, others)
        for way, each in (("out", out), ("in", back)):

            def work(each: Plan = each) -> None:
                mover.order(self.timer, self.submitted(mover, each))

            elapsed = self.milliseconds(work)
            slower = {load: self.slowdown(mover, each, load) for load in self.loads()}
            failed = [ticket for ticket in mover.wait(SECONDS) if ticket.state != "done"]
            if way == "out":
                right = [zlib.crc32(host.records[frame]) for frame in frames] == before
            else:
                right = checksums(arrays, axis, others) == before
            yield {
                "way": way,
                "gb_per_s": count * host.bytes_per_block / elapsed / 1e6,
                "percent_of_contiguous": 100 * floor[way] / elapsed,
                "slowdown_percent": slower,
                "right": right and not failed,
            }

    def submitted(self, mover: CupyMover, each: Plan) -> Ticket:
        mover.poll()
        return mover.submit(each, after=self.timer)

    def some(self, num_blocks: int, count: int) -> npt.NDArray[np.int32]:
        """Different blocks."""
        order = np.arange(num_blocks) if self.args.in_order else self.random.permutation(num_blocks)
        return order[:count].astype(np.int32)

    def loads(self) -> list[str]:
        return [] if self.args.no_load else ["arithmetic", "traffic"]

    def slowdown(self, mover: CupyMover, each: Plan, load: str) -> float:
        """How much longer a kernel takes while plans are copied than alone, in percent."""
        module = self.cupy.RawModule(code=LOAD)
        kernel = module.get_function(load)
        if load == "arithmetic":
            scratch = self.cupy.empty(1, np.float32)
            arguments: tuple[Any, ...] = (scratch, np.int32(8_000_000))
        else:
            size = 1 << 28
            first, second = (self.cupy.empty(size, np.uint8) for _ in range(2))
            arguments = (first, second, np.uint64(size // 16))
        launches = 1 if load == "arithmetic" else 100

        def run() -> None:
            with self.timer:
                for _ in range(launches):
                    kernel((1056,), (256,), arguments)

        def copies() -> None:
            """Copies enough for the time of the kernel, under way when it starts."""
            mover.wait(SECONDS)
            for _ in range(4):
                mover.submit(each)

        return 100 * (self.milliseconds(run, copies) / self.milliseconds(run, partial(mover.wait, SECONDS)) - 1)


def plan(kind: Any, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> Plan:
    """A plan as the pager makes them."""
    tiers: tuple[Any, Any] = ("device", "host") if kind == "swap_out" else ("host", "device")
    return Plan(0, 0, kind, tiers[0], sources, tiers[1], targets)


def checksums(arrays: list[Any], axis: int, blocks: npt.NDArray[np.int32]) -> list[int]:
    """CRC-32 of the record of each block, from the arrays themselves."""
    sums = [0] * len(blocks)
    for array in arrays:
        share = np.moveaxis(array.get(), axis, 0)
        for number, block in enumerate(blocks.tolist()):
            sums[number] = zlib.crc32(np.ascontiguousarray(share[block]).data, sums[number])
    return sums


def main() -> int:
    args = options()
    try:
        bench = Bench(args)
    except kvpager.ConfigError as reason:
        print(f"gpu_copy: {reason}", file=sys.stderr)
        return 2
    about = bench.about()
    if not args.json:
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        head = f"{'layout':9} {'tokens':>6} {'piece':>9} {'path':7} {'way':3} {'GB/s':>7} {'% of':>6}"
        print(f"{head}  other kernels slower by")
    rows = []
    for row in bench.rows():
        rows.append(row)
        if not args.json:
            slower = ", ".join(f"{load} {percent:.1f} %" for load, percent in row["slowdown_percent"].items())
            print(
                f"{row['layout']:9} {row['block_tokens']:6} {row['piece_kib']:5.1f} KiB {row['path']:7} {row['way']:3}"
                f" {row['gb_per_s']:7.2f} {row['percent_of_contiguous']:6.1f}  {slower}"
                f"{'' if row['right'] else '  WRONG BYTES'}",
                flush=True,
            )
    if args.json:
        print(json.dumps({**about, "rows": rows}, indent=1))
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
