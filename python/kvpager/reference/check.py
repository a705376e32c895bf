"""The checker: recounts everything and names each broken promise by its id."""

from __future__ import annotations

from collections import Counter

from ..plans import PlanKind
from .index import Node
from .pool import Pool
from .record import PLACEHOLDER, WITH_BLOCKS, Record, num_blocks
from .rows import Rows, given_copies
from .tiers import Tiers
from .transfers import Fetch, SwapIn, SwapOut, Transfer, Transfers


def check(tiers: Tiers, records: dict[int, Record], batches: list[Rows], transfers: Transfers) -> list[str]:
    """All violations; empty if all is well."""
    pool, live = tiers.device, list(records.values())
    faults = _pool(pool, _device_holds(pool, [*live, *transfers.left()], transfers), batches, transfers)
    if tiers.host.num_blocks:
        held = _host_holds([*live, *transfers.left()], transfers)
        faults += [f"{fault} (host)" for fault in _pool(tiers.host, held, [], transfers)]
    faults += _pins(pool, [chain.nodes for chain in transfers.chains()], "offload")
    faults += _pins(tiers.host, transfers.saved_chains(), "save")
    faults += _fences(pool, batches)
    for transfer in transfers:
        faults += _transfer(tiers, live, transfer)
    for record in live:
        faults += [*_record(pool, record), *_swapped(tiers.host, record), *_waits(record, transfers)]
    return [*faults, *(fault for rows in batches for fault in _rows(records, rows))]


def _pool(pool: Pool, held: Counter[int], batches: list[Rows], transfers: Transfers) -> list[str]:
    """One tier; of its blocks, these are held from outside."""
    nodes = list(pool.index.nodes())
    return [
        *_conservation(pool, transfers),
        *_holds(pool, held, batches),
        *_index(pool, nodes),
        *_eviction(pool, nodes),
    ]


def _conservation(pool: Pool, transfers: Transfers) -> list[str]:
    free, cached = len(pool.free), pool.evictable
    aside = [*transfers.blocks(pool.tier, abandoned=False), *transfers.blocks(pool.tier, abandoned=True)]
    used = {block for block, held in enumerate(pool.holds) if held} | pool.pins.keys()
    active = len(used - set(aside))
    total = free + cached + active + len(aside) + pool.num_reserved
    if total == pool.num_blocks:
        return []
    return [
        f"I1: {free} free + {cached} cached + {active} active + {len(aside)} writing or quarantined"
        f" + {pool.num_reserved} reserved = {total} blocks, not {pool.num_blocks}"
    ]


def _device_holds(pool: Pool, records: list[Record], transfers: Transfers) -> Counter[int]:
    """What sequences and plans hold on the device."""
    expected: Counter[int] = Counter()
    for record in records:
        expected.update(block for number, block in enumerate(record.table) if not record.on_path(number))
        expected.update(node.block for node in record.path[-1:])
    expected.update(block for abandoned in (False, True) for block in transfers.blocks("device", abandoned))
    return expected


def _host_holds(records: list[Record], transfers: Transfers) -> Counter[int]:
    """What sequences and plans hold on the host."""
    expected: Counter[int] = Counter()
    for record in records:
        expected.update(node.block for node in record.host_path[-1:])
        expected.update(record.host_own)
    expected.update(above.block for above in transfers.held_above() if above is not None)
    expected.update(fetch.host_path[-1].block for fetch in transfers.fetches())
    expected.update(block for abandoned in (False, True) for block in transfers.blocks("host", abandoned))
    return expected


