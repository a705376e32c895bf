"""What block sizes are compared on: a trace in one of its three forms, or bare lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..traces import Trace, TraceError

MAX_BLOCK_SIZE = 1024
"""The largest block of a pager. An id trace may have larger ones, which show the trend and are never recommended."""
POWERS = tuple(2**power for power in range(9))
MULTIPLES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences by their lengths, and the trace that says what they share, where there is one that does."""

    name: str
    form: Literal["tokens", "ids", "lengths"]
    """Bare lengths are of the last one, too."""
    lengths: NDArray[np.int64]
    """Tokens of each sequence when its answer is complete."""
    prompt_lengths: NDArray[np.int64]
    trace: Trace | None
    notes: tuple[str, ...]

    @classmethod
    def of_trace(cls, trace: Trace) -> Load:
        notes: tuple[str, ...] = ()
        if trace.form == "ids":
            size = trace.block_size
            notes = (
                f"the trace names blocks of {size} tokens: only multiples of {size} can be told, and what smaller"
                " blocks would share besides is not in the numbers (a token trace gives every size)",
            )
        elif trace.form == "lengths":
            notes = ("the trace has neither hash_ids nor tokens: nothing is known of sharing, the waste alone decides",)
        ends = trace.input_lengths + trace.output_lengths
        return cls(trace.path, trace.form, ends, trace.input_lengths, trace if trace.form != "lengths" else None, notes)

    @classmethod
    def of_lengths(cls, name: str, lengths: NDArray[np.int64]) -> Load:
        notes = ("bare lengths say nothing of sharing, the waste alone decides; gathers are those of the last token",)
        # As if all but the last token were prompt: then the one decode step there is reads the whole sequence.
        return cls(name, "lengths", lengths, lengths - 1, None, notes)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts, or None for bare lengths, which have no prompts."""
        return None if self.trace is None else int(self.prompt_lengths.sum())

    @property
    def unit(self) -> int:
        """Every block size has to be a multiple of this."""
        if self.trace is None or self.trace.form == "tokens":
            return 1
        assert self.trace.block_size is not None
        return self.trace.block_size

    @property
    def default_sizes(self) -> list[int]:
        """Powers of two from 1 to 256; for an id trace, its own size and multiples of that."""
        return list(POWERS) if self.unit == 1 else [self.unit * multiple for multiple in MULTIPLES]

    def check_size(self, size: int) -> None:
        """Refuse a block size that this load says nothing about, or that no pager has."""
        if size < 1 or (self.unit == 1 and size > MAX_BLOCK_SIZE):
            raise ConfigError(f"blocks of {size} tokens: a pager has 1 to {MAX_BLOCK_SIZE}")
        if size % self.unit:
            problem = f"blocks of {size} tokens: the trace names blocks of {self.unit}, so only multiples can be told"
            raise TraceError(self.name, None, None, f"{problem}; other sizes need a token trace")

    def check_fits(self, size: int, num_blocks: int) -> None:
        """Refuse a pool in which the longest sequence would never fit, in words that say which one it is."""
        longest = int(np.argmax(self.lengths))
        # One block more than the chain may have: a replay gives each request a private block at its end.
        needed = (
            -(-int(self.lengths[longest]) // size) if self.trace is None else int(self.lengths[longest]) // size + 1
        )
        if needed <= num_blocks:
            return
        tokens = "1 token" if size == 1 else f"{size} tokens"
        words = f"needs {needed} blocks of {tokens} and would never fit in a pool of {num_blocks}"
        if self.trace is not None:
            raise self.trace.error(longest, None, f"this request {words}")
        raise ConfigError(f"{self.name}: the longest sequence, {int(self.lengths[longest])} tokens, {words}")
