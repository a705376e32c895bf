"""The handle of one batch: rows of running sequences that are stepped together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, SupportsIndex, final

import numpy as np
import numpy.typing as npt

from ..errors import OutOfBlocks, StaleHandle, StepError
from ..types import Tokens
from .inputs import as_counts, as_numbers, as_position, as_tokens, shown
from .pool import Copy
from .record import PLACEHOLDER, Record, num_blocks
from .rows import Arrays, OpenRow, OpenStep, Rows
from .sequence import FORK_MAX, Sequence
from .step import Step

if TYPE_CHECKING:
    from .pager import Pager


@dataclass(slots=True)
class Want:
    """The positions ``start..stop`` that a step or a reservation wants in one row, and the tokens it adds."""

    row: int
    record: Record
    start: int
    stop: int
    tokens: list[int]

    @property
    def num_new(self) -> int:
        """Positions past the end of the sequence."""
        return max(0, self.stop - len(self.record.tokens))


@final
class Batch:
    """Rows of running sequences. Made by ``Pager.batch``."""

    __slots__ = ("__weakref__", "_pager", "_rows")

    _pager: Pager
    _rows: Rows

    def __init__(self) -> None:
        raise TypeError("a Batch comes from Pager.batch()")

    @classmethod
    def _make(cls, pager: Pager, rows: Rows) -> Batch:
        handle = object.__new__(cls)
        handle._pager = pager
        handle._rows = rows
        return handle

    # Rows.

    @property
    def max_seqs(self) -> int:
        """How many rows there can be."""
        return self._rows.max_seqs

    @property
    def max_blocks(self) -> int:
        """How many blocks a row can have."""
        return self._rows.max_blocks

    @property
    def max_tokens(self) -> int:
        """How many positions a step can write."""
        return self._rows.max_tokens

    @property
    def buffers(self) -> int:
        """How many steps can be open."""
        return self._rows.buffers

    @property
    def num_rows(self) -> int:
        """The highest row in use, and one."""
        return len(self._rows.records)

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        rows = self._rows
        return (
            f"<kvpager.reference.Batch {rows.number}: {len(rows)} sequences in {self.num_rows} rows,"
            f" {len(rows.steps)} open steps>"
        )

    def add(self, sequence: Sequence) -> int:
        """Put a running sequence into the lowest empty row; that row."""
        self._pager._drain()
        record = _record(sequence)
        if record.state != "running":
            raise StaleHandle(record.id, record.state, "add")
        if sequence._pager is not self._pager:
            raise ValueError(f"add refused: sequence {record.id} belongs to another pager")
        if record.home is not None:
            raise ValueError(f"add refused: sequence {record.id} is in batch {record.home.number} already")
        if record.open_rows and not self._names(record):
            raise ValueError(f"add refused: an open step of another batch names sequence {record.id}")
        if len(record.table) > self.max_blocks:
            raise ValueError(
                f"add refused: sequence {record.id} has {len(record.table)} blocks, max_blocks is {self.max_blocks}"
            )
        if len(self) == self.max_seqs:
            raise ValueError(f"add refused: all {self.max_seqs} rows (max_seqs) are in use")
        return self._rows.enter(record)

    def remove(self, sequence: Sequence) -> int:
        """Empty the row of a sequence; that row."""
        self._pager._drain()
        record = _record(sequence)
        if record.home is not self._rows:
            raise ValueError(f"remove refused: sequence {record.id} is not in this batch")
        return self._rows.leave(record)

    def row_of(self, sequence: Sequence) -> int | None:
        """The row of a sequence, None if it has none here."""
        record = _record(sequence)
        return self._rows.records.index(record) if record.home is self._rows else None

    def condense(self) -> npt.NDArray[np.int32]:
        """Fill the empty rows from the end; the moves, (from, to) a row."""
        self._pager._drain()
        return np.array(self._rows.condense(), dtype=np.int32).reshape(-1, 2)

    def fork(self, rows: Tokens, n: int) -> list[Sequence]:
        """``n`` children of each of these rows, each with a row of its own; all or nothing."""
        self._pager._drain()
        numbers = as_numbers("rows", rows)
        n = as_position("n", n, f"1 to {FORK_MAX}")
        if not 1 <= n <= FORK_MAX:
            raise ValueError(f"n is {shown(n)}; it must be 1 to {FORK_MAX}")
        parents = []
        for position, row in enumerate(numbers):
            if not 0 <= row < self.num_rows or self._rows.records[row] is None:
                raise ValueError(f"fork refused: row {row} is empty")
            if row in numbers[:position]:
                raise ValueError(f"fork refused: row {row} is named twice")
            parents.append(self._rows.records[row])
        empty = self.max_seqs - len(self)
        if len(parents) * n > empty:
            raise ValueError(f"fork refused: {len(parents) * n} children need rows, but {empty} are empty")
        children = []
        for parent in parents:
            if parent is None:
                continue
            for _ in range(n):
                children.append(self._pager._fork(parent))
                self._rows.enter(children[-1]._record)
        return children

    def reorder(
        self, parents: Tokens, tokens: Tokens, rows: Tokens | None = None
    ) -> tuple[npt.NDArray[np.int32], list[Sequence | None]]:
        """Beam i goes on from row ``parents[i]`` with ``tokens[i]``: the row of each beam, and its sequence if new."""
        self._pager._drain()
        origins = as_numbers("parents", parents)
        following = as_numbers("tokens", tokens)
        numbers = None if rows is None else as_numbers("rows", rows)
        if self._rows.steps:
            raise StepError(f"reorder refused: step {self._rows.steps[0].id} is open: commit or cancel it first")
        if len(origins) != len(following):
            raise ValueError(f"reorder needs a token for each of the {len(origins)} parents, not {len(following)}")
        as_tokens(following)  # a beam has a token: -1 stands for none
        members = self._members(numbers)
        for beam, row in enumerate(origins):
            if row not in members:
                raise ValueError(f"reorder refused: the parent of beam {beam} is row {row}, which takes no part")
            record = members[row]
            if record.num_committed < len(record.tokens):
                raise ValueError(
                    f"reorder refused: row {row} has {len(record.tokens)} tokens, {record.num_committed} are committed"
                )
        leaving = [members[row] for row in sorted(members) if row not in origins]
        num_children = len(origins) - len(set(origins))
        empty = self.max_seqs - len(self) + len(leaving)
        if num_children > empty:
            raise ValueError(f"reorder refused: {num_children} children need rows, but {empty} are empty")

        beams: list[Record] = []
        children: list[Sequence | None] = []
        for row in origins:
            parent = members[row]
            child = self._pager._fork(parent) if parent in beams else None
            beams.append(parent if child is None else child._record)
            children.append(child)
        for record in leaving:
            self._pager._release(record)
        for child in children:
            if child is not None:
                self._rows.enter(child._record)
        for record, token in zip(beams, following, strict=True):
            record.tokens.append(token)
        places = [self._rows.records.index(record) for record in beams]
        return np.array(places, dtype=np.int32), children

    # Steps.

    @property
    def open_steps(self) -> list[Step]:
        """The steps that are neither committed nor cancelled, oldest first."""
        return [Step._make(self, step) for step in self._rows.steps]

    def step(self, num_tokens: SupportsIndex | Tokens = 1, tokens: Tokens | None = None) -> Step:
        """Plan the next positions of each row: blocks, slots and tables for one kernel launch; all or nothing."""
        self._pager._drain()
        wants = self._step_wants(num_tokens, tokens)
        lengths = [len(want.record.table) for want in wants]
        copied = self._take(wants)
        queued = self._pager._pool.give_copies()
        num_own = sum(map(len, copied))
        queued, own = queued[: len(queued) - num_own], queued[len(queued) - num_own :]
        planned: list[OpenRow | None] = [None] * self.num_rows
        for want, entries_before, entries in zip(wants, lengths, copied, strict=True):
            record = want.record
            planned[want.row] = row = OpenRow(
                record,
                want.start,
                want.stop,
                num_drafts=sum(token != PLACEHOLDER for token in want.tokens),
                length_before=len(record.tokens),
                entries_before=entries_before,
                entries_after=len(record.table),
                copies=[(own.pop(0), entry) for entry in entries],
            )
            record.tokens.extend(want.tokens)
            record.open_rows.append(row)
        step = OpenStep(self._rows.next_step, self._pager._next_launch(), planned, queued)
        step.arrays = self._arrays(planned, step.copies())
        self._rows.open(self._pager._pool, step)
        self._rows.next_step += 1
        return Step._make(self, step)

    def try_step(self, num_tokens: SupportsIndex | Tokens = 1, tokens: Tokens | None = None) -> Step | None:
        """``step``, or None where that raises OutOfBlocks."""
        try:
            return self.step(num_tokens, tokens)
        except OutOfBlocks:
            return None

    def blocks_needed(self, num_tokens: SupportsIndex | Tokens = 1, tokens: Tokens | None = None) -> int:
        """How many blocks the same ``step`` would take now. Changes nothing."""
        return self._count(self._step_wants(num_tokens, tokens))

    def reserve(self, num_tokens: SupportsIndex | Tokens = 1) -> None:
        """Put the blocks of each row's next positions into its table, without planning them."""
        self._pager._drain()
        wants = self._wants(as_counts("num_tokens", num_tokens))
        self._fit_rows(wants)
        self._take(wants)

    def try_reserve(self, num_tokens: SupportsIndex | Tokens = 1) -> bool:
        """``reserve``, or False where that raises OutOfBlocks."""
        try:
            self.reserve(num_tokens)
        except OutOfBlocks:
            return False
        return True

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Batch is a handle into one pager and cannot be copied or pickled")

    def __del__(self) -> None:
        if hasattr(self, "_rows"):
            # No pager call here: the collector may run in the middle of one.
            self._pager._dropped.append(self._rows)

    def _members(self, rows: list[int] | None) -> dict[int, Record]:
        """The sequences that take part in a reorder, by row."""
        records = self._rows.records
        if rows is None:
            return {row: record for row, record in enumerate(records) if record is not None}
        members: dict[int, Record] = {}
        for row in rows:
            record = records[row] if 0 <= row < len(records) else None
            if record is None:
                raise ValueError(f"reorder refused: row {row} is empty")
            if row in members:
                raise ValueError(f"reorder refused: row {row} is named twice")
            members[row] = record
        return members

    # What a step wants.

    def _wants(self, counts: int | list[int]) -> list[Want]:
        """The positions of each row that is not left out."""
        records = self._rows.records
        if isinstance(counts, int):
            if counts < 0:
                raise ValueError(f"num_tokens must not be negative, but is {counts}")
            counts = [0 if record is None else counts for record in records]
        if len(counts) != len(records):
            raise ValueError(f"num_tokens needs a number for each of the {len(records)} rows, not {len(counts)}")
        wants = []
        for row, (record, count) in enumerate(zip(records, counts, strict=True)):
            if count < 0:
                raise ValueError(f"num_tokens must not be negative, but is {count} for row {row}")
            if count and record is None:
                raise ValueError(f"num_tokens is {count} for row {row}, which is empty")
            if count and record is not None:
                wants.append(Want(row, record, record.num_planned, record.num_planned + count, []))
        return wants

    def _step_wants(self, num_tokens: SupportsIndex | Tokens, tokens: Tokens | None) -> list[Want]:
        """Everything about a step that can be wrong, but the blocks."""
        open_ids = [step.id for step in self._rows.steps]
        if len(open_ids) == self.buffers:
            raise StepError(f"step refused: all {self.buffers} buffers hold open steps ({open_ids}): commit the oldest")
        counts = as_counts("num_tokens", num_tokens)
        given = None if tokens is None else as_numbers("tokens", tokens)
        wants = self._wants(counts)
        num_new = sum(want.num_new for want in wants)
        if given is not None and len(given) != num_new:
            raise ValueError(
                f"tokens needs a value for each of the {num_new} positions past the ends, not {len(given)}"
            )
        for want in wants:
            num_placeholders = want.num_new
            if given is not None:
                want.tokens, given = given[: want.num_new], given[want.num_new :]
                num_placeholders = want.tokens.count(PLACEHOLDER)
            elif want.num_new:
                want.tokens = [PLACEHOLDER]
            if num_placeholders == 0:
                continue
            follows = want.record.open_rows and want.start == len(want.record.tokens)
            if num_placeholders > 1 or not follows or want.tokens[0] != PLACEHOLDER:
                raise ValueError(
                    f"row {want.row} has {len(want.record.tokens)} tokens and cannot plan {want.start}..{want.stop}"
                    f" with {num_placeholders} unknown ones: only the one behind the row's open step may be unknown"
                )
        total = sum(want.stop - want.start for want in wants)
        if total > self.max_tokens:
            raise ValueError(f"the step has {total} tokens, max_tokens is {self.max_tokens}")
        self._fit_rows(wants)
        return wants

    def _fit_rows(self, wants: list[Want]) -> None:
        for want in wants:
            needed = num_blocks(want.stop, self._pager.block_size)
            if needed > self.max_blocks:
                raise ValueError(f"row {want.row} would have {needed} blocks, max_blocks is {self.max_blocks}")

    # Blocks.

    def _needs(self, wants: list[Want], room: int | None = None) -> list[list[int] | None]:
        """The table entries that each row replaces, the rows before it served; None where ``room`` is used up."""
        pool = self._pager._pool
        needs: list[list[int] | None] = []
        left_by: Counter[int] = Counter()  # holders that the rows before leave the block
        for want in wants:
            table = want.record.table
            entries = want.record.entries(pool, want.start, want.stop)
            shared = [entry for entry in entries if pool.shared(table[entry], left_by[table[entry]])]
            if room is not None:
                need = len(shared) + want.record.missing(pool, want.start, want.stop)
                if need > room:
                    needs.append(None)
                    continue
                room -= need
            left_by.update(table[entry] for entry in shared)
            needs.append(shared)
        return needs

    def _count(self, wants: list[Want]) -> int:
        pool = self._pager._pool
        missing = sum(want.record.missing(pool, want.start, want.stop) for want in wants)
        return missing + sum(len(shared or ()) for shared in self._needs(wants))

    def _take(self, wants: list[Want]) -> list[list[int]]:
        """Take all blocks, then exchange them row by row; the entries of each row that are to be copied."""
        pager, pool = self._pager, self._pager._pool
        needed = self._count(wants)
        left_out = [need is None for need in self._needs(wants, pager._room())]
        pager._require(needed, tuple(want.row for want, out in zip(wants, left_out, strict=True) if out))
        fresh = pool.take(needed)
        copied = []
        for want in wants:
            shared = want.record.unwritable(pool, want.start, want.stop)
            need = len(shared) + want.record.missing(pool, want.start, want.stop)
            copied.append(want.record.make_writable(pool, shared, fresh[:need]))
            del fresh[:need]
        return copied

    # What the kernels read.

    def _arrays(self, planned: list[OpenRow | None], copies: list[Copy]) -> Arrays:
        rows, size = self._rows, self._pager.block_size
        block_tables = np.full((self.num_rows, rows.max_blocks), rows.pad_block, dtype=np.int32)
        seq_lens = np.full(self.num_rows, rows.pad_seq_len, dtype=np.int32)
        query_start_loc = [0]
        positions: list[int] = []
        slots: list[int] = []
        updates: list[tuple[int, int, int]] = []
        for number, (record, row) in enumerate(zip(rows.records, planned, strict=True)):
            if record is not None:
                table = record.table[: rows.max_blocks]
                block_tables[number, : len(table)] = table
                seq_lens[number] = record.num_planned
                updates += [
                    (number, column, block)
                    for column, block in enumerate(table)
                    if rows.device.get((number, column)) != block
                ]
            if row is not None:
                positions += range(row.start, row.stop)
                slots += row.record.slots(range(row.start, row.stop), size)
            query_start_loc.append(len(positions))
        rows.device.update(((number, column), block) for number, column, block in updates)
        return Arrays(
            block_tables=block_tables,
            seq_lens=seq_lens,
            slot_mapping=np.array(slots, dtype=np.int64),
            positions=np.array(positions, dtype=np.int32),
            query_start_loc=np.array(query_start_loc, dtype=np.int32),
            copies=np.array([(copy.source, copy.target) for copy in copies], dtype=np.int32).reshape(-1, 2),
            updates=np.array(updates, dtype=np.int32).reshape(-1, 3),
        )

    def _names(self, record: Record) -> bool:
        """Whether the open rows of a record belong to steps of this batch."""
        return any(row is record.open_rows[-1] for step in self._rows.steps for row in step.rows)


def _record(sequence: object) -> Record:
    if not isinstance(sequence, Sequence):
        raise TypeError(f"a batch has rows for sequences of its pager, not for {type(sequence).__name__}")
    return sequence._record
