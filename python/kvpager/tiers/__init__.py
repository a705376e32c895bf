"""Stores behind the host tier: where offloaded blocks outlive the pool and, on a disk, the process.

`Store` is the interface; `MemoryStore` states it plainly; `DiskStore` keeps blocks in a directory, `ValkeyStore` on
a server that others share.
"""

from .disk import DiskStore
from .memory import MemoryStore
from .store import KEY_BYTES, Store
from .valkey import ValkeyStore

__all__ = ["KEY_BYTES", "DiskStore", "MemoryStore", "Store", "ValkeyStore"]
