"""The comparison can fail with two tiers, too: one deliberate fault each, of a caller, a mover or a pager.

Each must be met by the random histories, or by the smallest scene that it can spoil, and seen as wrong bytes: not by
chance, and not by the pager's own recount, which is switched off where a pager is made to err.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import kvpager
import kvpager.reference
from kvpager import Plan
from kvpager.movers import Ticket
from kvpager.reference.pool import Pool
from kvpager.reference.record import Record

from .test_histories import swarm
from .tiered import TieredEngine
from .tiered_player import TieredPlayer

WRONG = r"nothing in block|something else in block|the host is wrong"


def met(fault: type[TieredEngine], match: str = WRONG, seed: int = 0, **options: Any) -> None:
    """The histories meet the fault of this engine, and the comparison names what is wrong."""

    class Player(TieredPlayer):
        ENGINE = fault

    with pytest.raises((AssertionError, kvpager.KvPagerError), match=match):
        swarm(seed, runs=60, steps=120, kind=Player, **options)


class NoAfter(TieredEngine):
    """W12: nothing orders a copy behind the kernel that fills its source."""

    def after(self, plan: Plan) -> Any:
        return None


class CompletesAtOnce(TieredEngine):
    """The pager is told that a plan is done when it has only been submitted."""

    def submit(self, plan: Plan) -> Ticket:
        ticket = super().submit(plan)
        assert self.pager.complete(plan)
        return ticket

    def say(self, plan: Plan, ticket: Ticket) -> None:
        pass


class NeverStarts(TieredEngine):
    """The mover is told, the pager is not."""

    def send(self, plan: Plan) -> Ticket | None:
        self.planned_plans.remove(plan)
        return self.submit(plan)


class LastBlocks(TieredEngine):
    """W13: what comes back is copied to the last blocks of the table, whatever positions the plan is about."""

    def told(self, plan: Plan) -> Plan:
        for each in self.sequences:
            if each.state == "fetching" and each.fetch == plan:
                return dataclasses.replace(plan, destination_ids=each.block_ids[-len(plan) :])
        return plan


class Backwards(TieredEngine):
    """The right blocks in the wrong order: no token would change, and hardly a logit."""

    def told(self, plan: Plan) -> Plan:
        return dataclasses.replace(plan, destination_ids=plan.destination_ids[::-1].copy())


class WrongMask(TieredEngine):
    """A plan that failed in some blocks is said to have brought all of them."""

    def say(self, plan: Plan, ticket: Ticket) -> None:
        if plan not in self.given_up:
            assert self.pager.complete(plan)
        else:
            super().say(plan, ticket)


@pytest.mark.parametrize("fault", [NoAfter, CompletesAtOnce, LastBlocks, Backwards, WrongMask])
def test_random_histories_meet_the_faults_of_a_caller(fault: type[TieredEngine]) -> None:
    """(A plan that is ended while a mover still carries it out is seen by a scene of its own: L4.)"""
    met(fault, late=True)


def test_a_plan_that_was_never_started_cannot_be_reported() -> None:
    met(NeverStarts, match=r"complete: plan \d+ of generation \d+ is planned")


# Faults of a pager, in the plain one.


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(kvpager.reference.Pager, "check", lambda pager: [])  # it would see most of them at once
    return monkeypatch


def test_a_pager_without_fences(plain: pytest.MonkeyPatch) -> None:
    """W11: what a step that is open still reads is given to a copy."""
    plain.setattr(Pool, "is_fenced", lambda pool, block: False)
    met(TieredEngine, seed=14, late=True, pager=kvpager.reference.Pager)


def test_an_offload_that_holds_nothing(plain: pytest.MonkeyPatch) -> None:
    """W2: a block is evicted and handed out while it is copied."""
    plain.setattr(Pool, "pin", lambda pool, block: None)
    plain.setattr(Pool, "unpin", lambda pool, block: None)
    met(TieredEngine, pager=kvpager.reference.Pager)


def test_a_host_block_that_is_freed_while_it_is_read(plain: pytest.MonkeyPatch) -> None:
    """A swapped sequence lets go of the host when its way back begins, not when it is there."""
    swap_in = kvpager.reference.Pager._swap_in

    def swap_in_and_let_go(pager: kvpager.reference.Pager, record: Record) -> Plan:
        plan = swap_in(pager, record)
        record.let_go_of_host(pager._host)
        return plan

    plain.setattr(kvpager.reference.Pager, "_swap_in", swap_in_and_let_go)
    met(TieredEngine, pager=kvpager.reference.Pager)
