"""The requests of a simulation: when they arrive, how long they are, and the tokens that a pager is to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..traces import Trace

Tokens = NDArray[np.int32]

# Values from here on stand for images and the like, which the pager treats as one thing: what is made up stays below.
MAX_VALUES = 2**30


class Texts(Protocol):
    """The tokens of requests, made when asked for: all of them together may not fit in memory."""

    def prompt(self, index: int) -> Tokens: ...

    def answer(self, index: int) -> Tokens | None:
        """The recorded answer, or None where nobody knows it: then it is of tokens that no other request has."""

    def own_token(self, index: int) -> int:
        """A token value that is in no text and that no other request has."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival, as columns."""

    name: str
    arrivals_s: NDArray[np.float64]
    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    """Tokens of each answer, at least 1: what a prefill ends with is the first token of the answer."""
    texts: Texts
    max_tokens: int | None = None
    """What every answer may have at most, as a client says; None: each client knows the true length."""

    def most_tokens(self, index: int) -> int:
        """What a request's answer may have at most."""
        return max(int(self.output_lengths[index]), self.max_tokens or 0)

    @property
    def num_requests(self) -> int:
        return len(self.arrivals_s)

    @property
    def is_batch(self) -> bool:
        """Whether all requests are there from the beginning: whoever serves them knows that no others will come."""
        return bool(self.arrivals_s[0] == self.arrivals_s[-1])

    @property
    def useful_tokens(self) -> int:
        """What has to be computed if nothing is shared and nothing is computed twice.

        The last token of an answer is not: its KV would serve nobody.
        """
        return int((self.input_lengths + self.output_lengths - 1).sum())

    def blocks_needed(self, block_size: int) -> NDArray[np.int64]:
        """Blocks that each request holds before it finishes."""
        return -(-(self.input_lengths + self.output_lengths - 1) // block_size)

    def block_steps(self, block_size: int) -> int:
        """Blocks times steps: what all requests need at least, if nothing is shared.

        The step that gives the k-th token of an answer, from 0, needs the blocks of the prompt and k tokens. No pool of
        n blocks ends in fewer steps than this by n.
        """
        first = self.input_lengths
        last = first + self.output_lengths - 1
        return int((_sum_of_ceils(last, block_size) - _sum_of_ceils(first - 1, block_size)).sum())

    def at_once(self) -> Load:
        """The same requests, all of them there from the beginning."""
        return replace(self, arrivals_s=np.zeros_like(self.arrivals_s))

    def at_rate(self, requests_per_s: float) -> Load:
        """The same requests in the same rhythm, at another mean rate."""
        first, last = float(self.arrivals_s[0]), float(self.arrivals_s[-1])
        if self.is_batch:
            raise ConfigError(f"{self.name}: all requests arrive at once, so there is no rate to change")
        factor = (self.num_requests - 1) / (last - first) / requests_per_s
        return replace(self, arrivals_s=(self.arrivals_s - first) * factor)

    def first(self, num_requests: int) -> Load:
        """The first requests only."""
        n = num_requests
        columns = {name: getattr(self, name)[:n] for name in ("arrivals_s", "input_lengths", "output_lengths")}
        return replace(self, **columns)


def _sum_of_ceils(numbers: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The sum of ceil(i / size) for i from 1 to each number."""
    full, rest = numbers // size, numbers % size
    return size * full * (full + 1) // 2 + rest * (full + 1)


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """Requests that begin with one of some system prompts, or with none, and go on with what nobody else has."""

    systems: Sequence[Tokens]
    which: NDArray[np.int64]
    """The system prompt of each request, -1 for none."""
    lengths: NDArray[np.int64]
    first_own: int

    def prompt(self, index: int) -> Tokens:
        prompt = np.full(self.lengths[index], self.own_token(index), np.int32)
        if self.which[index] >= 0:
            system = self.systems[self.which[index]][: len(prompt) - 1]
            prompt[: len(system)] = system
        return prompt

    def answer(self, index: int) -> Tokens | None:
        return None

    def own_token(self, index: int) -> int:
        return self.first_own + index


@dataclass(frozen=True, slots=True)
class BlockIds:
    """An id trace. Each id becomes one token value, as often as the block has tokens.

    Ids are chained, so equal ids stand at equal places behind equal ids: equal tokens are those that were equal.
    """

    trace: Trace
    first_own: int

    def prompt(self, index: int) -> Tokens:
        prompt = np.full(self.trace.input_lengths[index], self.own_token(index), np.int32)
        ids = self.trace.prompts.row(index)
        size = self.trace.block_size
        assert size is not None
        prompt[: len(ids) * size] = np.repeat(ids, size)
        tail = len(prompt) - len(ids) * size
        if tail and self.trace.has_output[index] and len(answer := self.trace.outputs.row(index)):
            # The first block of the answer begins with the end of the prompt.
            prompt[-tail:] = answer[0]
        return prompt

    def answer(self, index: int) -> Tokens | None:
        if not self.trace.has_output[index] or not self.trace.output_lengths[index]:
            return None
        size = self.trace.block_size
        assert size is not None
        length = int(self.trace.output_lengths[index])
        answer = np.full(length, self.own_token(index), np.int32)
        # Its blocks begin where the last full block of the prompt ends.
        tokens = np.repeat(self.trace.outputs.row(index), size)[int(self.trace.input_lengths[index]) % size :]
        answer[: len(tokens)] = tokens
        return answer

    def own_token(self, index: int) -> int:
        return self.first_own + index


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """A token trace: its own tokens."""

    trace: Trace
    first_own: int

    def prompt(self, index: int) -> Tokens:
        return self.trace.prompts.row(index)

    def answer(self, index: int) -> Tokens | None:
        answer = self.trace.outputs.row(index)
        return answer if len(answer) else None

    def own_token(self, index: int) -> int:
        return self.first_own + index


def load_from_trace(trace: Trace) -> Load:
    """A trace of any form as it was recorded. An answer of no token counts as one of one token."""
    texts: Texts
    used = [part.values for part in (trace.prompts, trace.outputs) if len(part.values)]
    first_own = 1 + max((int(values[values < MAX_VALUES].max(initial=-1)) for values in used), default=-1)
    if first_own + trace.num_requests > MAX_VALUES:
        raise trace.error(None, None, f"uses {first_own:,} token values or ids; a simulation takes {MAX_VALUES:,}")
    if trace.form == "lengths":
        nobody = np.full(trace.num_requests, -1, np.int64)
        texts = SystemPrompts([], nobody, trace.input_lengths, 0)
    elif trace.form == "ids":
        texts = BlockIds(trace, first_own)
    else:
        texts = TokenTexts(trace, first_own)
    return Load(
        name=trace.path,
        arrivals_s=(trace.timestamps_ms - trace.timestamps_ms[0]) / 1000,
        input_lengths=trace.input_lengths,
        output_lengths=np.maximum(trace.output_lengths, 1),
        texts=texts,
    )
