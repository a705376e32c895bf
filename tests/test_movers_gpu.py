"""The GPU mover on a GPU: bytes, order against real kernels, every path.

    pytest -m gpu tests/test_movers_gpu.py

needs an NVIDIA driver, and from the package registry `kvpager[cupy]`, pytest and hypothesis (for conftest.py); neither
Rust nor torch. What is tested without a GPU: tests/test_movers_cupy.py.
"""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
from movers_support import LAYOUTS, SWAP_IN, SWAP_OUT, block, filled, plan, same

from kvpager import ConfigError
from kvpager.movers import CupyMover, CupyPool, HostArena
from kvpager.movers.cuda import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SECONDS = 60.0


@pytest.fixture(scope="module")
def device():
    """The current GPU; without one every test here is skipped, with the reason."""
    try:
        return CudaDevice()
    except ConfigError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def one_by_one(device):
    """The same GPU without the driver's batch call."""
    return CudaDevice(device.number, batch=False)


WAYS = ["direct", "staged", "direct, one by one", "staged, one by one"]


class Gpu:
    """A pool of `filled` on the GPU: the same arrays with the same strides, and the mover."""

    def __init__(self, device, name=LAYOUTS[2], seed=0, num_host=9, path=None, **options):
        import cupy

        self.cupy = cupy
        self.pool, _, self.host = filled(name, seed, num_host)
        roots = {}
        self.arrays = []
        for array in self.pool.arrays:
            root = array if array.base is None else array.base
            there = roots.setdefault(root.ctypes.data, cupy.empty(root.shape, root.dtype))
            there.set(root)
            start = there.data + (array.ctypes.data - root.ctypes.data)
            self.arrays.append(cupy.ndarray(array.shape, array.dtype, start, array.strides))
        self.roots = roots
        cupy.cuda.runtime.deviceSynchronize()  # The mover's streams do not wait for the default one.
        self.gpu = CupyPool(self.arrays, self.pool.axes, device)
        options = {"slots": 2, "slot_bytes": 2 * self.host.bytes_per_block, **options}
        self.mover = CupyMover(self.gpu, self.host, path=path, **options)

    def download(self):
        """The GPU's bytes into the host's arrays, whose blocks can then be looked at."""
        self.cupy.cuda.runtime.deviceSynchronize()
        for array in self.pool.arrays:
            root = array if array.base is None else array.base
            root[...] = self.roots[root.ctypes.data].get()
        return self.pool


@pytest.fixture(params=WAYS)
def way(request, device, one_by_one):
    path, _, single = request.param.partition(", ")
    return (one_by_one if single else device), path


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(way, name):
    world = Gpu(way[0], name, path=way[1])
    before = [block(world.pool, number) for number in range(7)]
    with world.mover as mover:
        out = mover.submit(plan(SWAP_OUT, [5, 0, 3, 6, 1], [8, 2, 0, 1, 3]))
        back = mover.submit(plan(SWAP_IN, [0, 8, 2], [1, 6, 5]))
        mover.wait(SECONDS)
    assert (out.error, back.error) == (None, None)
    world.download()
    for number, source in enumerate([0, 3, 2, 3, 4, 0, 5]):
        assert same(block(world.pool, number), before[source])


def test_plans_with_blocks_in_common_keep_their_order(way):
    for seed in range(10):
        draw = random.Random(seed)
        world = Gpu(way[0], seed=seed, path=way[1], slots=draw.choice([1, 2, 3]))
        expected = [block(world.pool, number) for number in range(7)]
        frames = {}
        with world.mover as mover:
            for number in range(40):
                count = draw.randint(1, 4)
                blocks = draw.sample(range(7), count)
                if draw.random() < 0.5 or len(frames) < count:
                    there = draw.sample(range(9), count)
                    frames.update({f: expected[b] for f, b in zip(there, blocks, strict=True)})
                    mover.submit(plan(SWAP_OUT, blocks, there, number))
                else:
                    there = draw.sample(sorted(frames), count)
                    for frame, target in zip(there, blocks, strict=True):
                        expected[target] = frames[frame]
                    mover.submit(plan(SWAP_IN, there, blocks, number))
            tickets = mover.wait(SECONDS)
        assert len(tickets) == 40
        assert all(ticket.state == "done" for ticket in tickets)
        world.download()
        assert all(same(block(world.pool, number), expected[number]) for number in range(7)), seed


SLOW = r"""
extern "C" __global__ void slow(unsigned short* array, unsigned long long count, unsigned short value, long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x) array[i] = value;
}
"""


