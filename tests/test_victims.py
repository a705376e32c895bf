"""Who gives way when the pool is full: `choose_victims` and the log, on core and reference, case by case.

The random tests (`victims.py`) ask the same questions of any history, and keep what was promised.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from implementations import each_implementation, refuses

import kvpager
from kvpager import RecoveryCost, Victim
from kvpager.cost import CostModel

pytestmark = each_implementation


def room(pager: Any) -> int:
    return pager.num_free_blocks + pager.num_evictable_blocks


def running(pager: Any, *lengths: int, commit: bool = True) -> list[Any]:
    """Sequences of so many tokens, all different."""
    sequences = [pager.admit([100 * number + each for each in range(n)]) for number, n in enumerate(lengths, start=1)]
    for sequence in sequences if commit else ():
        sequence.commit()
    return sequences


def ids(victims: list[Victim]) -> list[int]:
    return [victim.sequence_id for victim in victims]


# What releasing frees.


def test_a_call_that_fits_needs_no_victim(implementation):
    pager = implementation(4, 4)
    running(pager, 4)
    assert pager.choose_victims(3) == []
    assert pager.choose_victims(0) == []


def test_the_newest_goes_first_and_an_answer_names_who_how_and_what_for(implementation):
    pager = implementation(8, 4)
    first, second, third = running(pager, 12, 8, 9)
    (victim,) = pager.choose_victims(2, candidates=[second, third, first])
    assert victim == (third.id, third, 1, "recompute", 3, 9, 9.0, "newest: it came in last; frees 3 blocks")
    (victim,) = pager.choose_victims(2)
    assert (victim.sequence_id, victim.sequence, victim.candidate_index) == (third.id, None, 2)
    assert ids(pager.choose_victims(4)) == [third.id, second.id]
    with refuses(kvpager.OutOfBlocks):
        pager.choose_victims(6)  # one stays
    assert ids(pager.choose_victims(6, keep=0)) == [third.id, second.id, first.id]


def test_without_candidates_the_index_counts_those_that_may_go(implementation):
    pager = implementation(8, 4)
    held = pager.admit(range(900, 908), pin=True)
    old, new = running(pager, 12, 9)
    assert held.id < old.id < new.id
    (victim,) = pager.choose_victims(2)
    assert (victim.sequence_id, victim.candidate_index) == (new.id, 1)


def test_shared_blocks_free_nothing_until_their_last_holder_goes(implementation):
    pager = implementation(8, 4)
    parent = running(pager, 18)[0]
    child, other = parent.fork(2)
    child.append(1)
    other.append(2)
    pager.take_copies()
    assert room(pager) == 1
    # Each has one block of its own; the four full ones are all three's, the partial one the parent's.
    answer = pager.choose_victims(7, keep=0)
    assert [(each.sequence_id, each.blocks, each.tokens) for each in answer] == [
        (other.id, 1, 2),
        (child.id, 1, 2),
        (parent.id, 5, 18),
    ]
    with refuses(kvpager.OutOfBlocks) as refused:
        pager.choose_victims(4, candidates=[child, other], keep=0)
    assert refused.value.args[:4] == (4, 1, 0, 8)
    for victim in answer:
        before = room(pager)
        next(each for each in (parent, child, other) if each.id == victim.sequence_id).preempt()
        assert room(pager) - before == victim.blocks


def test_who_would_free_nothing_is_left_alone(implementation):
    pager = implementation(6, 4)
    old, parent = running(pager, 8, 8)
    twin = parent.fork()[0]  # shares all of it
    assert ids(pager.choose_victims(3, candidates=[twin, old], keep=0)) == [old.id]
    # With both gone, the shared blocks are free: then both count.
    assert [each.blocks for each in pager.choose_victims(4, candidates=[twin, parent], keep=0)] == [0, 2]


def test_cached_blocks_of_a_victim_count_as_room(implementation):
    pager = implementation(4, 4)
    (only,) = running(pager, 16)
    (victim,) = pager.choose_victims(4, keep=0)
    assert victim.blocks == 4
    only.preempt()
    assert (pager.num_free_blocks, pager.num_evictable_blocks) == (0, 4)
    pager.admit([9] * 16)


def test_a_held_prefix_is_no_candidate_unless_it_is_named(implementation):
    pager = implementation(6, 4)
    held = pager.admit([1] * 8, pin=True)
    old, _new = running(pager, 4, 4)
    assert ids(pager.choose_victims(4, keep=0)) == [_new.id, old.id]
    with refuses(kvpager.OutOfBlocks):
        pager.choose_victims(5, keep=0)
    assert ids(pager.choose_victims(5, candidates=[held, old], keep=0)) == [old.id, held.id]


def test_blocks_that_a_queued_copy_reads_are_room_when_its_target_goes(implementation):
    pager = implementation(8, 4)
    (parent,) = running(pager, 6)
    child = parent.fork()[0]
    child.append(7)  # its last block is to be a copy of the parent's
    with refuses(kvpager.OutOfBlocks):  # the copy still reads the parent's partial block
        pager.choose_victims(room(pager) + 1, candidates=[parent], keep=0)
    answer = pager.choose_victims(room(pager) + 3, keep=0)
    assert [(each.sequence_id, each.blocks) for each in answer] == [(child.id, 1), (parent.id, 2)]
    before = room(pager)
    parent.preempt()
    child.preempt()
    assert room(pager) - before == 3


# The policies.


def test_cheapest_counts_the_cost_of_what_is_freed_and_least_progress_what_is_lost(implementation):
    pager = implementation(32, 4)
    prefix = running(pager, 32)[0]
    # The long one shares eight blocks with `prefix`, which stay found; the short one has nothing that is.
    long = pager.admit([*prefix.tokens.tolist(), *range(500, 510)])
    short = pager.admit(list(range(900, 908)))
    for each in (long, short):
        each.commit()
    free = room(pager)
    by_pairs = RecoveryCost(token=1.0, pair=1.0)
    candidates = [long, short]
    # 10 tokens behind 32 are 375 pairs for 3 blocks; 8 tokens are 36 pairs for 2.
    (victim,) = pager.choose_victims(free + 1, "cheapest", candidates=candidates, cost=by_pairs)
    assert (victim.sequence_id, victim.tokens, victim.cost) == (short.id, 8, 8 + 36)
    (victim,) = pager.choose_victims(free + 1, "cheapest", candidates=candidates)
    assert (victim.sequence_id, victim.tokens, victim.cost) == (long.id, 10, 10.0)  # 10 / 3 < 8 / 2
    (victim,) = pager.choose_victims(free + 1, "least_progress", candidates=candidates)
    assert victim.sequence_id == short.id


def test_priority_is_the_callers(implementation):
    pager = implementation(3, 4)
    a, b, c = running(pager, 4, 4, 4)
    answer = pager.choose_victims(2, "priority", candidates=[a, b, c], priorities=[5, -1, 0])
    assert ids(answer) == [b.id, c.id]
    answer = pager.choose_victims(2, "priority", candidates=[a, b, c], priorities=[0, 0, 0])
    assert ids(answer) == [c.id, b.id]


def test_who_came_back_is_the_newest(implementation):
    pager = implementation(4, 4)
    a, b, c = running(pager, 4, 4, 4)
    b.preempt()
    a.preempt()
    b.resume()
    a.resume()
    assert ids(pager.choose_victims(3, spare_after=9)) == [a.id, b.id]
    child = c.fork()[0]
    assert ids(pager.choose_victims(2, spare_after=9)) == [a.id]  # the child frees nothing by itself
    child.append(5)
    assert ids(pager.choose_victims(1, spare_after=9)) == [child.id]


# Nobody starves.


def test_who_was_preempted_often_is_spared(implementation):
    pager = implementation(3, 4)
    a, b, c = running(pager, 4, 4, 4)
    for _ in range(2):
        c.preempt()
        c.resume()
    assert c.num_preemptions == 2
    assert ids(pager.choose_victims(1, spare_after=3)) == [c.id]
    assert ids(pager.choose_victims(1, spare_after=2)) == [b.id]
    (_, _, spared) = pager.choose_victims(3, spare_after=2, keep=0)
    assert (spared.sequence_id, "preempted 2 times" in spared.reason) == (c.id, True)
    # A priority is raised by one for each level.
    (first,) = pager.choose_victims(1, "priority", candidates=[a, c], priorities=[0, -3], spare_after=1)
    assert first.sequence_id == c.id
    (first,) = pager.choose_victims(1, "priority", candidates=[a, c], priorities=[0, -1], spare_after=1)
    assert first.sequence_id == a.id


@pytest.mark.parametrize("policy", ["newest", "cheapest", "least_progress", "priority"])
@pytest.mark.parametrize("spare_after", [1, 3])
def test_nobody_is_preempted_much_more_often_than_those_who_stay(implementation, policy, spare_after):
    """The bound of rules 18.2.3, and the end of it all: everybody finishes, whoever comes back first."""
    pager = implementation(10, 2)
    waiting = [pager.admit([number]) for number in range(8)]
    left = {sequence.id: 11 for sequence in waiting}
    runs, waiting = waiting, []
    rounds = most = 0
    while runs or waiting:
        rounds += 1
        assert rounds < 1_000, f"{left} are still to come: somebody starves"
        while waiting and waiting[-1].try_resume() is not None:  # the last victim first: the worst order
            runs.append(waiting.pop())
        for sequence in list(runs):
            if sequence not in runs:
                continue
            while (slot := sequence.try_append(7)) is None:
                ranks = {"priorities": [each.id for each in runs]} if policy == "priority" else {}
                (victim, *_) = pager.choose_victims(
                    room(pager) + 1, policy, candidates=runs, spare_after=spare_after, **ranks
                )
                stay = [each.num_preemptions for each in runs if each.id != victim.sequence_id]
                loser = next(each for each in runs if each.id == victim.sequence_id)
                loser.preempt(reason=victim.reason)
                most = max(most, loser.num_preemptions)
                if policy != "priority":
                    assert loser.num_preemptions <= min(stay) + spare_after
                runs.remove(loser)
                waiting.append(loser)
                if loser is sequence:
                    break
            if slot is None:
                continue
            sequence.commit()
            left[sequence.id] -= 1
            if not left[sequence.id]:
                runs.remove(sequence)
                sequence.release()
    assert most > 1  # it was tight


# Swap, recompute, or wait.


def test_a_swap_is_advised_where_it_is_cheaper_and_can_be_made(implementation):
    pager = implementation(6, 4, num_host_blocks=4)
    first, second, third = running(pager, 8, 8, 8)
    cost = RecoveryCost(token=1.0, block=0.5)
    answer = pager.choose_victims(6, candidates=[first, second, third], cost=cost, keep=0)
    # Two blocks out and two back for 2.0, or 8.0; the host has room for two of the three.
    assert [(each.sequence_id, each.action, each.cost) for each in answer] == [
        (third.id, "swap", 2.0),
        (second.id, "swap", 2.0),
        (first.id, "recompute", 8.0),
    ]
    for victim in answer[:2]:
        before = room(pager)
        plan = victim.sequence.swap_out(reason=victim.reason, cost=victim.cost)
        assert pager.start(plan)
        assert pager.complete(plan)
        assert room(pager) - before == victim.blocks
    assert [(each.action, each.sequence_id, each.cost) for each in pager.preemptions()] == [
        ("swap", third.id, 2.0),
        ("swap", second.id, 2.0),
    ]
    assert pager.stats().swapped_tokens == 16
    dear = pager.choose_victims(5, cost=RecoveryCost(token=1.0, block=9.0), keep=0)
    assert [each.action for each in dear] == ["recompute"]


def test_without_a_host_nobody_is_sent_there(implementation):
    pager = implementation(2, 4)
    running(pager, 8)
    (victim,) = pager.choose_victims(1, cost=RecoveryCost(token=1.0, block=0.0), keep=0)
    assert victim.action == "recompute"


def test_a_sequence_in_an_open_step_is_not_swapped(implementation):
    pager = implementation(4, 4, num_host_blocks=8)
    batch = pager.batch(2, 4)
    (sequence,) = running(pager, 8)
    batch.add(sequence)
    sequence.append(1)
    cost = RecoveryCost(token=1.0, block=0.0)
    step = batch.step(1)
    assert pager.choose_victims(3, cost=cost, keep=0)[0].action == "recompute"
    step.commit([5])
    assert pager.choose_victims(3, cost=cost, keep=0)[0].action == "swap"


def test_waiting_is_advised_where_completions_are_near(implementation):
    pager = implementation(6, 4)
    old, middle, new = rows = running(pager, 12, 8, 4)
    assert room(pager) == 0
    asked: dict[str, Any] = {"candidates": rows, "left_out": [1], "cost": RecoveryCost(row_step=0.5)}
    # The oldest ends in 4 steps and gives 3 blocks; the newest, 4 tokens to compute again, gives one.
    (stall,) = pager.choose_victims(1, finishing=[4, 1, None], **asked)
    assert (stall.action, stall.sequence_id, stall.blocks, stall.cost) == ("stall", middle.id, 0, 2.0)
    assert stall.candidate_index == 1
    assert stall.reason == "enough others end in 4 steps"
    (victim,) = pager.choose_victims(1, finishing=[40, 1, None], **asked)
    assert (victim.action, victim.sequence_id) == ("recompute", new.id)
    # Without an idea of who ends when, nobody waits; nor does everybody.
    (victim,) = pager.choose_victims(1, **asked)
    assert victim.action == "recompute"
    (victim,) = pager.choose_victims(1, candidates=rows, left_out=[0, 1, 2], finishing=[1, 1, 1])
    assert victim.action == "recompute"
    # Where nobody may be taken, waiting is all that is left.
    (stall,) = pager.choose_victims(1, keep=3, finishing=[400, 1, None], **asked)
    assert stall.action == "stall"
    assert old.state == "running"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_cost_model_speaks_for_itself(implementation, name, alone):
    """In six numbers it says what `CostModel.preempt` says, for what others hold of the sequence, too."""
    model = CostModel.of(name, "h100", "25GB/s", load=0.5, alone=alone)
    pager = implementation(600, 16, num_host_blocks=600)
    prefix = pager.admit(range(1600), pin=True)
    prefix.commit()
    sequence = pager.admit(range(4000))
    sequence.commit()
    cost = model.recovery_cost()
    (victim,) = pager.choose_victims(400, cost=cost, keep=0)
    decision = model.preempt(4000, num_cached=1600)
    assert (victim.action, victim.tokens) == (decision.action, 2400)
    assert victim.cost == pytest.approx(min(decision.move_seconds, decision.recompute_seconds))
    (victim,) = pager.choose_victims(400, cost=cost._replace(block=float("inf")), keep=0)
    assert (victim.action, victim.cost) == ("recompute", pytest.approx(decision.recompute_seconds))
    for each in (sequence, prefix):
        each.release()


# The cases of `CASES.md` at this level.


def test_l2_a_choice_takes_nothing_from_anybody(implementation):
    """Two that wait for each other's blocks: a choice holds none, and only one of the two has to go."""
    pager = implementation(4, 4)
    a, b = running(pager, 8, 8)
    assert a.try_append(1) is None
    assert b.try_append(1) is None
    before = pager.dump(full=True)
    (victim,) = pager.choose_victims(1)
    assert pager.dump(full=True) == before
    b.preempt()
    assert victim.sequence_id == b.id
    assert a.try_append(1) is not None


