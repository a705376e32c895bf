"""What the tests of the movers share: pools of every layout, plans, and a plain statement of what a copy does."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpager.movers import HostArena, NumpyPool, Plan

SWAP_OUT = ("swap_out", "device", "host")
SWAP_IN = ("swap_in", "host", "device")


class Shape(NamedTuple):
    """A small pool: blocks, tokens a block, KV heads, elements a head, layers."""

    blocks: int = 7
    block_size: int = 4
    heads: int = 2
    dim: int = 8
    layers: int = 3


SHAPE = Shape()


class Pool(NamedTuple):
    """Arrays, the axis that counts blocks in each, and the pieces that a block has in each: (number, bytes)."""

    arrays: list[npt.NDArray[Any]]
    axes: int | list[int]
    pieces: list[tuple[int, int]]


def pools(shape: Shape = SHAPE) -> dict[str, Pool]:
    """Every layout that the documentation names."""
    n, b, h, d, layers = shape
    each = b * h * d * 2

    def kv(*sizes: int) -> npt.NDArray[Any]:
        return np.zeros(sizes, np.float16)

    interleaved = [kv(n, 2, b, h, d) for _ in range(layers)]
    return {
        "K and V apart, a layer an array, NHD": Pool([kv(n, b, h, d) for _ in range(2 * layers)], 0, [(1, each)] * 6),
        "K and V apart, a layer an array, HND": Pool([kv(n, h, b, d) for _ in range(2 * layers)], 0, [(1, each)] * 6),
        "[2, num_blocks, ...], a layer an array": Pool([kv(2, n, b, h, d) for _ in range(layers)], 1, [(2, each)] * 3),
        "[num_blocks, 2, ...], a layer an array": Pool(interleaved, 0, [(1, 2 * each)] * 3),
        "one array, [layers, 2, num_blocks, ...]": Pool([kv(layers, 2, n, b, h, d)], 2, [(2 * layers, each)]),
        "one array, [layers, num_blocks, 2, ...]": Pool([kv(layers, n, 2, b, h, d)], 1, [(layers, 2 * each)]),
        "one array, [num_blocks, layers, 2, ...]": Pool([kv(n, layers, 2, b, h, d)], 0, [(1, 2 * layers * each)]),
        "heads outside, [heads, num_blocks, ...]": Pool(
            [kv(h, n, b, d) for _ in range(layers)], 1, [(h, b * d * 2)] * 3
        ),
        "a latent (MLA), [num_blocks, block_size, 576]": Pool(
            [kv(n, b, 576) for _ in range(layers)], 0, [(1, b * 1152)] * 3
        ),
        "bytes with scales beside": Pool(
            [np.zeros((2, n, b, h, d), np.uint8), np.zeros((n, 2, h), np.float32), np.zeros((h, n), np.float32)],
            [1, 0, -1],
            [(2, b * h * d), (1, 8 * h), (h, 4)],
        ),
        "HND as a transposed view of NHD": Pool([kv(n, b, h, d).transpose(0, 2, 1, 3)], 0, [(1, each)]),
        "views of a larger array": Pool([interleaved[0][:, 0], interleaved[0][:, 1]], 0, [(1, each)] * 2),
        "rows with a gap": Pool([kv(n, b, h, 2 * d)[..., :d]], 0, [(b * h, 2 * d)]),
        "every other element": Pool([kv(n, b, h, 2 * d)[..., ::2]], 0, [(b * h * d, 2)]),
        "the block axis last": Pool([kv(b, h, n)], 2, [(b * h, 2)]),
        "no other axis": Pool([np.zeros(n, np.int64)], 0, [(1, 8)]),
    }


LAYOUTS = list(pools())


def filled(name: str, seed: int = 0, num_host: int = 9) -> tuple[Pool, NumpyPool, HostArena]:
    """A pool of a layout and an arena, both full of random bytes."""
    pool = pools()[name]
    rng = np.random.default_rng(seed)
    for array in pool.arrays:
        noise = np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape)
        # Integers, so that no bit pattern is a NaN that compares unequal to itself.
        array[...] = noise if array.dtype.kind in "iu" else rng.integers(0, 1000, array.shape)
    numpy_pool = NumpyPool(pool.arrays, pool.axes)
    host = HostArena(num_host, numpy_pool.layout.bytes_per_block)
    host.records[...] = rng.integers(0, 100, host.records.shape, np.uint8)
    return pool, numpy_pool, host


def block(pool: Pool, number: int) -> list[npt.NDArray[Any]]:
    """A block's share of each array, copied: the statement that the layouts are held against."""
    axes = pool.axes if isinstance(pool.axes, list) else [pool.axes] * len(pool.arrays)
    return [np.take(array, number, axis).copy() for array, axis in zip(pool.arrays, axes, strict=True)]


def same(one: list[npt.NDArray[Any]], other: list[npt.NDArray[Any]]) -> bool:
    """True if two blocks have equal bytes."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def plan(kind: tuple[str, str, str], sources: Any, destinations: Any, number: int = 0) -> Plan:
    """A plan as a pager would make it."""
    name, source, destination = kind
    ids = [np.array(side, np.int32) for side in (sources, destinations)]
    for side in ids:
        side.flags.writeable = False
    return Plan(number, 0, name, source, ids[0], destination, ids[1])  # type: ignore[arg-type]
