"""The reference's checker sees what is broken in plans to and from a store, and names the promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from implementations import cache
from test_reference_check import reached
from tiers import arrive, offloaded

import kvpager.reference

PROMPT = [1] * 8 + [2] * 5


@pytest.fixture
def pager():
    """Three blocks on the host, of which one is stored; a save of the second, one that is abandoned, and a load."""
    pager = kvpager.reference.Pager(8, 4, num_host_blocks=8)
    cache(pager, PROMPT)
    cache(pager, [3] * 5)
    offloaded(pager, 9)
    arrive(pager, pager.save(1))
    pager.save(1)
    lost = pager.save(1)
    pager.start(lost)
    pager.abandon(lost)
    assert pager.load([*PROMPT, *PROMPT], 24) is not None
    assert pager.check() == []
    assert [status.plan.kind for status in pager.plans()] == ["save", "save", "load"]
    return pager


def transfer(pager, state, kind):
    return next(each for each in pager._transfers if (each.state, each.plan.kind) == (state, kind))


def test_i2_a_path_that_a_load_does_not_hold(pager):
    pager._host.holds[transfer(pager, "planned", "load").work.above.block] -= 1
    reached(pager, "I2")


def test_i9_a_pin_of_a_save_that_is_missing(pager):
    del pager._host.pins[transfer(pager, "planned", "save").work.chains[0][-1].block]
    assert any("saves that read it" in fault for fault in reached(pager, "I9"))


def test_i9_a_pin_of_a_save_that_is_abandoned(pager):
    pager._host.pins[transfer(pager, "abandoned", "save").work.chains[0][-1].block] += 1
    assert len(reached(pager, "I9")) == 1


def test_i9_a_block_that_is_saved_and_was_given_to_another(pager):
    pager._host.nodes[transfer(pager, "abandoned", "save").work.chains[0][0].block] = None
    assert any("read by a save and has other content" in fault for fault in reached(pager, "I9"))


def test_i9_a_block_that_two_saves_read(pager):
    (chain,) = transfer(pager, "planned", "save").work.chains
    transfer(pager, "abandoned", "save").work.chains.append(chain)
    assert any("is read by 2 saves" in fault for fault in reached(pager, "I9"))


def test_i9_a_stored_block_that_is_saved(pager):
    transfer(pager, "planned", "save").work.chains[0][0].stored = True
    assert len(reached(pager, "I9")) == 1


@pytest.mark.parametrize("state", ["planned", "abandoned"])
def test_i9_a_source_that_can_be_handed_out(pager, state):
    pager._host.free[0] = transfer(pager, state, "save").work.chains[0][0].block
    assert any("is read by plan" in fault for fault in reached(pager, "I9"))


def test_i9_a_destination_of_a_load_on_the_free_stack(pager):
    pager._host.free[0] = transfer(pager, "planned", "load").work.blocks[0]
    reached(pager, "I9")


def test_i9_a_destination_of_a_load_that_can_be_hit(pager):
    load = transfer(pager, "planned", "load").work
    pager._host.nodes[load.blocks[0]] = load.above
    reached(pager, "I9")


def test_i9_a_plan_without_its_keys(pager):
    load = transfer(pager, "planned", "load")
    load.plan = replace(load.plan, records=None)
    assert len(reached(pager, "I9")) == 1


def test_i9_a_plan_with_too_few_keys(pager):
    load = transfer(pager, "planned", "load")
    load.plan = replace(load.plan, records=type(load.plan.records)(*(array[:1] for array in load.plan.records)))
    assert len(reached(pager, "I9")) == 1
