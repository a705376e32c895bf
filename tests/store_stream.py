"""What a store would hold beside the memory of both tiers: a dictionary of records that may be lost at any time.

A record is whole or not there. A save's mover gives the store some blocks when the plan starts, some later, and some of
an abandoned one's up to the moment when that is reclaimed; a load's mover finds what is there when it looks. Then,
whatever is released, evicted, forgotten or reset meanwhile:

- what a save reads is, as long as it may be read, what it was when the plan was made;
- a key stands for one content, identity and meta, ever;
- what is on the host, whoever brought it there, holds its right content (``tier_stream.py``), and nothing that a forget
  or a reset named while it was loaded is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tier_stream import TierStream

Name = tuple[int, int]


@dataclass(frozen=True)
class Saved:
    """One record: what it is said to be, what is in it slot by slot, and whose weights that came from."""

    meta: bytes
    content: tuple[Any, ...]
    identity: bytes


class StoreStream(TierStream):
    """The streams, and a store."""

    def __init__(self, pager: Any, draw: Any) -> None:
        super().__init__(pager, draw)
        self.store: dict[bytes, Saved] = {}
        self.meant: dict[bytes, Saved] = {}  # all that ever was in the store, by key
        self.identities: dict[Name, bytes] = {}  # of the moment when a plan was made
        self.read: dict[Name, list[tuple[Any, ...]]] = {}  # what the sources of a save held then
        self.arrived: dict[Name, set[int]] = {}
        # What was forgotten since a load was made, as (namespace, tokens); None for a reset.
        self.dropped: dict[Name, list[tuple[Any, tuple[int, ...]] | None]] = {}

    # What the scheduler tells.

    def made(self, plan: Any) -> None:
        """A save or load was planned, or one that there is was answered again."""
        name = plan.id, plan.generation
        if name in self.identities:
            return
        self.identities[name] = self.pager.identity
        if plan.kind == "save":
            self.read[name] = [self._record(block) for block in plan.source_ids.tolist()]
        else:
            self.arrived[name], self.dropped[name] = set(), []

    def forget(self, tokens: list[int], namespace: Any) -> None:
        """These blocks are not to be found any more, nor what is below them."""
        for each in self.dropped.values():
            each.append((namespace, tuple(tokens)))

    def reset(self) -> None:
        """Nothing is."""
        for each in self.dropped.values():
            each.append(None)

    # What the mover does.

    def finish(self, plan: Any, done: list[bool]) -> None:
        """The plan is about to end. Those blocks of a load are done that ``look_up`` found."""
        if plan.kind == "load":
            assert all(
                number in self.arrived[plan.id, plan.generation] for number, is_done in enumerate(done) if is_done
            )
        super().finish(plan, done)

    def look_up(self, plan: Any) -> list[bool]:
        """The mover of a load has tried all blocks: which of them have arrived."""
        name = plan.id, plan.generation
        self._move(plan, self.left[name].copy())
        return [number in self.arrived[name] for number in range(len(plan))]

    def write_late(self, plan: Any) -> None:
        """The mover of an abandoned plan is still at it: a save's gives the store what it still reads."""
        if plan.kind == "save":
            for number in range(len(plan)):
                if self.draw.random() < 0.7:
                    self._put(plan, number)
        else:
            super().write_late(plan)

    def lose(self) -> None:
        """The store is cleaned, fails, or is too small."""
        share = self.draw.choice([0.1, 0.5, 1.0])
        self.store = {key: record for key, record in self.store.items() if self.draw.random() >= share}

    def num_tokens(self, tokens: list[int], namespace: Any) -> int:
        """How much of a prompt the store has."""
        keys, metas = self.pager.store_keys(tokens, namespace=namespace)
        for number, (key, meta) in enumerate(zip(keys, metas, strict=True)):
            if not self._has(key, meta):
                return number * int(self.pager.block_size)
        return len(keys) * int(self.pager.block_size)

    def _has(self, key: Any, meta: Any) -> bool:
        return key.tobytes() in self.store and self.store[key.tobytes()].meta == meta.tobytes()

    def _move(self, plan: Any, numbers: list[int]) -> None:
        if plan.kind not in ("save", "load"):
            super()._move(plan, numbers)
            return
        for number in numbers:
            self.left[plan.id, plan.generation].remove(number)
            (self._put if plan.kind == "save" else self._get)(plan, number)

    def _put(self, plan: Any, number: int) -> None:
        name = plan.id, plan.generation
        content = self._record(int(plan.source_ids[number]))
        assert content == self.read[name][number], f"{plan.source_ids[number]} was changed while a save reads it"
        key = plan.records.keys[number].tobytes()
        record = Saved(plan.records.metas[number].tobytes(), content, self.identities[name])
        assert self.meant.setdefault(key, record) == record, "two contents, or two identities, with one key"
        self.store[key] = record

    def _get(self, plan: Any, number: int) -> None:
        name, size = (plan.id, plan.generation), self.pager.block_size
        key, meta = plan.records.keys[number], plan.records.metas[number]
        if not self._has(key, meta):
            return
        record = self.store[key.tobytes()]
        assert record.identity == self.identities[name], "loaded from other weights"
        self.arrived[name].add(number)
        for offset, content in enumerate(record.content):
            self.host[int(plan.destination_ids[number]) * size + offset] = content

    def _garbage(self, plan: Any, numbers: Any) -> None:
        if plan.destination != "store":
            super()._garbage(plan, numbers)

    def _record(self, block: int) -> tuple[Any, ...]:
        size = self.pager.block_size
        return tuple(self.host.get(block * size + offset) for offset in range(size))

    # What must hold after every call.

    def check(self) -> None:
        super().check()
        unfinished = {(plan.id, plan.generation) for plan, _, _ in self.pager.plans()}
        for plan, state, _ in self.pager.plans():
            if plan.kind == "save":
                found = [self._record(block) for block in plan.source_ids.tolist()]
                assert found == self.read[plan.id, plan.generation], f"{state} save {plan.id} reads what was changed"
        for each in (self.read, self.arrived, self.identities, self.dropped):
            for name in [name for name in each if name not in unfinished]:
                del each[name]

    def ended(self, plan: Any) -> None:
        """Just now: nothing of a load that was to go meanwhile is on the host."""
        dropped = self.dropped.pop((plan.id, plan.generation), [])
        for block in plan.destination_ids.tolist() if plan.kind == "load" else []:
            node = self.pager._host.nodes[block]
            if node is None or not node.indexed:
                continue
            namespace, tokens = self.host[(block + 1) * self.pager.block_size - 1]
            for gone in dropped:
                assert gone is not None, f"block {block} came from before a reset"
                assert (namespace, tokens[: len(gone[1])]) != gone, f"block {block} was forgotten meanwhile"
