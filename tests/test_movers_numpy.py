"""The mover of host memory: bytes, order, waiting, errors, closing, threads and processes."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from movers_support import LAYOUTS, SWAP_IN, SWAP_OUT, block, filled, plan, pools, same

from kvpager import ConfigError, Plan, TransferError
from kvpager.movers import HostArena, Mover, NumpyMover, NumpyPool, Ticket

SECONDS = 20.0
"""Far more than anything here takes."""


@pytest.fixture
def small():
    pool, numpy_pool, host = filled(LAYOUTS[2])
    with NumpyMover(numpy_pool, host) as mover:
        yield pool, host, mover


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(name):
    pool, numpy_pool, host = filled(name)
    before = [block(pool, number) for number in range(7)]
    with NumpyMover(numpy_pool, host) as mover:
        out = mover.submit(plan(SWAP_OUT, [5, 0, 3], [8, 2, 0]))
        back = mover.submit(plan(SWAP_IN, [0, 8, 2], [1, 6, 5]))
        assert mover.wait(SECONDS) == [out, back]
    expected = [before[0], before[3], before[2], before[3], before[4], before[0], before[5]]
    for number in range(7):
        assert same(block(pool, number), expected[number]), number


def test_a_ticket_tells_its_plan(small):
    _, _, mover = small
    asked = plan(SWAP_OUT, [1, 2], [3, 4])
    gate = threading.Event()
    ticket = mover.submit(asked, after=gate)
    assert ticket.plan is asked
    assert (ticket.state, ticket.ended, ticket.error) == ("under way", False, None)
    assert ticket.done.tolist() == [False, False]
    assert mover.poll() == mover.wait(0.0) == mover.wait(-1) == []
    gate.set()
    assert mover.wait(SECONDS, [ticket]) == [ticket]
    assert (ticket.state, ticket.ended, ticket.error) == ("done", True, None)
    assert ticket.done.tolist() == [True, True]
    assert mover.poll() == []  # Each is reported once.
    assert repr(ticket) == "<Ticket of plan 0.0, swap_out: done, 2 of 2 blocks>"
    ticket.done[:] = False
    assert ticket.done.all()


def test_a_ticket_cannot_end_twice(small):
    ticket = small[2].submit(plan(SWAP_OUT, [1], [1]))
    small[2].wait(SECONDS)
    with pytest.raises(RuntimeError, match="ends a second time"):
        ticket._end(TransferError("late"))
    assert (ticket.state, ticket.error) == ("done", None)


def test_it_is_a_mover(small):
    mover: Mover = small[2]
    assert isinstance(mover, NumpyMover)


def test_an_empty_plan_is_done(small):
    ticket = small[2].submit(plan(SWAP_OUT, [], []))
    small[2].wait(SECONDS)
    assert ticket.state == "done"


def test_wait_for_one_of_several(small):
    _, _, mover = small
    gate = threading.Event()
    first = mover.submit(plan(SWAP_OUT, [1], [3]))
    second = mover.submit(plan(SWAP_OUT, [2], [4]), after=gate)
    assert mover.wait(SECONDS, [first]) == [first]
    assert not second.ended
    started = time.monotonic()
    assert mover.wait(0.05) == []
    assert 0.04 < time.monotonic() - started < SECONDS
    gate.set()
    assert mover.wait(SECONDS) == [second]


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), None])
def test_no_wait_is_for_ever(small, timeout):
    with pytest.raises(ValueError, match="finite"):
        small[2].wait(timeout)


def test_after_an_event_a_future_and_a_question(small):
    pool, host, mover = small
    event, future, asked = threading.Event(), Future(), []
    answers = iter([False, 0, None, True])

    def question():
        asked.append(1)
        return next(answers)

    tickets = [
        mover.submit(plan(SWAP_OUT, [1], [1]), after=event),
        mover.submit(plan(SWAP_OUT, [2], [2]), after=future),
        mover.submit(plan(SWAP_OUT, [3], [3]), after=question),
    ]
    assert mover.wait(0.1) == []
    # The work that the copy waits for: it reads what is written before, not what was there at submit (W12).
    pool.arrays[0][:, 1] = 77
    event.set()
    assert mover.wait(SECONDS, tickets[:1]) == tickets[:1]
    assert (host.records[1].view(np.float16)[:128] == 77).all()
    assert asked == []
    future.set_result("whatever")
    assert mover.wait(SECONDS) == tickets[1:]
    assert len(asked) == 4


def test_work_that_fails_fails_the_plan_uncopied(small):
    _, host, mover = small
    before = host.records.copy()
    future = Future()
    future.set_exception(TimeoutError("the kernel"))

    def question():
        raise ZeroDivisionError("asked")

    first = mover.submit(plan(SWAP_OUT, [1], [1]), after=future)
    second = mover.submit(plan(SWAP_OUT, [1], [1]), after=question)
    cancelled = Future()
    cancelled.cancel()
    third = mover.submit(plan(SWAP_OUT, [1], [1]), after=cancelled)
    last = mover.submit(plan(SWAP_OUT, [2], [2]))
    assert mover.wait(SECONDS) == [first, second, third, last]
    assert [ticket.state for ticket in (first, second, third, last)] == ["failed"] * 3 + ["done"]
    assert not first.done.any()
    assert isinstance(first.error, TransferError)
    assert "TimeoutError: the kernel" in str(first.error)
    assert "ZeroDivisionError: asked" in str(second.error)
    assert np.array_equal(host.records[1], before[1])


def test_plans_with_a_block_in_common_keep_their_order(small):
    """Swap-out of b then a fetch into b; an offload that fills h then a fetch that reads h; both, many times over."""
    pool, _, mover = small
    gate = threading.Event()
    tickets = [mover.submit(plan(SWAP_OUT, [0], [0]), after=gate)]
    # A ring: every block moves one on, through the same host frame. Any other order would lose one.
    before = [block(pool, number) for number in range(7)]
    for _ in range(3):
        for number in range(7):
            follower = (number + 1) % 7
            tickets.append(mover.submit(plan(SWAP_OUT, [number], [1])))
            tickets.append(mover.submit(plan(SWAP_IN, [0], [number])))
            tickets.append(mover.submit(plan(SWAP_OUT, [follower], [0])))
            tickets.append(mover.submit(plan(SWAP_IN, [1], [follower])))
    gate.set()
    assert mover.wait(SECONDS) == tickets

    # The same, one after the other, in plain Python.
    blocks, frames = list(before), [before[0], None]
    for _ in range(3):
        for number in range(7):
            follower = (number + 1) % 7
            frames[1] = blocks[number]
            blocks[number] = frames[0]
            frames[0] = blocks[follower]
            blocks[follower] = frames[1]
    for number in range(7):
        assert same(block(pool, number), blocks[number])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(SWAP_OUT, [0, 7], [0, 1]), "source 7, number 1 of the plan, is no block of the device's 7"),
        (plan(SWAP_OUT, [-1], [0]), "source -1, number 0"),
        (plan(SWAP_OUT, [0], [9]), "destination 9, number 0 of the plan, is no block of the host's 9"),
        (plan(SWAP_IN, [8], [8]), "destination 8, number 0 of the plan, is no block of the device's 7"),
        (plan(SWAP_OUT, [0, 1], [2]), "2 sources, but 1 destinations"),
        (plan(SWAP_OUT, [0, 1], [2, 2]), "destination 2 is named 2 times"),
        (plan(("offload", "device", "device"), [0], [1]), "both the device"),
        (plan(("fetch", "disk", "device"), [0], [1]), "between device and host, not 'disk'"),
        (plan(SWAP_OUT, [[0]], [[1]]), r"of shape \(1, 1\)"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_a_byte_moves(small, bad, message):
    pool, host, mover = small
    before = host.records.copy(), pool.arrays[0].copy()
    with pytest.raises(TransferError, match=message):
        mover.submit(bad)
    assert mover.wait(0) == []
    assert np.array_equal(host.records, before[0])
    assert np.array_equal(pool.arrays[0], before[1])


def test_ids_that_are_no_integers_are_refused(small):
    bad = plan(SWAP_OUT, [1], [1])
    object.__setattr__(bad, "source_ids", np.array([0.5]))
    with pytest.raises(TransferError, match="float64"):
        small[2].submit(bad)


def test_blocks_of_another_size_are_refused():
    _, pool, host = filled(LAYOUTS[0])
    with pytest.raises(ConfigError, match="blocks have 767 bytes"):
        NumpyMover(pool, HostArena(3, host.bytes_per_block - 1))


def test_close_while_waiting_fails_what_is_queued(small):
    pool, host, _ = small
    before = host.records.copy()
    for never in (threading.Event(), Future(), lambda: False):
        waiting = NumpyMover(NumpyPool(pool.arrays, pool.axes), host)
        tickets = [waiting.submit(plan(SWAP_OUT, [i], [i]), after=never if i == 0 else None) for i in range(3)]
        waiting.close()
        waiting.close()
        assert waiting.wait(0) == tickets
        assert all(ticket.state == "failed" and "closed" in str(ticket.error) for ticket in tickets)
        assert waiting.poll() == []
        with pytest.raises(TransferError, match="the mover is closed"):
            waiting.submit(plan(SWAP_OUT, [0], [0]))
    assert np.array_equal(host.records, before)


def test_close_while_copying_tells_what_was_copied():
    """A failed ticket's mask is exact: what is marked has arrived."""
    blocks, size = 400, 1 << 18
    source = np.random.default_rng(1).integers(0, 255, (blocks, size), np.uint8)
    host = HostArena(blocks, size)
    mover = NumpyMover(NumpyPool([source]), host)
    ticket = mover.submit(plan(SWAP_OUT, range(blocks), range(blocks)))
    while not ticket.done[0]:
        time.sleep(0.0001)
    mover.close()
    done = ticket.done
    assert ticket.ended
    if not done.all():
        assert ticket.state == "failed"
        assert f"closed after {done.sum()} of {blocks} blocks" in str(ticket.error)
    for number in range(blocks):
        assert np.array_equal(host.records[number], source[number]) or not done[number]


