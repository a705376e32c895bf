"""Handles: what each state allows, and what happens to a handle that is dropped (rules.md 11)."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
from implementations import (
    GETTERS,
    RESUMES,
    RUNNING_CALLS,
    admit_committed,
    each_implementation,
    free_ids,
    line,
    nothing_changes,
    refuses,
)

import kvpager

pytestmark = each_implementation


@pytest.mark.parametrize("call", [*RUNNING_CALLS, *RESUMES, *GETTERS, "with"])
def test_a_released_handle_refuses_every_call_but_release(implementation, call):
    pager = implementation(8, 4)
    sequence = admit_committed(pager, [1] * 9)
    sequence.release()
    calls = {**RUNNING_CALLS, **RESUMES, **GETTERS, "with": lambda sequence: sequence.__enter__()}
    with nothing_changes(pager), refuses(kvpager.StaleHandle) as refused:
        calls[call](sequence)
    assert (refused.value.sequence_id, refused.value.state) == (0, "released")
    assert (sequence.id, sequence.state) == (0, "released")
    assert "released" in repr(sequence)


@pytest.mark.parametrize("call", RUNNING_CALLS)
def test_a_preempted_handle_refuses_what_needs_blocks(implementation, call):
    pager = implementation(8, 4)
    sequence = admit_committed(pager, [1] * 9)
    sequence.preempt()
    with nothing_changes(pager), refuses(kvpager.StaleHandle) as refused:
        RUNNING_CALLS[call](sequence)
    assert (refused.value.sequence_id, refused.value.state) == (0, "preempted")


def test_a_preempted_handle_answers_what_it_is(implementation):
    pager = implementation(8, 4)
    sequence = admit_committed(pager, [1] * 9, namespace=b"a", pin=True)
    sequence.preempt()
    assert {name: getter(sequence) for name, getter in GETTERS.items() if name != "tokens"} == {
        "len": 9,
        "num_cached": 0,
        "num_committed": 0,
        "num_planned": 0,
        "namespace": b"a",
        "pinned": True,
        "num_preemptions": 1,
    }
    assert sequence.tokens.tolist() == [1] * 9
    assert (sequence.id, sequence.state) == (0, "preempted")


@pytest.mark.parametrize("call", RESUMES)
def test_a_running_handle_cannot_be_resumed(implementation, call):
    pager = implementation(8, 4)
    sequence = pager.admit([1] * 9)
    with nothing_changes(pager), refuses(kvpager.StaleHandle) as refused:
        RESUMES[call](sequence)
    assert refused.value.state == "running"


def test_a_preempted_handle_can_be_released(implementation):
    pager = implementation(8, 4)
    sequence = pager.admit([1] * 9)
    sequence.preempt()
    sequence.release("aborted")
    stats = pager.stats()
    assert (stats.clock_ticks, stats.preempted_sequences, stats.noop_calls) == (1, 0, 0)


def test_release_takes_one_of_two_reasons(implementation):
    pager = implementation(8, 4)
    sequence = pager.admit([1] * 9)
    with nothing_changes(pager):
        with refuses(ValueError, match="finished"):
            sequence.release("bored")
        with refuses(TypeError):
            sequence.release(3)
    sequence.release(reason="aborted")
    assert sequence.state == "released"


def test_a_context_manager_releases(implementation):
    pager = implementation(8, 4)
    with pager.admit([1] * 9) as sequence:
        sequence.commit()
    assert sequence.state == "released"
    assert pager.stats().cached_blocks == 2
    with refuses(ZeroDivisionError), pager.admit([2] * 9) as sequence:
        raise ZeroDivisionError
    assert sequence.state == "released"


def test_an_early_release_makes_the_one_at_the_end_a_noop(implementation):
    pager = implementation(8, 4)
    with pager.admit([1] * 9) as sequence:
        sequence.release()
    assert pager.stats().noop_calls == 1


def test_arrays_are_copies(implementation):
    pager = implementation(8, 4)
    sequence = pager.admit([1] * 9)
    for array in (sequence.block_ids, sequence.tokens):
        assert array.dtype == np.int32
        array[:] = 7
    assert (sequence.block_ids.tolist(), sequence.tokens.tolist()) == ([0, 1, 2], [1] * 9)


def test_a_handle_comes_from_a_pager_only(implementation):
    pager = implementation(8, 4)
    sequence = pager.admit([1])
    with nothing_changes(pager):
        with refuses(TypeError):
            type(sequence)()
        with refuses(TypeError):
            copy.copy(sequence)
        with refuses(TypeError):
            pickle.dumps(sequence)


class TestDropped:
    def drop(self, handles):
        """Take the only reference to each handle away, first one first."""
        while handles:
            with pytest.warns(ResourceWarning, match=f"sequence {handles[0].id} "):
                handles.pop(0)

    def test_a_dropped_handle_warns_and_waits_for_the_next_mutating_call(self, implementation):
        pager = implementation(8, 4)
        self.drop([admit_committed(pager, [1] * 5), admit_committed(pager, [2] * 5)])
        before = pager.dump(full=True)
        pager.match([1])
        pager.can_admit([1])
        pager.check()
        repr(pager)
        assert pager.stats().running_sequences == 2
        assert pager.dump(full=True) == before, "a peek does not drain the queue"
        pager.take_copies()
        stats = pager.stats()
        assert (stats.running_sequences, stats.dropped_handles, stats.clock_ticks, stats.noop_calls) == (0, 2, 2, 0)
        assert (line(pager, "queue lru"), free_ids(pager)) == ("queue lru: 0 2", "3 1 4-7")

    def test_the_queue_is_drained_before_a_call_decides(self, implementation):
        pager = implementation(3, 4)
        self.drop([admit_committed(pager, [1] * 12)])
        assert not pager.can_admit([2] * 12)
        sequence = pager.admit([2] * 12)
        assert sequence.block_ids.tolist() == [2, 1, 0]

    def test_a_refused_call_drains_it_too(self, implementation):
        pager = implementation(3, 4)
        self.drop([admit_committed(pager, [1] * 12)])
        with refuses(kvpager.NeverFits):
            pager.admit([2] * 13)
        assert pager.stats().dropped_handles == 1

    def test_a_preempted_handle_can_be_dropped(self, implementation):
        pager = implementation(8, 4)
        sequence = pager.admit([1] * 5)
        sequence.preempt()
        handles = [sequence]
        del sequence
        self.drop(handles)
        pager.take_copies()
        assert pager.stats().preempted_sequences == 0

    def test_a_released_handle_is_dropped_in_silence(self, implementation, recwarn):
        pager = implementation(8, 4)
        # What earlier tests left behind is not what is looked at.
        gc.collect()
        recwarn.clear()
        pager.admit([1] * 5).release()
        gc.collect()
        assert not [warning for warning in recwarn if warning.category is ResourceWarning]


class TestOrderOfChecks:
    """rules.md 11.4: handle state, then types and values, then NeverFits, then OutOfBlocks."""

    def test_the_handle_comes_first(self, implementation):
        pager = implementation(8, 4)
        sequence = pager.admit([1] * 5)
        sequence.release()
        for call in (
            lambda: sequence.append(-1),
            lambda: sequence.extend("no"),
            lambda: sequence.commit(99),
            lambda: sequence.truncate(0),
            lambda: sequence.fork(0),
            lambda: sequence.slots(3, 2),
        ):
            with refuses(kvpager.StaleHandle):
                call()
        sequence.release("bored")
        assert pager.stats().noop_calls == 1

    def test_values_come_before_the_size(self, implementation):
        pager = implementation(2, 4)
        with refuses(kvpager.TokenError):
            pager.admit([1] * 99 + [-1])
        with refuses(kvpager.NeverFits):
            pager.admit([1] * 99)
        assert pager.stats().refused_calls == 1