def _holds(pool: Pool, held_outside: Counter[int], batches: list[Rows]) -> list[str]:
    """Every block in one state, and every count equal to what holds it."""
    expected = held_outside.copy()
    reads = Counter([*pool.copies.values(), *(copy.source for copy in given_copies(batches))])
    expected.update(reads)
    expected.update(
        node.above.block for node in pool.nodes if node and node.above is not None and pool.holds[node.block]
    )
    faults = [
        f"I2: block {block} counts {held} holds, but has {expected[block]}"
        for block, held in enumerate(pool.holds)
        if held != expected[block]
    ]
    faults += [
        f"I2: block {block} counts {count} copies that read it, but has {reads[block]}"
        for block, count in enumerate(pool.reads)
        if count != reads[block]
    ]
    faults += [
        f"I2: block {block} is both source and target of a copy" for block in {*pool.copies} & {*pool.copies.values()}
    ]
    if pool.given != {copy.target: copy for copy in given_copies(batches) if not copy.withdrawn}:
        faults.append("I2: the targets that open steps copy to are not those of their copies")
    free = Counter(pool.free)
    for block, times in free.items():
        if times > 1:
            faults.append(f"I2: block {block} is on the free stack {times} times")
        if pool.holds[block]:
            faults.append(f"I2: block {block} is free and has {pool.holds[block]} holds")
        if block in pool.pins:
            faults.append(f"I2: block {block} is free and is read by a plan")
        if pool.nodes[block] is not None:
            faults.append(f"I2: block {block} is free and has an index entry")
        if block < pool.num_reserved:
            faults.append(f"I2: block {block} is free and reserved")
    return faults


def _index(pool: Pool, nodes: list[Node]) -> list[str]:
    faults = []
    for node in nodes:
        if pool.nodes[node.block] is not node:
            faults.append(f"I2: block {node.block} has more than one index entry")
        if node.parent.children.get(node.tokens) is not node:
            faults.append(f"I3: block {node.block} is indexed under other tokens than its own")
        if len(node.tokens) != pool.index.block_size:
            faults.append(f"I5: block {node.block} is indexed with {len(node.tokens)} tokens")
        if not node.indexed:
            faults.append(f"I4: block {node.block} was forgotten, but can be reached")
        if node.above is not None and pool.nodes[node.above.block] is not node.above:
            faults.append(f"I6: block {node.block} is indexed below block {node.above.block}, which is gone")
    reached = {node.block for node in nodes}
    faults += [
        f"I6: block {node.block} is indexed, but cannot be reached"
        for node in pool.nodes
        if node is not None and node.indexed and node.block not in reached
    ]
    faults += [
        f"I6: block {node.block} was forgotten and nobody holds it"
        for node in pool.nodes
        if node is not None and not node.indexed and not pool.holds[node.block] and node.block not in pool.pins
    ]
    return faults


def _eviction(pool: Pool, nodes: list[Node]) -> list[str]:
    """The queues hold exactly the blocks without a holder but offloads, and name each before its parent."""
    cached = {node.block for node in nodes if not pool.holds[node.block]}
    order = [block for queue in pool.policy.queues().values() for block in queue]
    faults = []
    if sorted(order) != sorted(cached):
        faults.append(f"I8: {len(order)} blocks can be evicted, but {len(cached)} are cached")
    gone: set[int] = set()
    for block in order:
        node = pool.nodes[block]
        children = node.children.values() if node is not None else ()
        faults += [
            f"I6: block {block} would be evicted before block {child.block} below it"
            for child in children
            if child.block not in gone
        ]
        gone.add(block)
    return faults


