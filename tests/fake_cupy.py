"""As much of cupy as the mover, its GPU tests and its bench use, on host memory and at once.

It shows that calls have the form that cupy documents and that bytes go where they should; of order, which is what a
GPU is about, it knows nothing (tests/pretend_device.py does). ``install(monkeypatch)`` puts it where cupy is imported.
"""

# The names are cupy's.
# ruff: noqa: N802

from __future__ import annotations

import ctypes
import sys
import time
import types

import numpy as np
from pretend_device import integers


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class Pointer:
    def __init__(self, ptr, owner):
        self.ptr, self.owner = ptr, owner

    def __add__(self, offset):
        return Pointer(self.ptr + offset, self.owner)


class Array:
    """A ``cupy.ndarray``: host memory that calls itself a device's."""

    def __init__(self, shape, dtype, memptr=None, strides=None):
        if memptr is None:
            owner = np.zeros(shape, dtype)
            memptr, strides = Pointer(owner.ctypes.data, owner), owner.strides
        self.shape, self.dtype, self.data, self.strides = tuple(np.atleast_1d(shape)), np.dtype(dtype), memptr, strides
        self.size = int(np.prod(self.shape))
        self.host = np.lib.stride_tricks.as_strided(
            np.frombuffer((ctypes.c_uint8 * self.dtype.itemsize).from_address(memptr.ptr), dtype), self.shape, strides
        )

    @property
    def __cuda_array_interface__(self):
        data = (self.data.ptr, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": self.strides, "version": 3}

    def set(self, array):
        assert array.shape == self.shape
        assert array.dtype == self.dtype
        self.host[...] = array

    def get(self):
        return self.host.copy()


class Stream:
    def __init__(self, null=False, non_blocking=False):
        self.ptr = id(self)

    def synchronize(self):
        pass

    def record(self, event=None):
        event = event or Event()
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Event:
    def __init__(self, block=False, disable_timing=False):
        self.ptr = id(self)
        events[self.ptr] = None

    def record(self, stream=None):
        runtime.eventRecord(self.ptr, stream.ptr)

    def synchronize(self):
        assert events[self.ptr] is not None


events: dict[int, float | None] = {}
"""When each was recorded."""


class Kernel:
    """A ``RawKernel``. Those of the mover run, others do nothing."""

    def __init__(self, name):
        self.name = name

    @property
    def kernel(self):
        return self

    def compile(self):
        pass

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        assert len(grid) <= 3
        assert grid[0] > 0
        name, _, width = self.name.partition("_")
        if name == "slow":
            Array((int(args[1]),), np.uint16, args[0].data, (2,)).host[:] = args[2]
        if name not in ("gather", "scatter", "move"):
            return
        assert stream.ptr
        assert {type(each) for each in args} == {np.uint64}
        table, pieces, ids, count, *rest = (int(each) for each in args)
        rows = np.ctypeslib.as_array((ctypes.c_int64 * (4 * pieces)).from_address(table)).reshape(-1, 4)
        for number in range(count):
            for address, stride, offset, size in rows.tolist():
                if name == "move":
                    source, target = (address + int(each) * stride for each in integers(ids + 8 * number, 2))
                else:
                    one = address + int(integers(ids + 4 * number, 1)[0]) * stride
                    record = rest[0] + number * rest[1] + offset
                    source, target = (one, record) if name == "gather" else (record, one)
                assert (source | target | size) % int(width) == 0
                ctypes.memmove(target, source, size)


class RawModule:
    def __init__(self, code=None, options=()):
        assert isinstance(options, tuple)
        self.code = code

    def compile(self):
        if runtime.no_compiler:
            raise RuntimeError("no libnvrtc")

    def get_function(self, name):
        assert name.partition("_")[0] in self.code
        return Kernel(name)


class Memory:
    def __init__(self, size):
        self.memory = np.full(size + 256, 0xFF, np.uint8)
        self.ptr = -(-self.memory.ctypes.data // 256) * 256


class Device:
    def __init__(self, number=0):
        if number != 0:
            raise CUDARuntimeError(101)

    def use(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Runtime(types.ModuleType):
    CUDARuntimeError = CUDARuntimeError
    status = 0
    """What every event answers."""
    pin_status = 0
    no_compiler = False

    def __init__(self):
        super().__init__("cupy.cuda.runtime")
        self.pinned = {}

    def getDevice(self):
        return 0

    def memGetInfo(self):
        return 1, 2

    def deviceSynchronize(self):
        pass

    def driverGetVersion(self):
        return 13000

    def getDeviceProperties(self, number):
        return {"name": b"pretended"}

    def pointerGetAttributes(self, ptr):
        return types.SimpleNamespace(device=0)

    def memcpy(self, dst, src, size, kind):
        ctypes.memmove(dst, src, size)

    def memcpyAsync(self, dst, src, size, kind, stream):
        assert all(type(each) is int for each in (dst, src, size, kind, stream))
        ctypes.memmove(dst, src, size)

    def memset(self, ptr, value, size):
        ctypes.memset(ptr, value, size)

    def eventQuery(self, event):
        assert event in events
        return self.status

    def eventRecord(self, event, stream):
        assert stream
        events[event] = time.perf_counter()

    def streamWaitEvent(self, stream, event, flags=0):
        assert events[event] is not None
        assert stream

    def hostRegister(self, ptr, size, flags):
        if self.pin_status:
            raise CUDARuntimeError(self.pin_status)
        self.pinned[ptr] = size

    def hostUnregister(self, ptr):
        del self.pinned[ptr]


runtime = Runtime()


def install(monkeypatch):
    """Puts a fresh one in cupy's place, and a driver that has the batch call. Returns (runtime, module)."""
    global runtime
    runtime = Runtime()
    cuda = types.SimpleNamespace(
        runtime=runtime,
        Device=Device,
        Stream=Stream,
        Event=Event,
        Memory=Memory,
        alloc_pinned_memory=bytearray,
        get_elapsed_time=lambda start, end: 1000 * (events[end.ptr] - events[start.ptr]),
    )
    module = types.ModuleType("cupy")
    module.cuda, module.RawModule, module.ndarray, module.empty = cuda, RawModule, Array, Array
    module.RawKernel = lambda code, name: Kernel(name)
    module.__version__ = "pretended"
    monkeypatch.setitem(sys.modules, "cupy", module)
    return runtime
