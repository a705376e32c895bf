"""The demo's server without a model: every scheme serves everything, and leaves its memory as it found it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvpager
import kvpager.reference
from kvpager.cli.serving import CallTimes, Memory, Paged, Reserved, Server
from kvpager.workload import ChatWorkload, chat_workload

MAX_CONTEXT = 2048
SLOTS = 16_384


def workload(seed: int) -> ChatWorkload:
    return chat_workload(seed, num_chats=40, chats_per_step=0.5, max_context=MAX_CONTEXT)


class Checked(Paged):
    """Looks at the pager after every call that changes much."""

    def admit(self, prompt: NDArray[np.int32]) -> Any | None:
        handle = super().admit(prompt)
        self.look()
        return handle

    def preempt(self, handle: Any) -> None:
        super().preempt(handle)
        self.look()

    def finish(self, handle: Any) -> None:
        super().finish(handle)
        self.look()

    def look(self) -> None:
        assert self.pager.check() == []
        if not self.keep:
            assert self.pager.stats().cached_blocks == 0


def schemes(seed: int) -> dict[str, Memory]:
    def pager(**options: Any) -> kvpager.Pager:
        return kvpager.Pager(SLOTS // 16, 16, **options)

    return {
        "reserved": Reserved(SLOTS, MAX_CONTEXT),
        "paged": Checked(pager(prefix_cache=False, seed=seed)),
        "shared": Checked(pager(seed=seed), keep=False),
        "kept": Checked(pager(seed=seed)),
        "kept by the reference": Checked(kvpager.reference.Pager(SLOTS // 16, 16)),
    }


@pytest.mark.parametrize("seed", range(3))
def test_each_idea_gains(seed: int) -> None:
    load = workload(seed)
    memories = schemes(seed)
    served = {name: Server(load, memory).run() for name, memory in memories.items()}
    assert served["reserved"].running_max == SLOTS // MAX_CONTEXT
    assert served["paged"].running_mean > 1.5 * served["reserved"].running_mean
    assert served["shared"].steps <= served["paged"].steps < served["reserved"].steps
    assert served["reserved"].wasted_mean > 16 > served["paged"].wasted_mean
    computed = {name: memory.computed() for name, memory in memories.items()}
    assert computed["reserved"] == load.prompt_tokens
    assert computed["kept"] < computed["shared"] < computed["paged"]
    assert served["kept"] == served["kept by the reference"]
    kept, reference = memories["kept"], memories["kept by the reference"]
    assert isinstance(kept, Paged)
    assert isinstance(reference, Paged)
    assert kept.answers == reference.answers
    assert kept.pager.stats() == reference.pager.stats()
    for memory in memories.values():
        if isinstance(memory, Paged):
            stats = memory.pager.stats()
            assert stats.running_sequences == stats.preempted_sequences == stats.active_blocks == 0


def test_preempted_requests_finish_too() -> None:
    load = workload(0)
    memory = Checked(kvpager.Pager(MAX_CONTEXT // 16 + 20, 16))
    served = Server(load, memory).run()
    stats = memory.pager.stats()
    assert served.preemptions == stats.preemptions > 0
    assert stats.admitted_sequences == load.num_requests


def test_progress_counts_finished_requests() -> None:
    load = workload(1)
    seen: list[tuple[int, int]] = []
    Server(load, Reserved(SLOTS, MAX_CONTEXT)).run(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (load.num_requests, load.num_requests)
    assert seen == sorted(seen)


def test_call_times_leave_out_the_clock() -> None:
    times = CallTimes()
    for _ in range(1000):
        assert times.timed("nothing", int, "7") == 7
    count, mean = times.mean_us()["nothing"]
    assert count == 1000
    assert 0 <= mean < 5
