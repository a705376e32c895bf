"""The drawing of a pager as text: the same for every implementation, whatever their nodes look like inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .index import Node, Root
from .pool import Pool
from .record import Record
from .rows import Rows, given_copies
from .tiers import Tiers
from .transfers import Counts, Transfer, Transfers, count_blocks

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

_SHOWN_TRANSFERS = (
    "host_evicted_blocks",
    "offloaded_blocks",
    "fetched_blocks",
    "swap_outs",
    "swap_ins",
    "saved_blocks",
    "loaded_blocks",
)

# Deeper levels are numbered instead of indented, or the text would grow with the square of the depth.
LEVELS_DRAWN = 32


def dump(
    tiers: Tiers, records: dict[int, Record], batches: list[Rows], transfers: Transfers, next_id: int, full: bool
) -> str:
    """See ``docs/design/rules.md``, sections 12, 16.7 and 17.5."""
    pool, host = tiers.device, tiers.host
    counts = count_blocks(pool, transfers)
    lines = [
        f"pool: {pool.num_blocks} blocks of {pool.index.block_size} tokens: {counts.free} free, {counts.cached} cached,"
        f" {counts.active} active, {counts.reserved} reserved{_aside(counts)}"
    ]
    if host.num_blocks:
        counts = count_blocks(host, transfers)
        lines.append(
            f"host: {host.num_blocks} blocks: {counts.free} free, {counts.cached} cached, {counts.active} active"
            f"{_aside(counts)}"
        )
    holding = [*records.values(), *transfers.left()]
    trees = [("", pool, count_holders(pool, holding, batches, transfers))]
    trees.append(("host ", host, count_host_holders(host, holding, transfers)))
    for tier, each, holders in trees:
        for root in sorted(each.index.roots.values(), key=lambda root: root.key):
            lines.append(f"{tier}namespace {root.namespace!r}")
            lines += _tree(each, root, holders)
    if full:
        lines += _rest(tiers, records, batches, transfers, next_id)
    return "\n".join(lines) + "\n"


def _aside(counts: Counts) -> str:
    writing = f", {counts.writing} writing" if counts.writing else ""
    return writing + (f", {counts.quarantined} quarantined" if counts.quarantined else "")


def count_holders(pool: Pool, records: list[Record], batches: list[Rows], transfers: Transfers) -> Counter[int]:
    """The holders of each block, counted anew: sequences, copies queued or given to a step, and chains of offloads."""
    counts: Counter[int] = Counter()
    for record in records:
        held = set(record.table).union(node.block for node in record.path)
        counts.update(_with_above(pool, held))
    for source in [*pool.copies.values(), *(copy.source for copy in given_copies(batches))]:
        counts.update(_with_above(pool, {source}))
    for chain in transfers.chains():
        counts.update(_with_above(pool, {chain.nodes[-1].block}))
    return counts


def count_host_holders(host: Pool, records: list[Record], transfers: Transfers) -> Counter[int]:
    """The same for the host: sequences, fetches, saves, and offloads and loads, which hold what is above them."""
    ends = [record.host_path[-1] for record in records if record.host_path]
    ends += [fetch.host_path[-1] for fetch in transfers.fetches()]
    ends += [above for above in transfers.held_above() if above is not None]
    ends += [nodes[-1] for nodes in transfers.saved_chains()]
    return Counter(block for node in ends for block in _with_above(host, {node.block}))


def _with_above(pool: Pool, blocks: set[int]) -> set[int]:
    closed: set[int] = set()
    for block in blocks:
        node = pool.nodes[block]
        closed.add(block)
        while node is not None and node.above is not None and node.above.block not in closed:
            node = node.above
            closed.add(node.block)
    return closed


def _tree(pool: Pool, root: Root, holders: Counter[int]) -> list[str]:
    lines = []
    pending = [("", 0, node, last) for node, last in _siblings(root)]
    while pending:
        indent, level, node, last = pending.pop()
        segment = [node]
        while len(node.children) == 1:
            (child,) = node.children.values()
            if _trait(pool, child, holders) != _trait(pool, node, holders):
                break
            segment.append(child)
            node = child
        start = indent if level < LEVELS_DRAWN else f"{level}: "
        lines.append(f"{start}{'└─ ' if last else '├─ '}{_segment(pool, segment, holders)}")
        indent = indent + ("   " if last else "│  ") if level + 1 < LEVELS_DRAWN else ""
        pending += [(indent, level + 1, child, last) for child, last in _siblings(node)]
    return lines


def _siblings(parent: Node | Root) -> list[tuple[Node, bool]]:
    """The children, last one first, ready for a stack; with each, whether it is drawn last."""
    return [(child, number == 0) for number, child in enumerate(reversed(parent.children.values()))]


def _trait(pool: Pool, node: Node, holders: Counter[int]) -> Trait:
    # What offloads and saves read stays in its queue, and ages there.
    return holders[node.block], node.hits, node.marked, None if pool.holds[node.block] else node.idle_since


def _segment(pool: Pool, segment: list[Node], holders: Counter[int]) -> str:
    held, hits, marked, idle_since = _trait(pool, segment[0], holders)
    tokens = segment[0].tokens
    shown = " ".join(map(str, tokens[:4])) + (" .." if len(tokens) > 4 else "")
    blocks = "1 block" if len(segment) == 1 else f"{len(segment)} blocks"
    text = f"{blocks} {_ids(node.block for node in segment)}: tokens {shown}; holders {held}; hits {hits}"
    if marked:
        text += "; marked"
    return text if idle_since is None else f"{text}; idle since {idle_since}"


def _rest(
    tiers: Tiers, records: dict[int, Record], batches: list[Rows], transfers: Transfers, next_id: int
) -> list[str]:
    pool, host = tiers.device, tiers.host
    lines = [f"free: {_ids(reversed(pool.free))}"]
    if host.num_blocks:
        lines.append(f"host free: {_ids(reversed(host.free))}")
    lines += [f"queue {name}: {_ids(queue)}" for name, queue in pool.policy.queues().items()]
    if host.num_blocks:
        lines += [f"host queue {name}: {_ids(queue)}" for name, queue in host.policy.queues().items()]
        lines.append(f"host stored: {_ids(sorted(node.block for node in host.index.nodes() if node.stored))}")
        lines.append(f"fenced: {_ids(pool.fenced_blocks())}")
    lines += [_sequence(records[sequence_id]) for sequence_id in sorted(records)]
    lines += [_batch(rows) for rows in batches]
    lines += [_plan(transfer) for transfer in transfers]
    copies = " ".join(f"{source}->{target}" for target, source in pool.copies.items())
    lines.append(f"copies: {copies or '-'}")
    lines.append(f"clock: {pool.counters.clock_ticks}")
    lines.append(f"next sequence: {next_id}")
    lines.append("stats: " + " ".join(f"{name}={getattr(pool.counters, name)}" for name in _SHOWN))
    if host.num_blocks:
        lines.append("transfers: " + " ".join(f"{name}={getattr(pool.counters, name)}" for name in _SHOWN_TRANSFERS))
    return lines


def _sequence(record: Record) -> str:
    text = (
        f"sequence {record.id}: {record.state}; namespace {record.namespace!r}; cached {record.num_cached};"
        f" committed {record.num_committed}; planned {record.num_planned}; len {len(record.tokens)}"
    )
    if record.num_preemptions:
        text += f"; preempted {record.num_preemptions}"
    if record.back is not None:
        text += f"; back {record.back[0]}.{record.back[1]}"
    on_host = f"; host path {_ids(node.block for node in record.host_path)}"
    if record.state in ("swapped", "swapping_in"):
        on_host += f"; host own {_ids(record.host_own)}"
    if record.state == "preempted":
        return text
    if record.state == "swapped":
        return text + on_host
    return (
        f"{text}; path {_ids(node.block for node in record.path)}; table {_ids(record.table)};"
        f" publishes {'yes' if record.publishes else 'no'}; pinned {'yes' if record.pinned else 'no'}"
        + ("; computing" if record.announced is not None else "")
        + (on_host if record.state in ("swapping_out", "swapping_in") else "")
    )


def _plan(transfer: Transfer) -> str:
    plan = transfer.plan
    pairs = zip(plan.source_ids.tolist(), plan.destination_ids.tolist(), strict=True)
    blocks = " ".join(f"{source}->{destination}" for source, destination in pairs)
    state = transfer.state if transfer.tick is None else f"{transfer.state} at {transfer.tick}"
    return f"plan {plan.id}.{plan.generation}: {plan.kind}; {state}; {blocks or '-'}"


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
