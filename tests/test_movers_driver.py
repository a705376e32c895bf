"""The driver's batch call, on libraries made of callbacks: which form is taken, and what arrives in it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvpager import TransferError
from kvpager.movers.driver import BatchCopy

POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
NEW = ctypes.CFUNCTYPE(INT, POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER)
OLD = ctypes.CFUNCTYPE(INT, POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER, POINTER)
VERSION = ctypes.CFUNCTYPE(INT, POINTER)


class Library:
    """A driver: the entries of its version, which copy at once and write down what they were given."""

    def __init__(self, version, *, status=0, version_status=0, fails_at=None):
        self.calls = []
        self.status = status
        self.fails_at = fails_at

        def tell(pointer):
            ctypes.c_int.from_address(pointer).value = version
            return version_status

        self.cuDriverGetVersion = VERSION(tell)
        if version >= 12080:
            self.cuMemcpyBatchAsync = OLD(self.old)
        if version >= 13000:
            self.cuMemcpyBatchAsync_v2 = NEW(self.new)

    def new(self, *arguments):
        return self.call("new", *arguments)

    def old(self, *arguments):
        if self.fails_at is not None:
            SIZE.from_address(arguments[7]).value = self.fails_at
        return self.call("old", *arguments[:7], arguments[8])

    def call(self, form, targets, sources, sizes, count, attributes, indices, attribute_count, stream):
        lists = [
            np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(each)).tolist()
            for each in (targets, sources, sizes)
        ]
        for target, source, size in zip(*lists, strict=True):
            ctypes.memmove(target, source, size)
        order, *hints, flags = (ctypes.c_int32 * 6).from_address(attributes)
        index = SIZE.from_address(indices).value
        self.calls.append((form, count, order, hints, flags, index, attribute_count, stream))
        return self.status


def copied(library, count=3):
    """Copies words, and says what came."""
    batch = BatchCopy.load(library)
    source, target = np.arange(count, dtype=np.int64), np.zeros(count, np.int64)
    steps = 8 * np.arange(count, dtype=np.uint64)
    batch(target.ctypes.data + steps[::-1], source.ctypes.data + steps, np.full(count, 8, np.uint64), 0x7FFF12345678)
    assert target.tolist() == source[::-1].tolist()


@pytest.mark.parametrize(("version", "form"), [(12080, "old"), (12090, "old"), (13000, "new"), (13050, "new")])
def test_the_form_of_the_version_is_taken(version, form):
    library = Library(version)
    copied(library)
    # Stream order for the source, no hints, one set of attributes from copy 0 on, the whole handle.
    assert library.calls == [(form, 3, 1, [0, 0, 0, 0], 1, 0, 1, 0x7FFF12345678)]


def test_long_lists_take_several_calls():
    library = Library(13000)
    copied(library, 10_000)
    assert [call[1] for call in library.calls] == [4096, 4096, 1808]


def test_an_empty_list_is_no_call():
    library = Library(13000)
    copied(library, 0)
    assert library.calls == []


def test_older_drivers_have_none():
    assert BatchCopy.load(Library(12040)) == "the driver is for CUDA 12.4, and the batch call came with 12.8"
    assert BatchCopy.load(Library(11080, version_status=35)) == "cuDriverGetVersion answered 35"


def test_an_entry_that_an_old_version_exports_is_not_trusted():
    library = Library(12080)
    library.cuDriverGetVersion = Library(12070).cuDriverGetVersion
    assert "12.7" in BatchCopy.load(library)


def test_a_refusal_tells_the_number_and_the_copy():
    with pytest.raises(TransferError, match=r"answered 801$"):
        copied(Library(13000, status=801))
    with pytest.raises(TransferError, match="answered 1 at copy 2"):
        copied(Library(12080, status=1, fails_at=2))
    with pytest.raises(TransferError, match=r"answered 1$"):
        copied(Library(12080, status=1))


def test_a_machine_without_a_driver_has_none(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert BatchCopy.load() == "there is no libcuda.so.1"
