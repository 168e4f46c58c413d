"""vLLM+, with which Marconi's paper compares: a checkpoint at every block, the oldest leaf is evicted first. Pure.

The cache is a tree of blocks of `block_tokens` tokens. The last block of a sequence may be shorter: it has a state,
too, and grows if a longer sequence continues it. A shorter block is a hit if all of it matches, which favours vLLM+.
The clock and the bound are those of `StateTree`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ranvier_py.replay.hybrid.alpha_search import TokenRequest
from ranvier_py.replay.hybrid.hybrid_model import HybridModel

TOKEN = 4  # bytes


@dataclass(slots=True, eq=False)
class BlockNode:
    """One block. `children`: by their content, in order of insertion."""

    content: bytes
    parent: BlockNode | None
    children: dict[bytes, BlockNode] = field(default_factory=dict)


class BlockStates:
    """vLLM+ as a `TraceCache`."""

    def __init__(self, model: HybridModel, capacity_bytes: int, block_tokens: int = 32) -> None:
        self.model, self.capacity_bytes, self.block_tokens = model, capacity_bytes, block_tokens
        self.clock = 0
        self.root = BlockNode(b"", None)
        self.tokens = 0
        self._width = block_tokens * TOKEN
        self._order: OrderedDict[BlockNode, None] = OrderedDict()  # the last used at the end, children before parents

    @property
    def nodes(self) -> int:
        return len(self._order)

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

    def _match(self, path: bytes) -> tuple[int, int]:
        """Return how many blocks and tokens of `path` are found; they count as used now."""
        self.clock += 1
        node, at = self.root, 0
        visited = []
        while (child := node.children.get(path[at : at + self._width])) is not None and len(path) - at >= self._width:
            node = child
            visited.append(node)
            at += self._width
        self._use(visited)
        for content in node.children:
            if len(content) < self._width and path.startswith(content, at):
                return len(visited) + 1, (at + len(content)) // TOKEN
        return len(visited), at // TOKEN

    def _use(self, path: Sequence[BlockNode]) -> None:
        """Count these nodes, from the top down, as used now."""
        for node in reversed(path):
            self._order[node] = None
            self._order.move_to_end(node)

    def _add(self, path: bytes) -> None:
        node, at = self.root, 0
        visited: list[BlockNode] = []
        while at < len(path):
            child = self._nearest(node, path, at)
            if child is not None:
                node = child
                at += len(child.content)
            elif node is self.root or len(node.content) == self._width:
                node = self._new(path[at : at + self._width], node)
                at += len(node.content)
            else:
                at = self._extend(node, path, at)
                continue
            visited.append(node)
        self._use(visited)

    def _nearest(self, node: BlockNode, path: bytes, at: int) -> BlockNode | None:
        """Return the child that matches as a whole block, else the longest shorter one that matches, else None."""
        exact = node.children.get(path[at : at + self._width])
        if exact is not None:
            return exact
        found = [each for content, each in node.children.items() if path.startswith(content, at)]
        return max(found, key=lambda each: len(each.content), default=None)

    def _new(self, content: bytes, parent: BlockNode) -> BlockNode:
        node = parent.children[content] = BlockNode(content, parent)
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
        while over > 0 and self._order:
            node, _ = self._order.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.content]
            self.tokens -= len(node.content) // TOKEN
            over -= self.model.prefix_bytes(len(node.content) // TOKEN)
