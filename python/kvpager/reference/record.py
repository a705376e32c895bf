"""What the pager knows of one sequence, and what it does to the sequence's blocks.

A record's holds: one for each table entry that is not on its path at the same position, and one for the whole path, by
its last block. Calls that change holds take the new ones before they drop the old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from ..types import Namespace
from .index import Node, inside_run
from .log import Log, Why
from .pool import Pool

if TYPE_CHECKING:
    from .rows import OpenRow, Rows
    from .transfers import Fetch

PLACEHOLDER = -1  # in the place of a token that an open step is still to find

# The states in which a sequence has device blocks.
WITH_BLOCKS = ("running", "fetching", "swapping_out", "swapping_in")


class Record:
    """One sequence that is not released yet. It holds blocks while it is running."""

    __slots__ = (
        "announced",
        "back",
        "committed_at_preempt",
        "era",
        "fetch",
        "home",
        "host_own",
        "host_path",
        "id",
        "key",
        "namespace",
        "num_cached",
        "num_committed",
        "num_preemptions",
        "open_rows",
        "path",
        "pinned",
        "publishes",
        "state",
        "table",
        "tokens",
        "why",
    )

    def __init__(self, sequence_id: int, tokens: list[int], namespace: Namespace, key: bytes, pinned: bool) -> None:
        self.id = sequence_id
        self.tokens = tokens
        self.namespace = namespace
        self.key = key
        self.pinned = pinned
        self.state = "running"
        self.table: list[int] = []
        self.path: list[Node] = []
        self.num_cached = 0
        self.num_committed = 0
        self.publishes = True
        self.committed_at_preempt = 0
        self.announced: Place | None = None  # the block behind its path, if it has announced that
        self.home: Rows | None = None  # the batch that has a row for it
        self.open_rows: list[OpenRow] = []  # the rows of open steps that name it, oldest first
        self.era = 0  # resets before its admission
        self.fetch: Fetch | None = None  # who brings a part of its prompt
        self.host_path: list[Node] = []  # what it holds of the host's index, by its last block
        self.host_own: list[int] = []  # the host blocks behind that, which are nobody else's
        self.num_preemptions = 0
        self.back: tuple[int, int] | None = None  # when it came back: the next id then, and the number of that return
        self.why = Why()  # it is being swapped out

    @property
    def num_planned(self) -> int:
        """Where the next step begins."""
        return self.open_rows[-1].stop if self.open_rows else self.num_committed

    @property
    def num_known(self) -> int:
        """Tokens before the first placeholder."""
        return self.tokens.index(PLACEHOLDER) if PLACEHOLDER in self.tokens else len(self.tokens)

    def on_path(self, number: int) -> bool:
        """Whether the table entry is the path's block, so that the path holds it already."""
        return number < len(self.path) and self.path[number].block == self.table[number]

    def take_path(self, pool: Pool, path: list[Node], num_blocks: int) -> None:
        """Start (again) on a hit path, with fresh blocks behind it."""
        self.occupy(pool, path, [], 0, num_blocks)
        self.num_cached = self.num_committed = len(path) * pool.index.block_size

    def occupy(self, pool: Pool, path: list[Node], joined: list[int], num_fetched: int, num_blocks: int) -> list[int]:
        """Hold a path, behind it blocks that are fetched already, then take those to fetch, and the rest; those."""
        if path:
            pool.hold(path[-1].block)
        for block in joined:
            pool.hold(block)
        fetched = pool.take(num_fetched, transfer=True)
        fresh = fetched + pool.take(num_blocks - len(path) - len(joined) - num_fetched)
        for block in fresh:
            pool.hold(block)
        self.path = path
        self.table = [node.block for node in path] + joined + fresh
        return fetched

    def live_path(self) -> list[Node]:
        """The path down to the first block that was forgotten."""
        return [node for node in self.path if node.indexed]

    @property
    def entry(self) -> tuple[int, int]:
        """When it came in, or came back: later ones are greater."""
        return self.back or (self.id + 1, 0)

    def preempt(self, pool: Pool, log: Log, why: Why) -> None:
        """Give all blocks back; tokens and handle stay."""
        del self.tokens[self.num_known :]
        self.leave(pool, log, why, "recompute")
        self.state = "preempted"
        self.committed_at_preempt = self.num_committed
        self.num_cached = self.num_committed = 0
        pool.counters.preemptions += 1

    def leave(self, pool: Pool, log: Log, why: Why, action: Literal["recompute", "swap"]) -> None:
        """Let go of the device, to come back later; the log tells of it."""
        room = pool.room
        self.let_go(pool)
        log.add(pool.counters.clock_ticks, self.id, action, pool.room - room, self.num_committed, why)
        self.num_preemptions += 1

    def let_go(self, pool: Pool) -> None:
        """Leave steps and batch, and drop every hold, the table before the path."""
        self.withdraw(pool)
        self._void_rows(0)
        if self.home is not None:
            self.home.leave(self)
        loose = [block for number, block in enumerate(self.table) if not self.on_path(number)]
        path, self.table, self.path = self.path, [], []
        for block in reversed(loose):
            pool.drop(block)
        if path:
            pool.drop(path[-1].block)

    def let_go_of_host(self, host: Pool) -> None:
        """Drop what it holds on the host, its own blocks before the path."""
        path, own = self.host_path, self.host_own
        self.host_path, self.host_own = [], []
        for block in reversed(own):
            host.drop(block)
        if path:
            host.drop(path[-1].block)

    def fork(self, pool: Pool, sequence_id: int) -> Record:
        """A child that shares every block of the known tokens. No step is to write for it."""
        tokens = self.tokens[: self.num_known]
        child = Record(sequence_id, tokens, self.namespace, self.key, pinned=False)
        child.table = self.table[: num_blocks(len(tokens), pool.index.block_size)]
        child.path = self.path.copy()
        child.num_cached = self.num_cached
        child.num_committed = self.num_committed
        child.publishes = self.publishes
        child.era = self.era
        child.num_preemptions = self.num_preemptions
        for number, block in enumerate(child.table):
            if not child.on_path(number):
                pool.hold(block)
        if child.path:
            pool.hold(child.path[-1].block)
        return child

    def truncate(self, pool: Pool, num_tokens: int) -> None:
        """Cut table, path and positions. An indexed block that is cut in two stays in the table as a shared partial."""
        self._cut_announced(pool, num_tokens)
        self._void_rows(num_tokens)
        kept = num_blocks(num_tokens, pool.index.block_size)
        full = num_tokens // pool.index.block_size
        loose = [self.table[number] for number in range(kept, len(self.table)) if not self.on_path(number)]
        old_path = self.path
        if kept > full and self.on_path(full):
            pool.hold(self.table[full])
        if full < len(old_path):
            self.path = old_path[:full]
            if self.path:
                pool.hold(self.path[-1].block)
        del self.table[kept:]
        del self.tokens[num_tokens:]
        self.num_cached = min(self.num_cached, num_tokens)
        self.num_committed = min(self.num_committed, num_tokens)
        for block in reversed(loose):
            pool.drop(block)
        if full < len(old_path):
            pool.drop(old_path[-1].block)

    def _void_rows(self, num_tokens: int) -> None:
        """The sequence has been cut to so few tokens: open rows that end behind them do not name it any more."""
        while self.open_rows and self.open_rows[-1].stop > num_tokens:
            self.open_rows.pop().void = True

    def unwritable(self, pool: Pool, start: int, stop: int) -> list[int]:
        """The table positions among ``start..stop`` (in tokens) whose block somebody else reads."""
        return [number for number in self.entries(pool, start, stop) if pool.shared(self.table[number])]

    def entries(self, pool: Pool, start: int, stop: int) -> range:
        """The table positions among ``start..stop`` (in tokens), as far as there are any."""
        if start == stop:
            return range(0)
        block_size = pool.index.block_size
        return range(start // block_size, min(num_blocks(stop, block_size), len(self.table)))

    def missing(self, pool: Pool, start: int, stop: int) -> int:
        """How many blocks the table lacks for the positions up to ``stop``; an empty range lacks none."""
        return max(0, num_blocks(stop, pool.index.block_size) - len(self.table)) if start < stop else 0

    def slots(self, positions: range, block_size: int) -> list[int]:
        """Where the KV of these positions goes."""
        return [self.table[each // block_size] * block_size + each % block_size for each in positions]

    def make_writable(self, pool: Pool, numbers: list[int], fresh: list[int]) -> list[int]:
        """Replace the blocks at ``numbers`` by ``fresh`` ones, and add the rest of these; the numbers to be copied."""
        copied = []
        for number, new in zip(numbers, fresh, strict=False):
            old = self.table[number]
            pool.hold(new)
            if self.num_planned > number * pool.index.block_size:
                pool.queue_copy(old, new)
                copied.append(number)
            self.table[number] = new
            pool.drop(old)
        for new in fresh[len(numbers) :]:
            pool.hold(new)
            self.table.append(new)
        return copied

    def commit(self, pool: Pool, end: int) -> None:
        """The KV below ``end`` is written. A commit that fills a block publishes."""
        if end <= self.num_committed:
            return
        full_before = self.num_committed // pool.index.block_size
        pool.counters.computed_tokens += end - self.num_committed
        self.num_committed = end
        if end // pool.index.block_size > full_before:
            self.settle(pool)

    def settle(self, pool: Pool) -> None:
        """More is committed: publish it, and announce what comes behind."""
        self.withdraw(pool)
        if pool.prefix_cache:
            self.publish(pool)
        self.announce(pool)

    def announce(self, pool: Pool) -> None:
        """Announce the block behind the path, if it is to be computed and no other record has announced it."""
        number, size = len(self.path), pool.index.block_size
        block = self.tokens[number * size : (number + 1) * size]
        if not (pool.prefix_cache and self.publishes) or len(block) < size or PLACEHOLDER in block:
            return
        if self.num_committed < (number + 1) * size and announced(pool, self.key, self.path, block) is None:
            self.announced = _place(self.key, self.path, block)
            pool.announced[self.announced] = self

    def withdraw(self, pool: Pool) -> None:
        """End the announcement, if there is one."""
        if self.announced is not None and pool.announced.get(self.announced) is self:
            del pool.announced[self.announced]
        self.announced = None

    def learn(self, position: int, token: int) -> None:
        """A committed step found the token of this position, if it is not known from elsewhere."""
        if position == len(self.tokens):
            self.tokens.append(token)
        elif self.tokens[position] == PLACEHOLDER:
            self.tokens[position] = token
            for row in self.open_rows:
                # It stays even if the step that asked for it is cancelled.
                row.length_before = max(row.length_before, position + 1)

    def unplan(self, pool: Pool, row: OpenRow) -> None:
        """Cancel the newest open row: its tokens go, and its new blocks, unless later tokens lie in them."""
        self.open_rows.remove(row)
        if row.stop > row.length_before:
            self._cut_tokens(pool, row.length_before)
        elif row.stop < len(self.tokens) and self.tokens[row.stop] == PLACEHOLDER:
            self._cut_tokens(pool, row.stop)
        if len(self.table) == row.entries_after and len(self.tokens) <= row.length_before:
            while len(self.table) > row.entries_before:
                pool.drop(self.table.pop())

    def _cut_announced(self, pool: Pool, num_tokens: int) -> None:
        """A cut into the block that is announced, or above it, ends the announcement."""
        if num_tokens < (len(self.path) + 1) * pool.index.block_size:
            self.withdraw(pool)

    def _cut_tokens(self, pool: Pool, num_tokens: int) -> None:
        self._cut_announced(pool, num_tokens)
        del self.tokens[num_tokens:]
        self._void_rows(num_tokens)

    def put_back(self, pool: Pool, number: int, source: int) -> None:
        """The table entry points at the source of its copy again."""
        target = self.table[number]
        pool.hold(source)
        self.table[number] = source
        pool.drop(target)

    def publish(self, pool: Pool) -> None:
        """Index the full, committed blocks that are not on the path yet, or follow equal ones that are indexed."""
        index = pool.index
        while self.publishes and (unit := self._next_unit(index.block_size)):
            found = index.walk(self.key, self.path, self.tokens, unit.stop)
            if found and len(found) < len(unit):
                # The index agrees with a part of a run of content tokens: below it might lie another content.
                return
            if not found and any(pool.nodes[self.table[number]] is not None for number in unit):
                # A block is indexed once: this one was forgotten.
                return
            for number in unit:
                self._join(pool, found[number - unit.start] if found else None)

    def _next_unit(self, block_size: int) -> range:
        """The least range of blocks behind the path that ends inside no run and is committed as a whole."""
        start = stop = len(self.path)
        while (stop + 1) * block_size <= self.num_committed:
            stop += 1
            if not inside_run(self.tokens, stop * block_size):
                return range(start, stop)
        return range(0)

    def _join(self, pool: Pool, found: Node | None) -> None:
        """Lengthen the path by one block: one that is indexed, or else the sequence's own, indexed now."""
        number = len(self.path)
        own = self.table[number]
        above = self.path[-1] if self.path else None
        if found is None:
            tokens = pool.index.block_tokens(self.tokens, number)
            found = pool.index.add(self.key, self.namespace, self.path, tokens, own)
            pool.publish(found)
        pool.hold(found.block)
        self.path.append(found)
        if found.block == own:
            pool.drop(own)
        if above is not None:
            pool.drop(above.block)


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks for so many tokens."""
    return -(-num_tokens // block_size)


# A block behind a path: the path's last node, or the namespace's key, and the tokens of the block.
Place: TypeAlias = tuple[Node | bytes, tuple[int, ...]]


def announced(pool: Pool, key: bytes, path: list[Node], block: list[int]) -> Record | None:
    """Who has announced ``block`` behind ``path``. Nothing leads to what was announced before a reset or forget."""
    record = pool.announced.get(_place(key, path, block))
    return record if record is not None and record.publishes else None


def _place(key: bytes, path: list[Node], block: list[int]) -> Place:
    return (path[-1] if path else key, tuple(block))
