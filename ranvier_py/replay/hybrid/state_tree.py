"""A radix tree over a hybrid model's prefixes, as SGLang+ and Marconi keep it (Pan et al., sections 4.1 and 4.2). Pure.

Rule: every node but the root holds the keys and values of its edge, and one checkpoint, for the edge's end. A prefix
can be reused up to the end of the deepest node that it contains completely. Inserting a path that parts inside an edge
splits the edge, and the state at the junction is kept: a sequence adds at most two checkpoints. What a running request
reads is not deleted, but checkpoints on its path may be dropped. A path is inserted even if it does not fit.
Bound: `capacity_bytes`, exceeded at most by one sequence and by what running requests read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from ranvier_py.replay.hybrid.eviction_order import EvictionOrder
from ranvier_py.replay.hybrid.hybrid_model import HybridModel

EvictionRule = Literal["lru", "utility"]
"""`lru` evicts the least recently visited leaf (SGLang+), `utility` by recency and operations saved (Marconi)."""

DTYPES: Mapping[int, np.dtype[Any]] = MappingProxyType({4: np.dtype("<u4"), 8: np.dtype("<u8")})


@dataclass(frozen=True, slots=True)
class Defects:
    """Where the published artifact differs from its paper. Each difference can be turned on alone; by default none is.

    `mlp`: the parent's MLP operations are counted as attention. `memory`: savings are relative to the parent, but bytes
    are those of the whole path. `freed`: a deleted leaf frees as many bytes as the last node in preorder has. `match`:
    after an edge that matches only in part, the walk continues among that node's children.
    """

    mlp: bool = False
    memory: bool = False
    freed: bool = False
    match: bool = False


REPAIRED = Defects()
COMPAT = Defects(mlp=True, memory=True, freed=True, match=True)


@dataclass(slots=True, eq=False)
class StateNode:
    """A node with its edge. `end`: symbols from the root to the edge's end. `children`: in order of insertion.

    `pinned`: how many running requests continued from its state. `held`: how many read its keys and values.
    """

    edge: bytes
    end: int
    parent: StateNode | None
    stamp: int
    number: int = 0
    held: int = 0
    pinned: int = 0
    children: dict[bytes, StateNode] = field(default_factory=dict)
    efficiency: float = 0.0  # while it may be evicted

    def __lt__(self, other: StateNode) -> bool:
        """Compare by stamp alone, for the heap of leaves; equal stamps are in the heap's own order."""
        return self.stamp < other.stamp

    @property
    def place(self) -> tuple[int, ...]:
        """The child indices from the root to this node. They order nodes in preorder."""
        found: list[int] = []
        node: StateNode = self
        while (parent := node.parent) is not None:
            found.append(next(index for index, child in enumerate(parent.children.values()) if child is node))
            node = parent
        return tuple(reversed(found))


class StateChange(NamedTuple):
    """A checkpoint was added (`kept`) or dropped. `symbol`: the last one of the path to it."""

    symbol: bytes
    kept: bool


class Reach(NamedTuple):
    """How many symbols of a path can be reused (up to the end of `deepest`), and how many are stored (`raw`).
    `visited`: the nodes from the root to the last one touched."""

    reusable: int
    raw: int
    deepest: StateNode
    visited: list[StateNode]


def common_symbols(edge: bytes, path: bytes, at: int, width: int = 4) -> int:
    """Return how many leading symbols `edge` shares with `path` from byte `at` on."""
    dtype = DTYPES[width]
    count = min(len(edge), len(path) - at) // width
    differs = np.frombuffer(edge, dtype, count) != np.frombuffer(path, dtype, count, at)
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


