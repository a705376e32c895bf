"""Two tiers at random: what swaps, offloads and fetches bring is what contiguous KV has, whatever fails or comes late.

``test_histories.py`` with a host arena and a mover that runs beside the kernels. ``KVPAGER_RUNS=1000`` tries more.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from .test_histories import swarm
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


@pytest.mark.slow
def test_a_long_swarm_of_two_tiers(seed: int, runs: int | None) -> None:
    swarm(seed, runs or 300, steps=250, kind=TieredPlayer)
