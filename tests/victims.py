"""Questions to ``choose_victims`` for the random tests: drawn, asked on both sides, and what was promised, kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from twins import Pair, Twins

from kvpager import RecoveryCost, Victim

POLICIES = ("newest", "cheapest", "least_progress", "priority")


@dataclass
class Question:
    """The arguments of one call."""

    needed: int
    policy: str
    candidates: list[Pair] | None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(cls, draw: random.Random, twins: Twins) -> Question:
        """One that may be refused: too much is asked for, or of somebody who does not run."""
        policy = draw.choice(POLICIES)
        needed = draw.randint(0, twins.num_blocks + 2)
        if draw.random() < 0.8:  # a little more than there is
            needed = room(twins) + draw.choice([1, 1, 2, 3, 5])
        options: dict[str, Any] = {"spare_after": draw.choice([1, 1, 2, 3]), "keep": draw.choice([0, 0, 1, 1, 2])}
        if draw.random() < 0.6:
            numbers = [draw.choice([0.0, 1.0, 0.5, 0.1, 7.0]) for _ in RecoveryCost._fields]
            options["cost"] = RecoveryCost(*numbers)
        candidates = None
        if policy == "priority" or draw.random() < 0.7:
            pairs = [pair for pair in twins.pairs if pair.state == "running" or draw.random() < 0.02]
            candidates = draw.sample(pairs, draw.randint(len(pairs) // 2, len(pairs)))
            options["candidates"] = candidates
            places = range(len(candidates))
            if policy == "priority":
                options["priorities"] = [draw.randint(-2, 2) for _ in places]
            if draw.random() < 0.5:
                options["left_out"] = draw.sample(
                    places, draw.randint(0, len(candidates) // 2 + 1) % (len(candidates) + 1)
                )
                options["finishing"] = [draw.choice([None, 0, 1, 3, 50]) for _ in places]
        return cls(needed, policy, candidates, options)

    def ask(self, twins: Twins) -> list[Victim] | None:
        """The answer, None if it was refused."""
        outcome = twins.peek("choose_victims", self.needed, self.policy, **self.options)
        if outcome[0] != "answer":
            assert outcome[0] in ("OutOfBlocks", "NeverFits", "StaleHandle"), outcome
            return None
        victims = self._victims(twins, self.needed)
        more = self._victims(twins, self.needed + 1)
        are_taken = [all(each.action != "stall" for each in answer or ()) for answer in (victims, more)]
        # More needed blocks never choose fewer.
        assert more is None or not all(are_taken) or len(more) >= len(victims or ())
        if self.candidates is not None:
            for each in victims or ():
                assert self.candidates[each.candidate_index].reference.id == each.sequence_id
        left_out = self.options.get("left_out", [])
        if victims and victims[0].action == "stall":
            assert self.candidates is not None
            assert 0 < len(victims) == len(left_out) < len(self.candidates), "all rows are stalled"
        return victims

    def _victims(self, twins: Twins, needed: int) -> list[Victim] | None:
        options = dict(self.options)
        if self.candidates is not None:
            options["candidates"] = [pair.reference for pair in self.candidates]
        try:
            return list(twins.reference.choose_victims(needed, self.policy, **options))  # type: ignore[arg-type]
        except (ValueError, RuntimeError):
            return None

    def keep_promise(self, victims: list[Victim], twins: Twins, give_way: Callable[[Pair, Victim], Any]) -> None:
        """They go, one by one, and each brings what was promised: then the call fits."""
        for victim in victims:
            if victim.action == "stall":
                return
        for victim in victims:
            (pair,) = (
                each for each in twins.pairs if each.reference.id == victim.sequence_id and each.state == "running"
            )
            before = room(twins)
            give_way(pair, victim)
            assert room(twins) - before == victim.blocks, f"{victim} freed {room(twins) - before}"
            logged = twins.reference.preemptions()[-1]
            assert (logged.sequence_id, logged.blocks) == (victim.sequence_id, victim.blocks)
        assert room(twins) >= self.needed


def room(twins: Twins) -> int:
    return twins.reference.num_free_blocks + twins.reference.num_evictable_blocks
