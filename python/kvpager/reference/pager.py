"""The pager: where admission, the pool, the index and the sequences meet."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections import Counter, abc, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar, final, overload

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, NeverFits, OutOfBlocks, TransferError
from ..metrics import exposition
from ..plans import Plan, PlanState, PlanStatus, StoreKeys
from ..pressure import Reading
from ..types import (
    AttachedTier,
    Computing,
    FetchPolicy,
    Namespace,
    Preemption,
    PrefixMatch,
    RecoveryCost,
    Stats,
    Tokens,
    Victim,
    VictimPolicy,
)
from .batch import Batch
from .check import check
from .dump import dump
from .index import (
    FIRST_CONTENT_TOKEN,
    BlockTokens,
    Index,
    Node,
    path_to,
    post_order,
    root_of,
    tokens_of,
    whole_runs,
)
from .inputs import (
    as_bool,
    as_fraction,
    as_integer,
    as_least,
    as_mask,
    as_position,
    as_prompt,
    as_tick,
    as_tokens,
    encode_namespace,
    shown,
)
from .log import Log
from .policy import POLICIES, Lru
from .pool import Counters, Pool
from .record import WITH_BLOCKS, Record, announced, num_blocks
from .rows import Rows
from .sequence import Sequence
from .store import Load, Save, StoreBlock, as_store_keys, root_key, store_blocks, unsaved
from .tiers import Tiers
from .transfers import (
    Chain,
    Fetch,
    Offload,
    SwapIn,
    SwapOut,
    Transfer,
    Transfers,
    count_blocks,
    missing,
    take_chain,
)
from .victims import as_asked, choose_victims

BLOCKS_LIMIT = 2**31
BLOCK_SIZE_MAX = 1024
TOKENS_LIMIT = 2**40
IDENTITY_BYTES_MAX = 65_536
SEQS_MAX = 65_536
ENTRIES_LIMIT = 2**31
BUFFERS_MAX = 4

T = TypeVar("T")


@dataclass(slots=True)
class Hit:
    """What an admission finds: a path on the device, and behind it, up to block ``stop``, what is to be fetched."""

    path: list[Node]
    stop: int
    host_path: list[Node] = field(default_factory=list)  # from the top, where a fetch of its own is to be made
    join: Fetch | None = None


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
        num_host_blocks: int = 0,
        num_ghost_blocks: int = 0,
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
        self.num_host_blocks = _integer("num_host_blocks", num_host_blocks, 0, BLOCKS_LIMIT - 1)
        self.num_ghost_blocks = _integer("num_ghost_blocks", num_ghost_blocks, 0, BLOCKS_LIMIT - 1)
        if self._usable < 1:
            raise ConfigError("num_blocks must be at least 2 with a null block, not 1")

        self._counters = Counters()
        self._index = Index(self.block_size)
        self._policy = POLICIES[policy](self.num_blocks)
        self._pool = Pool(
            self.num_blocks,
            int(self.null_block),
            self._index,
            self._policy,
            self._counters,
            self.prefix_cache,
            fenced=self.num_host_blocks > 0,
            num_ghosts=self.num_ghost_blocks,
        )
        self._host = Pool(
            self.num_host_blocks,
            0,
            Index(self.block_size),
            Lru(self.num_host_blocks),
            self._counters,
            self.prefix_cache,
            tier="host",
        )
        self._log = Log()
        self._tiers = Tiers(self._pool, self._host, self._counters, self._log)
        self._transfers = Transfers()
        self._records: dict[int, Record] = {}
        self._next_id = 0
        self._num_returns = 0
        self._batches: dict[int, Rows] = {}
        self._next_batch = 0
        # Steps, and answers of take_copies that are not empty, are numbered in the order in which they were given out.
        self._launches = 0
        self._last_launched = 0  # the newest one that cannot be cancelled any more
        self._attached: list[weakref.ref[AttachedTier]] = []  # weak, as a tier holds the pager
        # Handles that the garbage collector took. Appending is one atomic step, so a destructor needs no lock.
        self._dropped: deque[Record | Rows] = deque()

    def __repr__(self) -> str:
        return (
            f"kvpager.reference.Pager(num_blocks={self.num_blocks}, block_size={self.block_size},"
            f" policy={self.policy!r}, watermark={self.watermark!r}, identity={self.identity!r},"
            f" null_block={self.null_block}, prefix_cache={self.prefix_cache}"
            f"{f', num_host_blocks={self.num_host_blocks}' if self.num_host_blocks else ''}"
            f"{f', num_ghost_blocks={self.num_ghost_blocks}' if self.num_ghost_blocks else ''})"
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks without content."""
        return len(self._pool.free)

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks, all of which eviction could free."""
        return self._pool.evictable

    @property
    def num_fenced_blocks(self) -> int:
        """Free and cached blocks that open steps may still use, which no transfer writes to before these are over."""
        return len(self._pool.fenced_blocks())

    # Admission.

    @overload
    def admit(
        self,
        prompt: Tokens,
        *,
        namespace: Namespace = b"",
        pin: bool = False,
        wait: Literal[False] = False,
        fetch: bool | FetchPolicy = False,
        fetch_min_tokens: int = 1,
    ) -> Sequence: ...
    @overload
    def admit(
        self,
        prompt: Tokens,
        *,
        namespace: Namespace = b"",
        pin: bool = False,
        wait: bool,
        fetch: bool | FetchPolicy = False,
        fetch_min_tokens: int = 1,
    ) -> Sequence | Computing: ...

    def admit(
        self,
        prompt: Tokens,
        *,
        namespace: Namespace = b"",
        pin: bool = False,
        wait: bool = False,
        fetch: bool | FetchPolicy = False,
        fetch_min_tokens: int = 1,
    ) -> Sequence | Computing:
        """Start a sequence: take what is cached of its prompt, and blocks for the rest; all or nothing."""
        self._drain()
        tokens, key = as_prompt(prompt), encode_namespace(namespace)
        record = Record(self._next_id, tokens, namespace, key, as_bool("pin", pin))
        wait, fetch, least = (
            as_bool("wait", wait),
            self._wants_fetch(fetch, prompt, namespace),
            as_least("fetch_min_tokens", fetch_min_tokens),
        )
        if wait and (computing := self._computing(record)):
            return computing
        hit = self._admissible(record, least if fetch else None)
        total, size = num_blocks(len(tokens), self.block_size), len(hit.path)
        joined = hit.join.blocks[: hit.stop - size] if hit.join is not None else []
        if hit.host_path:
            self._host.hold(hit.host_path[-1].block)
        self._pool.ask(key, tokens, size)
        fetched = record.occupy(self._pool, hit.path, joined, len(hit.host_path) and hit.stop - size, total)
        record.num_cached = record.num_committed = size * self.block_size
        record.era = self._pool.era
        for node in hit.path:
            node.hits += 1
            self._policy.hit(node)
        if fetched:
            for block in fetched:
                self._pool.hold(block)
            hit.join = Fetch(key, size, hit.host_path, fetched)
            self._transfers.make("fetch", hit.join, [node.block for node in hit.host_path[size:]], fetched)
        if hit.join is not None:
            record.state, record.fetch = "fetching", hit.join
            hit.join.parts[record] = hit.stop
        self._counters.admitted_sequences += 1
        self._counters.queried_tokens += len(tokens)
        self._counters.hit_tokens += record.num_cached
        record.announce(self._pool)
        return self._register(record)

    @overload
    def try_admit(
        self,
        prompt: Tokens,
        *,
        namespace: Namespace = b"",
        pin: bool = False,
        wait: Literal[False] = False,
        fetch: bool | FetchPolicy = False,
        fetch_min_tokens: int = 1,
    ) -> Sequence | None: ...
    @overload
    def try_admit(
        self,
        prompt: Tokens,
        *,
        namespace: Namespace = b"",
        pin: bool = False,
        wait: bool,
        fetch: bool | FetchPolicy = False,
        fetch_min_tokens: int = 1,
    ) -> Sequence | Computing | None: ...

    def try_admit(
        self,
        prompt: Tokens,
        *,
        namespace: Namespace = b"",
        pin: bool = False,
        wait: bool = False,
        fetch: bool | FetchPolicy = False,
        fetch_min_tokens: int = 1,
    ) -> Sequence | Computing | None:
        """``admit``, or None where that raises OutOfBlocks. A prompt that never fits still raises."""
        try:
            return self.admit(
                prompt, namespace=namespace, pin=pin, wait=wait, fetch=fetch, fetch_min_tokens=fetch_min_tokens
            )
        except OutOfBlocks:
            return None

    def _wants_fetch(self, fetch: bool | FetchPolicy, prompt: Tokens, namespace: Namespace) -> bool:
        if isinstance(fetch, bool | np.bool_) or not hasattr(fetch, "should_fetch"):
            return as_bool("fetch", fetch)
        match = self.match(prompt, namespace=namespace)
        return bool(match.num_host_tokens and fetch.should_fetch(match.num_tokens, match.num_host_tokens))

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
        num_host = max(0, len(self._host.index.match(key, tokens)) - len(path))
        return PrefixMatch(len(path) * self.block_size, len(path), computing, num_host * self.block_size)

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

    def attach(self, tier: AttachedTier) -> None:
        """What the pager resets (with the identity that it has) or forgets from now on, this tier is to drop, too."""
        if not (hasattr(tier, "on_reset") and hasattr(tier, "on_forget")):
            raise TypeError(
                f"tier must be an object with the methods on_reset and on_forget, not {type(tier).__name__}"
            )
        self._attached.append(weakref.ref(tier))

    def reset(self, identity: bytes | None = None) -> None:
        """Nothing that is cached now can hit again. Running sequences go on."""
        self._drain()
        is_new = identity is not None and _identity(identity) != self.identity
        with self._held_tiers() as tiers:
            self._reset(identity)
            if not is_new:
                # By a new identity nothing is found that was saved under the old one.
                _tell(tiers, lambda tier: tier.on_reset())

    def _reset(self, identity: bytes | None) -> None:
        if identity is not None:
            self.identity = identity
        for record in self._records.values():
            record.publishes = False
        for _, load in self._transfers.loads():
            load.left = 0
        self._pool.forget_all()
        self._host.forget_all()

    def forget(self, tokens: Tokens, *, namespace: Namespace = b"") -> int:
        """Take the last block of this path and all below it out of the prefix cache; how many blocks that were."""
        self._drain()
        path_tokens, key = as_tokens(tokens), encode_namespace(namespace)
        stop, rest = divmod(len(path_tokens), self.block_size)
        if rest or not stop:
            raise ValueError(
                f"forget needs a positive multiple of {self.block_size} (block_size) tokens, not {len(path_tokens)}"
            )
        with self._held_tiers() as tiers:
            num_gone = self._forget(path_tokens, key, stop)
            _tell(tiers, lambda tier: tier.on_forget(tokens, namespace))
        return num_gone

    def _forget(self, path_tokens: list[int], key: bytes, stop: int) -> int:
        for _, load in self._transfers.loads():
            load.forget(key, path_tokens, self.block_size)
        num_gone = 0
        for pool in (self._pool, self._host):
            path = pool.index.walk(key, [], path_tokens, stop)
            if len(path) == stop:
                gone = post_order(path[-1])
                pool.index.detach(path[-1])
                pool.forget(gone)
                num_gone += len(gone)
        for record in self._records.values():
            ends = [path[-1] for path in (record.path, record.host_path) if path]
            if record.fetch is not None:
                ends.append(record.fetch.host_path[record.fetch.parts[record] - 1])
            if not all(node.indexed for node in ends):
                record.publishes = False
        return num_gone

    def choose_victims(
        self,
        needed_blocks: int,
        policy: VictimPolicy = "newest",
        *,
        candidates: abc.Sequence[Sequence] | None = None,
        priorities: abc.Sequence[int] | None = None,
        cost: RecoveryCost | None = None,
        spare_after: int = 2,
        keep: int = 1,
        left_out: abc.Sequence[int] = (),
        finishing: abc.Sequence[int | None] | None = None,
    ) -> list[Victim]:
        """Who should give way, and how, so that a call which needs so many blocks fits. Changes nothing."""
        asked = as_asked(
            needed_blocks,
            policy,
            candidates=candidates,
            priorities=priorities,
            cost=cost,
            spare_after=spare_after,
            keep=keep,
            left_out=left_out,
            finishing=finishing,
        )
        records = [record for record in self._records.values() if record.state == "running" and not record.pinned]
        if candidates is not None:
            records = []
            for sequence in asked.sequences:
                if sequence._pager is not self:
                    raise ValueError(f"sequence {sequence.id} belongs to another pager")
                records.append(sequence._running("choose_victims"))
            if len(set(records)) < len(records):
                raise ValueError("a sequence is named twice in candidates")
        if asked.needed > self._usable:
            raise NeverFits(asked.needed, self._usable)
        return choose_victims(self._tiers, asked, records, self.num_blocks)

    def preemptions(self) -> list[Preemption]:
        """The last preemptions, oldest first."""
        return list(self._log.entries)

    def stats(self) -> Stats:
        """Blocks and sequences by state now, and the cumulative counters."""
        device, host = (count_blocks(pool, self._transfers) for pool in (self._pool, self._host))
        states = Counter(record.state for record in self._records.values())
        counters = self._counters
        return Stats(
            total_blocks=self.num_blocks,
            free_blocks=device.free,
            cached_blocks=device.cached,
            active_blocks=device.active,
            reserved_blocks=device.reserved,
            evictable_blocks=device.cached,
            writing_blocks=device.writing,
            quarantined_blocks=device.quarantined,
            host_total_blocks=self.num_host_blocks,
            host_free_blocks=host.free,
            host_cached_blocks=host.cached,
            host_active_blocks=host.active,
            host_writing_blocks=host.writing,
            host_quarantined_blocks=host.quarantined,
            running_sequences=sum(states[state] for state in WITH_BLOCKS),
            preempted_sequences=states["preempted"],
            swapped_sequences=states["swapped"],
            **{name: getattr(counters, name) for name in counters.__slots__},
        )

    def metrics(self, reading: Reading | None = None, *, labels: abc.Mapping[str, str] | None = None) -> str:
        """The statistics in the text form of Prometheus."""
        return exposition(self.stats(), reading, labels=labels, block_size=self.block_size)

    def check(self) -> list[str]:
        """Recount everything; every violation of a promise, with its id. Empty if all is well."""
        return check(self._tiers, self._records, list(self._batches.values()), self._transfers)

    def dump(self, full: bool = False) -> str:
        """The prefix cache drawn as text; ``full`` adds everything else that decides later answers."""
        return dump(self._tiers, self._records, list(self._batches.values()), self._transfers, self._next_id, full)

    # Between the tiers.

    def offload(self, num_blocks: int) -> Plan | None:
        """Plan to copy the coldest blocks that the host lacks to it, about so many; None if there is nothing to do."""
        self._drain()
        limit = as_least("num_blocks", num_blocks)
        self._require_transfers("offload")
        chains: list[Chain] = []
        taken, flying = 0, self._transfers.in_flight()
        for node in [node for queue in self._policy.queues().values() for node in queue.values()]:
            while taken < limit and not node.offered:
                path = path_to(node)
                wanted = missing(self._host, path, flying)
                if not wanted:
                    node.offered = True
                    continue
                chain, room = take_chain(self._tiers, path, wanted, limit - taken)
                if not room:
                    return self._plan_offload(chains)
                if chain is None:
                    node.offered = True  # the unit is larger than what the host can give
                    continue
                chains.append(chain)
                taken += len(chain.nodes)
                flying.update(chain.nodes)
        return self._plan_offload(chains)

    def offload_committed(self, sequence: Sequence) -> Plan | None:
        """Plan to copy what a running sequence has published to the host; None if there is nothing to do."""
        self._drain()
        if not isinstance(sequence, Sequence):
            raise TypeError(f"offload_committed needs a Sequence, not {type(sequence).__name__}")
        record = sequence._running("offload_committed")
        if sequence._pager is not self:
            raise ValueError(f"offload_committed refused: sequence {record.id} belongs to another pager")
        self._require_transfers("offload_committed")
        chains: list[Chain] = []
        path, flying = record.live_path(), self._transfers.in_flight()
        while wanted := missing(self._host, path, flying):
            chain, _ = take_chain(self._tiers, path, wanted, None)
            if chain is None:
                break
            chains.append(chain)
            flying.update(chain.nodes)
        return self._plan_offload(chains)

    def store_keys(self, tokens: Tokens, *, namespace: Namespace = b"") -> StoreKeys:
        """Keys and metas of the full blocks of these tokens, as far as they end in no run of content tokens."""
        known, key = as_prompt(tokens), encode_namespace(namespace)
        # A run that ends the list may go on behind it.
        stop = whole_runs([*known, FIRST_CONTENT_TOKEN], len(known) // self.block_size, self.block_size)
        return as_store_keys(self._store_blocks(key, self._blocks(known, stop)), self.block_size)

    def save(self, num_blocks: int) -> Plan | None:
        """Plan to copy the coldest host blocks that are in no store yet to it, about so many; None if there is none."""
        self._drain()
        limit = as_least("num_blocks", num_blocks)
        self._require_host("save")
        chains: list[list[Node]] = []
        taken, saving = 0, self._transfers.saving()
        for node in [node for queue in self._host.policy.queues().values() for node in queue.values()]:
            while taken < limit and not node.offered:
                path = path_to(node)
                wanted = unsaved(path, saving)
                if not wanted:
                    node.offered = True
                    continue
                start = stop = wanted[0].start
                for unit in wanted:
                    if stop - start < limit - taken:
                        stop = unit.stop
                self._host.pin(path[stop - 1].block)
                chains.append(path[start:stop])
                taken += stop - start
                saving.update(path[start:stop])
        if not chains:
            return None
        sources = [node.block for chain in chains for node in chain]
        records = [block for chain in chains for block in self._chain_blocks(chain)]
        store_keys = as_store_keys(records, self.block_size)
        return self._transfers.make("save", Save(chains), sources, list(range(len(sources))), store_keys)

    def load(self, tokens: Tokens, num_tokens: int, *, namespace: Namespace = b"") -> Plan | None:
        """Plan to copy to the host what the store has of a prompt: ``num_tokens`` of it, the caller says.

        None if the host has that already, or has no room; a plan that is made already if that brings it.
        """
        self._drain()
        prompt, key = as_prompt(tokens), encode_namespace(namespace)
        num_stored = as_position("num_tokens", num_tokens, "0 or more: the tokens that the store has")
        self._require_host("load")
        host, size = self._host, self.block_size
        path = host.index.match(key, prompt)
        start = len(path)
        stop = whole_runs(prompt, min(num_stored // size, (len(prompt) - 1) // size), size)
        if stop <= start:
            return None
        blocks = self._store_blocks(key, self._blocks(prompt, stop))
        for plan, load in self._transfers.loads():
            first = plan.records.keys[0].tobytes() if plan.records is not None else None
            if first == blocks[start].key and load.left == load.stop:
                return plan
        room = len(host.free) + host.evictable - sum(host.is_evictable(node.block) for node in path)
        stop = whole_runs(prompt, min(stop, start + room), size)
        if stop <= start:
            return None
        if path:
            host.hold(path[-1].block)
        destinations = host.take(stop - start)
        for block in destinations:
            host.hold(block)
        above = path[-1] if path else None
        work = Load(key, namespace, prompt, start, above, destinations, left=stop)
        store_keys = as_store_keys(blocks[start:stop], size)
        return self._transfers.make("load", work, list(range(stop - start)), destinations, store_keys)

    def start(self, plan: Plan, tick: int | None = None) -> bool:
        """The mover has begun to copy. False if the plan has ended (as for all of these reports), or is under way."""
        self._drain()
        transfer = self._transfers.find(_instance("plan", plan, Plan))
        if transfer is not None and transfer.state == "started":
            return False
        transfer = self._reported("start", plan, "planned")
        if transfer is None:
            return False
        transfer.tick = self._counters.clock_ticks if tick is None else as_tick("tick", tick)
        transfer.state = "started"
        return True

    def complete(self, plan: Plan) -> bool:
        """All has been copied."""
        transfer = self._reported("complete", plan, "started")
        if transfer is None:
            return False
        self._transfers.end(self._tiers, transfer, [True] * len(transfer.plan), "complete")
        if isinstance(transfer.work, SwapIn) and transfer.work.record.state != "released":
            self._note_return(transfer.work.record)
        return True

    def fail(self, plan: Plan, done: abc.Sequence[bool] | npt.NDArray[np.bool_] | None = None) -> bool:
        """The mover gave up, and writes no more; which blocks it had copied."""
        transfer = self._reported("fail", plan, "started")
        if transfer is None:
            return False
        length = len(transfer.plan)
        mask = [False] * length if done is None else as_mask("done", done, length)
        self._transfers.end(self._tiers, transfer, mask, "fail")
        return True

    def cancel(self, plan: Plan) -> bool:
        """The plan will not be started."""
        transfer = self._reported("cancel", plan, "planned")
        if transfer is None:
            return False
        self._transfers.cancel(self._tiers, transfer)
        return True

    def abandon(self, plan: Plan) -> bool:
        """Nobody knows what became of the plan: its destinations stay in quarantine until they are reclaimed."""
        transfer = self._reported("abandon", plan, "started")
        if transfer is None:
            return False
        self._transfers.end(self._tiers, transfer, [False] * len(transfer.plan), "abandon")
        return True

    def reclaim(self, plan: Plan) -> bool:
        """Nobody writes to the destinations of this abandoned plan any more."""
        transfer = self._reported("reclaim", plan, "abandoned")
        if transfer is None:
            return False
        self._transfers.reclaim(self._tiers, transfer)
        return True

    def plans(self, older_than: int | None = None) -> list[PlanStatus]:
        """The plans that have not ended, as they were made; or only those that were started before this tick."""
        limit = None if older_than is None else as_tick("older_than", older_than)
        return [
            PlanStatus(transfer.plan, transfer.state, transfer.tick)
            for transfer in self._transfers
            if limit is None or (transfer.tick is not None and transfer.tick < limit)
        ]

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

    @contextlib.contextmanager
    def _held_tiers(self) -> Iterator[list[AttachedTier]]:
        """The attached tiers, which bring nothing meanwhile."""
        tiers = [tier for reference in self._attached if (tier := reference()) is not None]
        with contextlib.ExitStack() as stack:
            for tier in tiers:
                if (lock := getattr(tier, "lock", None)) is not None:
                    lock.acquire()
                    stack.callback(lock.release)
            yield tiers

    def _next_launch(self) -> int:
        self._launches += 1
        return self._launches

    def _last_given(self) -> int:
        """The newest step or answer of ``take_copies`` that was not cancelled."""
        return max([self._last_launched, *(step.launch for rows in self._batches.values() for step in rows.steps)])

    def _room(self) -> int:
        return len(self._pool.free) + self._pool.evictable

    def _require(self, needed: int, rows: tuple[int, ...] = ()) -> None:
        if needed > self._room():
            self._counters.refused_calls += 1
            raise OutOfBlocks(needed, len(self._pool.free), self._pool.evictable, self.num_blocks, rows)

    def _release(self, record: Record) -> None:
        swap = self._transfers.of(record) if record.state in ("swapping_out", "swapping_in") else None
        if swap is not None and swap.state == "planned":
            self._transfers.cancel(self._tiers, swap)
            swap = None
        if record.fetch is not None:
            self._leave_fetch(record)
        elif swap is None:
            record.let_go(self._pool)
            record.let_go_of_host(self._host)
        elif record.state == "swapping_in":
            record.let_go(self._pool)
        record.state = "released"
        del self._records[record.id]
        self._counters.clock_ticks += 1

    def _leave_fetch(self, record: Record) -> None:
        transfer, fetch = self._transfers.of(record), record.fetch
        assert fetch is not None
        del fetch.parts[record]
        record.fetch = None
        record.let_go(self._pool)
        if not fetch.parts and transfer.state == "planned":
            self._transfers.cancel(self._tiers, transfer)

    def _resume(self, record: Record) -> None:
        hit = self._admissible(record)
        committed = record.committed_at_preempt if record.state == "preempted" else record.num_committed
        self._pool.ask(record.key, record.tokens, len(hit.path))
        record.take_path(self._pool, hit.path, num_blocks(len(record.tokens), self.block_size))
        record.let_go_of_host(self._host)
        record.state = "running"
        record.publishes = True
        record.era = self._pool.era
        record.announce(self._pool)
        self._counters.recomputed_tokens += max(0, committed - record.num_cached)
        self._note_return(record)

    def _note_return(self, record: Record) -> None:
        self._num_returns += 1
        record.back = (self._next_id, self._num_returns)

    def _swap_out(self, record: Record) -> Plan:
        self._require_transfers("swap_out")
        if not self._pool.given.keys().isdisjoint(record.table):
            raise TransferError(f"swap_out refused: an open step is to copy to a block of sequence {record.id}")
        stop = num_blocks(record.num_committed, self.block_size)
        if stop > self.num_host_blocks:
            self._counters.refused_calls += 1
            raise NeverFits(stop, self.num_host_blocks, "host")
        live = record.live_path()
        shared = self._host.index.copies_of(live)
        shared = shared[: whole_runs(record.tokens, len(shared), self.block_size)]
        needed, free = stop - len(shared), len(self._host.free)
        evictable = self._host.evictable - sum(self._host.is_evictable(node.block) for node in shared)
        if needed > free + evictable:
            self._counters.refused_calls += 1
            raise OutOfBlocks(needed, free, evictable, self.num_host_blocks, tier="host")
        if shared:
            self._host.hold(shared[-1].block)
        blocks = self._host.take(needed)
        for block in blocks:
            self._host.hold(block)
        if record.home is not None:
            record.home.leave(record)
        record.withdraw(self._pool)
        record.state = "swapping_out"
        record.host_path = shared
        sources = [node.block for node in record.path] + record.table[len(record.path) :]
        return self._transfers.make("swap_out", SwapOut(record, blocks), sources[len(shared) : stop], blocks)

    def _swap_in(self, record: Record) -> Plan:
        path = self._index.walk(record.key, [], record.tokens, record.num_committed // self.block_size)
        path = path[: whole_runs(record.tokens, len(path), self.block_size)]
        if record.era != self._pool.era or not all(node.indexed for node in record.host_path[-1:]):
            path = []
        total = num_blocks(len(record.tokens), self.block_size)
        stop = num_blocks(record.num_committed, self.block_size)
        try:
            self._fits(record, path, total - len(path), stop - len(path))
        except (OutOfBlocks, NeverFits):
            self._counters.refused_calls += 1
            raise
        blocks = record.occupy(self._pool, path, [], stop - len(path), total)
        record.state = "swapping_in"
        sources = [node.block for node in record.host_path] + record.host_own
        for block in blocks:
            self._pool.hold(block)
        return self._transfers.make("swap_in", SwapIn(record, blocks), sources[len(path) :], blocks)

    def _blocks(self, tokens: list[int], stop: int) -> list[BlockTokens]:
        return [self._index.block_tokens(tokens, number) for number in range(stop)]

    def _store_blocks(self, key: bytes, path: list[BlockTokens]) -> list[StoreBlock]:
        return store_blocks(root_key(self.block_size, self.identity, key), path)

    def _chain_blocks(self, chain: list[Node]) -> list[StoreBlock]:
        path = path_to(chain[-1])
        return self._store_blocks(root_of(path).key, tokens_of(path))[-len(chain) :]

    def _plan_offload(self, chains: list[Chain]) -> Plan | None:
        if not chains:
            return None
        sources = [node.block for chain in chains for node in chain.nodes]
        destinations = [block for chain in chains for block in chain.blocks]
        return self._transfers.make("offload", Offload(chains), sources, destinations)

    def _require_host(self, call: str) -> None:
        if not self.num_host_blocks:
            raise TransferError(f"{call} refused: this pager has no host blocks (num_host_blocks is 0)")

    def _require_transfers(self, call: str) -> None:
        self._require_host(call)
        if self._pool.copies:
            raise TransferError(
                f"{call} refused: {len(self._pool.copies)} copies are queued, and what it reads may not be there"
                " before they are made: take_copies() first"
            )

    def _reported(self, call: str, plan: Plan, state: PlanState) -> Transfer | None:
        """The plan that a report is about, None if it has ended."""
        self._drain()
        transfer = self._transfers.find(_instance("plan", plan, Plan))
        if transfer is None or (transfer.state, state) == ("abandoned", "started"):
            self._counters.late_reports += 1
            return None
        if transfer.state != state:
            raise TransferError(
                f"{call} refused: plan {plan.id}.{plan.generation} is {transfer.state}; it must be {state}"
            )
        return transfer

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

    def _admissible(self, record: Record, fetch_min_tokens: int | None = None) -> Hit:
        try:
            return self._find(record, fetch_min_tokens)
        except (OutOfBlocks, NeverFits):
            self._counters.refused_calls += 1
            raise

    def _find(self, record: Record, fetch_min_tokens: int | None = None) -> Hit:
        """What the record's tokens hit, if the rest of the blocks can be had."""
        path = self._index.match(record.key, record.tokens)
        hit = Hit(path, len(path))
        if fetch_min_tokens is not None and self.num_host_blocks:
            self._look_behind(hit, record, fetch_min_tokens)
        num_joined = hit.stop - len(path) if hit.join is not None else 0
        needed = num_blocks(len(record.tokens), self.block_size) - len(path) - num_joined
        self._fits(record, path, needed, hit.stop - len(path) - num_joined)
        return hit

    def _look_behind(self, hit: Hit, record: Record, fetch_min_tokens: int) -> None:
        """What the host has behind a hit, be it on its way to the device already."""
        for fetch in self._transfers.fetches():
            stop = fetch.joined(record.key, hit.path, record.tokens, self.block_size)
            if stop > len(hit.path) and (stop - len(hit.path)) * self.block_size >= fetch_min_tokens:
                hit.stop, hit.join = stop, fetch
                return
        host_path = self._host.index.match(record.key, record.tokens)
        num_more = len(host_path) - len(hit.path)
        if num_more > 0 and num_more * self.block_size >= fetch_min_tokens:
            hit.stop, hit.host_path = len(host_path), host_path

    def _fits(self, record: Record, path: list[Node], needed: int, num_fetched: int) -> None:
        """Refuse if so many blocks cannot be had for the record besides its path, or so many unfenced ones."""
        total = num_blocks(len(record.tokens), self.block_size)
        if total > self._usable:
            raise NeverFits(total, self._usable)
        pool = self._pool
        own = {node.block for node in path if pool.is_evictable(node.block)}
        free, evictable = len(pool.free), pool.evictable - len(own)
        if needed > free + evictable:
            raise OutOfBlocks(needed, free, evictable, self.num_blocks)
        reserve = math.ceil(self.watermark * self._usable)
        if needed + reserve > free + evictable and self._others_run(record):
            raise OutOfBlocks(needed + reserve, free, evictable, self.num_blocks, reserve=reserve)
        fenced = [block for block in pool.fenced_blocks() if block not in own] if num_fetched else []
        if num_fetched > free + evictable - len(fenced):
            cached = sum(pool.is_evictable(block) for block in fenced)
            free, evictable = free - (len(fenced) - cached), evictable - cached
            raise OutOfBlocks(num_fetched, free, evictable, self.num_blocks)

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
        stop = whole_runs(tokens, stop, size)
        return Computing(record.id, stop * size) if stop > number else None

    def _others_run(self, record: Record) -> bool:
        return any(
            other.state in WITH_BLOCKS and not other.pinned for other in self._records.values() if other is not record
        )


def _tell(tiers: list[AttachedTier], call: Callable[[AttachedTier], object]) -> None:
    """Each of them, whatever another raises. The first error comes through, and who raised one is `stale`."""
    first: BaseException | None = None
    for tier in tiers:
        try:
            call(tier)
        except BaseException as error:
            if hasattr(tier, "stale"):
                tier.stale = error
            first = first or error
    if first is not None:
        raise first


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
