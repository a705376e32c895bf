"""The demo's server without a model: every scheme serves everything, and leaves its memory as it found it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvpager
import kvpager.reference
from kvpager.cli.serving import CallTimes, Memory, Paged, Reserved, Server, clock_us
from kvpager.workload import Chat, ChatWorkload, Turn, chat_workload

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


def test_a_request_that_fits_nowhere_is_an_error_and_no_endless_loop() -> None:
    turn = Turn(np.arange(2, dtype=np.int32), np.zeros(40, np.int32), 0)
    load = ChatWorkload(0, 128, 1, (Chat(0, np.arange(30, dtype=np.int32), (turn,)),))
    with pytest.raises(kvpager.ConfigError, match=r"a request of 65 tokens does not fit in the memory even alone"):
        Server(load, Paged(kvpager.Pager(4, 16))).run()


def test_call_times_are_as_measured_and_refusals_have_a_name_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100, 103, 200, 209, 300, 1300])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    times = CallTimes()
    answers = [times.timed("ask", lambda x: x, answer, refused="refused") for answer in (7, 0, None)]
    assert answers == [7, 0, None]
    assert times.mean_us() == {"ask": (2, 0.006), "refused": (1, 1.0)}


def test_what_the_clock_costs_is_more_than_nothing() -> None:
    assert clock_us(1000) > 0
