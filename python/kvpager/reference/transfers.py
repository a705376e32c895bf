"""Plans that have not ended: what they hold in either tier, and what becomes of it when they end.

A plan's destinations count one hold each that is the plan's own. What it reads is held by an offload's pins, by a
fetch's hold on the host path, or, for a swap, by the sequence itself, whose holds stay where they are when it is
released meanwhile. Saves and loads are in ``store.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..plans import Plan, PlanKind, PlanState, StoreKeys, Tier
from .index import FIRST_CONTENT_TOKEN, Node, path_to, root_of, tokens_of, units, whole_runs
from .log import Why
from .pool import Pool
from .record import Record
from .store import Load, Save
from .tiers import End, Tiers, bring, let_in, push


@dataclass(slots=True, eq=False)
class Chain:
    """Blocks of one path that an offload copies, and the host's copy of the block above them, which it holds."""

    nodes: list[Node]
    above: Node | None
    blocks: list[int]

    def end(self, tiers: Tiers, done: list[bool]) -> list[int]:
        """Index what has arrived and let go; the blocks that came to nothing."""
        host, path = tiers.host, path_to(self.nodes[-1])
        start = len(path) - len(self.nodes)
        root = root_of(path)
        arrived = [node.indexed and is_done for node, is_done in zip(self.nodes, done, strict=True)]
        there, brought = bring(host, root.key, root.namespace, tokens_of(path), start, self.blocks, arrived)
        let_in(host, there, start, brought, self.above)
        tiers.device.unpin(self.nodes[-1].block)
        tiers.counters.offloaded_blocks += len(brought)
        return [block for block in self.blocks if block not in brought]


@dataclass(slots=True, eq=False)
class Offload:
    """Cached blocks get a copy on the host."""

    chains: list[Chain]

    def end(self, tiers: Tiers, done: list[bool], how: End) -> None:
        nothing: list[int] = []
        for chain in self.chains:
            nothing += chain.end(tiers, done[: len(chain.nodes)])
            done = done[len(chain.nodes) :]
        if how != "abandon":
            push(tiers.host, nothing)


@dataclass(slots=True, eq=False)
class Fetch:
    """What a prompt found on the host comes to the device, for all sequences that wait for it."""

    key: bytes
    start: int  # the blocks that were found on the device
    host_path: list[Node]
    blocks: list[int]
    parts: dict[Record, int] = field(default_factory=dict)  # each sequence, in order, with the end of its part

    def joined(self, key: bytes, path: list[Node], tokens: list[int], block_size: int) -> int:
        """Up to which block a prompt with this device path finds here what it wants."""
        if not self.parts or key != self.key or next(iter(self.parts)).path != path or not self.host_path[-1].indexed:
            return len(path)
        stop, limit = len(path), (len(tokens) - 1) // block_size
        while (
            stop < min(limit, len(self.host_path))
            and tuple(tokens[stop * block_size : (stop + 1) * block_size]) == self.host_path[stop].tokens
        ):
            stop += 1
        return whole_runs(tokens, stop, block_size, least=len(path))

    def end(self, tiers: Tiers, done: list[bool], how: End) -> None:
        arrived = done.index(False) if False in done else len(done)
        for record, stop in list(self.parts.items()):
            record.fetch = None
            if how == "abandon":
                record.preempt(tiers.device, tiers.log, Why("its fetch was abandoned"))
            else:
                _arrive(tiers, record, self.start, min(self.start + arrived, stop))
        self.parts.clear()
        tiers.counters.fetched_blocks += arrived
        if how != "abandon":
            push(tiers.device, self.blocks)
        tiers.host.drop(self.host_path[-1].block)


@dataclass(slots=True, eq=False)
class SwapOut:
    """A sequence's KV goes to the host: what the index has there stays shared, the rest is the sequence's own."""

    record: Record
    blocks: list[int]

    def end(self, tiers: Tiers, done: list[bool], how: End) -> None:
        record, nothing = self.record, self.blocks
        tiers.counters.swap_outs += how == "complete"
        if how == "complete" and record.state != "released":
            nothing = self._keep(tiers.host)
            tiers.counters.swapped_tokens += record.num_committed
            record.leave(tiers.device, tiers.log, record.why, "swap")
            record.state = "swapped"
        elif record.state == "released":
            record.let_go(tiers.device)
            record.let_go_of_host(tiers.host)
        else:
            record.let_go_of_host(tiers.host)
            record.state = "running"
            record.announce(tiers.device)
        if how != "abandon":
            push(tiers.host, nothing)

    def _keep(self, host: Pool) -> list[int]:
        """Index what may be shared, and keep the rest for the sequence; the blocks that came to nothing."""
        record, held = self.record, self.record.host_path
        if held and not held[-1].indexed:
            record.host_own = self.blocks
            return []
        live = record.live_path()
        live = live[: whole_runs(record.tokens, len(live), host.index.block_size)]
        arrived = [True] * len(self.blocks)
        record.host_path, brought = bring(
            host, record.key, record.namespace, tokens_of(live), len(held), self.blocks, arrived
        )
        if record.host_path:
            host.hold(record.host_path[-1].block)
        if held:
            host.drop(held[-1].block)
        for block in brought:
            host.drop(block)
        num_shared = len(record.host_path) - len(held)
        record.host_own = self.blocks[num_shared:]
        return [block for block in self.blocks[:num_shared] if block not in brought]


