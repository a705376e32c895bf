"""A GPU that is none: queued work runs on host memory, in any order that streams and events leave open, by seed."""

from __future__ import annotations

import contextlib
import ctypes
from functools import partial

import numpy as np

from kvpager import TransferError
from kvpager.testing.streams import Operation, Schedule


class Stream:
    """Its last operation, and what the next one waits for."""

    def __init__(self):
        self.last = None
        self.waits = []


class Event:
    def __init__(self):
        self.last = None


def move(target, source, size):
    ctypes.memmove(target, source, size)


def integers(address, count):
    """int32 at an address."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).copy()


class PretendDevice:
    """See :class:`kvpager.movers.device.Device`. Nothing runs until somebody asks whether an event has happened."""

    def __init__(self, seed=0, *, batched=True, pinnable=True):
        self.schedule = Schedule(seed)
        self.batched = batched
        self.pinnable = pinnable
        """True, False, or "already"."""
        self.pins = []
        self.copies = []
        """The lengths of each copy call."""
        self.launches = []
        self.fail_copy = None
        """Number of the copy call that is refused."""
        self.broken = False
        self.idle = False
        """True: asked or not, nothing runs."""
        self.ignored_waits = 0.0
        """Probability that a wait is forgotten: for tests of the tests."""

    def check(self, memories):
        pass

    def current(self):
        return contextlib.nullcontext()

    def stream(self):
        return Stream()

    def event(self):
        return Event()

    def stream_of(self, work):
        if not isinstance(work, Stream):
            raise TypeError(f"a {type(work).__name__} is no stream")
        return work

    def event_of(self, work):
        return work if isinstance(work, Event) else None

    def queue(self, stream, name, works):
        """Operations of one call: in any order, after what is on the stream, and all before what comes."""
        needs = [*stream.waits, *([stream.last] if stream.last else [])]
        stream.waits = []
        parts = [self.schedule.add(Operation(name, work, needs)) for work in works]
        stream.last = self.schedule.add(Operation(f"{name} ends", None, [*needs, *parts]))

    def compute(self, stream, work):
        """A kernel of the caller's."""
        self.queue(stream, "kernel", [work])

    def record(self, event, stream):
        if stream.waits or stream.last is None:
            self.queue(stream, "record", [])
        event.last = stream.last

    def wait(self, stream, event):
        if event.last is not None and self.schedule.random.random() >= self.ignored_waits:
            stream.waits.append(event.last)

    def happened(self, event):
        if self.broken:
            raise TransferError("the pretend device failed")
        for _ in range(self.schedule.random.randint(0, 0 if self.idle else 20)):
            self.schedule.run_one()
        return event.last is None or event.last.finished

    def copy(self, destinations, sources, sizes, stream):
        assert {each.dtype for each in (destinations, sources, sizes)} == {np.dtype(np.uint64)}
        self.copies.append(sizes.tolist())
        if self.fail_copy == len(self.copies) - 1:
            raise TransferError("this copy was refused")
        lists = (each.tolist() for each in (destinations, sources, sizes))
        self.queue(stream, "copy", [partial(move, *each) for each in zip(*lists, strict=True)])

    def launch(self, kernel, width, items, arguments, stream):
        _, pieces, _, count = arguments[:4]
        assert items == pieces * count
        self.launches.append((kernel, width, count))
        self.queue(stream, kernel, [partial(self.block, kernel, width, arguments, number) for number in range(count)])

    def block(self, kernel, width, arguments, number):
        """What a kernel does for one block: reads its id and the table when it runs."""
        table, pieces, ids, _ = arguments[:4]
        rows = np.ctypeslib.as_array((ctypes.c_int64 * (4 * pieces)).from_address(table)).reshape(-1, 4)
        for address, stride, offset, size in rows.tolist():
            if kernel == "move":
                source, target = (address + int(each) * stride for each in integers(ids + 8 * number, 2))
            else:
                block = address + int(integers(ids + 4 * number, 1)[0]) * stride
                record = arguments[4] + number * arguments[5] + offset
                source, target = (block, record) if kernel == "gather" else (record, block)
            assert all(each % width == 0 for each in (source, target, size))
            move(target, source, size)

    def allocate(self, num_bytes):
        memory = np.full(num_bytes + 256, 0xFF, np.uint8)
        return -(-memory.ctypes.data // 256) * 256, memory

    def pinned(self, count):
        return np.full(count, -1, np.int32)

    def pin(self, address, num_bytes):
        if not self.pinnable:
            raise TransferError("the driver did not pin")
        self.pins.append(("pin", address, num_bytes))
        return self.pinnable is True

    def unpin(self, address):
        self.pins.append(("unpin", address))
