"""All of it together, in any order: whatever scheduler and clients do, every step computes what contiguous KV computes.

As in ``test_machine.py``, hypothesis builds short histories and shrinks what fails; the swarm draws the weights of the
operations anew for each history. ``KVPAGER_RUNS=1000 pytest tests/model/test_histories.py`` tries more of both.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from .player import Player

DRAW: Any = st.randoms(use_true_random=False)


class ModelMachine(RuleBasedStateMachine):
    """One operation of the player a rule; the engine compares, and the pager recounts itself, after each."""

    player: Player

    @initialize(draw=DRAW)
    def build(self, draw: random.Random) -> None:
        self.player = Player(draw)

    @rule(operation=st.sampled_from(Player.OPERATIONS), draw=DRAW)
    def act(self, operation: str, draw: random.Random) -> None:
        self.player.draw = draw
        self.player.act(operation)

    def teardown(self) -> None:
        if hasattr(self, "player"):
            self.player.finish()


def test_histories_of_a_model(runs: int | None) -> None:
    run_state_machine_as_test(ModelMachine, settings=settings(max_examples=runs or 20, stateful_step_count=40))


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


def test_a_swarm_of_a_model_in_half_precision(seed: int, runs: int | None) -> None:
    """The pool rounds, and so does the contiguous cache: attention reads what was kept, so every bit is equal again."""
    swarm(seed, runs or 5, steps=60, dtype=np.float16)


def test_a_swarm_of_a_model(seed: int, runs: int | None) -> None:
    swarm(seed, runs or 20, steps=60)


@pytest.mark.slow
def test_a_long_swarm_of_a_model(seed: int, runs: int | None) -> None:
    swarm(seed, runs or 300, steps=200)