@dataclass(slots=True, eq=False)
class SwapIn:
    """A swapped sequence's KV comes back."""

    record: Record
    blocks: list[int]

    def end(self, tiers: Tiers, done: list[bool], how: End) -> None:
        record = self.record
        tiers.counters.swap_ins += how == "complete"
        if how != "abandon":
            push(tiers.device, self.blocks)
        if record.state == "released":
            record.let_go_of_host(tiers.host)
        elif how == "complete":
            record.state = "running"
            record.let_go_of_host(tiers.host)
            record.settle(tiers.device)
        else:
            record.let_go(tiers.device)
            record.state = "swapped"


# What a plan is for. ``end`` ends it, or abandons it, with these blocks copied; abandoned, it keeps its destinations.
Work: TypeAlias = Offload | Fetch | SwapOut | SwapIn | Save | Load


@dataclass(slots=True, eq=False)
class Transfer:
    """A plan and what it is for."""

    plan: Plan
    work: Work
    state: PlanState = "planned"
    tick: int | None = None

    @property
    def destinations(self) -> list[int]:
        """The blocks of the pager's that it writes."""
        blocks: list[int] = [] if self.plan.destination == "store" else self.plan.destination_ids.tolist()
        return blocks


_ROUTES: dict[PlanKind, tuple[Tier, Tier]] = {
    "offload": ("device", "host"),
    "swap_out": ("device", "host"),
    "fetch": ("host", "device"),
    "swap_in": ("host", "device"),
    "save": ("host", "store"),
    "load": ("store", "host"),
}


class Transfers:
    """The plans of one pager."""

    def __init__(self) -> None:
        self.unfinished: dict[int, Transfer] = {}  # by number, in the order in which they were made
        self.generations: list[int] = []  # by number, how many plans have had it

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self.unfinished.values())

    def make(
        self, kind: PlanKind, work: Work, sources: list[int], destinations: list[int], records: StoreKeys | None = None
    ) -> Plan:
        """A new plan, with the lowest number that is not in use."""
        number = 0
        while number in self.unfinished:
            number += 1
        if number == len(self.generations):
            self.generations.append(0)
        source, destination = _ROUTES[kind]
        plan = Plan(
            id=number,
            generation=self.generations[number],
            kind=kind,
            source=source,
            source_ids=_ids(sources),
            destination=destination,
            destination_ids=_ids(destinations),
            records=records,
        )
        self.generations[number] += 1
        self.unfinished[number] = Transfer(plan, work)
        return plan

    def find(self, plan: Plan) -> Transfer | None:
        """A plan by number and generation, None if it has ended."""
        if not 0 <= plan.id < len(self.generations) or not 0 <= plan.generation < self.generations[plan.id]:
            raise ValueError(f"plan {plan.id}.{plan.generation} was never made by this pager")
        found = self.unfinished.get(plan.id)
        if found is None or found.plan.generation != plan.generation:
            return None
        # (What it says of keys is for the mover: a report may come from where they are not at hand.)
        if found.plan != replace(plan, records=found.plan.records):
            raise ValueError(f"plan {plan.id}.{plan.generation} of this pager has other blocks: it is another pager's")
        return found

    def end(self, tiers: Tiers, transfer: Transfer, done: list[bool], how: End) -> None:
        """End a plan, or abandon it."""
        if how == "abandon":
            transfer.state = "abandoned"
        else:
            del self.unfinished[transfer.plan.id]
        transfer.work.end(tiers, done, how)

    def cancel(self, tiers: Tiers, transfer: Transfer) -> None:
        """A plan comes to nothing."""
        self.end(tiers, transfer, [False] * len(transfer.plan), "cancel")

    def reclaim(self, tiers: Tiers, transfer: Transfer) -> None:
        """Nobody writes to the destinations of an abandoned plan any more, or reads what an abandoned save reads."""
        if isinstance(transfer.work, Save):
            self.cancel(tiers, transfer)
            return
        del self.unfinished[transfer.plan.id]
        push(tiers.of(transfer.plan.destination), transfer.destinations)

    def of(self, record: Record) -> Transfer:
        """The plan that swaps this sequence, or fetches for it."""
        return next(
            transfer
            for transfer in self
            if transfer.state != "abandoned"
            and (record.fetch is transfer.work if isinstance(transfer.work, Fetch) else _swaps(transfer, record))
        )

    def in_flight(self) -> set[Node]:
        """The device blocks that offloads read."""
        return {node for chain in self.chains() for node in chain.nodes}

    def chains(self) -> list[Chain]:
        """The chains of all offloads that hold what they read."""
        return [
            chain
            for transfer in self
            if isinstance(transfer.work, Offload) and transfer.state != "abandoned"
            for chain in transfer.work.chains
        ]

    def held_above(self) -> list[Node | None]:
        """The host blocks below which something is to come: for each chain of an offload, and each load."""
        return [*(chain.above for chain in self.chains()), *(load.above for _, load in self.loads())]

    def fetches(self) -> list[Fetch]:
        """The fetches that sequences wait for, or did."""
        return [
            transfer.work for transfer in self if isinstance(transfer.work, Fetch) and transfer.state != "abandoned"
        ]

    def saved_chains(self) -> list[list[Node]]:
        """The chains of all saves; an abandoned one goes on holding what it reads."""
        return [nodes for transfer in self if isinstance(transfer.work, Save) for nodes in transfer.work.chains]

    def saving(self) -> set[Node]:
        """The host blocks that saves read."""
        return {node for nodes in self.saved_chains() for node in nodes}

    def loads(self) -> list[tuple[Plan, Load]]:
        """The loads that may still bring something."""
        return [
            (transfer.plan, transfer.work)
            for transfer in self
            if isinstance(transfer.work, Load) and transfer.state != "abandoned"
        ]

    def left(self) -> list[Record]:
        """Released sequences whose blocks a plan still holds."""
        return [
            transfer.work.record
            for transfer in self
            if isinstance(transfer.work, SwapOut | SwapIn)
            and transfer.state != "abandoned"
            and transfer.work.record.state == "released"
        ]

    def blocks(self, tier: Tier, abandoned: bool) -> list[int]:
        """The blocks of a tier that are being written, or those in quarantine."""
        return [
            block
            for transfer in self
            if transfer.plan.destination == tier and (transfer.state == "abandoned") == abandoned
            for block in transfer.destinations
        ]


