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
# The same of a batch, and of one of its steps that is open. (The arrays are the caller's memory, and always there.)
BATCH_CALLS: dict[str, Callable[[Any], Any]] = {
    "new batch": lambda held: held.pager.batch(2, 2),
    "add": lambda held: held.batch.add(held.sequence),
    "remove": lambda held: held.batch.remove(held.sequence),
    "row_of": lambda held: held.batch.row_of(held.sequence),
    "condense": lambda held: held.batch.condense(),
    "fork rows": lambda held: held.batch.fork([0], 1),
    "reorder": lambda held: held.batch.reorder([0], [1]),
    "step": lambda held: held.batch.step(),
    "try_step": lambda held: held.batch.try_step(),
    "blocks_needed": lambda held: held.batch.blocks_needed(),
    "reserve": lambda held: held.batch.reserve(),
    "try_reserve": lambda held: held.batch.try_reserve(),
    "open_steps": lambda held: held.batch.open_steps,
    "num_rows": lambda held: held.batch.num_rows,
    "len of a batch": lambda held: len(held.batch),
    "repr of a batch": lambda held: repr(held.batch),
    "token_ids": lambda held: held.step.token_ids,
    "copies": lambda held: held.step.copies,
    "updates": lambda held: held.step.updates,
    "cancel": lambda held: held.step.cancel(),
    "commit a step": lambda held: held.step.commit([1]),
}


class Held:
    """A pager with a sequence in a batch that has an open step."""

    def __init__(self) -> None:
        self.pager = kvpager.Pager(8, 4)
        self.sequence = self.pager.admit([1, 2, 3, 4, 5])
        self.batch = self.pager.batch(2, 4)
        self.batch.add(self.sequence)
        self.step = self.batch.step(5)


def answers(held: Held) -> dict[str, str]:
    """The error that each call gives, by name."""
    found = {}
    for target, calls in ((held.pager, PAGER_CALLS), (held.sequence, SEQUENCE_CALLS), (held, BATCH_CALLS)):
        for name, call in calls.items():
            try:
                call(target)
                found[name] = "no error"
            except BaseException as error:
                found[name] = type(error).__name__
    return found


def every_call(answer: str) -> dict[str, str]:
    return dict.fromkeys([*PAGER_CALLS, *SEQUENCE_CALLS, *BATCH_CALLS], answer)


def interrupted(turn: Callable[[], None], delay: Callable[[], float], after_each: Callable[[], None]) -> int:
    """300 times: `turn` again and again, until a timer raises KeyboardInterrupt somewhere in it. How often it did."""
    interrupts = 0
    armed = False

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
                signal.setitimer(signal.ITIMER_REAL, delay(), 2e-3)
                while True:
                    turn()
            except KeyboardInterrupt:
                interrupts += 1
            after_each()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return interrupts


