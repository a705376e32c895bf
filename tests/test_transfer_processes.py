"""The scheduler in one process, each rank's pools and mover in another: plans and reports are messages.

A scheduler never sees KV, a worker never sees a pager. The KV of a position is a number that depends on the rank and on
all tokens up to it, so what a table leads to can be checked after any way through the tiers.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpager
from kvpager import Plan
from kvpager.movers import HostArena, NumpyMover, NumpyPool

pytestmark = pytest.mark.usefixtures("watchdog")

BLOCKS, FRAMES, BLOCK_SIZE = 16, 24, 4
SECONDS = 30.0
"""Far more than anything here takes."""


def kv(rank: int, tokens: list[int]) -> npt.NDArray[np.int64]:
    """What a rank computes for each position."""
    values, value = [], rank + 1
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
        values.append(value)
    return np.array(values, np.int64)


# A worker.


class Worker:
    """The pools of one rank, and its mover. It does what it is told, message by message."""

    def __init__(self, connection: Connection, memory: SharedMemory | None) -> None:
        self.connection = connection
        size = BLOCKS * BLOCK_SIZE
        if memory is None:
            self.kv, arena = np.full((BLOCKS, BLOCK_SIZE), -1, np.int64), None
        else:
            assert memory.buf is not None
            self.kv = np.frombuffer(memory.buf, np.int64, size).reshape(BLOCKS, BLOCK_SIZE)
            arena = memory.buf[8 * size :]
        self.host = HostArena(FRAMES, BLOCK_SIZE * 8, arena)
        self.mover = NumpyMover(NumpyPool([self.kv]), self.host)

    def run(self) -> None:
        """Until told to stop."""
        while True:
            if self.connection.poll(0.001):
                message, *arguments = self.connection.recv()
                if message == "stop":
                    return
                getattr(self, message)(*arguments)
            for ticket in self.mover.poll():
                self.connection.send((ticket.plan, ticket.done))

    def write(self, slots: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
        self.kv.reshape(-1)[slots] = values

    def read(self, table: npt.NDArray[np.int32]) -> None:
        self.connection.send(("read", self.kv[table].reshape(-1)))

    def move(self, plan: Plan, how: str) -> None:
        """Copy; or fail; or stop in the middle, with the first block torn."""
        after: Any = None
        if how == "fail":
            after = Future()
            after.set_exception(OSError("the link is down"))
        elif how == "hang":
            after = threading.Event()
            side = self.kv if plan.destination == "device" else self.host.records
            side[plan.destination_ids[0]] = 99
        self.mover.submit(plan, after)

    def vouch(self) -> None:
        """Nobody but this process writes to these pools, and it has no plan under way."""
        self.connection.send(("vouched", None))


def serve(connection: Connection, memory_name: str | None) -> None:
    """The main function of a worker's process."""
    memory = SharedMemory(memory_name) if memory_name else None
    worker = Worker(connection, memory)
    worker.run()
    worker.mover.close()
    # Views of the shared memory must be gone before it can be closed.
    del worker
    if memory is not None:
        memory.close()


# The scheduler.


class Rank:
    """The scheduler's end of a worker."""

    def __init__(self, number: int, memory_name: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, memory_name), daemon=True)
        self.process.start()
        theirs.close()
        self.reports: list[tuple[Plan, npt.NDArray[np.bool_]]] = []

    def send(self, *message: Any) -> None:
        self.connection.send(message)

    def receive(self, wanted: str) -> Any:
        """The answer to a question; reports that come before it are kept."""
        while True:
            assert self.connection.poll(SECONDS), "the worker does not answer"
            what, answer = self.connection.recv()
            if not isinstance(what, Plan):
                assert what == wanted
                return answer
            self.reports.append((what, answer))

    def report(self) -> list[tuple[Plan, npt.NDArray[np.bool_]]]:
        """What was reported so far."""
        while self.connection.poll(0.0):
            self.reports.append(self.connection.recv())
        reports, self.reports = self.reports, []
        return reports

    def stop(self) -> None:
        self.send("stop")
        self.process.join(SECONDS)
        assert self.process.exitcode == 0


