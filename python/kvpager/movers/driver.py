"""Many copies in one call of the CUDA driver: ``cuMemcpyBatchAsync``, through ctypes, since cupy does not offer it.

The call came with CUDA 12.8 (driver 570) and lost an argument in CUDA 13.0 (driver 580), where the new form has a name
of its own in the library. Drivers keep old names, so the rule is: the new name if the driver has it, else the old one
if the driver says it is 12.8 or newer, else nothing, with the reason in words.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import TransferError

__all__ = ["BatchCopy"]

Sizes = npt.NDArray[np.uint64]

_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read when the stream gets there, not before."""
_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: a hint."""
_FIRST_VERSION = 12080
_AT_ONCE = 4096
"""Most copies of one call; a longer list takes several."""


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``: 24 bytes. The two locations are hints for managed memory, which is not used here."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_type", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("destination_type", ctypes.c_int),
        ("destination_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """The driver's batch call: ``BatchCopy.load()``, or the reason why there is none."""

    def __init__(self, function: Any, *, tells_failure: bool) -> None:
        """`function`: the library's entry. `tells_failure`: it is the form of 12.8, with ``failIdx`` before the stream.

        ``argtypes`` is set on it, so that pointers keep their 64 bits.
        """
        self._function = function
        self._tells_failure = tells_failure
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        failure = [pointer] if tells_failure else []
        function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, *failure, pointer]
        function.restype = ctypes.c_int

    @classmethod
    def load(cls, library: Any = None) -> Self | str:
        """From the machine's driver (or `library`, a loaded one). A string says why there is no batch call."""
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError:
                return "there is no libcuda.so.1"
        function = getattr(library, "cuMemcpyBatchAsync_v2", None)
        if function is not None:
            return cls(function, tells_failure=False)
        version = ctypes.c_int(0)
        status = library.cuDriverGetVersion(ctypes.byref(version))
        if status != 0:
            return f"cuDriverGetVersion answered {status}"
        function = getattr(library, "cuMemcpyBatchAsync", None)
        if version.value < _FIRST_VERSION or function is None:
            major, minor = version.value // 1000, version.value % 1000 // 10
            return f"the driver is for CUDA {major}.{minor}, and the batch call came with 12.8"
        return cls(function, tells_failure=True)

    def __call__(self, destinations: Sizes, sources: Sizes, sizes: Sizes, stream: int) -> None:
        """Queues ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``, uint64 [n] each, in any order.

        `stream`: a handle, not 0 (the driver refuses the legacy default stream). The arrays may be reused on return.
        Raises TransferError with the driver's number; how many copies were queued is then open.
        """
        attributes = _Attributes(source_order=_STREAM_ORDER, flags=_OVERLAP)
        first = ctypes.c_size_t(0)
        for start in range(0, len(sizes), _AT_ONCE):
            part = [
                np.ascontiguousarray(each[start : start + _AT_ONCE], np.uint64)
                for each in (destinations, sources, sizes)
            ]
            failed = ctypes.c_size_t(2**64 - 1)
            failure = [ctypes.addressof(failed)] if self._tells_failure else []
            status = self._function(
                *(each.ctypes.data for each in part),
                len(part[0]),
                ctypes.addressof(attributes),
                ctypes.addressof(first),
                1,
                *failure,
                stream,
            )
            if status != 0:
                where = f" at copy {start + failed.value}" if failed.value < len(part[0]) else ""
                raise TransferError(f"cuMemcpyBatchAsync answered {status}{where}")
