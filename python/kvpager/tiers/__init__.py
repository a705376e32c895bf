"""Stores behind the host tier: where offloaded blocks outlive the pool and, on a disk, the process.

`Store` is the interface; `MemoryStore` states it plainly; `DiskStore` keeps blocks in a directory.
"""

from .disk import DiskStore
from .memory import MemoryStore
from .store import KEY_BYTES, Store

__all__ = ["KEY_BYTES", "DiskStore", "MemoryStore", "Store"]
