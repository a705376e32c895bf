"""What may cut a call short or surround it: Ctrl-C, fork, a bug inside, the end of the interpreter, no memory left.

In each case a pager is either consistent or says with a typed error why it cannot be used (I10, I14).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from implementations import GETTERS, RESUMES, RUNNING_CALLS, assert_nothing_leaked

import kvpager
from kvpager import _core

pytestmark = [
    pytest.mark.usefixtures("watchdog"),
    pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning"),
]

# Every public call that looks at the state of a pager, and of a sequence.
PAGER_CALLS: dict[str, Callable[[Any], Any]] = {
    "admit": lambda pager: pager.admit([1, 2]),
    "try_admit": lambda pager: pager.try_admit([1, 2]),
    "can_admit": lambda pager: pager.can_admit([1, 2]),
    "match": lambda pager: pager.match([1, 2]),
    "forget": lambda pager: pager.forget([1, 2, 3, 4]),
    "reset": lambda pager: pager.reset(),
    "take_copies": lambda pager: pager.take_copies(),
    "stats": lambda pager: pager.stats(),
    "check": lambda pager: pager.check(),
    "dump": lambda pager: pager.dump(),
    "full dump": lambda pager: pager.dump(full=True),
    "num_free_blocks": lambda pager: pager.num_free_blocks,
    "num_evictable_blocks": lambda pager: pager.num_evictable_blocks,
}
SEQUENCE_CALLS: dict[str, Callable[[Any], Any]] = {
    **RUNNING_CALLS,
    **RESUMES,
    **GETTERS,
    "release": lambda sequence: sequence.release(),
    "with": lambda sequence: sequence.__exit__(None, None, None),
    "state": lambda sequence: sequence.state,
}


def answers(pager: Any, sequence: Any) -> dict[str, str]:
    """The error that each call gives, by name."""
    found = {}
    for target, calls in ((pager, PAGER_CALLS), (sequence, SEQUENCE_CALLS)):
        for name, call in calls.items():
            try:
                call(target)
                found[name] = "no error"
            except BaseException as error:
                found[name] = type(error).__name__
    return found


def every_call(answer: str) -> dict[str, str]:
    return dict.fromkeys([*PAGER_CALLS, *SEQUENCE_CALLS], answer)


class TestKeyboardInterrupt:
    def test_it_may_fall_anywhere_in_a_loop_of_calls(self, seed):
        """Some 300 times a timer raises KeyboardInterrupt in the middle of a server's loop, and the server goes on."""
        draw = random.Random(seed)
        pager = kvpager.Pager(32, 4)
        interrupts = 0
        armed = False
        running: list[kvpager.Sequence] = []

        def step() -> None:
            sequence = pager.try_admit([draw.randrange(2) for _ in range(draw.randint(1, 20))])
            if sequence is not None:
                running.append(sequence)
                sequence.slots(sequence.num_cached, len(sequence))
                sequence.commit()
                running.extend(sequence.fork(1))
                running[-1].try_append(1)
            pager.take_copies()
            while len(running) > 4:
                running.pop(draw.randrange(len(running))).release()

        def interrupt(number: int, frame: object) -> None:
            nonlocal armed
            if armed:
                armed = False
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for _ in range(300):
                try:
                    armed = True
                    # Again and again, because Python overlooks a signal that reaches one of numpy's threads.
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-3), 2e-3)
                    while True:
                        step()
                except KeyboardInterrupt:
                    interrupts += 1
                assert pager.check() == []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupts == 300
        for sequence in running:
            sequence.release()
        running.clear()
        del sequence
        assert_nothing_leaked(pager)

    def test_it_is_not_lost_in_a_conversion(self):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1, 2])

        class Interrupted:
            def __index__(self) -> int:
                raise KeyboardInterrupt

        before = pager.dump(full=True)
        for call in (
            lambda: pager.admit([1, Interrupted()]),
            lambda: pager.match([Interrupted()]),
            lambda: sequence.append(Interrupted()),
            lambda: sequence.extend([Interrupted()]),
            lambda: sequence.commit(Interrupted()),
            lambda: sequence.truncate(Interrupted()),
            lambda: kvpager.Pager(Interrupted()),
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
        assert pager.dump(full=True) == before
        sequence.release()
        assert_nothing_leaked(pager)


def in_child(call: Callable[[], Any]) -> Any:
    """What a call answers in the child of ``os.fork()``. The child always ends here: it must be no second pytest."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                found = True, call()
            except BaseException as error:
                found = False, error
            os.write(writing, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0
    fine, answer = pickle.loads(sent)
    if not fine:
        raise answer
    return answer


# For the children of multiprocessing, which inherit what the module holds.
inherited: dict[str, Any] = {}


def admit_to_the_inherited_pager() -> None:
    inherited["pager"].admit([1, 2, 3])


# Python warns of a fork while other threads run. Nothing of theirs is used here.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
class TestFork:
    def test_every_call_in_the_child_is_refused_and_the_parent_goes_on(self):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1, 2, 3, 4, 5])
        before = pager.dump(full=True)
        assert in_child(lambda: answers(pager, sequence)) == every_call("ForkedProcess")
        assert pager.dump(full=True) == before
        sequence.commit()
        sequence.release()
        assert_nothing_leaked(pager)

    def test_the_error_says_what_to_do(self):
        pager = kvpager.Pager(8, 4)
        with pytest.raises(kvpager.ForkedProcess, match=r"build a pager after os\.fork"):
            in_child(lambda: pager.admit([1]))

    def test_a_child_may_drop_the_handles_it_inherited(self):
        pager = kvpager.Pager(8, 4)
        held = [pager.admit([1, 2, 3]), pager.admit([4])]

        def drop() -> int:
            held.clear()
            gc.collect()
            return len(held)

        assert in_child(drop) == 0
        assert pager.stats().running_sequences == 2
        for sequence in held:
            sequence.release()
        held.clear()
        del sequence
        assert_nothing_leaked(pager)

    def test_a_pager_built_in_the_child_works_there_and_not_in_the_grandchild(self):
        def build() -> tuple[list[int], str]:
            pager = kvpager.Pager(8, 4)
            with pager.admit([1, 2, 3, 4, 5]) as sequence:
                sequence.commit()
            with pager.admit([1, 2, 3, 4, 6]) as sequence:
                ids = sequence.block_ids.tolist()
            try:
                in_child(lambda: pager.match([1]))
            except kvpager.ForkedProcess as error:
                return ids, type(error).__name__
            return ids, "no error"

        assert in_child(build) == ([0, 1], "ForkedProcess")

    def test_fork_while_another_thread_has_the_lock(self):
        """The child's copy of the lock is taken for ever, so the refusal must come before the lock (no hang)."""
        hold = getattr(_core, "_hold_lock_for_tests", None)
        if hold is None:
            pytest.skip("this build has no hook to keep the lock")
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1])
        keeper = threading.Thread(target=hold, args=(pager, 0.5))
        keeper.start()
        time.sleep(0.1)
        assert in_child(lambda: answers(pager, sequence)) == every_call("ForkedProcess")
        assert keeper.is_alive()
        keeper.join()
        sequence.release()
        assert_nothing_leaked(pager)

    def test_a_worker_of_multiprocessing_is_told(self):
        inherited["pager"] = kvpager.Pager(8, 4)
        try:
            with multiprocessing.get_context("fork").Pool(1) as workers:
                with pytest.raises(kvpager.ForkedProcess):
                    workers.apply(admit_to_the_inherited_pager)
                workers.close()
                workers.join()
            with inherited["pager"].admit([1, 2, 3]) as sequence:
                assert sequence.block_ids.tolist() == [0]
        finally:
            inherited.clear()


