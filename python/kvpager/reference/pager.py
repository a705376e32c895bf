"""The pager: where admission, the pool, the index and the sequences meet."""

from __future__ import annotations

import math
import os
from collections import deque
from typing import Literal, TypeVar, final, overload

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, NeverFits, OutOfBlocks
from ..types import Computing, Namespace, PrefixMatch, Stats, Tokens
from .batch import Batch
from .check import check
from .dump import dump
from .index import Index, Node, inside_run, post_order, run_start
from .inputs import as_bool, as_fraction, as_integer, as_prompt, as_tokens, encode_namespace, shown
from .policy import POLICIES
from .pool import Counters, Pool
from .record import Record, announced, num_blocks
from .rows import Rows
from .sequence import Sequence

BLOCKS_LIMIT = 2**31
BLOCK_SIZE_MAX = 1024
TOKENS_LIMIT = 2**40
IDENTITY_BYTES_MAX = 65_536
SEQS_MAX = 65_536
ENTRIES_LIMIT = 2**31
BUFFERS_MAX = 4

T = TypeVar("T")


@final
class Pager:
    """A pool of KV blocks with a prefix cache."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        policy: str = "lru",
        watermark: float = 0.0,
        identity: bytes = b"",
        seed: int | None = None,
        null_block: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        self.num_blocks = _integer("num_blocks", num_blocks, 1, BLOCKS_LIMIT - 1)
        self.block_size = _integer("block_size", block_size, 1, BLOCK_SIZE_MAX)
        if self.num_blocks * self.block_size >= TOKENS_LIMIT:
            raise ConfigError(f"num_blocks * block_size must be below 2^40, not {self.num_blocks * self.block_size}")
        self.policy = _instance("policy", policy, str)
        if policy not in POLICIES:
            raise ConfigError(f"policy is {shown(policy)}; it must be one of {', '.join(POLICIES)}")
        self.watermark = as_fraction("watermark", watermark)
        self.identity = _identity(identity)
        # Dictionaries of tuples of ints need no key, so the seed is only kept to be read back: no answer depends on it.
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else _integer("seed", seed, 0, 2**64 - 1)
        self.null_block = as_bool("null_block", null_block)
        self.prefix_cache = as_bool("prefix_cache", prefix_cache)
        if self._usable < 1:
            raise ConfigError("num_blocks must be at least 2 with a null block, not 1")

        self._counters = Counters()
        self._index = Index(self.block_size)
        self._policy = POLICIES[policy](self.num_blocks)
        self._pool = Pool(
            self.num_blocks, int(self.null_block), self._index, self._policy, self._counters, self.prefix_cache
        )
        self._records: dict[int, Record] = {}
        self._next_id = 0
        self._batches: dict[int, Rows] = {}
        self._next_batch = 0
        # Steps, and answers of take_copies that are not empty, are numbered in the order in which they were given out.
        self._launches = 0
        self._last_launched = 0  # the newest one that cannot be cancelled any more
        # Handles that the garbage collector took. Appending is one atomic step, so a destructor needs no lock.
        self._dropped: deque[Record | Rows] = deque()

    def __repr__(self) -> str:
        return (
            f"kvpager.reference.Pager(num_blocks={self.num_blocks}, block_size={self.block_size},"
            f" policy={self.policy!r}, watermark={self.watermark!r}, identity={self.identity!r},"
            f" null_block={self.null_block}, prefix_cache={self.prefix_cache})"
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks without content."""
        return len(self._pool.free)

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks, all of which eviction could free."""
        return len(self._policy)

    # Admission.

    @overload
    def admit(
        self, prompt: Tokens, *, namespace: Namespace = b"", pin: bool = False, wait: Literal[False] = False
    ) -> Sequence: ...
    @overload
    def admit(
        self, prompt: Tokens, *, namespace: Namespace = b"", pin: bool = False, wait: bool
    ) -> Sequence | Computing: ...

    def admit(
        self, prompt: Tokens, *, namespace: Namespace = b"", pin: bool = False, wait: bool = False
    ) -> Sequence | Computing:
        """Start a sequence: take what is cached of its prompt, and blocks for the rest; all or nothing."""
        self._drain()
        tokens, key = as_prompt(prompt), encode_namespace(namespace)
        record = Record(self._next_id, tokens, namespace, key, as_bool("pin", pin))
        if as_bool("wait", wait) and (computing := self._computing(record)):
            return computing
        path = self._admissible(record)
        record.take_path(self._pool, path, num_blocks(len(tokens), self.block_size))
        for node in path:
            node.hits += 1
            self._policy.hit(node)
        self._counters.admitted_sequences += 1
        self._counters.queried_tokens += len(tokens)
        self._counters.hit_tokens += record.num_cached
        record.announce(self._pool)
        return self._register(record)

    @overload
    def try_admit(
        self, prompt: Tokens, *, namespace: Namespace = b"", pin: bool = False, wait: Literal[False] = False
    ) -> Sequence | None: ...
    @overload
    def try_admit(
        self, prompt: Tokens, *, namespace: Namespace = b"", pin: bool = False, wait: bool
    ) -> Sequence | Computing | None: ...

    def try_admit(
        self, prompt: Tokens, *, namespace: Namespace = b"", pin: bool = False, wait: bool = False
    ) -> Sequence | Computing | None:
        """``admit``, or None where that raises OutOfBlocks. A prompt that never fits still raises."""
        try:
            return self.admit(prompt, namespace=namespace, pin=pin, wait=wait)
        except OutOfBlocks:
            return None

    def can_admit(self, prompt: Tokens, *, namespace: Namespace = b"", pin: bool = False) -> bool:
        """Whether the same ``admit`` would succeed now. Changes nothing: dropped handles stay, which admit releases."""
        tokens, key = as_prompt(prompt), encode_namespace(namespace)
        record = Record(self._next_id, tokens, namespace, key, as_bool("pin", pin))
        try:
            self._find(record)
        except (OutOfBlocks, NeverFits):
            return False
        return True

    def match(self, prompt: Tokens, *, namespace: Namespace = b"") -> PrefixMatch:
        """What an admit would hit now. Changes nothing, not even recency."""
        tokens, key = as_prompt(prompt), encode_namespace(namespace)
        path = self._index.match(key, tokens)
        computing = self._computing_behind(key, path, tokens)
        return PrefixMatch(len(path) * self.block_size, len(path), computing)

    def batch(
        self,
        max_seqs: int,
        max_blocks: int,
        max_tokens: int = 8192,
        *,
        buffers: int = 2,
        pad_block: int = 0,
        pad_slot: int = -1,
        pad_seq_len: int = 0,
    ) -> Batch:
        """Rows of sequences that are stepped together."""
        self._drain()
        rows = Rows(
            self._next_batch,
            max_seqs=_integer("max_seqs", max_seqs, 1, SEQS_MAX),
            max_blocks=_integer("max_blocks", max_blocks, 1, ENTRIES_LIMIT - 1),
            max_tokens=_integer("max_tokens", max_tokens, 1, ENTRIES_LIMIT - 1),
            buffers=_integer("buffers", buffers, 1, BUFFERS_MAX),
            pad_block=_integer("pad_block", pad_block, -(2**31), 2**31 - 1),
            pad_seq_len=_integer("pad_seq_len", pad_seq_len, -(2**31), 2**31 - 1),
        )
        # Nothing is padded with it here, where the arrays end with the planned positions.
        _integer("pad_slot", pad_slot, -(2**63), 2**63 - 1)
        for name, entries in (
            ("max_seqs * max_blocks", rows.max_seqs * rows.max_blocks),
            ("max_tokens", rows.max_tokens),
        ):
            if entries * rows.buffers >= ENTRIES_LIMIT:
                raise ConfigError(f"{name} * buffers must be below 2^31, not {entries * rows.buffers}")
        self._batches[rows.number] = rows
        self._next_batch += 1
        return Batch._make(self, rows)

    # The whole pool.

    def take_copies(self) -> npt.NDArray[np.int32]:
        """The copies to run before the next kernel, (source, target) a row."""
        self._drain()
        pairs = self._pool.take_copies()
        if pairs:
            self._last_launched = self._next_launch()
        return np.array(pairs, dtype=np.int32).reshape(-1, 2)

    def reset(self, identity: bytes | None = None) -> None:
        """Nothing that is cached now can hit again. Running sequences go on."""
        self._drain()
        if identity is not None:
            self.identity = _identity(identity)
        for record in self._records.values():
            record.publishes = False
        self._pool.forget_all()

    def forget(self, tokens: Tokens, *, namespace: Namespace = b"") -> int:
        """Take the last block of this path and all below it out of the prefix cache; how many blocks that were."""
        self._drain()
        path_tokens, key = as_tokens(tokens), encode_namespace(namespace)
        stop, rest = divmod(len(path_tokens), self.block_size)
        if rest or not stop:
            raise ValueError(
                f"forget needs a positive multiple of {self.block_size} (block_size) tokens, not {len(path_tokens)}"
            )
        path = self._index.walk(key, [], path_tokens, stop)
        if len(path) < stop:
            return 0
        gone = post_order(path[-1])
        self._index.detach(path[-1])
        self._pool.forget(gone)
        for record in self._records.values():
            if record.path and not record.path[-1].indexed:
                record.publishes = False
        return len(gone)

    def stats(self) -> Stats:
        """Blocks and sequences by state now, and the cumulative counters."""
        free, cached, reserved = len(self._pool.free), len(self._policy), self._pool.num_reserved
        preempted = sum(record.state == "preempted" for record in self._records.values())
        counters = self._counters
        return Stats(
            total_blocks=self.num_blocks,
            free_blocks=free,
            cached_blocks=cached,
            active_blocks=self.num_blocks - free - cached - reserved,
            reserved_blocks=reserved,
            evictable_blocks=cached,
            running_sequences=len(self._records) - preempted,
            preempted_sequences=preempted,
            **{name: getattr(counters, name) for name in counters.__slots__},
        )

    def check(self) -> list[str]:
        """Recount everything; every violation of a promise, with its id. Empty if all is well."""
        return check(self._pool, self._records, list(self._batches.values()))

    def dump(self, full: bool = False) -> str:
        """The prefix cache drawn as text; ``full`` adds everything else that decides later answers."""
        return dump(self._pool, self._records, list(self._batches.values()), self._next_id, full)

    # What a sequence's handle calls.

    def _drain(self) -> None:
        """Release the dropped handles and end the dropped batches, in the order in which they were dropped."""
        while self._dropped:
            dropped = self._dropped.popleft()
            if isinstance(dropped, Rows):
                dropped.end(self._pool)
                del self._batches[dropped.number]
            else:
                self._release(dropped)
                self._counters.dropped_handles += 1

    def _next_launch(self) -> int:
        self._launches += 1
        return self._launches

    def _last_given(self) -> int:
        """The newest step or answer of ``take_copies`` that was not cancelled."""
        return max([self._last_launched, *(step.launch for rows in self._batches.values() for step in rows.steps)])

    def _room(self) -> int:
        return len(self._pool.free) + len(self._policy)

    def _require(self, needed: int, rows: tuple[int, ...] = ()) -> None:
        if needed > self._room():
            self._counters.refused_calls += 1
            raise OutOfBlocks(needed, len(self._pool.free), len(self._policy), self.num_blocks, rows)

    def _release(self, record: Record) -> None:
        record.let_go(self._pool)
        record.state = "released"
        del self._records[record.id]
        self._counters.clock_ticks += 1

    def _preempt(self, record: Record) -> None:
        del record.tokens[record.num_known :]
        record.let_go(self._pool)
        record.state = "preempted"
        record.committed_at_preempt = record.num_committed
        record.num_cached = record.num_committed = 0
        self._counters.preemptions += 1

    def _resume(self, record: Record) -> None:
        path = self._admissible(record)
        record.take_path(self._pool, path, num_blocks(len(record.tokens), self.block_size))
        record.state = "running"
        record.publishes = True
        record.announce(self._pool)
        self._counters.recomputed_tokens += max(0, record.committed_at_preempt - record.num_cached)

    def _fork(self, record: Record) -> Sequence:
        return self._register(record.fork(self._pool, self._next_id))

    def _register(self, record: Record) -> Sequence:
        self._records[record.id] = record
        self._next_id += 1
        return Sequence._make(self, record)

    # Helpers.

    @property
    def _usable(self) -> int:
        return self.num_blocks - int(self.null_block)

    def _admissible(self, record: Record) -> list[Node]:
        try:
            return self._find(record)
        except (OutOfBlocks, NeverFits):
            self._counters.refused_calls += 1
            raise

    def _find(self, record: Record) -> list[Node]:
        """The path that the record's tokens hit, if the rest of the blocks can be had."""
        total = num_blocks(len(record.tokens), self.block_size)
        if total > self._usable:
            raise NeverFits(total, self._usable)
        path = self._index.match(record.key, record.tokens)
        needed = total - len(path)
        free = len(self._pool.free)
        evictable = len(self._policy) - sum(not self._pool.holds[node.block] for node in path)
        if needed > free + evictable:
            raise OutOfBlocks(needed, free, evictable, self.num_blocks)
        reserve = math.ceil(self.watermark * self._usable)
        if needed + reserve > free + evictable and self._others_run(record):
            raise OutOfBlocks(needed + reserve, free, evictable, self.num_blocks, reserve=reserve)
        return path

    def _computing(self, record: Record) -> Computing | None:
        """Who computes what the record's tokens want, if they can ever fit."""
        try:
            self._find(record)
        except OutOfBlocks:
            pass
        except NeverFits:
            self._counters.refused_calls += 1
            raise
        return self._computing_behind(record.key, self._index.match(record.key, record.tokens), record.tokens)

    def _computing_behind(self, key: bytes, path: list[Node], tokens: list[int]) -> Computing | None:
        number, size = len(path), self.block_size
        limit = (len(tokens) - 1) // size
        record = announced(self._pool, key, path, tokens[number * size : (number + 1) * size])
        if record is None or number >= limit:
            return None
        stop = number
        while stop < limit and record.tokens[stop * size :][:size] == tokens[stop * size :][:size]:
            stop += 1
        while stop > number and inside_run(tokens, stop * size):
            stop = run_start(tokens, stop * size) // size
        return Computing(record.id, stop * size) if stop > number else None

    def _others_run(self, record: Record) -> bool:
        return any(
            other.state == "running" and not other.pinned for other in self._records.values() if other is not record
        )


def _instance(name: str, value: T, kind: type) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _integer(name: str, value: int, low: int, high: int) -> int:
    value = as_integer(name, value)
    if not low <= value <= high:
        raise ConfigError(f"{name} is {shown(value)}; it must be {low} to {high}")
    return value


def _identity(identity: bytes) -> bytes:
    _instance("identity", identity, bytes)
    if len(identity) > IDENTITY_BYTES_MAX:
        raise ConfigError(f"identity must have at most {IDENTITY_BYTES_MAX} bytes, not {len(identity)}")
    return identity
