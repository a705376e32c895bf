"""What the same memory holds when requests get contiguous slots, and when they get pages.

    from kvpager.fragmentation import measure

    result = measure(seed=0)
    print(result.reserved.filled.admitted, result.paged[16].filled.admitted)

Three schemes serve the same requests: a contiguous reservation of the longest context each, which is all that is safe
while nobody knows how long an answer will be; a contiguous place of exactly the right size, found by first fit, which
assumes that somebody does know; and pages, by `kvpager.Pager`. `memories` has the three, `measure` fills each and then
lets requests finish in random order.
"""

from .measure import (
    BLOCK_SIZES,
    FINISHES,
    LENGTH_MEDIAN,
    LENGTH_SIGMA,
    MAX_CONTEXT,
    SLOTS,
    Churned,
    Filled,
    Result,
    Scheme,
    measure,
    request_lengths,
)
from .memories import FREE, WASTED, Contiguous, Pages, SlotMap

__all__ = [
    "BLOCK_SIZES",
    "FINISHES",
    "FREE",
    "LENGTH_MEDIAN",
    "LENGTH_SIGMA",
    "MAX_CONTEXT",
    "SLOTS",
    "WASTED",
    "Churned",
    "Contiguous",
    "Filled",
    "Pages",
    "Result",
    "Scheme",
    "SlotMap",
    "measure",
    "request_lengths",
]