def test_a_mover_is_its_own_context_manager():
    _, pool, host = filled(LAYOUTS[0])
    with pytest.raises(RuntimeError, match="mine"), NumpyMover(pool, host) as mover:
        raise RuntimeError("mine")
    with pytest.raises(TransferError, match="closed"):
        mover.submit(plan(SWAP_OUT, [0], [0]))


def test_many_threads_submit_and_each_ticket_is_reported_once():
    _, pool, host = filled(LAYOUTS[0], num_host=64)
    reported: list[Ticket] = []
    with NumpyMover(pool, host) as mover:

        def work(thread):
            mine = [mover.submit(plan(SWAP_OUT, [i % 7], [8 * thread + i % 8], 100 * thread + i)) for i in range(50)]
            seen = mover.poll() + mover.wait(SECONDS, mine)
            assert all(ticket.state == "done" for ticket in mine)
            return mine, seen

        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(work, range(8)))
        reported = [ticket for _, seen in results for ticket in seen] + mover.poll()
    submitted = {ticket for mine, _ in results for ticket in mine}
    assert len(reported) == len(submitted) == 400
    assert set(reported) == submitted


def test_large_copies_release_the_interpreter_lock():
    """Another thread goes on while a block of 64 MiB is copied: it makes progress before that copy is over."""
    size = 64 << 20
    source = np.ones((2, size), np.uint8)
    host = HostArena(2, size)
    with NumpyMover(NumpyPool([source]), host) as mover:
        # The first write to the arena also takes its pages, which makes this slow.
        ticket = mover.submit(plan(SWAP_OUT, [0], [0]))
        ticks = 0
        while not ticket.ended:
            ticks += 1
        assert ticks > 100


