"""An NVIDIA GPU by way of cupy, which is imported when the first device is made."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError
from .device import Addresses, Kernel
from .driver import BatchCopy
from .kernels import KERNELS, OPTIONS, SOURCE, THREADS, WIDTHS
from .memory import Memory

__all__ = ["CudaDevice"]

_SUCCESS, _NOT_READY, _ALREADY_PINNED = 0, 600, 712
_ANY_DIRECTION = 4
"""cudaMemcpyDefault: the driver sees from the addresses which way it goes."""
_PORTABLE, _MAPPED = 1, 2


class CudaDevice:
    """See :class:`kvpager.movers.device.Device`. Streams are objects with a ``ptr``, events likewise."""

    def __init__(self, number: int | None = None, *, thread_blocks: int = 16, batch: bool = True) -> None:
        """`number`: which GPU, None for cupy's current one. `thread_blocks`: of 512 threads, for the kernels.

        Compiles the kernels (cupy keeps the result on disk), and tries the driver's batch call once; ``batch_reason``
        says why it is not used, if it is not. Raises ConfigError if cupy, its compiler (NVRTC) or the GPU is missing.
        """
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as missing:
            raise ConfigError(
                f"cupy cannot be imported ({missing}): pip install '.[cupy]' in a clone of kvpager"
            ) from missing
        self._runtime: Any = self._cupy.cuda.runtime
        try:
            self.number: int = self._runtime.getDevice() if number is None else number
            with self.current():
                self._runtime.memGetInfo()  # Sets the device up, or fails.
        except self._runtime.CUDARuntimeError as absent:
            raise ConfigError(f"no CUDA device can be used: {absent}") from absent
        module = self._cupy.RawModule(code=SOURCE, options=OPTIONS)
        try:
            with self.current():
                module.compile()
        except Exception as fault:  # A missing compiler has no type of its own.
            raise ConfigError(f"the kernels cannot be compiled: {fault}") from fault
        self._functions = {(k, w): module.get_function(f"{k}_{w}") for k in KERNELS for w in WIDTHS}
        self._thread_blocks = thread_blocks
        self._batch: BatchCopy | None = None
        self.batch_reason = "switched off"
        if batch:
            with self.current():
                self._try_batch()

    def _try_batch(self) -> None:
        """Takes the driver's batch call into use if it copies two words right, there and back."""
        loaded = BatchCopy.load()
        if isinstance(loaded, str):
            self.batch_reason = loaded
            return
        out, back, stream = self.pinned(64), self.pinned(64), self.stream()
        out[:], back[:] = np.arange(64), -1
        device, owner = self.allocate(256)
        sizes = np.array([4, 4], np.uint64)
        ends = [np.array([start, start + 128], np.uint64) for start in (out.ctypes.data, device, back.ctypes.data)]
        try:
            loaded(ends[1], ends[0], sizes, stream.ptr)
            loaded(ends[2], ends[1], sizes, stream.ptr)
            stream.synchronize()
        except (TransferError, self._runtime.CUDARuntimeError) as refused:
            self.batch_reason = str(refused)
            return
        del owner
        if (back[0], back[32]) != (0, 32) or (np.delete(back, [0, 32]) != -1).any():
            self.batch_reason = "the driver's batch call copied wrong bytes"
            return
        self._batch, self.batch_reason = loaded, ""

    @property
    def batched(self) -> bool:
        """See :attr:`Device.batched`."""
        return self._batch is not None

    def check(self, memories: Sequence[Memory]) -> None:
        """See :meth:`Device.check`."""
        for number, memory in enumerate(memories):
            if memory.device is None:
                raise ConfigError(f"array {number} is in host memory, not on a GPU")
            where = self._runtime.pointerGetAttributes(memory.address).device
            if where != self.number:
                raise ConfigError(f"array {number} is on GPU {where}, and this is GPU {self.number}")

    def current(self) -> AbstractContextManager[Any]:
        """See :meth:`Device.current`."""
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self.number)
        return device

    def stream(self) -> Any:
        """See :meth:`Device.stream`."""
        return self._cupy.cuda.Stream(non_blocking=True)

    def event(self) -> Any:
        """See :meth:`Device.event`."""
        return self._cupy.cuda.Event(disable_timing=True)

    def stream_of(self, work: Any) -> Any:
        """A cupy or torch stream, anything with ``__cuda_stream__``, or the handle as an int."""
        if isinstance(work, int):
            return SimpleNamespace(ptr=work)
        if hasattr(work, "__cuda_stream__"):
            return SimpleNamespace(ptr=int(work.__cuda_stream__()[1]), owner=work)
        for name in ("ptr", "cuda_stream"):
            if hasattr(work, name):
                return SimpleNamespace(ptr=int(getattr(work, name)), owner=work)
        raise TypeError(f"a {type(work).__name__} is no CUDA stream: give cupy's, torch's, or the handle as an int")

    def event_of(self, work: Any) -> Any:
        """A cupy or torch event."""
        if isinstance(work, self._cupy.cuda.Event):
            return work
        if hasattr(work, "cuda_event"):
            return SimpleNamespace(ptr=int(work.cuda_event), owner=work)
        return None

    def record(self, event: Any, stream: Any) -> None:
        """See :meth:`Device.record`."""
        self._runtime.eventRecord(event.ptr, stream.ptr)

    def wait(self, stream: Any, event: Any) -> None:
        """See :meth:`Device.wait`."""
        self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def happened(self, event: Any) -> bool:
        """See :meth:`Device.happened`."""
        status = self._runtime.eventQuery(event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise TransferError(f"the CUDA device failed with error {status}: nothing on it can be trusted now")
        return bool(status == _SUCCESS)

    def copy(self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: Any) -> None:
        """See :meth:`Device.copy`: one call of the driver, or one for each piece."""
        if self._batch is not None and len(sizes) > 1:
            self._batch(destinations, sources, sizes, stream.ptr)
            return
        for target, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._runtime.memcpyAsync(target, source, size, _ANY_DIRECTION, stream.ptr)

    def launch(self, kernel: Kernel, width: int, items: int, arguments: Sequence[int], stream: Any) -> None:
        """See :meth:`Device.launch`."""
        grid = (min(items, self._thread_blocks), 1, 1)
        function = self._functions[kernel, width].kernel
        function(grid, (THREADS, 1, 1), tuple(np.uint64(each) for each in arguments), stream=stream)

    def allocate(self, num_bytes: int) -> tuple[int, object]:
        """Straight from the driver: cupy's pool would order its reuse by streams that it does not know here."""
        memory = self._cupy.cuda.Memory(num_bytes)
        return int(memory.ptr), memory

    def pinned(self, count: int) -> npt.NDArray[np.int32]:
        """See :meth:`Device.pinned`. Small: cupy rounds up to a power of two."""
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(4 * count), np.int32, count)

    def pin(self, address: int, num_bytes: int) -> bool:
        """See :meth:`Device.pin`. Touches every page, so it takes as long as the kernel needs to clear them."""
        try:
            self._runtime.hostRegister(address, num_bytes, _PORTABLE | _MAPPED)
        except self._runtime.CUDARuntimeError as refused:
            if refused.status == _ALREADY_PINNED:
                return False
            raise TransferError(f"the driver did not pin {num_bytes:,} bytes: {refused}") from refused
        return True

    def unpin(self, address: int) -> None:
        """See :meth:`Device.unpin`."""
        self._runtime.hostUnregister(address)
