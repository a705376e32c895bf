"""Scheduler and clients in one, who do anything in any order: but honestly.

They compute what they were given slots for, commit what was computed, and say what was sampled. All choices come from
one random.Random, which may be a seeded one or hypothesis's.
"""

from __future__ import annotations

import random
from typing import Any

import kvpager

from .contiguous import choose
from .device import PLACEHOLDER
from .engine import Engine

SEQUENCES_MAX, LENGTH_MAX = 10, 90


class Player:
    """Each operation does nothing where there is nothing to do."""

    ENGINE: type[Engine] = Engine
    BLOCK_SIZES: tuple[int, ...] = (1, 2, 4, 4, 8, 16)
    POSITIONS = 32, 128
    """Between how many the pool has room for."""

    # The usual ones more than once.
    OPERATIONS = (
        *["turn"] * 6,
        *["admit", "fork", "commit"] * 2,
        *["plan", "plan_and_cancel", "cancel", "reorder", "release", "preempt", "resume", "truncate", "extend"],
        *["leave_or_enter", "condense", "reserve", "compute", "forget", "reset"],
    )

    def __init__(self, draw: random.Random, **options: Any) -> None:
        self.draw = draw
        block_size = draw.choice(self.BLOCK_SIZES)
        self.engine = self.ENGINE(
            draw.randint(*self.POSITIONS) // block_size,
            block_size,
            **{
                "max_seqs": 6,
                "buffers": draw.choice([1, 2, 2, 3]),
                "batches": draw.choice([1, 1, 2]),
                "late": draw.random() < 0.5,
                "mirror": draw.random() < 0.5,
                "policy": draw.choice(["lru", "slru"]),
                "watermark": draw.choice([0.0, 0.0, 0.2]),
                "prefix_cache": draw.random() < 0.8,
                **options,
            },
        )
        self.prompts = [[7] * 20]
        for _ in range(draw.randint(1, 4)):
            self.admit()

    def weights(self) -> dict[str, float]:
        """How often a swarm does what: drawn anew for each history."""
        weights = {operation: self.draw.random() ** 2 for operation in self.OPERATIONS}
        weights["turn"] += 2
        weights["admit"] += 0.5
        for often in ("resume", "fork", "reorder", "plan_and_cancel"):
            weights[often] += 0.2
        for seldom in ("release", "preempt", "reset", "forget"):
            weights[seldom] *= 0.3
        return weights

    def act(self, operation: str) -> None:
        self.engine.batch = self.draw.choice(self.engine.batches)
        getattr(self, operation)()
        self.engine.settle()

    def finish(self) -> None:
        self.engine.finish()

    # What there is.

    def of_state(self, state: str) -> list[Any]:
        return [each for each in self.engine.sequences if each.state == state]

    def running(self) -> Any | None:
        """Any running sequence, more often one that an open step names: that is where it matters."""
        found = self.of_state("running")
        named = [each for each in found if self.engine.names(each)]
        return self.draw.choice(named if named and self.draw.random() < 0.6 else found) if found else None

    def in_batch(self) -> list[Any]:
        rows = {self.engine.batch.row_of(each): each for each in self.of_state("running")}
        return [rows[row] for row in sorted(row for row in rows if row is not None)]

    def tokens(self, most: int) -> list[int]:
        """Few values, so that prompts and answers often agree by chance."""
        return [self.draw.randrange(3) for _ in range(self.draw.randint(1, most))]

    def known(self, sequence: Any) -> list[int]:
        tokens: list[int] = sequence.tokens.tolist()
        return tokens[: tokens.index(PLACEHOLDER)] if PLACEHOLDER in tokens else tokens

    def room(self, sequence: Any) -> int:
        """Positions that its row still has columns for."""
        return int(self.engine.batch.max_blocks * self.engine.block_size - sequence.num_planned)

    # Sequences come and go.

    def enter(self, sequence: Any) -> None:
        is_in = any(batch.row_of(sequence) is not None for batch in self.engine.batches)
        if not is_in and not self.engine.names(sequence) and len(self.engine.batch) < self.engine.batch.max_seqs:
            self.engine.batch.add(sequence)

    def admit(self) -> None:
        """A prompt that begins like one that was seen before."""
        if len(self.engine.sequences) == SEQUENCES_MAX:
            return
        begun = self.draw.choice(self.prompts)
        prompt = [*begun[: self.draw.randint(0, len(begun))], *self.tokens(9)]
        namespace, wait = self.draw.choice([b"", b"", b"", b"tenant"]), self.draw.random() < 0.3
        try:
            sequence = self.engine.pager.try_admit(prompt, namespace=namespace, wait=wait, **self.how())
        except kvpager.NeverFits:
            return
        if sequence is not None and not isinstance(sequence, kvpager.Computing):
            self.engine.adopt(sequence)
            if sequence.state == "running":
                self.enter(sequence)
            self.prompts.append(prompt)

    def how(self) -> dict[str, Any]:
        """More that an admit is told."""
        return {}

    def release(self) -> None:
        if (sequence := self.running()) is not None:
            self.prompts.append([*self.known(sequence), 1])
            sequence.release(self.draw.choice(["finished", "aborted"]))

    def preempt(self) -> None:
        if (sequence := self.running()) is not None:
            sequence.preempt()

    def resume(self) -> None:
        for sequence in self.of_state("preempted"):
            try:
                if sequence.try_resume() is not None:
                    self.enter(sequence)
            except kvpager.NeverFits:
                sequence.release()

    def fork(self) -> None:
        sequence, batch, rank = self.running(), self.engine.batch, self.draw.randint(0, 2)
        if sequence is None or len(self.engine.sequences) == SEQUENCES_MAX:
            return
        row = batch.row_of(sequence)
        if row is not None and len(batch) < batch.max_seqs and self.draw.random() < 0.5:
            self.engine.adopt(batch.fork([row], 1)[0], rank)
        else:
            self.enter(self.engine.adopt(sequence.fork()[0], rank))

    def truncate(self) -> None:
        if (sequence := self.running()) is not None:
            near = max(1, len(sequence) - self.draw.randint(0, 3))
            sequence.truncate(near if self.draw.random() < 0.7 else self.draw.randint(1, len(sequence)))

    def extend(self) -> None:
        """Tokens that are given and not sampled: the next turn of a conversation."""
        sequence = self.running()
        if sequence is not None and len(sequence) < LENGTH_MAX:
            sequence.try_extend(self.tokens(6))

    # Rows.

    def leave_or_enter(self) -> None:
        sequence = self.running()
        if sequence is None:
            return
        if self.engine.batch.row_of(sequence) is None or self.draw.random() < 0.3:
            if self.engine.batch.row_of(sequence) is not None:
                self.engine.batch.remove(sequence)
            else:
                self.enter(sequence)

    def condense(self) -> None:
        self.engine.batch.condense()

    def reserve(self) -> None:
        number = self.draw.randint(0, 9)
        counts = {each: min(number, self.room(each)) for each in self.in_batch()}
        self.engine.batch.try_reserve(self.engine.counts(counts))

    def reorder(self) -> None:
        """A beam step over some rows: each beam goes on from any of them, with one of its best tokens."""
        self.engine.finish_steps()
        rows = [each for each in self.in_batch() if each.num_committed and self.draw.random() < 0.7]
        if not rows or len(self.engine.sequences) + len(rows) > SEQUENCES_MAX:
            return
        parents = [self.draw.choice(rows) for _ in range(self.draw.randint(1, len(rows)))]
        for parent in parents:
            parent.truncate(parent.num_committed)
        tokens = [
            choose(self.engine.truth.of(each.tokens.tolist()).logits[len(each) - 1], self.draw.randint(0, 2))
            for each in parents
        ]
        row_of = self.engine.batch.row_of
        _, new = self.engine.batch.reorder([*map(row_of, parents)], tokens, [*map(row_of, rows)])
        for child in new:
            if child is not None:
                self.engine.adopt(child)

    # Steps.

    def turn(self) -> None:
        """What a loop does again and again: commit where it has to, then plan."""
        if self.engine.num_open == self.engine.batch.buffers or self.draw.random() < 0.3:
            self.commit()
        self.plan(launch=True)

    def plan(self, launch: bool | None = None) -> None:
        """Any mix of chunks, decodes and drafts; without the rows that do not fit."""
        if self.engine.num_open == self.engine.batch.buffers:
            return
        wants = {sequence: self.want(sequence) for sequence in self.in_batch()}
        while True:
            counts = {sequence: count for sequence, (count, _) in wants.items()}
            tokens = [token for _, new in wants.values() for token in new]
            try:
                self.engine.plan(counts, tokens, launch=self.draw.random() < 0.7 if launch is None else launch)
                return
            except kvpager.OutOfBlocks as refused:
                rows = list(refused.rows)
            for sequence in wants:
                if self.engine.batch.row_of(sequence) in rows:
                    wants[sequence] = 0, []

    def want(self, sequence: Any) -> tuple[int, list[int]]:
        """Positions of a row, and the tokens of those that are behind its end."""
        known, new = len(sequence) - sequence.num_planned, []
        count = self.draw.choice([1, 2, 4, 50, 50, 50, 50, 0])
        if count > known and len(sequence) < LENGTH_MAX:
            if known == 0 and self.engine.names(sequence):
                new = [PLACEHOLDER]
            if self.draw.random() < 0.3 or (known == 0 and not new):
                if new or PLACEHOLDER in sequence.tokens:
                    new += self.tokens(2)
                else:
                    new = self.engine.truth.generate(sequence.tokens.tolist(), 3)
                    new[self.draw.randrange(3)] ^= self.draw.randrange(2)
                    new = new[: self.draw.randint(1, 3)]
            new = new[: max(0, self.room(sequence) - known)]
        return known + len(new) if new else min(count, known, self.room(sequence)), new

    def commit(self) -> None:
        if self.engine.open:
            self.engine.commit()

    def cancel(self) -> None:
        if self.engine.open and not self.engine.open[-1].is_launched:
            self.engine.cancel()

    def plan_and_cancel(self) -> None:
        """A step that is never launched, and what happens to its sequences meanwhile."""
        if not self.engine.batch or self.engine.num_open == self.engine.batch.buffers:
            return
        before = len(self.engine.open)
        self.plan(launch=False)
        for _ in range(self.draw.randint(0, 2)):
            self.act(self.draw.choice(["admit", "release", "preempt", "fork", "truncate", "extend", "reserve"]))
        if len(self.engine.open) > before:
            self.engine.cancel()

    def compute(self) -> None:
        """One sequence alone, by single calls, behind whatever is launched."""
        sequence = self.running()
        if sequence is None or self.engine.names(sequence) or sequence.num_planned == len(sequence):
            return
        try:
            token = self.engine.compute(sequence)
        except kvpager.OutOfBlocks:
            return
        if len(sequence) < LENGTH_MAX and self.draw.random() < 0.7:
            sequence.try_append(token)

    # The cache.

    def forget(self) -> None:
        size = self.engine.block_size
        tokens = self.draw.choice(self.prompts)[: self.draw.randint(1, 3) * size]
        if len(tokens) >= size:
            self.engine.pager.forget(tokens[: len(tokens) // size * size])

    def reset(self) -> None:
        if self.draw.random() < 0.3:
            self.engine.pager.reset()