def test_copies_come_after_a_slow_kernel_and_kernels_after_copies(way):
    """W12: the kernel fills the pool tens of milliseconds later; the copy out must carry what it wrote, and the next
    kernel on the compute stream must see what the copy in brought."""
    world = Gpu(way[0], path=way[1])
    cupy, array = world.cupy, world.arrays[0]
    kernel = cupy.RawKernel(SLOW, "slow")
    compute = cupy.cuda.Stream(non_blocking=True)
    with world.mover as mover:
        with compute:
            kernel((1,), (256,), (array, np.uint64(array.size), np.uint16(0x1234), np.int64(50_000_000)))
        mover.submit(plan(SWAP_OUT, [1], [0]), after=compute)
        ticket = mover.submit(plan(SWAP_IN, [5], [2]), after=compute.record())
        mover.order(compute, ticket)
        seen = np.empty(array.shape, array.dtype)
        cupy.cuda.runtime.memcpyAsync(seen.ctypes.data, array.data.ptr, seen.nbytes, 2, compute.ptr)
        compute.synchronize()
        mover.wait(SECONDS)
    assert (world.host.records[0].view(np.uint16)[:128] == 0x1234).all()
    assert np.array_equal(seen[0, 2].ravel().view(np.uint8), world.host.records[5][:128])
    assert (seen[:, 3].view(np.uint16) == 0x1234).all()


def test_submit_does_not_wait_for_the_gpu(way):
    """A slow kernel is running: the tickets are not done when `submit` has returned."""
    world = Gpu(way[0], path=way[1])
    cupy, array = world.cupy, world.arrays[0]
    kernel = cupy.RawKernel(SLOW, "slow")
    compute = cupy.cuda.Stream(non_blocking=True)
    kernel.compile()
    with world.mover as mover:
        with compute:
            kernel((1,), (256,), (array, np.uint64(0), np.uint16(0), np.int64(500_000_000)))
        ticket = mover.submit(plan(SWAP_OUT, [1], [0]), after=compute)
        assert mover.wait(0.0) == []
        assert not ticket.ended
        assert mover.wait(SECONDS) == [ticket]


@pytest.mark.parametrize("name", LAYOUTS)
def test_copy_blocks(device, name):
    world = Gpu(device, name)
    before = [block(world.pool, number) for number in range(7)]
    stream = world.cupy.cuda.Stream(non_blocking=True)
    world.gpu.copy_blocks(np.array([[1, 4], [1, 0], [6, 2]], np.int32), stream)
    world.gpu.copy_blocks(np.array([[4, 5]], np.int32), stream.ptr)
    world.download()
    world.mover.close()
    for number, source in enumerate([1, 1, 6, 3, 1, 1, 6]):
        assert same(block(world.pool, number), before[source])


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_llama_shape_by_checksum(device, path):
    """32 layers, 32 KiB pieces, 64 scattered blocks of 2 MiB, out, back to other blocks, and out again."""
    import zlib

    import cupy

    rng = np.random.default_rng(5)
    layers = [cupy.empty((2, 128, 16, 8, 128), np.uint16) for _ in range(32)]
    for layer in layers:
        layer.set(rng.integers(0, 1 << 16, layer.shape, np.uint16))
    cupy.cuda.runtime.deviceSynchronize()
    pool = CupyPool(layers, 1, device)
    host = HostArena(128, pool.layout.bytes_per_block)
    blocks, frames, again = (rng.permutation(128)[:64] for _ in range(3))
    with CupyMover(pool, host, path=path) as mover:
        assert mover.pinned
        mover.submit(plan(SWAP_OUT, blocks, frames))
        mover.wait(SECONDS)
        sums = [zlib.crc32(host.records[frame]) for frame in frames]
        parts = [layer.get() for layer in layers]
        for b, checksum in zip(blocks, sums, strict=True):
            assert zlib.crc32(b"".join(part[kv, b].tobytes() for part in parts for kv in (0, 1))) == checksum
        mover.submit(plan(SWAP_IN, frames, again))
        mover.submit(plan(SWAP_OUT, again, rng.permutation(frames)))
        mover.wait(SECONDS)
        parts = [layer.get() for layer in layers]
        for b, checksum in zip(again, sums, strict=True):
            assert zlib.crc32(b"".join(part[kv, b].tobytes() for part in parts for kv in (0, 1))) == checksum


def test_arrays_of_other_libraries(device):
    """torch's and jax's bfloat16 pools, where they are installed."""
    found = [name for name in ("torch", "jax") if importlib.util.find_spec(name)]
    pools = []
    if "torch" in found:
        import torch

        if torch.cuda.is_available():
            pools.append(torch.arange(7 * 64, device="cuda").reshape(7, 64).to(torch.bfloat16))
    if "jax" in found:
        import jax

        if any(each.platform == "gpu" for each in jax.devices()):
            pools.append(jax.numpy.arange(7 * 64, dtype=jax.numpy.bfloat16).reshape(7, 64))
    if not pools:
        pytest.skip("neither torch nor jax is installed with CUDA")
    for array in pools:
        if hasattr(array, "block_until_ready"):
            array.block_until_ready()
        else:
            torch.cuda.synchronize()
        pool = CupyPool([array], 0, device)
        host = HostArena(3, 128)
        with CupyMover(pool, host) as mover:
            mover.submit(plan(SWAP_OUT, [2], [1]))
            mover.wait(SECONDS)
        # A bfloat16 is the upper half of a float32.
        expected = (np.arange(128, 192, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        assert np.array_equal(host.records[1].view(np.uint16), expected)


def test_host_arrays_are_refused(device):
    with pytest.raises(ConfigError, match="array 0 is in host memory"):
        CupyPool([np.zeros((3, 4))], 0, device)
