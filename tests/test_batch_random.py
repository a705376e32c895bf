"""Random histories of batches among all the other calls, between plan and commit too.

Core and reference are compared after every call, as in ``test_machine.py``; until the core has batches, the reference
runs alone. In most runs the caller is honest (commits what was computed, gives the tokens that were sampled), and then
``stream.py`` says what every slot must hold.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from stream import PLACEHOLDER, Launch, Stream
from test_machine import ANY, PAIRS_MAX, PagerMachine, Swarm, open_range, swarm
from twins import CORE_HAS_BATCHES, Outcome, Pair

BATCHES_MAX = 2
CONTENT = 2**30
NUMBERS = st.sampled_from([0, 1, 1, 1, 2, 5])
TOKENS = st.sampled_from([0, 0, 1, CONTENT])


class BatchMachine(PagerMachine):
    """The same with batches, in the hands of a caller who may say anything: commits, tokens, counts."""

    ALONE = not CORE_HAS_BATCHES

    def batch(self, pick: int) -> Pair:
        while len(self.twins.batches) < BATCHES_MAX:
            self.twins.batch(4, 6, 40, buffers=2 + len(self.twins.batches))
        return self.twins.batches[pick % BATCHES_MAX]

    def has_steps(self) -> bool:
        return bool(self.twins.steps)

    def step_of(self, pick: int) -> Pair:
        return self.twins.steps[pick % len(self.twins.steps)]

    @precondition(PagerMachine.has_pairs)
    @rule(pick=ANY, into=st.integers(0, 1))
    def add(self, pick: int, into: int) -> None:
        self.twins.change(self.batch(into), "add", self.pair(pick))

    @precondition(PagerMachine.has_pairs)
    @rule(pick=ANY, out_of=st.integers(0, 1))
    def remove(self, pick: int, out_of: int) -> None:
        self.twins.change(self.batch(out_of), "remove", self.pair(pick))

    @rule(pick=st.integers(0, 1))
    def condense(self, pick: int) -> None:
        self.twins.change(self.batch(pick), "condense")

    @rule(pick=st.integers(0, 1), number=NUMBERS, call=st.sampled_from(["step", "step", "try_step", "reserve"]))
    def step_all(self, pick: int, number: int, call: str) -> None:
        self.twins.change(self.batch(pick), call, number)

    @rule(pick=st.integers(0, 1), data=st.data(), call=st.sampled_from(["step", "step", "try_step", "try_reserve"]))
    def step_some(self, pick: int, data: st.DataObject, call: str) -> None:
        batch = self.batch(pick)
        counts, tokens = [], []
        for row in range(batch.reference.num_rows):
            record = batch.reference._rows.records[row]
            counts.append(0 if record is None else data.draw(NUMBERS, label="number"))
            if record is not None:
                new = max(0, record.num_planned + counts[-1] - len(record.tokens))
                unknown = (
                    [PLACEHOLDER] if new and record.open_rows and data.draw(st.booleans(), label="unknown") else []
                )
                tokens += unknown + [data.draw(TOKENS, label="draft") for _ in range(new - len(unknown))]
        if call == "try_reserve":
            self.twins.change(batch, call, counts)
            return
        self.twins.peek("blocks_needed", counts, tokens, on=batch)
        self.twins.change(batch, call, counts, tokens)

    @precondition(has_steps)
    @rule(pick=ANY, token=TOKENS | st.just(-1), share=st.none() | st.integers(0, 3))
    def commit_step(self, pick: int, token: int, share: int | None) -> None:
        step = self.step_of(pick)
        drafts = [0 if row is None else row.num_drafts for row in step.reference._step.rows]
        accepted = None if share is None else [min(share, number) for number in drafts]
        self.twins.change(step, "commit", [token] * len(drafts), accepted)

    @precondition(has_steps)
    @rule(pick=ANY)
    def cancel_step(self, pick: int) -> None:
        self.twins.change(self.step_of(pick), "cancel")

    @precondition(PagerMachine.has_pairs)
    @rule(pick=st.integers(0, 1), row=st.integers(0, 3), n=st.integers(0, 2))
    def fork_rows(self, pick: int, row: int, n: int) -> None:
        if len(self.twins.pairs) < PAIRS_MAX:
            self.twins.change(self.batch(pick), "fork", [row], n)

    @rule(pick=st.integers(0, 1), data=st.data())
    def reorder(self, pick: int, data: st.DataObject) -> None:
        batch = self.batch(pick)
        in_use = [row for row, record in enumerate(batch.reference._rows.records) if record is not None]
        rows = data.draw(st.none() | st.lists(st.sampled_from(in_use or [0]), unique=True, max_size=4), label="rows")
        beams = st.sampled_from((rows if rows is not None else in_use) or [0])
        parents = data.draw(st.lists(beams, max_size=4), label="parents")
        if len(self.twins.pairs) < PAIRS_MAX:
            self.twins.change(batch, "reorder", parents, [data.draw(TOKENS, label="token") for _ in parents], rows)

    @rule(blind=st.booleans())
    def look_away(self, blind: bool) -> None:
        self.twins.blind = blind


def test_every_history_of_batches_agrees_with_the_reference(runs):
    run_state_machine_as_test(BatchMachine, settings=settings(max_examples=runs or 80, stateful_step_count=40))


@pytest.mark.slow
def test_long_histories_of_batches_agree_with_the_reference(runs):
    run_state_machine_as_test(BatchMachine, settings=settings(max_examples=runs or 2_000, stateful_step_count=150))


class BatchSwarm(Swarm):
    """The single calls of ``Swarm``, and those of up to two batches."""

    OPERATIONS = (
        *Swarm.OPERATIONS,
        "write",
        "add",
        "remove",
        "condense",
        "step",
        "launch",
        "commit_step",
        "cancel_step",
        "reserve",
        "fork_rows",
        "reorder",
        "decode",
        "drop_batch",
        "misuse",
    )

    STREAM: type[Stream] = Stream

    def __init__(self, seed: int, alone: bool = not CORE_HAS_BATCHES, **settings: Any) -> None:
        super().__init__(seed, alone, **settings)
        self.stream = self.STREAM(self.twins.reference, self.draw) if self.draw.random() < 0.75 else None
        for often, least in (("step", 2.0), ("commit_step", 1.0), ("cancel_step", 0.4), ("fork_rows", 0.1)):
            self.weights[often] += least
        # What ends sequences leaves nothing to step, and who steps has less to do with single calls.
        for seldom in (
            "release",
            "drop",
            "preempt",
            "remove",
            "drop_batch",
            "misuse",
            "commit",
            "reset",
            "take_copies",
        ):
            self.weights[seldom] *= 0.2
        for call in self.draw.sample(Swarm.OPERATIONS[1:], self.draw.randint(0, 12)):
            self.weights[call] *= 0.1
        if self.draw.random() < 0.7:
            self.length_max = min(self.length_max, 3 * self.twins.block_size)
        self.left_out, self.drafts = self.draw.choice([(0.1, 0.3), (0.1, 0.3), (0.02, 0.05)])
        if self.draw.random() < 0.3:
            # A calm run: decode for long, and a single call now and then.
            self.weights = {call: 0.2 * weight for call, weight in self.weights.items()}
            self.weights["decode"] += 1.0
        self.blind = self.draw.choice([0.0, 0.5, 0.97])
        for _ in range(self.draw.randint(1, BATCHES_MAX)):
            self.new_batch()

    def look(self) -> None:
        if self.stream is not None:
            self.stream.check()
        self.twins.blind = self.draw.random() < self.blind

    def finish(self) -> None:
        self.stream = None  # its launches keep steps alive, and so their batches
        super().finish()

    # What the calls are given.

    def tokens(self) -> list[int]:
        """A prompt has no placeholders."""
        return [max(0, token) for token in super().tokens()]

    def new_batch(self) -> None:
        self.twins.batch(
            self.draw.randint(1, 6),
            self.draw.choice([2, 12, 30]),
            self.draw.choice([3, 30, 100]),
            buffers=self.draw.randint(1, 3),
            pad_block=self.draw.choice([0, -1]),
            pad_seq_len=self.draw.choice([0, 1]),
        )

    def any_pair(self) -> Pair | None:
        """Often one between plan and commit: that is where it matters."""
        named = [pair for pair in self.twins.pairs if pair.reference._record.open_rows]
        return self.draw.choice(named) if named and self.draw.random() < 0.6 else super().any_pair()

    def any_batch(self) -> Pair:
        return self.draw.choice(self.twins.batches)

    def open_steps(self, batch: Pair) -> list[Pair]:
        return [step for step in self.twins.steps if step.reference._batch is batch.reference]

    def rows_of(self, batch: Pair) -> list[Pair | None]:
        rows: list[Pair | None] = [None] * batch.reference.num_rows
        for pair in self.twins.pairs:
            row = batch.reference.row_of(pair.reference)
            if row is not None:
                rows[row] = pair
        return rows

    def counts(self, batch: Pair) -> tuple[list[int], list[list[int]]]:
        """A number for each row, and the tokens that these are past its end."""
        counts, added = [], []
        chunk = self.draw.choice([1, 1, 2, 5, 50])
        for pair in self.rows_of(batch):
            if pair is None or self.draw.random() < self.left_out:
                counts.append(0)
                added.append([])
                continue
            record = pair.reference._record
            known = len(record.tokens) - record.num_planned
            if known and (known > chunk or self.draw.random() < 0.7):
                counts.append(self.draw.randint(1, min(known, chunk)))
                added.append([])
                continue
            new = [] if known or not record.open_rows or self.draw.random() < 0.1 else [PLACEHOLDER]
            if self.draw.random() < self.drafts:
                new += self.stretch(self.draw.randint(1, 4))
            counts.append(known + len(new))
            added.append(new)
        return counts, added

    # The operations.

    def commit(self) -> None:
        if self.stream is None:
            super().commit()
        elif (pair := self.any_pair()) is not None:
            end = self.stream.computed(pair.reference) if pair.state == "running" else 1
            self.twins.change(pair, "commit", self.draw.randint(min(open_range(pair)[0], end), end))

    def take_copies(self) -> None:
        if self.stream is None:
            super().take_copies()
            return
        self.stream.launch()
        (_, (_, _, copies)) = self.twins.change("pager", "take_copies")
        self.stream.copy(copies)

    def write(self) -> None:
        """Slots of a sequence, and a kernel that writes to them at once."""
        pair = self.any_pair()
        if pair is None or pair.state != "running":
            return
        lo, hi = pair.reference.num_planned, pair.reference._record.num_known
        start = lo if self.draw.random() < 0.8 else self.draw.randint(min(lo, hi), hi)
        outcome = self.twins.change(pair, self.some("slots"), start, self.draw.randint(min(start, hi), hi))
        if self.stream is not None and outcome[0] == "answer" and outcome[1] is not None:
            self.take_copies()
            if pair.state == "running":
                self.stream.write(pair.reference, start, outcome[1][2])

    def admit(self) -> None:
        known = len(self.twins.pairs)
        super().admit()
        self.add_new(known)

    def fork(self) -> None:
        known = len(self.twins.pairs)
        super().fork()
        self.add_new(known)

    def add_new(self, known: int) -> None:
        for pair in self.twins.pairs[known:]:
            if self.draw.random() < 0.8:
                self.twins.change(self.any_batch(), "add", pair)

    def add(self) -> None:
        out = [pair for pair in self.twins.pairs if pair.reference._record.home is None]
        if pair := self.draw.choice(out) if out and self.draw.random() < 0.8 else self.any_pair():
            self.twins.change(self.any_batch(), "add", pair)

    def remove(self) -> None:
        batch = self.any_batch()
        rows = [pair for pair in self.rows_of(batch) if pair is not None]
        pair = self.draw.choice(rows) if rows and self.draw.random() < 0.9 else self.any_pair()
        if pair is not None:
            self.twins.change(batch, "remove", pair)

    def condense(self) -> None:
        self.twins.change(self.any_batch(), "condense")

    def step(self) -> None:
        self.step_batch(max(self.any_batch(), self.any_batch(), key=lambda batch: len(batch.reference)))

    def step_batch(self, batch: Pair) -> None:
        if not len(batch.reference) and self.draw.random() < 0.9:
            return
        counts, added = self.counts(batch)
        outcome = self.plan(batch, counts, added)
        if outcome[0] == "OutOfBlocks":
            # Without the rows that it names the step fits.
            for row in outcome[5]:
                counts[row], added[row] = 0, []
            outcome = self.plan(batch, counts, added)
            assert outcome[0] == "answer", outcome

    def plan(self, batch: Pair, counts: list[int], added: list[list[int]]) -> Outcome:
        tokens: list[int] | None = [token for row in added for token in row]
        if all(row in ([], [PLACEHOLDER]) for row in added) and self.draw.random() < 0.7:
            tokens = None
        scalar = counts and len(set(counts)) == 1 and None not in self.rows_of(batch)
        num_tokens = counts[0] if scalar and self.draw.random() < 0.8 else counts
        waits = self.twins._drops_wait
        needed = self.twins.peek("blocks_needed", num_tokens, tokens, on=batch)
        stats = self.twins.reference.stats()
        outcome = self.twins.change(batch, "step", num_tokens, tokens, form=self.form())
        if not waits and needed[0] == "answer":
            fits = needed[1] <= stats.free_blocks + stats.evictable_blocks
            assert outcome[0] == ("answer" if fits else "OutOfBlocks")
        elif not waits:
            assert outcome[0] == needed[0]
        if self.stream is not None and outcome[0] == "answer":
            drafts = [sum(token != PLACEHOLDER for token in row) for row in added]
            drafts += [0] * (self.twins.steps[-1].reference.num_rows - len(drafts))
            step = self.twins.steps[-1].reference
            handles = [pair.reference for pair in self.twins.pairs]
            values = [*range(self.values), *([CONTENT, CONTENT + 1] if self.content else [])]
            self.stream.plan(batch.reference, step, handles, drafts, values)
        return outcome

    def launch(self) -> None:
        if self.stream is not None and self.stream.open:
            self.stream.launch(self.draw.choice(self.stream.open))

    def commit_step(self) -> None:
        self.commit_oldest(self.any_batch())

    def commit_oldest(self, batch: Pair) -> None:
        steps = self.open_steps(batch)
        if not steps:
            return
        step = steps[0]
        record_rows = step.reference._step.rows
        if self.stream is None:
            following = [-1 if self.draw.random() < 0.2 else self.value() for _ in record_rows]
            accepted = [0 if row is None else self.draw.randint(0, row.num_drafts) for row in record_rows]
            self.twins.change(step, "commit", following, accepted if self.draw.random() < 0.7 else None)
            return
        launch = self.find(step)
        self.stream.launch(launch)
        following = launch.next_tokens.copy()
        for row, open_row in enumerate(record_rows):
            if open_row is None or (open_row.void and self.draw.random() < 0.5):
                following[row] = self.draw.randrange(-1, 9)
            elif self.draw.random() < 0.2 and PLACEHOLDER not in open_row.record.tokens[open_row.stop :]:
                following[row] = PLACEHOLDER
        accepted = launch.num_accepted.copy()
        all_accepted = all(
            row is None or row.num_drafts == number for row, number in zip(record_rows, accepted, strict=True)
        )
        how = (following, accepted) if not all_accepted or self.draw.random() < 0.5 else (following,)
        outcome = self.twins.change(
            step, "commit", *how, form=self.form() if min(following, default=0) >= 0 else "list"
        )
        self.stream.commit(launch, outcome[1][2])

    def find(self, step: Pair) -> Launch:
        assert self.stream is not None
        return next(launch for launch in self.stream.open if launch.step._step is step.reference._step)

    def cancel_step(self) -> None:
        steps = self.open_steps(self.any_batch())
        if not steps:
            return
        if self.stream is None:
            self.twins.change(steps[-1], "cancel")
        elif not (launch := self.find(steps[-1])).launched:
            outcome = self.twins.change(steps[-1], "cancel")
            is_newest = launch is self.stream.open[-1]
            assert (outcome[0] == "answer") <= is_newest, "a step of another batch may read what its copies bring"
            if outcome[0] == "answer":
                self.stream.open.remove(launch)

    def decode(self) -> None:
        """Steps and commits, hardly disturbed, with one more step open than need be, or none."""
        batch = max(self.any_batch(), self.any_batch(), key=lambda batch: len(batch.reference))
        depth = min(self.draw.choice([1, 2]), batch.reference.buffers)
        for _ in range(self.draw.randint(1, 3 * min(self.twins.block_size, 8))):
            while len(self.open_steps(batch)) >= depth:
                self.commit_oldest(batch)
                if self.stream is not None:
                    self.stream.look()
            self.step_batch(batch)

    def reorder(self) -> None:
        batch = self.any_batch()
        if len(self.twins.pairs) >= PAIRS_MAX or (self.open_steps(batch) and self.draw.random() < 0.8):
            return
        rows = {row: pair for row, pair in enumerate(self.rows_of(batch)) if pair is not None}
        for pair in rows.values():
            committed = pair.reference.num_committed
            if 0 < committed < len(pair.reference) and not self.open_steps(batch) and self.draw.random() < 0.7:
                self.twins.change(pair, "truncate", committed)
        taking = [row for row in rows if self.draw.random() < 0.8]
        ready = [row for row in taking if rows[row].reference.num_committed == len(rows[row].reference)]
        width = self.draw.randint(0, len(taking) + 1)
        parents = [self.draw.choice(ready if ready and self.draw.random() < 0.98 else [0, 1]) for _ in range(width)]
        given = None if len(taking) == len(rows) and self.draw.random() < 0.8 else taking
        self.twins.change(batch, "reorder", parents, self.stretch(width), given, form=self.form())
        for pair in [pair for pair in self.twins.pairs if pair.state == "released"]:
            self.twins.drop(pair)

    def reserve(self) -> None:
        batch = self.any_batch()
        counts = [self.draw.choice([0, 1, 5]) if pair is not None else 0 for pair in self.rows_of(batch)]
        scalar = self.draw.random() < 0.5
        self.twins.change(batch, self.some("reserve"), self.draw.choice([0, 1, 2]) if scalar else counts)

    def fork_rows(self) -> None:
        if len(self.twins.pairs) < PAIRS_MAX:
            batch = self.any_batch()
            rows = [row for row, pair in enumerate(self.rows_of(batch)) if pair is not None]
            rows = self.draw.sample(rows, min(len(rows), self.draw.randint(0, 2)))
            self.twins.change(batch, "fork", rows, self.draw.randint(1, 2))

    def drop_batch(self) -> None:
        batch = self.any_batch()
        if self.stream is not None:
            launches = [self.find(step) for step in self.open_steps(batch)]
            last = self.stream.open[len(self.stream.open) - len(launches) :]
            if any(launch.launched for launch in launches) or last != launches:
                return
            last.clear()
            self.stream.open = [launch for launch in self.stream.open if launch not in launches]
            launches.clear()
        self.twins.drop_batch(batch)
        # The next mutating call ends it.
        self.new_batch()

    def misuse(self) -> None:
        """Calls that are refused, each for one reason, whatever the state."""
        batch = self.any_batch()
        rows = batch.reference.num_rows
        if not rows:
            return
        calls: list[tuple[Pair, str, tuple[Any, ...]]] = [
            (batch, "step", ([1] * (rows + 1),)),
            (batch, "step", (-1,)),
            (batch, "step", (1.0,)),
            (batch, "step", (0, [1])),
            (batch, "step", (0, [True])),
            (batch, "step", (10_000,)),
            (batch, "reserve", ([1] * (rows + 1),)),
            (batch, "reserve", (2**31 - 1,)),
            (batch, "reserve", (None,)),
            (batch, "fork", ([rows], 1)),
            (batch, "fork", ([-1], 1)),
            (batch, "fork", ([], 0)),
            (batch, "fork", ([0] * 2, 1)),
            (batch, "fork", (0, 1)),
        ]
        for number, step in enumerate(steps := self.open_steps(batch)):
            wrong = [0] * (step.reference.num_rows + 1)
            calls += [(step, "commit", (wrong,)), (step, "commit", (None, wrong)), (step, "commit", ([None],))]
            calls += [(step, "commit", ()), (step, "commit", ("no",))] if number else []
            calls += [(step, "cancel", ())] if number < len(steps) - 1 else []
        target, call, arguments = self.draw.choice(calls)
        outcome = self.twins.change(target, call, *arguments)
        assert outcome[0] != "answer", (call, arguments, outcome)


def test_a_swarm_of_batches(seed, runs):
    swarm(seed, runs or 120, steps=120, kind=BatchSwarm)


def test_a_history_in_which_a_row_wrote_to_a_block_that_a_cancel_had_given_back():
    """Found at random, after thousands that did not: the last holder's row had not been told of the others' return."""
    swarm(4506, 1, steps=120, kind=BatchSwarm)


@pytest.mark.slow
def test_a_long_swarm_of_batches(seed, runs):
    swarm(seed, runs or 10_000, steps=400, kind=BatchSwarm)
