"""A pager's third tier: what its host blocks hold is kept in a store, and comes back when a prompt wants it."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TransferError
from ..movers.arena import HostArena
from ..movers.base import Ticket, finite
from ..plans import Plan, PlanKind, StoreKeys
from .disk import DiskStore, Sync
from .mover import StoreMover
from .store import KEY_BYTES, Store, told

if TYPE_CHECKING:
    from .._core import Pager
    from ..types import Namespace, Tokens

__all__ = ["DiskTier", "Loading", "Tier"]

_LOOKS_MAX = 1024
"""Prompts of which a store may be asked at a time."""
_LOOK_SECONDS = 0.05
"""Between two looks at whether plans that somebody waits for are still under way."""


class Loading:
    """Blocks of a prompt on their way from a store to the host. Read it from any thread."""

    def __init__(self) -> None:
        self._done = False
        self._plan: Plan | None = None

    @property
    def done(self) -> bool:
        """True once all has arrived that will: admit the prompt now, with ``fetch=True``. Only `Tier.report` sets
        it."""
        return self._done

    @property
    def plan(self) -> Plan | None:
        """What brings them; None before it is known what the store has, or if that is nothing."""
        return self._plan

    def __repr__(self) -> str:
        blocks = "?" if self._plan is None else len(self._plan)
        return f"<Loading of {blocks} blocks: {'done' if self._done else 'under way'}>"


class Tier:
    """Keeps a pager's prefixes in a store, over restarts or for other machines. The pager must have a host tier,
    through which all goes: device <-> host <-> store.

    - ``tier.save(n)`` now and then, best when idle: the n coldest host blocks that the store has not had.
    - ``tier.load(prompt)`` when a request arrives, before it is admitted: what the store has of it comes to the host
      while the request waits. Once the answer is None or `done`, ``pager.admit(prompt, fetch=True)`` takes it from
      there.
    - ``tier.report()`` once in each turn of the loop: tells the pager what has ended.

    None of these waits for the store: reads and writes (and the question what a store on another machine has) run in
    threads. ``pager.reset()`` without a new identity and ``pager.forget(...)`` act in the store, too. What the store
    has lost is a miss. Safe to call from several threads.
    """

    def __init__(
        self,
        pager: Pager,
        host: HostArena,
        store: Store,
        *,
        max_queued_bytes: int = 1 << 28,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """`host`: the arena whose rows are the pager's host blocks. `max_queued_bytes` bounds what waits to be written.
        `clock` tells the tick at which ``pager.start`` is told that a plan begins, for ``pager.plans(older_than=...)``:
        give it if your other plans are started with ticks of yours.

        ConfigError if pager, arena and store do not fit each other.
        """
        if pager.num_host_blocks != host.num_blocks:
            raise ConfigError(f"the pager has {pager.num_host_blocks:,} host blocks, the arena {host.num_blocks:,}")
        meta_bytes = KEY_BYTES + 4 * pager.block_size
        if store.meta_bytes != meta_bytes:
            tokens = (store.meta_bytes - KEY_BYTES) // 4
            raise ConfigError(f"the store is for blocks of {tokens} tokens, the pager's have {pager.block_size}")
        self._pager = pager
        self._store = store
        self._clock = clock
        self._mover = StoreMover(store, host, max_queued_bytes=max_queued_bytes)
        self.lock = threading.RLock()
        """The pager holds it while it resets or forgets, so that nothing is brought that is being dropped."""
        self._loadings: dict[Plan, list[Loading]] = {}
        self._reports: deque[Ticket] = deque()
        self._looks: deque[_Look] = deque()
        self._asked: queue.SimpleQueue[_Look | None] | None = None
        if not store.is_local:
            # (An executor's thread may keep the interpreter from ending where an interrupt falls into its start.)
            self._asked = queue.SimpleQueue()
            threading.Thread(target=_ask, args=(self._asked,), name="kvpager-store-look", daemon=True).start()
            weakref.finalize(self, self._asked.put, None)
        self._num_refused_saves = 0
        self._num_refused_loads = 0
        self.stale: BaseException | None = None
        """Why the store may have what was to be dropped. The pager sets it, too: `on_reset` and `on_forget` may be cut
        short before they have done anything."""
        self._is_closed = False
        self._has_ended = False
        # What is being begun: its kind, the plan or None, and whether it was started here.
        self._begun: list[Any] = []
        self._look_at_plans = 0.0
        pager.attach(self)

    @property
    def store(self) -> Store:
        """The store."""
        return self._store

    # ---- save --------------------------------------------------------------------------------------------------------

    def save(self, num_blocks: int) -> Plan | None:
        """Begins to save the host's coldest blocks that the store has not had, `num_blocks` or some more (a run of
        content tokens is saved whole). Returns the plan, or None if there are none, or the write queue is full (which
        ``stats()["refused_saves"]`` counts). ValueError for less than 1; TransferError if the tier is closed.
        """
        with self.lock:
            operator.index(num_blocks)
            self._check()
            room = self._mover.num_free_blocks
            if num_blocks >= 1 and room == 0:
                self._num_refused_saves += 1
                return None
            return self._carry_out("save", self._pager.save, min(num_blocks, max(room, 1)))

    # ---- load --------------------------------------------------------------------------------------------------------

    def load(self, prompt: Tokens, *, namespace: Namespace = b"", min_tokens: int = 1) -> Loading | None:
        """Begins to bring to the host what the store has of a prompt and neither the host nor the device has.

        None if that is less than `min_tokens` tokens (see :mod:`kvpager.cost` for how many are worth it), the host
        has no room, or 1,024 prompts wait for a store that has to be asked. Prompts that want the same share one
        reading. Raises TokenError and TokenTypeError as ``match`` does; ValueError for `min_tokens` below 1;
        TransferError if the tier is closed. Cost: some 0.2 us a block, and for a local store a look at its index.
        """
        if operator.index(min_tokens) < 1:
            raise ValueError(f"min_tokens is {min_tokens}; it must be 1 or more")
        with self.lock:
            self._check()
            match, block_size = self._pager.match(prompt, namespace=namespace), self._pager.block_size
            have = match.num_tokens + match.num_host_tokens
            limit = (len(prompt) - 1) // block_size
            if limit * block_size - have < min_tokens:
                return None
            keys = self._pager.store_keys(prompt, namespace=namespace).keys[:limit]
            # The host's prefix is known only where it is the longer one.
            first = have // block_size if match.num_host_tokens else 0
            look = _Look(Loading(), prompt, namespace, have + min_tokens, first)
            if self._asked is None:
                return self._begin(look, self._num_there(keys, first))
            if len(self._looks) >= _LOOKS_MAX:
                self._num_refused_loads += 1
                return None
            look.prompt = np.array(prompt, np.int64)  # The caller may change it meanwhile.
            look.ask = functools.partial(self._num_there, keys, first)
            self._asked.put(look)
            self._looks.append(look)
            return look.loading

    def match(self, prompt: Tokens, *, namespace: Namespace = b"") -> int:
        """How many tokens of a prompt the store has, from the first on: a whole number of blocks. It asks the store in
        the calling thread, and believes its index: only a `load` compares tokens.
        """
        keys = self._pager.store_keys(prompt, namespace=namespace).keys
        blocks = self._num_there(keys[: (len(prompt) - 1) // self._pager.block_size], 0)
        return blocks * self._pager.block_size

    def _num_there(self, keys: npt.NDArray[np.uint8], first: int) -> int:
        there = told(self._store.contains_many(keys[first:]), len(keys) - first)
        return first + int(there.argmin() if not there.all() else len(there))

    def _begin(self, look: _Look, num_blocks: int) -> Loading | None:
        """Plans what was found, unless it is too little."""
        num_tokens = num_blocks * self._pager.block_size
        if num_blocks <= look.first or num_tokens < look.least:
            return None
        load = functools.partial(self._pager.load, look.prompt, namespace=look.namespace)
        return None if self._carry_out("load", load, num_tokens, look.loading) is None else look.loading

    def _carry_out(
        self, kind: PlanKind, make: Callable[[int], Plan | None], amount: int, loading: Loading | None = None
    ) -> Plan | None:
        """Makes a plan, starts it, unless another has, and submits it. What cuts this short, `_settle` settles."""
        self._begun = [kind]
        try:
            # Calls that C makes, and keeps what they answer: no interrupt falls in between.
            self._begun.extend(map(make, [amount]))
            plan: Plan | None = self._begun[1]
            if plan is not None:
                if loading is not None:
                    loading._plan = plan
                    self._loadings.setdefault(plan, []).append(loading)
                tick = None if self._clock is None else self._clock()
                self._begun.extend(map(functools.partial(self._pager.start, tick=tick), [plan]))
                if self._begun[2]:
                    self._mover.submit(plan)
        except BaseException:
            self._settle()
            raise
        self._begun = []
        return plan

    def _settle(self) -> None:
        """Ends what was begun and, by an error or an interrupt, not submitted. By steps that may be repeated."""
        match self._begun:
            case [kind]:
                # It may have been made, and who was to be told was interrupted: then it is planned. If it is somebody
                # else's, he finds when he starts it that it has ended.
                lost = [each.plan for each in self._pager.plans() if (each.plan.kind, each.state) == (kind, "planned")]
            case [_, Plan() as plan]:
                lost = [plan]
            case [_, Plan() as plan, True] if not self._mover.has(plan):
                self._pager.fail(plan)
                self._is_done(plan)
                lost = []
            case _:
                lost = []
        for plan in lost:
            with contextlib.suppress(TransferError):  # another's, and under way
                self._pager.cancel(plan)
            self._is_done(plan)
        self._begun = []

    def _is_done(self, plan: Plan) -> None:
        """Who waits for a plan need not any more."""
        for loading in self._loadings.get(plan, ()):
            loading._done = True
        self._loadings.pop(plan, None)

    # ---- what has ended ----------------------------------------------------------------------------------------------

    def report(self) -> list[Plan]:
        """Tells the pager which saves and loads have ended, and begins those loads of which it is known now what the
        store has. Returns the plans that ended. Call it once in each turn of the loop.
        """
        with self.lock:
            self._settle()
            self._begin_looks()
            self._reports.extend(self._mover.poll())
            ended = self._tell()
            self._look_after_loadings()
            return ended

    def wait(self, timeout: float, loadings: Sequence[Loading] | None = None) -> bool:
        """Reports until `loadings` are done (None: until nothing is under way), for at most `timeout` seconds. True if
        they are. ValueError unless the timeout is a finite number.
        """
        end = time.monotonic() + finite(timeout)
        while True:
            self.report()
            if all(loading.done for loading in loadings) if loadings is not None else self._is_idle():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._reports.extend(self._mover.wait(min(left, 0.01)))
            if self._mover.is_idle:
                time.sleep(min(left, 0.001))  # What is waited for is a look, or another mover's.

    def _is_idle(self) -> bool:
        with self.lock:
            return not (self._looks or self._reports) and self._mover.is_idle

    def _begin_looks(self) -> None:
        while self._looks and self._looks[0].is_answered:
            look = self._looks[0]
            if self._begin(look, look.num_there) is None:
                look.loading._done = True
            self._looks.popleft()

    def _tell(self) -> list[Plan]:
        ended = []
        while self._reports:
            # Taken off only when all is done: an interrupt in between makes it a repeated report, which does no harm.
            ticket = self._reports[0]
            plan = ticket.plan
            is_done = ticket.state == "done"
            taken = self._pager.complete(plan) if is_done else self._pager.fail(plan, done=ticket.done)
            if not taken:
                self._pager.reclaim(plan)  # It was abandoned, and has stopped now.
            self._is_done(plan)
            ended.append(plan)
            self._reports.popleft()
        return ended

    def _look_after_loadings(self) -> None:
        """Nobody waits for a plan that was abandoned, or for another mover's that has ended. Looked at now and then."""
        now = time.monotonic()
        if self._loadings and now >= self._look_at_plans:
            self._look_at_plans = now + _LOOK_SECONDS
            started = {each.plan for each in self._pager.plans() if each.state == "started"}
            for plan in self._loadings.keys() - started:
                self._is_done(plan)

    # ---- what is not wanted any more --------------------------------------------------------------------------------

    def on_reset(self) -> None:
        """The pager was reset and its identity is what it was: nothing that was saved may come back. Clears the
        store."""
        with self.lock:
            self._drop(lambda: self._store.clear())

    def on_forget(self, tokens: Tokens, namespace: Namespace) -> None:
        """The pager forgot a path's last block and all below it: so does the store. Cost: a look at every record."""
        with self.lock:
            records = self._pager.store_keys(tokens, namespace=namespace)
            # A run of content tokens at the end may go on, and has no key: then the block above goes, with all below.
            key = records.keys[-1:] if len(records.keys) else self._root(namespace)
            self._drop(lambda: self._store.delete_many(np.ascontiguousarray(key)))

    def _root(self, namespace: Namespace) -> npt.NDArray[np.uint8]:
        block = np.zeros(self._pager.block_size, np.int32)
        records: StoreKeys = self._pager.store_keys(block, namespace=namespace)
        return records.metas[:, :KEY_BYTES]

    def _drop(self, drop: Callable[[], object]) -> None:
        """Does it while nothing is written. If it fails, the store may have what is not to be served: then the tier
        refuses all, until it was cleared.
        """
        try:
            with self._mover.nothing_written():
                drop()
        except Exception as error:
            self.stale = error
            raise TransferError(
                f"the store could not drop what is not wanted any more ({type(error).__name__}: {error}); the tier"
                f" refuses all calls until clear() succeeds"
            ) from error
        except BaseException as interrupt:
            self.stale = interrupt
            raise

    def clear(self) -> None:
        """Drops all that the store has."""
        with self.lock:
            self._drop(lambda: self._store.clear())
            self.stale = None

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """The store's counters; `refused_saves`, `dropped_blocks`, `queued_bytes` of the write queue; and
        `refused_loads`, of which a store on another machine was not asked since it is too slow.
        """
        own = {
            "refused_saves": self._num_refused_saves,
            "refused_loads": self._num_refused_loads,
            "dropped_blocks": self._mover.num_dropped_blocks,
            "queued_bytes": self._mover.num_queued_bytes,
        }
        return self._store.stats() | own

    def close(self, timeout: float = 10.0) -> None:
        """Waits until what is queued is written, for at most `timeout` seconds, then fails the rest and tells the
        pager. The store is the caller's to close. A second call does nothing; other calls raise TransferError.
        """
        if self._has_ended:
            return
        try:
            if self.stale is None:
                self.wait(timeout)
        finally:
            with self.lock:
                self._is_closed = True
                self._settle()
                if self._asked is not None:
                    self._asked.put(None)
                for look in self._looks:
                    look.loading._done = True
                self._looks.clear()
                self._mover.close()
                self._reports.extend(self._mover.poll())
                self._tell()
                # What another mover brings.
                for plan in list(self._loadings):
                    self._is_done(plan)
                self._has_ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        self._settle()
        if self._is_closed:
            raise TransferError("the tier is closed")
        if self.stale is not None:
            raise TransferError("the store may have what was dropped: clear() the tier first") from self.stale


