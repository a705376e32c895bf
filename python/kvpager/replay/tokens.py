"""Replay of traces that hold tokens, through the pager's public calls, at any block size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..traces import Trace
from .columns import MAX_IDS, Outputs, ReplayColumns, Service, answer_blocks, times
from .schedule import Schedule

if TYPE_CHECKING:
    from .. import Pager, Sequence, reference


class TokenChains:
    """The tokens of each request's chain at one block size, made when asked for.

    A chain is cut to whole blocks and followed by one token that is never committed: the private last block.
    """

    def __init__(self, trace: Trace, outputs: Outputs, block_size: int) -> None:
        if trace.form != "tokens":
            raise ValueError("only a token trace has tokens; use build_columns")
        self.trace, self.outputs, self.block_size = trace, outputs, block_size
        self.prompt_blocks = (trace.input_lengths // block_size).astype(np.int32)
        extra = answer_blocks(trace, block_size) if outputs != "none" else 0
        self.full_blocks: NDArray[np.int64] = trace.input_lengths // block_size + extra
        self._fresh = _unused_tokens(trace)

    def __len__(self) -> int:
        return self.trace.num_requests

    def row(self, index: int) -> NDArray[np.int32]:
        full_tokens = int(self.full_blocks[index]) * self.block_size
        chain = np.zeros(full_tokens + 1, np.int32)
        prompt = self.trace.prompts.row(index)[:full_tokens]
        chain[: len(prompt)] = prompt
        if len(prompt) < full_tokens:
            if self.outputs == "recorded" and self.trace.has_output[index]:
                chain[len(prompt) : full_tokens] = self.trace.outputs.row(index)[: full_tokens - len(prompt)]
            else:
                # One token that nobody else has makes this block, and with it all below, a block of this request alone.
                chain[len(prompt)] = self._fresh[index]
        return chain

    def columns(self, service: Service) -> ReplayColumns:
        """The same trace by block ids: equal ids where all tokens up to and including a block are equal."""
        numbers: dict[tuple[int, bytes], int] = {}
        ids: list[int] = []
        for blocks in self._blocks():
            before = -1
            for block in blocks:
                before = numbers.setdefault((before, block.tobytes()), len(numbers))
                ids.append(before)
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.full_blocks, out=offsets[1:])
        return ReplayColumns(np.array(ids, np.int32), offsets, self.prompt_blocks, *times(self.trace, service))

    def _blocks(self) -> Iterator[NDArray[np.int32]]:
        for index in range(len(self)):
            yield self.row(index)[:-1].reshape(-1, self.block_size)


def _unused_tokens(trace: Trace) -> NDArray[np.int64]:
    """A token value for each request that no prompt and no answer of the trace has.

    A trace uses no more different values than it has tokens, so there are enough of them below its length and some.
    """
    used_by = (trace.prompts.values, trace.outputs.values)
    below = trace.num_requests + sum(map(len, used_by))
    if below > MAX_IDS:
        raise trace.error(None, "tokens", f"more than {MAX_IDS} tokens and requests; a replay takes no more at once")
    used = np.zeros(below, np.bool_)
    for values in used_by:
        used[values[values < below]] = True
    return np.flatnonzero(~used)[: trace.num_requests]


class TokenReplay(Schedule):
    """A replay on a pager, the compiled one or the reference, by the calls that a server would make."""

    def __init__(self, chains: TokenChains, pager: Pager | reference.Pager, service: Service) -> None:
        super().__init__(len(chains), *times(chains.trace, service))
        self._chains, self._pager = chains, pager
        self._sequences: dict[int, Sequence | reference.Sequence] = {}
        self._hit_blocks = self._active_max = 0

    def _admit(self, index: int) -> bool:
        tokens = self._chains.row(index)
        sequence = self._pager.try_admit(tokens)
        if sequence is None:
            return False
        block_size = self._chains.block_size
        hit_blocks = sequence.num_cached // block_size
        self._hit_blocks += min(hit_blocks, int(self._chains.prompt_blocks[index]))
        # The private block holds one token; at block size 1 it would be full, and to commit it would publish it.
        sequence.commit(len(tokens) - 1)
        self._active_max = max(self._active_max, self._pager.stats().active_blocks)
        self._sequences[index] = sequence
        return True

    def _release(self, index: int) -> None:
        self._sequences.pop(index).release()

    def result(self) -> dict[str, int]:
        stats = self._pager.stats()
        return {
            "requests": self._done,
            "prompt_blocks": int(self._chains.prompt_blocks[: self._done].sum()),
            "hit_blocks": self._hit_blocks,
            "evicted_blocks": stats.evicted_blocks,
            "cached_blocks": stats.cached_blocks,
            "active_blocks_max": self._active_max,
        }
