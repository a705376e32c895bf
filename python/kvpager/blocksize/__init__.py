"""Which block size? What each costs on a trace, or on a distribution of lengths, and a rule that picks one.

    from kvpager.blocksize import Load, measure, recommend
    from kvpager.traces import read_trace

    rows = measure(Load.of_trace(read_trace("chat.jsonl")))
    print(recommend(rows, within=0.02).reason)

A block is to a KV cache what a page is to virtual memory, and its size is the same bargain: large blocks leave more of
the last one empty and share less, small ones make longer tables and more places to read from in every decode step.
"""

from .lengths import LengthDistribution
from .load import MAX_BLOCK_SIZE, Load
from .measure import BlockSizeRow, measure
from .rule import Recommendation, recommend

__all__ = [
    "MAX_BLOCK_SIZE",
    "BlockSizeRow",
    "LengthDistribution",
    "Load",
    "Recommendation",
    "measure",
    "recommend",
]
