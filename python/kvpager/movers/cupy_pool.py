"""A KV pool on a GPU: its arrays, the table of pieces that the kernels read, and copies from block to block."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from .base import check_copies
from .cuda import CudaDevice
from .device import Device, Event, Stream
from .kernels import WIDTHS
from .layout import Layout
from .memory import describe

__all__ = ["CupyPool"]


class CupyPool:
    """Arrays of any library that offers ``__cuda_array_interface__`` or DLPack: cupy, torch, jax; none is imported.

    The arrays are kept, so their memory stays. It must also stay where it is: give a jax pool again (a new pool and
    mover) whenever a computation has returned it at another address.
    """

    layout: Layout

    def __init__(
        self,
        arrays: Sequence[Any],
        block_axis: SupportsIndex | Iterable[SupportsIndex] = 0,
        device: Device | int | None = None,
    ) -> None:
        """`device`: the GPU's number, None for cupy's current one, or a :class:`kvpager.movers.cuda.CudaDevice`.

        Raises ConfigError: see :class:`kvpager.movers.Layout`; also without cupy or a GPU, and where an array is not
        on that GPU.
        """
        self.device: Device = CudaDevice(device) if device is None or isinstance(device, int) else device
        memories = [describe(array) for array in arrays]
        self.layout = Layout(memories, block_axis)
        self.device.check(memories)
        self.pieces: npt.NDArray[np.int64] = self.layout.pieces()
        common = int(np.gcd.reduce([*self.pieces.ravel().tolist(), self.layout.bytes_per_block]))
        self.width = next(width for width in WIDTHS if common % width == 0)
        """Bytes that a thread copies at once: the widest word that fits all addresses and lengths."""
        with self.device.current():
            self.table, self._table_owner = self.device.allocate(self.pieces.nbytes)
            self.indices = IndexBuffers(self.device)
            stream, event = self.device.stream(), self.device.event()
            copy_one(self.device, self.table, self.pieces.ctypes.data, self.pieces.nbytes, stream)
            self.device.record(event, stream)
            while not self.device.happened(event):
                pass
        self._lent: list[tuple[Event, IndexBuffer]] = []
        self._lock = threading.Lock()

    def copy_blocks(self, copies: npt.NDArray[np.int32], stream: Any) -> None:
        """Carries out copy-on-write pairs, ``step.copies``: int32 [n, 2], source and destination, order-free.

        Queued on the caller's stream (cupy's, torch's, or a handle as an int), in one upload and one kernel; returns
        at once. What is queued there later sees the copies. TransferError, with nothing copied, if an id is no block.
        Not to be captured into a CUDA graph: each call has an index buffer of its own.
        """
        copies = check_copies(copies, self.layout.num_blocks)
        if not len(copies):
            return
        device = self.device
        with self._lock, device.current():
            work = device.stream_of(stream)
            self._lent = [each for each in self._lent if not self._returned(*each)]
            buffer = self.indices.take(copies.size)
            self.indices.upload(buffer, copies.ravel(), work)
            arguments = (self.table, len(self.pieces), buffer.address, len(copies))
            device.launch("move", self.width, len(copies) * len(self.pieces), arguments, work)
            event = device.event()
            device.record(event, work)
            self._lent.append((event, buffer))

    def _returned(self, event: Event, buffer: IndexBuffer) -> bool:
        """Takes a buffer back if the copies that read it are over."""
        if not self.device.happened(event):
            return False
        self.indices.give(buffer)
        return True


class IndexBuffer(NamedTuple):
    """Block ids on their way to a kernel: written in pinned memory, read by the kernel on the device."""

    host: npt.NDArray[np.int32]
    address: int
    owner: object


class IndexBuffers:
    """Buffers that go round: one is written again only after it was given back, when nothing reads it any more."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[IndexBuffer] = []
        self._lock = threading.Lock()

    def take(self, count: int) -> IndexBuffer:
        """A free buffer of at least `count` ids, or a new one."""
        with self._lock:
            for number, buffer in enumerate(self._free):
                if len(buffer.host) >= count:
                    return self._free.pop(number)
        capacity = max(1024, 1 << (count - 1).bit_length())
        return IndexBuffer(self._device.pinned(capacity), *self._device.allocate(4 * capacity))

    def upload(self, buffer: IndexBuffer, ids: npt.NDArray[np.int32], stream: Stream) -> None:
        """Writes the ids and queues their copy to the device."""
        if not len(ids):
            return
        buffer.host[: len(ids)] = ids
        copy_one(self._device, buffer.address, buffer.host.ctypes.data, 4 * len(ids), stream)

    def give(self, buffer: IndexBuffer) -> None:
        """Takes a buffer back."""
        with self._lock:
            self._free.append(buffer)


def copy_one(device: Device, target: int, source: int, num_bytes: int, stream: Stream) -> None:
    """Queues one copy."""
    to, by, size = (np.array([each], np.uint64) for each in (target, source, num_bytes))
    device.copy(to, by, size, stream)
