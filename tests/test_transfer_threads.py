"""Many threads serve requests while one thread reports plans of a slow mover: bytes, and the count at the end.

Each client writes its tokens' KV to the slots that it was given, and reads all of it back through its block table
before it lets go. What came from another client, from the host, or from a swap must be there.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpager
from kvpager.movers import HostArena, NumpyMover, NumpyPool

pytestmark = pytest.mark.usefixtures("watchdog", "hasty_threads")

BLOCK_SIZE, VALUES = 4, 3


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns every few instructions, so that they meet in the middle of everything."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def kv(tokens: list[int]) -> npt.NDArray[np.int64]:
    """A value for each position that depends on all tokens up to it."""
    values, value = [], 1
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
        values.append(value)
    return np.array(values, np.int64)


class Server:
    """A pager, the memory of both tiers, and a thread that alone speaks to the mover."""

    def __init__(self, num_blocks: int, num_host_blocks: int, seed: int) -> None:
        self.pager = kvpager.Pager(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)
        self.memory = np.full((num_blocks, BLOCK_SIZE), -1, np.int64)
        self.mover = NumpyMover(NumpyPool([self.memory]), HostArena(num_host_blocks, BLOCK_SIZE * 8))
        self.draw = random.Random(seed)
        self.stop = threading.Event()
        self.done = threading.Event()
        self.errors: list[BaseException] = []

    def report(self) -> None:
        """Start what is planned, sometimes give up, and pass reports on, until told to stop and nothing is left."""
        pager, given_up = self.pager, set()
        tickets: dict[Any, Any] = {}
        while not self.errors and not (self.stop.is_set() and not pager.plans()):
            for plan, state, _ in pager.plans():
                if state == "planned" and pager.start(plan):
                    tickets[self.mover.submit(plan, lambda: self.draw.random() < 0.5)] = plan
                elif state == "started" and plan not in given_up and self.draw.random() < 0.02:
                    assert pager.abandon(plan)
                    given_up.add(plan)
            for ticket in self.mover.wait(0.001):
                plan = tickets.pop(ticket)
                assert ticket.state == "done"
                if plan in given_up:
                    assert pager.reclaim(plan)
                elif self.draw.random() < 0.1:
                    # As if these had not arrived.
                    assert pager.fail(plan, [self.draw.random() < 0.7 for _ in range(len(plan))])
                else:
                    assert pager.complete(plan)
                assert pager.complete(plan) is False

    def settled(self, sequence: Any) -> str:
        """The state of a sequence once it is not on its way any more."""
        while (state := sequence.state) in ("fetching", "swapping_out", "swapping_in"):
            assert not self.errors, "another thread has failed"
            time.sleep(0.0002)
        return str(state)

    def write(self, sequence: Any, start: int) -> None:
        """Compute all positions from one on."""
        tokens = sequence.tokens.tolist()
        slots = sequence.slots(start, len(tokens))
        self.memory.reshape(-1)[slots] = kv(tokens)[start:]
        sequence.commit()

    def check(self, sequence: Any) -> None:
        """What its table leads to is what its tokens say."""
        tokens, table = sequence.tokens.tolist(), sequence.block_ids
        found = self.memory[table].reshape(-1)[: len(tokens)]
        assert np.array_equal(found, kv(tokens)), (tokens, table)


def client(server: Server, draw: random.Random, bases: list[list[int]], requests: int) -> None:
    """Requests that begin alike: admitted with a fetch, computed, decoded, sometimes swapped, and released."""
    pager = server.pager
    for _ in range(requests):
        base = draw.choice(bases)
        prompt = [*base[: draw.randint(1, len(base))], draw.randrange(VALUES)]
        sequence = pager.try_admit(prompt, fetch=True)
        if sequence is None:
            time.sleep(0.0005)
            continue
        if draw.random() < 0.1:
            sequence.release("aborted")
            continue
        if server.settled(sequence) == "preempted" and sequence.try_resume() is None:
            sequence.release()
            continue
        server.write(sequence, sequence.num_committed)
        for token in [draw.randrange(VALUES) for _ in range(draw.randrange(6))]:
            if sequence.try_append(token) is not None:
                server.write(sequence, sequence.num_committed)
        if draw.random() < 0.4 and sequence.try_swap_out() is not None:
            if draw.random() < 0.1:
                sequence.release()
                continue
            tries = 0
            while server.settled(sequence) == "swapped" and tries < 20:
                tries += 1
                if sequence.try_swap_in() is None:
                    time.sleep(0.001)
        if sequence.state == "running":
            server.check(sequence)
        sequence.release()
        if draw.random() < 0.5:
            pager.offload(draw.randint(1, 6))


def test_clients_and_a_slow_mover(seed: int, runs: int | None) -> None:
    draw = random.Random(seed)
    server = Server(36, 40, seed)
    pager = server.pager
    bases = [[draw.randrange(VALUES) for _ in range(draw.randint(8, 30))] for _ in range(6)]

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            server.errors.append(error)

    def watch() -> None:
        while not server.done.is_set():
            assert pager.check() == []
            stats = pager.stats()
            assert (
                stats.free_blocks
                + stats.cached_blocks
                + stats.active_blocks
                + stats.writing_blocks
                + stats.quarantined_blocks
                == 36
            )
            time.sleep(0.001)

    clients = [
        threading.Thread(target=guarded, args=(client, server, random.Random(seed + number), bases, runs or 150))
        for number in range(4)
    ]
    others = [threading.Thread(target=guarded, args=(work,)) for work in (server.report, watch)]
    for thread in [*clients, *others]:
        thread.start()
    for thread in clients:
        thread.join()
    server.stop.set()
    others[0].join()
    server.done.set()
    others[1].join()
    server.mover.close()
    if server.errors:
        raise server.errors[0]
    assert pager.check() == []
    stats = pager.stats()
    assert stats.fetched_blocks > 0
    assert stats.swap_ins > 0
    assert stats.active_blocks == stats.writing_blocks == stats.quarantined_blocks == 0
    assert stats.host_active_blocks == stats.host_writing_blocks == stats.host_quarantined_blocks == 0
    assert stats.running_sequences == stats.preempted_sequences == stats.swapped_sequences == 0
