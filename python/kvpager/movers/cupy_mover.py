"""Copies between a GPU's pool and a pinned host arena, on streams of the mover's own, by cupy and without torch.

Two lanes, one a direction, each with a stream for the bus and one for kernels. Two ways to copy::

    direct                                        staged, out (in: the same backwards)

    pool  ══ many pieces, one driver call ══>     pool ─ gather kernel ─> slot 0 ══ a record a block ══> arena
                                     arena             gather kernel ─> slot 1 ══     ...
                                                       gather kernel ─> slot 2        ...

A block's pieces lie apart on the device (64 of 32 KiB for a Llama-8B), its record on the host in one piece (2 MiB).
Small pieces leave the bus idle between two of them, so they are gathered on the device first, a slot at a time, while
the slot before is on the bus: slots go round, and events keep kernel and bus apart. Larger pieces go directly, if the
driver takes many at once.

Nothing here waits for the GPU. Order is kept by events only: a lane is one behind the other, a plan that has a block
in common with one in the other lane waits for it, `after` comes before all of a plan, and `order` makes a compute
stream wait.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError
from ..plans import Plan, Tier
from .arena import HostArena
from .base import Book, Ticket, as_transfer_error, check_plan, finite
from .cupy_pool import CupyPool, IndexBuffer
from .device import Event, Stream
from .lanes import Lane, Path, Slot, UnderWay, choose_path, merged

__all__ = ["CupyMover"]

_ASK = 0.00005
"""Seconds between two looks at the device in `wait`."""


_PINNED: dict[int, HostArena] = {}
"""Arenas that are pinned: memory must not go back to the system before the driver has let go of it."""


class CupyMover:
    """See the module for how it copies, and :class:`kvpager.movers.Mover` for what its methods promise.

    Plans that go the same way are carried out in the order in which they were submitted. Any thread may call; each
    call holds one lock and waits for no copy (`wait` and `close` excepted). Memory: on the device ``2 x slots x
    slot_bytes`` in staged copies, and 4 bytes for each block of a plan under way; on the host 16 for each block of both
    tiers.
    """

    def __init__(
        self,
        pool: CupyPool,
        host: HostArena,
        *,
        path: Path | None = None,
        slots: int = 3,
        slot_bytes: int = 8 << 20,
    ) -> None:
        """Pins the arena, which touches all of its pages. RuntimeWarning if the system refuses.

        `path`: None chooses by the mean length of the pieces. `slots`, `slot_bytes`: of the staging memory, in each
        direction; a slot holds one block at least. ConfigError if pool and arena do not fit, or a number is below 1.
        """
        if host.bytes_per_block != pool.layout.bytes_per_block:
            raise ConfigError(
                f"the host arena's blocks have {host.bytes_per_block:,} bytes, the pool's"
                f" {pool.layout.bytes_per_block:,}"
            )
        if slots < 1 or slot_bytes < 1:
            raise ConfigError(f"{slots} slots of {slot_bytes} bytes stage nothing")
        self._pool, self._host, self._device = pool, host, pool.device
        self._num_blocks: dict[Tier, int] = {"device": pool.layout.num_blocks, "host": host.num_blocks}
        self.path: Path = path or choose_path(pool.layout.bytes_per_block // len(pool.pieces), pool.device.batched)
        """How this mover copies."""
        self._slot_blocks = max(1, slot_bytes // host.bytes_per_block)
        self._book = Book()
        self._lock = threading.RLock()
        self._closed = False
        self._failed: TransferError | None = None
        with self._device.current():
            self.pinned, self._unpin = self._pin()
            self._lanes: dict[Tier, Lane] = {
                tier: self._lane(slots if self.path == "staged" else 0) for tier in ("device", "host")
            }

    def _pin(self) -> tuple[bool, bool]:
        """Pins the arena: whether it is pinned, and whether that is to be undone."""
        records = self._host.records
        try:
            ours = self._device.pin(records.ctypes.data, records.nbytes)
            if ours:
                _PINNED[records.ctypes.data] = self._host
            return True, ours
        except TransferError as refused:
            warnings.warn(
                f"the host arena is not pinned, so copies are slower and hold the caller up: {refused}",
                RuntimeWarning,
                stacklevel=3,
            )
            return False, False

    def _lane(self, slots: int) -> Lane:
        device, size = self._device, self._slot_blocks * self._host.bytes_per_block
        return Lane(
            device.stream(),
            device.stream(),
            [Slot(*device.allocate(size), device.event(), device.event()) for _ in range(slots)],
            {tier: np.zeros(blocks, np.int64) for tier, blocks in self._num_blocks.items()},
        )

    def submit(self, plan: Plan, after: Any = None) -> Ticket:
        """Queues a plan's copies on the GPU. See :meth:`kvpager.movers.Mover.submit`.

        `after`: the compute work that writes or still reads the plan's blocks: a stream (all that is queued there so
        far) or an event, of cupy or torch, or a stream's handle as an int. TypeError if it is none of these. A plan
        that cannot be queued for a fault of the device gives a ticket that fails once nothing of it runs any more.
        (A driver's queue holds some thousand operations, of which a staged plan takes eight a slot: beyond that its
        calls wait. Split plans of many GB.)
        """
        check_plan(plan, self._num_blocks)
        self._book.check_here()
        with self._lock, self._device.current():
            if self._closed:
                raise TransferError("the mover is closed")
            if self._failed is not None:
                raise TransferError(f"the device failed before: {self._failed}")
            lane, other = self._lanes[plan.source], self._lanes[plan.destination]
            waits = self._waits(after)
            common = other.last_in_common(plan)
            ticket, event = Ticket(plan), self._device.event()
            buffer: IndexBuffer | None = None
            error: TransferError | None = None
            try:
                for stream in (lane.bus, lane.kernels):
                    for each in [*waits, *([common.event] if common else [])]:
                        self._device.wait(stream, each)
                if self.path == "direct":
                    self._direct(lane, plan)
                else:
                    buffer = self._pool.indices.take(max(1, len(plan)))
                    self._staged(lane, plan, buffer)
            except Exception as fault:
                error = as_transfer_error(fault)
            except BaseException:
                error = TransferError("its copies were interrupted when some of them were queued")
                raise
            finally:
                # Also then: what is queued runs.
                self._join(lane, event, plan.source)
                lane.touch(plan)
                lane.under_way.append(UnderWay(lane.count, ticket, event, error, buffer))
                with self._book.lock:
                    self._book.begin(ticket)
        return ticket

    def order(self, stream: Any, ticket: Ticket) -> None:
        """What is queued on the caller's `stream` from now on runs after the ticket's copies. Waits for nothing."""
        with self._lock, self._device.current():
            work = self._device.stream_of(stream)
            for lane in self._lanes.values():
                for each in lane.under_way:
                    if each.ticket is ticket:
                        self._device.wait(work, each.event)

    def poll(self) -> list[Ticket]:
        """See :meth:`kvpager.movers.Mover.poll`. Asks the device for the oldest plan of each direction."""
        self._book.check_here()
        self._look()
        return self._book.report()

    def wait(self, timeout: float, tickets: Sequence[Ticket] | None = None) -> list[Ticket]:
        """See :meth:`kvpager.movers.Mover.wait`. Asks the device every 50 microseconds or so."""
        deadline = time.monotonic() + finite(timeout)
        self._book.check_here()
        self._wait_until(lambda: not self._book.pending(tickets), deadline)
        return self._book.report()

    def close(self, timeout: float = 10.0) -> None:
        """Waits up to `timeout` seconds for what is under way, fails the rest, unpins the arena.

        See :meth:`kvpager.movers.Mover.close`. What is queued on a GPU cannot be taken back. If it has not ended in
        that time, or the device has failed, so that nobody knows, this raises TransferError: the device may still write
        to pool and arena, which stays pinned. Call it again, or end the process.
        """
        deadline = time.monotonic() + finite(timeout)
        if not self._book.is_here:
            return
        self._closed = True
        self._wait_until(self._is_idle, deadline)
        with self._lock, self._device.current():
            is_idle = self._is_idle()
            with self._book.lock:
                for ticket in list(self._book.under_way):
                    self._book.end(ticket, TransferError(f"not over {timeout} seconds after the mover was closed"))
            if self._failed is not None:
                raise TransferError(f"the mover is closed, but the device failed and may still copy: {self._failed}")
            if not is_idle:
                raise TransferError(
                    f"the mover is closed, but the device still copies after {timeout} seconds: leave pool and arena as"
                    " they are until a further close() succeeds"
                )
            for lane in self._lanes.values():
                lane.slots.clear()
            if self._unpin:
                self._unpin = False
                address = self._host.records.ctypes.data
                self._device.unpin(address)
                del _PINNED[address]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _waits(self, after: Any) -> list[Event]:
        """What comes before a plan, as events."""
        if after is None:
            return []
        event = self._device.event_of(after)
        if event is None:
            event = self._device.event()
            self._device.record(event, self._device.stream_of(after))
        return [event]

    def _join(self, lane: Lane, event: Event, source: Tier) -> None:
        """The event happens when both streams of a lane have got here. The one that comes first waits for nothing."""
        first, last = (lane.kernels, lane.bus) if source == "device" else (lane.bus, lane.kernels)
        try:
            self._device.record(event, first)
            self._device.wait(last, event)
            self._device.record(event, last)
        except Exception as fault:
            self._failed = as_transfer_error(fault)

    def _direct(self, lane: Lane, plan: Plan) -> None:
        """Every piece of every block, in as few calls as the driver takes."""
        pieces, out = self._pool.pieces, plan.source == "device"
        blocks, frames = (plan.source_ids, plan.destination_ids) if out else (plan.destination_ids, plan.source_ids)
        on_device = pieces[:, 0] + blocks[:, None].astype(np.int64) * pieces[:, 1]
        on_host = self._frames(frames)[:, None] + pieces[:, 2]
        sizes = np.broadcast_to(pieces[:, 3], on_device.shape)
        targets, sources = (on_host, on_device) if out else (on_device, on_host)
        self._copy(targets, sources, sizes, lane.bus)

    def _staged(self, lane: Lane, plan: Plan, buffer: IndexBuffer) -> None:
        """A slot of records after the other."""
        out = plan.source == "device"
        blocks, frames = (plan.source_ids, plan.destination_ids) if out else (plan.destination_ids, plan.source_ids)
        self._pool.indices.upload(buffer, blocks, lane.kernels)
        addresses = self._frames(frames)
        for first in range(0, len(plan), self._slot_blocks):
            part = addresses[first : first + self._slot_blocks]
            ids = buffer.address + 4 * first
            with self._slot(lane, lane.kernels if out else lane.bus, lane.bus if out else lane.kernels) as slot:
                records = slot.address + np.arange(len(part)) * self._host.bytes_per_block
                sizes = np.full(len(part), self._host.bytes_per_block)
                if out:
                    self._launch("gather", ids, len(part), slot, lane)
                    self._hand_over(slot, lane.kernels, lane.bus)
                    self._copy(part, records, sizes, lane.bus)
                else:
                    self._copy(records, part, sizes, lane.bus)
                    self._hand_over(slot, lane.bus, lane.kernels)
                    self._launch("scatter", ids, len(part), slot, lane)

    @contextmanager
    def _slot(self, lane: Lane, fills: Stream, empties: Stream) -> Iterator[Slot]:
        """The next slot: `fills` waits until it was emptied, and what `empties` has queued by the end empties it."""
        slot = lane.slots[lane.next_slot % len(lane.slots)]
        if lane.next_slot >= len(lane.slots):
            self._device.wait(fills, slot.emptied)
        lane.next_slot += 1
        try:
            yield slot
        finally:
            self._device.record(slot.emptied, empties)

    def _hand_over(self, slot: Slot, fills: Stream, empties: Stream) -> None:
        """The slot is full: the other stream goes on."""
        self._device.record(slot.filled, fills)
        self._device.wait(empties, slot.filled)

    def _launch(self, kernel: Literal["gather", "scatter"], ids: int, count: int, slot: Slot, lane: Lane) -> None:
        pool = self._pool
        arguments = (pool.table, len(pool.pieces), ids, count, slot.address, pool.layout.bytes_per_block)
        self._device.launch(kernel, pool.width, count * len(pool.pieces), arguments, lane.kernels)

    def _frames(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Addresses of the records of host blocks."""
        return self._host.records.ctypes.data + frames.astype(np.int64) * self._host.bytes_per_block

    def _copy(self, targets: Any, sources: Any, sizes: Any, stream: Stream) -> None:
        """Queues copies, neighbours merged."""
        if sizes.size:
            self._device.copy(*merged(targets.ravel(), sources.ravel(), sizes.ravel()), stream)

    def _is_idle(self) -> bool:
        """True if the device has done all, as far as the mover has looked."""
        return not any(lane.under_way for lane in self._lanes.values())

    def _wait_until(self, happened: Callable[[], bool], deadline: float) -> None:
        """Looks at the device until it has happened, or the time is over."""
        self._look()
        while not happened() and time.monotonic() < deadline:
            time.sleep(_ASK)
            self._look()

    def _look(self) -> None:
        """Ends what has ended."""
        with self._lock, self._device.current():
            for lane in self._lanes.values():
                while lane.under_way and (self._failed is not None or self._happened(lane.under_way[0].event)):
                    # An interrupt may fall between any two of these: the ticket ends before it is left out.
                    each = lane.under_way[0]
                    with self._book.lock:
                        self._book.end(each.ticket, each.error or self._failed)
                    lane.under_way.popleft()
                    if each.buffer is not None and self._failed is None:
                        self._pool.indices.give(each.buffer)

    def _happened(self, event: Event) -> bool:
        """True also if the device has failed: nothing will happen any more."""
        try:
            return self._device.happened(event)
        except TransferError as fault:
            self._failed = fault
            return True
