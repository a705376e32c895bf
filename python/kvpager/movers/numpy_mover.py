"""Pools and copies in host memory, with NumPy: for servers on a CPU, for tests, and as the plainest mover there is."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from types import TracebackType
from typing import Any, Protocol, Self, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError
from ..plans import Plan, Tier
from .arena import HostArena
from .base import Book, Ticket, as_transfer_error, check_copies, check_plan
from .layout import Layout, Share
from .memory import describe

__all__ = ["After", "NumpyMover", "NumpyPool"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


class _Waitable(Protocol):
    """What has a ``wait`` with a timeout in seconds, true once it has happened: ``threading.Event`` has."""

    def wait(self, timeout: float) -> bool: ...


After: TypeAlias = _Waitable | futures.Future[Any] | Callable[[], object] | None
"""What a plan may wait for: an event, a future, or a function that is asked until it answers with something true."""


class NumpyPool:
    """A KV pool in host memory: arrays, and the axis of each that counts blocks.

    >>> import numpy as np
    >>> from kvpager.movers import NumpyPool
    >>> pool = NumpyPool([np.zeros((2, 100, 16, 8, 128), np.float16) for layer in range(4)], block_axis=1)
    >>> print(pool.layout)
    100 blocks of 262,144 bytes in 4 arrays; pieces of a block: 8 of 32,768 bytes
    """

    layout: Layout

    def __init__(
        self, arrays: Sequence[npt.NDArray[Any]], block_axis: SupportsIndex | Iterable[SupportsIndex] = 0
    ) -> None:
        """Keeps the arrays and copies nothing. ConfigError: see :class:`kvpager.movers.Layout`."""
        arrays = list(arrays)
        for number, array in enumerate(arrays):
            if not isinstance(array, np.ndarray):
                raise ConfigError(f"array {number} is a {type(array).__name__}, not a NumPy array")
        self.layout = Layout([describe(array) for array in arrays], block_axis)
        self.views: list[Bytes] = [
            _in_bytes(array.transpose(share.axes), share)
            for array, share in zip(arrays, self.layout.shares, strict=True)
        ]
        """The arrays as bytes, uint8 [num_blocks, ...], the axes of a block in the order of their addresses."""

    def records(self, host: HostArena) -> list[Bytes]:
        """The host's side of `views`: ``records[i][h] = views[i][b]`` copies one array's share of a block."""
        if host.bytes_per_block != self.layout.bytes_per_block:
            raise ConfigError(
                f"the host arena's blocks have {host.bytes_per_block:,} bytes, the pool's"
                f" {self.layout.bytes_per_block:,}"
            )
        records = []
        for view, share in zip(self.views, self.layout.shares, strict=True):
            part = host.records[:, share.record_offset : share.record_offset + share.num_bytes]
            # Splitting the last axis of a view never copies.
            records.append(part.reshape(host.num_blocks, *view.shape[1:]))
        return records

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Carries out copy-on-write pairs, ``step.copies``: int32 [n, 2], source and destination, order-free.

        In the calling thread, before it returns. TransferError, with nothing copied, if an id is no block.
        """
        for source, target in check_copies(copies, self.layout.num_blocks).tolist():
            for view in self.views:
                view[target] = view[source]


def _in_bytes(array: npt.NDArray[Any], share: Share) -> Bytes:
    """A view of the array's bytes, [num_blocks, length of a piece] if a block is one piece: that is copied fastest."""
    view: Bytes = array[..., None].view(np.uint8)
    return view.reshape(len(view), -1) if len(share.piece_offsets) == 1 else view


