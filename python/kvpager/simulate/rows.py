"""The requests that an engine knows: as policies see them, and those that run as columns, one entry a row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .. import Sequence
from ..cost import Work
from .load import Texts, Tokens


@dataclass(eq=False, slots=True)
class Request:
    """One request, as a policy may see it. What comes after `row` is the engine's own."""

    index: int
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    """What its answer may have at most: the true length, unless the load has a limit of its own."""
    sequence: Sequence | None = None
    """None before it was let in for the first time."""
    num_preemptions: int = 0
    row: int = -1
    """In the batch, -1 while it does not run."""
    answer_tokens: int = 0
    texts: Texts | None = field(default=None, repr=False)
    answer: Tokens | None = field(default=None, repr=False)
    committed: int = 0
    last_token_s: float = np.nan
    made: Tokens | None = field(default=None, repr=False)

    @property
    def prompt(self) -> Tokens:
        """Its tokens. They are made when they are asked for first, and forgotten when it is let in."""
        if self.made is None:
            assert self.texts is not None
            self.made = self.texts.prompt(self.index)
        return self.made

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: what it needs blocks for when it comes in."""
        return self.prompt_tokens if self.sequence is None else len(self.sequence)

    @property
    def num_answered(self) -> int:
        """Tokens of its answer so far."""
        return self.num_tokens - self.prompt_tokens


class Rows:
    """Those who run, by row of the batch. Between steps all that is planned is committed."""

    def __init__(self, max_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.requests: list[Request] = []
        """In the order in which they were let in."""
        self.order: NDArray[np.int64] = np.empty(0, np.int64)
        """Their rows."""
        self.in_row: dict[int, Request] = {}
        self.known = np.zeros(max_rows, np.int64)
        self.planned = np.zeros(max_rows, np.int64)
        self.left = np.zeros(max_rows, np.int64)
        """Tokens of the answer that are to come."""
        self.last_s = np.full(max_rows, np.nan)
        """When the last token came; NaN before the first."""
        self.next_token = np.zeros(max_rows, np.int32)
        self.counts = np.zeros(max_rows, np.int32)
        """Tokens in the step that is being planned; 0 for empty rows."""
        self._entered = np.zeros(max_rows, np.int64)
        self._most_blocks = np.zeros(max_rows, np.int64)
        self._recorded: set[Request] = set()

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, row: int) -> None:
        sequence = request.sequence
        assert sequence is not None
        assert request.texts is not None
        request.row = row
        self.requests.append(request)
        self.order = np.append(self.order, row)
        self.in_row[row] = request
        self.known[row] = self._entered[row] = len(sequence)
        self.planned[row] = sequence.num_planned
        self.left[row] = request.prompt_tokens + request.answer_tokens - len(sequence)
        self.last_s[row] = request.last_token_s
        self.next_token[row] = request.texts.own_token(request.index)
        self._most_blocks[row] = self.most_blocks(request)
        if request.answer is not None:
            self._recorded.add(request)

    def remove(self, request: Request) -> None:
        row = request.row
        self.requests.remove(request)
        self.order = self.order[self.order != row]
        del self.in_row[row]
        self._recorded.discard(request)
        request.last_token_s = float(self.last_s[row])
        request.committed = int(self.planned[row])
        request.row = -1
        self.counts[row] = 0

    def plan_writing(self, max_tokens: int) -> None:
        """A token for each row that writes its answer, the oldest first, as long as there are tokens."""
        writing = self.order[self.known[self.order] - self.planned[self.order] == 1]
        self.counts[:] = 0
        self.counts[writing[:max_tokens]] = 1

    def prompts(self) -> list[int]:
        """The rows that are in their prompts, the oldest first."""
        rows: list[int] = self.order[self.known[self.order] - self.planned[self.order] > 1].tolist()
        return rows

    def work(self, *, writing: bool = False) -> Work:
        """What the planned step does; or only what those do who write."""
        rows = self.order[self.counts[self.order] > 0]
        if writing:
            rows = rows[self.known[rows] - self.planned[rows] == 1]
        counts, starts = self.counts[rows], self.planned[rows]
        ends = starts + counts
        # A chunk of n tokens that ends at e looks at e - n + 1, ..., e tokens.
        pairs = int((counts * (starts + ends + 1)).sum()) // 2
        return Work(int(counts.sum()), pairs, int(ends.sum()))

    def plan_one_each(self) -> bool:
        """One token for each row; False if some row is not writing its answer."""
        if not (self.known[self.order] - self.planned[self.order] == 1).all():
            return False
        self.counts[:] = 0
        self.counts[self.order] = 1
        return True

    def advance(self, now_s: float) -> None:
        """Every row computed its one token, and has one more."""
        self.planned += self.counts
        self.known += self.counts
        self.left -= self.counts
        self.last_s[self.order] = now_s

    def recall(self) -> None:
        """Look up the next token of the answers that the load knows."""
        for request in self._recorded:
            assert request.answer is not None
            self.next_token[request.row] = request.answer[self.known[request.row] - request.prompt_tokens]

    def most_blocks(self, request: Request) -> int:
        """Blocks that a request holds in the end, if its answer gets as long as it may."""
        return -(-(request.prompt_tokens + request.max_tokens - 1) // self.block_size)

    def promised_blocks(self) -> int:
        """Blocks that all will take beyond this step, if each answer gets as long as it may."""
        rows = self.order
        tokens = np.maximum(self.planned[rows] + self.counts[rows], self._entered[rows])
        return int((self._most_blocks[rows] - -(-tokens // self.block_size)).sum())
