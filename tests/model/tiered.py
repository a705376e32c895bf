"""The engine with a host tier: a fake mover copies beside the kernels, in any order that nothing forbids, by seed.

Nothing runs by itself. Kernels wait on the mover's compute stream, copies wait for what they were told to wait for, and
each poll runs some of both. What is undefined is NaN: blocks that were freed, in either tier; destinations until their
copy is done, or for ever if it failed; blocks that a kernel is about to fill. So whoever reads too early, or from the
wrong place, differs from contiguous KV and is found by the comparisons of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager import Plan
from kvpager.movers import HostArena, NumpyPool, Ticket
from kvpager.testing import FakeMover

from .contiguous import choose
from .device import Row
from .engine import Engine, Launch, line, numbers

TRANSFERS = ("fetching", "swapping_out", "swapping_in")


class TieredEngine(Engine):
    """The engine, a host arena, and the way of a plan: made, sent, reported.

    ``late``: kernels run as late as possible, and otherwise whenever the schedule likes. Steps commit when their kernel
    has run. A sequence alone may be committed ahead of its kernel, as a server does that needs no sampled token: then
    only ``after=`` orders copies behind it.
    """

    # What is being swapped in is not there yet.
    ON_DEVICE = ("running", "swapping_out", "fetching")

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        *,
        num_host_blocks: int = 32,
        seed: int = 0,
        fail: float = 0.0,
        never: float = 0.0,
        late_reports: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks=num_host_blocks, **options)
        pool = NumpyPool([self.device.keys, self.device.values], block_axis=1)
        self.host = HostArena(num_host_blocks, pool.layout.bytes_per_block)
        self.host.records[:] = 0xFF
        self.mover = FakeMover(pool, self.host, seed, fail=fail, never=never, late=late_reports)
        self.kernels = self.mover.stream()
        self.planned_plans: list[Plan] = []
        self.tickets: dict[Plan, Ticket] = {}
        self.given_up: set[Plan] = set()
        self.ended: list[Plan] = []
        self.doomed: list[set[int]] = []  # freed blocks that a kernel behind what is launched will overwrite with NaN
        self.unwritten: dict[int, set[int]] = {}  # what kernels have still to write that was committed ahead of them
        self.host_free = set(range(num_host_blocks))
        self.tick = 0

    # The compute stream.

    def launch(self) -> None:
        super().launch()
        self.feed()

    def feed(self) -> None:
        """Put on the compute stream what is launched, up to a step that is not."""
        while self.stream:
            work = self.stream[0]
            if isinstance(work, Launch):
                if not work.is_launched:
                    return
                self.kernels.launch(partial(self.copy, work))
                self.kernels.launch(partial(self.forward, work), self.filled(work.step.slot_mapping))
            else:
                self.kernels.launch(work)
            self.stream.popleft()

    def filled(self, slots: npt.NDArray[np.int64]) -> list[int]:
        """The blocks of which a kernel with these slots writes all that is in them."""
        return sorted({slot // self.block_size for slot in slots.tolist() if slot % self.block_size == 0})

    def synchronise(self, launch: Launch | None = None) -> None:
        """Run until a step has run; or just something."""
        self.feed()
        if launch is None:
            self.mover.run_some()
        while launch is not None and not launch.has_run:
            assert self.mover.run_some(1), "the step can never run"

    def drain(self) -> None:
        """Run until all is done that is launched."""
        self.feed()
        event = self.kernels.record()
        while not event.happened:
            assert self.mover.run_some(1), "the stream never ends"

    def compute(self, sequence: Any, stop: int | None = None, *, ahead: bool = False) -> int:
        """Prefill or decode a sequence alone; ``ahead``: say that it is committed before the kernel has run."""
        self.settle()
        self.launch()
        start, stop = sequence.num_planned, len(sequence) if stop is None else stop
        slots = sequence.slots(start, stop)
        row = Row(sequence.tokens.tolist()[:stop], start, stop, sequence.block_ids)

        def kernel() -> None:
            self.compare([row], self.device.launch([row], slots))

        self.take_copies()
        self.promise(kernel, set((slots // self.block_size).tolist()), self.filled(slots))
        if not ahead:
            self.drain()
        sequence.commit(stop)
        self.settle()
        return choose(self.truth.of(row.tokens).logits[stop - 1])

    def take_copies(self) -> None:
        """Launch the copies that single calls queued. What is planned must run before them, so it is launched."""
        self.launch()
        if len(pairs := self.pager.take_copies()):
            self.promise(lambda: self.device.copy(pairs), set(pairs[:, 1].tolist()))

    def promise(self, work: Callable[[], None], blocks: set[int], filled: list[int] | None = None) -> None:
        """Launch what will write these blocks, which are taken for written already."""
        number = max(self.unwritten, default=0) + 1
        self.unwritten[number] = blocks

        def kernel() -> None:
            work()
            del self.unwritten[number]

        self.kernels.launch(kernel, filled or [])

    # Plans.

    def adopt_plan(self, plan: Plan | None) -> Plan | None:
        """A plan that was made: to be sent, or cancelled. Its destinations are not the device's to poison any more."""
        if plan is not None and plan not in self.planned_plans and plan not in self.tickets:
            self.planned_plans.append(plan)
            if plan.destination == "device":
                for freed in self.doomed:
                    freed.difference_update(plan.destination_ids.tolist())
        return plan

    def send(self, plan: Plan) -> Ticket | None:
        """Start a plan and submit it. None if it was cancelled, as is the fetch of a prompt that nobody wants."""
        self.planned_plans.remove(plan)
        if not self.pager.start(plan, self.tick):
            self.ended.append(plan)
            return None
        ticket = self.submit(plan)
        self.settle()
        return ticket

    def submit(self, plan: Plan) -> Ticket:
        self.tickets[plan] = self.mover.submit(self.told(plan), self.after(plan))
        return self.tickets[plan]

    def told(self, plan: Plan) -> Plan:
        """What the mover is told."""
        return plan

    def after(self, plan: Plan) -> Any:
        """What a plan must wait for: the kernels that were committed ahead, and nothing else.

        What a step fills is committed when it is there, and what a step still reads the pager keeps from plans.
        """
        return self.kernels if self.unwritten else None

    def poll(self) -> None:
        """Let the mover work, and pass its reports on."""
        self.report(self.mover.poll())

    def report(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            plan = next(each for each, its in self.tickets.items() if its is ticket)
            del self.tickets[plan]
            self.say(plan, ticket)
            self.ended.append(plan)
            self.settle()

    def say(self, plan: Plan, ticket: Ticket) -> None:
        """Tell the pager what a ticket says."""
        if plan in self.given_up:
            # Late, but now nobody writes there any more.
            assert self.pager.reclaim(plan)
            self.given_up.remove(plan)
        elif ticket.state == "done":
            assert self.pager.complete(plan)
        else:
            assert self.pager.fail(plan, ticket.done)

    def move(self, plan: Plan | None) -> Ticket:
        """Send a plan and wait for its report."""
        plan = self.adopt_plan(plan)
        assert plan is not None
        ticket = self.send(plan)
        assert ticket is not None
        self.wait(ticket)
        return ticket

    def wait(self, *tickets: Ticket) -> None:
        self.feed()
        self.report(self.mover.wait(1.0, tickets or None))

    def give_up(self, plan: Plan) -> None:
        """The caller's deadline has passed."""
        assert self.pager.abandon(plan)
        self.given_up.add(plan)
        self.settle()

    def cancel_plan(self, plan: Plan) -> None:
        self.planned_plans.remove(plan)
        self.pager.cancel(plan)
        self.ended.append(plan)
        self.settle()

    def finish_plans(self) -> None:
        """All plans end, those included that seemed never to."""
        for plan in list(self.planned_plans):
            self.send(plan)
        self.mover.thaw()
        self.wait()
        assert not self.tickets
        assert self.pager.plans() == []

    # Between any two calls.

    def settle(self) -> None:
        super().settle()
        drawing = self.pager.dump(full=True)
        free = numbers(line(drawing, "host free: "))
        self.host.records[sorted(free - self.host_free)] = 0xFF
        self.host_free = free
        self.compare_swapped(drawing)

    def poison(self, freed: set[int]) -> Callable[[], None]:
        self.doomed.append(freed := set(freed))

        def overwrite() -> None:
            self.doomed.remove(freed)
            self.device.poison(freed)

        return overwrite

    def is_written(self, table: npt.NDArray[Any]) -> bool:
        return not any(blocks.intersection(table.tolist()) for blocks in self.unwritten.values())

    def compare_swapped(self, drawing: str) -> None:
        """What swapped sequences have on the host, against contiguous KV."""
        for sequence in self.sequences:
            if sequence.state == "swapped" and sequence.num_committed:
                parts = line(drawing, f"sequence {sequence.id}: .*host path ").split("; host own ")
                self.compare_host(ordered(" ".join(parts)), sequence.tokens.tolist()[: sequence.num_committed])

    def compare_host(self, blocks: list[int], tokens: list[int]) -> None:
        """Records of the host, against contiguous KV of these tokens."""
        right, stop = self.truth.of(tokens), len(tokens)
        assert len(blocks) == -(-stop // self.block_size), f"the host is wrong: {stop} tokens in host blocks {blocks}"
        shares = self.host.records[blocks].view(self.device.keys.dtype).reshape(len(blocks), 2, right.model.LAYERS, -1)
        for name, share, expected in zip("KV", shares.swapaxes(0, 1), (right.keys, right.values), strict=True):
            found = share.swapaxes(0, 1).reshape(len(expected), -1, *expected.shape[2:])[:, :stop]
            wrong = np.argwhere((found != expected[:, :stop]).any(axis=(0, 2, 3)))[:, 0].tolist()
            assert not wrong, f"{name} on the host is wrong at positions {wrong} of host blocks {blocks}"

    def finish(self) -> None:
        """End everything; all blocks of both tiers come back."""
        self.finish_steps()
        for sequence in self.sequences:
            sequence.release()
        self.finish_plans()
        self.drain()
        super().finish()
        stats = self.pager.stats()
        assert stats.writing_blocks == stats.quarantined_blocks == stats.swapped_sequences == 0
        assert stats.host_writing_blocks == stats.host_quarantined_blocks == stats.host_active_blocks == 0
        assert stats.host_free_blocks + stats.host_cached_blocks == stats.host_total_blocks
        self.pager.reset()
        stats = self.pager.stats()
        assert (stats.free_blocks, stats.host_free_blocks) == (stats.total_blocks, stats.host_total_blocks)


def ordered(ranges: str) -> list[int]:
    """``"3-5 9 2"`` as numbers, in this order."""
    spans = [each.split("-") for each in ranges.split() if each != "-"]
    return [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]
