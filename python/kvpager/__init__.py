"""kvpager: the pager for LLM KV caches.

It hands out fixed-size KV blocks, shares prompt prefixes between requests, and decides what to evict and whom to admit.

>>> import kvpager
>>> pager = kvpager.Pager(num_blocks=8, block_size=4)
>>> with pager.admit([1, 2, 3, 4, 5]) as first:
...     first.commit()
>>> second = pager.admit([1, 2, 3, 4, 9])
>>> second.num_cached, second.block_ids.tolist()
(4, [0, 1])
>>> second.release()
"""

import os
import warnings

from . import _core
from ._core import Admission, Batch, Pager, Sequence, Step, __version__, build_info
from .content import content_tokens
from .errors import (
    AllocationError,
    ConfigError,
    ForkedProcess,
    KvPagerError,
    NeverFits,
    OutOfBlocks,
    Poisoned,
    StaleHandle,
    StepError,
    TokenError,
    TokenTypeError,
    TransferError,
)
from .plans import Plan, PlanStatus, StoreKeys
from .pressure import Pressure, Reading
from .types import (
    AttachedTier,
    BatchArrays,
    Computing,
    FetchPolicy,
    Namespace,
    Never,
    Preemption,
    PrefixMatch,
    RecoveryCost,
    Stats,
    Tokens,
    Victim,
    Wait,
)

__all__ = [
    "Admission",
    "AllocationError",
    "AttachedTier",
    "Batch",
    "BatchArrays",
    "Computing",
    "ConfigError",
    "FetchPolicy",
    "ForkedProcess",
    "KvPagerError",
    "Namespace",
    "Never",
    "NeverFits",
    "OutOfBlocks",
    "Pager",
    "Plan",
    "PlanStatus",
    "Poisoned",
    "Preemption",
    "PrefixMatch",
    "Pressure",
    "Reading",
    "RecoveryCost",
    "Sequence",
    "StaleHandle",
    "Stats",
    "Step",
    "StepError",
    "StoreKeys",
    "TokenError",
    "TokenTypeError",
    "Tokens",
    "TransferError",
    "Victim",
    "Wait",
    "__version__",
    "build_info",
    "content_tokens",
]

if hasattr(os, "register_at_fork"):
    # A child shares no lock and no blocks with its parent: the core refuses the parent's pagers there.
    os.register_at_fork(after_in_child=_core._mark_forked)

if build_info()["debug"]:
    warnings.warn(
        "kvpager was built without optimisation and is many times slower: install it with pip, or build it with"
        " `maturin develop --release`",
        RuntimeWarning,
        stacklevel=2,
    )
