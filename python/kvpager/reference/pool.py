"""Blocks: which are free, who holds the others, and which copies wait between them.

A hold on a block that is or was indexed keeps the blocks above it, too. It is stored as one count: a node with a holder
is itself one holder of its parent. So a sequence holds its whole path by its last block, and letting go of that block
lets go of what nobody else needs, deepest first.

An offload's hold on the blocks that it reads is a *pin*, and so is a save's on the host. It is counted apart, in the
same way, because it leaves the block where it is in its policy's queue: it is only passed over there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..plans import Tier
from .index import Index, Node, path_to, root_of
from .policy import Policy

if TYPE_CHECKING:
    from .record import Place, Record


@dataclass(slots=True)
class Copy:
    """A copy that an open step has handed out. The step holds the source."""

    source: int
    target: int
    withdrawn: bool = False  # the target was freed since


@dataclass(slots=True)
class Counters:
    """The cumulative part of Stats, in its order."""

    clock_ticks: int = 0
    admitted_sequences: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    evicted_idle_ticks: int = 0
    evicted_hits: int = 0
    copies: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    dropped_handles: int = 0
    refused_calls: int = 0
    noop_calls: int = 0
    host_evicted_blocks: int = 0
    offloaded_blocks: int = 0
    fetched_blocks: int = 0
    swap_outs: int = 0
    swap_ins: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    late_reports: int = 0
    computed_tokens: int = 0
    finished_sequences: int = 0
    swapped_tokens: int = 0
    refaulted_blocks: int = 0
    refault_distance: int = 0


class Pool:
    """The frames of one tier of a pager."""

    def __init__(
        self,
        num_blocks: int,
        first_usable: int,
        index: Index,
        policy: Policy,
        counters: Counters,
        prefix_cache: bool,
        tier: Tier = "device",
        fenced: bool = False,
        num_ghosts: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = first_usable
        self.index = index
        self.policy = policy
        self.counters = counters
        self.prefix_cache = prefix_cache
        self.tier = tier
        self.has_fences = fenced
        self.era = 0  # counts the resets
        # The last evicted blocks, each by era, namespace and all tokens up to it, with the number of its eviction.
        self.num_ghosts = num_ghosts
        self.ghosts: OrderedDict[tuple[int, bytes, tuple[int, ...]], int] = OrderedDict()
        # The top of the stack is the right end; a reset puts its blocks below all others, at the left end.
        self.free: deque[int] = deque(range(num_blocks - 1, first_usable - 1, -1))
        self.holds = [0] * num_blocks
        self.reads = [0] * num_blocks
        self.pins: dict[int, int] = {}  # block -> how many chains of offloads or saves read it, pinned children counted
        self.nodes: list[Node | None] = [None] * num_blocks
        self.copies: dict[int, int] = {}  # target -> source, in the order in which they were asked for
        self.announced: dict[Place, Record] = {}  # who has announced which block
        self.given: dict[int, Copy] = {}  # target -> the copy of an open step, until that target is freed
        self.open_launches: set[int] = set()  # the steps that are open, of all batches
        self.fences: dict[int, frozenset[int]] = {}  # block -> the steps that were open when nobody needed it any more

    @property
    def room(self) -> int:
        """Blocks that a call can take."""
        return len(self.free) + self.evictable

    @property
    def evictable(self) -> int:
        """Cached blocks: those in a queue that no offload or save reads."""
        return len(self.policy) - sum(self._rests(block) for block in self.pins)

    def is_evictable(self, block: int) -> bool:
        """Whether the block is cached."""
        return self._rests(block) and block not in self.pins

    def _rests(self, block: int) -> bool:
        """Whether the block is in a queue."""
        node = self.nodes[block]
        return node is not None and node.indexed and not self.holds[block]

    def is_fenced(self, block: int) -> bool:
        """Whether a step is still open that was open when the block became cached or free."""
        return not self.open_launches.isdisjoint(self.fences.get(block, ()))

    def fenced_blocks(self) -> list[int]:
        """The free and cached blocks that no transfer may write to yet."""
        free = set(self.free)
        return [
            block
            for block in sorted(self.fences)
            if self.is_fenced(block) and (block in free or self.is_evictable(block))
        ]

    def _fence(self, block: int) -> None:
        """The block is cached or free from now on: the steps that are open may still use it."""
        self.fences.pop(block, None)
        if self.has_fences and self.open_launches:
            self.fences[block] = frozenset(self.open_launches)

    def hold(self, block: int) -> None:
        """One more holder. A cached block is active from now on, and so is what lies above it."""
        while True:
            self.holds[block] += 1
            node = self.nodes[block]
            if self.holds[block] > 1 or node is None:
                return
            if node.indexed:
                self.policy.taken(node)
            if node.above is None:
                return
            block = node.above.block

    def drop(self, block: int) -> None:
        """One holder less: one moment. Blocks that lose their last holder become cached or free, deepest first."""
        pending = [block]
        while pending:
            block = pending.pop()
            self.holds[block] -= 1
            if self.holds[block]:
                continue
            node = self.nodes[block]
            if node is not None and node.above is not None:
                pending.append(node.above.block)
            if node is not None and node.indexed:
                node.idle_since = self.counters.clock_ticks
                node.offered = False
                self.policy.cached(node)
                if block not in self.pins:
                    self._fence(block)
                continue
            if block in self.pins:
                continue
            source = self._free(block)
            if source is not None:
                pending.append(source)
        self.policy.settle()

    def pin(self, block: int) -> None:
        """A chain that ends here is read: its blocks keep their places in their queue, but are not cached meanwhile."""
        while True:
            self.pins[block] = self.pins.get(block, 0) + 1
            node = self.nodes[block]
            if self.pins[block] > 1 or node is None or node.above is None:
                return
            block = node.above.block

    def unpin(self, block: int) -> None:
        """The chain has been read; those above the block that were pinned only by this are let go of as well."""
        above: Node | None = self.nodes[block]
        while above is not None:
            node, block, above = above, above.block, above.above
            self.pins[block] -= 1
            if self.pins[block]:
                return
            del self.pins[block]
            if self.holds[block]:
                continue
            if node.indexed:
                self._fence(block)
                continue
            source = self._free(block)
            if source is not None:
                self.drop(source)

    def _free(self, block: int) -> int | None:
        """Push a block on the free stack. If a copy into it was queued, its source, which the caller drops."""
        self.nodes[block] = None
        self.free.append(block)
        self._fence(block)
        return self.withdraw(block)

    def take(self, count: int, transfer: bool = False) -> list[int]:
        """Frames for new content: free ones first, then victims, block by block (I8). No fenced ones for a transfer."""
        return [self._take(transfer) for _ in range(count)]

    def _take(self, transfer: bool) -> int:
        for number in range(len(self.free) - 1, -1, -1):
            block = self.free[number]
            if not (transfer and self.is_fenced(block)):
                del self.free[number]
                break
        else:
            block = self._evict(transfer)
        self.fences.pop(block, None)
        # Even a block that a reset freed may still be the target of a queued copy.
        source = self.withdraw(block)
        if source is not None:
            self.drop(source)
        return block

    def _evict(self, transfer: bool) -> int:
        node = next(
            node
            for queue in self.policy.queues().values()
            for node in queue.values()
            if node.block not in self.pins and not (transfer and self.is_fenced(node.block))
        )
        self.policy.taken(node)
        if self.num_ghosts:
            self._remember(node)
        self.index.detach(node)
        self.nodes[node.block] = None
        if self.tier == "host":
            self.counters.host_evicted_blocks += 1
        else:
            self.counters.evicted_blocks += 1
            self.counters.evicted_idle_ticks += self.counters.clock_ticks - node.idle_since
            self.counters.evicted_hits += node.hits
        return node.block

    def _remember(self, node: Node) -> None:
        path = path_to(node)
        ghost = self.era, root_of(path).key, tuple(token for each in path for token in each.tokens)
        self.ghosts.pop(ghost, None)
        self.ghosts[ghost] = self.counters.evicted_blocks
        while next(iter(self.ghosts.values())) <= self.counters.evicted_blocks - self.num_ghosts:
            self.ghosts.popitem(last=False)

    def ask(self, key: bytes, tokens: list[int], start: int) -> None:
        """The blocks behind a hit of ``start`` blocks are asked for: some were evicted not long ago."""
        size = self.index.block_size
        for stop in range(start + 1, (len(tokens) - 1) // size + 1):
            number = self.ghosts.pop((self.era, key, tuple(tokens[: stop * size])), None)
            if number is None:
                return
            self.counters.refaulted_blocks += 1
            self.counters.refault_distance += self.counters.evicted_blocks - number - 1

    def publish(self, node: Node) -> None:
        """The node's block, which somebody holds, is indexed now: it becomes a holder of its parent."""
        self.nodes[node.block] = node
        if node.above is not None:
            self.hold(node.above.block)

    def forget(self, gone: list[Node]) -> None:
        """Blocks that have left the index: what nobody holds is free at once, in this order."""
        resting = [node for node in gone if not self.holds[node.block]]
        unheld = [node for node in resting if node.block not in self.pins]
        for node in gone:
            node.indexed = False
            node.children = {}
        for node in resting:
            self.policy.taken(node)
        for node in unheld:
            self.nodes[node.block] = None
        for node in unheld:
            source = self._free(node.block)
            if source is not None:
                self.drop(source)

    def forget_all(self) -> None:
        """Everything leaves the index. What nobody holds goes below the free blocks, in eviction order."""
        self.era += 1
        nodes = [node for node in self.nodes if node is not None]
        resting = [node for queue in self.policy.queues().values() for node in queue.values()]
        unheld = [node.block for node in resting if node.block not in self.pins]
        for node in resting:
            self.policy.taken(node)
        for block in unheld:
            self.nodes[block] = None
        for node in nodes:
            node.indexed = False
            node.children = {}
        self.index.roots.clear()
        self.free.extendleft(unheld)

    def shared(self, block: int, leaving: int = 0) -> bool:
        """Whether somebody else reads this block of a sequence: the index, now or once, or another sequence.

        So many other sequences are about to leave it.
        """
        return self.nodes[block] is not None or self.holds[block] - self.reads[block] - leaving > 1

    def queue_copy(self, source: int, target: int) -> None:
        """Ask for a copy. From a block that is itself still to be copied, the copy starts at that one's source."""
        source = self.copies.get(source, source)
        self.copies[target] = source
        self.reads[source] += 1
        self.hold(source)

    def withdraw(self, target: int) -> int | None:
        """``target`` was freed: forget the queued copy into it if there is one; its source, which the caller drops."""
        given = self.given.pop(target, None)
        if given is not None:
            given.withdrawn = True
        source = self.copies.pop(target, None)
        if source is not None:
            self.reads[source] -= 1
        return source

    def take_copies(self) -> list[tuple[int, int]]:
        """Hand out the queue and let go of its sources."""
        pairs = [(source, target) for target, source in self.copies.items()]
        self.copies.clear()
        self.counters.copies += len(pairs)
        self.let_go_of(source for source, _ in pairs)
        return pairs

    def give_copies(self) -> list[Copy]:
        """Hand the queue over to a step, which goes on holding the sources."""
        copies = [Copy(source, target) for target, source in self.copies.items()]
        self.copies.clear()
        self.given.update((copy.target, copy) for copy in copies)
        return copies

    def finish_copies(self, copies: list[Copy]) -> None:
        """The step that these copies were given to has run."""
        for copy in copies:
            if not copy.withdrawn:
                del self.given[copy.target]
        self.counters.copies += len(copies)
        self.let_go_of(copy.source for copy in copies)

    def take_back(self, copy: Copy) -> bool:
        """The step that had this copy will never run; whether its target still wants it."""
        readers = [target for target, source in self.copies.items() if source == copy.target]
        for reader in readers:
            self.copies[reader] = copy.source
            self.reads[copy.source] += 1
            self.hold(copy.source)
        self.let_go_of([copy.target] * len(readers))
        if copy.withdrawn:
            self.let_go_of([copy.source])
            return False
        del self.given[copy.target]
        return True

    def requeue(self, copy: Copy) -> None:
        """Put a copy that was taken back at the front of the queue, with its hold."""
        self.copies = {copy.target: copy.source, **self.copies}

    def let_go_of(self, sources: Iterable[int]) -> None:
        """Copies that read these blocks have run or will never run; each one is a moment of its own."""
        sources = list(sources)
        for source in sources:
            self.reads[source] -= 1
        for source in sources:
            self.drop(source)
