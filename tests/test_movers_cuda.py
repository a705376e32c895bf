"""The calls that the GPU mover makes of cupy have the form that cupy documents. No GPU: see tests/fake_cupy.py."""

from __future__ import annotations

import json
import pathlib
import runpy
import sys
from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest
import test_movers_gpu as on_gpu
from movers_support import LAYOUTS, SWAP_OUT, filled, plan
from test_movers_driver import Library

from kvpager import ConfigError, TransferError
from kvpager.movers import CupyMover, CupyPool
from kvpager.movers.cuda import CudaDevice
from kvpager.movers.driver import BatchCopy

BENCH = pathlib.Path(__file__).parent.parent / "benches" / "gpu_copy.py"


@pytest.fixture
def runtime(monkeypatch):
    load = BatchCopy.load
    monkeypatch.setattr(BatchCopy, "load", lambda: load(Library(13000)))
    return fake_cupy.install(monkeypatch)


@pytest.fixture(params=on_gpu.WAYS)
def way(request, runtime):
    path, _, single = request.param.partition(", ")
    return CudaDevice(batch=not single), path


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(way, name):
    assert way[0].batched == (way[0].batch_reason == "")
    on_gpu.test_there_and_back(way, name)


def test_the_other_gpu_tests(way):
    on_gpu.test_plans_with_blocks_in_common_keep_their_order(way)
    on_gpu.test_copies_come_after_a_slow_kernel_and_kernels_after_copies(way)


@pytest.mark.parametrize("name", LAYOUTS)
def test_copy_blocks(runtime, name):
    on_gpu.test_copy_blocks(CudaDevice(), name)


def test_the_arena_is_pinned_whole_and_unpinned(runtime):
    world = on_gpu.Gpu(CudaDevice())
    records = world.host.records
    assert runtime.pinned == {records.ctypes.data: records.nbytes}
    world.mover.close()
    assert runtime.pinned == {}


def test_refused_and_foreign_pins(runtime):
    runtime.pin_status = 2
    with pytest.warns(RuntimeWarning, match="did not pin 6,912 bytes: error 2"):
        world = on_gpu.Gpu(CudaDevice())
    assert not world.mover.pinned
    runtime.pin_status = 712
    world = on_gpu.Gpu(CudaDevice())
    assert world.mover.pinned
    world.mover.close()


def test_a_failed_device_is_an_error_not_a_wait(runtime):
    world = on_gpu.Gpu(CudaDevice())
    ticket = world.mover.submit(plan(SWAP_OUT, [1], [0]))
    runtime.status = 600
    assert world.mover.wait(0.001) == []
    runtime.status = 700
    assert world.mover.wait(1) == [ticket]
    assert "error 700" in str(ticket.error)


def test_streams_and_events_of_any_library(runtime):
    device = CudaDevice()
    assert device.stream_of(0x7F).ptr == 0x7F
    assert device.stream_of(SimpleNamespace(cuda_stream=5)).ptr == 5
    assert device.stream_of(SimpleNamespace(__cuda_stream__=lambda: (0, 6))).ptr == 6
    assert device.event_of(SimpleNamespace(cuda_event=7)).ptr == 7
    assert device.event_of(fake_cupy.Stream()) is None
    stream = fake_cupy.Stream()
    assert device.stream_of(stream).ptr == stream.ptr
    with pytest.raises(TypeError, match="a str is no CUDA stream"):
        device.stream_of("default")


def test_a_batch_call_that_does_not_work_is_not_used(runtime, monkeypatch):
    def refused(self, *arguments):
        raise TransferError("cuMemcpyBatchAsync answered 801")

    with monkeypatch.context() as patch:
        patch.setattr(BatchCopy, "__call__", refused)
        device = CudaDevice()
    assert (device.batched, device.batch_reason) == (False, "cuMemcpyBatchAsync answered 801")
    with monkeypatch.context() as patch:
        patch.setattr(BatchCopy, "__call__", lambda self, *arguments: None)
        assert "wrong bytes" in CudaDevice().batch_reason
    with monkeypatch.context() as patch:
        patch.setattr(BatchCopy, "load", lambda: "there is no libcuda.so.1")
        assert CudaDevice().batch_reason == "there is no libcuda.so.1"
    assert CudaDevice(batch=False).batch_reason == "switched off"


def test_a_missing_compiler_is_told(runtime):
    runtime.no_compiler = True
    with pytest.raises(ConfigError, match="cannot be compiled: no libnvrtc"):
        CudaDevice()


def test_where_arrays_are(runtime):
    pool, _, _ = filled(LAYOUTS[0])
    with pytest.raises(ConfigError, match="array 0 is in host memory"):
        CupyPool(pool.arrays, pool.axes)
    runtime.pointerGetAttributes = lambda ptr: SimpleNamespace(device=3)
    with pytest.raises(ConfigError, match="array 0 is on GPU 3, and this is GPU 0"):
        CupyPool([fake_cupy.Array((3, 4), np.float32)])
    with pytest.raises(ConfigError, match="no CUDA device can be used: error 101"):
        CupyPool([fake_cupy.Array((3, 4), np.float32)], device=1)


def test_no_timeout_is_for_ever(runtime):
    world = on_gpu.Gpu(CudaDevice())
    assert isinstance(world.mover, CupyMover)
    with pytest.raises(ValueError, match="finite"):
        world.mover.wait(float("inf"))
    world.mover.close()


@pytest.mark.parametrize("extra", [[], ["--in-order", "--no-batch"]])
def test_the_bench_runs(runtime, monkeypatch, capsys, extra):
    shape = ["--layers", "2", "--heads", "1", "--dim", "16", "--block-tokens", "256"]
    arguments = [*shape, "--mib", "1", "--repeat", "1", "--json"]
    monkeypatch.setattr(sys, "argv", [str(BENCH), *arguments, *extra])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(BENCH), run_name="__main__")
    assert left.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["batch_call"]) == ("pretended", "switched off" if extra else "used")
    assert len(told["rows"]) == 5 * 2 * 2
    assert all(row["right"] and set(row["slowdown_percent"]) == {"arithmetic", "traffic"} for row in told["rows"])


def test_the_bench_says_why_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", [str(BENCH)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(BENCH), run_name="__main__")
    assert left.value.code == 2
    assert "pip install '.[cupy]' in a clone of kvpager" in capsys.readouterr().err