def _record(pool: Pool, record: Record) -> list[str]:
    """One sequence: positions, table and path agree with its tokens and its state."""
    name, block_size, length = f"sequence {record.id}", pool.index.block_size, len(record.tokens)
    faults = []
    if not 0 <= record.num_cached <= record.num_committed <= record.num_planned <= length:
        faults.append(
            f"I10: {name} has cached {record.num_cached}, committed {record.num_committed},"
            f" planned {record.num_planned}, len {length}"
        )
    # The last token may have no block yet, if it came from a step.
    entries = num_blocks(max(length - 1, record.num_planned), block_size) if record.state in WITH_BLOCKS else 0
    if len(record.table) < entries or (record.table and record.state not in WITH_BLOCKS):
        faults.append(f"I10: {name} is {record.state} with {len(record.table)} table entries, not {entries}")
    unknown = {position for position, token in enumerate(record.tokens) if token == PLACEHOLDER}
    unknown -= {row.stop for row in record.open_rows}
    if unknown:
        faults.append(f"I10: {name} has unknown tokens at {sorted(unknown)}, but no open step that finds them")
    if len(set(record.table)) != len(record.table):
        faults.append(f"I2: {name} has a block twice in its table")
    if len(record.path) * block_size > record.num_committed:
        faults.append(f"I4: {name} has {len(record.path)} blocks indexed, but {record.num_committed} tokens committed")
    above: Node | None = None
    for number, node in enumerate(record.path):
        if node.tokens != pool.index.block_tokens(record.tokens, number):
            faults.append(f"I3: {name} holds block {node.block} at position {number}, which has other tokens")
        if node.above is not above or pool.nodes[node.block] is not node:
            faults.append(f"I6: {name} has a path that is broken at block {node.block}")
        above = node
    return faults


def _rows(records: dict[int, Record], rows: Rows) -> list[str]:
    """One batch: rows and open steps agree with the sequences."""
    name = f"batch {rows.number}"
    faults = []
    for record in rows.records:
        if record is not None and (records.get(record.id) is not record or record.home is not rows):
            faults.append(f"I10: {name} has a row for sequence {record.id}, which knows nothing of it")
    if rows.records and rows.records[-1] is None:
        faults.append(f"I10: {name} has an empty row behind the last one in use")
    open_rows = [row for step in rows.steps for row in step.rows if row is not None]
    for record in records.values():
        named = [row for row in open_rows if row.record is record and not row.void]
        if (record.home is rows) != (record in rows.records):
            faults.append(f"I10: sequence {record.id} takes itself to be in {name}, which has no row for it")
        if named and named != record.open_rows:
            faults.append(f"I10: sequence {record.id} has other open rows than the steps of {name}")
        ends = [record.num_committed, *(row.stop for row in named)]
        if any(row.start != end for row, end in zip(named, ends, strict=False)):
            faults.append(f"I10: sequence {record.id} has open rows with gaps in {name}")
    return faults


def _pins(pool: Pool, chains: list[list[Node]], kind: PlanKind) -> list[str]:
    """A plan reads its chains and what is above them, and nothing else is passed over by eviction."""
    expected: Counter[int] = Counter(nodes[-1].block for nodes in chains)
    expected.update(
        node.above.block for node in pool.nodes if node and node.above is not None and node.block in pool.pins
    )
    faults = [
        f"I9: block {block} counts {pool.pins.get(block, 0)} {kind}s that read it, but has {expected[block]}"
        for block in sorted(pool.pins.keys() | expected.keys())
        if pool.pins.get(block, 0) != expected[block]
    ]
    read = Counter(node.block for nodes in chains for node in nodes)
    for nodes in chains:
        faults += [
            f"I9: block {node.block} is read by a {kind} and has other content by now"
            for node in nodes
            if pool.nodes[node.block] is not node
        ]
    if kind == "save":
        faults += [f"I9: block {block} is read by {times} saves" for block, times in read.items() if times > 1]
        faults += [
            f"I9: block {node.block} is stored and is being saved" for nodes in chains for node in nodes if node.stored
        ]
    return faults


def _fences(pool: Pool, batches: list[Rows]) -> list[str]:
    launches = {step.launch for rows in batches for step in rows.steps}
    faults = []
    if launches != pool.open_launches:
        faults.append(f"I9: steps {sorted(pool.open_launches)} fence blocks, but {sorted(launches)} are open")
    # A leaf is evicted before its parent, so a transfer that passes over a leaf has to pass over the parent.
    faults += [
        f"I9: block {node.block} is fenced, but block {node.above.block} above it is not"
        for node in pool.index.nodes()
        if node.above is not None
        and pool.is_fenced(node.block)
        and pool.is_evictable(node.block)
        and pool.is_evictable(node.above.block)
        and not pool.is_fenced(node.above.block)
    ]
    return faults


