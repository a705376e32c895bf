"""Failures that real users met in other engines, as far as they concern tiers and transfers, by their names."""

from __future__ import annotations

import pytest
from implementations import admit_committed, assert_nothing_leaked, cache, ids, in_batch, line, nothing_changes, refuses
from tiers import arrive, each_with_tiers, offloaded, on_host, pairs, swapped

from kvpager import OutOfBlocks, StaleHandle

pytestmark = each_with_tiers

PROMPT = [1] * 4 + [2] * 4 + [3] * 4 + [4]


@pytest.fixture
def pager(implementation):
    """An empty device of 8 blocks, and a host that has the prompt in its blocks 0-2."""
    pager = implementation(8, 4, num_host_blocks=8)
    cache(pager, PROMPT)
    offloaded(pager, 9)
    pager.admit([0] * 32).release()
    return pager


@pytest.mark.parametrize("end", ["fail", "cancel", "abandon"])
def test_w1_an_onboarding_that_fails(pager, end):
    """The blocks never become a hit, the statistics count none, and the request knows what to recompute."""
    sequence = pager.admit(PROMPT, fetch=True)
    plan = sequence.fetch
    if end != "cancel":
        pager.start(plan)
    assert pager.match(PROMPT).num_tokens == 0
    getattr(pager, end)(plan)
    assert pager.match(PROMPT).num_tokens == 0
    assert (sequence.num_cached, pager.stats().hit_tokens, pager.stats().fetched_blocks) == (0, 0, 0)
    if end == "abandon":
        assert sequence.state == "preempted"
    else:
        assert sequence.slots(0, 13).size == 13
    sequence.release()
    if end == "abandon":
        pager.reclaim(plan)
    assert_nothing_leaked(pager)


def test_w2_released_while_it_is_swapped_out(pager):
    """No frame is handed out before the transfer that reads it has ended."""
    sequence = admit_committed(pager, [9] * 9)
    table, plan = ids(sequence), sequence.swap_out()
    pager.start(plan)
    sequence.release()
    others = [pager.try_admit([number]) for number in range(8)]
    taken = [ids(other)[0] for other in others if other is not None]
    assert len(taken) == 5
    assert not set(taken) & set(table)
    pager.complete(plan)
    assert pager.try_admit([9]) is not None


def test_w3_equal_slots_of_two_tiers(implementation):
    """A plan is known by number and generation, and never by a slot: both tiers write to their block 2 at once."""
    pager = implementation(4, 4, num_host_blocks=4)
    waiting = admit_committed(pager, [8] * 5)
    swapped(pager, waiting)
    pager.forget([8] * 4)
    sequence = admit_committed(pager, [9] * 2)
    assert ids(sequence) == [0]
    back, out = waiting.swap_in(), sequence.swap_out()
    assert (pairs(back), pairs(out)) == ([(0, 1), (1, 2)], [(0, 2)])
    assert set(back.destination_ids.tolist()) & set(out.destination_ids.tolist()) == {2}
    pager.start(out)
    pager.start(back)
    assert pager.complete(back)
    assert (waiting.state, sequence.state) == ("running", "swapping_out")
    assert [status.plan for status in pager.plans()] == [out]
    assert pager.complete(back) is False
    assert pager.complete(out)
    assert (waiting.state, sequence.state) == ("running", "swapped")


def test_w4_the_frame_for_a_hit_would_come_from_the_hits_own_blocks(implementation):
    """All that is matched is held in both tiers before anything is evicted."""
    pager = implementation(4, 4, num_host_blocks=3)
    cache(pager, PROMPT)
    offloaded(pager, 9)
    assert line(pager, "queue lru") == "queue lru: 2 1 0"
    pager.admit([0] * 8).release()  # evicts 2: the device has the first two, the host all three
    assert line(pager, "queue lru") == "queue lru: 1 0"
    pager.admit([5] * 4).release()
    sequence = pager.admit(PROMPT, fetch=True)
    assert ids(sequence)[:2] == [0, 1]
    assert [source for source, _ in pairs(sequence.fetch)] == [2]
    # And on the host: a swap that needs room does not evict what the fetch reads.
    arrive_later = sequence.fetch
    with nothing_changes(pager):
        assert pager.offload(9) is None
    arrive(pager, arrive_later)
    assert sequence.num_cached == 12


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(b"a", b"b"), (b"", ()), (b"x", (("a", b"x"),)), ((("a", b"x"),), (("b", b"x"),)), ((("a", b""),), b"a")],
)
def test_w8_namespaces_never_share_in_any_tier(implementation, mine, theirs):
    pager = implementation(8, 4, num_host_blocks=8)
    cache(pager, PROMPT, namespace=mine)
    offloaded(pager, 9)
    pager.admit([0] * 32).release()
    assert on_host(pager, PROMPT, namespace=mine) == 12
    assert on_host(pager, PROMPT, namespace=theirs) == 0
    first = pager.admit(PROMPT, namespace=mine, fetch=True)
    second = pager.admit(PROMPT, namespace=theirs, fetch=True)
    assert (first.state, second.state) == ("fetching", "running")
    assert not set(ids(first)) & set(ids(second))
    second.commit()
    assert pager.offload_committed(second) is not None
    pager.reset(b"another model")
    third = pager.try_admit(PROMPT, namespace=mine, fetch=True)
    assert third is None or third.state == "running"