class Scheduler:
    """A pager, and the ranks that it works for. A plan goes to all of them, and is reported once, when all are done."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.pager = kvpager.Pager(BLOCKS, BLOCK_SIZE, num_host_blocks=FRAMES)
        self.ranks = ranks
        self.waiting: dict[Plan, list[npt.NDArray[np.bool_]]] = {}

    def submit(self, plan: Plan | None, *how: str) -> None:
        """Each rank is told how to take it: "copy" by default."""
        if plan is not None and self.pager.start(plan):
            self.waiting[plan] = []
            for rank, its in zip(self.ranks, how or ["copy"] * len(self.ranks), strict=True):
                rank.send("move", plan, its)

    def poll(self) -> list[tuple[Plan, bool]]:
        """Pass on what all ranks have reported: the plans, and whether all of their blocks have arrived everywhere."""
        ended = []
        for rank in self.ranks:
            for plan, done in rank.report():
                assert plan in self.waiting, "a plan is reported once by each rank"
                self.waiting[plan].append(done)
        for plan, masks in list(self.waiting.items()):
            if len(masks) == len(self.ranks):
                done = np.logical_and.reduce(masks)
                answer = self.pager.complete(plan) if done.all() else self.pager.fail(plan, done)
                assert answer is True
                assert self.pager.complete(plan) is False
                del self.waiting[plan]
                ended.append((plan, bool(done.all())))
        assert self.pager.check() == []
        return ended

    def settle(self) -> None:
        """Wait for all reports."""
        while self.waiting:
            self.poll()

    def compute(self, sequence: Any) -> None:
        """All ranks compute what is missing."""
        tokens, start = sequence.tokens.tolist(), sequence.num_committed
        slots = sequence.slots(start, len(tokens))
        for rank in self.ranks:
            rank.send("write", slots, kv(rank.number, tokens)[start:])
        sequence.commit()

    def compare(self, sequence: Any) -> None:
        """What is committed is in the blocks of the table, on each rank."""
        tokens = sequence.tokens.tolist()[: sequence.num_committed]
        for rank in self.ranks:
            rank.send("read", sequence.block_ids)
            found = rank.receive("read")[: len(tokens)]
            assert np.array_equal(found, kv(rank.number, tokens)), f"rank {rank.number}: {tokens}"

    def serve(self, prompt: list[int]) -> None:
        """One request from beginning to end."""
        sequence = self.pager.admit(prompt, fetch=True)
        self.submit(sequence.fetch)
        self.settle()
        self.compute(sequence)
        self.compare(sequence)
        sequence.release()


@contextmanager
def ranks(number: int) -> Iterator[list[Rank]]:
    """Workers with memory of their own."""
    workers = [Rank(each) for each in range(number)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join(SECONDS)


def test_two_ranks_copy_their_shards_and_the_pager_is_told_once(seed: int) -> None:
    """Requests that begin alike, offloads and swaps; now and then the link of one rank, or of both, is down."""
    draw = random.Random(seed)
    bases = [[draw.randrange(3) for _ in range(draw.randint(8, 30))] for _ in range(6)]
    with ranks(2) as workers:
        scheduler = Scheduler(workers)
        pager, counts = scheduler.pager, {True: 0, False: 0}
        for _ in range(150):
            base = draw.choice(bases)
            sequence = pager.try_admit([*base[: draw.randint(1, len(base))], draw.randrange(3)], fetch=True)
            if sequence is not None:
                how = [draw.choice(["copy"] * 5 + ["fail"]) for _ in workers]
                scheduler.submit(sequence.fetch, *how)
                while sequence.state == "fetching":
                    for _, arrived in scheduler.poll():
                        counts[arrived] += 1
                scheduler.compute(sequence)
                if draw.random() < 0.5:
                    scheduler.submit(sequence.try_swap_out(), *how)
                    scheduler.settle()
                    if sequence.state == "swapped":
                        scheduler.submit(sequence.try_swap_in(), *how[::-1])
                        scheduler.settle()
                if sequence.state == "running":
                    scheduler.compare(sequence)
                sequence.release()
            scheduler.submit(pager.offload(draw.randint(1, 8)))
            scheduler.poll()
        scheduler.settle()
        assert pager.plans() == []
        assert counts[True] > 5
        assert counts[False] > 0
        stats = pager.stats()
        assert stats.fetched_blocks > 0
        assert stats.active_blocks == stats.host_active_blocks == stats.writing_blocks == stats.host_writing_blocks == 0
        for worker in workers:
            worker.stop()


def test_a_worker_that_is_killed_in_the_middle_of_plans() -> None:
    """The pools outlive it in shared memory. What it was writing goes to quarantine, until a new worker vouches."""
    memory = SharedMemory(create=True, size=8 * BLOCK_SIZE * (BLOCKS + FRAMES))
    worker = Rank(0, memory.name)
    try:
        scheduler = Scheduler([worker])
        pager = scheduler.pager
        first, second = list(range(17)), list(range(100, 117))
        scheduler.serve(first)
        scheduler.submit(pager.offload(BLOCKS))
        scheduler.settle()
        for filler in range(3):
            scheduler.serve([1000 + filler] * (4 * BLOCKS - 1))
        pager.forget([1002] * 4)
        assert pager.match(first)[:2] == (0, 0)
        scheduler.serve(second)
        running = pager.admit([7] * 9)
        scheduler.compute(running)

        fetching = pager.admit(first, fetch=True)
        fetch, offload = fetching.fetch, pager.offload(4)
        assert fetch is not None
        assert offload is not None
        for plan in (fetch, offload):
            scheduler.submit(plan, "hang")
        scheduler.compare(running)  # It is alive, and has done what it was told.
        worker.process.kill()
        worker.process.join(SECONDS)
        with pytest.raises((EOFError, ConnectionError)):
            worker.connection.recv()

        # Nobody knows what arrived.
        for plan, state, _ in pager.plans():
            assert state == "started"
            assert pager.abandon(plan)
        assert fetching.state == "preempted"
        stats = pager.stats()
        assert (stats.quarantined_blocks, stats.host_quarantined_blocks) == (len(fetch), len(offload)) == (4, 4)
        assert pager.check() == []

        # Meanwhile others go on, elsewhere: the destinations are nobody's to take.
        worker = Rank(0, memory.name)
        scheduler.ranks = [worker]
        scheduler.waiting.clear()
        scheduler.compare(running)
        scheduler.serve([9] * 13)
        other = pager.admit([8] * (4 * pager.stats().free_blocks))
        assert not set(other.block_ids.tolist()) & set(fetch.destination_ids.tolist())
        other.release()

        # The old process is gone, says the new one, and what it left is nobody's.
        worker.send("vouch")
        worker.receive("vouched")
        for plan in (fetch, offload):
            assert pager.reclaim(plan)
            assert pager.complete(plan) is False
        stats = pager.stats()
        assert stats.quarantined_blocks == stats.host_quarantined_blocks == 0
        fetching.resume()
        scheduler.compute(fetching)
        scheduler.compare(fetching)
        for sequence in (fetching, running):
            sequence.release()
        scheduler.serve(second)
        scheduler.submit(pager.offload(BLOCKS))
        scheduler.settle()
        assert pager.check() == []
        worker.stop()
    finally:
        worker.process.kill()
        worker.process.join(SECONDS)
        memory.close()
        memory.unlink()
