"""Behind the host tier: where prefixes outlive the pool and, on a disk or a server, the process.

`Tier` keeps a pager's host blocks in a `Store`: `DiskTier` in a directory. `MemoryStore` states plainly what a store
is; `DiskStore` keeps blocks in a directory, `ValkeyStore` on a server that others share. `StoreMover` carries out the
plans, where a pager is in another process.
"""

from .disk import DiskStore, Sync
from .memory import MemoryStore
from .mover import StoreMover
from .store import KEY_BYTES, Store
from .tier import DiskTier, Loading, Tier
from .valkey import ValkeyStore

__all__ = [
    "KEY_BYTES",
    "DiskStore",
    "DiskTier",
    "Loading",
    "MemoryStore",
    "Store",
    "StoreMover",
    "Sync",
    "Tier",
    "ValkeyStore",
]
