"""Layouts of KV pools: what a block is in each, against a plain statement, and what is refused."""

from __future__ import annotations

import ctypes
import mmap
import random

import numpy as np
import pytest
from movers_support import LAYOUTS, block, filled, pools

from kvpager import ConfigError
from kvpager.movers import HostArena, Layout, Memory, NumpyPool, describe


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_has_the_pieces_that_its_layout_says(name):
    pool, numpy_pool, _ = filled(name)
    layout = numpy_pool.layout
    assert [(len(share.piece_offsets), share.piece_bytes) for share in layout.shares] == pool.pieces
    assert layout.bytes_per_block == sum(count * size for count, size in pool.pieces)
    assert layout.num_blocks == 7
    assert f"{layout.bytes_per_block:,} bytes" in str(layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_and_views_are_the_same_bytes(name):
    """Two ways to a block: addresses (what a GPU's mover uses) and views (what NumPy's does)."""
    pool, numpy_pool, host = filled(name)
    whole = [array if array.base is None else array.base for array in pool.arrays]
    memory = {array.ctypes.data: array.reshape(-1).view(np.uint8) for array in whole}
    for number in range(7):
        record = np.full(host.bytes_per_block, 255, np.uint8)
        for address, stride, offset, size in numpy_pool.layout.pieces().tolist():
            start = max(base for base in memory if base <= address)
            begin = address - start + number * stride
            record[offset : offset + size] = memory[start][begin : begin + size]
        for view, there in zip(numpy_pool.views, numpy_pool.records(host), strict=True):
            there[3] = view[number]
        assert np.array_equal(host.records[3], record)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_record_brings_a_block_back(name):
    pool, numpy_pool, host = filled(name)
    before = [block(pool, number) for number in range(7)]
    for view, there in zip(numpy_pool.views, numpy_pool.records(host), strict=True):
        there[8] = view[2]
        view[5] = there[8]
    for number in range(7):
        expected = before[2] if number == 5 else before[number]
        assert all(np.array_equal(a, b) for a, b in zip(block(pool, number), expected, strict=True))


def drawn(draw, blocks):
    """A random array: rank 1 to 5, padded, transposed, cut; and which axis counts its blocks."""
    rank = draw.randint(1, 5)
    axis = draw.randrange(rank)
    shape = [blocks if each == axis else draw.choice([1, 1, 2, 3, 5]) for each in range(rank)]
    order = draw.sample(range(rank), rank)
    steps = [draw.choice([1, 1, 1, 2]) for _ in shape]
    padding = [draw.choice([0, 0, 0, 1]) for _ in shape]
    whole = np.zeros([shape[each] * steps[each] + padding[each] for each in order], draw.choice("bhild"))
    view = whole.transpose(np.argsort(order))
    return view[tuple(slice(0, n * step, step) for n, step in zip(shape, steps, strict=True))], axis


def test_random_layouts(seed):
    """Addresses and views say the same, records are full and bring blocks back, and nothing else is touched."""
    draw = random.Random(seed)
    for _ in range(200):
        blocks = draw.choice([1, 2, 4])
        parts = [drawn(draw, blocks) for _ in range(draw.randint(1, 3))]
        for array, _ in parts:
            array[...] = np.frombuffer(draw.randbytes(array.size), np.uint8).reshape(array.shape)
        pool = NumpyPool([array for array, _ in parts], [axis for _, axis in parts])
        host = HostArena(blocks + 1, pool.layout.bytes_per_block)
        host.records[...] = 255
        before = [array.copy() for array, _ in parts]
        for number in range(blocks):
            for view, there in zip(pool.views, pool.records(host), strict=True):
                there[number] = view[number]
            gathered = np.full(host.bytes_per_block, 254, np.uint8)
            for address, stride, offset, size in pool.layout.pieces().tolist():
                source = (ctypes.c_uint8 * size).from_address(address + number * stride)
                gathered[offset : offset + size] = np.frombuffer(source, np.uint8)
            assert np.array_equal(gathered, host.records[number])
        assert (host.records[blocks] == 255).all()
        turned = [(number + 1) % blocks for number in range(blocks)]
        for number in range(blocks):
            for view, there in zip(pool.views, pool.records(host), strict=True):
                view[turned[number]] = there[number]
        for (array, axis), kept in zip(parts, before, strict=True):
            assert np.array_equal(np.take(array, turned, axis), kept)


def test_views_touch_nothing_but_their_blocks():
    pool, numpy_pool, host = filled("views of a larger array")
    whole = pool.arrays[0].base
    before = whole.copy()
    records = numpy_pool.records(host)
    numpy_pool.views[0][4] = records[0][1]
    before[4, 0] = whole[4, 0]
    assert np.array_equal(whole, before)


@pytest.mark.parametrize(
    ("arrays", "axis", "message"),
    [
        ([], 0, "at least one array"),
        ([np.zeros((4, 2))], 2, r"array 0 of shape \(4, 2\) has no axis 2"),
        ([np.zeros((4, 2))], -3, "has no axis -3"),
        ([np.float32(1.0)], 0, "not a NumPy array"),
        ([np.zeros(())], 0, "no axis 0"),
        ([np.zeros((4, 0))], 0, "is empty"),
        ([np.zeros((4, 2)), np.zeros((5, 2))], 0, "array 1 .* has 5 blocks along axis 0, but array 0 .* has 4"),
        ([np.zeros((2, 9)), np.zeros((9, 2))], 0, "is block_axis right"),
        ([np.zeros((4, 2)), np.zeros((4, 2))], [0], "1 block axes were given for 2 arrays"),
        ([np.broadcast_to(np.zeros(4), (3, 4))], 0, "read-only"),
        ([np.lib.stride_tricks.as_strided(np.zeros(8), (4, 3), (8, 8))], 0, "overlaps itself"),
        ([np.zeros((4, 2))[::-1]], 0, "runs backwards"),
        ([np.zeros((4, 2), object)], 0, "Python objects"),
        ([[1, 2, 3]], 0, "a list, not a NumPy array"),
    ],
)
def test_what_is_no_pool_is_refused(arrays, axis, message):
    with pytest.raises(ConfigError, match=message):
        NumpyPool(arrays, axis)


def test_an_array_given_twice_is_refused():
    array = np.zeros((4, 2))
    with pytest.raises(ConfigError, match="array 2 begins where array 0 does"):
        NumpyPool([array, np.zeros((4, 2)), array], 0)


def test_read_only_arrays_are_refused():
    array = np.zeros((4, 2))
    array.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        NumpyPool([array])


class Interface:
    """An array of a GPU, as cupy and torch describe theirs."""

    def __init__(self, **interface):
        self.__cuda_array_interface__ = {"version": 3, **interface}


class Tensor:
    """Somebody's array that speaks DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_the_cuda_array_interface_is_read():
    described = describe(Interface(shape=(5, 3), typestr="<f2", data=(4096, False), strides=None))
    assert (described.address, described.shape, described.strides) == (4096, (5, 3), (6, 2))
    assert (described.itemsize, described.device, described.read_only) == (2, -1, False)
    described = describe(Interface(shape=(5, 3), typestr="|V2", data=(4096, True), strides=(2, 10)))
    assert (described.strides, described.itemsize, described.read_only) == ((2, 10), 2, True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_dlpack_says_what_numpy_says(name):
    for array in pools()[name].arrays:
        ours, theirs = describe(array), describe(Tensor(array))
        assert (theirs.address, theirs.shape, theirs.itemsize) == (ours.address, ours.shape, ours.itemsize)
        assert theirs.device is None
        # A library may give axes of one element any stride.
        long = [axis for axis, size in enumerate(array.shape) if size > 1]
        assert [theirs.strides[axis] for axis in long] == [ours.strides[axis] for axis in long]


def test_dlpack_keeps_the_memory():
    described = describe(Tensor(np.arange(12, dtype=np.int32)))
    view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * 12).from_address(described.address))
    assert view.tolist() == list(range(12))


def test_what_is_no_array_is_refused():
    with pytest.raises(ConfigError, match="a str is no array"):
        describe("pool")


def test_a_pool_of_a_gpu_is_only_arithmetic():
    """A Llama-8B pool, never allocated: 32 layers, K and V together."""
    shape = (2, 10_000, 16, 8, 128)
    size = 2 * 10_000 * 16 * 8 * 128 * 2
    strides = tuple(2 * int(np.prod(shape[axis + 1 :])) for axis in range(5))
    layout = Layout([Memory(1 << 40 | layer * size, shape, strides, 2, 0, False, None) for layer in range(32)], 1)
    assert layout.bytes_per_block == 2 << 20
    pieces = layout.pieces()
    assert pieces.shape == (64, 4)
    assert set(pieces[:, 3].tolist()) == {32 << 10}
    assert pieces[:, 2].tolist() == [number * (32 << 10) for number in range(64)]
    assert str(layout) == "10,000 blocks of 2,097,152 bytes in 32 arrays; pieces of a block: 64 of 32,768 bytes"


def test_an_arena_is_one_mapping():
    host = HostArena(3, 1000)
    assert host.records.shape == (3, 1000)
    assert host.records.ctypes.data % mmap.PAGESIZE == 512
    assert HostArena(3, 1000, offset=0).records.ctypes.data % mmap.PAGESIZE == 0
    assert not host.records.any()
    assert repr(host) == "HostArena(3, 1000)"


def test_an_arena_in_memory_of_the_caller():
    memory = bytearray(40)
    HostArena(4, 10, memory).records[1] = 7
    assert memory == bytes(10) + b"\7" * 10 + bytes(20)
    with pytest.raises(ConfigError, match="40 bytes, but 5 blocks of 10 from 0 on need 50"):
        HostArena(5, 10, memory)
    with pytest.raises(ConfigError, match="read-only"):
        HostArena(4, 10, bytes(40))
    with pytest.raises(ConfigError, match="holds nothing"):
        HostArena(0, 10)
    with pytest.raises(ConfigError, match="from 1 on need 41"):
        HostArena(4, 10, memory, offset=1)
    with pytest.raises(ConfigError, match="negative"):
        HostArena(4, 10, offset=-1)


def test_an_arena_of_another_block_size_is_refused():
    _, pool, _ = filled(LAYOUTS[0])
    with pytest.raises(ConfigError, match="blocks have 100 bytes, the pool's 768"):
        pool.records(HostArena(2, 100))
