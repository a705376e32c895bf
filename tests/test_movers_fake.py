"""The fake mover: the same choices for a seed, legal orders only, and every kind of missing order seen."""

from __future__ import annotations

import multiprocessing
from functools import partial

import numpy as np
import pytest
from movers_support import LAYOUTS, SWAP_IN, SWAP_OUT, filled, plan

from kvpager import ConfigError, TransferError
from kvpager.movers import HostArena, Mover, NumpyPool
from kvpager.testing import FakeMover

SEEDS = range(40)
BLOCKS, FRAMES = 8, 8


class World:
    """A pool of one float a block, an arena, and a fake mover between them."""

    def __init__(self, seed, **faults):
        self.kv = np.arange(BLOCKS, dtype=np.float32)
        pool = NumpyPool([self.kv])
        self.host = HostArena(FRAMES, 4)
        self.frames = self.host.records.view(np.float32)[:, 0]
        self.mover = FakeMover(pool, self.host, seed, **faults)

    def write(self, block, value):
        """A kernel that fills a block."""

        def work():
            self.kv[block] = value

        return work

    def finish(self):
        while self.mover.run_some(1):
            pass


def test_it_is_a_mover():
    mover: Mover = World(0).mover
    assert isinstance(mover, FakeMover)
    with pytest.raises(ConfigError, match="blocks have 5 bytes"):
        FakeMover(NumpyPool([np.zeros(3, np.float32)]), HostArena(3, 5), 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_copies_what_the_plans_say(name):
    _, numpy_pool, host = filled(name)
    kept = [view.copy() for view in numpy_pool.views]
    with FakeMover(numpy_pool, host, 1) as mover:
        out = mover.submit(plan(SWAP_OUT, [5, 0, 3], [8, 2, 0]))
        back = mover.submit(plan(SWAP_IN, [0, 8, 2], [1, 6, 5]))
        assert mover.wait(1) == [out, back]
    assert out.done.all()
    assert back.state == "done"
    for view, before in zip(numpy_pool.views, kept, strict=True):
        assert np.array_equal(view, before[[0, 3, 2, 3, 4, 0, 5]])


def history(seed):
    """A mixed run: faults, kernels, conflicts. Returns all that can be seen of it."""
    world = World(seed, fail=0.3, never=0.1, late=2)
    mover, reports = world.mover, []
    stream = mover.stream()
    for number in range(12):
        stream.launch(world.write(number % 8, 100.0 + number), [number % 8])
        mover.submit(plan(SWAP_OUT, [number % 8, (number + 3) % 8], [number % 5, 7], 2 * number), after=stream)
        ticket = mover.submit(plan(SWAP_IN, [number % 4], [(number + 1) % 8], 2 * number + 1))
        mover.order(stream, ticket)
        reports.append([(t.plan.id, t.state, t.done.tolist()) for t in mover.poll()])
    mover.thaw()
    reports.append([(t.plan.id, t.state, t.done.tolist()) for t in mover.wait(1)])
    return mover.log, reports, world.kv.tobytes(), world.frames.tobytes()


def test_a_seed_is_a_history():
    assert history(3) == history(3)
    assert len({tuple(history(seed)[0]) for seed in range(8)}) == 8
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(history, (3,)) == history(3)


def test_blocks_run_in_any_order_and_mixed_with_other_plans():
    orders = set()
    for seed in SEEDS:
        world = World(seed)
        world.mover.submit(plan(SWAP_OUT, [0, 1], [0, 1], 0))
        world.mover.submit(plan(SWAP_OUT, [2, 3], [2, 3], 1))
        world.finish()
        orders.add(tuple(line for line in world.mover.log if "block" in line))
        assert world.frames[:4].tolist() == [0, 1, 2, 3]
    assert len(orders) > 15  # Of 24.


def test_destinations_are_rubbish_until_they_are_copied():
    world = World(0)
    world.frames[:] = 5
    ticket = world.mover.submit(plan(SWAP_OUT, [1, 2, 3], [1, 2, 3]))
    assert np.isnan(world.frames[1:4]).all()
    assert (world.frames[[0, 4]] == 5).all()
    while not ticket.ended:
        assert np.isnan(world.frames[1:4]).tolist() == [not done for done in ticket.done.tolist()]
        world.mover.run_some(1)
    assert world.frames[:5].tolist() == [5, 1, 2, 3, 5]


def test_common_blocks_keep_the_order_of_submission():
    for seed in SEEDS:
        world = World(seed)
        world.frames[:] = 50 + np.arange(FRAMES)
        tickets = [
            world.mover.submit(plan(SWAP_OUT, [3], [0])),  # 3 goes out,
            world.mover.submit(plan(SWAP_IN, [5], [3])),  # another block comes into its place,
            world.mover.submit(plan(SWAP_IN, [0], [4])),  # and the host frame that 3 filled is read.
            world.mover.submit(plan(SWAP_OUT, [4], [5])),
        ]
        world.mover.wait(1)
        assert all(ticket.state == "done" for ticket in tickets)
        assert (world.kv[3], world.kv[4], world.frames[0], world.frames[5]) == (55, 3, 3, 3)


def seen(test):
    """Seeds out of all for which a test's result is wrong."""
    return sum(bool(test(seed)) for seed in SEEDS)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_offload_before_its_kernel_is_seen(ordered):
    """W12: the copy out must come after the kernel that fills the block."""

    def wrong(seed):
        world = World(seed)
        stream = world.mover.stream()
        stream.launch(world.write(2, 77), [2])
        world.mover.submit(plan(SWAP_OUT, [2], [0]), after=stream if ordered else None)
        world.finish()
        return world.frames[0] != 77

    assert (seen(wrong) == 0) if ordered else (seen(wrong) > 10)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_kernel_before_its_fetch_is_seen(ordered):
    """The compute stream must wait for the copy in."""

    def wrong(seed):
        world = World(seed)
        world.frames[0] = 55
        stream, read = world.mover.stream(), []
        ticket = world.mover.submit(plan(SWAP_IN, [0], [2]))
        if ordered:
            world.mover.order(stream, ticket)
        stream.launch(lambda: read.append(float(world.kv[2])))
        world.finish()
        return read != [55.0]

    assert (seen(wrong) == 0) if ordered else (seen(wrong) > 10)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_fetch_into_a_block_that_a_kernel_still_reads_is_seen(ordered):
    """W11: the block was freed at once, and the running step still reads it."""

    def wrong(seed):
        world = World(seed)
        stream, read = world.mover.stream(), []
        stream.launch(lambda: read.append(float(world.kv[2])))
        world.mover.submit(plan(SWAP_IN, [0], [2]), after=stream.record() if ordered else None)
        world.finish()
        return read != [2.0]

    assert (seen(wrong) == 0) if ordered else (seen(wrong) > 10)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_reader_that_does_not_wait_is_seen(ordered):
    def wrong(seed):
        world = World(seed)
        ticket = world.mover.submit(plan(SWAP_OUT, [2], [0]))
        if ordered:
            world.mover.wait(1, [ticket])
        return world.frames[0] != 2

    assert seen(wrong) == (0 if ordered else len(SEEDS))


def test_a_block_reused_while_it_is_read_is_seen():
    """W2: what the pager must prevent. The kernel that got the block too early is not ordered behind the copy."""

    def wrong(seed):
        world = World(seed)
        world.mover.submit(plan(SWAP_OUT, [2], [0]))
        world.mover.stream().launch(world.write(2, 77), [2])
        world.finish()
        return world.frames[0] != 2

    assert seen(wrong) > 10


def test_streams_run_in_order_and_race_each_other():
    logs = set()
    for seed in SEEDS:
        world = World(seed)
        ran: list[str] = []
        one, two = world.mover.stream(), world.mover.stream()
        for stream, name in ((one, "a"), (two, "b")):
            for number in range(3):
                stream.launch(partial(ran.append, name + str(number)))
        two.wait(one.record())
        two.launch(partial(ran.append, "last"))
        event = two.record()
        assert not event.happened
        world.finish()
        assert event.happened
        assert [entry for entry in ran if entry[0] == "a"] == ["a0", "a1", "a2"]
        assert [entry for entry in ran if entry[0] == "b"] == ["b0", "b1", "b2"]
        assert ran[-1] == "last"
        logs.add(tuple(ran))
    assert len(logs) > 10


def test_an_idle_stream_is_no_wait():
    world = World(0)
    stream = world.mover.stream()
    assert stream.record().happened
    ticket = world.mover.submit(plan(SWAP_OUT, [0], [0]), after=stream)
    world.mover.order(stream, ticket)
    world.mover.wait(1)
    world.mover.order(stream, ticket)
    assert ticket.state == "done"


def test_a_question_as_after():
    world, open_ = World(0), []
    ticket = world.mover.submit(plan(SWAP_OUT, [0], [0]), after=lambda: bool(open_))
    assert world.mover.wait(1) == []
    open_.append(1)
    assert world.mover.wait(1) == [ticket]


def test_some_blocks_fail_and_the_mask_is_exact():
    """L3: every ticket ends once, and says what arrived."""
    states = set()
    for seed in SEEDS:
        world = World(seed, fail=0.5)
        tickets = [world.mover.submit(plan(SWAP_OUT, [i, i + 1], [i, i + 1], i)) for i in (0, 2, 4, 6)]
        assert set(world.mover.wait(1)) == set(tickets)
        for ticket in tickets:
            states.add((ticket.state, *ticket.done.tolist()))
            for number, frame in enumerate(ticket.plan.destination_ids.tolist()):
                assert (world.frames[frame] == frame) if ticket.done[number] else np.isnan(world.frames[frame])
            assert (ticket.error is None) == (ticket.state == "done") == ticket.done.all()
        assert world.mover.poll() == []
    assert states == {("done", True, True), ("failed", True, False), ("failed", False, True), ("failed", False, False)}


def test_a_plan_that_never_ends_ends_late():
    """L4: the caller gives up, and the report comes later."""
    world = World(0, never=1.0)
    ticket = world.mover.submit(plan(SWAP_OUT, [0, 1], [0, 1]))
    behind = world.mover.submit(plan(SWAP_IN, [0], [5]))
    assert world.mover.wait(1) == []
    assert [world.mover.poll() for _ in range(20)] == [[]] * 20
    assert not ticket.ended
    world.mover.thaw()
    assert world.mover.wait(1) == [ticket, behind]
    assert (ticket.state, behind.state, world.kv[5]) == ("done", "done", 0)


def test_a_plan_that_never_ends_may_have_copied_some():
    copied = set()
    for seed in SEEDS:
        world = World(seed, never=1.0)
        ticket = world.mover.submit(plan(SWAP_OUT, [0, 1], [0, 1]))
        world.finish()
        copied.add(tuple(ticket.done.tolist()))
        assert np.isnan(world.frames[:2]).tolist() == [not done for done in ticket.done.tolist()]
    assert len(copied) == 4


def test_reports_come_late():
    delays = set()
    for seed in SEEDS:
        world = World(seed, late=3)
        ticket = world.mover.submit(plan(SWAP_OUT, [0], [0]))
        world.finish()
        assert ticket.ended
        polls = 0
        while not (reported := world.mover.poll()):
            polls += 1
        assert reported == [ticket]
        delays.add(polls)
    assert delays == {0, 1, 2, 3}


def test_close_fails_what_is_left():
    world = World(0)
    ticket = world.mover.submit(plan(SWAP_OUT, [0, 1], [0, 1]), after=lambda: False)
    world.mover.close()
    world.mover.close()
    assert world.mover.poll() == [ticket]
    assert (ticket.state, ticket.done.tolist()) == ("failed", [False, False])
    with pytest.raises(TransferError, match="closed"):
        world.mover.submit(plan(SWAP_OUT, [0], [0]))


def test_plans_that_do_not_fit_are_refused():
    world = World(0)
    with pytest.raises(TransferError, match="destination 8"):
        world.mover.submit(plan(SWAP_OUT, [0], [8]))
    with pytest.raises(ValueError, match="finite"):
        world.mover.wait(float("inf"))