class TestKeyboardInterrupt:
    def test_it_may_fall_anywhere_in_a_loop_of_calls(self, seed):
        """Some 300 times a timer raises KeyboardInterrupt in the middle of a server's loop, and the server goes on."""
        draw = random.Random(seed)
        pager = kvpager.Pager(32, 4)
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

        def is_whole() -> None:
            assert pager.check() == []

        assert interrupted(step, lambda: draw.uniform(1e-5, 1e-3), is_whole) == 300
        for sequence in running:
            sequence.release()
        running.clear()
        del sequence
        assert_nothing_leaked(pager)

    def test_it_may_fall_anywhere_in_a_loop_of_steps(self, seed):
        """The same for batches. What an interrupt cut off is found again: open steps, rows, dropped handles."""
        draw = random.Random(seed)
        pager = kvpager.Pager(40, 4)
        batch = pager.batch(6, 12, buffers=2)
        steps = 0
        running: list[kvpager.Sequence] = []

        def turn() -> None:
            nonlocal steps
            pager.take_copies()
            while len(running) < 6 and (sequence := pager.try_admit([draw.randrange(2) for _ in range(9)])):
                running.append(sequence)
            for sequence in running:
                if batch.row_of(sequence) is None and len(batch) < 6:
                    batch.add(sequence)
            counts = [0] * batch.num_rows
            for sequence in running:
                row = batch.row_of(sequence)
                if row is not None:
                    open_or_known = len(sequence) - sequence.num_planned
                    counts[row] = open_or_known or int(sequence.num_planned > sequence.num_committed)
            if draw.random() < 0.1 and batch.open_steps:
                batch.open_steps[-1].cancel()
            elif len(batch.open_steps) == 2:
                step = batch.open_steps[0]
                step.commit([draw.randrange(2)] * step.num_rows)
                steps += 1
            elif batch.try_step(counts) is None:
                running.pop().release()
            for sequence in [each for each in running if len(each) > 30]:
                running.remove(sequence)
                sequence.release()

        def is_whole() -> None:
            assert pager.check() == []
            for step in batch.open_steps:
                assert step.positions.shape == (step.num_tokens,)

        assert interrupted(turn, lambda: draw.uniform(1e-5, 3e-3), is_whole) == 300
        assert steps > 0
        while batch.open_steps:
            batch.open_steps[0].commit([1] * batch.open_steps[0].num_rows)
        for sequence in running:
            sequence.release()
        running.clear()
        del sequence
        assert_nothing_leaked(pager)
        assert len(batch) == 0

    def test_it_is_not_lost_in_a_conversion(self):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1, 2])

        class Interrupted:
            def __index__(self) -> int:
                raise KeyboardInterrupt

        batch = pager.batch(2, 4)
        batch.add(sequence)
        step = batch.step(2)
        before = pager.dump(full=True)
        for call in (
            lambda: batch.step([Interrupted()]),
            lambda: batch.step(Interrupted()),
            lambda: batch.step(1, [Interrupted()]),
            lambda: batch.reserve([Interrupted()]),
            lambda: batch.fork([0], Interrupted()),
            lambda: batch.reorder([0], [Interrupted()]),
            lambda: step.commit([Interrupted()]),
            lambda: step.commit([1], [Interrupted()]),
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
        held = Held()
        before = held.pager.dump(full=True)
        assert in_child(lambda: answers(held)) == every_call("ForkedProcess")
        assert held.pager.dump(full=True) == before
        assert held.step.commit([6]).tolist() == [True]
        assert held.sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6]
        held.sequence.release()
        assert_nothing_leaked(held.pager)

    def test_the_error_says_what_to_do(self):
        pager = kvpager.Pager(8, 4)
        with pytest.raises(kvpager.ForkedProcess, match=r"build or open your own after os\.fork"):
            in_child(lambda: pager.admit([1]))

    def test_a_child_may_drop_the_handles_it_inherited(self):
        pager = kvpager.Pager(8, 4)
        held = [pager.admit([1, 2, 3]), pager.admit([4])]
        batches = [pager.batch(2, 4)]
        batches[0].add(held[0])
        batches.append(batches[0].step(3))

        def drop() -> int:
            held.clear()
            batches.clear()
            gc.collect()
            return len(held)

        assert in_child(drop) == 0
        assert pager.stats().running_sequences == 2
        assert batches.pop().commit([5]).tolist() == [True]
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
        held = Held()
        keeper = threading.Thread(target=hold, args=(held.pager, 0.5))
        keeper.start()
        time.sleep(0.1)
        assert in_child(lambda: answers(held)) == every_call("ForkedProcess")
        assert keeper.is_alive()
        keeper.join()
        held.sequence.release()
        held.step.commit()
        assert_nothing_leaked(held.pager)

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
        held = Held()
        with pytest.raises(kvpager.Poisoned, match="build a new one"):
            _core._panic_for_tests(held.pager)
        assert "a panic that a test asked for" in capfd.readouterr().err, "the bug itself stays visible"
        return held

    def test_every_later_call_is_refused(self, poisoned):
        assert answers(poisoned) == every_call("Poisoned")

    def test_the_settings_can_still_be_read(self, poisoned):
        pager, batch = poisoned.pager, poisoned.batch
        assert (pager.num_blocks, pager.block_size, pager.policy, poisoned.sequence.id) == (8, 4, "lru", 0)
        assert (batch.max_seqs, batch.max_blocks, poisoned.step.id, poisoned.step.state) == (2, 4, 0, "open")
        assert poisoned.step.positions.tolist() == [0, 1, 2, 3, 4]

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
    "a batch": "held = pager.batch(4, 8)",
    "an open step": "held = pager.batch(4, 8); one = pager.admit([1]); held.add(one); step = held.step(); del held",
    "a cycle of batches": "held = [pager.batch(4, 8), pager.admit([1])]; held[0].add(held[1]); held.append(held)",
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
    except MemoryError as error:
        # Of lists that a batch is given, Python makes a tuple, and refuses by itself.
        assert isinstance(error, kvpager.AllocationError) or tuples
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

def in_batch(tokens):
    held, batch = pager.admit(tokens), pager.batch(1, 2**20 + 1, n + 1, buffers=1)
    batch.add(held)
    return held, batch

def committed_in_batch():
    held, batch = pager.admit(np.ones(2**20, np.int32)), pager.batch(256, 2**17)
    held.commit()
    batch.add(held)
    return held, batch

n = 2**24
tuples = False
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
    "batch": ("", "", "pager.batch(1024, 2**14)"),
    "step with drafts": ("held, batch = in_batch([1])", "drafts = np.ones(n, np.int32)", "batch.step(n + 1, drafts)"),
    "step with a list": ("held, batch = in_batch([1])", "drafts = [1] * n; tuples = True", "batch.step(n + 1, drafts)"),
    "blocks_needed": (
        "held, batch = in_batch([1])",
        "drafts = [1] * n; tuples = True",
        "batch.blocks_needed(n + 1, drafts)",
    ),
    "reserve": ("held, batch = in_batch([1])", "", "batch.reserve(n)"),
    "token_ids": ("held, batch = in_batch(np.ones(n, np.int32)); step = batch.step(n)", "", "step.token_ids"),
    "updates": ("held, batch = in_batch(np.ones(n, np.int32)); step = batch.step(n)", "", "step.updates"),
    "open commit": (
        "held, batch = in_batch([1]); step = batch.step()",
        "tokens = [1] * n; tuples = True",
        "step.commit(tokens)",
    ),
    "fork of rows": ("held, batch = committed_in_batch()", "", "batch.fork([0], 255)"),
    "reorder": ("held, batch = committed_in_batch()", "", "batch.reorder([0] * 256, [1] * 256)"),
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

    def test_a_commit_that_gets_no_memory_changes_nothing_or_is_done(self):
        """What it publishes is in memory already; whatever more it asks for, it asks for first."""
        script = f"""{LIMITED}
batch = pager.batch(512, 64, 2**16, buffers=1)
held = [pager.admit([number] * 65) for number in range(512)]
for sequence in held:
    batch.add(sequence)
for turn in range(40):
    step = batch.step(65 if turn == 0 else 1)
    dump, stats = pager.dump(full=True), pager.stats()
    tokens = np.full(512, 7)
    if refused(lambda: step.commit(tokens), 0):
        assert (pager.dump(full=True), pager.stats()) == (dump, stats)
        step.commit(tokens)
    assert [len(each) for each in held] == [66 + turn] * 512
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