class TestPoisoned:
    @pytest.fixture
    def poisoned(self, capfd):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1, 2, 3, 4, 5])
        with pytest.raises(kvpager.Poisoned, match="build a new one"):
            _core._panic_for_tests(pager)
        assert "a panic that a test asked for" in capfd.readouterr().err, "the bug itself stays visible"
        return pager, sequence

    def test_every_later_call_is_refused(self, poisoned):
        pager, sequence = poisoned
        assert answers(pager, sequence) == every_call("Poisoned")

    def test_the_settings_can_still_be_read(self, poisoned):
        pager, sequence = poisoned
        assert (pager.num_blocks, pager.block_size, pager.policy, sequence.id) == (8, 4, "lru", 0)

    def test_handles_can_still_be_dropped(self, poisoned):
        gc.collect()
        del poisoned
        gc.collect()

    def test_other_pagers_go_on(self, poisoned):
        pager = kvpager.Pager(8, 4)
        with pager.admit([1, 2, 3]) as sequence:
            assert sequence.block_ids.tolist() == [0]
        assert_nothing_leaked(pager)


def python(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A script in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


EXITS = {
    "a global": "held = pager.admit([1, 2, 3])",
    "a cycle": "held = [pager.admit([1, 2, 3])]; held.append(held)",
    "a preempted one": "held = pager.admit([1, 2, 3]); held.preempt()",
    "an attribute of a module": "import sys; sys.held = pager.admit([1, 2, 3])",
    "another thread": (
        "import threading; held = pager.admit([1, 2, 3]);"
        "threading.Thread(target=lambda: [held.try_append(1) for _ in range(10**8)], daemon=True).start()"
    ),
    "an atexit function": "import atexit; held = pager.admit([1, 2, 3]); atexit.register(held.append, 4)",
    "an error": "held = pager.admit([1, 2, 3]); raise SystemExit(0)",
}


@pytest.mark.parametrize("holder", EXITS)
def test_the_end_of_the_interpreter_is_silent(holder):
    """Live sequences at the exit are nobody's mistake: the process ends, and with it the pool."""
    ended = python(f"import kvpager; pager = kvpager.Pager(10**6, 4); {EXITS[holder]}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_end_of_the_interpreter_only_warns_a_caller_who_asked_for_it():
    ended = python("import kvpager; pager = kvpager.Pager(8, 4); held = pager.admit([1, 2, 3])", "-W", "error")
    assert ended.returncode == 0
    assert "sequence 0 was dropped" in ended.stderr or ended.stderr == ""


# The script that every test of memory begins with: from ``limit`` on there is room for ``megabytes`` more.
LIMITED = """
import resource, os
import numpy as np
import kvpager

def limit(megabytes):
    with open("/proc/self/statm") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20, resource.RLIM_INFINITY))

def unlimit():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def refused(call, megabytes):
    limit(megabytes)
    try:
        call()
    except kvpager.AllocationError as error:
        assert isinstance(error, MemoryError)
        return True
    finally:
        unlimit()
    return False

def interleaved():
    # Two tables of 2^19 blocks of which no two are neighbours: their drawing and recount take megabytes.
    block = np.ones(16, np.int32)
    held = [pager.admit(block), pager.admit(block)]
    for _ in range(2**19 - 1):
        for sequence in held:
            sequence.extend(block)
    return held

def copied():
    # 2^19 children that each wrote to the block they shared.
    parent = pager.admit([1, 2])
    parent.commit()
    held = [child for _ in range(8) for child in parent.fork(65_536)]
    for sequence in held:
        sequence.append(3)
    return parent, held

n = 2**24
pager = kvpager.Pager(2**21, 16)
"""

# Calls that need tens of megabytes for a sequence of 2^24 tokens; how little they get; whether they must be refused.
HUNGRY = {
    "admit": ("", "prompt = np.ones(n, np.int32)", "pager.admit(prompt)"),
    "admit of a list": ("", "prompt = [1] * n", "pager.admit(prompt)"),
    "admit of int64": ("", "prompt = np.ones(n, np.int64)", "pager.admit(prompt)"),
    "match of a list": ("", "prompt = [1] * n", "pager.match(prompt)"),
    "match of int64": ("", "prompt = np.ones(n, np.int64)", "pager.match(prompt)"),
    "extend": ("held = pager.admit([1])", "prompt = np.ones(n, np.int32)", "held.extend(prompt)"),
    "slots": ("held = pager.admit(np.ones(n, np.int32))", "", "held.slots(0, n)"),
    "tokens": ("held = pager.admit(np.ones(n, np.int32))", "", "held.tokens"),
    "block_ids": ("held = pager.admit(np.ones(n, np.int32))", "", "held.block_ids"),
    "fork": ("held = pager.admit(np.ones(n, np.int32))", "", "held.fork(16)"),
    "resume": ("held = pager.admit(np.ones(n, np.int32)); held.commit(); held.preempt()", "", "held.resume()"),
    "dump": ("held = interleaved()", "", "pager.dump(full=True)"),
    "check": ("held = interleaved()", "", "pager.check()"),
    "take_copies": ("held = copied()", "", "pager.take_copies()"),
}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux to limit memory")
class TestMemory:
    @pytest.mark.parametrize("what", HUNGRY)
    def test_a_call_that_gets_no_memory_changes_nothing(self, what):
        """Limits from next to nothing up, so that each of a call's allocations is the one that fails once."""
        before, given, call = HUNGRY[what]
        script = f"""{LIMITED}
{before}
{given}
dump, stats = pager.dump(full=True) if {not before!r} else "", pager.stats()
was_refused = False
for megabytes in (1, 3, 20, 40, 60):
    if not refused(lambda: {call}, megabytes):
        break
    was_refused = True
    assert pager.stats() == stats
    assert dump in ("", pager.dump(full=True))
assert was_refused
assert pager.check() == []
os._exit(7)
"""
        ended = python(script)
        assert (ended.returncode, ended.stderr) == (7, "")

    def test_a_pool_for_which_there_is_no_memory(self):
        script = f"{LIMITED}\nassert refused(lambda: kvpager.Pager(2**31 - 1, 16), 100)\nos._exit(7)"
        ended = python(script)
        assert (ended.returncode, ended.stderr) == (7, "")

    def test_the_largest_pool_works_or_is_refused(self):
        """It reserves addresses and touches hardly any; a machine without overcommit says no."""
        try:
            pager = kvpager.Pager(2**31 - 1, 16)
        except kvpager.AllocationError:
            return
        with pager.admit([1] * 40) as sequence:
            sequence.commit()
            assert sequence.block_ids.tolist() == [0, 1, 2]
        assert pager.num_free_blocks == 2**31 - 1 - 2
        assert pager.match([1] * 40).num_tokens == 32
