"""All of it together, in any order: whatever scheduler and clients do, every step computes what contiguous KV computes.

Once with the device alone, and once with a host arena and a mover that runs beside the kernels: what swaps, offloads
and fetches bring is right, whatever fails or comes late. As in ``test_machine.py``, hypothesis builds short histories
and shrinks what fails; the swarm draws the weights of the operations anew for each history.
``KVPAGER_RUNS=1000 pytest tests/model/test_histories.py`` tries more of both.
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

from .player import Player
from .tiered import TieredEngine
from .tiered_player import TieredPlayer

DRAW: Any = st.randoms(use_true_random=False)

each_player = pytest.mark.parametrize("kind", [Player, TieredPlayer], ids=["device", "two-tiers"])


def machine(kind: type[Player]) -> type[RuleBasedStateMachine]:
    """One operation of the player a rule; the engine compares, and the pager recounts itself, after each."""

    class Machine(RuleBasedStateMachine):
        player: Player

        @initialize(draw=DRAW)
        def build(self, draw: random.Random) -> None:
            self.player = kind(draw)

        @rule(operation=st.sampled_from(kind.OPERATIONS), draw=DRAW)
        def act(self, operation: str, draw: random.Random) -> None:
            self.player.draw = draw
            self.player.act(operation)

        def teardown(self) -> None:
            if hasattr(self, "player"):
                self.player.finish()

    return Machine


def swarm(seed: int, runs: int, steps: int, kind: type[Player] = Player, **options: Any) -> None:
    for run_seed in range(seed, seed + runs):
        draw = random.Random(run_seed)
        player = kind(draw, **options)
        weights = player.weights()
        try:
            for operation in draw.choices([*weights], [*weights.values()], k=steps):
                player.act(operation)
            player.finish()
        except BaseException as error:
            error.add_note(f"replay with KVPAGER_SEED={run_seed} KVPAGER_RUNS=1")
            raise


@each_player
def test_histories(kind: type[Player], runs: int | None) -> None:
    run_state_machine_as_test(machine(kind), settings=settings(max_examples=runs or 20, stateful_step_count=40))


@each_player
def test_a_swarm_in_half_precision(kind: type[Player], seed: int, runs: int | None) -> None:
    """The pool rounds, and so does the contiguous cache: attention reads what was kept, so every bit is equal again."""
    swarm(seed, runs or 5, steps=80, kind=kind, dtype=np.float16)


@each_player
def test_a_swarm(kind: type[Player], seed: int, runs: int | None) -> None:
    swarm(seed, runs or 25, steps=80, kind=kind)


@pytest.mark.slow
@each_player
def test_a_long_swarm(kind: type[Player], seed: int, runs: int | None) -> None:
    swarm(seed, runs or 300, steps=250, kind=kind)


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
