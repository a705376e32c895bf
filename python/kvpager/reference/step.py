"""The handle of one step of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

import numpy as np
import numpy.typing as npt

from ..errors import StepError
from ..types import Tokens
from .inputs import as_numbers
from .record import PLACEHOLDER
from .rows import Arrays, OpenRow, OpenStep

if TYPE_CHECKING:
    from .batch import Batch


@final
class Step:
    """What one kernel launch is to read and write. Made by ``Batch.step``; it ends by ``commit`` or ``cancel``."""

    __slots__ = ("_batch", "_step")

    _batch: Batch
    _step: OpenStep

    def __init__(self) -> None:
        raise TypeError("a Step comes from Batch.step()")

    @classmethod
    def _make(cls, batch: Batch, step: OpenStep) -> Step:
        handle = object.__new__(cls)
        handle._batch = batch
        handle._step = step
        return handle

    # What a step always answers.

    @property
    def id(self) -> int:
        """Counts the steps of the batch; a cancelled step's id is used again."""
        return self._step.id

    @property
    def buffer(self) -> int:
        """Which of the batch's buffers holds the arrays."""
        return self._step.id % self._batch.buffers

    @property
    def state(self) -> str:
        """``"open"``, ``"committed"`` or ``"cancelled"``."""
        return self._step.state

    @property
    def num_rows(self) -> int:
        """Rows of the batch when the step was planned."""
        return len(self._step.rows)

    @property
    def num_tokens(self) -> int:
        """Positions that the step writes."""
        return sum(row.stop - row.start for row in self._step.rows if row is not None)

    def __repr__(self) -> str:
        return (
            f"<kvpager.reference.Step {self.id}: {self.state}, {self.num_tokens} tokens in {self.num_rows} rows,"
            f" buffer {self.buffer}>"
        )

    # The arrays of an open step.

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """One row a sequence, padded."""
        return self._arrays("block_tables").block_tables

    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """The planned end of each row."""
        return self._arrays("seq_lens").seq_lens

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Where the KV of each planned position goes."""
        return self._arrays("slot_mapping").slot_mapping

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """The planned positions, rows in order."""
        return self._arrays("positions").positions

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """Where each row's positions begin among all."""
        return self._arrays("query_start_loc").query_start_loc

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """The copies to run before the kernel, (source, target) a row, in any order."""
        return self._arrays("copies").copies

    @property
    def updates(self) -> npt.NDArray[np.int32]:
        """What brings a table up to date that had all earlier updates: (row, column, block)."""
        return self._arrays("updates").updates

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The tokens of the planned positions as they are known now; -1 where one is not, and in void rows."""
        self._arrays("token_ids")
        rows = [row for row in self._step.rows if row is not None]
        return np.array([token for row in rows for token in _tokens(row)], dtype=np.int32)

    # What other kernels read.

    def pages(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Each row's blocks, one behind the other: where rows start, the blocks, tokens in each row's last."""
        size = self._batch._pager.block_size
        tables = [table[: -(-length // size)] for length, table in self._rows()]
        last = [(length - 1) % size + 1 if length > 0 else 0 for length, _ in self._rows()]
        return _starts(tables), _flat(tables), np.array(last, dtype=np.int32)

    def slots(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The slot of each position of each row, one behind the other: where rows start, the slots."""
        slots = self._slots()
        return _starts(slots), _flat(slots)

    def token_table(self) -> npt.NDArray[np.int32]:
        """The slot of each position of each row, 0 behind a row's last."""
        slots = self._slots()
        width = max(map(len, slots), default=0)
        return np.array([row + [0] * (width - len(row)) for row in slots], dtype=np.int32).reshape(-1, width)

    def _rows(self) -> list[tuple[int, list[int]]]:
        arrays = self._arrays("form")
        lengths = [max(0, length) for length in arrays.seq_lens.tolist()]
        return list(zip(lengths, arrays.block_tables.tolist(), strict=True))

    def _slots(self) -> list[list[int]]:
        size = self._batch._pager.block_size
        return [
            [table[position // size] * size + position % size for position in range(length)]
            for length, table in self._rows()
        ]

    # The end.

    def commit(self, next_tokens: Tokens | None = None, num_accepted: Tokens | None = None) -> npt.NDArray[np.bool_]:
        """The KV of this step is written; the token that follows in each row. Answers which rows that concerned."""
        pager, rows = self._batch._pager, self._batch._rows
        pager._drain()
        self._in_order("commit", "oldest", 0)
        following = None if next_tokens is None else as_numbers("next_tokens", next_tokens)
        accepted = None if num_accepted is None else as_numbers("num_accepted", num_accepted)
        for name, values in (("next_tokens", following), ("num_accepted", accepted)):
            if values is not None and len(values) != self.num_rows:
                raise ValueError(f"{name} needs a value for each of the {self.num_rows} rows, not {len(values)}")
        following = following or [PLACEHOLDER] * self.num_rows
        for number, row in enumerate(self._step.rows):
            if row is None or row.void:
                continue
            if accepted is not None and not 0 <= accepted[number] <= row.num_drafts:
                raise ValueError(f"num_accepted must be 0..{row.num_drafts} for row {number}, not {accepted[number]}")
            tokens = row.record.tokens
            if following[number] == PLACEHOLDER and row.stop < len(tokens) and tokens[row.stop] == PLACEHOLDER:
                raise ValueError(f"row {number} needs a next token: a later step has a placeholder for it")
        rows.close(pager._pool, self._step)
        pager._last_launched = max(pager._last_launched, self._step.launch)
        applied = self._step.commit(pager._pool, following, accepted)
        return np.array(applied, dtype=np.bool_)

    def cancel(self) -> None:
        """The step was never launched: take it back."""
        pager, rows = self._batch._pager, self._batch._rows
        pager._drain()
        self._in_order("cancel", "newest", -1)
        if pager._last_given() > self._step.launch:
            raise StepError(
                f"cancel refused: since step {self.id} was planned, another batch has planned a step or take_copies has"
                " handed out copies, which may read what the copies of this one bring"
            )
        rows.next_step -= 1
        rows.close(pager._pool, self._step).cancel(pager._pool)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Step is a handle into one pager and cannot be copied or pickled")

    # Helpers.

    def _arrays(self, name: str) -> Arrays:
        if self.state != "open":
            raise StepError(
                f"{name} refused: step {self.id} is {self.state}, and its buffer may hold another step by now"
            )
        return self._step.arrays

    def _in_order(self, call: str, which: str, place: int) -> None:
        if self.state != "open":
            raise StepError(f"{call} refused: step {self.id} is {self.state}")
        steps = self._batch._rows.steps
        if steps[place] is not self._step:
            raise StepError(f"{call} refused: step {self.id} is not the {which} open one, which is {steps[place].id}")


def _tokens(row: OpenRow) -> list[int]:
    return [PLACEHOLDER] * (row.stop - row.start) if row.void else row.record.tokens[row.start : row.stop]


def _starts(rows: list[list[int]]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def _flat(rows: list[list[int]]) -> npt.NDArray[np.int32]:
    return np.array([value for row in rows for value in row], dtype=np.int32)
