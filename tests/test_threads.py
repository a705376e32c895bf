"""Any thread may call, and any thread may drop a handle (I10, L9).

Under CPython's interpreter lock a call that finds the pager free is over before another thread runs. What could go
wrong is in between calls, in the destructors, in Python code that a conversion runs, and in a call that has to wait.
The tests of waiting therefore need a hook that keeps the pager's lock while other threads run; nothing public can.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from implementations import assert_nothing_leaked

import kvpager
from kvpager import _core

pytestmark = [
    pytest.mark.usefixtures("watchdog", "hasty_threads"),
    pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning"),
]


@pytest.fixture
def hasty_threads():
    """Threads that take turns every few instructions, so that they meet in the middle of everything."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*calls: Callable[[], None]) -> None:
    """Run each call in a thread of its own, all started at one moment. The first error of any is raised here."""
    barrier = threading.Barrier(len(calls))
    errors: list[BaseException] = []

    def begin(call: Callable[[], None]) -> None:
        try:
            barrier.wait()
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def while_collected(dropper: Callable[[], None], caller: Callable[[], None], num_callers: int) -> None:
    """Two threads drop handles, one collects garbage, and others call again and again, until the droppers are done."""
    done = threading.Event()

    def droppers() -> None:
        try:
            together(dropper, dropper)
        finally:
            done.set()

    def until_done(call: Callable[[], object]) -> Callable[[], None]:
        def loop() -> None:
            while not done.is_set():
                call()

        return loop

    together(droppers, until_done(gc.collect), *[until_done(caller)] * num_callers)


