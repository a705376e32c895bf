"""What the memory of both tiers would hold: a mover beside the stream of kernels that ``stream.py`` keeps.

A mover copies some time between the start of a plan and its end, block by block in any order. Until a block has
arrived, its destination holds garbage; that of a plan which failed or was abandoned goes on holding it; an abandoned
plan writes up to the moment when it is reclaimed. Then, whatever is released, evicted or forgotten meanwhile:

- every indexed block of the host, and every block that a swapped sequence has there, holds its right content;
- no kernel of an open step reads or writes what a plan writes (W11).
"""

from __future__ import annotations

from typing import Any

from stream import Launch, Stream


class TierStream(Stream):
    """The stream, and the memory of the host: a dictionary of slots as well."""

    def __init__(self, pager: Any, draw: Any) -> None:
        super().__init__(pager, draw)
        self.host: dict[int, Any] = {}
        self.left: dict[tuple[int, int], list[int]] = {}  # for each started plan, what is still to be copied
        self.seen: set[tuple[int, int]] = set()

    # What the mover does.

    def start(self, plan: Any) -> None:
        """The plan was started: some blocks are copied now, some later."""
        self._garbage(plan, range(len(plan)))
        self.left[plan.id, plan.generation] = list(range(len(plan)))
        self._move(plan, [number for number in range(len(plan)) if self.draw.random() < 0.4])

    def finish(self, plan: Any, done: list[bool]) -> None:
        """The plan is about to end, with these blocks copied. The others were not, though they may seem to be."""
        left = self.left.pop((plan.id, plan.generation))
        self.left[plan.id, plan.generation] = left
        self._move(plan, [number for number in left.copy() if done[number]])
        self._garbage(plan, [number for number, arrived in enumerate(done) if not arrived])

    def write_late(self, plan: Any) -> None:
        """The mover of an abandoned plan is still at it."""
        self._garbage(plan, range(len(plan)))

    def _move(self, plan: Any, numbers: list[int]) -> None:
        source, destination = self._memory(plan.source), self._memory(plan.destination)
        size = self.pager.block_size
        for number in numbers:
            self.left[plan.id, plan.generation].remove(number)
            for offset in range(size):
                content = source.get(int(plan.source_ids[number]) * size + offset)
                destination[int(plan.destination_ids[number]) * size + offset] = content

    def _garbage(self, plan: Any, numbers: Any) -> None:
        memory, size = self._memory(plan.destination), self.pager.block_size
        for number in numbers:
            for offset in range(size):
                memory[int(plan.destination_ids[number]) * size + offset] = ("torn", plan.id, plan.generation)

    def _memory(self, tier: str) -> dict[int, Any]:
        return self.kv if tier == "device" else self.host

    # What must hold after every call.

    def check(self) -> None:
        super().check()
        self._check_index(self.host, self.pager._host.index)
        size = self.pager.block_size
        for record in self.pager._records.values():
            if record.state not in ("swapped", "swapping_in"):
                continue
            blocks = [node.block for node in record.host_path] + record.host_own
            for position in range(record.num_committed):
                found = self.host.get(blocks[position // size] * size + position % size)
                right = self.right(record, position)
                assert found == right, f"swapped sequence {record.id} at {position}: {found}, not {right}"
        self._check_fences()

    def _check_fences(self) -> None:
        """A step that was open when a plan took its blocks uses none of them."""
        plans = [plan for plan, _, _ in self.pager.plans() if plan.destination == "device"]
        new = [plan for plan in plans if (plan.id, plan.generation) not in self.seen]
        self.seen |= {(plan.id, plan.generation) for plan in new}
        written = {block for plan in new for block in plan.destination_ids.tolist()}
        for launch in self.open if written else ():
            assert not written & self.used(launch), f"{written & self.used(launch)} is used by an open step"

    def used(self, launch: Launch) -> set[int]:
        """The blocks that an open step reads and writes."""
        size = self.pager.block_size
        used = {block for pair in launch.step.copies.tolist() for block in pair}
        for row, span in launch.spans.items():
            used.update(launch.step.block_tables[row].tolist()[: -(-span.stop // size)])
        return used
