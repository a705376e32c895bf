"""A play in a pool of 12 blocks: four users share a system prompt and leave, strangers flood in, the prompt comes back.

Tokens are words here, so that a block can be read. Nothing of it is scripted but who comes and goes: `play` asks the
pager, keeps what it answered as a `Moment` after each arrival and departure, and works out from the block ids alone
what was evicted, so that it can be held against the pager's own counters.

    from kvpager.prefix_play import play

    for act in play("lru").acts:
        print(act.name, act.hits, act.misses, act.evictions)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from . import Pager, Sequence

NUM_BLOCKS = 12
BLOCK_SIZE = 4
SYSTEM = "you are a kind guide to operating systems"
USERS = {
    "ana": "what is a page fault",
    "ben": "who wrote the first kernel",
    # Word for word what Ana asks: even then the last, partial block is not shared.
    "cho": "what is a page fault",
    "dan": "why do caches miss often",
}
AGAIN = {"eve": "when does a process sleep"}
STRANGERS = 8
STRANGER_WORDS = 9
AT_ONCE = 3
"""Strangers that run at the same time, so that the flood always has holders to spare."""


@dataclass(frozen=True, slots=True)
class Block:
    """What is known of a block at one moment."""

    owner: str
    """Who computed it; "" for a free block."""
    words: tuple[str, ...]
    holders: int
    cached: bool

    @property
    def partial(self) -> bool:
        return 0 < len(self.words) < BLOCK_SIZE


FREE = Block("", (), 0, False)


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool after somebody came or left."""

    name: str
    blocks: tuple[Block, ...]
    evicted: tuple[str, ...] = ()
    """Owners of the blocks that the arrival evicted."""


@dataclass(slots=True)
class Act:
    """What happened between two pauses. Hits and misses are of prompts: a hit found at least one block."""

    name: str
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    evictions: int = 0
    moments: list[Moment] = field(default_factory=list)
    active: int = 0
    cached: int = 0
    free: int = 0


@dataclass(slots=True)
class Play:
    policy: str
    pinned: bool
    acts: list[Act]
    evicted_while_held: int
    """Blocks that were handed out although somebody held them."""
    partial_shared: int
    """Partial blocks that more than one sequence held, over all moments."""
    read_calls: int | None
    """Calls to read() that the process made meanwhile, of files or of anything else; None where nobody counts them."""

    @property
    def moments(self) -> list[Moment]:
        return [moment for act in self.acts for moment in act.moments]


def play(policy: str = "lru", *, pinned: bool = False) -> Play:
    """Every act, with a pager of its own."""
    before = _read_calls()
    overhead = _read_calls() - before
    stage = _Stage(policy)
    if pinned:
        stage.begin("the system prompt is pinned")
        stage.arrive("sys", SYSTEM, pin=True)
        stage.end()
    stage.begin("four users come")
    for name, question in USERS.items():
        stage.arrive(name, f"{SYSTEM} {question}")
    stage.end()
    stage.begin("they leave")
    stage.leave("all leave", *USERS)
    stage.end()
    stage.begin(f"{STRANGERS} strangers come and go")
    running: list[str] = []
    for number in range(1, STRANGERS + 1):
        if len(running) == AT_ONCE:
            stage.leave(None, running.pop(0))
        running.append(f"s{number}")
        stage.arrive(running[-1], " ".join(f"s{number}.{word}" for word in range(STRANGER_WORDS)))
    stage.leave("all leave", *running)
    stage.end()
    stage.begin("the system prompt again")
    for name, question in AGAIN.items():
        stage.arrive(name, f"{SYSTEM} {question}")
    stage.end()
    stage.release_all()
    reads = _read_calls() - before - 2 * overhead
    return Play(
        policy,
        pinned,
        stage.acts,
        stage.evicted_while_held,
        stage.partial_shared,
        reads if overhead else None,
    )


class _Stage:
    """The pager, and what an onlooker knows of its blocks from what it answers."""

    def __init__(self, policy: str) -> None:
        self._pager = Pager(NUM_BLOCKS, BLOCK_SIZE, policy=policy, seed=0)
        self._running: dict[str, Sequence] = {}
        self._vocabulary: dict[str, int] = {}
        self._contents: dict[int, tuple[str, tuple[str, ...]]] = {}
        """Owner and words of each block that was ever written; a free one's are forgotten."""
        self.acts: list[Act] = []
        self.evicted_while_held = 0
        self.partial_shared = 0

    def begin(self, name: str) -> None:
        self.acts.append(Act(name))

    def end(self) -> None:
        stats = self._pager.stats()
        act = self.acts[-1]
        act.active, act.cached, act.free = stats.active_blocks, stats.cached_blocks, stats.free_blocks

    def arrive(self, name: str, prompt: str, *, pin: bool = False) -> None:
        """Admit a prompt, compute it (there is no model here) and say so."""
        words = prompt.split()
        evictions = self._pager.stats().evicted_blocks
        held = self._holders()
        sequence = self._pager.admit([self._token(word) for word in words], pin=pin)
        cached = sequence.num_cached
        evicted = []
        for position, block in enumerate(sequence.block_ids.tolist()):
            if position * BLOCK_SIZE < cached:
                continue
            self.evicted_while_held += block in held
            if block in self._contents:
                evicted.append(self._contents[block][0])
            written = words[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]
            owner = "sys" if position * BLOCK_SIZE < len(SYSTEM.split()) and prompt.startswith(SYSTEM) else name
            self._contents[block] = (owner, tuple(written))
        sequence.commit()
        self._running[name] = sequence
        act = self.acts[-1]
        act.hits += cached > 0
        act.misses += cached == 0
        act.hit_tokens += cached
        act.computed_tokens += len(words) - cached
        act.evictions += self._pager.stats().evicted_blocks - evictions
        self._remember(name, tuple(evicted))

    def leave(self, moment: str | None, *names: str) -> None:
        """Release; a departure without a name of its own is seen at the next arrival."""
        for name in names:
            self._running.pop(name).release()
        holders = self._holders()
        # Nobody can find a partial block, so when its holder has gone it is free.
        self._contents = {
            block: (owner, words)
            for block, (owner, words) in self._contents.items()
            if block in holders or len(words) == BLOCK_SIZE
        }
        if moment is not None:
            self._remember(moment)

    def release_all(self) -> None:
        for sequence in self._running.values():
            sequence.release()

    def _token(self, word: str) -> int:
        return self._vocabulary.setdefault(word, len(self._vocabulary))

    def _holders(self) -> Counter[int]:
        return Counter(block for sequence in self._running.values() for block in sequence.block_ids.tolist())

    def _remember(self, name: str, evicted: tuple[str, ...] = ()) -> None:
        holders = self._holders()
        blocks = []
        for block in range(NUM_BLOCKS):
            if block in self._contents:
                owner, words = self._contents[block]
                blocks.append(Block(owner, words, holders[block], not holders[block]))
            else:
                blocks.append(FREE)
        self.partial_shared += sum(block.partial and block.holders > 1 for block in blocks)
        self.acts[-1].moments.append(Moment(name, tuple(blocks), evicted))


def _read_calls() -> int:
    """Calls to read() of this process so far, as Linux counts them; always 0 elsewhere."""
    try:
        with open("/proc/self/io", "rb", buffering=0) as file:
            fields = file.read(4096).split()
        return int(fields[fields.index(b"syscr:") + 1])
    except (OSError, ValueError):
        return 0