class NumpyMover:
    """Copies between a pool and an arena, both in host memory, in one worker thread.

    The interpreter lock is released during each array's share of a block, so other threads run meanwhile. Plans run
    one after the other in the order in which they were submitted: a plan that waits for `after` holds up those behind
    it. If `after` fails (its future raises, or the function does), the plan fails with that, uncopied.
    """

    def __init__(self, pool: NumpyPool, host: HostArena) -> None:
        """Starts the worker. ConfigError if the two have blocks of different sizes."""
        self._num_blocks: dict[Tier, int] = {"device": pool.layout.num_blocks, "host": host.num_blocks}
        self._worker = _Worker(pool, host)
        self._book = self._worker.book
        self._thread = threading.Thread(target=self._worker.run, name="kvpager-mover", daemon=True)
        self._thread.start()
        # A mover that nobody closed ends its worker, and gives its memory back, when it is collected.
        self._dropped = weakref.finalize(self, self._worker.stop)

    def submit(self, plan: Plan, after: After = None) -> Ticket:
        """Queues a plan. See :meth:`kvpager.movers.Mover.submit`; the worker waits for `after`, not the caller.

        `after`: an event (anything with ``wait(timeout)``), a ``concurrent.futures.Future``, or a function that
        returns something true once the plan may start; the worker calls it every millisecond or so.
        """
        check_plan(plan, self._num_blocks)
        if not (after is None or callable(after) or hasattr(after, "wait") or isinstance(after, futures.Future)):
            raise TypeError(f"after must be an event, a future or a function, not {type(after).__name__}")
        self._book.check_here()
        ticket = Ticket(plan)
        with self._book.lock:
            if self._worker.closing.is_set():
                raise TransferError("the mover is closed")
            self._worker.afters[ticket] = after
            self._book.begin(ticket)
        return ticket

    def poll(self) -> list[Ticket]:
        """See :meth:`kvpager.movers.Mover.poll`."""
        self._book.check_here()
        return self._book.report()

    def wait(self, timeout: float, tickets: Sequence[Ticket] | None = None) -> list[Ticket]:
        """See :meth:`kvpager.movers.Mover.wait`."""
        return self._book.wait(timeout, tickets)

    def close(self) -> None:
        """Ends the MiB or block that is being copied, fails the rest, ends the worker.

        See :meth:`kvpager.movers.Mover.close`, which this mover always keeps. It waits for `after` where that is being
        asked.
        """
        self._worker.stop()
        if self._book.is_here and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """What the thread of a mover works on. It does not know the mover, which can be collected meanwhile."""

    def __init__(self, pool: NumpyPool, host: HostArena) -> None:
        self.book = Book()
        self.afters: dict[Ticket, After] = {}
        self.closing = threading.Event()
        self._sides: dict[Tier, list[Bytes]] = {"device": pool.views, "host": pool.records(host)}
        self._at_once = max(1, _AT_ONCE // host.bytes_per_block)

    def stop(self) -> None:
        """Nothing is begun any more."""
        if self.book.is_here:
            self.closing.set()
            with self.book.lock:
                self.book.notify()

    def run(self) -> None:
        """The worker: one ticket after the other, until the mover is closed."""
        book = self.book
        while True:
            book.wait_until(lambda: bool(book.under_way) or self.closing.is_set(), math.inf)
            with book.lock:
                if not book.under_way:
                    return
                ticket = next(iter(book.under_way))
                after = self.afters.pop(ticket)
            error: TransferError | None = None
            try:
                self._wait_for(after)
                self._copy(ticket)
            except BaseException as fault:
                error = as_transfer_error(fault)
            with book.lock:
                book.end(ticket, error)

    def _wait_for(self, after: After) -> None:
        """Returns once `after` has happened; raises what it raised, or TransferError where the mover is closed."""
        while not self.closing.is_set():
            if after is None:
                return
            if isinstance(after, futures.Future):
                futures.wait([after], _LOOK)
                if after.done():
                    after.result()  # Raises what the work raised.
                    return
            elif callable(after):
                if after():
                    return
                time.sleep(_ASK)
            elif after.wait(_LOOK):
                return
        raise TransferError("the mover was closed before the copy began")

    def _copy(self, ticket: Ticket) -> None:
        """Copies some blocks, marks them, and looks whether to go on. NumPy releases the lock in each assignment."""
        plan = ticket.plan
        shares = list(zip(self._sides[plan.source], self._sides[plan.destination], strict=True))
        pairs = list(zip(plan.source_ids.tolist(), plan.destination_ids.tolist(), strict=True))
        for first in range(0, len(pairs), self._at_once):
            if self.closing.is_set():
                raise TransferError(f"the mover was closed after {first} of {len(plan)} blocks")
            some = pairs[first : first + self._at_once]
            for here, there in shares:
                for source, target in some:
                    there[target] = here[source]
            ticket._copied[first : first + self._at_once] = True


_LOOK = 0.05
"""Seconds after which a waiting worker looks whether it is to end."""
_ASK = 0.001
"""Seconds between two questions to a function."""
_AT_ONCE = 1 << 20
"""Bytes after which a copying worker marks blocks and looks whether it is to end."""
