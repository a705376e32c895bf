"""Run a trace through several policies and pool sizes and hand back one row for each."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from ..errors import ConfigError
from ..traces import Progress, Trace
from .columns import Outputs, ReplayColumns, Service, build_columns
from .tokens import TokenChains, TokenReplay

POLICIES = ("lru", "slru")
DEFAULT_TOKEN_BLOCK_SIZE = 16
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool size as the user wrote it: blocks, or a percentage of the trace's unique full prompt blocks."""

    text: str
    blocks: int | None = None
    percent: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> PoolSize:
        text = text.strip()
        if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?%|[0-9]{1,12}", text) or not text.strip("0.%"):
            raise ValueError(f"pool size {text!r}: expected a number of blocks such as 4096, or a share such as 2.5%")
        if text.endswith("%"):
            return cls(text, percent=Fraction(text[:-1]))
        return cls(text, blocks=int(text))

    def resolve(self, unique_prompt_blocks: int) -> int:
        """Blocks, rounded down, in exact arithmetic: 7% of 100 is 7 blocks, no fraction more or less."""
        if self.blocks is not None:
            return self.blocks
        assert self.percent is not None
        return int(self.percent * unique_prompt_blocks / 100)


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What one policy at one pool size made of a trace."""

    policy: str
    size: str
    num_blocks: int
    block_size: int
    requests: int
    prompt_blocks: int
    hit_blocks: int
    hit_rate: float
    saved_tokens: int
    evicted_blocks: int
    cached_blocks: int
    active_blocks_max: int
    seconds: float
    requests_per_second: float


class Engine(Protocol):
    """A replay under way: the compiled one, the reference and the one over tokens look the same from here."""

    def advance(self, num_requests: int) -> int: ...

    def result(self) -> dict[str, int]: ...


class Replays:
    """A trace made ready: chains built, blocks counted. Each `run` is one row."""

    def __init__(
        self, trace: Trace, *, outputs: Outputs = "none", service: Service = "none", block_size: int | None = None
    ) -> None:
        self.trace, self.outputs, self.service = trace, outputs, service
        self.chains: TokenChains | None = None
        if trace.form == "tokens":
            self.block_size = block_size or trace.block_size or DEFAULT_TOKEN_BLOCK_SIZE
            self.chains = TokenChains(trace, outputs, self.block_size)
            self.columns = self.chains.columns(service)
        else:
            assert trace.block_size is not None
            if block_size not in (None, trace.block_size):
                problem = f"the trace names blocks of {trace.block_size} tokens; only a token trace has other sizes"
                raise trace.error(None, "block_size", problem)
            self.block_size = trace.block_size
            self.columns = build_columns(trace, outputs, service)
        self.unique_prompt_blocks = self.columns.unique_prompt_blocks
        chain_blocks = self.columns.chain_blocks
        self.largest_request = int(np.argmax(chain_blocks))
        self.smallest_pool = int(chain_blocks[self.largest_request])

    def num_blocks(self, size: PoolSize) -> int:
        """The blocks of a pool size, or an error if some request of the trace could never fit in them."""
        num_blocks = size.resolve(self.unique_prompt_blocks)
        if num_blocks < self.smallest_pool:
            words = f"a pool of {num_blocks} blocks"
            if size.percent is not None:
                words += f" ({size.text} of {self.unique_prompt_blocks} unique prompt blocks)"
            problem = f"this request needs {self.smallest_pool} blocks and would never fit in {words}"
            raise self.trace.error(self.largest_request, None, problem)
        if num_blocks > MAX_BLOCKS:
            raise ConfigError(f"a pool of {num_blocks} blocks: at most {MAX_BLOCKS} are possible")
        return num_blocks

    def run(self, policy: str, size: PoolSize, progress: Progress | None = None) -> ReplayRow:
        """Replay once. The time measured is that of the requests; building the pool is not in it."""
        num_blocks = self.num_blocks(size)
        engine = self._engine(policy, num_blocks)
        total = self.trace.num_requests
        chunk = max(1, total // 100)
        done, seconds = 0, 0.0
        while done < total:
            before = time.perf_counter()
            done = engine.advance(chunk)
            seconds += time.perf_counter() - before
            if progress is not None:
                progress(done, total)
        counts = engine.result()
        return ReplayRow(
            policy=policy,
            size=size.text,
            num_blocks=num_blocks,
            block_size=self.block_size,
            **counts,
            hit_rate=counts["hit_blocks"] / counts["prompt_blocks"] if counts["prompt_blocks"] else 0.0,
            saved_tokens=counts["hit_blocks"] * self.block_size,
            seconds=seconds,
            requests_per_second=total / seconds if seconds else 0.0,
        )

    def _engine(self, policy: str, num_blocks: int) -> Engine:
        # Imported here, so that reading and checking a trace needs no compiled module.
        if self.chains is not None:
            from .. import Pager

            return TokenReplay(self.chains, Pager(num_blocks, self.block_size, policy=policy), self.service)
        from .._core import Replay

        c: ReplayColumns = self.columns
        return Replay(c.ids, c.offsets, c.prompt_blocks, c.arrivals_s, c.service_s, num_blocks, policy)


def replay(
    trace: Trace,
    *,
    policies: Sequence[str] = ("lru",),
    sizes: Sequence[PoolSize],
    outputs: Outputs = "none",
    service: Service = "none",
    block_size: int | None = None,
    progress: Progress | None = None,
) -> Iterator[ReplayRow]:
    """Replay a trace for every policy and size; `progress(done, total)` counts requests over all of them."""
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}: expected one of {', '.join(POLICIES)}")
    replays = Replays(trace, outputs=outputs, service=service, block_size=block_size)
    for size in sizes:
        replays.num_blocks(size)  # refused before anything runs, not after the sizes that come first
    runs = [(policy, size) for policy in policies for size in sizes]
    for number, (policy, size) in enumerate(runs):

        def report(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(runs) * total)

        yield replays.run(policy, size, report)
