"""Two tiers at random: what swaps, offloads and fetches bring is what contiguous KV has, whatever fails or comes late.

``test_histories.py`` with a host arena and a mover that runs beside the kernels. ``KVPAGER_RUNS=1000`` tries more.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvpager import Plan
from kvpager.movers import Ticket

from .test_histories import swarm
from .tiered import TieredEngine
from .tiered_player import TieredPlayer

DRAW: Any = st.randoms(use_true_random=False)


class TieredMachine(RuleBasedStateMachine):
    """One operation of the player a rule."""

    player: TieredPlayer

    @initialize(draw=DRAW)
    def build(self, draw: random.Random) -> None:
        self.player = TieredPlayer(draw)

    @rule(operation=st.sampled_from(TieredPlayer.OPERATIONS), draw=DRAW)
    def act(self, operation: str, draw: random.Random) -> None:
        self.player.draw = draw
        self.player.act(operation)

    def teardown(self) -> None:
        if hasattr(self, "player"):
            self.player.finish()


def test_histories_of_two_tiers(runs: int | None) -> None:
    run_state_machine_as_test(TieredMachine, settings=settings(max_examples=runs or 20, stateful_step_count=40))


def test_a_swarm_of_two_tiers(seed: int, runs: int | None) -> None:
    swarm(seed, runs or 25, steps=80, kind=TieredPlayer)


def test_a_swarm_of_two_tiers_in_half_precision(seed: int, runs: int | None) -> None:
    swarm(seed, runs or 5, steps=80, kind=TieredPlayer, dtype=np.float16)


class CountingEngine(TieredEngine):
    """Counts what happens to plans."""

    seen: ClassVar[Counter[str]] = Counter()

    def told(self, plan: Plan) -> Plan:
        self.seen[plan.kind] += bool(len(plan))
        self.seen["behind a kernel"] += bool(self.unwritten)
        self.seen["beside an open step"] += bool(self.open)
        self.seen["past fenced blocks"] += bool(self.pager.num_fenced_blocks and plan.destination == "device")
        return plan

    def say(self, plan: Plan, ticket: Ticket) -> None:
        fetching = [each for each in self.sequences if each.state == "fetching" and each.fetch == plan]
        self.seen["joined"] += len(fetching) > 1
        self.seen["failed in part"] += ticket.state == "failed" and bool(ticket.done.any())
        self.seen["late"] += plan in self.given_up
        self.seen["evicted on the host"] += self.pager.stats().host_evicted_blocks > 0
        super().say(plan, ticket)


class CountingPlayer(TieredPlayer):
    """A player of that engine."""

    ENGINE = CountingEngine


def test_the_swarm_meets_everything() -> None:
    """A history in which nothing is fetched would find nothing wrong with a fetch."""
    CountingEngine.seen.clear()
    swarm(0, 25, steps=120, kind=CountingPlayer)
    assert len(CountingEngine.seen) == 11
    assert min(CountingEngine.seen.values()) > 0, CountingEngine.seen


@pytest.mark.slow
def test_a_long_swarm_of_two_tiers(seed: int, runs: int | None) -> None:
    swarm(seed, runs or 300, steps=250, kind=TieredPlayer)