def _transfer(tiers: Tiers, records: list[Record], transfer: Transfer) -> list[str]:
    """One plan: nobody else can get at its destinations, and what it reads stays."""
    plan, work = transfer.plan, transfer.work
    name, pool = f"plan {plan.id}.{plan.generation}", tiers.of(plan.destination)
    destinations = transfer.destinations
    faults = []
    if len(set(destinations)) != len(destinations):
        faults.append(f"I9: {name} writes a block twice")
    for block in destinations:
        if not pool.holds[block] or block in pool.free:
            faults.append(f"I9: block {block} is written by {name} and can be handed out")
        if pool.nodes[block] is not None:
            faults.append(f"I9: block {block} is written by {name} and can be hit")
    waiting = work.parts if isinstance(work, Fetch) else [work.record] if isinstance(work, SwapIn) else []
    if plan.destination == "device":
        faults += [
            f"I9: block {block} is written by {name} and is in the table of sequence {record.id}"
            for record in records
            for block in record.table
            if block in destinations and (transfer.state == "abandoned" or record not in waiting)
        ]
    if plan.records is not None and (len(plan.records.keys), len(plan.records.metas)) != (len(plan), len(plan)):
        faults.append(f"I9: {name} has {len(plan.records.keys)} keys for {len(plan)} blocks")
    if (plan.records is not None) != (plan.kind in ("save", "load")):
        faults.append(f"I9: {name} is a {plan.kind} {'without' if plan.records is None else 'with'} keys")
    if transfer.state == "abandoned" and plan.kind != "save":
        return faults
    sources = tiers.of(plan.source)
    faults += [
        f"I9: block {block} is read by {name} and can be handed out"
        for block in (plan.source_ids.tolist() if plan.source != "store" else [])
        if block in sources.free or (not sources.holds[block] and block not in sources.pins)
    ]
    for record in [*waiting, *([work.record] if isinstance(work, SwapOut) else [])]:
        state = "fetching" if isinstance(work, Fetch) else plan.kind.replace("swap", "swapping")
        if record.state not in (state, "released"):
            faults.append(f"I10: {name} is for sequence {record.id}, which is {record.state}")
    return faults


def _swapped(host: Pool, record: Record) -> list[str]:
    """What a sequence has on the host agrees with its tokens and its state."""
    name, size = f"sequence {record.id}", host.index.block_size
    has = len(record.host_path) + len(record.host_own)
    faults = []
    if record.state in ("swapped", "swapping_in") and has != num_blocks(record.num_committed, size):
        faults.append(f"I10: {name} is {record.state} with {has} host blocks and {record.num_committed} tokens")
    if record.state not in ("swapped", "swapping_in") and (
        record.host_own or (record.host_path and record.state != "swapping_out")
    ):
        faults.append(f"I10: {name} is {record.state} with {has} host blocks")
    above: Node | None = None
    for number, node in enumerate(record.host_path):
        if node.tokens != host.index.block_tokens(record.tokens, number):
            faults.append(f"I3: {name} holds host block {node.block} at position {number}, which has other tokens")
        if node.above is not above or host.nodes[node.block] is not node:
            faults.append(f"I6: {name} has a path that is broken at host block {node.block}")
        above = node
    return faults


def _waits(record: Record, transfers: Transfers) -> list[str]:
    """A sequence in a transfer has a plan, and only that one."""
    found = [
        transfer.plan.id
        for transfer in transfers
        if transfer.state != "abandoned"
        and (
            (isinstance(transfer.work, Fetch) and record in transfer.work.parts and record.fetch is transfer.work)
            or (isinstance(transfer.work, SwapOut | SwapIn) and transfer.work.record is record)
        )
    ]
    wanted = int(record.state in ("fetching", "swapping_out", "swapping_in"))
    if len(found) == wanted and (record.fetch is not None) == (record.state == "fetching"):
        return []
    return [f"I10: sequence {record.id} is {record.state} with the plans {found}"]
