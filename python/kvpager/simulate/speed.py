"""How long a step takes: the roofline of a model on a device, and the link between device and host."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of what a step does.

    A step computes or reads, whichever takes longer: ``max(FLOPs / peak, bytes / bandwidth) + overhead``. It reads all
    weights once, and once the KV of every sequence that takes part.
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

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} is {value}: expected a finite number of seconds, at least 0")
        if not self.step_s(1, 1, 1):
            raise ConfigError("a step takes no time at all: nothing could be measured against it")

    def step_s(self, tokens: int, pairs: int, kv_tokens: int) -> float:
        """A step that computes `tokens`, which look at `pairs` tokens in sum, and reads the KV of `kv_tokens`."""
        compute = tokens * self.token_s + pairs * self.pair_s
        read = self.weights_s + kv_tokens * self.kv_token_s
        return max(compute, read) + self.overhead_s