def test_l6_what_never_fits_is_said_at_once_and_nobody_is_named(implementation):
    pager = implementation(4, 4)
    running(pager, 4)
    with refuses(kvpager.NeverFits) as refused:
        pager.choose_victims(5)
    assert refused.value.args == (5, 4, "device")
    assert pager.stats().refused_calls == 0


def test_l15_the_last_one_alone_is_not_its_own_victim(implementation):
    pager = implementation(4, 4)
    (only,) = running(pager, 16)
    with refuses(kvpager.OutOfBlocks):
        only.append(1)
    before = pager.dump(full=True)
    with refuses(kvpager.OutOfBlocks) as refused:
        pager.choose_victims(1)
    assert refused.value.args[:4] == (1, 0, 0, 4)
    assert pager.dump(full=True) == before


def test_e4_asking_a_hundred_times_counts_nothing(implementation):
    pager = implementation(4, 4)
    running(pager, 8, 8)
    before = pager.dump(full=True), pager.stats()
    answers = {tuple(pager.choose_victims(1, policy)) for policy in ("newest", "cheapest") for _ in range(50)}
    assert len(answers) == 2
    assert (pager.dump(full=True), pager.stats()) == before


# The log and the counters.


def test_each_preemption_is_recorded(implementation):
    pager = implementation(8, 4)
    a, b = running(pager, 9, 6)
    a.preempt(reason="newest", cost=2.5)
    b.preempt()
    a.resume()
    a.preempt(reason="again")
    log = pager.preemptions()
    assert log == [
        (0, 0, a.id, "recompute", 3, 9, 2.5, "newest"),
        (1, 0, b.id, "recompute", 2, 6, 0.0, ""),
        (2, 0, a.id, "recompute", 3, 8, 0.0, "again"),
    ]
    assert log[0]._fields == kvpager.Preemption._fields
    assert (a.num_preemptions, b.num_preemptions) == (2, 1)