class StateTree:
    """The tree. `alpha` weighs operations saved against recency; rule `lru` ignores it. Paths are bytes; each `width`
    bytes are a *symbol*: a token, or a whole block of `unit_tokens` tokens. Time is a counter: a lookup takes one step,
    an insertion two, and one more if it evicts."""

    def __init__(
        self,
        model: HybridModel,
        capacity_bytes: int,
        rule: EvictionRule,
        *,
        alpha: float = 0.0,
        defects: Defects = REPAIRED,
        width: int = 4,
        unit_tokens: int = 1,
    ) -> None:
        self.model, self.capacity_bytes, self.rule = model, capacity_bytes, rule
        self.alpha, self.defects, self.width = alpha, defects, width
        self.unit_tokens = unit_tokens
        self.clock = 0
        self.root = StateNode(b"", 0, None, 0)
        self.nodes = 0
        self.symbols = 0
        self.evictions = 0  # calls that evicted
        self.removed: list[bytes] | None = None  # collects the edges of deleted nodes; None: not wanted
        self.states: list[StateChange] | None = None  # collects changes of checkpoints; None: not wanted
        self.pins = 0
        self.held_nodes = 0
        self.held_symbols = 0
        self._numbers = 0
        self._symbol_bytes = model.token_bytes * unit_tokens
        self._order: EvictionOrder[StateNode] = EvictionOrder()

    def empty(self, clock: int = 0) -> StateTree:
        """Return another tree of the same kind without contents."""
        found = StateTree(
            self.model,
            self.capacity_bytes,
            self.rule,
            alpha=self.alpha,
            defects=self.defects,
            width=self.width,
            unit_tokens=self.unit_tokens,
        )
        found.clock = clock
        return found

    def copy(self, *, pins: bool = False) -> StateTree:
        """Return another tree with the same contents that collects no changes. Nodes keep their numbers and, with
        `pins`, their pins and holds."""
        found = self.empty(self.clock)
        found.nodes, found.symbols, found.evictions = self.nodes, self.symbols, self.evictions
        found._numbers = self._numbers
        if pins:
            found.pins, found.held_nodes, found.held_symbols = self.pins, self.held_nodes, self.held_symbols
        found.root.stamp = self.root.stamp
        stack = [(self.root, found.root)]
        while stack:
            node, twin = stack.pop()
            for key, child in node.children.items():
                below = StateNode(child.edge, child.end, twin, child.stamp, child.number)
                if pins:
                    below.held, below.pinned = child.held, child.pinned
                twin.children[key] = below
                stack.append((child, below))
            found._weigh(twin)
        return found

    @property
    def bytes_used(self) -> int:
        return self.nodes * self.model.state_bytes + self.symbols * self._symbol_bytes

    # ---- reading

    def find(self, path: bytes, symbols: int | None = None) -> Reach:
        """Find how far the first `symbols` symbols of `path` are stored. Changes nothing."""
        width, at = self.width, 0
        if symbols is not None and symbols * width < len(path):
            path = path[: symbols * width]
        node = self.root
        visited = [node]
        while (child := node.children.get(path[at : at + width])) is not None:
            visited.append(child)
            if not path.startswith(child.edge, at):
                common = common_symbols(child.edge, path, at, width)
                if self.defects.match:
                    return self._go_on(path, at // width + common, node, visited)
                return Reach(node.end, at // width + common, node, visited)
            at += len(child.edge)
            node = child
        return Reach(node.end, node.end, node, visited)

    def _go_on(self, path: bytes, raw: int, deepest: StateNode, visited: list[StateNode]) -> Reach:
        """Walk on below an edge that matched in part, as the published code does (`Defects.match`)."""
        width, reusable, node = self.width, deepest.end, visited[-1]
        while (child := node.children.get(path[raw * width : (raw + 1) * width])) is not None:
            visited.append(child)
            common = common_symbols(child.edge, path, raw * width, width)
            raw += common
            if common * width == len(child.edge):
                reusable += common
                deepest = child
            node = child
        return Reach(reusable, raw, deepest, visited)

    def walk(self) -> Iterator[StateNode]:
        """Yield all nodes but the root, in preorder."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    # ---- lookups and insertions

    def match(self, path: bytes, symbols: int | None = None) -> Reach:
        """Find a path as `find` does, and count the found nodes as used now: all for `lru`, else the deepest."""
        self.clock += 1
        found = self.find(path, symbols)
        if self.rule == "lru":
            for node in found.visited:
                node.stamp = self.clock
        elif found.deepest is not self.root:
            self._stamp(found.deepest)
        return found

    def insert(self, path: bytes, others_bytes: int = 0) -> int:
        """Make room, then insert a whole sequence; `others_bytes` of the capacity are not available. Returns how many
        of its symbols the tree still had after making room."""
        self.clock += 1
        found = self.match(path)
        states = 2 if found.raw > found.reusable else 1
        need = states * self.model.state_bytes + (len(path) // self.width - found.raw) * self._symbol_bytes
        self.make_room(need + others_bytes)
        return self._add(path)

    def make_room(self, need_bytes: int) -> None:
        """Evict until so many bytes are free, or nothing can be evicted."""
        over = self.bytes_used + need_bytes - self.capacity_bytes
        if over > 0:
            self.evict(over)

    def pin(self, node: StateNode, change: int = 1) -> None:
        """Note that one running request more (1) or less (-1) reads the path to this node, which is not the root."""
        node.pinned += change
        self.pins += change
        self._weigh(node)
        at = node
        while at.parent is not None:
            if at.held == (change < 0):  # the first reader comes, or the last one leaves
                self.held_nodes += change
                self.held_symbols += change * (len(at.edge) // self.width)
            at.held += change
            at = at.parent

    def _add(self, path: bytes) -> int:
        node, at, width = self.root, 0, self.width
        before = len(path) // width
        while True:
            if self.rule == "lru":
                node.stamp = self.clock
            if at == len(path):
                return before
            child = node.children.get(path[at : at + width])
            if child is None:
                before = at // width
                child = self._new(path[at:], node)
                self.symbols += len(child.edge) // width
                self._weigh(node)
            elif not path.startswith(child.edge, at):
                child = self._split(child, common_symbols(child.edge, path, at, width) * width)
            node = child
            at += len(child.edge)

    def _new(self, edge: bytes, parent: StateNode) -> StateNode:
        self._numbers += 1
        self.nodes += 1
        node = StateNode(edge, parent.end + len(edge) // self.width, parent, self.clock, self._numbers)
        parent.children[edge[: self.width]] = node  # in the place of the node that had this key
        self._weigh(node)
        self._note_state(node, kept=True)
        return node

    def _split(self, node: StateNode, at: int) -> StateNode:
        """Split a node after `at` bytes of its edge. Returns the new node of the upper part."""
        assert node.parent is not None
        upper = self._new(node.edge[:at], node.parent)
        upper.held = node.held
        self.held_nodes += node.held > 0
        upper.children[node.edge[at : at + self.width]] = node
        self._order.discard(node)
        node.edge, node.parent = node.edge[at:], upper
        self._weigh(node)
        self._weigh(upper)
        return upper

    # ---- eviction

    def evict(self, over_bytes: int) -> None:
        """Free so many bytes, as the rule counts them, or as many as can be freed."""
        self.clock += 1
        self.evictions += 1
        if self.rule == "lru":
            self._evict_leaves(over_bytes)
        else:
            self._evict_least_useful(over_bytes)

    def _evict_leaves(self, over: int) -> None:
        heap = [node for node in self.walk() if not node.children and not node.pinned]
        heapify(heap)
        while over > 0 and heap and (node := heappop(heap)) is not self.root:
            over -= self._bytes_of(node)
            parent = self._delete(node)
            if not parent.children and not parent.pinned:
                heappush(heap, parent)

    def _evict_least_useful(self, over: int) -> None:
        while over > 0 and (victim := self._order.least(self.clock, self.alpha)) is not None:
            if victim.children:
                self._absorb(victim)
                over -= self.model.state_bytes
            else:
                over -= self._bytes_of(self._last() if self.defects.freed else victim)
                self._delete(victim)

    def _bytes_of(self, node: StateNode) -> int:
        return self.model.state_bytes + len(node.edge) // self.width * self._symbol_bytes

    def _last(self) -> StateNode:
        """Return the last node in preorder, which is a leaf and hence a candidate."""
        node = self.root
        while node.children:
            node = node.children[next(reversed(node.children))]
        return node

    def _delete(self, node: StateNode) -> StateNode:
        """Delete a leaf with its keys and values. Returns its parent."""
        parent = node.parent
        assert parent is not None
        if self.removed is not None:
            self.removed.append(node.edge)
        self._note_state(node, kept=False)
        del parent.children[node.edge[: self.width]]
        self._order.discard(node)
        self.nodes -= 1
        self.symbols -= len(node.edge) // self.width
        self._weigh(parent)
        return parent

    def _absorb(self, node: StateNode) -> None:
        """Drop the checkpoint of a node with one child: merge both into one node that ends where the child ends."""
        ((_, child),) = node.children.items()
        parent = node.parent
        assert parent is not None
        self._note_state(node, kept=False)
        self._order.discard(node)
        self._order.discard(child)
        child.edge, child.parent, child.stamp = node.edge + child.edge, parent, max(node.stamp, child.stamp)
        parent.children[child.edge[: self.width]] = child  # in the node's place
        self.nodes -= 1
        self.held_nodes -= node.held > 0
        self._weigh(child)

    def _note_state(self, node: StateNode, *, kept: bool) -> None:
        if self.states is not None:
            self.states.append(StateChange(node.edge[-self.width :], kept))

    def _stamp(self, node: StateNode) -> None:
        self._order.discard(node)
        node.stamp = self.clock
        self._weigh(node)

    def _weigh(self, node: StateNode) -> None:
        """Add the node to the order of eviction or remove it. If its stamp or edge changed, it was removed before."""
        if self.rule == "lru" or node.parent is None:
            return
        is_candidate = len(node.children) <= 1 and not node.pinned
        if not is_candidate:
            self._order.discard(node)
        elif node not in self._order:
            node.efficiency = self._efficiency(node)
            self._order.add(node)

    def _efficiency(self, node: StateNode) -> float:
        """Return the operations that its checkpoint saves beyond its parent's, per byte that the node holds."""
        model, unit = self.model, self.unit_tokens
        own, end = len(node.edge) // self.width * unit, node.end * unit
        before = end - own
        saved = model.recurrent_flops(own) + model.attention_flops(end) - model.attention_flops(before)
        saved += model.mlp_flops(end) - (self._published_mlp(before) if self.defects.mlp else model.mlp_flops(before))
        return saved / model.prefix_bytes(end if self.defects.memory else own)

    def _published_mlp(self, tokens: int) -> int:
        """Return the operations of the MLP layers if each is counted as an attention layer (`Defects.mlp`)."""
        return self.model.attention_flops(tokens) // self.model.attention_layers * self.model.mlp_layers
