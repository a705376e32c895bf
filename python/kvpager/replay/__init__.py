"""Replay a request trace through the pager and count hits, saved tokens and evictions, to the block.

    from kvpager.replay import PoolSize, replay
    from ..traces import read_trace

    for row in replay(read_trace("trace.jsonl"), policies=["lru"], sizes=[PoolSize.parse("5%")]):
        print(row.hit_rate, row.evicted_blocks)

How a replay counts:

- The chain of a request is its full prompt blocks, then its output blocks, then always one private block that nobody
  shares, so that the last full block of a prompt may be hit whatever its length.
- Output blocks: *none* has none; *fresh* has the blocks that the answer fills, which nobody else has; *recorded* takes
  the answer of the trace where it is there, fresh blocks where it is not.
- The whole chain is taken at admission and can be hit from then on. A server publishes a block when it is computed;
  the trace does not say when that was. Hits count the longest cached prefix of the full prompt blocks.
- Service *none*: a request is released at once. Service *model*: it holds its blocks for `service_ms` of the trace
  where present, else for `input_length / 10,000 + 0.020 * output_length` seconds from its admission.

`kvpager.replay.schedule` says in which order arrivals and finishes are taken.
"""

from .columns import Outputs, ReplayColumns, Service, build_columns
from .runs import PoolSize, ReplayRow, replay
from .schedule import ReferenceReplay, Schedule
from .tokens import TokenChains, TokenReplay

__all__ = [
    "Outputs",
    "PoolSize",
    "ReferenceReplay",
    "ReplayColumns",
    "ReplayRow",
    "Schedule",
    "Service",
    "TokenChains",
    "TokenReplay",
    "build_columns",
    "replay",
]