def test_the_log_keeps_the_last(implementation):
    pager = implementation(2, 4)
    (sequence,) = running(pager, 4)
    for _ in range(300):
        sequence.preempt()
        sequence.resume()
    assert [each.number for each in pager.preemptions()] == list(range(44, 300))


def test_what_was_computed_finished_and_swapped_is_counted(implementation):
    pager = implementation(16, 4, num_host_blocks=8)
    batch = pager.batch(4, 8)
    a, b = running(pager, 9, 5)
    for each in (a, b):
        batch.add(each)
    assert pager.stats().computed_tokens == 14
    batch.step(3, [1, 2, 3, 4, 5, 6]).commit([9, 9], [1, 3])  # the second and third draft of one row are rejected
    assert pager.stats().computed_tokens == 14 + 1 + 3
    step = batch.step(1)
    b.release("aborted")  # its row is void
    step.commit([7, 7])
    assert pager.stats().computed_tokens == 18 + 1
    assert pager.stats().finished_sequences == 0
    a.release()
    a.release()
    assert pager.stats().finished_sequences == 1


# Bad input.

BAD: list[tuple[type[BaseException], dict[str, Any]]] = [
    (ValueError, {"needed_blocks": -1}),
    (ValueError, {"needed_blocks": 2**31}),
    (TypeError, {"needed_blocks": 1.0}),
    (TypeError, {"needed_blocks": True}),
    (ValueError, {"policy": "oldest"}),
    (TypeError, {"policy": None}),
    (TypeError, {"candidates": [1]}),
    (TypeError, {"candidates": "ab"}),
    (TypeError, {"candidates": 7}),
    (ValueError, {"policy": "priority"}),
    (ValueError, {"priorities": [1]}),
    (ValueError, {"policy": "priority", "priorities": [1]}),
    (ValueError, {"spare_after": 0}),
    (ValueError, {"keep": -1}),
    (TypeError, {"keep": None}),
    (ValueError, {"left_out": [0]}),
    (TypeError, {"left_out": None}),
    (ValueError, {"finishing": [1]}),
    (ValueError, {"cost": (1.0, 1.0)}),
    (ValueError, {"cost": RecoveryCost(token=-1.0)}),
    (ValueError, {"cost": RecoveryCost(token=float("nan"))}),
    (ValueError, {"cost": RecoveryCost(row_step=float("inf"))}),
    (ValueError, {"cost": RecoveryCost(pair=10**400)}),
    (TypeError, {"cost": RecoveryCost(token="1")}),  # type: ignore[arg-type]
    (TypeError, {"cost": RecoveryCost(token=True)}),
    (TypeError, {"cost": 1.0}),
]


