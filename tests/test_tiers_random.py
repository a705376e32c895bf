"""Random histories of two tiers: offloads, fetches and swaps among all the other calls, steps included.

Core and reference are compared after every call as soon as the core has tiers; until then the reference runs alone. In
most runs the caller is honest, and then ``tier_stream.py`` says what every slot of both tiers must hold.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from test_batch_random import BatchMachine, BatchSwarm
from test_machine import ANY, NAMESPACE, PAIRS_MAX, PagerMachine, swarm
from tier_stream import TierStream
from twins import CORE_HAS_TIERS, Outcome, Twins

REPORTS = ("start", "complete", "fail", "cancel", "abandon", "reclaim")
ENDS_IN = {"planned": ("start", "start", "cancel"), "started": ("complete", "complete", "fail", "abandon")}


class TierMachine(BatchMachine):
    """The same with a host tier, in the hands of a caller who may say anything of any plan."""

    ALONE = not CORE_HAS_TIERS

    @initialize(
        num_blocks=st.integers(2, 16),
        block_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(["lru", "slru"]),
        watermark=st.sampled_from([0.0, 0.0, 0.3]),
        null_block=st.booleans(),
        num_host_blocks=st.sampled_from([0, 1, 3, 8, 20]),
    )
    def build(self, num_blocks: int, block_size: int, **settings: Any) -> None:
        self.twins = Twins(num_blocks, block_size, self.ALONE, **settings)
        self.known = []
        self.made: list[Any] = []

    def remember(self) -> None:
        super().remember()
        self.made += [plan for plan in self.twins.plans() if plan not in self.made]

    @precondition(PagerMachine.has_seen_prompts)
    @rule(data=st.data(), namespace=NAMESPACE, least=st.integers(0, 9), call=st.sampled_from(["admit", "try_admit"]))
    def fetch(self, data: st.DataObject, namespace: Any, least: int, call: str) -> None:
        if len(self.twins.pairs) < PAIRS_MAX and (tokens := self.prompt(data)):
            self.twins.peek("match", tokens, namespace=namespace)
            self.twins.admit(tokens, namespace, call=call, fetch=True, fetch_min_tokens=least)
            self.remember()

    @precondition(PagerMachine.has_seen_prompts)
    @rule(num_blocks=st.integers(0, 9))
    def offload(self, num_blocks: int) -> None:
        self.twins.change("pager", "offload", num_blocks)
        self.remember()

    @precondition(PagerMachine.has_pairs)
    @rule(pick=ANY)
    def offload_committed(self, pick: int) -> None:
        self.twins.change("pager", "offload_committed", self.pair(pick))
        self.remember()

    @precondition(PagerMachine.has_pairs)
    @rule(pick=ANY, call=st.sampled_from(["swap_out", "swap_out", "try_swap_out", "swap_in", "try_swap_in"]))
    def swap(self, pick: int, call: str) -> None:
        self.twins.change(self.pair(pick), call)
        self.remember()

    def has_plans(self) -> bool:
        return bool(self.made)

    @precondition(has_plans)
    @rule(pick=ANY, call=st.sampled_from(REPORTS), done=st.none() | st.integers(0, 255))
    def report(self, pick: int, call: str, done: int | None) -> None:
        """Any report of any plan, ended or not: it is the newest ones that have more to tell."""
        plan = self.made[-1 - pick % min(len(self.made), 6)]
        mask = [] if call != "fail" or done is None else [[bool(done >> bit & 1) for bit in range(len(plan))]]
        self.twins.change("pager", call, plan, *mask)

    @precondition(has_plans)
    @rule(pick=ANY, ends=st.sampled_from(["complete", "complete", "fail", "abandon", "cancel"]))
    def move(self, pick: int, ends: str) -> None:
        """The usual way of a plan."""
        if plans := self.twins.plans():
            plan = plans[pick % len(plans)]
            if ends != "cancel":
                self.twins.change("pager", "start", plan)
            self.twins.change("pager", ends, plan)

    @precondition(has_plans)
    @rule(older_than=st.none() | st.integers(0, 9))
    def plans(self, older_than: int | None) -> None:
        self.twins.peek("plans", older_than)


def test_every_history_of_two_tiers_agrees_with_the_reference(runs):
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=runs or 80, stateful_step_count=40))


@pytest.mark.slow
def test_long_histories_of_two_tiers_agree_with_the_reference(runs):
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=runs or 2_000, stateful_step_count=150))


class TierSwarm(BatchSwarm):
    """The calls of ``BatchSwarm``, and those that move blocks between the tiers."""

    OPERATIONS = (
        *BatchSwarm.OPERATIONS,
        "serve",
        "offload",
        "offload_committed",
        "swap_out",
        "swap_in",
        "move",
        "report_late",
        "older_than",
    )
    STREAM = TierStream
    NUM_BLOCKS_MAX = 14  # a device that forgets, or nothing is ever fetched

    def __init__(self, seed: int) -> None:
        super().__init__(seed, not CORE_HAS_TIERS, num_host_blocks=[2, 4, 10, 30][seed % 4])
        self.traffic = self.draw.random() < 0.7
        if self.traffic:
            # Requests that begin alike come and go, and a step now and then. Only so the tiers have much to do.
            self.weights = {call: 0.06 * weight for call, weight in self.weights.items()}
            for call, least in (("admit", 1.5), ("serve", 1.6), ("step", 0.4), ("commit_step", 0.2), ("release", 0.3)):
                self.weights[call] += least
            self.length_max = self.twins.block_size * max(1, min(4, self.twins.num_blocks - 2))
            self.bases = [self.stretch(self.length_max) for _ in range(self.draw.randint(3, 7))]
        for often, least in (("offload", 0.8), ("swap_out", 0.1), ("swap_in", 0.1), ("move", 1.5), ("victims", 0.4)):
            self.weights[often] += least
        for seldom in ("report_late", "older_than", "misuse"):
            self.weights[seldom] *= 0.2
        self.patience = self.draw.choice([0.2, 0.6, 0.9])
        self.ended: list[Any] = []

    # What the calls are given.

    def tokens(self) -> list[int]:
        """Rather one that the host has more of than the device."""
        size = self.twins.block_size
        candidates = [super().tokens()]
        if self.traffic:
            cuts = [self.draw.randint(1, len(base) // size) * size for base in self.bases]
            candidates += [[*base[:cut], self.value()] for base, cut in zip(self.bases, cuts, strict=True)]
        match = self.twins.reference.match
        fetched = [tokens for tokens in candidates if match(tokens).num_host_tokens]
        return self.draw.choice(fetched if fetched and self.draw.random() < 0.6 else candidates)

    def fetch(self) -> dict[str, Any]:
        if self.draw.random() < 0.3:
            return {}
        return {"fetch": True, "fetch_min_tokens": self.draw.choice([1, 1, 2, 7])}

    def some_plan(self, *states: str) -> Any:
        plans = self.twins.plans(*states)
        return self.draw.choice(plans) if plans else None

    # The operations.

    def release(self) -> None:
        """Now and then one that is on its way: that is where it matters."""
        moving = [pair for pair in self.twins.pairs if pair.state in ("fetching", "swapping_out", "swapping_in")]
        if moving and self.draw.random() < 0.5:
            self.twins.change(self.draw.choice(moving), "release")
        else:
            super().release()

    def serve(self) -> None:
        """Compute what is left of a prompt, and mostly be done with it."""
        running = [pair for pair in self.twins.pairs if pair.state == "running"]
        unnamed = [pair for pair in running if not pair.reference._record.open_rows]
        if not unnamed:
            return
        pair = self.draw.choice(unnamed)
        if self.stream is not None:
            self.twins.change(pair, "try_slots", pair.reference.num_planned, len(pair.reference))
            self.take_copies()
        if pair.state != "running":
            return
        end = len(pair.reference._record.table) * self.twins.block_size
        end = min(end, len(pair.reference))
        if self.stream is not None:
            start, record = pair.reference.num_planned, pair.reference._record
            pool, size = self.twins.reference._pool, self.twins.block_size
            entries = range(start // size, -(-end // size))
            if any(pool.shared(record.table[number]) for number in entries):
                return
            self.stream.write(pair.reference, start, self.stream._slots(record)[start:end])
        self.twins.change(pair, "commit", end)
        if self.draw.random() < 0.9:
            self.twins.change(pair, "release")
            self.twins.drop(pair)

    def offload(self) -> None:
        self.settle_copies()
        self.twins.change("pager", "offload", self.draw.choice([1, 2, 5, 50]))

    def offload_committed(self) -> None:
        self.settle_copies()
        if (pair := self.any_pair()) is not None:
            self.twins.change("pager", "offload_committed", pair)

    def swap_out(self) -> None:
        self.settle_copies()
        unnamed = [
            pair for pair in self.twins.pairs if pair.state == "running" and not pair.reference._record.open_rows
        ]
        if pair := self.draw.choice(unnamed) if unnamed and self.draw.random() < 0.9 else self.any_pair():
            self.twins.change(pair, self.some("swap_out"))

    def swap_in(self) -> None:
        swapped = [pair for pair in self.twins.pairs if pair.state == "swapped"]
        if swapped or self.draw.random() < 0.1:
            pair = self.draw.choice(swapped) if swapped else self.any_pair()
            if pair is not None:
                self.twins.change(pair, self.some("swap_in"))

    def give_way(self, pair: Any, victim: Any) -> None:
        """By the way that was named: a swap that is advised is not refused."""
        if victim.action != "swap" or self.draw.random() < 0.2:
            super().give_way(pair, victim)
            return
        outcome = self.twins.change(pair, "swap_out", reason=victim.reason, cost=victim.cost)
        assert outcome[0] == "answer", outcome
        plan = self.twins.reference._transfers.of(pair.reference._record).plan
        assert self.report("start", plan) == ("answer", True)
        if self.stream is not None:
            self.stream.start(plan)
        self.end(plan, "complete")

    def settle_copies(self) -> None:
        """Mostly what is queued is taken first, as it must be."""
        if self.twins.reference._pool.copies and self.draw.random() < 0.9:
            self.take_copies()

    def move(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            self.move_one()

    def move_one(self) -> None:
        plan = self.some_plan("planned", "started")
        if plan is None:
            if abandoned := self.some_plan("abandoned"):
                self.reclaim(abandoned)
            return
        if plan in self.twins.plans("started"):
            if self.draw.random() < self.patience:
                self.end(plan, self.draw.choice(["complete"] * 6 + ["fail"] * 2 + ["abandon"]))
        elif self.draw.random() < 0.1:
            self.report("cancel", plan)
        else:
            # The plan of a dropped handle is cancelled first.
            outcome = self.report("start", plan, *self.draw.choice([(), (self.draw.randrange(9),)]))
            if outcome == ("answer", True) and self.stream is not None:
                self.stream.start(plan)

    def done(self, plan: Any, how: str) -> list[bool]:
        """Which blocks of a plan have been copied when it ends like this."""
        if how != "fail":
            return [how == "complete"] * len(plan)
        prefix = self.draw.randint(0, len(plan))
        return [number < prefix or self.draw.random() < 0.5 for number in range(len(plan))]

    def end(self, plan: Any, how: str) -> None:
        done = self.done(plan, how)
        if self.stream is not None:
            self.stream.finish(plan, done)
        mask = [done] if how == "fail" and (any(done) or self.draw.random() < 0.5) else []
        assert self.report(how, plan, *mask) == ("answer", True)

    def reclaim(self, plan: Any) -> None:
        if self.stream is not None:
            self.stream.write_late(plan)
        assert self.report("reclaim", plan) == ("answer", True)

    def report(self, call: str, plan: Any, *arguments: Any) -> Outcome:
        outcome = self.twins.change("pager", call, plan, *arguments)
        if call != "start":
            self.ended = [*self.ended[-5:], plan]
        return outcome

    def report_late(self) -> None:
        """Reports of plans that have ended, or that are in another state."""
        plan = self.draw.choice(self.ended) if self.ended and self.draw.random() < 0.6 else self.some_plan()
        if plan is None:
            return
        state = next((state for each, state, _ in self.twins.reference.plans() if each == plan), "ended")
        fitting = {
            "planned": ("start", "cancel"),
            "started": ("complete", "fail", "abandon"),
            "abandoned": ("reclaim",),
        }
        call = self.draw.choice([call for call in REPORTS if call not in fitting.get(state, ())])
        outcome = self.twins.change("pager", call, plan)
        # What a dropped handle ends, it ends first.
        assert outcome in (("answer", False), ("TransferError",)), outcome
        assert state != "ended" or outcome[0] == "answer"

    def older_than(self) -> None:
        self.twins.peek("plans", self.draw.choice([None, *range(9)]))


def test_a_swarm_of_two_tiers(seed, runs):
    swarm(seed, runs or 40, steps=250, kind=TierSwarm)


@pytest.mark.slow
def test_a_long_swarm_of_two_tiers(seed, runs):
    swarm(seed, runs or 10_000, steps=400, kind=TierSwarm)
