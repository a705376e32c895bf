"""A server's inner loop around a pager, a batch and the device, which compares everything with contiguous KV.

The device runs what is launched in order. With ``late`` it runs a step when that is committed and not earlier, so that
whatever the host does between plan and commit happens before the kernel reads the step's arrays.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpager

from .contiguous import Truth, choose
from .device import PLACEHOLDER, Device, Row
from .llama import Floats, Llama

MODEL = Llama(seed=0)
TRUTH = Truth(MODEL)
TRUTHS = {np.dtype(np.float32): TRUTH, np.dtype(np.float16): Truth(MODEL, np.float16)}


@dataclass(eq=False)
class Planned(Row):
    """A row of an open step."""

    number: int
    sequence: Any
    num_drafts: int
    end_is_known: bool  # there is a token behind the last planned one
    sources: dict[int, Planned]  # where the tokens of placeholders come from, by position
    # What the device samples: behind the planned end, and behind the accepted drafts.
    following: int = PLACEHOLDER
    next_token: int = PLACEHOLDER
    num_accepted: int = 0
    # Its sequence was released, preempted or cut to fewer tokens since: what is computed is thrown away.
    is_void: bool = False


@dataclass(eq=False)
class Launch:
    """An open step."""

    step: Any
    rows: list[Planned]
    copies: npt.NDArray[np.int32]
    is_launched: bool = False
    has_copied: bool = False
    has_run: bool = False


class Engine:
    """Everything that a server has but clients.

    Sequences are called by whoever uses the engine. Where an open step names one, ``settle`` has to see each preempt
    and each cut before the sequence is made longer again.
    """

    ON_DEVICE: tuple[str, ...] = ("running",)
    """States in which what is committed is on the device."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        *,
        max_seqs: int = 8,
        buffers: int = 2,
        batches: int = 1,
        late: bool = False,
        mirror: bool = False,
        pager: Callable[..., Any] = kvpager.Pager,
        dtype: npt.DTypeLike = np.float32,
        **options: Any,
    ) -> None:
        self.pager = pager(num_blocks, block_size, **options)
        self.block_size = block_size
        self.device = Device(MODEL, num_blocks, block_size, dtype)
        self.truth = TRUTHS[np.dtype(dtype)]
        self.batches = [self.pager.batch(max_seqs, num_blocks, 256, buffers=buffers) for _ in range(batches)]
        self.batch = self.batches[0]  # the one that calls are about; steps of all are launched in the order of plans
        self.late = late
        # Tables that live on the device and see nothing but the updates of the steps.
        self.mirrors = [np.full((max_seqs, num_blocks), -99, np.int32) for _ in self.batches if mirror]
        self.sequences: list[Any] = []
        self.open: deque[Launch] = deque()
        self.stream: deque[Launch | Callable[[], None]] = deque()
        self.free: set[int] = set(range(num_blocks))
        self.ranks: dict[int, int] = {}

    # Sequences.

    def admit(self, prompt: Any, *, rank: int = 0, into_batch: bool = True, **how: Any) -> Any:
        """A new sequence in a row of the batch. Its first sampled token will be the rank-th best."""
        sequence = self.pager.admit(prompt, **how)
        if into_batch:
            self.batch.add(sequence)
        return self.adopt(sequence, rank)

    def adopt(self, sequence: Any, rank: int = 0) -> Any:
        """A sequence that came from elsewhere, a fork say."""
        self.sequences.append(sequence)
        self.ranks[sequence.id] = rank
        return sequence

    # Steps of the batch.

    def step(self, num_tokens: Any = 1, tokens: Any = None, **how: Any) -> list[bool]:
        """Plan, run and commit: the synchronous loop."""
        self.plan(num_tokens, tokens)
        return self.commit(**how)

    def plan(self, num_tokens: Any = 1, tokens: Any = None, *, launch: bool = True) -> Launch:
        """Plan a step and launch it, unless it is to be cancelled.

        ``num_tokens`` may also be a dictionary: positions of the sequences that take part.
        """
        self.settle()
        if isinstance(num_tokens, dict):
            num_tokens = self.counts(num_tokens)
        self.launch()
        in_row = {self.batch.row_of(each): each for each in self.sequences if each.state == "running"}
        lengths = {number: len(each) for number, each in in_row.items()}
        step = self.batch.step(num_tokens, tokens)
        rows = [
            self.planned(step, number, in_row.get(number), lengths.get(number, 0)) for number in range(step.num_rows)
        ]
        if self.mirrors:
            self.stream.append(self.patch(step.updates))
        planned = Launch(step, [row for row in rows if row is not None], step.copies)
        self.open.append(planned)
        self.stream.append(planned)
        if launch:
            self.launch()
        self.settle()
        return planned

    def planned(self, step: Any, number: int, sequence: Any, length: int) -> Planned | None:
        """What a step says of one row, in which a sequence had this length; None if it leaves the row out."""
        span = slice(*step.query_start_loc[number : number + 2].tolist())
        positions = step.positions[span].tolist()
        if sequence is None:
            assert (step.seq_lens[number], positions) == (0, []), "an empty row is planned"
            return None
        table = sequence.block_ids
        assert step.seq_lens[number] == sequence.num_planned
        assert step.block_tables[number, : len(table)].tolist() == table.tolist(), "the step shows another table"
        if not positions:
            return None
        start, stop, known = positions[0], sequence.num_planned, sequence.tokens.tolist()
        assert positions == list(range(start, stop))
        assert step.token_ids[span].tolist() == known[start:stop]
        new = known[max(start, length) : stop]
        return Planned(
            tokens=known[:stop],
            start=start,
            stop=stop,
            table=(self.mirror if self.mirrors else step.block_tables)[number],
            number=number,
            sequence=sequence,
            num_drafts=len(new) - new.count(PLACEHOLDER),
            end_is_known=len(known) > stop,
            sources={place: self.source(sequence, place) for place in range(stop) if known[place] == PLACEHOLDER},
        )

    def counts(self, of: dict[Any, int]) -> list[int]:
        """A number for each row, from one for each sequence."""
        counts = [0] * self.batch.num_rows
        for sequence, count in of.items():
            counts[self.batch.row_of(sequence)] = count
        return counts

    def names(self, sequence: Any) -> bool:
        """Whether an open step names the sequence."""
        return any(row.sequence is sequence and not row.is_void for each in self.open for row in each.rows)

    def launch(self) -> None:
        """Launch whatever is planned: the device may run it from now on."""
        for each in self.open:
            each.is_launched = True

    def source(self, sequence: Any, position: int) -> Planned:
        """The row whose sampled token belongs to a placeholder: of the same sequence, and ending there."""
        rows = [row for each in self.open for row in each.rows if row.sequence is sequence and row.stop == position]
        return rows[-1]

    @property
    def mirror(self) -> npt.NDArray[np.int32]:
        """The table on the device of the batch."""
        return self.mirrors[self.batches.index(self.batch)]

    @property
    def num_open(self) -> int:
        """Open steps of the batch."""
        return len(self.batch.open_steps)

    def patch(self, updates: npt.NDArray[np.int32]) -> Callable[[], None]:
        mirror = self.mirror

        def apply() -> None:
            mirror[updates[:, 0], updates[:, 1]] = updates[:, 2]

        return apply

    def commit(self, *, sampled: bool = True) -> list[bool]:
        """Commit the oldest step; without its sampled tokens it is only said that the KV is there."""
        launch = self.open[0]
        launch.is_launched = True
        self.synchronise(launch)
        self.settle()
        following, accepted = (np.full(launch.step.num_rows, value) for value in (PLACEHOLDER, 0))
        expected = {}
        for row in launch.rows:
            following[row.number], accepted[row.number] = row.next_token, row.num_accepted
            if not row.is_void:
                known, end = row.sequence.tokens.tolist(), row.stop - row.num_drafts + row.num_accepted
                expected[row] = row.tokens[:end]
                if end == row.stop and len(known) > end and known[end] != PLACEHOLDER:
                    expected[row].append(known[end])  # inside the prompt
                elif sampled:
                    expected[row].append(row.next_token)
        self.open.popleft()
        applied: list[bool] = launch.step.commit(following if sampled else None, accepted).tolist()
        assert [number for number, each in enumerate(applied) if each] == [row.number for row in expected]
        for row, tokens in expected.items():
            assert row.sequence.num_committed == row.stop - row.num_drafts + row.num_accepted
            assert row.sequence.tokens.tolist()[: len(tokens)] == tokens
        self.settle()
        return applied

    def finish_steps(self) -> None:
        """Commit whatever is open."""
        while self.open:
            self.commit()

    def cancel(self) -> None:
        """Take the newest step back, which was not launched."""
        launch = self.open.pop()
        assert not launch.is_launched
        self.stream.remove(launch)
        launch.step.cancel()
        self.settle()

    # A sequence alone, by single calls.

    def compute(self, sequence: Any, stop: int | None = None) -> int:
        """Prefill or decode up to ``stop`` behind everything launched; the token that is best behind it."""
        self.settle()
        self.launch()
        start, stop = sequence.num_planned, len(sequence) if stop is None else stop
        slots = sequence.slots(start, stop)
        copies = self.pager.take_copies()
        row = Row(sequence.tokens.tolist()[:stop], start, stop, sequence.block_ids)
        self.synchronise()
        self.device.copy(copies)
        self.compare([row], self.device.launch([row], slots))
        sequence.commit(stop)
        self.settle()
        return choose(self.truth.of(row.tokens).logits[stop - 1])

    # The device's side.

    def run(self, launch: Launch) -> None:
        """The kernels of one step, as the device sees them when their turn comes."""
        self.copy(launch)
        self.forward(launch)

    def copy(self, launch: Launch) -> None:
        """What is copied on write, before anything is written: its source may be written by the same step."""
        self.device.copy(launch.copies)
        launch.has_copied = True

    def forward(self, launch: Launch) -> None:
        for row in launch.rows:
            for position, source in row.sources.items():
                row.tokens[position] = source.following
        rows: list[Row] = [*launch.rows]
        if rows:
            self.compare(rows, self.device.launch(rows, launch.step.slot_mapping))
        for row in launch.rows:
            self.sample(row)
        launch.has_run = True

    def sample(self, row: Planned) -> None:
        """Accept the drafts that are what would have been sampled, then sample the next token."""
        logits, end = self.truth.of(row.tokens).logits, row.stop - row.num_drafts
        while end < row.stop and choose(logits[end - 1]) == row.tokens[end]:
            end += 1
        row.num_accepted = end - row.stop + row.num_drafts
        # Inside a prompt nobody needs it, unless the sequence is cut to just that length before the commit.
        rank = 0 if row.end_is_known else self.ranks.pop(row.sequence.id, 0)
        row.next_token, row.following = choose(logits[end - 1], rank), choose(logits[row.stop - 1], rank)

    def compare(self, rows: list[Row], logits: list[Floats]) -> None:
        """K and V through the tables just used, then logits."""
        for row, found in zip(rows, logits, strict=True):
            self.compare_kv(row.table, row.tokens)
            assert np.array_equal(found, self.truth.of(row.tokens).logits[row.start : row.stop]), (
                "equal KV, other logits"
            )

    def compare_kv(self, table: npt.NDArray[np.int32], tokens: list[int]) -> None:
        """What the table leads to, against contiguous KV of the same tokens, bit for bit."""
        right, stop = self.truth.of(tokens), len(tokens)
        for name, found, expected in zip(
            "KV", self.device.gather(table, stop), (right.keys[:, :stop], right.values[:, :stop]), strict=True
        ):
            if not np.array_equal(found, expected):
                wrong = np.argwhere((found != expected).any(axis=(2, 3)))
                layer, position = wrong[0].tolist()
                block = int(table[position // self.block_size])
                what = "nothing" if np.isnan(found[layer, position]).any() else "something else"
                raise AssertionError(
                    f"{name} of layer {layer}, position {position}: {what} in block {block};"
                    f" wrong positions: {sorted({each for _, each in wrong.tolist()})}"
                )

    def synchronise(self, launch: Launch | None = None) -> None:
        """Run what waits on the stream, up to a launch or all. A step that is not launched holds up what is behind."""
        while self.stream and not (launch is not None and launch.has_run):
            work = self.stream[0]
            if isinstance(work, Launch):
                if not work.is_launched:
                    break
                self.run(work)
            else:
                work()
            self.stream.popleft()

    # Between any two calls.

    def settle(self) -> None:
        """Poison what was freed, see which rows are void, and compare the committed KV of every running sequence."""
        drawing = self.pager.dump(full=True)
        free = numbers(line(drawing, "free: "))
        if freed := free - self.free:
            self.stream.append(self.poison(freed))
        self.free = free
        for row in (row for each in self.open for row in each.rows):
            row.is_void |= row.sequence.state != "running" or len(row.sequence) < row.stop
        if not self.late:
            self.synchronise()
        self.sequences = [each for each in self.sequences if each.state != "released"]
        self.compare_committed(drawing)
        assert self.pager.check() == []

    def poison(self, freed: set[int]) -> Callable[[], None]:
        return lambda: self.device.poison(freed)

    def compare_committed(self, drawing: str) -> None:
        """The committed KV of every sequence that has any on the device."""
        # Where copies are still to be made, their source is what counts: those of steps in their order, then the queue.
        sources: dict[int, int] = {}
        queued = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)->(\d+)", line(drawing, "copies: "))]
        for pairs in [*(each.copies.tolist() for each in self.open if not each.has_copied), queued]:
            sources.update({target: sources.get(source, source) for source, target in pairs})
        for sequence in self.sequences:
            if sequence.state in self.ON_DEVICE and (stop := sequence.num_committed):
                table = np.array([sources.get(block, block) for block in sequence.block_ids.tolist()])
                if self.is_written(table[: -(-stop // self.block_size)]):
                    self.compare_kv(table, sequence.tokens.tolist()[:stop])

    def is_written(self, table: npt.NDArray[Any]) -> bool:
        """Whether what is committed in these blocks is there by now: always, where commit comes after the kernel."""
        return True

    def finish(self) -> None:
        """End everything; nothing may be left behind."""
        self.finish_steps()
        for sequence in self.sequences:
            sequence.release()
        self.settle()
        self.pager.take_copies()
        stats = self.pager.stats()
        assert stats.running_sequences == stats.preempted_sequences == stats.active_blocks == 0
        assert stats.free_blocks + stats.cached_blocks + stats.reserved_blocks == stats.total_blocks
        assert self.pager.check() == []


def line(drawing: str, start: str) -> str:
    """What follows these words in the drawing of a pager."""
    return re.search(f"^{start}(.*)$", drawing, flags=re.MULTILINE)[1]  # type: ignore[index]


def numbers(ranges: str) -> set[int]:
    """``"3-5 9"`` as numbers."""
    spans = [each.split("-") for each in ranges.split() if each != "-"]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
