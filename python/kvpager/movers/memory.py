"""What a mover needs to know of an array: where it lies, its shape and its strides. Nobody's library is imported.

Three ways to tell are understood: a NumPy array, ``__cuda_array_interface__`` (cupy, torch, numba), and DLPack
(``__dlpack__``: jax, torch, cupy, anything). DLPack's structure is read in place here rather than by cupy, because a
mover copies bytes: bfloat16 and the 8-bit floats, for which not every library has a type, are as good as others.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError

__all__ = ["Memory", "describe"]


@dataclass(frozen=True, slots=True)
class Memory:
    """One array, seen as bytes with a shape."""

    address: int
    """Of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one index to the next, an axis each."""
    itemsize: int
    """Bytes of an element."""
    device: int | None
    """Number of the GPU, None for host memory; -1 if it is a GPU's but the array does not say which."""
    read_only: bool
    owner: object
    """What keeps the memory alive."""


def describe(array: Any) -> Memory:
    """Where and how `array` lies. Copies nothing.

    Raises ConfigError if the object describes itself in none of the three ways, or has elements of less than a byte.
    """
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise ConfigError(f"an array of {array.dtype} holds Python objects, not bytes that could be copied")
        read_only = not array.flags.writeable
        return Memory(array.ctypes.data, array.shape, array.strides, array.itemsize, None, read_only, array)
    # A torch tensor on the host has the attribute and raises where it is asked for.
    try:
        interface = array.__cuda_array_interface__
    except (AttributeError, TypeError, RuntimeError):
        pass
    else:
        return _of_interface(interface, array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    raise ConfigError(
        f"a {type(array).__name__} is no array that a mover understands: give a NumPy array, or one with"
        " __cuda_array_interface__ or __dlpack__"
    )


def _of_interface(interface: dict[str, Any], owner: object) -> Memory:
    """The CUDA array interface: a dictionary. ``strides`` may be missing, which means C-contiguous."""
    address, read_only = interface["data"]
    shape = tuple(int(size) for size in interface["shape"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    strides = _contiguous(shape, itemsize) if strides is None else tuple(int(stride) for stride in strides)
    return Memory(int(address), shape, strides, itemsize, -1, bool(read_only), owner)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array."""
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(size, 1)
    return tuple(reversed(strides))


class _Tensor(ctypes.Structure):
    """DLPack's ``DLTensor``: strides count elements, and a null pointer for them means C-contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13


def _of_dlpack(array: Any) -> Memory:
    """DLPack: a capsule around a structure that begins with a ``DLTensor``. It frees itself when it is dropped."""
    # Without a stream, which a producer then orders behind its own work if it must: this is set-up, and always allowed.
    capsule = array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    bits = tensor.bits * tensor.lanes
    if bits % 8:
        raise ConfigError(f"elements of {bits} bits are no whole bytes: give the array as bytes (uint8)")
    if tensor.device_type not in (_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED):
        raise ConfigError(
            f"memory of DLPack device type {tensor.device_type} is neither the host's nor a CUDA device's"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = (
        tuple(stride * (bits // 8) for stride in tensor.strides[: tensor.ndim])
        if tensor.strides
        else _contiguous(shape, bits // 8)
    )
    device = None if tensor.device_type in (_CPU, _CUDA_HOST) else int(tensor.device_id)
    address = (tensor.data or 0) + tensor.byte_offset
    return Memory(address, shape, strides, bits // 8, device, False, (array, capsule))
