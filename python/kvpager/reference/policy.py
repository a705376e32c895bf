"""Who is evicted first: two policies behind one seam. Nothing outside this file knows which one runs.

A policy keeps the cached blocks, those that only offloads hold, and no others. It must always name a block before its
parent (I6). It can rely on this: a parent becomes cached no earlier than its children, and an admit that hits a block
hits its parent, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from .index import Node

Queue = OrderedDict[int, Node]  # block id -> node, coldest first


class Policy(Protocol):
    """What the pager tells a policy, and asks from it."""

    def __len__(self) -> int:
        """Blocks in the queues."""

    def hit(self, node: Node) -> None:
        """An admit matched this block."""

    def cached(self, node: Node) -> None:
        """The block lost its last holder."""

    def taken(self, node: Node) -> None:
        """The cached block is held again, or it left the index."""

    def settle(self) -> None:
        """Holds were dropped; all blocks that became cached by it have been named."""

    def queues(self) -> dict[str, Queue]:
        """The queues by name, in the order in which they are evicted."""


class Lru:
    """The block that became cached first goes first."""

    def __init__(self, num_blocks: int) -> None:
        self._queue: Queue = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def hit(self, node: Node) -> None:
        pass

    def cached(self, node: Node) -> None:
        self._queue[node.block] = node

    def taken(self, node: Node) -> None:
        del self._queue[node.block]

    def settle(self) -> None:
        pass

    def queues(self) -> dict[str, Queue]:
        return {"lru": self._queue}


class Slru:
    """Segmented LRU: a block that was never hit goes before one that was, so a scan passes through (E3)."""

    def __init__(self, num_blocks: int) -> None:
        self._protected_max = num_blocks // 2
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def hit(self, node: Node) -> None:
        node.marked = True

    def cached(self, node: Node) -> None:
        queue = self._protected if node.marked else self._probation
        queue[node.block] = node

    def taken(self, node: Node) -> None:
        queue = self._protected if node.block in self._protected else self._probation
        del queue[node.block]

    def settle(self) -> None:
        while len(self._protected) > self._protected_max:
            block, node = self._protected.popitem(last=False)
            node.marked = False
            node.offered = False
            self._probation[block] = node

    def queues(self) -> dict[str, Queue]:
        return {"probation": self._probation, "protected": self._protected}


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "slru": Slru}
