"""What the KV memory would hold: kernels and copies in the order of their launches, in a dictionary of slots.

The right content of a position is its namespace and all tokens up to it. A step is launched some time between its plan
and its commit, the steps of a batch in order; what single calls ask for runs when it is asked for, behind everything
launched before. So at any moment it can be said what a block will hold once all that is under way has run:

- a committed position of a running sequence, and every indexed block, holds its right content, now and then (I3, I4);
- a step reads only right content: whatever lies below the positions that it plans;
- the copies of a step are order-free, and no two rows write to one slot.

Only the reference is looked at, from inside: it is compared with the core elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

PLACEHOLDER = -1


@dataclass(eq=False)
class Launch:
    """One open step, as the worker sees it, and what the model will have sampled by its commit."""

    step: Any
    rows: dict[int, Any]  # row -> record at the plan, and no handle: that would keep it from being dropped
    spans: dict[int, range]
    slots: list[int]
    next_tokens: list[int]
    num_accepted: list[int]
    launched: bool = False
    void: set[int] = field(default_factory=set)

    def look(self) -> None:
        """A row is void once its sequence was seen to be gone, or shorter than the row's end."""
        for row, record in self.rows.items():
            if record.state != "running" or len(record.tokens) < self.spans[row].stop:
                self.void.add(row)