@pytest.mark.parametrize(("error", "arguments"), BAD, ids=lambda value: repr(value) if isinstance(value, dict) else "")
def test_bad_arguments_are_refused_with_what_they_must_be(implementation, error, arguments):
    pager = implementation(4, 4)
    running(pager, 8, 8)
    before = pager.dump(full=True)
    with refuses(error):
        pager.choose_victims(**{"needed_blocks": 1, **arguments})
    assert pager.dump(full=True) == before


def test_a_cost_model_is_no_cost(implementation):
    model = CostModel.of("llama-3.1-8b", "h100", "25GB/s")
    with refuses(TypeError, r"a RecoveryCost, as CostModel.recovery_cost\(\) answers, not CostModel"):
        implementation(4, 4).choose_victims(1, cost=model)


def test_candidates_run_belong_here_and_are_named_once(implementation):
    pager, other = implementation(8, 4), implementation(8, 4)
    a, b = running(pager, 8, 4)
    (foreign,) = running(other, 4)
    b.preempt()
    with refuses(kvpager.StaleHandle, "preempted"):
        pager.choose_victims(1, candidates=[a, b])
    with refuses(ValueError, "another pager"):
        pager.choose_victims(1, candidates=[a, foreign])
    with refuses(ValueError, "twice"):
        pager.choose_victims(1, candidates=[a, a])
    for bad in ([5], [0, 0], [-1]):
        with refuses(ValueError):
            pager.choose_victims(1, candidates=[a], left_out=bad)
    with refuses(ValueError):
        pager.choose_victims(1, candidates=[a], finishing=[1, 2])
    with refuses(ValueError):
        pager.choose_victims(1, candidates=[a], finishing=[-1])
    with refuses(ValueError):
        pager.choose_victims(1, "priority", candidates=[a], priorities=[2**31])


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, {"reason": 1}),
        (ValueError, {"reason": "x" * 201}),
        (ValueError, {"reason": "\ud800"}),
        (ValueError, {"cost": -1.0}),
        (ValueError, {"cost": float("inf")}),
        (ValueError, {"cost": float("nan")}),
        (TypeError, {"cost": "1"}),
    ],
)
def test_a_preemption_with_bad_words_does_not_happen(implementation, error, arguments):
    pager = implementation(8, 4, num_host_blocks=8)
    (sequence,) = running(pager, 8)
    for call in (sequence.preempt, sequence.swap_out, sequence.try_swap_out):
        with refuses(error):
            call(**arguments)
    assert (sequence.state, pager.preemptions()) == ("running", [])
    sequence.preempt(reason="ä" * 200)
    with refuses(kvpager.StaleHandle):
        sequence.preempt(**arguments)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    policy=st.sampled_from(["newest", "cheapest", "least_progress"]),
    share=st.booleans(),
)
def test_more_needed_blocks_never_choose_fewer(implementation, lengths, policy, share):
    pager = implementation(64, 4)
    sequences = [pager.admit([7] * n if share else [number] * n) for number, n in enumerate(lengths)]
    for each in sequences:
        each.commit()
    counts = []
    for needed in range(room(pager), 65):
        try:
            victims = pager.choose_victims(needed, policy)
        except kvpager.OutOfBlocks:
            break
        assert sum(each.blocks for each in victims) >= needed - room(pager)
        counts.append(len(victims))
    assert counts == sorted(counts)
    for each in sequences:
        each.release()