@pytest.mark.parametrize("name", LAYOUTS)
def test_copy_blocks(name):
    pool, numpy_pool, _ = filled(name)
    before = [block(pool, number) for number in range(7)]
    numpy_pool.copy_blocks(np.array([[1, 4], [1, 0], [6, 2]], np.int32))
    for number, source in enumerate([1, 1, 6, 3, 1, 5, 6]):
        assert same(block(pool, number), before[source])
    numpy_pool.copy_blocks(np.empty((0, 2), np.int32))


@pytest.mark.parametrize(
    ("copies", "message"), [([[0, 7]], "destination 7"), ([[-1, 0]], "source -1"), ([0, 1], "n, 2")]
)
def test_copies_of_no_block_are_refused(copies, message):
    pool, numpy_pool, _ = filled(LAYOUTS[0])
    before = [block(pool, number) for number in range(7)]
    with pytest.raises(TransferError, match=message):
        numpy_pool.copy_blocks(np.array(copies, np.int32))
    assert all(same(block(pool, number), before[number]) for number in range(7))


def rank(connection, number):
    """A rank of a tensor-parallel group: its own shard, the scheduler's plans. Runs in a process of its own."""
    pool = pools()[LAYOUTS[2]]
    for layer, array in enumerate(pool.arrays):
        array[...] = 100 * number + 10 * layer + np.arange(7)[None, :, None, None, None]
    host = HostArena(9, NumpyPool(pool.arrays, pool.axes).layout.bytes_per_block)
    with NumpyMover(NumpyPool(pool.arrays, pool.axes), host) as mover:
        while (asked := connection.recv()) is not None:
            mover.submit(asked)
            connection.send([(t.plan, t.state) for t in mover.wait(SECONDS)])
    connection.send([array[0, :, 0, 0, 0].tolist() for array in pool.arrays])