class TestOnePager:
    def test_no_thread_reads_what_another_wrote(self, seed):
        """Each thread plays an engine: it writes tokens to its slots and finds them there until it lets go (I3, I4)."""
        pager = kvpager.Pager(48, 4)
        memory = np.full(48 * 4, -1, np.int64)
        done = threading.Event()
        finished = []

        def engine(number: int) -> None:
            draw = random.Random(seed + number)
            for _ in range(1_500):
                prompt = [draw.randrange(2) for _ in range(draw.randint(1, 30))]
                sequence = pager.try_admit(np.array(prompt, np.int32) if draw.random() < 0.5 else prompt)
                if sequence is None:
                    continue
                memory[sequence.slots(sequence.num_cached, len(prompt))] = prompt[sequence.num_cached :]
                sequence.commit()
                for token in [draw.randrange(2) for _ in range(draw.randrange(8))]:
                    if (slot := sequence.try_append(token)) is not None:
                        memory[slot] = token
                        sequence.commit()
                table, tokens = sequence.block_ids, sequence.tokens
                positions = np.arange(len(tokens))
                assert (memory[table[positions // 4] * 4 + positions % 4] == tokens).all()
                if draw.random() < 0.2:
                    sequence.preempt()
                sequence.release()
            finished.append(number)

        def antagonist() -> None:
            while not done.is_set():
                assert pager.check() == []
                stats = pager.stats()
                assert stats.free_blocks + stats.cached_blocks + stats.active_blocks == 48
                pager.dump(full=True)
                pager.match([1, 0, 1, 0, 1])

        def engines() -> None:
            try:
                together(*(lambda number=number: engine(number) for number in range(4)))
            finally:
                done.set()

        together(engines, antagonist, antagonist)
        assert len(finished) == 4
        assert pager.stats().hit_tokens > 0
        assert pager.stats().evicted_blocks > 0
        assert_nothing_leaked(pager)

    def test_every_call_from_every_thread(self, seed):
        """Handles are shared between the threads, so that calls meet on one sequence, released ones included."""
        pager = kvpager.Pager(40, 4, policy="slru", watermark=0.1)
        shared: list[kvpager.Sequence] = []

        def caller(number: int) -> None:
            draw = random.Random(seed + number)

            def tokens() -> list[int]:
                return [draw.randrange(2) for _ in range(draw.randint(1, 20))]

            def admit() -> None:
                if len(shared) < 40 and (sequence := pager.try_admit(tokens())):
                    shared.append(sequence)

            calls: list[Callable[[Any], Any]] = [
                lambda sequence: sequence.append(1),
                lambda sequence: sequence.extend(tokens()),
                lambda sequence: sequence.commit(),
                lambda sequence: sequence.slots(sequence.num_committed, len(sequence)),
                lambda sequence: shared.extend(sequence.fork(2)) if len(shared) < 40 else None,
                lambda sequence: sequence.truncate(draw.randint(1, 8)),
                lambda sequence: sequence.preempt(),
                lambda sequence: sequence.resume(),
                lambda sequence: sequence.release(),
                lambda sequence: (sequence.state, sequence.tokens, sequence.block_ids, repr(sequence)),
                lambda sequence: shared.remove(sequence),
                lambda sequence: pager.take_copies(),
                lambda sequence: pager.forget([1, 1, 1, 1]),
                lambda sequence: pager.reset() if draw.random() < 0.1 else None,
            ]
            for _ in range(10_000):
                admit()
                try:
                    draw.choice(calls)(draw.choice(shared))
                except (kvpager.OutOfBlocks, ValueError, IndexError):
                    # Another thread was quicker: it released, shortened or removed the sequence.
                    continue

        together(*(lambda number=number: caller(number) for number in range(4)))
        shared.clear()
        assert_nothing_leaked(pager)

    def test_ids_are_given_once(self):
        pager = kvpager.Pager(64, 4)
        seen: list[int] = []

        def caller() -> None:
            for _ in range(200):
                with pager.admit([1, 2, 3]) as sequence:
                    children = sequence.fork(2)
                    seen.extend(each.id for each in (sequence, *children))
                    for child in children:
                        child.release()

        together(*[caller] * 4)
        assert sorted(seen) == list(range(4 * 200 * 3))
        assert_nothing_leaked(pager)

    def test_one_handle_is_released_once(self):
        pager = kvpager.Pager(64, 4)
        for _ in range(100):
            sequence = pager.admit([1, 2, 3])
            together(*[sequence.release] * 4)
        stats = pager.stats()
        assert (stats.clock_ticks, stats.noop_calls) == (100, 300)
        assert_nothing_leaked(pager)


class TestOneBatch:
    def test_steps_in_one_thread_and_all_other_calls_in_others(self, seed):
        """One thread plans and commits; others admit, add, remove, fork, reorder, release, read. Who comes too late is
        told so, and everything stays whole."""
        pager = kvpager.Pager(96, 4, policy="slru")
        batch = pager.batch(12, 16, 64, buffers=2)
        shared: list[kvpager.Sequence] = []
        done = threading.Event()
        ended = {"committed": 0, "cancelled": 0}
        too_late = (kvpager.OutOfBlocks, ValueError, RuntimeError, IndexError)

        def stepper() -> None:
            draw = random.Random(seed)
            try:
                for _ in range(4_000):
                    try:
                        counts = [draw.choice([0, 1, 1, 1, 2]) for _ in range(batch.num_rows)]
                        step = batch.step(counts if draw.random() < 0.5 else 1)
                        assert step.positions.shape == step.slot_mapping.shape == (step.num_tokens,)
                    except too_late:
                        # A row came or went, or has no token to compute.
                        pass
                    for step in batch.open_steps[: draw.randint(0, 2)]:
                        if draw.random() < 0.1:
                            # Unless another thread has taken copies since.
                            with contextlib.suppress(kvpager.StepError):
                                batch.open_steps[-1].cancel()
                                ended["cancelled"] += 1
                            break
                        applied = step.commit([draw.randrange(2)] * step.num_rows)
                        assert applied.shape == (step.num_rows,)
                        ended["committed"] += 1
            finally:
                done.set()

        def caller(number: int) -> None:
            draw = random.Random(seed + number)

            def admit() -> None:
                if len(shared) < 24 and (sequence := pager.try_admit([draw.randrange(2)] * draw.randint(1, 20))):
                    shared.append(sequence)
                    batch.add(sequence)

            calls: list[Callable[[Any], Any]] = [
                lambda sequence: batch.add(sequence),
                lambda sequence: batch.remove(sequence),
                lambda sequence: batch.condense(),
                lambda sequence: batch.reserve(1),
                lambda sequence: shared.extend(batch.fork([draw.randrange(12)], 1)) if len(shared) < 24 else None,
                lambda sequence: shared.extend(filter(None, batch.reorder([0, 0], [1, 0], [0, 1])[1])),
                lambda sequence: sequence.release(),
                lambda sequence: sequence.truncate(draw.randint(1, 8)),
                lambda sequence: sequence.preempt(),
                lambda sequence: sequence.resume(),
                lambda sequence: sequence.append(1),
                lambda sequence: shared.remove(sequence),
                lambda sequence: pager.take_copies(),
                lambda sequence: (batch.num_rows, len(batch), repr(batch), batch.row_of(sequence)),
                lambda sequence: [(step.token_ids, step.updates, step.copies) for step in batch.open_steps],
                lambda sequence: (sequence.tokens, sequence.block_ids, sequence.num_planned),
                lambda sequence: batch.blocks_needed(1),
            ]
            while not done.is_set():
                try:
                    admit()
                    draw.choice(calls)(draw.choice(shared))
                except too_late:
                    continue

        def antagonist() -> None:
            while not done.is_set():
                assert pager.check() == []
                pager.dump(full=True)

        together(stepper, lambda: caller(1), lambda: caller(2), antagonist)
        assert ended["committed"] > 0
        while batch.open_steps:
            batch.open_steps[0].commit([1] * batch.open_steps[0].num_rows)
        shared.clear()
        assert_nothing_leaked(pager)
        assert (len(batch), batch.num_rows) == (0, 0)

    def test_two_threads_and_a_batch_each(self, seed):
        """Steps of one are planned between plan and commit of the other: no slot is given to both."""
        pager = kvpager.Pager(64, 4)
        owners = np.full(64 * 4, -1)

        def engine(number: int) -> None:
            draw = random.Random(seed + number)
            batch = pager.batch(4, 8, buffers=1)
            for _ in range(150):
                held = [pager.admit([draw.randrange(2) for _ in range(draw.randint(1, 9))]) for _ in range(2)]
                for sequence in held:
                    batch.add(sequence)
                for turn in range(draw.randint(1, 9)):
                    step = batch.step([len(each) - each.num_planned for each in held])
                    slots = step.slot_mapping.copy()
                    owners[slots] = number
                    pager.stats()
                    assert (owners[slots] == number).all(), turn
                    assert step.commit([draw.randrange(2)] * 2).tolist() == [True, True]
                for sequence in held:
                    sequence.release()

        together(*(lambda number=number: engine(number) for number in range(4)))
        assert_nothing_leaked(pager)

    def test_one_step_is_committed_once(self):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1])
        batch = pager.batch(1, 8)
        batch.add(sequence)
        outcomes: list[str] = []
        for _ in range(20):
            step = batch.step()

            def end(step: kvpager.Step = step) -> None:
                try:
                    step.commit([7])
                    outcomes.append("committed")
                except kvpager.StepError:
                    outcomes.append("too late")

            together(*[end] * 4)
        assert sorted(outcomes) == ["committed"] * 20 + ["too late"] * 60
        assert len(sequence) == 21
        sequence.release()
        assert_nothing_leaked(pager)


class Cycle:
    """Something that only the collector can free, on whichever thread it happens to run."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.itself = self


class TestDroppedHandles:
    def test_l9_handles_are_collected_while_other_threads_call(self):
        pager = kvpager.Pager(64, 4)

        def dropper() -> None:
            for _ in range(100):
                if (sequence := pager.try_admit([1, 2, 3, 4, 5])) is not None:
                    sequence.commit()
                    Cycle(sequence)
                    del sequence

        def caller() -> None:
            pager.stats()
            pager.take_copies()
            pager.check()

        while_collected(dropper, caller, num_callers=2)
        assert_nothing_leaked(pager)
        stats = pager.stats()
        assert stats.dropped_handles == stats.admitted_sequences == stats.clock_ticks > 0

    def test_a_cycle_that_holds_the_pager_and_its_sequences(self):
        pager = kvpager.Pager(8, 4)
        other = kvpager.Pager(8, 4)
        Cycle(pager, pager.admit([1] * 5), other.admit([2] * 5))
        del pager
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gc.collect()
        assert sorted(str(each.message)[:23] for each in caught) == ["sequence 0 was dropped "] * 2
        assert_nothing_leaked(other)

    def test_batches_are_collected_while_other_threads_call(self):
        """With open steps and rows in them, on whichever thread."""
        pager = kvpager.Pager(64, 4)
        kept = pager.admit([9] * 5)

        def dropper() -> None:
            for number in range(100):
                batch = pager.batch(2, 4)
                if (sequence := pager.try_admit([1, 2, 3, 4, 5])) is not None:
                    batch.add(sequence)
                    step = batch.step(5)
                    Cycle(batch, step, sequence if number % 2 else None)
                    del step, sequence
                del batch

        def caller() -> None:
            pager.take_copies()
            assert pager.check() == []

        while_collected(dropper, caller, num_callers=1)
        gc.collect()
        pager.take_copies()
        assert "batch" not in pager.dump(full=True)
        kept.release()
        assert_nothing_leaked(pager)

    def test_a_step_outlives_its_pager(self):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1] * 5)
        batch = pager.batch(2, 4)
        batch.add(sequence)
        step = batch.step(5)
        positions = step.positions
        del pager, batch
        gc.collect()
        assert step.slot_mapping.tolist() == [0, 1, 2, 3, 4]
        assert step.commit([7]).tolist() == [True]
        assert (len(sequence), positions.tolist()) == (6, [0, 1, 2, 3, 4])
        sequence.release()
        del step
        gc.collect()
        assert positions.tolist() == [0, 1, 2, 3, 4], "the arrays outlive everything"

    def test_a_step_outlives_its_pager_and_its_sequences(self):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1] * 5)
        batch = pager.batch(2, 4)
        batch.add(sequence)
        step = batch.step(5)
        del pager, batch
        with pytest.warns(ResourceWarning, match="sequence 0 was dropped"):
            del sequence
        assert step.token_ids.tolist() == [1] * 5, "a read drains nothing"
        assert step.commit([7]).tolist() == [False]

    def test_a_handle_outlives_its_pager(self):
        sequence = kvpager.Pager(8, 4).admit([1] * 5)
        gc.collect()
        assert sequence.append(2) == 5
        sequence.release()

    def test_they_are_released_in_the_order_in_which_they_went(self):
        pager = kvpager.Pager(8, 4)
        handles = {number: pager.admit([number] * 5) for number in range(4)}
        for number in range(4):
            handles[number].commit()
        for number in (2, 0, 3, 1):
            with pytest.warns(ResourceWarning, match=f"sequence {number} was dropped"):
                handles.pop(number)
        assert pager.stats().running_sequences == 4, "nothing is released before the next mutating call"
        pager.take_copies()
        assert "queue lru: 4 0 6 2\n" in pager.dump(full=True)
        assert pager.stats().dropped_handles == 4
        assert_nothing_leaked(pager)

    def test_the_warning_names_the_line_that_dropped(self):
        pager = kvpager.Pager(8, 4)
        with pytest.warns(ResourceWarning) as caught:
            pager.admit([1])
        assert caught[0].filename == __file__
        assert_nothing_leaked(pager)

    def test_a_warning_turned_into_an_error_is_reported_and_the_handle_still_goes(self, monkeypatch):
        pager = kvpager.Pager(8, 4)
        reported = []
        monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_type))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pager.admit([1])
        assert reported == [ResourceWarning]
        assert_nothing_leaked(pager)

    def test_an_error_on_its_way_is_not_lost_to_the_warning(self):
        pager = kvpager.Pager(8, 4)
        with pytest.raises(kvpager.TokenError, match="position 0"):
            # The list with the first handle dies while the second one's error unwinds.
            [pager.admit([token]) for token in (1, -1)]
        assert pager.admit([1]).id == 1
        assert pager.stats().dropped_handles == 1
        assert_nothing_leaked(pager)


class Odd:
    """An integer whose conversion runs something first."""

    def __init__(self, value: int, first: Callable[[], object]) -> None:
        self.value = value
        self.first = first

    def __index__(self) -> int:
        self.first()
        return self.value


class TestReentry:
    """A conversion may run any Python code. It runs before the lock is taken, and sees the pager as it was (L9)."""

    def test_a_conversion_may_call_the_pager(self):
        pager = kvpager.Pager(64, 4)
        others: list[kvpager.Sequence] = []

        def enter() -> None:
            others.append(pager.admit([5, 6]))
            pager.stats()
            pager.check()

        one = Odd(1, enter)
        sequence = pager.admit([one, 2])
        sequence.append(one)
        sequence.extend([one, one])
        sequence.slots(one, Odd(3, enter))
        sequence.commit(Odd(4, enter))
        sequence.truncate(Odd(2, enter))
        children = sequence.fork(one)
        pager.match([one])
        pager.can_admit([one])
        pager.forget([one] * 4)
        assert sequence.tokens.tolist() == [1, 2]
        assert len(others) == 15
        assert [other.id for other in others[:2]] == [0, 2], "the inner admit comes first, for its call ends first"
        for each in (sequence, *children, *others):
            each.release()
        assert_nothing_leaked(pager)

    @pytest.mark.parametrize("call", ["append", "extend", "truncate", "commit", "fork", "slots"])
    def test_a_conversion_may_release_the_sequence_that_it_is_for(self, call):
        pager = kvpager.Pager(8, 4)
        sequence = pager.admit([1, 2, 3, 4, 5])
        argument = Odd(1, sequence.release)
        arguments = {"extend": ([argument],), "slots": (argument, 2)}.get(call, (argument,))
        with pytest.raises(kvpager.StaleHandle, match="was released"):
            getattr(sequence, call)(*arguments)
        assert_nothing_leaked(pager)

    def test_a_conversion_may_change_the_batch(self):
        """What it did comes first: a row that it emptied is empty, a step that it ended has ended."""
        pager = kvpager.Pager(16, 4)
        a, b = pager.admit([1] * 5), pager.admit([2] * 5)
        batch = pager.batch(4, 4)
        batch.add(a)
        batch.add(b)
        with pytest.raises(ValueError, match="row"):
            batch.step([Odd(1, lambda: batch.remove(b)), 1])
        step = batch.step([Odd(2, lambda: batch.add(b)), 2])
        assert (step.positions.tolist(), len(batch)) == ([0, 1, 0, 1], 2)
        with pytest.raises(kvpager.StepError, match=r"cancelled|not open"):
            step.commit([Odd(1, step.cancel), 1])
        steps: list[kvpager.Step] = []
        outer = batch.step([Odd(1, lambda: steps.append(batch.step(1))), 1])
        assert (steps[0].id, outer.id, outer.positions.tolist()) == (0, 1, [1, 1])
        with pytest.raises(kvpager.StepError, match="buffer"):
            batch.step([Odd(1, a.release), 1])
        assert steps[0].commit([Odd(1, b.release), 1]).tolist() == [False, False]
        outer.commit()
        batch.reserve([Odd(1, lambda: None)] if batch.num_rows else [])
        for each in (a, b):
            each.release()
        assert_nothing_leaked(pager)

    @pytest.mark.parametrize("change", ["clear", "append", "reverse"])
    def test_a_list_that_changes_during_its_conversion_is_taken_as_it_was(self, change):
        pager = kvpager.Pager(8, 4)
        tokens: list[Any] = [3, 2, 1]
        arguments = (9,) if change == "append" else ()
        tokens.insert(1, Odd(7, lambda: getattr(tokens, change)(*arguments)))
        with pager.admit(tokens) as sequence:
            assert sequence.tokens.tolist() == [3, 7, 2, 1]
        assert_nothing_leaked(pager)

    def test_a_conversion_that_fails_changes_nothing(self):
        pager = kvpager.Pager(8, 4)

        def fail() -> None:
            raise ZeroDivisionError

        with pager.admit([1, 2]) as sequence:
            before = pager.dump(full=True)
            for call in (
                lambda: sequence.extend([1, Odd(1, fail)]),
                lambda: pager.admit([1, Odd(1, fail)]),
                lambda: sequence.append(Odd(1, fail)),
            ):
                with pytest.raises(ZeroDivisionError):
                    call()
            assert pager.dump(full=True) == before
        assert_nothing_leaked(pager)


class TestBuffers:
    """A call keeps a view of the buffer for as long as it runs, and no longer, whether it succeeds or not."""

    @pytest.mark.parametrize("tokens", [[1, 2, 3], [1, -1, 3], [1] * 100], ids=["good", "bad", "too many"])
    @pytest.mark.parametrize("code", ["i", "q"])
    def test_a_buffer_can_be_resized_after_every_call(self, tokens, code):
        pager = kvpager.Pager(8, 4)
        buffer = array.array(code, tokens)
        sequence = pager.admit([1])
        for call in (pager.admit, pager.try_admit, pager.can_admit, pager.match, pager.forget, sequence.extend):
            try:
                found = call(buffer)
            except (ValueError, kvpager.OutOfBlocks):
                found = None
            if isinstance(found, kvpager.Sequence):
                found.release()
            # Python refuses this with a BufferError while a view exists.
            buffer.append(1)
            buffer.pop()
        sequence.release()
        assert_nothing_leaked(pager)

    def test_a_ctypes_array_can_be_resized_between_calls(self):
        pager = kvpager.Pager(64, 4)
        buffer = (ctypes.c_int32 * 4)(1, 2, 3, 4)
        for size in (16, 4096, 16):
            ctypes.resize(buffer, size)
            with pager.admit(buffer) as sequence:
                assert sequence.tokens.tolist() == [1, 2, 3, 4]
        assert_nothing_leaked(pager)

    def test_a_released_view_is_no_prompt(self):
        pager = kvpager.Pager(8, 4)
        view = memoryview(array.array("i", [1, 2, 3]))
        view.release()
        with pytest.raises(kvpager.TokenTypeError):
            pager.admit(view)
        assert_nothing_leaked(pager)

    def test_the_prompt_is_copied(self):
        pager = kvpager.Pager(8, 4)
        prompt = np.array([1, 2, 3, 4, 5], np.int32)
        with pager.admit(prompt) as sequence:
            prompt[:] = 9
            sequence.commit()
            assert sequence.tokens.tolist() == [1, 2, 3, 4, 5]
            assert pager.match([1, 2, 3, 4, 9]).num_tokens == 4
            assert pager.match(prompt).num_tokens == 0
        assert_nothing_leaked(pager)

    def test_threads_write_into_prompts_that_others_pass(self):
        """Whatever mixture of values a call finds, each is checked, and the pager stays whole."""
        pager = kvpager.Pager(64, 4)
        prompt = np.ones(64, np.int32)
        done = threading.Event()

        def writer() -> None:
            draw = random.Random(1)
            while not done.is_set():
                prompt[draw.randrange(64)] = draw.choice([-1, 0, 1, 2**31 - 1])
                if draw.random() < 0.5:
                    prompt[:] = 1

        def caller() -> None:
            try:
                for _ in range(2_000):
                    try:
                        with pager.admit(prompt) as sequence:
                            sequence.commit()
                            assert (sequence.tokens >= 0).all()
                    except kvpager.TokenError:
                        continue
            finally:
                done.set()

        together(writer, caller)
        assert_nothing_leaked(pager)


def test_many_pagers_in_many_threads(seed):
    """Pagers share nothing: each ends as if it had been alone."""
    draws = [random.Random(seed + number) for number in range(60)]
    dumps: dict[int, str] = {}

    def history(number: int, draw: random.Random) -> str:
        pager = kvpager.Pager(16, 4, policy=draw.choice(["lru", "slru"]))
        for _ in range(30):
            with pager.admit([draw.randrange(2) for _ in range(draw.randint(1, 40))]) as sequence:
                sequence.commit()
        assert_nothing_leaked(pager)
        return pager.dump(full=True)

    def thread(first: int) -> None:
        for number in range(first, 60, 6):
            dumps[number] = history(number, draws[number])

    together(*(lambda first=first: thread(first) for first in range(6)))
    assert all(dumps[number] == history(number, random.Random(seed + number)) for number in range(60))


hold = getattr(_core, "_hold_lock_for_tests", None)


@pytest.mark.skipif(hold is None, reason="this build has no hook to keep the lock")
class TestWaiting:
    """Another thread keeps the pager's lock, and the interpreter is free meanwhile."""

    @pytest.fixture
    def pager(self):
        return kvpager.Pager(64, 4)

    @pytest.fixture
    def busy(self, pager):
        """Keeps the lock for half a second; true until it is given back."""
        keeper = threading.Thread(target=hold, args=(pager, 0.5))
        keeper.start()
        time.sleep(0.1)
        yield keeper.is_alive
        keeper.join()

    def test_a_call_waits_and_the_other_threads_go_on(self, pager, busy):
        answers: list[Any] = []
        waiters = [
            threading.Thread(target=lambda call=call: answers.append(call()))
            for call in (pager.stats, pager.check, lambda: pager.num_free_blocks, lambda: pager.admit([1, 2, 3]))
        ]
        for waiter in waiters:
            waiter.start()
        steps = 0
        while busy():
            steps += 1
        assert steps > 100, "nobody waited with the interpreter's lock in his hand"
        for waiter in waiters:
            waiter.join()
        assert len(answers) == 4
        (sequence,) = [answer for answer in answers if isinstance(answer, kvpager.Sequence)]
        sequence.release()
        answers.clear()
        assert_nothing_leaked(pager)

    def test_l9_a_destructor_never_waits(self, pager):
        sequence = pager.admit([1, 2, 3])
        # Long enough for a collection of all that the other tests have left.
        keeper = threading.Thread(target=hold, args=(pager, 2.0))
        keeper.start()
        time.sleep(0.1)
        del sequence
        Cycle(kvpager.Pager(4).admit([1]))
        gc.collect()
        assert keeper.is_alive(), "the handle went while the lock was taken"
        keeper.join()
        assert_nothing_leaked(pager)
        assert pager.stats().dropped_handles == 1

    def test_a_batch_is_dropped_without_waiting(self, pager):
        sequence = pager.admit([1, 2, 3])
        batch = pager.batch(2, 4)
        batch.add(sequence)
        step = batch.step(3)
        keeper = threading.Thread(target=hold, args=(pager, 0.5))
        keeper.start()
        time.sleep(0.1)
        del step, batch
        assert keeper.is_alive(), "the batch went while the lock was taken"
        keeper.join()
        assert sequence.num_planned == 3, "nothing is cancelled before the next mutating call"
        sequence.release()
        assert_nothing_leaked(pager)

    def test_an_array_may_be_spoiled_while_a_step_waits(self, pager):
        """It is looked at under the lock."""
        seq_lens = np.zeros(8, np.int32)
        sequence = pager.admit([1, 2, 3])
        batch = pager.batch(4, 4, arrays={"seq_lens": seq_lens})
        batch.add(sequence)
        keeper = threading.Thread(target=hold, args=(pager, 0.5))
        keeper.start()
        time.sleep(0.1)
        errors: list[Exception] = []

        def wait() -> None:
            try:
                batch.step(3)
            except ValueError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.1)
        seq_lens.resize(100_000, refcheck=False)
        assert keeper.is_alive()
        waiter.join()
        keeper.join()
        assert "resized" in str(errors[0])
        sequence.release()
        assert_nothing_leaked(pager)

    def test_a_waiting_call_keeps_its_buffer(self, pager, busy):
        tokens = array.array("i", [1, 2, 3])
        found: list[kvpager.Sequence] = []
        waiter = threading.Thread(target=lambda: found.append(pager.admit(tokens)))
        waiter.start()
        time.sleep(0.1)
        with pytest.raises(BufferError):
            tokens.append(4)
        assert busy()
        waiter.join()
        tokens.append(4)
        assert found[0].tokens.tolist() == [1, 2, 3]
        found.pop().release()
        assert_nothing_leaked(pager)

    def test_values_are_checked_after_the_wait(self, pager, busy):
        """What another thread writes during the wait is what the call reads, and it is checked then."""
        prompt = np.array([1, 2, 3], np.int32)
        errors: list[kvpager.TokenError] = []

        def wait() -> None:
            with pytest.raises(kvpager.TokenError) as caught:
                pager.admit(prompt)
            errors.append(caught.value)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.1)
        prompt[1] = -7
        assert busy()
        waiter.join()
        assert (errors[0].position, errors[0].value) == (1, -7)
        assert_nothing_leaked(pager)

    def test_calls_and_collections_under_a_lock_that_is_nearly_always_taken(self, pager):
        done = threading.Event()

        def keeper() -> None:
            while not done.is_set():
                hold(pager, 0.0005)

        def caller() -> None:
            try:
                for number in range(200):
                    sequence = pager.admit([1, 2, 3, 4, 5])
                    sequence.commit()
                    sequence.fork()
                    if number % 2:
                        Cycle(sequence)
                    else:
                        sequence.release()
                    del sequence
                    if number % 20 == 0:
                        gc.collect()
            finally:
                done.set()

        together(keeper, caller)
        assert_nothing_leaked(pager)
        assert pager.stats().dropped_handles == 300
