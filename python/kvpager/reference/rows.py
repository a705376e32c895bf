"""What the pager knows of one batch: which sequence is in which row, and which steps are open.

A step names records, not rows: a record may move to another row, or leave the batch, while a step is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .pool import Copy, Pool
from .record import PLACEHOLDER, Record


@dataclass(slots=True, eq=False)
class OpenRow:
    """The positions ``start..stop`` of one sequence, which one step is to write."""

    record: Record
    start: int
    stop: int
    num_drafts: int
    length_before: int
    entries_before: int
    entries_after: int
    copies: list[tuple[Copy, int]] = field(default_factory=list)  # each with its table entry
    void: bool = False


@dataclass(slots=True)
class Arrays:
    """What the kernels of one step read."""

    block_tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    copies: npt.NDArray[np.int32]
    updates: npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class OpenStep:
    """One step: for each row of the batch its positions, or None where the row is left out."""

    id: int
    launch: int  # counts what the pager handed out, over all its batches
    rows: list[OpenRow | None]
    queued: list[Copy]
    state: str = "open"
    arrays: Arrays = field(init=False)

    def copies(self) -> list[Copy]:
        """All copies of the step, in order: those it found in the queue, then those of its own rows."""
        return [*self.queued, *(copy for row in self.rows if row is not None for copy, _ in row.copies)]

    def commit(self, pool: Pool, next_tokens: list[int], num_accepted: list[int] | None) -> list[bool]:
        """The KV is written: which rows that still concerns."""
        self.state = "committed"
        applied = [row is not None and not row.void for row in self.rows]
        for number, row in enumerate(self.rows):
            if row is None or row.void:
                continue
            record, end = row.record, row.stop
            record.open_rows.remove(row)
            if num_accepted is not None:
                end -= row.num_drafts - num_accepted[number]
            if end < row.stop:
                record.truncate(pool, end)
            # The token comes before the commit: it may go on with a run of content tokens.
            if next_tokens[number] != PLACEHOLDER:
                record.learn(end, next_tokens[number])
            record.commit(pool, end)
        pool.finish_copies(self.copies())
        return applied

    def cancel(self, pool: Pool) -> None:
        """The step was never launched: row by row, last first, everything as it was before."""
        self.state = "cancelled"
        for row in reversed(self.rows):
            if row is None:
                continue
            if not row.void:
                row.record.unplan(pool, row)
            for copy, entry in reversed(row.copies):
                if not pool.take_back(copy):
                    continue
                if not row.void and row.record.table[entry] == copy.target and not pool.shared(copy.target):
                    row.record.put_back(pool, entry, copy.source)
                    pool.let_go_of([copy.source])
                else:
                    pool.requeue(copy)
        for copy in reversed(self.queued):
            if pool.take_back(copy):
                pool.requeue(copy)


def given_copies(batches: list[Rows]) -> list[Copy]:
    """The copies of all open steps, which hold their sources."""
    return [copy for rows in batches for step in rows.steps for copy in step.copies()]


class Rows:
    """One batch."""

    def __init__(
        self,
        number: int,
        *,
        max_seqs: int,
        max_blocks: int,
        max_tokens: int,
        buffers: int,
        pad_block: int,
        pad_seq_len: int,
    ) -> None:
        self.number = number
        self.max_seqs = max_seqs
        self.max_blocks = max_blocks
        self.max_tokens = max_tokens
        self.buffers = buffers
        self.pad_block = pad_block
        self.pad_seq_len = pad_seq_len
        self.records: list[Record | None] = []  # by row, up to the last one in use
        self.steps: list[OpenStep] = []  # the open ones, oldest first
        self.next_step = 0
        self.device: dict[tuple[int, int], int] = {}  # what a table has that all updates were applied to

    def __len__(self) -> int:
        return sum(record is not None for record in self.records)

    def enter(self, record: Record) -> int:
        """Give a sequence the lowest empty row."""
        if None not in self.records:
            self.records.append(None)
        row = self.records.index(None)
        self.records[row] = record
        record.home = self
        return row

    def leave(self, record: Record) -> int:
        """Empty the row of a sequence."""
        row = self.records.index(record)
        self.records[row] = None
        record.home = None
        while self.records and self.records[-1] is None:
            self.records.pop()
        return row

    def condense(self) -> list[tuple[int, int]]:
        """Move the last sequences into the empty rows."""
        moves = []
        while None in self.records:
            target, source = self.records.index(None), len(self.records) - 1
            self.records[target] = self.records.pop()
            moves.append((source, target))
            while self.records and self.records[-1] is None:
                self.records.pop()
        return moves

    def open(self, pool: Pool, step: OpenStep) -> None:
        """The step is open from now on."""
        self.steps.append(step)
        pool.open_launches.add(step.launch)

    def close(self, pool: Pool, step: OpenStep) -> OpenStep:
        """The step is about to be committed or cancelled: it fences nothing any more."""
        self.steps.remove(step)
        pool.open_launches.remove(step.launch)
        return step

    def end(self, pool: Pool) -> None:
        """The batch was dropped."""
        while self.steps:
            self.close(pool, self.steps[-1]).cancel(pool)
        for record in self.records:
            if record is not None:
                record.home = None
        self.records = []
