"""How long a step takes: the roofline of a model on a device, and the link between device and host."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..cost import DTYPE_BYTES, CostModel
from ..errors import ConfigError

OVERHEAD_S = 0.001
"""What a step takes beside computing and reading, unless told otherwise: an assumption. Measure your engine's with one
short sequence: the time of a step, less its weights' bytes by the bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of what a step does.

    A step computes or reads, whichever takes longer: ``max(FLOPs / peak, bytes / bandwidth) + overhead``. It reads all
    weights once, and once the KV of every sequence that takes part. That MLA expands what is cached is not counted.
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
        compute = tokens * self.token_s + pairs * self.pair_s
        read = self.weights_s + kv_tokens * self.kv_token_s
        return max(compute, read) + self.overhead_s
