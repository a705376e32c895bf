"""What a mover asks of a GPU, and nothing else: streams, events, copies, three kernels, memory.

The mover's logic is written against this protocol, so that tests can run it on a machine without a GPU, with streams
that reorder whatever may be reordered. :class:`kvpager.movers.cuda.CudaDevice` is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .memory import Memory

__all__ = ["Addresses", "Device", "Event", "Kernel", "Stream"]

Stream: TypeAlias = Any
"""A stream of the device's kind."""
Event: TypeAlias = Any
"""An event of the device's kind."""
Kernel: TypeAlias = Literal["gather", "scatter", "move"]
Addresses: TypeAlias = npt.NDArray[np.uint64]
"""uint64 [n]: addresses, or lengths in bytes."""


class Device(Protocol):
    """One GPU. Everything that takes a stream is queued there and returns at once."""

    @property
    def batched(self) -> bool:
        """True if `copy` hands any number of pieces to the driver in one call."""
        ...

    def check(self, memories: Sequence[Memory]) -> None:
        """Raises ConfigError unless the arrays lie on this device."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device the calling thread's own inside a ``with``."""
        ...

    def stream(self) -> Stream:
        """A new stream that does not wait for the default one."""
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def stream_of(self, work: Any) -> Stream:
        """A caller's stream, whatever library made it. Raises TypeError if it is none."""
        ...

    def event_of(self, work: Any) -> Event | None:
        """A caller's event; None if it is no event."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event happens when the stream has got here. Recording again moves it."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on runs after the event as it was last recorded."""
        ...

    def happened(self, event: Event) -> bool:
        """Whether an event has happened. Raises TransferError if the device reports a failure."""
        ...

    def copy(self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """Copies pieces between any two memories, in any order."""
        ...

    def launch(self, kernel: Kernel, width: int, items: int, arguments: Sequence[int], stream: Stream) -> None:
        """Runs a kernel of :mod:`kvpager.movers.kernels` over `items` pairs of block and piece."""
        ...

    def allocate(self, num_bytes: int) -> tuple[int, object]:
        """Device memory: its address, a multiple of 256, and what keeps it."""
        ...

    def pinned(self, count: int) -> npt.NDArray[np.int32]:
        """Pinned host memory, int32 [count]."""
        ...

    def pin(self, address: int, num_bytes: int) -> bool:
        """Pins host memory. False if somebody else had; raises TransferError if it cannot be done."""
        ...

    def unpin(self, address: int) -> None:
        """Undoes `pin`."""
        ...
