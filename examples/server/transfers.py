"""The tiers: what leaves the device and comes back, and what becomes of a copy that fails or never ends.

The pager plans, a mover copies, and the pager is told how it ended:

    planned ── begin ───> under way ── the mover reports ──────> complete, or fail: undone, as if never planned
                             │
                             └──────── the deadline passes ────> abandon: undone, too, but the blocks that are being
                                                                 written stay in quarantine until the mover reports

All of it happens between steps, so what a plan reads is written, and no kernel runs that still reads what a plan
writes. A loop that plans ahead gives `submit` its stream as `after=`.

What the host has is saved on disk, too, where there is a disk tier: it carries out its own plans, and reports them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kvpager
from kvpager.movers import Mover, Ticket
from kvpager.tiers import Loading, Tier

WAIT_S = 0.002  # how long the loop sleeps at a time, if all it could do waits for a copy


@dataclass
class TransferCounters:
    transfers: int = 0
    failed_transfers: int = 0
    abandoned_transfers: int = 0


class Transfers:
    """Without a mover, all of this answers that nothing can be moved."""

    def __init__(
        self,
        pager: kvpager.Pager,
        mover: Mover | None,
        disk: Tier | None,
        *,
        deadline_s: float,
        offload_blocks: int,
    ) -> None:
        self.pager, self.mover, self.disk = pager, mover, disk
        self.deadline_ms, self.offload_blocks = round(deadline_s * 1000), offload_blocks
        self.abandoned: set[kvpager.Plan] = set()
        self.pause_ends_ms = 0
        self.counters = TransferCounters()

    @property
    def is_open(self) -> bool:
        """False without a mover, and as long as it owes an answer that is overdue."""
        return self.mover is not None and not self.abandoned

    @property
    def are_under_way(self) -> bool:
        return bool(self.pager.plans())

    def _overdue(self, patience_ms: int) -> list[kvpager.PlanStatus]:
        """Plans that the mover was given longer ago."""
        started = self.pager.plans(older_than=max(0, self.clock_ms() - patience_ms))
        return [each for each in started if each.plan.records is None]

    @staticmethod
    def clock_ms() -> int:
        return time.monotonic_ns() // 1_000_000

    # What can be moved

    def begin(self, plan: kvpager.Plan) -> None:
        if self.mover is not None and self.pager.start(plan, self.clock_ms()):  # else somebody waits for it already
            self.mover.submit(plan)
            self.counters.transfers += 1

    def offload(self) -> None:
        """Copies the coldest cached blocks that the host has not, a few at a time: evicted, they can come back."""
        is_paused = self.clock_ms() < self.pause_ends_ms
        if self.is_open and not is_paused and not self._is_under_way("offload"):
            plan = self.pager.offload(self.offload_blocks)
            if plan is not None:
                self.begin(plan)

    def save(self) -> None:
        """Saves the host's coldest blocks that the disk has not, a few at a time."""
        if self.disk is not None and not self._is_under_way("save"):
            self.disk.save(self.offload_blocks)

    def load(self, prompt: NDArray[np.int32], namespace: kvpager.Namespace) -> Loading | None:
        """Begins to bring to the host what the disk has of a prompt. None if there is nothing to wait for."""
        return None if self.disk is None else self.disk.load(prompt, namespace=namespace)

    def save_all(self) -> None:
        """Saves what is cached, as far as that is done before the deadline: the next server finds it."""
        deadline_ms = self.clock_ms() + self.deadline_ms
        while self.disk is not None and self.is_open and self.clock_ms() < deadline_ms:
            self.offload()
            self.save()
            if not self.are_under_way:
                return
            self.wait()

    def _is_under_way(self, kind: str) -> bool:
        return any(each.plan.kind == kind for each in self.pager.plans())

    # How it ends

    def poll(self) -> None:
        """Tells the pager what has ended, and gives up on what is overdue."""
        if self.mover is None:
            return
        for ticket in self.mover.poll():
            self._report(ticket)
        if self.disk is not None:
            self.disk.report()
        for plan, state, _ in self.pager.plans(max(0, self.clock_ms() - self.deadline_ms)):
            if plan.kind == "load" and state == "started":
                self.pager.abandon(plan)  # the disk hangs: who waits for it is computed
                self.counters.abandoned_transfers += 1
        for plan, state, _ in self._overdue(self.deadline_ms):
            if state == "started":
                self.pager.abandon(plan)
                self.abandoned.add(plan)
                self.counters.abandoned_transfers += 1
        if self._overdue(2 * self.deadline_ms):
            self.close()  # no answer even now: go on without the host, with all blocks

    def wait(self) -> None:
        """Sleeps a little, or until all has ended."""
        if self.mover is not None and self.are_under_way:
            for ticket in self.mover.wait(WAIT_S):
                self._report(ticket)
            if self.disk is not None:
                self.disk.wait(WAIT_S)

    def _report(self, ticket: Ticket) -> None:
        plan = ticket.plan
        if plan in self.abandoned:
            self.abandoned.remove(plan)
            self.pager.reclaim(plan)  # late, but now it is certain that nothing is written to its blocks any more
        elif ticket.state == "done":
            self.pager.complete(plan)
        else:
            self.pager.fail(plan, done=ticket.done)
            self.counters.failed_transfers += 1
            # The pager offers the same blocks again at once. Without a pause an idle server would do nothing but fail.
            self.pause_ends_ms = self.clock_ms() + self.deadline_ms

    def close(self) -> None:
        """Ends every plan. Right for a mover whose `close` waits for the copy it is at, as NumpyMover's does: nothing
        is written behind it. What is queued on a GPU that hangs must stay in quarantine for good."""
        if self.mover is None:
            return
        self.mover.close()
        self.mover = None
        self.abandoned.clear()
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        for plan, state, _ in self.pager.plans():
            if state == "abandoned":
                self.pager.reclaim(plan)
            elif state == "started":
                self.pager.fail(plan)
            else:
                self.pager.cancel(plan)
