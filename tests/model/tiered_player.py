"""The player with two tiers: the same scheduler and clients, who also swap, offload and fetch, and give up.

They are honest here as well: a plan is started before it is submitted, reported when its ticket ends, and abandoned if
it takes too long. What is said a second time, or too late, the pager has to know for itself.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvpager

from .engine import Engine
from .player import LENGTH_MAX, SEQUENCES_MAX, Player
from .tiered import TRANSFERS, TieredEngine

REPORTS = ("start", "complete", "fail", "cancel", "abandon", "reclaim")


class TieredPlayer(Player):
    """More operations, each of which does nothing where there is nothing to do."""

    ENGINE: type[Engine] = TieredEngine
    engine: TieredEngine
    BLOCK_SIZES = 2, 4, 4, 8
    POSITIONS = 24, 64  # a device that forgets, or nothing is ever fetched
    OPERATIONS = (
        *Player.OPERATIONS,
        *["serve", "poll"] * 5,
        *["swap_out", "swap_in", "offload", "send"] * 2,
        *["offload_committed", "compute_ahead", "give_up", "thaw", "leave", "cancel_plan", "say_again", "misreport"],
    )

    def __init__(self, draw: random.Random, **options: Any) -> None:
        faulty = draw.random() < 0.6
        self.at_once = draw.choice([0.0, 0.5, 1.0])
        tiers = {
            "num_host_blocks": draw.choice([4, 12, 30, 60]),
            "seed": draw.randrange(2**32),
            "fail": draw.choice([0.1, 0.4]) if faulty else 0.0,
            "never": draw.choice([0.0, 0.2, 0.4]) if faulty else 0.0,
            "late_reports": draw.choice([0, 0, 3]),
        }
        self.bases = [[draw.randrange(3) for _ in range(draw.randint(12, 40))] for _ in range(draw.randint(4, 8))]
        super().__init__(draw, **{**tiers, **options})

    def weights(self) -> dict[str, float]:
        """In most histories requests that begin alike come and go: only so the tiers have much to do."""
        weights = super().weights()
        if self.draw.random() < 0.7:
            weights = {operation: 0.15 * weight for operation, weight in weights.items()}
            weights["serve"] += 2.0
        for operation, least in (("poll", 1.5), ("send", 0.6), ("offload", 1.0), ("swap_out", 0.6), ("swap_in", 0.7)):
            weights[operation] += least
        weights["give_up"] += 0.2
        for seldom in ("say_again", "misreport", "cancel_plan"):
            weights[seldom] *= 0.3
        return weights

    def act(self, operation: str) -> None:
        self.engine.tick += 1
        super().act(operation)
        for sequence in self.engine.sequences:
            # A join has no plan of its own.
            if sequence.state == "fetching":
                self.made(sequence.fetch)
            elif sequence.state == "running":
                self.enter(sequence)

    def how(self) -> dict[str, Any]:
        return {"fetch": self.draw.random() < 0.8, "fetch_min_tokens": self.draw.choice([1, 1, 5])}

    def made(self, plan: kvpager.Plan | None) -> None:
        """Often a plan is sent at once, but what waits for nothing may as well wait."""
        self.engine.adopt_plan(plan)
        if plan in self.engine.planned_plans and self.draw.random() < self.at_once:
            self.engine.send(plan)

    def unnamed(self) -> Any | None:
        found = [each for each in self.of_state("running") if not self.engine.names(each)]
        return self.draw.choice(found) if found else None

    def out(self, call: Any, *arguments: Any) -> kvpager.Plan | None:
        """A call that copies to the host: copies that are queued are launched first, for it may read their targets."""
        try:
            return call(*arguments)  # type: ignore[no-any-return]
        except kvpager.NeverFits:
            return None  # It is larger than the host.
        except kvpager.TransferError:
            self.engine.take_copies()
        try:
            return call(*arguments)  # type: ignore[no-any-return]
        except (kvpager.TransferError, kvpager.NeverFits):
            return None  # The targets are those of an open step.

    def serve(self) -> None:
        """Some requests, one after the other: rather such as the host has more of than the device."""
        engine = self.engine
        for _ in range(self.draw.randint(1, 4)):
            candidates = [[*each[: self.draw.randint(8, len(each))], self.draw.randrange(3)] for each in self.bases]
            candidates += [each.tokens.tolist() for each in self.of_state("fetching")]  # to be joined
            fetched = [each for each in candidates if engine.pager.match(each).num_host_tokens]
            prompt = self.draw.choice(fetched if fetched and self.draw.random() < 0.7 else candidates)
            if len(prompt) > engine.pager.num_blocks * engine.block_size:
                continue
            named = [each for each in self.of_state("running") if engine.names(each)]
            if named and self.draw.random() < 0.2:
                self.draw.choice(named).release()  # The step is still to run, and its blocks are the first to be had.
            room = len(engine.sequences) < SEQUENCES_MAX
            sequence = engine.pager.try_admit(prompt, **self.how()) if room else None
            if sequence is None:
                if (running := self.of_state("running")) and self.draw.random() < 0.5:
                    self.draw.choice(running).release()
                return
            engine.adopt(sequence)
            if sequence.state == "fetching":
                self.made(sequence.fetch)
                if self.draw.random() < 0.5:
                    engine.poll()
            if sequence.state == "running":
                try:
                    engine.compute(sequence, ahead=self.draw.random() < 0.5)
                except kvpager.OutOfBlocks:
                    # It joined a fetch that failed, and shares blocks with others in which all want to write now.
                    sequence.release()
                    return
                self.prompts.append(prompt)
                if self.draw.random() < 0.8:
                    sequence.release()
            engine.settle()

    # What leaves the device, and comes back.

    def swap_out(self) -> None:
        """Where the host has no room, recompute (L13)."""
        if (sequence := self.unnamed()) is None:
            return
        if sequence.num_planned < len(sequence) and self.draw.random() < 0.7:
            try:
                self.engine.compute(sequence, ahead=True)
            except kvpager.OutOfBlocks:
                return
        plan = self.out(sequence.try_swap_out)
        if plan is not None:
            self.made(plan)
        elif self.draw.random() < 0.3:
            sequence.preempt()

    def swap_in(self) -> None:
        for sequence in self.of_state("swapped"):
            try:
                if self.draw.random() < 0.1:
                    sequence.try_resume()
                elif (plan := sequence.try_swap_in()) is not None:
                    self.made(plan)
            except kvpager.NeverFits:
                sequence.release()

    def offload(self) -> None:
        if (plan := self.out(self.engine.pager.offload, self.draw.choice([1, 3, 50, 50]))) is not None:
            self.made(plan)

    def offload_committed(self) -> None:
        sequence = self.running()
        if sequence is not None and (plan := self.out(self.engine.pager.offload_committed, sequence)) is not None:
            self.made(plan)

    def compute_ahead(self) -> None:
        """A sequence alone, committed before its kernel has run."""
        sequence = self.unnamed()
        if sequence is None or sequence.num_planned == len(sequence):
            return
        stop = self.draw.choice([len(sequence), self.draw.randint(sequence.num_planned + 1, len(sequence))])
        try:
            token = self.engine.compute(sequence, stop, ahead=True)
        except kvpager.OutOfBlocks:
            return
        if stop == len(sequence) < LENGTH_MAX and self.draw.random() < 0.7:
            sequence.try_append(token)

    # What becomes of plans.

    def send(self) -> None:
        if self.engine.planned_plans:
            self.engine.send(self.draw.choice(self.engine.planned_plans))

    def poll(self) -> None:
        self.engine.poll()

    def give_up(self) -> None:
        """What was started longest ago."""
        late = [plan for plan, state, _ in self.engine.pager.plans(max(0, self.engine.tick - 5)) if state == "started"]
        if late:
            self.engine.give_up(late[0])

    def thaw(self) -> None:
        self.engine.mover.thaw()

    def leave(self) -> None:
        """A client goes while its KV is on its way, or on the host (L12)."""
        moving = [each for state in (*TRANSFERS, "swapped") for each in self.of_state(state)]
        if moving:
            self.draw.choice(moving).release(self.draw.choice(["finished", "aborted"]))

    def cancel_plan(self) -> None:
        if self.engine.planned_plans and self.draw.random() < 0.5:
            self.engine.cancel_plan(self.draw.choice(self.engine.planned_plans))

    def say_again(self) -> None:
        """A report of a plan that has ended changes nothing (L3, L4)."""
        if not self.engine.ended:
            return
        plan, pager = self.draw.choice(self.engine.ended[-8:]), self.engine.pager
        before, number = pager.dump(full=True), pager.stats().late_reports
        assert getattr(pager, self.draw.choice(REPORTS))(plan) is False
        assert (pager.dump(full=True), pager.stats().late_reports) == (before, number + 1)

    def misreport(self) -> None:
        """What does not fit a plan's state is refused, or answered with False where it is only late."""
        fitting = {
            "planned": ("start", "cancel"),
            "started": ("complete", "fail", "abandon"),
            "abandoned": ("reclaim",),
        }
        pager = self.engine.pager
        if plans := pager.plans():
            plan, state, _ = self.draw.choice(plans)
            before = pager.dump(full=True)
            report = self.draw.choice([each for each in REPORTS if each not in fitting[state]])
            if (report, state) == ("start", "started") or (state == "abandoned" and report in fitting["started"]):
                assert getattr(pager, report)(plan) is False
            else:
                with pytest.raises(kvpager.TransferError):
                    getattr(pager, report)(plan)
            assert pager.dump(full=True) == before

    def finish(self) -> None:
        """Whatever the host has of any prompt comes back right; then everything ends."""
        engine = self.engine
        engine.finish_steps()
        for sequence in engine.sequences:
            sequence.release()
        engine.finish_plans()
        for prompt in self.prompts[-12:]:
            for namespace in (b"", b"tenant"):
                if not engine.pager.match(prompt, namespace=namespace).num_host_tokens:
                    continue
                sequence = engine.pager.try_admit(prompt, namespace=namespace, fetch=True)
                if sequence is not None:
                    self.audited += sequence.state == "fetching"
                    engine.adopt(sequence)
                    if sequence.fetch is not None:
                        engine.adopt_plan(sequence.fetch)
                    engine.finish_plans()
                    sequence.release()
        engine.finish()

    audited = 0
