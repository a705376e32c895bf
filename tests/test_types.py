"""The types that an editor shows are those that the compiled core has (the stub is written by hand)."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What a caller writes, and what a type checker must make of it. Each ignored line is a mistake that it has to find:
# ``--strict`` complains of a comment that ignores nothing.
USAGE = '''
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import kvpager
import kvpager.reference


def serve(pager: kvpager.Pager, prompt: NDArray[np.int32]) -> int:
    assert_type(pager.can_admit(prompt, namespace=(("lora", b"7"),)), bool)
    assert_type(pager.match(prompt), kvpager.PrefixMatch)
    assert_type(pager.match(prompt).num_tokens, int)
    assert_type(pager.try_admit([1, 2, 3]), kvpager.Sequence | None)
    with pager.admit(prompt, namespace=b"tenant", pin=True) as sequence:
        assert_type(sequence, kvpager.Sequence)
        assert_type(sequence.block_ids, NDArray[np.int32])
        assert_type(sequence.tokens, NDArray[np.int32])
        assert_type(sequence.slots(sequence.num_cached, len(sequence)), NDArray[np.int64])
        assert_type(sequence.append(np.int64(3)), int)
        assert_type(sequence.try_append(3), int | None)
        assert_type(sequence.extend((1, 2)), NDArray[np.int64])
        assert_type(sequence.fork(2), list[kvpager.Sequence])
        assert_type(sequence.namespace, kvpager.Namespace)
        sequence.commit()
        sequence.truncate(2)
        sequence.preempt()
        assert_type(sequence.resume(), kvpager.Sequence)
        sequence.release("aborted")
    batch = pager.batch(8, 64, arrays={"seq_lens": np.zeros((2, 8), np.int32), "positions": bytearray(65_536)})
    assert_type(batch.add(pager.admit([1])), int)
    step = batch.step(np.ones(1, np.int32), [-1, 3])
    assert_type(step, kvpager.Step)
    assert_type(batch.try_step(), kvpager.Step | None)
    assert_type(step.slot_mapping, NDArray[np.int64])
    assert_type(step.commit(np.zeros(1, np.int64), [0]), NDArray[np.bool_])
    assert_type(pager.take_copies(), NDArray[np.int32])
    fetched = pager.admit(prompt, fetch=True, fetch_min_tokens=np.int32(256))
    assert_type(fetched, kvpager.Sequence)
    assert_type(fetched.fetch, kvpager.Plan | None)
    assert_type(pager.offload(8), kvpager.Plan | None)
    assert_type(pager.offload_committed(fetched), kvpager.Plan | None)
    plan = fetched.swap_out()
    assert_type(plan, kvpager.Plan)
    assert_type(plan.source_ids, NDArray[np.int32])
    assert_type(fetched.try_swap_out(), kvpager.Plan | None)
    assert_type(fetched.swap_in(), kvpager.Plan)
    assert_type(fetched.try_swap_in(), kvpager.Plan | None)
    found = pager.store_keys(prompt, namespace=b"tenant")
    assert_type(found, kvpager.StoreKeys)
    assert_type(found.keys, NDArray[np.uint8])
    assert_type(pager.save(8), kvpager.Plan | None)
    assert_type(pager.load(prompt, np.int64(256)), kvpager.Plan | None)
    assert_type(plan.records, kvpager.StoreKeys | None)
    assert_type(pager.start(plan, tick=3), bool)
    for arrived in (np.ones(3, np.bool_), np.ones(3, np.int8), [True, False], (True,), None):
        assert_type(pager.fail(plan, arrived), bool)
    assert_type(pager.plans(older_than=7), list[kvpager.PlanStatus])
    assert_type(pager.stats().hit_rate, float)
    assert_type(pager.check(), list[str])
    assert_type(pager.dump(full=True), str)
    assert_type(kvpager.content_tokens(bytes(32), 8), NDArray[np.int32])
    try:
        pager.reset(b"new weights")
    except kvpager.OutOfBlocks as error:
        return error.needed - error.free
    return pager.forget(np.zeros(16, np.int64))


def mistakes(pager: kvpager.Pager) -> None:
    kvpager.Pager("8")  # type: ignore
    kvpager.Pager(8, 16, "lru")  # type: ignore
    pager.admit([1.5])  # type: ignore
    pager.admit([1], namespace="text")  # type: ignore
    pager.admit([1], b"tenant")  # type: ignore
    pager.admit([1]).release("bored")  # type: ignore
    pager.try_admit([1]).commit()  # type: ignore
    pager.num_blocks = 3  # type: ignore
    pager.complete(3)  # type: ignore
    pager.fail(pager.plans()[0].plan, [1.5])  # type: ignore
    pager.offload()  # type: ignore
    pager.load([1])  # type: ignore
    pager.attach(pager)  # type: ignore


class Mine(kvpager.Pager):  # type: ignore
    """The core's classes are final."""
'''


def run(*arguments: str, cwd: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=str(cwd), timeout=240, check=False)


def test_the_stub_says_what_the_core_has(tmp_path):
    """Run far from the sources, so that it is the installed package that is checked."""
    pytest.importorskip("mypy")
    found = run("mypy.stubtest", "kvpager._core", cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_caller_sees_the_types_and_his_mistakes(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "usage.py").write_text(USAGE, encoding="utf-8")
    found = run("mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "usage.py", cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
