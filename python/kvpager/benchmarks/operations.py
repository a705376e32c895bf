"""The operations, each on a pool as a server leaves it.

A pool that was never used hands out ascending ids, and its index holds one chain: every call is fast on it. Here the
free stack is scattered first, block by block, and half of the pool then holds idle chains, released in random order.
Prompts are int32 arrays; random tokens, so nothing is shared by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..replay.columns import ReplayColumns
from . import batches, control, tiers
from .measure import TOKENS_128K, Operation

if TYPE_CHECKING:
    from .. import Pager, reference

    AnyPager = Pager | reference.Pager

TOKENS_8K = 8192
BLOCK_SIZE = 16
VOCABULARY = 32_000
CHAT_TURNS = 256
LOOP_CALLS = 1024
FLAT_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of what is measured. The defaults are those that the goals are stated for."""

    seed: int = 0
    num_blocks: int = 100_000
    small_blocks: int = 10_000
    large_blocks: int = 10_000_000
    constructed_blocks: int = 1_000_000
    rows_divisor: int = 1
    """Batches have so many times fewer rows: for tests, where only the operations themselves are looked at."""
    columns: ReplayColumns | None = None
    """The trace of the replay; None makes one up."""


@dataclass
class Subject:
    """One implementation under measurement. Pools are built when an operation first asks for them."""

    pager_class: Any
    replay_class: Any
    settings: Settings = field(default_factory=Settings)
    _rows: dict[tuple[int, bool], batches.Rows] = field(default_factory=dict, init=False)

    @classmethod
    def core(cls, settings: Settings | None = None) -> Subject:
        from .. import Pager
        from .._core import Replay

        return cls(Pager, Replay, settings or Settings())

    @classmethod
    def reference(cls, settings: Settings | None = None) -> Subject:
        from .. import reference
        from ..replay import ReferenceReplay

        return cls(reference.Pager, ReferenceReplay, settings or Settings())

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.settings.seed))

    def prompt(self, num_tokens: int) -> NDArray[np.int32]:
        return self.rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)

    def scattered(self, num_blocks: int) -> AnyPager:
        """An empty pool whose free stack is in no order, as after a day of decoding."""
        pager: AnyPager = self.pager_class(num_blocks, BLOCK_SIZE)
        growing = [pager.admit(self.prompt(BLOCK_SIZE)) for _ in range(max(1, num_blocks // 64))]
        turns = np.resize(np.arange(len(growing)), num_blocks - len(growing))
        one_block = self.prompt(BLOCK_SIZE)
        for turn in self.rng.permutation(turns).tolist():
            growing[turn].extend(one_block)
        for turn in self.rng.permutation(len(growing)).tolist():
            growing[turn].release()
        return pager

    def cache(self, pager: AnyPager, num_blocks: int, chain_blocks: int) -> None:
        """Fill so many blocks with idle chains, which end in random order."""
        lengths = [chain_blocks] * (num_blocks // chain_blocks)
        if num_blocks % chain_blocks:
            lengths.append(num_blocks % chain_blocks)
        sequences = [pager.admit(self.prompt(length * BLOCK_SIZE)) for length in lengths]
        for sequence in sequences:
            sequence.commit()
        for position in self.rng.permutation(len(sequences)).tolist():
            sequences[position].release()

    def cache_prompt(self, pager: AnyPager, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
        """Make a prompt a full hit for whoever continues it; its last block may be hit as well."""
        with pager.admit(prompt) as sequence:
            sequence.commit()
        return np.append(prompt, np.int32(1))

    @cached_property
    def used(self) -> AnyPager:
        pager = self.scattered(self.settings.num_blocks)
        self.cache(pager, self.settings.num_blocks // 2, TOKENS_8K // BLOCK_SIZE)
        return pager

    @cached_property
    def prompt_8k(self) -> NDArray[np.int32]:
        return self.cache_prompt(self.used, self.prompt(TOKENS_8K))[:TOKENS_8K]

    @cached_property
    def prompt_128k(self) -> NDArray[np.int32]:
        return self.cache_prompt(self.used, self.prompt(TOKENS_128K))[:TOKENS_128K]

    @cached_property
    def chat(self) -> NDArray[np.int32]:
        """A conversation of 128k tokens in equal turns, each of them admitted, published and released."""
        history = self.prompt(TOKENS_128K)
        for turn in range(1, CHAT_TURNS + 1):
            self.cache_prompt(self.used, history[: turn * TOKENS_128K // CHAT_TURNS])
        return history

    def flat(self, num_blocks: int) -> tuple[AnyPager, list[NDArray[np.int32]]]:
        """A pool full of idle chains, and some cached prompts of 1k tokens."""
        pager: AnyPager = self.pager_class(num_blocks, BLOCK_SIZE)
        for _ in range(num_blocks * BLOCK_SIZE // TOKENS_8K):
            self.cache_prompt(pager, self.prompt(TOKENS_8K))
        prompts = [self.prompt(1024) for _ in range(FLAT_PROMPTS)]
        for prompt in prompts:
            self.cache_prompt(pager, prompt)
        return pager, prompts

    @cached_property
    def batch_pool(self) -> AnyPager:
        """A pool for batches, whose sequences stay."""
        return self.scattered(self.settings.num_blocks)

    def rows(self, num_rows: int, *, take_turns: bool) -> batches.Rows:
        """A batch of so many rows, built once."""
        key = (num_rows, take_turns)
        if key not in self._rows:
            self._rows[key] = batches.Rows(self, num_rows, take_turns=take_turns)
        return self._rows[key]

    @cached_property
    def flat_small(self) -> tuple[AnyPager, list[NDArray[np.int32]]]:
        return self.flat(self.settings.small_blocks)

    @cached_property
    def flat_large(self) -> tuple[AnyPager, list[NDArray[np.int32]]]:
        return self.flat(self.settings.large_blocks)


def _release(state: Any, sequence: Any) -> None:
    sequence.release()


def _admit_hit(pager: AnyPager, prompt: Any) -> Operation:
    expected = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    def run(_: None) -> Any:
        sequence = pager.admit(prompt)
        sequence.block_ids  # noqa: B018 - what an engine reads next
        return sequence

    with pager.admit(prompt) as sequence:
        assert sequence.num_cached == expected, (sequence.num_cached, expected)
    return Operation(run, clean=_release)


def _match(pager: AnyPager, prompt: Any) -> Operation:
    expected = (len(prompt) - 1) // BLOCK_SIZE
    assert pager.match(prompt).num_blocks == expected, (pager.match(prompt), expected)
    return Operation(lambda _: pager.match(prompt))


def _cold(subject: Subject, num_tokens: int) -> Operation:
    """Admit and publish a prompt that nobody has seen; enough blocks are free."""
    pager = subject.used

    def run(prompt: NDArray[np.int32]) -> Any:
        sequence = pager.admit(prompt)
        sequence.commit()
        return sequence

    def clean(prompt: NDArray[np.int32], sequence: Any) -> None:
        assert sequence.num_cached == 0
        sequence.release()
        # Back to free blocks, or a later sample would have to evict.
        assert pager.forget(prompt[:BLOCK_SIZE]) == num_tokens // BLOCK_SIZE

    return Operation(run, lambda: subject.prompt(num_tokens), clean)


def _evict(subject: Subject, chain_blocks: int) -> Operation:
    """The same where every block has to be evicted first."""
    num_blocks = subject.settings.num_blocks
    needed = TOKENS_8K // BLOCK_SIZE
    pager = subject.scattered(num_blocks)
    subject.cache(pager, num_blocks, chain_blocks)
    assert pager.stats().cached_blocks == num_blocks

    def run(prompt: NDArray[np.int32]) -> Any:
        sequence = pager.admit(prompt)
        sequence.commit()
        return sequence

    evicted = 0

    def clean(prompt: NDArray[np.int32], sequence: Any) -> None:
        nonlocal evicted
        sequence.release()
        evicted += needed
        assert pager.stats().evicted_blocks == evicted, "eviction took more or fewer blocks than were missing"

    # From then on what is evicted are the prompts of this operation itself.
    samples = num_blocks // needed - 1
    return Operation(run, lambda: subject.prompt(TOKENS_8K), clean, samples_max=samples)


def _release_128k(subject: Subject) -> Operation:
    pager, prompt = subject.used, subject.prompt_128k
    return Operation(lambda sequence: sequence.release(), lambda: pager.admit(prompt))


def _append(subject: Subject) -> Operation:
    pager, prompt = subject.used, subject.prompt(BLOCK_SIZE + 1)

    def run(sequence: Any) -> None:
        append = sequence.append
        for token in range(LOOP_CALLS):
            append(token)

    return Operation(run, lambda: pager.admit(prompt), lambda sequence, _: sequence.release(), calls=LOOP_CALLS)


def _empty_call(subject: Subject) -> Operation:
    pager = subject.used

    def run(_: None) -> None:
        for _ in repeat(None, LOOP_CALLS):
            pager.num_free_blocks  # noqa: B018 - the shortest way there and back

    return Operation(run, calls=LOOP_CALLS)


def _flat_match(flat: tuple[AnyPager, list[NDArray[np.int32]]]) -> Operation:
    pager, prompts = flat

    def run(_: None) -> None:
        for prompt in prompts:
            pager.match(prompt)

    return Operation(run, calls=len(prompts))


def _flat_admit(flat: tuple[AnyPager, list[NDArray[np.int32]]]) -> Operation:
    pager, prompts = flat

    def clean(_: None, sequences: list[Any]) -> None:
        for sequence in sequences:
            sequence.release()

    return Operation(lambda _: [pager.admit(prompt) for prompt in prompts], clean=clean, calls=len(prompts))


def _construct(subject: Subject) -> Operation:
    num_blocks = subject.settings.constructed_blocks
    return Operation(lambda _: subject.pager_class(num_blocks, BLOCK_SIZE))


def _replay(subject: Subject) -> Operation:
    columns = subject.settings.columns or made_up_columns(subject.rng)
    total = len(columns.prompt_blocks)
    num_blocks = max(columns.unique_prompt_blocks // 20, int(columns.chain_blocks.max()))

    def prepare() -> Any:
        c = columns
        return subject.replay_class(c.ids, c.offsets, c.prompt_blocks, c.arrivals_s, c.service_s, num_blocks, "lru")

    return Operation(lambda replay: replay.advance(total), prepare, calls=total)


def made_up_columns(rng: np.random.Generator, num_requests: int = 12_000) -> ReplayColumns:
    """Requests like those of a public hour of chat: 23 blocks on average, four in ten continue an earlier one."""
    chains: list[list[int]] = [[0]]
    next_id = 1
    for _ in range(num_requests):
        goes_on = rng.random() < 0.4
        start = chains[rng.integers(max(0, len(chains) - 500), len(chains))] if goes_on else [0]
        new = int(rng.geometric(1 / (5 if goes_on else 18)))
        chains.append([*start, *range(next_id, next_id + new)])
        next_id += new
    lengths = np.array([len(chain) for chain in chains], np.int32)
    offsets = np.zeros(len(chains) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return ReplayColumns(np.concatenate([np.array(c, np.int32) for c in chains]), offsets, lengths, None, None)


OPERATIONS: dict[str, Callable[[Subject], Operation]] = {
    "hit_8k": lambda s: _admit_hit(s.used, s.prompt_8k),
    "hit_128k": lambda s: _admit_hit(s.used, s.prompt_128k),
    "match_128k": lambda s: _match(s.used, s.prompt_128k),
    "match_128k_list": lambda s: _match(s.used, s.prompt_128k.tolist()),
    "match_128k_int64": lambda s: _match(s.used, s.prompt_128k.astype(np.int64)),
    "cold_8k": lambda s: _cold(s, TOKENS_8K),
    "cold_128k": lambda s: _cold(s, TOKENS_128K),
    "evict_chains_8k": lambda s: _evict(s, TOKENS_8K // BLOCK_SIZE),
    "evict_leaves_8k": lambda s: _evict(s, 1),
    "release_128k": _release_128k,
    "chat_match": lambda s: _match(s.used, s.chat),
    "chat_admit": lambda s: _admit_hit(s.used, s.chat),
    "append": _append,
    "empty_call": _empty_call,
    "match_1k_small": lambda s: _flat_match(s.flat_small),
    "match_1k_large": lambda s: _flat_match(s.flat_large),
    "admit_1k_small": lambda s: _flat_admit(s.flat_small),
    "admit_1k_large": lambda s: _flat_admit(s.flat_large),
    "step_256": batches.step(256, crosses=False),
    "step_1024": batches.step(1024, crosses=False),
    "step_usual_256": batches.usual_step(256),
    "step_usual_1024": batches.usual_step(1024),
    "step_cross_256": batches.step(256, crosses=True),
    "step_cross_1024": batches.step(1024, crosses=True),
    "commit_usual_1024": batches.usual_commit(1024),
    "drafts_256": batches.drafts(256),
    "mixed_64": batches.mixed(64, 4),
    "beams_64": batches.beams(64),
    "pages_1024": batches.pages(1024),
    "try_admit_1024": control.try_admit(1, half_known=False),
    "try_admit_known_1024": control.try_admit(1, half_known=True),
    "try_admit_kinds_1024": control.try_admit(8, half_known=False),
    "try_admit_kinds_known_1024": control.try_admit(8, half_known=True),
    "tier_admit_8k": tiers.admit_cold,
    "swap_out_8k": tiers.swap_out,
    "swap_in_8k": tiers.swap_in,
    "offload_8k": tiers.offload,
    "save_8k": tiers.save,
    "load_8k": tiers.load,
    "tier_hit_8k": tiers.hit(fetch=False),
    "tier_hit_fetch_8k": tiers.hit(fetch=True),
    "construct": _construct,
    "replay": _replay,
}
