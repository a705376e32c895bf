"""The prefix index: for each namespace a trie with one node for each full, computed block.

A child is found by the tokens of its block themselves, so a hit is exact by construction (I3), and it hangs below the
node of the block before it, so it can only be reached through its whole prefix (I6). Children keep the order in which
they were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from ..types import Namespace

FIRST_CONTENT_TOKEN = 2**30

BlockTokens: TypeAlias = tuple[int, ...]
"""The tokens of one full block."""


class Root:
    """The top of one namespace. It exists as long as it has a child, so namespaces may come and go (L14)."""

    __slots__ = ("children", "key", "namespace")

    def __init__(self, key: bytes, namespace: Namespace) -> None:
        self.key = key
        self.namespace = namespace
        self.children: dict[BlockTokens, Node] = {}


class Node:
    """One block that is indexed, or was indexed and is still held after ``forget`` or ``reset``."""

    __slots__ = (
        "block",
        "children",
        "hits",
        "idle_since",
        "indexed",
        "marked",
        "offered",
        "parent",
        "stored",
        "tokens",
    )

    def __init__(self, parent: Node | Root, tokens: BlockTokens, block: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.children: dict[BlockTokens, Node] = {}
        self.indexed = True
        self.hits = 0
        self.marked = False
        # An offload (on the host a save) found, since the block joined its queue, that nothing of it is to be copied.
        self.offered = False
        self.stored = False  # a save brought the host's block into the store, or a load brought it from there
        self.idle_since = 0

    @property
    def above(self) -> Node | None:
        """The node of the block before this one."""
        return self.parent if isinstance(self.parent, Node) else None


class Index:
    """All namespaces of one pager."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[bytes, Root] = {}

    def walk(self, key: bytes, path: list[Node], tokens: list[int], stop: int) -> list[Node]:
        """The nodes that go on from the end of ``path`` with the blocks of ``tokens``, up to block ``stop``."""
        found: list[Node] = []
        parent = path[-1] if path else self.roots.get(key)
        for number in range(len(path), stop):
            if parent is None:
                break
            parent = parent.children.get(self.block_tokens(tokens, number))
            if parent is None:
                break
            found.append(parent)
        return found

    def match(self, key: bytes, tokens: list[int]) -> list[Node]:
        """The path that an admit of ``tokens`` hits. The last token is never hit: somebody has to compute it."""
        path = self.walk(key, [], tokens, (len(tokens) - 1) // self.block_size)
        return path[: whole_runs(tokens, len(path), self.block_size)]

    def copies_of(self, path: list[Node]) -> list[Node]:
        """The nodes here that stand for the same namespace and tokens as those of another index, up to the first gap.

        ``path`` begins at the top.
        """
        return self.find(root_of(path).key, tokens_of(path)) if path else []

    def find(self, key: bytes, blocks: list[BlockTokens]) -> list[Node]:
        """The nodes of these blocks, from the top of a namespace up to the first gap."""
        found: list[Node] = []
        parent: Node | Root | None = self.roots.get(key)
        for tokens in blocks:
            parent = parent.children.get(tokens) if parent is not None else None
            if parent is None:
                break
            found.append(parent)
        return found

    def block_tokens(self, tokens: list[int], number: int) -> BlockTokens:
        """The tokens of one full block."""
        return tuple(tokens[number * self.block_size : (number + 1) * self.block_size])

    def add(self, key: bytes, namespace: Namespace, path: list[Node], tokens: BlockTokens, block: int) -> Node:
        """Index ``block`` below the end of ``path``, or as a first block of the namespace."""
        parent: Node | Root = path[-1] if path else self.roots.setdefault(key, Root(key, namespace))
        node = parent.children[tokens] = Node(parent, tokens, block)
        return node

    def detach(self, node: Node) -> None:
        """Take a node away from its parent, so that nothing finds it or what is below it any more."""
        parent = node.parent
        del parent.children[node.tokens]
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.key]

    def nodes(self) -> Iterator[Node]:
        """Every indexed node, parents first."""
        pending = [node for root in self.roots.values() for node in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())


def post_order(top: Node) -> list[Node]:
    """``top`` and all nodes below it: children before their parent, siblings by creation. No recursion (L8)."""
    order: list[Node] = []
    pending = [(top, iter(list(top.children.values())))]
    while pending:
        node, children = pending[-1]
        child = next(children, None)
        if child is None:
            order.append(node)
            pending.pop()
        else:
            pending.append((child, iter(list(child.children.values()))))
    return order


def inside_run(tokens: list[int], position: int) -> bool:
    """Whether a block that ends at ``position`` would cut a run of content tokens in two."""
    return (
        0 < position < len(tokens)
        and tokens[position - 1] >= FIRST_CONTENT_TOKEN
        and tokens[position] >= FIRST_CONTENT_TOKEN
    )


def run_start(tokens: list[int], position: int) -> int:
    """The first position of the run of content tokens that reaches up to ``position``."""
    while position > 0 and tokens[position - 1] >= FIRST_CONTENT_TOKEN:
        position -= 1
    return position


def whole_runs(tokens: list[int], blocks: int, block_size: int, least: int = 0) -> int:
    """So many blocks, cut back until they end inside no run of content tokens; ``least`` at the least."""
    while blocks > least and inside_run(tokens, blocks * block_size):
        blocks = run_start(tokens, blocks * block_size) // block_size
    return max(blocks, least)


def path_to(node: Node) -> list[Node]:
    """The nodes from the top down to this one."""
    path = [node]
    while (above := path[-1].above) is not None:
        path.append(above)
    return path[::-1]


def root_of(path: list[Node]) -> Root:
    """The top of the namespace that a path begins in."""
    root = path[0].parent
    assert isinstance(root, Root)
    return root


def tokens_of(path: list[Node]) -> list[BlockTokens]:
    """The tokens of a path, block by block."""
    return [node.tokens for node in path]


def units(path: list[BlockTokens]) -> list[range]:
    """The positions of a path in groups: blocks between which a run of content tokens goes on belong together."""
    starts = [
        number
        for number, tokens in enumerate(path)
        if not number or path[number - 1][-1] < FIRST_CONTENT_TOKEN or tokens[0] < FIRST_CONTENT_TOKEN
    ]
    return [range(start, stop) for start, stop in pairwise([*starts, len(path)])]
