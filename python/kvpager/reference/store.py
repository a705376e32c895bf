"""What goes to a store and comes from there: keys, saves and loads.

Nothing here knows a store, or asks one. A block has a key there, which covers all that its content depends on, and a
mark says that a save or load of it ended well. A save reads host blocks that nobody has to hold: it pins them, as an
offload pins device blocks. A load writes host blocks of its own, which then join the host's index.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from ..plans import StoreKeys
from ..types import Namespace
from .index import FIRST_CONTENT_TOKEN, BlockTokens, Node, path_to, tokens_of, units, whole_runs
from .tiers import End, Tiers, bring, let_in, push

KEY_BYTES = 32


def root_key(block_size: int, identity: bytes, namespace: bytes) -> bytes:
    """What stands for the block above the first one of an encoded namespace."""
    size, length = block_size.to_bytes(4, "little"), len(identity).to_bytes(8, "little")
    return bytes(8) + hashlib.sha256(b"\x00" + b"kvpager" + size + length + identity + namespace).digest()[:24]


def block_keys(root: bytes, path: list[BlockTokens]) -> list[bytes]:
    """The key of each block of a path that ends in no unit."""
    keys: list[bytes] = []
    for unit in units(path):
        covered = (keys[-1] if keys else root) + b"".join(_encoded(path[number]) for number in unit)
        if len(unit) == 1:
            keys.append(hashlib.sha256(b"\x01" + covered).digest())
            continue
        whole = hashlib.sha256(b"\x02" + covered).digest()
        keys += [hashlib.sha256(b"\x03" + whole + number.to_bytes(4, "little")).digest() for number in range(len(unit))]
    return keys


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """One block as a store knows it."""

    key: bytes
    meta: bytes


def store_blocks(root: bytes, path: list[BlockTokens]) -> list[StoreBlock]:
    """Key and meta of each block of a path."""
    keys = block_keys(root, path)
    above = [root, *keys]
    return [
        StoreBlock(key, parent + _encoded(tokens)) for key, parent, tokens in zip(keys, above[:-1], path, strict=True)
    ]


def as_store_keys(blocks: list[StoreBlock], block_size: int) -> StoreKeys:
    """The same as arrays."""
    keys = np.array([list(block.key) for block in blocks], dtype=np.uint8).reshape(-1, KEY_BYTES)
    metas = np.array([list(block.meta) for block in blocks], dtype=np.uint8).reshape(-1, KEY_BYTES + 4 * block_size)
    for array in (keys, metas):
        array.flags.writeable = False
    return StoreKeys(keys, metas)


def _encoded(tokens: BlockTokens) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def unsaved(path: list[Node], saving: set[Node]) -> list[range]:
    """The units of a host path that a save may take: those behind the deepest block that is stored or being saved.

    None if that lies inside a unit. The last unit is none of them if it may go on behind the path.
    """
    start = max((number + 1 for number, node in enumerate(path) if node.stored or node in saving), default=0)
    whole = units(tokens_of(path))
    if path[-1].tokens[-1] >= FIRST_CONTENT_TOKEN:
        whole.pop()
    return [unit for unit in whole if unit.start >= start] if start in [unit.start for unit in whole] else []


@dataclass(slots=True, eq=False)
class Save:
    """Host blocks go to the store as well. Each chain of them is a piece of a path."""

    chains: list[list[Node]]

    def end(self, tiers: Tiers, done: list[bool], how: End) -> None:
        if how == "abandon":
            # The store may still be given what is in these blocks.
            return
        for chain in self.chains:
            arrived = [*done[: len(chain)], False].index(False)
            done = done[len(chain) :]
            for node in chain[:arrived]:
                if node.indexed:
                    node.stored = True
                    tiers.counters.saved_blocks += 1
            if how == "fail" and not arrived:
                # The store may have lost what is above, so that nothing can be put below it.
                for node in path_to(chain[0])[:-1]:
                    node.stored = False
            tiers.host.unpin(chain[-1].block)


@dataclass(slots=True, eq=False)
class Load:
    """What the store has of a prompt, behind what the host has, comes to the host."""

    key: bytes
    namespace: Namespace
    tokens: list[int]
    start: int  # the blocks that were found on the host
    above: Node | None  # the last of them
    blocks: list[int]
    left: int  # up to which block of the prompt nothing was forgotten meanwhile

    @property
    def stop(self) -> int:
        """The end of what it brings."""
        return self.start + len(self.blocks)

    def forget(self, key: bytes, tokens: list[int], block_size: int) -> None:
        """The last block of these tokens, and all below it, is to be found nowhere."""
        if key == self.key and tokens == self.tokens[: len(tokens)]:
            self.left = min(self.left, len(tokens) // block_size - 1)

    def end(self, tiers: Tiers, done: list[bool], how: End) -> None:
        host, size = tiers.host, tiers.host.index.block_size
        arrived = done.index(False) if False in done else len(done)
        stop = whole_runs(self.tokens, min(self.start + arrived, self.left), size)
        path = [host.index.block_tokens(self.tokens, number) for number in range(self.stop)]
        good = [number < stop for number in range(self.start, self.stop)]
        there, brought = bring(host, self.key, self.namespace, path, self.start, self.blocks, good)
        for node in there:
            node.stored = node.stored or node.block in brought
        tiers.counters.loaded_blocks += len(brought)
        let_in(host, there, self.start, brought, self.above)
        if how != "abandon":
            push(host, [block for block in self.blocks if block not in brought])
