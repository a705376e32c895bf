"""Steps of a batch, as a server's loop makes them: on a scattered pool, with rows of their own tokens.

A row crosses a block boundary in one step of 16. Rows that cross together show the two extremes, rows that take turns
the usual state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .measure import Operation

if TYPE_CHECKING:
    from .operations import Subject

BLOCK_SIZE = 16
BLOCKS_AT_START = 2
STEPS_MAX = 8 * BLOCK_SIZE
"""Steps before the rows start again, so that they stay within their part of the pool."""
DRAFTS = 4
BEAMS = 4
CHUNK = 512
PAGES_A_ROW = 512


class Rows:
    """Rows of running sequences, and how many steps they are past their start."""

    def __init__(self, subject: Subject, num_rows: int, *, take_turns: bool, max_tokens: int = 8192) -> None:
        self.subject, self.take_turns = subject, take_turns
        self.pager = subject.batch_pool
        self.num_rows = num_rows // subject.settings.rows_divisor
        self.batch = self.pager.batch(self.num_rows, 128, max_tokens)
        self.tokens = subject.prompt(self.num_rows)
        self.sequences: list[Any] = []
        self.prompts: list[NDArray[np.int32]] = []
        self.steps = 0
        self.start()

    def start(self) -> None:
        """New sequences in all rows, each with one token to compute."""
        for sequence in self.sequences:
            sequence.release()
        for prompt in self.prompts:
            self.pager.forget(prompt[:BLOCK_SIZE])
        self.prompts = [
            self.subject.prompt(BLOCKS_AT_START * BLOCK_SIZE + (row % BLOCK_SIZE if self.take_turns else 0))
            for row in range(self.num_rows)
        ]
        self.sequences = [self.pager.admit(prompt) for prompt in self.prompts]
        for sequence in self.sequences:
            sequence.commit()
            sequence.append(1)
            self.batch.add(sequence)
        self.steps = 0
        # The first step looks at each row, and the first commit of a block makes its node.
        for _ in range(BLOCK_SIZE + 2):
            self.advance()

    def advance(self) -> None:
        self.step().commit(self.tokens)

    def step(self) -> Any:
        self.steps += 1
        return self.batch.step()

    def before(self, crosses: bool) -> None:
        """Go on to a step that every row, or none, crosses a boundary in."""
        if self.steps >= STEPS_MAX:
            self.start()
        while (self.steps % BLOCK_SIZE == 0) != crosses:
            self.advance()

    def release(self) -> None:
        for sequence in self.sequences:
            sequence.release()


def step(num_rows: int, *, crosses: bool) -> Callable[[Subject], Operation]:
    """One step of rows that all cross a boundary in it, or none."""

    def make(subject: Subject) -> Operation:
        rows = subject.rows(num_rows, take_turns=False)
        return Operation(lambda _: rows.step(), lambda: rows.before(crosses), lambda _, step: step.commit(rows.tokens))

    return make


def usual_step(num_rows: int) -> Callable[[Subject], Operation]:
    """One step of rows of which every 16th crosses."""

    def make(subject: Subject) -> Operation:
        rows = subject.rows(num_rows, take_turns=True)
        return Operation(lambda _: rows.step(), lambda: _restart(rows), lambda _, step: step.commit(rows.tokens))

    return make


def usual_commit(num_rows: int) -> Callable[[Subject], Operation]:
    """The commit of such a step."""

    def make(subject: Subject) -> Operation:
        rows = subject.rows(num_rows, take_turns=True)

        def prepare() -> Any:
            _restart(rows)
            return rows.step()

        return Operation(lambda step: step.commit(rows.tokens), prepare)

    return make


def _restart(rows: Rows) -> None:
    if rows.steps >= STEPS_MAX:
        rows.start()


def drafts(num_rows: int) -> Callable[[Subject], Operation]:
    """A step with drafts behind each row's token, and the commit of what was accepted."""

    def make(subject: Subject) -> Operation:
        rows = Rows(subject, num_rows, take_turns=True)
        guesses = subject.prompt(rows.num_rows * DRAFTS)

        def prepare() -> NDArray[np.int32]:
            if rows.steps >= STEPS_MAX // (1 + DRAFTS):
                rows.start()
                rows.steps = 0
            rows.steps += 1
            return subject.rng.integers(0, DRAFTS + 1, rows.num_rows, dtype=np.int32)

        def run(accepted: NDArray[np.int32]) -> None:
            rows.batch.step(1 + DRAFTS, guesses).commit(rows.tokens, accepted)

        return Operation(run, prepare)

    return make


def mixed(num_rows: int, num_prefills: int) -> Callable[[Subject], Operation]:
    """A step in which some rows prefill a chunk and the others decode."""

    def make(subject: Subject) -> Operation:
        rows = Rows(subject, num_rows, take_turns=True)
        counts = np.ones(rows.num_rows, np.int32)
        counts[:num_prefills] = CHUNK

        def prepare() -> None:
            _restart(rows)
            for row in range(num_prefills):
                rows.sequences[row].release()
                rows.sequences[row] = rows.pager.admit(subject.prompt(2 * CHUNK + 1))
                rows.batch.add(rows.sequences[row])

        def clean(_: None, step: Any) -> None:
            step.commit(rows.tokens)
            rows.steps += 1

        return Operation(lambda _: rows.batch.step(counts), prepare, clean)

    return make


def beams(num_requests: int) -> Callable[[Subject], Operation]:
    """A beam step: each beam goes on from some beam of its request, each with a partial block of its own."""

    def make(subject: Subject) -> Operation:
        rows = Rows(subject, num_requests * BEAMS, take_turns=True)
        first = np.repeat(np.arange(rows.num_rows // BEAMS, dtype=np.int32) * BEAMS, BEAMS)

        def prepare() -> NDArray[np.int32]:
            if rows.steps >= STEPS_MAX:
                rows.start()
            # Each beam writes to its own partial block before it is left or shared.
            rows.step().commit()
            return first + subject.rng.integers(0, BEAMS, len(first), dtype=np.int32)

        def clean(_: Any, moved: Any) -> None:
            places, sequences = moved
            for place, sequence in zip(places.tolist(), sequences, strict=True):
                if sequence is not None:
                    rows.sequences[place] = sequence

        return Operation(lambda parents: rows.batch.reorder(parents, rows.tokens), prepare, clean)

    return make


def pages(num_rows: int) -> Callable[[Subject], Operation]:
    """The form of a step that has each row's blocks one behind the other."""

    def make(subject: Subject) -> Operation:
        pager = subject.batch_pool
        parent = pager.admit(subject.prompt(PAGES_A_ROW * BLOCK_SIZE - 1))
        parent.commit()
        sequences = [parent, *parent.fork(num_rows // subject.settings.rows_divisor - 1)]
        batch = pager.batch(len(sequences), PAGES_A_ROW)
        for sequence in sequences:
            sequence.append(1)
            batch.add(sequence)
        pager.take_copies()
        step = batch.step()
        for sequence in sequences:
            sequence.release()
        return Operation(lambda _: step.pages())

    return make
