"""Both pools, and how blocks that were copied to the host come into its index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..plans import Tier
from ..types import Namespace
from .index import BlockTokens, Node, units
from .log import Log
from .pool import Counters, Pool

End: TypeAlias = Literal["complete", "fail", "cancel", "abandon"]


@dataclass(frozen=True, slots=True)
class Tiers:
    """Both pools, for what moves between them. (A store is none: the pager has no blocks there.)"""

    device: Pool
    host: Pool
    counters: Counters
    log: Log

    def of(self, tier: Tier) -> Pool:
        """The pool of a tier."""
        return self.device if tier == "device" else self.host


def bring(
    host: Pool,
    key: bytes,
    namespace: Namespace,
    path: list[BlockTokens],
    start: int,
    blocks: list[int],
    arrived: list[bool],
) -> tuple[list[Node], list[int]]:
    """Index a path's blocks from ``start`` on in ``blocks``, unit by unit, as far as they have arrived.

    Answers the path on the host up to where that ended, and the blocks that are indexed now. (The path is shorter than
    ``start`` if the block above is not there.)
    """
    there, brought = host.index.find(key, path), []
    stop = min(start, len(there))
    for unit in units(path):
        if unit.start != stop or unit.start < start:
            continue
        if not all(arrived[number - start] for number in unit):
            break
        if unit.start < len(there) < unit.stop:
            break
        if len(there) < unit.stop:
            for number in unit:
                block = blocks[number - start]
                there.append(host.index.add(key, namespace, there, path[number], block))
                host.publish(there[-1])
                brought.append(block)
        stop = unit.stop
    return there[:stop], brought


def let_in(host: Pool, there: list[Node], start: int, brought: list[int], above: Node | None) -> None:
    """Let go of what was brought, and of the block above it, so that all join the queue as one path."""
    last = there[-1] if len(there) > start else None
    if last is not None:
        host.hold(last.block)
    if above is not None:
        host.drop(above.block)
    for block in brought:
        host.drop(block)
    if last is not None:
        host.drop(last.block)


def push(pool: Pool, blocks: list[int]) -> None:
    """Let go of destinations, last first."""
    for block in reversed(blocks):
        pool.drop(block)
