"""Admissions that fetch from the host, and those that join them (rule 16.4), with fences (16.1.6)."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache, free_ids, ids, line, nothing_changes, refuses
from tiers import arrive, each_with_tiers, offloaded, on_host, pairs, states

from kvpager import NeverFits, OutOfBlocks
from kvpager.cost import CostModel

pytestmark = each_with_tiers

PROMPT = [1] * 4 + [2] * 4 + [3] * 4 + [4]


def host_only(pager, tokens=PROMPT):
    """The host has a prompt's full blocks, and the device is empty."""
    cache(pager, tokens)
    offloaded(pager, 99)
    pager.admit([0] * 4 * pager.num_blocks).release()
    assert pager.num_free_blocks == pager.num_blocks


@pytest.fixture
def pager(implementation):
    """8 free device blocks; host blocks 0-2 hold the prompt."""
    pager = implementation(8, 4, num_host_blocks=8)
    host_only(pager)
    return pager


def test_match_tells_what_the_host_has_behind_the_device(pager):
    assert pager.match(PROMPT)[:2] == (0, 0)
    assert on_host(pager, PROMPT) == 12
    assert on_host(pager, PROMPT[:12]) == 8  # the last token is always computed
    assert on_host(pager, PROMPT, namespace=b"x") == 0
    cache(pager, PROMPT[:5])
    assert pager.match(PROMPT) == (4, 1, None, 8)


def test_a_fetch_takes_blocks_for_the_whole_prompt_and_plans_the_copies(pager):
    order = [int(block) for block in expand(free_ids(pager))]
    sequence = pager.admit(PROMPT, fetch=True)
    assert sequence.state == "fetching"
    assert ids(sequence) == order[:4]
    assert (sequence.num_cached, sequence.num_committed, sequence.num_planned) == (0, 0, 0)
    plan = sequence.fetch
    assert (plan.kind, plan.source, plan.destination) == ("fetch", "host", "device")
    assert pairs(plan) == list(zip([0, 1, 2], order, strict=False))
    assert pager.stats().writing_blocks == 3
    assert pager.stats().host_active_blocks == 3
    assert pager.stats().running_sequences == 1
    before = pager.stats()
    arrive(pager, plan)
    assert sequence.state == "running"
    assert sequence.fetch is None
    assert (sequence.num_cached, sequence.num_committed) == (12, 12)
    after = pager.stats()
    assert (after.hit_tokens - before.hit_tokens, after.fetched_blocks) == (12, 3)
    assert pager.match(PROMPT).num_tokens == 12
    assert line(pager, "host queue lru") == "host queue lru: 2 1 0"


def expand(ranges):
    for part in ranges.split():
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def test_without_fetch_the_host_is_left_alone(pager):
    sequence = pager.admit(PROMPT)
    assert (sequence.state, sequence.num_cached, sequence.fetch) == ("running", 0, None)
    assert pager.plans() == []