@dataclass(frozen=True, slots=True)
class Counts:
    """The blocks of one tier by state."""

    free: int
    cached: int
    active: int
    writing: int
    quarantined: int
    reserved: int


def count_blocks(pool: Pool, transfers: Transfers) -> Counts:
    """How many blocks are in which state. Writing and quarantined take precedence over active."""
    free, cached, reserved = len(pool.free), pool.evictable, pool.num_reserved
    writing, quarantined = (len(transfers.blocks(pool.tier, abandoned)) for abandoned in (False, True))
    active = pool.num_blocks - free - cached - reserved - writing - quarantined
    return Counts(free, cached, active, writing, quarantined, reserved)


def missing(host: Pool, path: list[Node], in_flight: set[Node]) -> list[int]:
    """The positions of a device path that are neither on the host nor on the way there, in whole units.

    A unit of which a part only is there ends it: the blocks that the host has might be of another content. So does one
    that may go on behind the path.
    """
    num_there = len(host.index.copies_of(path))
    found: list[int] = []
    for unit in units(tokens_of(path)):
        flying = [path[number] in in_flight for number in unit]
        if unit.stop <= num_there or all(flying):
            continue
        if unit.start < num_there or any(flying):
            break
        if unit.stop == len(path) and path[-1].tokens[-1] >= FIRST_CONTENT_TOKEN:
            break
        found += unit
    return found


def take_chain(tiers: Tiers, path: list[Node], wanted: list[int], limit: int | None) -> tuple[Chain | None, int]:
    """Begin to copy the first of these positions and those that follow it directly, as far as they fit.

    Answers None if nothing fits, and the host's room for it. The last unit may go beyond ``limit``.
    """
    host, start = tiers.host, wanted[0]
    there = host.index.copies_of(path[:start])
    above = there[-1] if start and len(there) == start else None
    # Room once the block above is held, and with it those above it.
    idle = sum(host.is_evictable(node.block) for node in there) if above is not None else 0
    room = len(host.free) + host.evictable - idle
    stop = start
    for unit in units(tokens_of(path)):
        if unit.start != stop or unit.start not in wanted:
            continue
        if unit.stop - start > room or (limit is not None and unit.start - start >= limit):
            break
        stop = unit.stop
    if stop == start:
        return None, room
    if above is not None:
        host.hold(above.block)
    blocks = host.take(stop - start)
    for block in blocks:
        host.hold(block)
    tiers.device.pin(path[stop - 1].block)
    return Chain(path[start:stop], above, blocks), room


def _arrive(tiers: Tiers, record: Record, start: int, stop: int) -> None:
    """A sequence that was fetched runs, with the blocks of its prompt up to ``stop``."""
    size = tiers.device.index.block_size
    stop = whole_runs(record.tokens, stop, size, least=start)
    record.state = "running"
    if stop > start:
        tiers.counters.hit_tokens += (stop - start) * size
        record.num_cached = record.num_committed = stop * size
        record.settle(tiers.device)


def _swaps(transfer: Transfer, record: Record) -> bool:
    return isinstance(transfer.work, SwapOut | SwapIn) and transfer.work.record is record


def _ids(blocks: list[int]) -> npt.NDArray[np.int32]:
    ids = np.array(blocks, dtype=np.int32)
    ids.flags.writeable = False
    return ids
