"""Plans at the boundary: what goes in and comes out, who may say what of them, and bytes that really move.

What the pager decides is the reference's to say; here it is how callers are told, and what becomes of their mistakes.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import gc
import multiprocessing
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from implementations import refuses
from test_threads import hasty_threads, together  # noqa: F401

import kvpager

DROPPED = pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning")

PROMPT = list(range(1, 18))
"""Four full blocks of 4, and a token."""


def pager_with_host(num_blocks: int = 16, num_host_blocks: int = 16, **settings: Any) -> kvpager.Pager:
    return kvpager.Pager(num_blocks, 4, num_host_blocks=num_host_blocks, **settings)


def committed(pager: kvpager.Pager, prompt: Any = PROMPT) -> kvpager.Sequence:
    sequence = pager.admit(prompt)
    sequence.commit()
    return sequence


def done(pager: kvpager.Pager, plan: kvpager.Plan | None) -> kvpager.Plan:
    """A plan that is carried out at once."""
    assert plan is not None
    assert pager.start(plan)
    assert pager.complete(plan)
    return plan


def on_host(pager: kvpager.Pager, prompt: Any = PROMPT) -> None:
    """Leave a prompt's full blocks on the host, and not on the device."""
    with committed(pager, prompt) as sequence:
        done(pager, pager.offload_committed(sequence))
    with pager.admit([10**9] * (4 * pager.num_free_blocks + 4 * pager.num_evictable_blocks)):
        pass
    found = pager.match([*prompt, 0])
    assert (found.num_tokens, found.num_host_tokens) == (0, len(prompt) // 4 * 4)


def swapped(pager: kvpager.Pager, prompt: Any = PROMPT) -> kvpager.Sequence:
    sequence = committed(pager, prompt)
    done(pager, sequence.swap_out())
    assert sequence.state == "swapped"
    return sequence


# ---- what comes out ------------------------------------------------------------------------------------------------


class TestWhatComesOut:
    def test_a_plan_says_what_to_copy(self):
        pager = pager_with_host()
        sequence = committed(pager)
        plan = sequence.swap_out()
        assert type(plan) is kvpager.Plan
        assert (plan.id, plan.generation, plan.kind, plan.source, plan.destination) == (
            0,
            0,
            "swap_out",
            "device",
            "host",
        )
        assert (plan.source_ids.tolist(), plan.destination_ids.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
        assert {type(value) for value in (plan.id, plan.generation)} == {int}
        done(pager, plan)
        plan = sequence.swap_in()
        assert (plan.id, plan.generation, plan.kind, plan.source, plan.destination) == (
            0,
            1,
            "swap_in",
            "host",
            "device",
        )
        done(pager, plan)
        sequence.release()

    def test_every_kind_has_its_words(self):
        pager = pager_with_host()
        with committed(pager) as sequence:
            plan = pager.offload_committed(sequence)
            assert plan is not None
            assert (plan.kind, plan.source, plan.destination) == ("offload", "device", "host")
            pager.cancel(plan)
        plan = pager.offload(2)
        assert plan is not None
        assert (plan.kind, len(plan)) == ("offload", 2)
        pager.cancel(plan)
        on_host(pager)
        with pager.admit([*PROMPT, 0], fetch=True) as sequence:
            plan = sequence.fetch
            assert plan is not None
            assert (plan.kind, plan.source, plan.destination, len(plan)) == ("fetch", "host", "device", 4)

    @pytest.mark.parametrize("name", ["source_ids", "destination_ids"])
    def test_its_arrays_are_int32_and_read_only_for_good(self, name):
        pager = pager_with_host()
        with committed(pager) as sequence:
            ids = getattr(sequence.swap_out(), name)
            assert (ids.dtype, ids.shape) == (np.int32, (5,))
            with pytest.raises(ValueError, match="read-only"):
                ids[0] = 3
            with pytest.raises(ValueError, match="WRITEABLE"):
                ids.flags.writeable = True
            with pytest.raises(ValueError, match="read-only"):
                ids.view()[0] = 3

    def test_nothing_to_copy_is_no_plan_for_an_offload_and_an_empty_one_for_a_swap(self):
        pager = pager_with_host()
        assert pager.offload(1) is None
        with pager.admit(PROMPT) as sequence:
            assert pager.offload_committed(sequence) is None
            plan = sequence.try_swap_out()
            assert plan is not None
            assert (len(plan), bool(plan), sequence.state) == (0, False, "swapping_out")
            done(pager, plan)
            plan = sequence.try_swap_in()
            assert plan is not None
            assert len(plan) == 0
            done(pager, plan)
            assert sequence.state == "running"

    def test_a_plan_outlives_its_pager(self):
        pager = pager_with_host()
        sequence = committed(pager)
        plan = sequence.swap_out()
        sequence.release()
        del pager, sequence
        gc.collect()
        assert plan.source_ids.tolist() == [0, 1, 2, 3, 4]
        assert pickle.loads(pickle.dumps(plan)) == plan

    def test_the_fetch_of_a_sequence_is_its_plan_while_it_waits(self):
        pager = pager_with_host()
        on_host(pager)
        prompt = [*PROMPT, 0]
        first, second = pager.admit(prompt, fetch=True), pager.try_admit(prompt, fetch=True)
        assert (first.state, second.state) == ("fetching", "fetching")
        assert first.fetch is not first.fetch
        assert first.fetch == second.fetch, "both wait for one plan"
        assert first.block_ids.tolist()[:4] == first.fetch.destination_ids.tolist()
        plan = first.fetch
        done(pager, plan)
        for sequence in (first, second):
            assert (sequence.state, sequence.fetch, sequence.num_cached) == ("running", None, 16)
            sequence.preempt()
            assert sequence.fetch is None
            sequence.release()
            with refuses(kvpager.StaleHandle, "fetch refused: sequence"):
                _ = sequence.fetch

    @pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
    def test_a_plan_that_cannot_be_shown_is_not_lost(self, kind, monkeypatch):
        pager = pager_with_host()
        on_host(pager, [5, 6, 7, 8])
        first, second = committed(pager), committed(pager, [3, 4])

        def fails(*_: Any) -> None:
            raise kind

        with monkeypatch.context() as patch:
            patch.setattr(kvpager.Plan, "__init__", fails)
            for call in (
                lambda: pager.offload_committed(first),
                first.swap_out,
                second.try_swap_out,
                lambda: pager.plans(),
            ):
                with refuses(kind):
                    call()
        plans = [status.plan for status in pager.plans()]
        assert [plan.kind for plan in plans] == ["offload", "swap_out", "swap_out"]
        assert (first.state, second.state) == ("swapping_out", "swapping_out")
        assert [done(pager, plan) for plan in plans] == plans
        assert (first.state, second.state, pager.check()) == ("swapped", "swapped", [])
        for sequence in (first, second):
            sequence.release()

    def test_the_plans_that_have_not_ended(self):
        pager = pager_with_host(64, 64)
        sequences = [committed(pager, range(start, start + 5)) for start in range(0, 40, 10)]
        plans = [sequence.swap_out() for sequence in sequences]
        assert pager.plans() == [kvpager.PlanStatus(plan, "planned", None) for plan in plans]
        assert type(pager.plans()[0]) is kvpager.PlanStatus
        pager.start(plans[2], 2**63 - 1)
        pager.start(plans[1], 7)
        pager.start(plans[0], tick=np.int64(3))
        pager.abandon(plans[0])
        assert [(status.plan.id, status.state, status.tick) for status in pager.plans()] == [
            (0, "abandoned", 3),
            (1, "started", 7),
            (2, "started", 2**63 - 1),
            (3, "planned", None),
        ]
        older = {limit: [status.plan.id for status in pager.plans(older_than=limit)] for limit in (0, 3, 4, 8)}
        assert older == {0: [], 3: [], 4: [0], 8: [0, 1]}
        assert [status.plan.id for status in pager.plans(2**63 - 1)] == [0, 1]
        for sequence in sequences:
            sequence.release()

    def test_a_plan_is_started_at_the_pagers_clock_by_default(self):
        pager = pager_with_host()
        for _ in range(3):
            pager.admit([1]).release()
        with committed(pager) as sequence:
            plan = sequence.swap_out()
            pager.start(plan, None)
            assert pager.plans()[0].tick == pager.stats().clock_ticks == 3
            pager.complete(plan)

    def test_the_number_of_fenced_blocks(self):
        pager = pager_with_host(8)
        batch = pager.batch(2, 8)
        sequence = pager.admit(PROMPT)
        batch.add(sequence)
        step = batch.step(17)
        sequence.release()
        assert (pager.num_fenced_blocks, pager.num_free_blocks) == (5, 8), "its kernel may still be running"
        step.commit()
        assert pager.num_fenced_blocks == 0
        assert kvpager.Pager(8, 4).num_fenced_blocks == 0

    def test_statistics_of_both_tiers(self):
        pager = pager_with_host(8, 6)
        sequence = committed(pager)
        plan = sequence.swap_out()
        stats = pager.stats()
        assert (stats.host_total_blocks, stats.host_free_blocks, stats.host_writing_blocks) == (6, 1, 5)
        assert (stats.running_sequences, stats.swapped_sequences) == (1, 0)
        done(pager, plan)
        stats = pager.stats()
        assert (stats.host_active_blocks, stats.host_writing_blocks, stats.swap_outs) == (5, 0, 1)
        assert (stats.running_sequences, stats.swapped_sequences) == (0, 1)
        with pager.admit([9] * 32):
            pass
        plan = sequence.swap_in()
        assert pager.stats().writing_blocks == 5
        pager.start(plan)
        pager.abandon(plan)
        assert (pager.stats().writing_blocks, pager.stats().quarantined_blocks) == (0, 5)
        assert pager.reclaim(plan)
        assert pager.stats().quarantined_blocks == 0
        sequence.release()
        stats = pager.stats()
        assert (stats.host_cached_blocks, stats.host_free_blocks, stats.swapped_sequences) == (4, 2, 0)
        with pager.admit([*PROMPT, 0], fetch=True) as sequence:
            done(pager, sequence.fetch)
        assert (pager.stats().fetched_blocks, pager.stats().swap_ins, pager.stats().offloaded_blocks) == (4, 0, 0)
        assert set(pager.stats().as_dict()) == {field.name for field in dataclasses.fields(kvpager.Stats)}
        assert pager.check() == []

    def test_a_repr_names_the_host_where_there_is_one(self):
        assert repr(pager_with_host(8, 3)).endswith(", prefix_cache=True, num_host_blocks=3)")
        assert repr(kvpager.Pager(8, 4)).endswith(", prefix_cache=True)")
        assert (pager_with_host(8, 3).num_host_blocks, kvpager.Pager(8).num_host_blocks) == (3, 0)


# ---- what goes in --------------------------------------------------------------------------------------------------


class Index:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        return self.value


class Interrupted:
    """Python code that runs while arguments are read may raise whatever it likes."""

    def __index__(self) -> int:
        raise KeyboardInterrupt


ON_PLANS: dict[str, Callable[[kvpager.Pager, Any], bool]] = {
    "start": lambda pager, plan: pager.start(plan),
    "complete": lambda pager, plan: pager.complete(plan),
    "fail": lambda pager, plan: pager.fail(plan),
    "cancel": lambda pager, plan: pager.cancel(plan),
    "abandon": lambda pager, plan: pager.abandon(plan),
    "reclaim": lambda pager, plan: pager.reclaim(plan),
}
ALLOWED = {"planned": {"start", "cancel"}, "started": {"complete", "fail", "abandon"}, "abandoned": {"reclaim"}}

NOT_INTEGERS = [None, True, np.True_, 1.0, np.float32(1), "1", b"1", [1], Index("1"), 1j]


@pytest.fixture
def planned() -> Iterator[tuple[kvpager.Pager, kvpager.Plan]]:
    """A pager with one plan of 5 blocks. A test of refusals changes nothing."""
    pager = pager_with_host()
    with committed(pager) as sequence:
        plan = sequence.swap_out()
        before = pager.dump(full=True), pager.stats()
        yield pager, plan
        assert (pager.dump(full=True), pager.stats()) == before
        assert [status.plan for status in pager.plans()] == [plan]
    assert pager.check() == []


def named(plan: kvpager.Plan, **names: Any) -> kvpager.Plan:
    return dataclasses.replace(plan, **names)


class TestWhatGoesIn:
    @pytest.mark.parametrize("call", ON_PLANS)
    def test_a_plan_is_a_plan(self, planned, call):
        pager, plan = planned
        for other in (None, 0, (0, 0), "plan", dataclasses.astuple(plan), pager.plans()[0], kvpager.Plan, object()):
            with refuses(TypeError, r"plan must be a kvpager.Plan, not \w+"):
                ON_PLANS[call](pager, other)

    @pytest.mark.parametrize("call", ON_PLANS)
    @pytest.mark.parametrize("name", ["id", "generation"])
    def test_its_number_and_generation_are_ints(self, planned, call, name):
        pager, plan = planned
        for value in (-1, 2**32, 2**64, 10**5000, np.int64(0), Index(0), *NOT_INTEGERS):
            with refuses(ValueError, rf"plan.{name} is .*; it must be an int, 0 to 4294967295"):
                ON_PLANS[call](pager, named(plan, **{name: value}))

    @pytest.mark.parametrize("call", ON_PLANS)
    def test_a_plan_of_another_pager(self, planned, call):
        pager, plan = planned
        for names in ({"id": 1}, {"id": 2**32 - 1}, {"generation": 1}, {"generation": 2**32 - 1}):
            with refuses(ValueError, "this pager has made no plan [0-9]+ of generation [0-9]+"):
                ON_PLANS[call](pager, named(plan, **names))
        with refuses(ValueError, "another pager's"):
            ON_PLANS[call](pager_with_host(), plan)

    @pytest.mark.parametrize("call", ON_PLANS)
    def test_a_plan_of_that_name_of_another_pager(self, call):
        """A server with two pagers, one for each model, and one loop that reports: what was moved there is not here."""
        pager, other = pager_with_host(), pager_with_host()
        with committed(pager) as sequence, committed(other, range(5, 40)) as stranger:
            sequence.swap_out()
            plan = stranger.swap_out()
            before = pager.dump(full=True), pager.plans(), pager.stats()
            with refuses(ValueError, "plan 0 of generation 0 is another swap_out of 5 blocks"):
                ON_PLANS[call](pager, plan)
            assert (pager.dump(full=True), pager.plans(), pager.stats()) == before

    @pytest.mark.parametrize("call", ON_PLANS)
    @pytest.mark.parametrize("name", ["source_ids", "destination_ids"])
    def test_its_blocks_are_int32(self, planned, call, name):
        pager, plan = planned
        for value in ("", (), [0, 1], 0, None, np.zeros(5, np.int64), np.zeros((5, 1), np.int32)):
            with refuses(TypeError, f"plan.{name} must be a one-dimensional int32 array"):
                ON_PLANS[call](pager, named(plan, **{name: value}))
        for value in (getattr(plan, name)[:-1], getattr(plan, name) + 1):
            with refuses(ValueError, "report a plan to the pager that made it"):
                ON_PLANS[call](pager, named(plan, **{name: value.astype(np.int32)}))

    def test_it_is_known_by_its_name_and_blocks(self):
        pager = pager_with_host()
        with committed(pager) as sequence:
            plan = sequence.swap_out()
            strided = np.repeat(plan.source_ids, 2)[::2]
            assert pager.start(named(plan, source=3, destination=b"", source_ids=strided))
            with refuses(ValueError, "another swap_out"):
                pager.complete(named(plan, kind="offload"))
            assert pager.complete(plan)
            assert sequence.state == "swapped"

    def test_a_subclass_of_plan_is_a_plan(self):
        class Mine(kvpager.Plan):
            pass

        pager = pager_with_host()
        with committed(pager) as sequence:
            plan = sequence.swap_out()
            fields = [getattr(plan, field.name) for field in dataclasses.fields(plan)]
            assert pager.start(Mine(*fields))

    @pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
    def test_a_tick_is_an_integer(self, planned, value):
        pager, plan = planned
        if value is not None:
            with refuses(TypeError, "tick must be an integer, not"):
                pager.start(plan, value)
            with refuses(TypeError, "older_than must be an integer, not"):
                pager.plans(value)

    @pytest.mark.parametrize("value", [-1, 2**63, 10**5000, np.int8(-1), np.uint64(2**63), Index(-1)], ids=type)
    def test_a_tick_is_a_time(self, planned, value):
        pager, plan = planned
        with refuses(ValueError, "tick is .*; it must be 0 to 9223372036854775807"):
            pager.start(plan, tick=value)
        with refuses(ValueError, "older_than is .*; it must be 0 to 9223372036854775807"):
            pager.plans(older_than=value)

    def test_an_interrupt_while_arguments_are_read_is_no_mistake_in_them(self, planned):
        pager, plan = planned
        for call in (
            lambda: pager.start(plan, Interrupted()),
            lambda: pager.plans(Interrupted()),
            lambda: pager.offload(Interrupted()),
            lambda: pager.admit([1], fetch_min_tokens=Interrupted()),
        ):
            with refuses(KeyboardInterrupt):
                call()

    @pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
    def test_a_number_of_blocks_or_tokens_is_an_integer(self, planned, value):
        pager, _ = planned
        with refuses(TypeError, "num_blocks must be an integer, not"):
            pager.offload(value)
        for call in (pager.admit, pager.try_admit):
            with refuses(TypeError, "fetch_min_tokens must be an integer, not"):
                call([1], fetch_min_tokens=value)

    @pytest.mark.parametrize("value", [0, -1, -(10**5000), np.int64(-3), Index(0)], ids=type)
    def test_a_number_of_blocks_or_tokens_is_1_or_more(self, planned, value):
        pager, _ = planned
        with refuses(ValueError, "num_blocks is .*; it must be 1 or more"):
            pager.offload(value)
        for call in (pager.admit, pager.try_admit):
            with refuses(ValueError, "fetch_min_tokens is .*; it must be 1 or more"):
                call([1], fetch=True, fetch_min_tokens=value)

    @pytest.mark.parametrize("many", [2**31, 2**64, 10**5000, np.uint64(2**63), Index(2**80)], ids=type)
    def test_more_than_there_can_be_is_as_good_as_all(self, many):
        pager = pager_with_host()
        committed(pager).release()
        plan = pager.offload(many)
        assert plan is not None
        assert len(plan) == 4
        done(pager, plan)
        with pager.admit(PROMPT, fetch=True, fetch_min_tokens=many) as sequence:
            assert sequence.state == "running"

    @pytest.mark.parametrize("value", [None, 0, 1, "True", [], np.int8(1)], ids=repr)
    def test_fetch_is_a_bool(self, planned, value):
        pager, _ = planned
        for call in (pager.admit, pager.try_admit):
            with refuses(TypeError, "fetch must be a bool, or an object with the method should_fetch, not"):
                call([1], fetch=value)

    def test_fetch_is_a_bool_of_numpy_too_and_waits_for_enough_tokens(self):
        pager = pager_with_host()
        on_host(pager)
        with pager.admit([*PROMPT, 0], fetch=np.True_, fetch_min_tokens=17) as sequence:
            assert (sequence.state, sequence.fetch) == ("running", None)
        with pager.admit([*PROMPT, 0], fetch=np.True_, fetch_min_tokens=np.int8(16)) as sequence:
            assert sequence.state == "fetching"

    def test_what_is_written_through_is_a_sequence_of_the_same_pager(self, planned):
        pager, plan = planned
        for other in (None, 3, "sequence", plan, pager):
            with refuses(TypeError, r"sequence must be a kvpager.Sequence, not \w+"):
                pager.offload_committed(other)
        with (
            committed(pager_with_host()) as stranger,
            refuses(ValueError, "sequence [0-9]+ belongs to another pager"),
        ):
            pager.offload_committed(stranger)
        with refuses(kvpager.StaleHandle, "offload_committed refused: sequence 0 was released"):
            pager.offload_committed(stranger)

    @pytest.mark.parametrize("value", [None, True, 1.5, "8", b"8", [8], Index("8"), np.float64(3), np.True_], ids=repr)
    def test_host_blocks_are_an_integer(self, value):
        with refuses(TypeError, "num_host_blocks must be an integer, not"):
            kvpager.Pager(8, num_host_blocks=value)

    @pytest.mark.parametrize("value", [-1, 2**31, 2**64, -(10**5000), np.int64(-1)], ids=type)
    def test_host_blocks_have_their_limits(self, value):
        with refuses(kvpager.ConfigError, "num_host_blocks is .*; it must be 0 to 2147483647"):
            kvpager.Pager(8, num_host_blocks=value)

    def test_host_blocks_of_numpy(self):
        assert kvpager.Pager(8, num_host_blocks=np.int32(5)).num_host_blocks == 5


GOOD_MASKS: dict[str, Callable[[list[bool]], Any]] = {
    "list": list,
    "tuple": tuple,
    "bools of numpy": lambda done: [np.bool_(value) for value in done],
    "deque": collections.deque,
    "bool array": lambda done: np.array(done),
    "int8 array": lambda done: np.array(done, "i1") * -3,
    "int64 array": lambda done: np.array(done, "i8") << 40,
    "other byte order": lambda done: np.array(done, ">u4"),
    "strided": lambda done: np.repeat(np.array(done), 3)[::3],
    "read-only": lambda done: np.frombuffer(np.array(done).tobytes(), "?"),
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview of bools": lambda done: memoryview(bytes(done)).cast("?"),
    "array.array": lambda done: array.array("q", done),
}
BAD_MASKS: dict[str, tuple[Any, str]] = {
    "text": ("TTFFF", "done must be a sequence of bools, or a buffer of bools or integers, not str"),
    "a bool": (True, "done must be a sequence of bools, or a buffer"),
    "generator": ((value for value in [True] * 5), "done must be a sequence of bools, or a buffer"),
    "set": ({True, False}, "done must be a sequence of bools, or a buffer"),
    "ints": ([1, 0, 1, 0, 1], "done at position 0 must be a bool, not 1"),
    "an int": ([True, True, 2, True, True], "done at position 2 must be a bool, not 2"),
    "none": ([True, None, True, True, True], "done at position 1 must be a bool, not None"),
    "nested": ([[True] * 5], "done at position 0 must be a bool, not "),
    "range": (range(5), "done at position 0 must be a bool, not 0"),
    "floats": (np.ones(5), "done must be bools or integers, not a buffer of float64"),
    "objects": (np.array([True] * 5, object), "done must be bools or integers, not a buffer of object"),
    "two dimensions": (np.ones((5, 1), bool), "done must be bools or integers, not a buffer of 2 dimensions"),
    "no dimension": (np.array(True), "done must be bools or integers, not a buffer of 0 dimensions"),
    "characters": (memoryview(b"abcde").cast("c"), "done must be bools or integers, not a buffer of"),
}


class TestWhatArrived:
    @pytest.mark.parametrize("kind", GOOD_MASKS)
    def test_of_a_failed_plan_in_any_form(self, kind):
        """The first two of four blocks: a fetch keeps the prefix that arrived."""
        for arrived, hit in (([True, True, False, True], 8), ([False] * 4, 0), ([True] * 4, 16)):
            pager = pager_with_host()
            on_host(pager)
            with pager.admit([*PROMPT, 0], fetch=True) as sequence:
                pager.start(sequence.fetch)
                assert pager.fail(sequence.fetch, GOOD_MASKS[kind](arrived))
                assert (sequence.state, sequence.num_cached) == ("running", hit)
            assert pager.check() == []

    def test_nothing_by_default(self):
        pager = pager_with_host()
        on_host(pager)
        for done in ((), (None,)):
            with pager.admit([*PROMPT, 0], fetch=True) as sequence:
                pager.start(sequence.fetch)
                assert pager.fail(sequence.fetch, *done)
                assert (sequence.state, sequence.num_cached) == ("running", 0)

    @pytest.mark.parametrize("kind", BAD_MASKS)
    def test_in_no_form(self, kind):
        value, message = BAD_MASKS[kind]
        pager = pager_with_host()
        with committed(pager) as sequence:
            plan = sequence.swap_out()
            pager.start(plan)
            with refuses(TypeError, message):
                pager.fail(plan, done=value)
            assert sequence.state == "swapping_out"

    @pytest.mark.parametrize("length", [0, 4, 6])
    def test_is_said_of_each_block(self, length):
        pager = pager_with_host()
        with committed(pager) as sequence:
            plan = sequence.swap_out()
            with refuses(kvpager.TransferError, "planned"):
                pager.fail(plan, [True] * length)
            pager.start(plan)
            for done in ([True] * length, np.ones(length, bool)):
                with refuses(ValueError, f"done has {length} values; the plan has 5 blocks"):
                    pager.fail(plan, done)
            assert sequence.state == "swapping_out"
            assert pager.stats().late_reports == 0

    def test_a_released_view_holds_nothing(self):
        pager = pager_with_host()
        with committed(pager) as sequence:
            plan = sequence.swap_out()
            view = memoryview(bytes(5))
            view.release()
            with refuses(TypeError, "done must be a sequence of bools"):
                pager.fail(plan, view)


# ---- who may say what, and when ------------------------------------------------------------------------------------


def in_state(state: str) -> tuple[kvpager.Pager, kvpager.Sequence, kvpager.Plan]:
    pager = pager_with_host()
    sequence = committed(pager)
    plan = sequence.swap_out()
    if state != "planned":
        pager.start(plan)
    if state == "abandoned":
        pager.abandon(plan)
    return pager, sequence, plan


class TestReports:
    @pytest.mark.parametrize("state", ALLOWED)
    @pytest.mark.parametrize("call", ON_PLANS)
    def test_each_state_allows_its_calls(self, call, state):
        pager, sequence, plan = in_state(state)
        if call in ALLOWED[state]:
            assert ON_PLANS[call](pager, plan) is True
        elif state == "abandoned" and call in ALLOWED["started"]:
            # The mover was too late, or the caller asks twice: nobody waits for it any more.
            before = pager.dump(full=True), pager.plans()
            assert ON_PLANS[call](pager, plan) is False
            assert (pager.dump(full=True), pager.plans()) == before
            assert pager.stats().late_reports == 1
        elif (call, state) == ("start", "started"):
            # Somebody else who waits for the same fetch may have started it.
            before = pager.dump(full=True), pager.plans(), pager.stats()
            assert ON_PLANS[call](pager, plan) is False
            assert (pager.dump(full=True), pager.plans(), pager.stats()) == before
        else:
            before = pager.dump(full=True), pager.plans(), pager.stats()
            with refuses(
                kvpager.TransferError, f"^{call}: plan 0 of generation 0 is {state}; the call is for"
            ) as error:
                ON_PLANS[call](pager, plan)
            assert (pager.dump(full=True), pager.plans(), pager.stats()) == before
            copy = pickle.loads(pickle.dumps(error.value))
            assert (type(copy), copy.args) == (kvpager.TransferError, error.value.args)
            assert isinstance(error.value, RuntimeError)
        sequence.release()
        assert pager.check() == []

    @pytest.mark.parametrize("call", ON_PLANS)
    @pytest.mark.parametrize("end", ["complete", "fail", "cancel", "reclaim"])
    def test_a_late_report_changes_nothing_and_is_counted(self, call, end):
        state = next(state for state, calls in ALLOWED.items() if end in calls)
        pager, sequence, plan = in_state(state)
        assert ON_PLANS[end](pager, plan)
        before = pager.dump(full=True)
        assert ON_PLANS[call](pager, plan) is False
        assert ON_PLANS[call](pager, pickle.loads(pickle.dumps(plan))) is False
        assert (pager.stats().late_reports, pager.dump(full=True)) == (2, before)
        # Its number is another plan's meanwhile, which is left alone.
        other = committed(pager, [5, 6, 7])
        plan_of_other = other.swap_out()
        assert (plan_of_other.id, plan_of_other.generation) == (0, 1)
        assert ON_PLANS[call](pager, plan) is False
        assert [status.state for status in pager.plans()] == ["planned"]
        for handle in (sequence, other):
            handle.release()
        assert pager.plans() == []
        assert pager.check() == []

    def test_a_late_failure_may_say_anything(self):
        pager, sequence, plan = in_state("started")
        pager.complete(plan)
        assert pager.fail(plan, [True]) is False
        sequence.release()

    def test_a_plan_whose_sequence_was_released_before_its_start_is_cancelled(self):
        pager, sequence, plan = in_state("planned")
        sequence.release()
        assert pager.plans() == []
        assert pager.start(plan) is False

    def test_reports_release_dropped_handles(self):
        for call in ON_PLANS.values():
            pager, sequence, _ = in_state("started")
            dropped = committed(pager, [7, 8])
            with pytest.warns(ResourceWarning):  # noqa: PT031
                del dropped
                gc.collect()
            assert pager.stats().dropped_handles == 0
            with refuses(TypeError, "plan must be"):
                call(pager, None)
            assert pager.stats().dropped_handles == 1
            sequence.release()


SWAPS: dict[str, Callable[[kvpager.Sequence], Any]] = {
    "swap_out": lambda sequence: sequence.swap_out(),
    "swap_in": lambda sequence: sequence.swap_in(),
    "try_swap_out": lambda sequence: sequence.try_swap_out(),
    "try_swap_in": lambda sequence: sequence.try_swap_in(),
}
STATES: dict[str, Callable[[kvpager.Pager], kvpager.Sequence]] = {
    "running": committed,
    "preempted": lambda pager: preempted(pager),
    "released": lambda pager: released(pager),
    "fetching": lambda pager: fetching(pager),
    "swapping_out": lambda pager: swapping_out(pager),
    "swapped": swapped,
    "swapping_in": lambda pager: swapping_in(pager),
}


def preempted(pager: kvpager.Pager) -> kvpager.Sequence:
    sequence = committed(pager)
    sequence.preempt()
    return sequence


def released(pager: kvpager.Pager) -> kvpager.Sequence:
    sequence = committed(pager)
    sequence.release()
    return sequence


def fetching(pager: kvpager.Pager) -> kvpager.Sequence:
    on_host(pager)
    return pager.admit([*PROMPT, 0], fetch=True)


def swapping_out(pager: kvpager.Pager) -> kvpager.Sequence:
    sequence = committed(pager)
    sequence.swap_out()
    return sequence


def swapping_in(pager: kvpager.Pager) -> kvpager.Sequence:
    sequence = swapped(pager)
    with pager.admit([10**9] * 60):  # so that there is something to copy
        pass
    sequence.swap_in()
    return sequence


class TestStates:
    @pytest.mark.parametrize("state", STATES)
    def test_each_has_its_word(self, state):
        sequence = STATES[state](pager_with_host())
        assert sequence.state == state
        assert repr(sequence).startswith(f"<kvpager.Sequence {sequence.id}: {state}")
        sequence.release()

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize("call", [*SWAPS, "offload_committed"])
    def test_each_allows_its_calls(self, call, state):
        pager = pager_with_host()
        sequence = STATES[state](pager)
        wanted = "swapped" if call.endswith("swap_in") else "running"
        if state == wanted:
            plan = pager.offload_committed(sequence) if call == "offload_committed" else SWAPS[call](sequence)
            assert type(plan) is kvpager.Plan
        else:
            name = call.removeprefix("try_")
            with refuses(kvpager.StaleHandle, f"{name} refused: sequence {sequence.id} ") as error:
                _ = pager.offload_committed(sequence) if call == "offload_committed" else SWAPS[call](sequence)
            assert (error.value.state, error.value.call, error.value.sequence_id) == (state, name, sequence.id)
        sequence.release()
        assert pager.check() == []

    @pytest.mark.parametrize("state", STATES)
    def test_block_ids_where_there_are_blocks_of_the_device(self, state):
        sequence = STATES[state](pager_with_host())
        if state in ("running", "fetching", "swapping_out", "swapping_in"):
            assert len(sequence.block_ids) == 5
        else:
            with refuses(kvpager.StaleHandle, "block_ids refused"):
                _ = sequence.block_ids
        if state != "released":
            assert (sequence.tokens[:17].tolist(), sequence.pinned, sequence.namespace) == (PROMPT, False, b"")
            with sequence as entered:
                assert entered is sequence
        assert sequence.state == "released"

    @pytest.mark.parametrize("state", ["fetching", "swapping_out", "swapped", "swapping_in"])
    @pytest.mark.parametrize("is_started", [False, True], ids=["planned", "started"])
    def test_a_dropped_handle_is_released_by_the_next_call(self, state, is_started):
        pager = pager_with_host()
        sequence = STATES[state](pager)
        plans = [status.plan for status in pager.plans()]
        for plan in plans if is_started else ():
            pager.start(plan)
        with pytest.warns(ResourceWarning, match=f"sequence {sequence.id} was dropped"):  # noqa: PT031
            del sequence
            gc.collect()
        before = pager.stats()
        assert before.running_sequences + before.swapped_sequences == 1, "nobody has called yet"
        pager.admit([1]).release()
        stats = pager.stats()
        assert (stats.running_sequences, stats.swapped_sequences, stats.dropped_handles) == (0, 0, 1)
        assert pager.check() == []
        assert [pager.complete(plan) for plan in plans] == [is_started] * len(plans)
        stats = pager.stats()
        assert (stats.active_blocks, stats.writing_blocks) == (0, 0)
        assert (stats.host_active_blocks, stats.host_writing_blocks) == (0, 0)
        assert (pager.plans(), pager.check()) == ([], [])

    def test_a_swapped_sequence_can_be_resumed_without_a_copy(self):
        pager = pager_with_host()
        sequence = swapped(pager)
        assert sequence.resume() is sequence
        assert (sequence.state, sequence.num_cached, pager.stats().swapped_sequences) == ("running", 16, 0)
        sequence.release()


class TestUnusualPaths:
    def test_a_sequence_without_a_path_goes_and_comes_back(self):
        pager = pager_with_host()
        sequence = pager.admit([1, 2])
        done(pager, sequence.swap_out())
        done(pager, sequence.swap_in())
        assert (sequence.state, sequence.num_committed) == ("running", 0)
        sequence.release()

    def test_what_is_reset_while_a_plan_reads_it_is_freed_when_that_ends(self):
        pager = pager_with_host()
        committed(pager).release()
        plan = pager.offload(9)
        pager.reset()
        assert (pager.stats().active_blocks, pager.check()) == (4, [])
        done(pager, plan)
        assert (pager.stats().free_blocks, pager.stats().host_free_blocks, pager.check()) == (16, 16, [])


class TestRefusals:
    def test_without_a_host(self):
        pager = kvpager.Pager(16, 4)
        sequence = committed(pager)
        for name, call in {
            "offload": lambda: pager.offload(1),
            "offload_committed": lambda: pager.offload_committed(sequence),
            "swap_out": sequence.swap_out,
        }.items():
            with refuses(
                kvpager.TransferError, f"^{name}: this pager has no host blocks; build it with num_host_blocks"
            ):
                call()
        with refuses(ValueError, "num_blocks is 0"):
            pager.offload(0)
        with pager.admit(PROMPT, fetch=True) as other:
            assert (other.state, pager.match(PROMPT).num_host_tokens) == ("running", 0)
        assert pager.plans() == []
        sequence.release()

    def test_while_copies_are_queued(self):
        pager = pager_with_host()
        sequence = pager.admit(PROMPT[:6])
        sequence.commit()
        (child,) = sequence.fork()
        child.append(3)
        for call in (lambda: pager.offload(1), lambda: pager.offload_committed(sequence), sequence.try_swap_out):
            with refuses(kvpager.TransferError, r"1 block copies are queued; take_copies\(\)"):
                call()
        pager.take_copies()
        assert sequence.try_swap_out() is not None
        for handle in (sequence, child):
            handle.release()

    def test_while_an_open_step_names_the_sequence(self):
        pager = pager_with_host()
        batch = pager.batch(2, 8)
        sequence = committed(pager)
        batch.add(sequence)
        sequence.append(3)
        step = batch.step()
        with refuses(kvpager.StepError, "swap_out: an open step names sequence 0"):
            sequence.try_swap_out()
        step.commit()
        assert sequence.swap_out().kind == "swap_out"
        assert batch.row_of(sequence) is None
        sequence.release()

    def test_a_full_host_is_told_apart_from_a_full_device(self):
        pager = pager_with_host(8, 5)
        other, sequence = committed(pager, [3, 4]), committed(pager)
        done(pager, other.swap_out())
        assert sequence.try_swap_out() is None
        with refuses(kvpager.OutOfBlocks, "needed 5 host blocks, but 4 are free and 0 evictable of 5") as error:
            sequence.swap_out()
        refused = error.value
        assert (refused.needed, refused.free, refused.evictable, refused.total) == (5, 4, 0, 5)
        assert (refused.rows, refused.reserve, refused.tier) == ((), 0, "host")
        assert pickle.loads(pickle.dumps(refused)).tier == "host"
        assert pager.stats().refused_calls == 2
        with refuses(kvpager.OutOfBlocks, "release or preempt a sequence") as error:
            pager.admit([9] * 16)
        assert error.value.tier == "device"
        for handle in (other, sequence):
            handle.release()

    def test_a_full_device_keeps_a_sequence_away(self):
        pager = pager_with_host(8, 8)
        sequence = swapped(pager)
        with pager.admit([9] * 16):
            assert sequence.try_swap_in() is None
            with refuses(kvpager.OutOfBlocks) as error:
                sequence.swap_in()
            assert (error.value.needed, error.value.tier, sequence.state) == (1, "device", "swapped")
        assert len(sequence.swap_in()) == 1
        sequence.release()


# ---- in another process --------------------------------------------------------------------------------------------


def copy_elsewhere(pipe: Any) -> None:
    """What each rank of a tensor-parallel group does: it copies its shard, and says so by sending the plan back."""
    while (pickled := pipe.recv()) is not None:
        plan = pickle.loads(pickled)
        pipe.send((pickle.dumps(plan), len(plan), plan.source_ids.tolist(), plan.destination_ids.tolist()))


def test_a_plan_that_came_back_from_another_process_is_completed_here(watchdog):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    mover = context.Process(target=copy_elsewhere, args=(there,), daemon=True)
    mover.start()
    pager = pager_with_host()
    with committed(pager) as sequence:
        for move, state in ((sequence.swap_out, "swapped"), (sequence.swap_in, "running")):
            plan = move()
            assert pager.start(plan)
            here.send(pickle.dumps(plan))
            pickled, *seen = here.recv()
            assert seen == [len(plan), plan.source_ids.tolist(), plan.destination_ids.tolist()]
            returned = pickle.loads(pickled)
            assert (returned == plan, hash(returned) == hash(plan), returned is plan) == (True, True, False)
            assert pager.complete(returned)
            assert sequence.state == state
    here.send(None)
    mover.join()
    assert (mover.exitcode, pager.check()) == (0, [])


# ---- bytes that move -----------------------------------------------------------------------------------------------


class Engine:
    """A server's memory in both tiers: a slot holds the token that was computed there, which stands for its KV."""

    def __init__(self, pager: kvpager.Pager) -> None:
        self.pager = pager
        size = pager.block_size
        self.memory = {
            "device": np.full((pager.num_blocks, size), -1, np.int64),
            "host": np.full((pager.num_host_blocks, size), -1, np.int64),
        }

    def compute(self, sequence: kvpager.Sequence) -> None:
        """Prefill of what is not cached, and its commit."""
        slots = sequence.slots(sequence.num_committed, len(sequence))
        self.memory["device"].reshape(-1)[slots] = sequence.tokens[len(sequence) - len(slots) :]
        sequence.commit()

    def carry_out(self, plan: kvpager.Plan | None) -> bool:
        """The mover: False if there is nothing to do any more."""
        if plan is None or not self.pager.start(plan):
            return False
        self.memory[plan.destination][plan.destination_ids] = self.memory[plan.source][plan.source_ids]
        return self.pager.complete(plan)

    def check(self, sequence: kvpager.Sequence) -> None:
        """What attention would read is this sequence's own."""
        ids, num = sequence.block_ids, sequence.num_committed
        assert self.memory["device"][ids].reshape(-1)[:num].tolist() == sequence.tokens[:num].tolist()


class TestBytesMove:
    def test_out_and_in(self):
        pager = pager_with_host(8, 8)
        engine = Engine(pager)
        sequence = pager.admit(PROMPT)
        engine.compute(sequence)
        assert engine.carry_out(sequence.swap_out())
        with pager.admit([9] * 32) as other:
            assert len(other.block_ids) == 8, "the whole device is free for others"
            engine.compute(other)
        plan = sequence.swap_in()
        assert (sequence.state, len(plan)) == ("swapping_in", 5)
        assert engine.carry_out(plan)
        assert (sequence.state, sequence.num_committed, sequence.num_planned) == ("running", 17, 17)
        engine.check(sequence)
        sequence.append(77)
        engine.compute(sequence)
        engine.check(sequence)
        sequence.release()
        assert pager.check() == []

    def test_offloaded_in_time_and_fetched(self):
        pager = pager_with_host(8, 8)
        engine = Engine(pager)
        with pager.admit(PROMPT) as sequence:
            engine.compute(sequence)
        assert engine.carry_out(pager.offload(3))
        assert engine.carry_out(pager.offload(3))
        assert pager.offload(3) is None, "all is on the host"
        with pager.admit([9] * 32) as other:
            engine.compute(other)
        assert pager.match([*PROMPT, 5]) == (0, 0, None, 16)
        with pager.admit([*PROMPT, 5], fetch=True) as sequence:
            assert (sequence.state, sequence.num_cached) == ("fetching", 0)
            assert engine.carry_out(sequence.fetch)
            assert (sequence.state, sequence.num_cached, sequence.num_committed) == ("running", 16, 16)
            engine.check(sequence)
            engine.compute(sequence)
            engine.check(sequence)
        assert pager.match([*PROMPT, 5]) == (16, 4, None, 0)
        assert (pager.stats().offloaded_blocks, pager.stats().fetched_blocks) == (4, 4)
        assert pager.check() == []

    @pytest.mark.usefixtures("watchdog", "hasty_threads")
    @DROPPED
    def test_by_many_threads(self, seed):
        """Schedulers admit, swap and drop; movers copy what is planned; at the end nothing is lost (I1, I9)."""
        pager = pager_with_host(24, 64)
        engine = Engine(pager)
        plans: collections.deque[kvpager.Plan] = collections.deque()
        is_over = threading.Event()

        def wait_for(sequence: kvpager.Sequence, draw: random.Random) -> None:
            while sequence.state in ("fetching", "swapping_out", "swapping_in"):
                if draw.random() < 0.01:
                    return  # and drop it
                mover_once()

        def scheduler(number: int) -> None:
            draw = random.Random(seed + number)
            for _ in range(250):
                prompt = [draw.randrange(2) for _ in range(draw.randint(1, 30))]
                sequence = pager.try_admit(prompt, fetch=True, fetch_min_tokens=draw.choice([1, 8]))
                if sequence is None:
                    continue
                if (plan := sequence.fetch) is not None:
                    plans.append(plan)
                    wait_for(sequence, draw)
                if sequence.state != "running":
                    if draw.random() < 0.5:
                        sequence.release()
                    continue
                engine.compute(sequence)
                engine.check(sequence)
                if draw.random() < 0.5 and (plan := pager.offload_committed(sequence)) is not None:
                    plans.append(plan)
                if draw.random() < 0.5 and (plan := sequence.try_swap_out()) is not None:
                    plans.append(plan)
                    wait_for(sequence, draw)
                    if sequence.state == "swapped" and (plan := sequence.try_swap_in()) is not None:
                        plans.append(plan)
                        wait_for(sequence, draw)
                    if sequence.state == "running":
                        engine.check(sequence)
                if draw.random() < 0.9:
                    sequence.release()

        def mover_once() -> None:
            try:
                plan = plans.popleft()
            except IndexError:
                if (offload := pager.offload(4)) is not None:
                    plans.append(offload)
                return
            # Where two wait for one fetch, both have put it into the queue.
            with contextlib.suppress(kvpager.TransferError):
                engine.carry_out(plan)

        def mover() -> None:
            while not is_over.is_set():
                mover_once()

        def watcher() -> None:
            while not is_over.is_set():
                assert pager.check() == []
                for status in pager.plans():
                    assert len(status.plan.source_ids) == len(status.plan.destination_ids)
                pager.stats()

        def schedulers() -> None:
            try:
                together(*[lambda number=number: scheduler(number) for number in range(3)])
            finally:
                is_over.set()

        together(schedulers, mover, mover, watcher)
        gc.collect()
        pager.admit([1]).release()
        for status in pager.plans():
            if status.state == "planned":
                pager.cancel(status.plan)
        stats = pager.stats()
        assert (pager.plans(), pager.check()) == ([], [])
        assert (stats.running_sequences, stats.swapped_sequences, stats.preempted_sequences) == (0, 0, 0)
        assert (stats.active_blocks, stats.writing_blocks, stats.quarantined_blocks) == (0, 0, 0)
        assert (stats.host_active_blocks, stats.host_writing_blocks, stats.host_quarantined_blocks) == (0, 0, 0)
        assert stats.fetched_blocks > 0
        assert stats.swap_ins > 0
