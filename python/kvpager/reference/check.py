"""The checker: recounts everything and names each broken promise by its id."""

from __future__ import annotations

from collections import Counter

from .index import Node
from .pool import Pool
from .record import PLACEHOLDER, Record, num_blocks
from .rows import Rows, given_copies


def check(pool: Pool, records: dict[int, Record], batches: list[Rows]) -> list[str]:
    """All violations; empty if all is well."""
    nodes = list(pool.index.nodes())
    return [
        *_conservation(pool),
        *_holds(pool, records, batches),
        *_index(pool, nodes),
        *_eviction(pool, nodes),
        *(fault for record in records.values() for fault in _record(pool, record)),
        *(fault for rows in batches for fault in _rows(records, rows)),
    ]


def _conservation(pool: Pool) -> list[str]:
    free, cached = len(pool.free), len(pool.policy)
    active = sum(held > 0 for held in pool.holds)
    total = free + cached + active + pool.num_reserved
    if total == pool.num_blocks:
        return []
    return [
        f"I1: {free} free + {cached} cached + {active} active + {pool.num_reserved} reserved = {total} blocks,"
        f" not {pool.num_blocks}"
    ]


def _holds(pool: Pool, records: dict[int, Record], batches: list[Rows]) -> list[str]:
    """Every block in one state, and every count equal to what holds it."""
    expected: Counter[int] = Counter()
    for record in records.values():
        expected.update(block for number, block in enumerate(record.table) if not record.on_path(number))
        expected.update(node.block for node in record.path[-1:])
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
        if node is not None and not node.indexed and not pool.holds[node.block]
    ]
    return faults


def _eviction(pool: Pool, nodes: list[Node]) -> list[str]:
    """The queues hold exactly the cached blocks, and name each before its parent."""
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
    entries = num_blocks(max(length - 1, record.num_planned), block_size) if record.state == "running" else 0
    if len(record.table) < entries or (record.table and record.state != "running"):
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