def test_ranks_in_other_processes_copy_the_same_plans():
    """A plan is a plain value: pickled to two workers that each copy their own shard, W3's identity kept."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(2)), strict=True)
    workers = [context.Process(target=rank, args=(theirs[i], i), daemon=True) for i in range(2)]
    for worker in workers:
        worker.start()
    plans = [plan(SWAP_OUT, [1, 4], [7, 0], 5), plan(SWAP_IN, [0, 7], [6, 2], 6)]
    assert pickle.loads(pickle.dumps(plans)) == plans
    for asked in plans:
        for connection in ours:
            connection.send(asked)
        for connection in ours:
            assert connection.recv() == [(asked, "done")]
    for number, connection in enumerate(ours):
        connection.send(None)
        base = 100 * number
        blocks = [0, 1, 1, 3, 4, 5, 4]
        assert connection.recv() == [[base + 10 * layer + each for each in blocks] for layer in range(3)]
    for worker in workers:
        worker.join(SECONDS)
        assert worker.exitcode == 0


class TestOddArguments:
    def test_what_is_no_plan(self) -> None:
        pool, host = NumpyPool([np.zeros((4, 8), np.uint8)]), HostArena(4, 8)
        one = np.array([1], np.int32)
        with NumpyMover(pool, host) as mover:
            for odd in (None, 7, "plan", (0, 0)):
                with pytest.raises(TypeError, match=r"plan must be a kvpager\.Plan"):
                    mover.submit(odd)  # type: ignore[arg-type]
            with pytest.raises(TransferError, match="source ids are a list"):
                mover.submit(Plan(0, 0, "offload", "device", [1], "host", one))  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="after must be"):
                mover.submit(Plan(0, 0, "offload", "device", one, "host", one), after=5)  # type: ignore[arg-type]
            for odd in (10**400, float("nan"), "1", None):
                with pytest.raises(ValueError, match="finite"):
                    mover.wait(odd)  # type: ignore[arg-type]
            assert mover.wait(np.int64(0)) == []  # type: ignore[arg-type]

    @pytest.mark.parametrize("copies", [[[2**32, 1]], [[0.5, 1.0]], [[-1, 1]], [[0, 4]]])
    def test_copies_are_not_converted_to_others(self, copies: list[list[float]]) -> None:
        pool = NumpyPool(array for array in [np.arange(32, dtype=np.uint8).reshape(4, 8)])  # type: ignore[arg-type]
        before = pool.views[0].copy()
        with pytest.raises(TransferError):
            pool.copy_blocks(np.array(copies))
        assert (pool.views[0] == before).all()

    def test_an_arena_larger_than_memory(self) -> None:
        with pytest.raises(MemoryError):
            HostArena(2**63, 1)

    def test_a_mover_that_nobody_closed_ends_its_worker(self) -> None:
        mover = NumpyMover(NumpyPool([np.zeros((4, 8), np.uint8)]), HostArena(4, 8))
        thread = mover._thread
        del mover
        gc.collect()
        thread.join(10.0)
        assert not thread.is_alive()

    def test_an_interrupt_leaves_the_lock_free(self) -> None:
        """Python code that takes a lock can be interrupted when it has it: then nobody else ever gets it."""
        one = np.array([1], np.int32)
        with NumpyMover(NumpyPool([np.zeros((4, 8), np.uint8)]), HostArena(4, 8)) as mover:

            def interrupt(frame: Any, event: str, argument: Any) -> None:
                if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                mover.poll()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            mover.submit(Plan(0, 0, "offload", "device", one, "host", one))
            assert [ticket.state for ticket in mover.wait(10.0)] == ["done"]
