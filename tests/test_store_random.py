"""Random histories with a store behind two tiers: saves and loads among all the other calls.

The store is a dictionary that may lose anything at any time. In most runs the caller is honest, and then
``store_stream.py`` says what every slot and every record must hold.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from store_stream import StoreStream
from test_machine import ANY, NAMESPACE, PagerMachine, swarm
from test_tiers_random import TierMachine, TierSwarm

IDENTITIES = [None, None, b"", b"other weights"]


class StoreMachine(TierMachine):
    """The same with a store, of which the caller may say that it has whatever he likes."""

    @precondition(PagerMachine.has_seen_prompts)
    @rule(num_blocks=st.integers(0, 9))
    def save(self, num_blocks: int) -> None:
        self.twins.change("pager", "save", num_blocks)
        self.remember()

    @precondition(PagerMachine.has_seen_prompts)
    @rule(data=st.data(), namespace=NAMESPACE, num_tokens=st.integers(-1, 30))
    def load(self, data: st.DataObject, namespace: Any, num_tokens: int) -> None:
        if tokens := self.prompt(data):
            self.twins.change("pager", "load", tokens, num_tokens, namespace=namespace)
            self.remember()

    @precondition(PagerMachine.has_seen_prompts)
    @rule(pick=ANY, namespace=NAMESPACE)
    def store_keys(self, pick: int, namespace: Any) -> None:
        self.twins.peek("store_keys", self.known[pick % len(self.known)], namespace=namespace)


def test_every_history_with_a_store_agrees_with_the_reference(runs):
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=runs or 80, stateful_step_count=40))


@pytest.mark.slow
def test_long_histories_with_a_store_agree_with_the_reference(runs):
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=runs or 2_000, stateful_step_count=150))


class StoreSwarm(TierSwarm):
    """The calls of ``TierSwarm``, and those that save and load."""

    OPERATIONS = (*TierSwarm.OPERATIONS, "save", "load", "store_keys", "write_late", "lose")
    STREAM = StoreStream
    stream: StoreStream | None

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for often, least in (
            ("save", 0.8),
            ("load", 1.5),
            ("move", 1.0),
            ("forget", 0.2),
            ("reset", 0.03),
            ("write_late", 0.1),
        ):
            self.weights[often] += least
        self.weights["lose"] *= 0.2
        self.weights["store_keys"] *= 0.2

    # What the calls are given.

    def tokens(self) -> list[int]:
        """Rather one that the store has more of than the host."""
        tokens = [super(StoreSwarm, self).tokens() for _ in range(5)]
        if self.stream is None or self.draw.random() < 0.4:
            return tokens[0]
        match, num_tokens = self.twins.reference.match, self.stream.num_tokens
        found = [(each, match(each)) for each in tokens]
        known = [each for each, hit in found if num_tokens(each, b"") > hit.num_tokens + hit.num_host_tokens]
        return self.draw.choice(known or tokens)

    def done(self, plan: Any, how: str) -> list[bool]:
        """What a load's mover did not find has not arrived."""
        done = super().done(plan, how)
        if self.stream is not None and plan.kind == "load":
            done = [is_done and found for is_done, found in zip(done, self.stream.look_up(plan), strict=True)]
        return done

    # The operations.

    def save(self) -> None:
        self.twins.change("pager", "save", self.draw.choice([1, 2, 5, 50]))
        self.note_plans()

    def load(self) -> None:
        tokens, namespace = self.tokens(), self.namespace()
        if self.stream is not None and self.draw.random() < 0.8:
            num_tokens = self.stream.num_tokens(tokens, namespace)
        else:
            num_tokens = self.draw.randint(0, len(tokens) + 1)
        self.twins.change("pager", "load", tokens, num_tokens, namespace=namespace, form=self.form())
        self.note_plans()

    def note_plans(self) -> None:
        for plan in self.twins.plans():
            if self.stream is not None and plan.records is not None:
                self.stream.made(plan)

    def store_keys(self) -> None:
        self.twins.peek("store_keys", self.tokens(), namespace=self.namespace(), form=self.form())

    def end(self, plan: Any, how: str) -> None:
        if self.stream is not None and plan.kind == "load" and how == "complete":
            how = how if all(self.stream.look_up(plan)) else "fail"
        super().end(plan, how)
        if self.stream is not None:
            self.stream.ended(plan)

    def write_late(self) -> None:
        if self.stream is not None and (plan := self.some_plan("abandoned")) is not None:
            self.stream.write_late(plan)

    def lose(self) -> None:
        if self.stream is not None:
            self.stream.lose()

    def forget(self) -> None:
        """Rather something of what is on its way."""
        tokens, namespace = self.tokens(), self.namespace()
        if (loads := self.twins.reference._transfers.loads()) and self.draw.random() < 0.6:
            load = self.draw.choice(loads)[1]
            tokens, namespace = load.tokens, load.namespace
        keep = self.draw.randint(0, len(tokens) // self.twins.block_size) * self.twins.block_size
        outcome = self.twins.change("pager", "forget", tokens[:keep], namespace=namespace)
        if self.stream is not None and outcome[0] == "answer":
            self.stream.forget(tokens[:keep], namespace)

    def reset(self) -> None:
        self.twins.change("pager", "reset", self.draw.choice(IDENTITIES))
        if self.stream is not None:
            self.stream.reset()


def test_a_swarm_with_a_store(seed, runs):
    swarm(seed, runs or 40, steps=250, kind=StoreSwarm)


@pytest.mark.slow
def test_a_long_swarm_with_a_store(seed, runs):
    swarm(seed, runs or 10_000, steps=400, kind=StoreSwarm)
