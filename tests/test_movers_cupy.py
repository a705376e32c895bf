"""The GPU mover's logic, on a device that reorders whatever streams and events leave open. No GPU, no cupy."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
from movers_support import LAYOUTS, SWAP_IN, SWAP_OUT, block, filled, plan, same
from pretend_device import PretendDevice

from kvpager import ConfigError, TransferError
from kvpager.movers import CupyMover, CupyPool, HostArena, Mover
from kvpager.movers.lanes import choose_path, merged

SECONDS = 20.0
PATHS = ("direct", "staged")


def built(seed=0, name=LAYOUTS[2], num_host=9, device=None, **options):
    """Arrays, pool, arena and mover on a pretend device."""
    pool, _, host = filled(name, seed, num_host)
    device = device or PretendDevice(seed)
    gpu = CupyPool(pool.arrays, pool.axes, device)
    # Slots of one or two blocks, so that small plans go round them.
    options = {"slots": 2, "slot_bytes": 2 * host.bytes_per_block, **options}
    return pool, gpu, host, CupyMover(gpu, host, **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(name, path):
    pool, _, _, mover = built(1, name, path=path)
    before = [block(pool, number) for number in range(7)]
    with mover:
        out = mover.submit(plan(SWAP_OUT, [5, 0, 3, 6, 1], [8, 2, 0, 1, 3]))
        back = mover.submit(plan(SWAP_IN, [0, 8, 2], [1, 6, 5]))
        empty = mover.submit(plan(SWAP_OUT, [], []))
        assert set(mover.wait(SECONDS)) == {out, back, empty}
    assert [ticket.state for ticket in (out, back, empty)] == ["done"] * 3
    assert out.done.all()
    for number, source in enumerate([0, 3, 2, 3, 4, 0, 5]):
        assert same(block(pool, number), before[source])


def test_it_is_a_mover():
    mover: Mover = built()[3]
    mover.close()


def random_history(seed, path, device=None, plans=30):
    """Plans with many blocks in common, polled now and then. True if the bytes are those of one after the other."""
    draw = random.Random(seed)
    pool, _, _, mover = built(seed, path=path, device=device, slots=draw.choice([1, 2, 3]))
    device_side = [block(pool, number) for number in range(7)]
    host_side = {}
    tickets, reported = [], []
    with mover:
        for number in range(plans):
            count = draw.randint(1, 4)
            blocks = draw.sample(range(7), count)
            if draw.random() < 0.5 or len(host_side) < count:
                frames = draw.sample(range(9), count)
                for source, target in zip(blocks, frames, strict=True):
                    host_side[target] = device_side[source]
                tickets.append(mover.submit(plan(SWAP_OUT, blocks, frames, number)))
            else:
                frames = draw.sample(sorted(host_side), count)
                for source, target in zip(frames, blocks, strict=True):
                    device_side[target] = host_side[source]
                tickets.append(mover.submit(plan(SWAP_IN, frames, blocks, number)))
            if draw.random() < 0.3:
                reported += mover.poll()
        reported += mover.wait(SECONDS)
    assert len(reported) == len(set(reported)) == plans
    assert all(ticket.state == "done" for ticket in tickets)
    return all(same(block(pool, number), device_side[number]) for number in range(7))


@pytest.mark.parametrize("path", PATHS)
def test_plans_with_blocks_in_common_keep_their_order(path):
    """Slots and index buffers go round under many plans in flight, in every order that events leave open."""
    for seed in range(30):
        assert random_history(seed, path), seed


@pytest.mark.parametrize("path", PATHS)
def test_a_forgotten_wait_would_be_seen(path):
    """The test above can fail: with every tenth wait left out, it does."""

    def forgetful(seed):
        device = PretendDevice(seed)
        device.ignored_waits = 0.1
        return device

    assert not all(random_history(seed, path, forgetful(seed)) for seed in range(30))


def test_an_index_buffer_reused_too_early_would_be_seen(monkeypatch):
    from kvpager.movers.cupy_pool import IndexBuffers

    take = IndexBuffers.take

    def hasty(self, count):
        buffer = take(self, count)
        self.give(buffer)
        return buffer

    monkeypatch.setattr(IndexBuffers, "take", hasty)
    assert not all(random_history(seed, "staged") for seed in range(5))


def test_index_buffers_go_round():
    device = PretendDevice()
    _, gpu, _, mover = built(device=device, path="staged")
    with mover:
        for _ in range(5):
            for number in range(3):
                mover.submit(plan(SWAP_OUT, [number], [number]))
            mover.wait(SECONDS)
        assert len(gpu.indices._free) == 3
        buffer = gpu.indices.take(5000)
        assert len(buffer.host) == 8192


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["stream", "event"])
def test_copies_come_after_the_compute_work(path, form):
    """W12 and W11, for both directions."""
    for seed in range(10):
        pool, _, host, mover = built(seed, path=path)
        device = mover._device
        compute, event = device.stream(), device.event()
        read = []

        def kernel(pool=pool, read=read):
            pool.arrays[0][:, 1] = 77
            read.append(float(pool.arrays[0][0, 2, 0, 0, 0]))

        before = float(pool.arrays[0][0, 2, 0, 0, 0])
        device.compute(compute, kernel)
        device.record(event, compute)
        with mover:
            after = compute if form == "stream" else event
            mover.submit(plan(SWAP_OUT, [1], [0]), after=after)
            mover.submit(plan(SWAP_IN, [5], [2]), after=after)
            mover.wait(SECONDS)
        assert (host.records[0].view(np.float16)[:128] == 77).all()
        assert read == [before]


@pytest.mark.parametrize("path", PATHS)
def test_the_compute_stream_can_wait_for_a_ticket(path):
    for seed in range(10):
        pool, _, _, mover = built(seed, path=path)
        device, read = mover._device, []
        compute = device.stream()
        with mover:
            mover.submit(plan(SWAP_OUT, [3], [4]))
            ticket = mover.submit(plan(SWAP_IN, [4], [2]))
            mover.order(compute, ticket)
            device.compute(compute, lambda read=read, pool=pool: read.append(block(pool, 2)))
            mover.wait(SECONDS)
            while not read:
                device.schedule.run_one()
            assert same(read[0], block(pool, 3))
            mover.order(compute, ticket)  # It has ended: nothing to wait for.
            assert not compute.waits


def test_what_after_cannot_be():
    _, _, _, mover = built()
    with mover:
        with pytest.raises(TypeError, match="a str is no stream"):
            mover.submit(plan(SWAP_OUT, [1], [0]), after="now")
        assert mover.wait(0) == []
        assert not mover._book.under_way


def test_plans_that_do_not_fit_are_refused_before_a_byte_moves():
    device = PretendDevice()
    _, _, _, mover = built(device=device)
    before = len(device.copies)
    with mover:
        for bad in (plan(SWAP_OUT, [7], [0]), plan(SWAP_IN, [9], [0]), plan(SWAP_OUT, [0, 1], [2, 2])):
            with pytest.raises(TransferError):
                mover.submit(bad)
        with pytest.raises(ValueError, match="finite"):
            mover.wait(float("inf"))
    assert len(device.copies) == before


def test_staged_copies_take_a_record_a_block_and_merge_neighbours():
    device = PretendDevice()
    _, _, host, mover = built(device=device, path="staged", slot_bytes=4 * 768)
    size = host.bytes_per_block
    with mover:
        device.copies.clear()
        mover.submit(plan(SWAP_OUT, [5, 0, 3, 6, 1, 2], [8, 2, 3, 4, 0, 6]))
        mover.wait(SECONDS)
    # The index upload, then slots of four: frames 2, 3 and 4 are one copy.
    assert device.copies == [[24], [size, 3 * size], [size, size]]
    assert device.launches == [("gather", 16, 4), ("gather", 16, 2)]


def test_direct_copies_are_one_call_of_all_pieces():
    device = PretendDevice()
    _, _, _, mover = built(device=device, path="direct")
    with mover:
        device.copies.clear()
        mover.submit(plan(SWAP_IN, [8, 2, 0], [5, 0, 3]))
        mover.wait(SECONDS)
    assert device.copies == [[128] * 18]  # 3 layers, K and V.
    assert device.launches == []
    assert mover._lanes["device"].slots == []


def test_merged_neighbours():
    targets, sources, sizes = merged(*np.array([[0, 10, 20, 40, 50], [100, 110, 121, 130, 140], [10, 10, 5, 10, 10]]))
    assert (targets.tolist(), sources.tolist(), sizes.tolist()) == ([0, 20, 40], [100, 121, 130], [20, 5, 20])
    assert targets.dtype == sources.dtype == sizes.dtype == np.uint64


def test_the_path_is_chosen_by_the_length_of_pieces():
    assert [choose_path(size << 10, True) for size in (1, 63, 64, 2048)] == ["staged", "staged", "direct", "direct"]
    assert [choose_path(size << 10, False) for size in (64, 1023, 1024)] == ["staged", "staged", "direct"]
    assert built()[3].path == "staged"


@pytest.mark.parametrize(
    ("name", "width"), [(LAYOUTS[2], 16), ("bytes with scales beside", 4), ("every other element", 2)]
)
def test_the_widest_word_that_fits_is_used(name, width):
    _, gpu, _, mover = built(name=name)
    mover.close()
    assert gpu.width == width


def test_the_arena_is_pinned_once_and_given_back():
    device = PretendDevice()
    _, _, host, mover = built(device=device)
    assert mover.pinned
    mover.close()
    mover.close()
    address = host.records.ctypes.data
    assert device.pins == [("pin", address, host.records.nbytes), ("unpin", address)]
    with pytest.raises(TransferError, match="closed"):
        mover.submit(plan(SWAP_OUT, [0], [0]))


def test_memory_that_somebody_else_pinned_stays_pinned():
    device = PretendDevice(pinnable="already")
    _, _, _, mover = built(device=device)
    assert mover.pinned
    mover.close()
    assert [each[0] for each in device.pins] == ["pin"]


def test_no_pinning_is_a_warning_and_a_slower_path():
    with pytest.warns(RuntimeWarning, match="not pinned, so copies are slower .* did not pin"):
        pool, _, _, mover = built(device=PretendDevice(pinnable=False))
    assert not mover.pinned
    before = block(pool, 1)
    with mover:
        mover.submit(plan(SWAP_OUT, [1], [0]))
        mover.submit(plan(SWAP_IN, [0], [2]))
        mover.wait(SECONDS)
    assert same(block(pool, 2), before)


@pytest.mark.parametrize("path", PATHS)
def test_a_refused_copy_fails_its_plan_and_no_other(path):
    device = PretendDevice(3)
    pool, _, _, mover = built(device=device, path=path)
    before = block(pool, 1)
    with mover:
        device.fail_copy = len(device.copies) + 1
        good = mover.submit(plan(SWAP_OUT, [1], [0], 1)) if path == "direct" else None
        bad = mover.submit(plan(SWAP_OUT, [2, 3, 4], [1, 2, 3], 2))
        late = mover.submit(plan(SWAP_OUT, [1], [5], 3))
        back = mover.submit(plan(SWAP_IN, [5], [6], 4))
        mover.wait(SECONDS)
    assert (bad.state, bad.done.any()) == ("failed", False)
    assert "this copy was refused" in str(bad.error)
    assert late.state == back.state == "done"
    assert good is None or good.state == "done"
    assert same(block(pool, 6), before)


def test_a_broken_device_fails_every_plan():
    device = PretendDevice()
    _, _, _, mover = built(device=device)
    tickets = [mover.submit(plan(SWAP_OUT, [number], [number])) for number in range(3)]
    device.broken = True
    assert mover.wait(SECONDS) == tickets
    assert all(ticket.state == "failed" and not ticket.done.any() for ticket in tickets)
    with pytest.raises(TransferError, match="the device failed before"):
        mover.submit(plan(SWAP_OUT, [0], [0]))
    for _ in range(2):
        with pytest.raises(TransferError, match="closed, but the device failed and may still copy: "):
            mover.close()
    assert [each[0] for each in device.pins] == ["pin"]


def test_close_does_not_wait_for_ever_and_leaves_the_memory_to_the_device():
    """L4: what is queued on a device that does not answer cannot be taken back."""
    device = PretendDevice()
    _, _, _, mover = built(device=device)
    device.idle = True
    ticket = mover.submit(plan(SWAP_OUT, [0], [0]))
    assert mover.wait(0.01) == []
    for _ in range(2):
        with pytest.raises(TransferError, match=r"still copies after 0\.01 seconds: leave pool and arena as they are"):
            mover.close(timeout=0.01)
    assert mover.poll() == [ticket]
    assert ticket.state == "failed"
    assert [each[0] for each in device.pins] == ["pin"]
    device.idle = False
    while device.schedule.run_one():
        pass
    assert mover.poll() == []
    assert [each[0] for each in device.pins] == ["pin"]
    mover.close()  # now it can promise what close() promises
    mover.close()
    assert [each[0] for each in device.pins] == ["pin", "unpin"]


def test_leaving_the_with_block_says_that_the_device_still_copies():
    device = PretendDevice()
    _, _, _, mover = built(device=device)
    device.idle = True
    mover.submit(plan(SWAP_OUT, [0], [0]))
    close = mover.close
    mover.close = lambda: close(0.01)
    with pytest.raises(TransferError, match="the device still copies"), mover:
        pass
    device.idle = False
    close()


def test_close_reports_what_ended_in_it():
    _, _, _, mover = built()
    tickets = [mover.submit(plan(SWAP_OUT, [number], [number])) for number in range(3)]
    mover.close()
    assert mover.poll() == tickets
    assert all(ticket.state == "done" for ticket in tickets)


@pytest.mark.parametrize("name", LAYOUTS)
def test_copy_blocks_on_the_callers_stream(name):
    pool, _, _ = filled(name)
    device = PretendDevice(2)
    gpu = CupyPool(pool.arrays, pool.axes, device)
    before = [block(pool, number) for number in range(7)]
    stream, event = device.stream(), device.event()
    gpu.copy_blocks(np.empty((0, 2), np.int32), stream)
    gpu.copy_blocks(np.array([[1, 4], [1, 0], [6, 2]], np.int32), stream)
    gpu.copy_blocks(np.array([[4, 5]], np.int32), stream)
    device.record(event, stream)
    while not device.happened(event):
        pass
    for number, source in enumerate([1, 1, 6, 3, 1, 1, 6]):
        assert same(block(pool, number), before[source])
    with pytest.raises(TransferError, match="destination 7"):
        gpu.copy_blocks(np.array([[0, 7]], np.int32), stream)
    gpu.copy_blocks(np.array([[4, 5]], np.int32), stream)
    assert len(gpu.indices._free) == 1


def test_what_does_not_fit_is_refused():
    _, gpu, host, mover = built()
    mover.close()
    with pytest.raises(ConfigError, match="blocks have 767 bytes"):
        CupyMover(gpu, HostArena(3, host.bytes_per_block - 1))
    with pytest.raises(ConfigError, match="0 slots"):
        CupyMover(gpu, host, slots=0)


def test_without_a_gpu_the_reason_is_told():
    try:
        import cupy
    except ImportError:
        expected = "cupy cannot be imported .*pip install '.\\[cupy\\]' in a clone"
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if cupy.cuda.is_available():
                pytest.skip("there is a GPU")
        expected = "no CUDA device can be used"
    with pytest.raises(ConfigError, match=expected):
        CupyPool([np.zeros((3, 4))])
