"""The reference's checker sees what is broken in a host tier and in plans, and names the promise."""

from __future__ import annotations

import pytest
from implementations import admit_committed, cache, in_batch
from test_reference_check import reached
from tiers import arrive, swapped

import kvpager.reference

pytestmark = pytest.mark.filterwarnings(r"ignore:sequence \d+ was dropped:ResourceWarning")

PROMPT = [1] * 4 + [2] * 4 + [3]


@pytest.fixture
def pager():
    """A swapped sequence, a block in quarantine, a swap-in, a fetch for two, an offload, and a fence."""
    pager = kvpager.reference.Pager(24, 4, num_host_blocks=16)
    cache(pager, PROMPT)
    arrive(pager, pager.offload(9))
    pager.admit([0] * 96).release()
    lost = admit_committed(pager, [7] * 3)
    plan = lost.swap_out()
    pager.start(plan)
    pager.abandon(plan)
    waiting, coming = admit_committed(pager, [5] * 6), admit_committed(pager, [6] * 6)
    swapped(pager, waiting)
    swapped(pager, coming)
    coming.swap_in()
    fetched = pager.admit(PROMPT, fetch=True)
    joined = pager.admit([*PROMPT[:4], 9, 9], fetch=True)
    cache(pager, [8] * 5)
    assert pager.offload(9) is not None
    stepped = pager.admit([4] * 4)
    step = in_batch(pager, stepped).step(4)
    pager.admit([4] * 3).release()
    assert pager.check() == []
    assert [status.plan.kind for status in pager.plans()] == ["swap_out", "swap_in", "fetch", "offload"]
    assert pager.num_fenced_blocks == 1
    yield pager
    del lost, waiting, coming, fetched, joined, stepped, step


def work(pager, kind):
    return next(transfer.work for transfer in pager._transfers if transfer.plan.kind == kind)


def record(pager, state):
    return next(record for record in pager._records.values() if record.state == state)


def test_i1_a_lost_block_of_the_host(pager):
    pager._host.free.pop()
    assert reached(pager, "I1")[0].endswith("(host)")


def test_i2_a_host_block_that_counts_too_many_holds(pager):
    pager._host.holds[record(pager, "swapped").host_own[0]] += 1
    assert len(reached(pager, "I2")) == 1


def test_i2_a_destination_that_its_plan_does_not_hold(pager):
    pager._pool.holds[work(pager, "fetch").blocks[0]] -= 1
    reached(pager, "I2")


def test_i3_a_host_path_of_other_tokens(pager):
    record(pager, "swapped").tokens[0] = 99
    reached(pager, "I3")


def test_i6_a_host_block_without_its_parent(pager):
    node = next(node for node in pager._host.index.nodes() if node.children)
    pager._host.index.detach(node)
    assert all(fault.endswith("(host)") for fault in reached(pager, "I6") if fault.startswith("I6"))


def test_i6_a_broken_host_path(pager):
    sequence = record(pager, "swapped")
    sequence.host_path = sequence.host_path[::-1] + work(pager, "fetch").host_path[:1]
    reached(pager, "I6")


def test_i8_a_cached_host_block_that_no_queue_has(pager):
    arrive(pager, next(status.plan for status in pager.plans() if status.plan.kind == "fetch"))
    pager._host.policy.queues()["lru"].popitem()
    reached(pager, "I8")


def test_i9_a_pin_that_nobody_has(pager):
    pager._pool.pins[work(pager, "offload").chains[0].nodes[-1].block] += 1
    assert len(reached(pager, "I9")) == 1


def test_i9_a_pin_that_is_missing(pager):
    del pager._pool.pins[work(pager, "offload").chains[0].nodes[-1].block]
    reached(pager, "I9")


def test_i9_a_destination_on_the_free_stack(pager):
    pager._pool.free[0] = work(pager, "fetch").blocks[0]
    reached(pager, "I9")


def test_i9_a_destination_in_quarantine_on_the_free_stack(pager):
    pager._host.free[0] = work(pager, "swap_out").blocks[0]
    reached(pager, "I9")


def test_i9_a_destination_that_can_be_hit(pager):
    node = work(pager, "offload").chains[0].nodes[0]
    pager._host.nodes[work(pager, "offload").chains[0].blocks[0]] = node
    reached(pager, "I9")


def test_i9_a_destination_in_the_table_of_another_sequence(pager):
    record(pager, "running").table[0] = work(pager, "fetch").blocks[0]
    assert any("is in the table of sequence" in fault for fault in reached(pager, "I9"))


def test_i9_a_source_that_can_be_handed_out(pager):
    pager._host.free[0] = work(pager, "fetch").host_path[0].block
    assert any("is read by plan" in fault for fault in reached(pager, "I9"))


def test_i9_a_block_that_is_read_and_was_given_to_another(pager):
    block = work(pager, "offload").chains[0].nodes[0].block
    pager._pool.nodes[block] = None
    assert any("other content" in fault for fault in reached(pager, "I9"))


def test_i9_a_step_that_is_open_and_fences_nothing(pager):
    pager._pool.open_launches.clear()
    assert len(reached(pager, "I9")) == 1


def test_i9_a_fence_around_a_leaf_only(pager):
    cache(pager, [3] * 9)
    queue = pager._policy.queues()["lru"]
    pager._pool.fences.pop(next(reversed(queue)))
    assert any("above it is not" in fault for fault in reached(pager, "I9"))


def test_i10_a_swapped_sequence_that_lost_a_block(pager):
    sequence = record(pager, "swapped")
    sequence.host_own = []
    reached(pager, "I10")


def test_i10_a_running_sequence_with_host_blocks(pager):
    record(pager, "running").host_own = record(pager, "swapped").host_own
    reached(pager, "I10")


def test_i10_a_plan_for_a_sequence_that_does_not_wait(pager):
    record(pager, "swapping_in").state = "running"
    assert any("is for sequence" in fault for fault in reached(pager, "I10"))


def test_i10_a_sequence_that_waits_for_no_plan(pager):
    record(pager, "running").state = "fetching"
    reached(pager, "I10")