def test_too_little_to_be_worth_it(pager):
    assert pager.admit(PROMPT, fetch=True, fetch_min_tokens=13).state == "running"
    sequence = pager.admit(PROMPT, fetch=True, fetch_min_tokens=12)
    assert sequence.state == "fetching"
    for wrong, error in ((0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with nothing_changes(pager), refuses(error):
            pager.admit(PROMPT, fetch=True, fetch_min_tokens=wrong)
        with nothing_changes(pager), refuses(error):
            pager.admit(PROMPT, fetch_min_tokens=wrong)
    with nothing_changes(pager), refuses(TypeError):
        pager.admit(PROMPT, fetch=1)


class Policy:
    """Notes what it is asked, and answers as told."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def should_fetch(self, num_device_tokens, num_host_tokens):
        self.asked.append((num_device_tokens, num_host_tokens))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_policy_decides(pager):
    never, always = Policy(False), Policy(True)
    with pager.admit(PROMPT, fetch=never) as seq:
        assert seq.state == "running"
    with pager.admit(PROMPT, fetch=always) as seq:
        assert seq.state == "fetching"
        pager.cancel(seq.fetch)
    found = pager.match(PROMPT)
    assert never.asked == always.asked == [(found.num_tokens, found.num_host_tokens)]
    with pager.admit([9] * 9, fetch=always):
        assert len(always.asked) == 1  # there is nothing to fetch


def test_a_policy_that_fails_changes_nothing(pager):
    with nothing_changes(pager), pytest.raises(ZeroDivisionError):
        pager.admit(PROMPT, fetch=Policy(ZeroDivisionError()))
    for other in (1, "yes", object()):
        with nothing_changes(pager), pytest.raises(TypeError, match="fetch"):
            pager.admit(PROMPT, fetch=other)


def test_a_cost_model_is_a_policy(pager):
    model = CostModel.of("llama-3.1-8b", "h100", "25GB/s")
    with pager.admit(PROMPT, fetch=model) as seq:
        assert (seq.state == "fetching") == model.should_fetch(0, pager.match(PROMPT).num_host_tokens)
        if seq.fetch is not None:
            pager.cancel(seq.fetch)


def test_behind_a_hit_on_the_device(pager):
    cache(pager, PROMPT[:5])
    (block,) = [int(each) for each in line(pager, "queue lru").split()[-1:]]
    sequence = pager.admit(PROMPT, fetch=True)
    assert ids(sequence)[0] == block
    assert [source for source, _ in pairs(sequence.fetch)] == [1, 2]
    assert (sequence.num_cached, sequence.num_committed) == (4, 4)
    hit = pager.stats().hit_tokens
    arrive(pager, sequence.fetch)
    assert sequence.num_cached == 12
    assert pager.stats().hit_tokens == hit + 8


def test_the_longest_prefix_that_arrived_counts(pager):
    sequence = pager.admit(PROMPT, fetch=True)
    plan = sequence.fetch
    pager.start(plan)
    assert pager.fail(plan, [True, False, True])
    assert (sequence.state, sequence.num_cached, sequence.num_committed) == ("running", 4, 4)
    assert (pager.stats().fetched_blocks, pager.stats().hit_tokens) == (1, 4)
    assert pager.match(PROMPT).num_tokens == 4
    assert sequence.slots(4, 13).tolist() == [
        ids(sequence)[position // 4] * 4 + position % 4 for position in range(4, 13)
    ]


def test_nothing_arrived(pager):
    """W1: the sequence learns which suffix to recompute, and nothing became visible."""
    sequence = pager.admit(PROMPT, fetch=True)
    assert line(pager, "sequence").endswith("pinned no; computing")
    plan = sequence.fetch
    pager.start(plan)
    pager.fail(plan)
    assert (sequence.state, sequence.num_cached) == ("running", 0)
    assert line(pager, "sequence").endswith("pinned no; computing")
    assert pager.match(PROMPT).num_tokens == 0
    assert (pager.stats().fetched_blocks, pager.stats().hit_tokens) == (0, 0)


def test_a_cancelled_fetch_leaves_a_sequence_that_computes(pager):
    sequence = pager.admit(PROMPT, fetch=True)
    table = ids(sequence)
    assert pager.cancel(sequence.fetch)
    assert (sequence.state, ids(sequence), sequence.num_committed) == ("running", table, 0)
    assert pager.stats().writing_blocks == 0


def test_an_abandoned_fetch_preempts(pager):
    sequence = pager.admit(PROMPT, fetch=True)
    plan, table = sequence.fetch, ids(sequence)
    pager.start(plan)
    assert pager.abandon(plan)
    assert sequence.state == "preempted"
    assert (pager.stats().preemptions, pager.stats().quarantined_blocks) == (1, 3)
    assert not set(table[:3]) & set(expand(free_ids(pager)))
    assert line(pager, "host queue lru") == "host queue lru: 2 1 0"
    sequence.resume()
    assert not set(ids(sequence)) & set(table[:3])
    sequence.release()
    assert pager.reclaim(plan)
    assert list(expand(free_ids(pager)))[:3] == table[:3]  # the last was pushed first


def test_a_second_request_joins(pager):
    first = pager.admit(PROMPT, fetch=True)
    second = pager.admit(PROMPT[:8] + [9] * 3, fetch=True)
    assert second.state == "fetching"
    assert second.fetch == first.fetch
    assert ids(second)[:2] == ids(first)[:2]
    assert ids(second)[2] not in ids(first)
    assert pager.stats().writing_blocks == 3
    arrive(pager, first.fetch)
    assert (first.num_cached, second.num_cached) == (12, 8)
    assert pager.stats().fetched_blocks == 3
    assert pager.stats().hit_tokens == 20
    assert f"2 blocks {ids(first)[0]}-{ids(first)[1]}: tokens 1 1 1 1; holders 2; hits 0" in pager.dump()


def test_a_join_takes_fewer_blocks(pager):
    """Where the whole prompt would not fit a second time, its end does."""
    first = pager.admit(PROMPT, fetch=True)
    filler = pager.admit([0] * 12)
    assert pager.num_free_blocks == 1
    assert not pager.can_admit(PROMPT)
    second = pager.admit(PROMPT, fetch=True)
    assert (second.state, pager.num_free_blocks) == ("fetching", 0)
    arrive(pager, first.fetch)
    assert ids(second)[:3] == ids(first)[:3]
    assert filler.state == "running"


def test_when_a_join_fails_each_sequence_recomputes_its_own(pager):
    first = pager.admit(PROMPT, fetch=True)
    second = pager.admit(PROMPT, fetch=True)
    plan = first.fetch
    pager.start(plan)
    pager.fail(plan, [True, False, False])
    assert (first.num_committed, second.num_committed) == (4, 4)
    slots = second.slots(4, 13)
    assert not set(ids(first)[1:]) & {int(slot) // 4 for slot in slots}
    assert pager.take_copies().tolist() == []


def test_a_fetch_of_what_was_reset_meanwhile_is_not_joined(pager):
    """It would bring what the reset meant to be rid of."""
    first = pager.admit(PROMPT, fetch=True)
    pager.reset(b"other weights")
    second = pager.admit(PROMPT, fetch=True)
    assert (second.state, second.num_cached) == ("running", 0)
    arrive(pager, first.fetch)
    assert first.num_cached == 12
    assert pager.match(PROMPT).num_tokens == 0


def test_what_was_forgotten_while_it_was_fetched_is_not_published(pager):
    first = pager.admit(PROMPT, fetch=True)
    second = pager.admit(PROMPT[:4] + [9] * 3, fetch=True)
    assert pager.forget(PROMPT[:8]) == 2
    assert "publishes no" in line(pager, f"sequence {first.id}:")
    assert "publishes yes" in line(pager, f"sequence {second.id}:")
    third = pager.admit(PROMPT[:9], fetch=True)
    assert (third.state, len(third.fetch)) == ("fetching", 1)
    assert third.fetch != first.fetch
    arrive(pager, first.fetch)
    assert (first.num_cached, second.num_cached) == (12, 4)
    assert pager.match(PROMPT).num_tokens == 4


def test_a_join_has_the_same_path_on_the_device(pager):
    first = pager.admit(PROMPT, fetch=True)
    cache(pager, PROMPT[:5])
    second = pager.admit(PROMPT, fetch=True)
    assert second.fetch != first.fetch
    assert [source for source, _ in pairs(second.fetch)] == [1, 2]
    arrive(pager, first.fetch)
    arrive(pager, second.fetch)
    assert pager.check() == []


def test_the_last_one_that_leaves_a_planned_fetch_cancels_it(pager):
    first, second = pager.admit(PROMPT, fetch=True), pager.admit(PROMPT, fetch=True)
    plan = first.fetch
    first.release()
    assert second.fetch == plan
    second.release()
    assert pager.plans() == []
    assert pager.start(plan) is False
    assert pager.num_free_blocks == 8


def test_a_started_fetch_goes_on_alone(pager):
    sequence = pager.admit(PROMPT, fetch=True)
    plan = sequence.fetch
    pager.start(plan)
    table = ids(sequence)
    sequence.release()
    assert pager.stats().writing_blocks == 3
    assert states(pager)[0][2] == "started"
    other = pager.admit(PROMPT, fetch=True)  # nobody is in it: a fetch of its own
    assert not set(ids(other)) & set(table[:3])
    assert pager.complete(plan)
    assert pager.stats().fetched_blocks == 3
    assert pager.match(PROMPT).num_tokens == 0


def test_waiting_comes_before_fetching(pager):
    first = pager.admit(PROMPT, fetch=True)
    answer = pager.admit(PROMPT, fetch=True, wait=True)
    assert answer == (first.id, 12)


def test_never_fits_and_out_of_blocks(pager):
    with nothing_changes(pager), refuses(NeverFits):
        pager.admit(PROMPT[:12] + [9] * 30, fetch=True)
    held = pager.admit([0] * 20)
    with nothing_changes(pager), refuses(OutOfBlocks) as refused:
        pager.admit(PROMPT, fetch=True)
    assert refused.value.args == (4, 3, 0, 8, (), 0, "device")
    assert pager.try_admit(PROMPT, fetch=True) is None
    assert pager.stats().refused_calls == 3
    held.release()


def test_the_watermark_counts_sequences_on_their_way_as_running(implementation):
    pager = implementation(8, 4, num_host_blocks=8, watermark=0.25)
    host_only(pager)
    first = pager.admit(PROMPT, fetch=True)
    with nothing_changes(pager), refuses(OutOfBlocks) as refused:
        pager.admit([0] * 12)
    assert refused.value.reserve == 2
    first.release()
    pager.admit([0] * 32).release()


# Fences.


@pytest.fixture
def stepped(pager):
    """A step that is open, and names a sequence that was released meanwhile: its blocks are free and fenced."""
    batch = pager.batch(2, 8)
    sequence = pager.admit([0] * 13)
    batch.add(sequence)
    step = batch.step(13)
    used = ids(sequence)
    sequence.release()
    return pager, step, used


def test_a_block_of_an_open_step_is_no_transfers_destination(stepped):
    """W11: the step may still write to it. Other steps of the same stream may have it."""
    pager, step, used = stepped
    assert pager.num_fenced_blocks == 4
    free = list(expand(free_ids(pager)))
    assert free[:4] == used
    sequence = pager.admit(PROMPT, fetch=True)
    assert [destination for _, destination in pairs(sequence.fetch)] == free[4:7]
    assert ids(sequence)[3] == used[0]
    assert pager.num_fenced_blocks == 3
    step.commit()
    assert pager.num_fenced_blocks == 0


def test_the_numbers_of_a_refusal_because_of_fences(implementation):
    pager = implementation(4, 4, num_host_blocks=8)
    host_only(pager)
    batch = pager.batch(2, 8)
    sequence = pager.admit([0] * 8)
    batch.add(sequence)
    step = batch.step(8)
    sequence.release()
    assert pager.num_fenced_blocks == 2
    with nothing_changes(pager), refuses(OutOfBlocks) as refused:
        pager.admit(PROMPT, fetch=True)
    assert refused.value.args == (3, 2, 0, 4, (), 0, "device")
    assert pager.can_admit(PROMPT)
    step.commit()
    assert pager.admit(PROMPT, fetch=True).state == "fetching"


def test_cached_blocks_are_fenced_too(implementation):
    pager = implementation(4, 4, num_host_blocks=8)
    host_only(pager)
    batch = pager.batch(2, 8)
    sequence = admit_committed(pager, [0] * 9)
    batch.add(sequence)
    sequence.append(0)
    step = batch.step(1)
    sequence.release()
    assert (pager.num_fenced_blocks, pager.num_evictable_blocks, pager.num_free_blocks) == (3, 2, 2)
    with nothing_changes(pager), refuses(OutOfBlocks) as refused:
        pager.admit(PROMPT, fetch=True)
    assert refused.value.args == (3, 1, 0, 4, (), 0, "device")
    hit = pager.admit([0] * 9)
    assert (hit.num_cached, pager.num_fenced_blocks) == (8, 0)
    step.commit()
    hit.release()
    assert pager.num_fenced_blocks == 0


def test_a_fence_lasts_for_the_steps_that_were_open(implementation):
    pager = implementation(8, 4, num_host_blocks=8)
    batch = pager.batch(4, 8)
    first, second = pager.admit([0] * 4), pager.admit([1] * 4)
    batch.add(first)
    batch.add(second)
    step = batch.step([4, 0])
    first.release()
    later = batch.step([0, 4])
    second.release()
    assert pager.num_fenced_blocks == 2
    step.commit()
    assert pager.num_fenced_blocks == 1
    later.commit()
    assert pager.num_fenced_blocks == 0


def test_forget_fences_anew_and_reset_does_not(implementation):
    pager = implementation(8, 4, num_host_blocks=8)
    cache(pager, [1] * 5)
    cache(pager, [2] * 5)
    batch = pager.batch(2, 8)
    batch.add(pager.admit([0] * 4))
    step = batch.step(4)
    assert pager.num_fenced_blocks == 0
    pager.forget([1] * 4)
    assert pager.num_fenced_blocks == 1
    pager.reset()
    assert pager.num_fenced_blocks == 1
    step.commit()


def test_without_host_blocks_there_are_no_fences(implementation):
    pager = implementation(8, 4)
    batch = pager.batch(2, 8)
    sequence = pager.admit([0] * 4)
    batch.add(sequence)
    step = batch.step(4)
    sequence.release()
    assert pager.num_fenced_blocks == 0
    step.commit()
