"""vLLM+, with which Marconi's paper compares: a checkpoint at every block, the oldest leaf is evicted first. Pure.

The cache is a tree of blocks of `block_tokens` tokens. The last block of a sequence may be shorter: it has a state,
too, and grows if a longer sequence continues it. A shorter block is a hit if all of it matches, which favours vLLM+.
The clock and the bound are those of `StateTree`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ranvier_py.replay.hybrid.alpha_search import TokenRequest
from ranvier_py.replay.hybrid.hybrid_model import HybridModel

TOKEN = 4  # bytes


@dataclass(slots=True, eq=False)
class BlockNode:
    """One block. `children`: by their content, in order of insertion. `stamp`: when it was last used."""

    content: bytes
    parent: BlockNode | None
    stamp: int
    children: dict[bytes, BlockNode] = field(default_factory=dict)

    def __lt__(self, other: BlockNode) -> bool:
        """Compare by stamp alone, for the heap of leaves."""
        return self.stamp < other.stamp


class BlockStates:
    """vLLM+ as a `TraceCache`."""

    def __init__(self, model: HybridModel, capacity_bytes: int, block_tokens: int = 32) -> None:
        self.model = model
        self.capacity_bytes = capacity_bytes
        self.block_tokens = block_tokens
        self.clock = 0
        self.root = BlockNode(b"", None, 0)
        self.nodes = 0
        self.tokens = 0
        self.evictions = 0
        self._width = block_tokens * TOKEN

    @property
    def bytes_used(self) -> int:
        return self.nodes * self.model.state_bytes + self.tokens * self.model.token_bytes

    def lookup(self, request: TokenRequest) -> int:
        return self._match(request.prompt)[1]

    def insert(self, request: TokenRequest) -> None:
        self.clock += 1
        path = request.whole
        nodes, _ = self._match(path)
        uncached = len(path) // TOKEN - self.block_tokens * (nodes + 1)  # the root counts as a block, as published
        each = self.model.state_bytes / self.block_tokens + self.model.token_bytes
        over = self.bytes_used + uncached * each - self.capacity_bytes
        if over > 0:
            self._evict(over)
        self._add(path)

    def walk(self) -> Iterator[BlockNode]:
        """Yield all nodes but the root, in preorder."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def _match(self, path: bytes) -> tuple[int, int]:
        """Return how many blocks and tokens of `path` are found; they count as used now."""
        self.clock += 1
        node, at, nodes = self.root, 0, 0
        node.stamp = self.clock
        while (child := node.children.get(path[at : at + self._width])) is not None and len(path) - at >= self._width:
            node = child
            node.stamp = self.clock
            at += self._width
            nodes += 1
        for content in node.children:
            if len(content) < self._width and path.startswith(content, at):
                return nodes + 1, (at + len(content)) // TOKEN
        return nodes, at // TOKEN

    def _add(self, path: bytes) -> None:
        node, at = self.root, 0
        while True:
            node.stamp = self.clock
            if at == len(path):
                return
            child = self._nearest(node, path, at)
            if child is not None:
                node = child
                at += len(child.content)
            elif node is self.root or len(node.content) == self._width:
                node = self._new(path[at : at + self._width], node)
                at += len(node.content)
            else:
                at = self._extend(node, path, at)

    def _nearest(self, node: BlockNode, path: bytes, at: int) -> BlockNode | None:
        """Return the child that matches as a whole block, else the longest shorter one that matches, else None."""
        exact = node.children.get(path[at : at + self._width])
        if exact is not None:
            return exact
        found = [each for content, each in node.children.items() if path.startswith(content, at)]
        return max(found, key=lambda each: len(each.content), default=None)

    def _new(self, content: bytes, parent: BlockNode) -> BlockNode:
        node = parent.children[content] = BlockNode(content, parent, self.clock)
        self.nodes += 1
        self.tokens += len(content) // TOKEN
        return node

    def _extend(self, node: BlockNode, path: bytes, at: int) -> int:
        """Fill a shorter block with more tokens, without a further state. Returns the place in `path` after them."""
        assert node.parent is not None
        end = at + self._width - len(node.content)
        added = path[at:end]
        del node.parent.children[node.content]
        node.content += added
        node.parent.children[node.content] = node
        self.tokens += len(added) // TOKEN
        return at + len(added)

    def _evict(self, over: float) -> None:
        self.clock += 1
        self.evictions += 1
        heap = [node for node in self.walk() if not node.children]
        heapify(heap)
        while over > 0 and heap and (node := heappop(heap)) is not self.root:
            over -= self.model.prefix_bytes(len(node.content) // TOKEN)
            parent = node.parent
            assert parent is not None
            del parent.children[node.content]
            self.nodes -= 1
            self.tokens -= len(node.content) // TOKEN
            if not parent.children:
                heappush(heap, parent)
