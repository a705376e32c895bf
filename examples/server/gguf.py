"""Read a GGUF file: its keys and its tensors, dequantised to float32. Only the types that the example's model has.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32  # quantised values that share a scale


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            return [self.value(kind) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """The keys, and the tensors by name. A matrix is [out, in]: y = x @ W.T."""
    with path.open("rb") as file:
        reader = _Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if reader.data[:4] != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it does not begin with 'GGUF'")
    reader.at = 4
    if (version := reader.scalar("I")) not in (2, 3):
        raise ValueError(f"{path} is a GGUF file of version {version}; versions 2 and 3 are known here")
    num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
    keys = {reader.string(): reader.value(reader.scalar("I")) for _ in range(num_keys)}
    infos = []
    for _ in range(num_tensors):
        name = reader.string()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))][::-1]  # stored fastest dimension first
        infos.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    alignment = keys.get("general.alignment", 32)
    start = -(-reader.at // alignment) * alignment
    return keys, {name: _tensor(reader.data, name, shape, kind, start + at) for name, shape, kind, at in infos}


def _tensor(data: mmap.mmap, name: str, shape: list[int], kind: int, at: int) -> NDArray[np.float32]:
    count = int(np.prod(shape))
    if kind == _F32:
        return np.frombuffer(data, np.float32, count, at).reshape(shape)
    if kind == _Q8_0:  # x = d q
        blocks = np.frombuffer(data, [("d", "<f2"), ("q", "i1", _BLOCK)], count // _BLOCK, at)
        quants = blocks["q"].astype(np.float32)
        quants *= blocks["d"].astype(np.float32)[:, None]
        return quants.reshape(shape)
    if kind == _Q4_1:  # x = d q + m; low nibbles come first
        packed = [("d", "<f2"), ("m", "<f2"), ("q", "u1", _BLOCK // 2)]
        blocks = np.frombuffer(data, packed, count // _BLOCK, at)
        quants = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
        quants *= blocks["d"].astype(np.float32)[:, None]
        quants += blocks["m"].astype(np.float32)[:, None]
        return quants.reshape(shape)
    raise ValueError(f"tensor {name} has GGUF type {kind}; this example reads F32 (0), Q4_1 (3) and Q8_0 (8)")