class _Look:
    """What a prompt wants, while it is asked what the store has."""

    def __init__(self, loading: Loading, prompt: Tokens, namespace: Namespace, least: int, first: int) -> None:
        self.loading = loading
        self.prompt = prompt
        self.namespace = namespace
        self.least = least
        self.first = first
        self.ask: Callable[[], int] = int
        self.num_there = 0
        self.is_answered = False


def _ask(asked: queue.SimpleQueue[_Look | None]) -> None:
    """A thread: asks the store for one look after the other, until the tier is closed or collected."""
    while (look := asked.get()) is not None:
        # A store that fails has nothing.
        with contextlib.suppress(BaseException):
            look.num_there = look.ask()
        look.is_answered = True
        del look


class DiskTier(Tier):
    """A tier whose store is a directory: :class:`Tier` on a :class:`DiskStore` of its own.

    The keys of blocks cover the pager's identity, so prefixes of several models (of equal block sizes and bytes) can
    be in one directory; only one process at a time can have it.
    """

    def __init__(
        self,
        pager: Pager,
        host: HostArena,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        sync: Sync = "segment",
        max_queued_bytes: int = 1 << 28,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """`path`: made if need be. `max_bytes`: of everything in it, for ever. `sync`: see :class:`DiskStore`. `clock`:
        see :class:`Tier`.
        """
        store = DiskStore(
            path, row_bytes=host.bytes_per_block, block_size=pager.block_size, max_bytes=max_bytes, sync=sync
        )
        try:
            super().__init__(pager, host, store, max_queued_bytes=max_queued_bytes, clock=clock)
        except BaseException:
            store.close()
            raise

    def close(self, timeout: float = 10.0) -> None:
        """As :meth:`Tier.close`, and closes the store: all that was written is on the disk then."""
        try:
            super().close(timeout)
        finally:
            self._store.close()