class Stream:
    """The one stream of one device."""

    def __init__(self, pager: Any, draw: random.Random) -> None:
        self.pager = pager
        self.draw = draw
        self.kv: dict[int, Any] = {}
        self.open: list[Launch] = []
        self.sampled: dict[tuple[int, int], int] = {}

    # What the scheduler tells.

    def plan(self, batch: Any, step: Any, sequences: list[Any], num_drafts: list[int], values: list[int]) -> Launch:
        """A step was planned. What it will sample is drawn now and known to nobody until it is launched."""
        starts, positions = step.query_start_loc.tolist(), step.positions.tolist()
        rows, spans = {}, {}
        for sequence in sequences:
            row = batch.row_of(sequence)
            if row is not None and starts[row] < starts[row + 1]:
                rows[row] = sequence._record
                first, last = positions[starts[row]], positions[starts[row + 1] - 1]
                spans[row] = range(first, last + 1)
                assert positions[starts[row] : starts[row + 1]] == list(spans[row])
                assert step.seq_lens[row] == last + 1 == sequence.num_planned
        launch = Launch(
            step,
            rows,
            spans,
            step.slot_mapping.tolist(),
            next_tokens=[self.draw.choice(values) for _ in range(step.num_rows)],
            num_accepted=[self.draw.randint(0, drafts) for drafts in num_drafts],
        )
        assert len(set(launch.slots)) == len(launch.slots), "two rows write to one slot"
        assert not set(step.copies[:, 0].tolist()) & set(step.copies[:, 1].tolist()), "copies that need an order"
        for row, span in spans.items():
            self.sampled[rows[row].id, span.stop] = launch.next_tokens[row]
        self.open.append(launch)
        return launch

    def commit(self, launch: Launch, applied: list[bool]) -> None:
        """The oldest step of its batch was committed, and these rows were still meant."""
        self.open.remove(launch)
        assert launch.launched
        launch.void |= {row for row, record in launch.rows.items() if record.state != "running"}
        assert {row for row, is_applied in enumerate(applied) if is_applied} == set(launch.rows) - launch.void

    def launch(self, last: Launch | None = None) -> None:
        """Launch the steps up to this one, or all."""
        for each in self.open:
            if not each.launched:
                self._run(self.kv, each, check=True)
                each.launched = True
            if each is last:
                return

    def copy(self, pairs: list[list[int]]) -> None:
        """Copies that a single call asked for."""
        self._copy(self.kv, pairs)

    def write(self, sequence: Any, start: int, slots: list[int]) -> None:
        """A kernel for one sequence alone, behind all that is launched."""
        for number, slot in enumerate(slots):
            self.kv[slot] = self.right(sequence._record, start + number)

    def computed(self, sequence: Any) -> int:
        """Up to where the sequence's KV is there, written by itself, by a parent or by a step that is over."""
        kv, record = self._after(launches=False), sequence._record
        busy = {slot for launch in self.open for slot in launch.slots}
        slots = self._slots(record)
        end = record.num_committed
        while end < min(len(slots), record.num_known) and slots[end] not in busy:
            if kv.get(slots[end]) != self.right(record, end):
                break
            end += 1
        return int(end)

    # What must hold after every call.

    def look(self) -> None:
        """See which rows are void by now. Every call that may cut a sequence is followed by a look."""
        for launch in self.open:
            launch.look()

    def check(self) -> None:
        self.look()
        for launches in (False, True):
            kv = self._after(launches)
            for record in self.pager._records.values():
                slots = self._slots(record)
                for position in range(self._written(record, launches)):
                    found, right = kv.get(slots[position]), self.right(record, position)
                    assert found == right, f"sequence {record.id} at {position}: {found}, not {right}"
            self._check_index(kv)

    def _written(self, record: Any, launches: bool) -> int:
        """So many positions of a sequence are to be right in the device's memory, now or once all is launched."""
        if record.state in ("running", "swapping_out"):
            return int(record.num_planned if launches else record.num_committed)
        return len(record.path) * int(self.pager.block_size)

    def _check_index(self, kv: dict[int, Any], index: Any = None) -> None:
        size = self.pager.block_size
        for node in (index or self.pager._index).nodes():
            path, top = [node], node
            while top.above is not None:
                top = top.above
                path.append(top)
            tokens = tuple(token for each in reversed(path) for token in each.tokens)
            for offset in range(size):
                right = top.parent.namespace, tokens[: len(tokens) - size + offset + 1]
                found = kv.get(node.block * size + offset)
                assert found == right, f"indexed block {node.block}, offset {offset}: {found}, not {right}"

    # How things run.

    def right(self, record: Any, position: int) -> tuple[Any, tuple[int, ...]]:
        """What a position is to hold; a token that is not known yet is the one that its step samples."""
        tokens = enumerate(record.tokens[: position + 1])
        known = (self.sampled[record.id, number] if token == PLACEHOLDER else token for number, token in tokens)
        return record.namespace, tuple(known)

    def _slots(self, record: Any) -> list[int]:
        size = self.pager.block_size
        return [block * size + offset for block in record.table for offset in range(size)]

    def _after(self, launches: bool) -> dict[int, Any]:
        """The memory once all that waits has run; or only the copies of it, should the steps never be launched."""
        kv = dict(self.kv)
        for each in self.open:
            if not each.launched and launches:
                self._run(kv, each, check=False)
            elif not each.launched:
                self._copy(kv, each.step.copies.tolist())
        self._copy(kv, [[source, target] for target, source in self.pager._pool.copies.items()])
        return kv

    def _run(self, kv: dict[int, Any], launch: Launch, check: bool) -> None:
        step = launch.step
        self._copy(kv, step.copies.tolist())
        size, starts = self.pager.block_size, step.query_start_loc.tolist()
        written = {}
        for row, span in launch.spans.items():
            record = launch.rows[row]
            void = row in launch.void
            table = step.block_tables[row].tolist()
            for position in () if void or not check else range(span.start):
                slot = table[position // size] * size + position % size
                right = self.right(record, position)
                assert kv.get(slot) == right, f"step {step.id} reads {kv.get(slot)} for {record.id}, not {right}"
            for position, slot in zip(span, launch.slots[starts[row] : starts[row + 1]], strict=True):
                assert slot == table[position // size] * size + position % size
                written[slot] = ("garbage", step.id) if void else self.right(record, position)
        kv.update(written)

    def _copy(self, kv: dict[int, Any], pairs: list[list[int]]) -> None:
        size = self.pager.block_size
        held = {slot: kv.get(slot) for source, _ in pairs for slot in range(source * size, source * size + size)}
        for source, target in pairs:
            for offset in range(size):
                kv[target * size + offset] = held[source * size + offset]
