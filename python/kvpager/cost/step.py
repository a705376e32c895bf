"""How long a step takes, and how many prompt tokens fit into one: the roofline of a model on a device.

A step computes or reads, whichever takes longer (Williams et al. 2009, "Roofline", CACM 52(4)):

    seconds   = max(computing, reading) + overhead
    computing = tokens x `token_s` + pairs x `pair_s`
    reading   = `weights_s` + KV tokens x `kv_token_s`

Who writes an answer computes one token and reads a whole context, so a step of writers reads most of the time and
hardly computes. Prompt tokens beside them are nearly free until computing takes as long as reading: the ridge. That is
what chunked prefills are for (Agrawal et al. 2024, "Sarathi-Serve", arXiv 2403.02310); there the chunk is found by
profiling, here it follows from the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

from ..errors import ConfigError
from .checks import at_least, number
from .model import MAX_TOKENS, CostModel
from .shapes import DTYPE_BYTES, pairs

OVERHEAD_S = 0.001
"""What a step takes beside computing and reading, unless told otherwise: an assumption. Measure your engine's with one
short sequence: the time of a step, less its weights' bytes by the bandwidth."""


class Work(NamedTuple):
    """What a step does, in tokens. The arguments of `Speed.step_s`: ``speed.step_s(*work)``."""

    tokens: int
    """Computed."""
    pairs: int
    """Of one of them and a token of its context, itself included: what attention computes."""
    kv_tokens: int
    """Whose KV is read: the contexts of all who take part."""

    @classmethod
    def writing(cls, rows: int, context: int) -> Self:
        """A token for each of `rows` answers, whose contexts have `context` tokens in sum, the new ones included."""
        return cls(rows, context, context)

    def with_prompt(self, start: int, tokens: int) -> Work:
        """And `tokens` of a prompt, behind `start` that are computed or cached."""
        end = start + tokens
        return Work(self.tokens + tokens, self.pairs + pairs(start, end), self.kv_tokens + end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of what a step does.

    A step computes or reads, whichever takes longer: ``max(FLOPs / peak, bytes / bandwidth) + overhead``. It reads all
    weights once, and once the KV of every sequence that takes part. That MLA expands what is cached is not counted.

    >>> speed = Speed.of(CostModel.of("llama-3.1-8b", "h100", "25GB/s"))
    >>> writers = Work.writing(rows=16, context=30_000)
    >>> f"{1000 * speed.step_s(*writers):.1f} ms"
    '7.0 ms'
    >>> chunk = speed.prompt_tokens(writers)
    >>> chunk, f"{1000 * speed.step_s(*writers.with_prompt(0, chunk)):.1f} ms"
    (256, '7.0 ms')
    """

    name: str
    token_s: float
    """Computing a token, but for attention."""
    pair_s: float
    """Attention of one token to one token of its context."""
    weights_s: float
    """Reading all weights."""
    kv_token_s: float
    """Reading the KV of a token."""
    block_s: float
    """Copying a block between device and host, one way."""
    overhead_s: float
    """What every step takes besides: launches, sampling, the scheduler."""

    @classmethod
    def of(cls, cost: CostModel, overhead_s: float = OVERHEAD_S) -> Speed:
        """A model on a device, as `kvpager.cost` has them: peaks by its utilisation, bandwidth as published."""
        bandwidth = cost.device.bytes_per_second
        per_byte = 0.0 if bandwidth is None else 1 / bandwidth
        return cls(
            name=f"{cost.shape.name} on {cost.device.name}",
            token_s=cost.seconds_per_token,
            pair_s=cost.seconds_per_pair,
            weights_s=cost.shape.params * DTYPE_BYTES[cost.dtype] / cost.ranks * per_byte,
            kv_token_s=cost.bytes_per_block / cost.block_size * per_byte,
            block_s=cost.block_seconds(),
            overhead_s=overhead_s,
        )

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} is {value}: expected a finite number of seconds, at least 0")
        if not self.step_s(1, 1, 1):
            raise ConfigError("a step takes no time at all: nothing could be measured against it")

    def step_s(self, tokens: int, pairs: int, kv_tokens: int) -> float:
        """A step that computes `tokens`, which look at `pairs` tokens in sum, and reads the KV of `kv_tokens`."""
        return max(self._computing(tokens, pairs), self._reading(kv_tokens)) + self.overhead_s

    def token_alone_s(self, context: float) -> float:
        """A step of one answer and nothing else: the time between tokens on an engine that is otherwise idle."""
        return max(self.token_s + context * self.pair_s, self.weights_s + context * self.kv_token_s) + self.overhead_s

    def prompt_tokens(self, work: Work, start: int = 0, *, target_s: float = 0.0, most: int = MAX_TOKENS) -> int:
        """How many tokens of a prompt, behind `start` that are computed or cached, a step takes beside `work`.

        As many as can be computed while the step reads its weights, the contexts of `work` and that of the prompt: they
        are hidden. With `target_s` also those that keep computing, and the overhead, within so many seconds: the step
        exceeds its target only where reading alone does. Always 1 at least, so that a prompt makes progress, and `most`
        at most. It costs some microseconds, whatever the numbers. ConfigError for what is no number, or out of range.

        Let ``room = max(target_s - overhead, reading) - computing``, all in seconds. The first n tokens compute for
        ``n x (token_s + (start + 1/2) x pair_s) + n^2 / 2 x pair_s``: the answer is the largest n within the room.
        """
        for name, value in zip(("work.tokens", "work.pairs", "work.kv_tokens", "start"), (*work, start), strict=True):
            at_least(0, name, value)
        at_least(1, "most", most)
        number("target_s", target_s, least=0)
        reading = self._reading(work.kv_tokens + start)
        room = max(target_s - self.overhead_s, reading) - self._computing(work.tokens, work.pairs)
        found = min(max(1, int(self._root(self.token_s + (start + 0.5) * self.pair_s, room, most))), most)
        # The root may be rounded to either side of a whole number.
        while found > 1 and self._computing(found, pairs(start, start + found)) > room:
            found -= 1
        while found < most and self._computing(found + 1, pairs(start, start + found + 1)) <= room:
            found += 1
        return found

    # Unchecked.

    def _computing(self, tokens: int, pairs: int) -> float:
        return tokens * self.token_s + pairs * self.pair_s

    def _reading(self, kv_tokens: int) -> float:
        return self.weights_s + kv_tokens * self.kv_token_s

    def _root(self, first: float, room: float, most: int) -> float:
        """The n at which n x `first` + n^2 / 2 x `pair_s` reaches the room; `most` where that is further."""
        if room <= 0:
            return 0.0
        divisor = first + math.sqrt(first * first + 2 * self.pair_s * room)
        return 2 * room / divisor if 2 * room < most * divisor else most