def test_w8_one_name_for_two_sequences_that_are_swapped(implementation):
    """What two sequences with equal tokens have on the host is one path in one namespace, and two in two."""
    pager = implementation(8, 4, num_host_blocks=8)
    first, second = (admit_committed(pager, PROMPT, namespace=name) for name in (b"a", b"b"))
    swapped(pager, first)
    swapped(pager, second)
    assert line(pager, "sequence 0").endswith("host path 0-2; host own 3")
    assert line(pager, "sequence 1").endswith("host path 4-6; host own 7")


def test_w11_a_step_that_still_runs(pager):
    """Blocks that a step may still read are not written to before it is committed."""
    sequence = pager.admit([9] * 20)
    step = in_batch(pager, sequence).step(20)
    used = set(ids(sequence))
    sequence.release()
    coming = pager.admit(PROMPT[:9], fetch=True)
    assert not used & set(coming.fetch.destination_ids.tolist())
    pager.cancel(coming.fetch)
    coming.release()
    step.commit()
    assert pager.admit(PROMPT, fetch=True).state == "fetching"


def test_w13_destinations_are_those_of_the_positions(pager):
    """Not the last blocks of the table: block i of the prefix goes to entry i, whatever comes behind."""
    cache(pager, PROMPT[:5])
    sequence = pager.admit([*PROMPT, *[5] * 9], fetch=True)
    table, plan = ids(sequence), sequence.fetch
    assert pairs(plan) == [(1, table[1]), (2, table[2])]
    assert len(table) == 6
    arrive(pager, plan)
    swapped(pager, sequence)
    host = [*range(3)]
    pager.admit([0] * 32).release()
    back = sequence.swap_in()
    assert back.source_ids.tolist() == host
    assert back.destination_ids.tolist() == ids(sequence)[:3]


def test_l3_all_transfers_but_one_succeed(implementation):
    """Each ends exactly once, and the request goes on with what is there."""
    pager = implementation(12, 4, num_host_blocks=12)
    sequence = admit_committed(pager, list(range(40)))
    plans = [pager.offload_committed(sequence)]
    sequence.preempt()
    plans += [pager.offload(1)] if plans[0] is None else []
    for plan in plans:
        pager.start(plan)
        pager.fail(plan, [number != 8 for number in range(len(plan))])
        assert pager.complete(plan) is False
    assert pager.stats().host_cached_blocks == 8
    pager.admit([99] * 48).release()
    sequence = sequence.resume()
    sequence.release()
    again = pager.admit(list(range(41)), fetch=True)
    assert len(again.fetch) == 8
    arrive(pager, again.fetch)
    assert (again.state, again.num_cached) == ("running", 32)


def test_l4_a_peer_that_never_answers(pager):
    """The caller's deadline puts it into quarantine; a late answer is told by its generation."""
    sequence = pager.admit(PROMPT, fetch=True)
    plan = sequence.fetch
    pager.start(plan, 100)
    for _ in range(3):
        assert pager.plans(older_than=100) == []
    (late,) = pager.plans(older_than=101)
    assert pager.abandon(late.plan)
    assert sequence.state == "preempted"
    assert pager.stats().quarantined_blocks == 3
    assert sequence.resume().state == "running"
    pager.reclaim(plan)
    sequence.release()
    other = pager.admit(PROMPT, fetch=True)
    assert other.fetch.id == plan.id
    with nothing_changes(pager):
        assert pager.complete(plan) is False
    assert other.state == "fetching"
    assert pager.stats().late_reports == 1


def test_l11_a_stale_handle_on_the_host(pager):
    sequence = admit_committed(pager, [9] * 5)
    swapped(pager, sequence)
    sequence.release()
    other = admit_committed(pager, [8] * 5)
    swapped(pager, other)
    for call in (sequence.swap_in, sequence.swap_out, sequence.resume, lambda: sequence.fetch):
        with nothing_changes(pager), refuses(StaleHandle, "released"):
            call()
    sequence.release()
    assert pager.stats().noop_calls == 1
    assert other.state == "swapped"


def test_l12_a_swapped_sequence_is_aborted(implementation):
    pager = implementation(8, 4, num_host_blocks=8)
    for end in ("release", "drop", "resume"):
        sequence = admit_committed(pager, [9] * 9)
        swapped(pager, sequence)
        assert pager.stats().host_active_blocks == 3
        if end == "drop":
            del sequence
            pager.take_copies()
        else:
            getattr(sequence, end)()
        assert pager.stats().host_active_blocks == 0
        if end == "resume":
            sequence.release()
    assert_nothing_leaked(pager)


def test_l13_the_host_is_full_at_a_swap_out(implementation):
    """A typed refusal before anything moved, and what the caller falls back to works."""
    pager = implementation(8, 4, num_host_blocks=4)
    other, sequence = admit_committed(pager, [8] * 5), admit_committed(pager, [9] * 9)
    swapped(pager, other)
    for _ in range(3):
        with nothing_changes(pager), refuses(OutOfBlocks, "preempt") as refused:
            sequence.swap_out()
        assert (refused.value.tier, refused.value.needed, refused.value.free) == ("host", 3, 2)
    sequence.preempt()
    assert sequence.resume().num_cached == 8
