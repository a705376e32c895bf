"""The drawing of a pager as text: the same for every implementation, whatever their nodes look like inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .index import Node, Root
from .pool import Pool
from .record import Record
from .rows import Rows, given_copies

Trait = tuple[int, int, bool, int | None]

# The counters of the statistics line: all that a refused or empty call leaves alone.
_SHOWN = (
    "admitted_sequences",
    "queried_tokens",
    "hit_tokens",
    "evicted_blocks",
    "evicted_idle_ticks",
    "evicted_hits",
    "copies",
    "preemptions",
    "recomputed_tokens",
    "dropped_handles",
)


# Deeper levels are numbered instead of indented, or the text would grow with the square of the depth.
LEVELS_DRAWN = 32


def dump(pool: Pool, records: dict[int, Record], batches: list[Rows], next_id: int, full: bool) -> str:
    """See ``docs/design/rules.md``, section 12."""
    free, cached = len(pool.free), len(pool.policy)
    active = pool.num_blocks - free - cached - pool.num_reserved
    lines = [
        f"pool: {pool.num_blocks} blocks of {pool.index.block_size} tokens:"
        f" {free} free, {cached} cached, {active} active, {pool.num_reserved} reserved"
    ]
    holders = count_holders(pool, records, batches)
    for root in sorted(pool.index.roots.values(), key=lambda root: root.key):
        lines.append(f"namespace {root.namespace!r}")
        lines += _tree(root, holders)
    if full:
        lines += _rest(pool, records, batches, next_id)
    return "\n".join(lines) + "\n"


def count_holders(pool: Pool, records: dict[int, Record], batches: list[Rows]) -> Counter[int]:
    """The holders of each block, counted anew: every sequence once, and every copy queued or given to a step."""
    counts: Counter[int] = Counter()
    for record in records.values():
        held = set(record.table).union(node.block for node in record.path)
        counts.update(_with_above(pool, held))
    for source in [*pool.copies.values(), *(copy.source for copy in given_copies(batches))]:
        counts.update(_with_above(pool, {source}))
    return counts


def _with_above(pool: Pool, blocks: set[int]) -> set[int]:
    closed: set[int] = set()
    for block in blocks:
        node = pool.nodes[block]
        closed.add(block)
        while node is not None and node.above is not None and node.above.block not in closed:
            node = node.above
            closed.add(node.block)
    return closed


def _tree(root: Root, holders: Counter[int]) -> list[str]:
    lines = []
    pending = [("", 0, node, last) for node, last in _siblings(root)]
    while pending:
        indent, level, node, last = pending.pop()
        segment = [node]
        while len(node.children) == 1:
            (child,) = node.children.values()
            if _trait(child, holders) != _trait(node, holders):
                break
            segment.append(child)
            node = child
        start = indent if level < LEVELS_DRAWN else f"{level}: "
        lines.append(f"{start}{'└─ ' if last else '├─ '}{_segment(segment, holders)}")
        indent = indent + ("   " if last else "│  ") if level + 1 < LEVELS_DRAWN else ""
        pending += [(indent, level + 1, child, last) for child, last in _siblings(node)]
    return lines


def _siblings(parent: Node | Root) -> list[tuple[Node, bool]]:
    """The children, last one first, ready for a stack; with each, whether it is drawn last."""
    return [(child, number == 0) for number, child in enumerate(reversed(parent.children.values()))]


def _trait(node: Node, holders: Counter[int]) -> Trait:
    held = holders[node.block]
    return held, node.hits, node.marked, None if held else node.idle_since


def _segment(segment: list[Node], holders: Counter[int]) -> str:
    held, hits, marked, idle_since = _trait(segment[0], holders)
    tokens = segment[0].tokens
    shown = " ".join(map(str, tokens[:4])) + (" .." if len(tokens) > 4 else "")
    blocks = "1 block" if len(segment) == 1 else f"{len(segment)} blocks"
    text = f"{blocks} {_ids(node.block for node in segment)}: tokens {shown}; holders {held}; hits {hits}"
    if marked:
        text += "; marked"
    return text if idle_since is None else f"{text}; idle since {idle_since}"


def _rest(pool: Pool, records: dict[int, Record], batches: list[Rows], next_id: int) -> list[str]:
    lines = [f"free: {_ids(reversed(pool.free))}"]
    lines += [f"queue {name}: {_ids(queue)}" for name, queue in pool.policy.queues().items()]
    lines += [_sequence(records[sequence_id]) for sequence_id in sorted(records)]
    lines += [_batch(rows) for rows in batches]
    copies = " ".join(f"{source}->{target}" for target, source in pool.copies.items())
    lines.append(f"copies: {copies or '-'}")
    lines.append(f"clock: {pool.counters.clock_ticks}")
    lines.append(f"next sequence: {next_id}")
    lines.append("stats: " + " ".join(f"{name}={getattr(pool.counters, name)}" for name in _SHOWN))
    return lines


def _sequence(record: Record) -> str:
    text = (
        f"sequence {record.id}: {record.state}; namespace {record.namespace!r}; cached {record.num_cached};"
        f" committed {record.num_committed}; planned {record.num_planned}; len {len(record.tokens)}"
    )
    if record.state == "preempted":
        return text
    return (
        f"{text}; path {_ids(node.block for node in record.path)}; table {_ids(record.table)};"
        f" publishes {'yes' if record.publishes else 'no'}; pinned {'yes' if record.pinned else 'no'}"
        + ("; computing" if record.announced is not None else "")
    )


def _batch(rows: Rows) -> str:
    """Sequence ids by row, so that a range is never drawn: what follows what is the order of the rows."""
    sequences = " ".join("-" if record is None else str(record.id) for record in rows.records)
    steps = " ".join(str(step.id) for step in rows.steps)
    return f"batch {rows.number}: rows {sequences or '-'}; open {steps or '-'}; next step {rows.next_step}"


def _ids(blocks: Iterable[int]) -> str:
    """Block ids in their order, neighbours that ascend by one drawn as a range: ``4-6 9 2``."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and block == ranges[-1][1] + 1:
            ranges[-1][1] = block
        else:
            ranges.append([block, block])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges) or "-"
