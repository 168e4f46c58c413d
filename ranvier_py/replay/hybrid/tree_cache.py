"""A tree of checkpoints as the prefix cache of a modelled engine: SGLang+ and Marconi under concurrent requests. Pure.

Rule: a symbol is a block of the trace. A request is looked up when it is admitted, and what it computed is inserted
when it ends. Until then it has memory reserved for what the tree lacks and for two states, its own and that of a
junction, so its insertion always fits. It reads the keys and values of the path that it continues, which are pinned.
Invariant: the tree's contents and the reserved memory never exceed the capacity (test_tree_cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.replay.engine.block_cache import (
    Job,
    KeyRemoved,
    KeysCleared,
    KeysStored,
    Lease,
    ReportingCache,
    StateRemoved,
    StateStored,
)
from ranvier_py.replay.hybrid.alpha_search import TokenRequest, Tuner
from ranvier_py.replay.hybrid.state_tree import StateNode, StateTree

KEY_BYTES = 8
PATHS_MAX = 4096
"""Tree paths of jobs that are remembered, since those of requests in flight are needed again and again."""


@dataclass(slots=True, eq=False)
class TreeLease(Lease):
    """`node`: number of the node from whose state the request continued, 0: none. `epoch`: the cache's at that time."""

    node: int = 0
    reserved_bytes: int = 0
    epoch: int = 0


class TreeCache(ReportingCache):
    """A prefix cache over a tree, with the calls of `BlockCache`."""

    def __init__(self, tree: StateTree, tuner: Tuner | None = None, *, events_max: int = 0) -> None:
        assert tree.width == KEY_BYTES, "symbols are the keys of blocks"
        super().__init__(events_max)
        self.tree = tree
        self.block_size = tree.unit_tokens
        self.evicted_blocks = 0
        self._block_bytes = tree.model.token_bytes * self.block_size
        self.capacity_blocks = tree.capacity_bytes // self._block_bytes
        self._tuner = tuner or Tuner()
        self._reserved = 0
        self._running = 0
        self._epoch = 0  # incremented by each `clear`
        self._pinned: dict[int, StateNode] = {}  # pinned nodes by number
        self._paths: BoundedDict[Job, bytes] = BoundedDict(PATHS_MAX)  # shared with copies
        self._follow(tree)

    def copy(self) -> TreeCache:
        """Return another cache with the same contents that records no events and never tunes its alpha."""
        found = TreeCache(self.tree.copy(pins=True))
        found.evicted_blocks, found._reserved, found._running = self.evicted_blocks, self._reserved, self._running
        found._paths, found._epoch = self._paths, self._epoch
        if self._pinned:
            found._pinned = {node.number: node for node in found.tree.walk() if node.pinned}
        return found

    @property
    def used_blocks(self) -> int:
        """The memory that running requests read or have reserved, in blocks."""
        return min(self.capacity_blocks, -(-(self._reserved + self._held_bytes()) // self._block_bytes))

    @property
    def found_blocks(self) -> int:
        return self.tree.symbols

    def fits(self, job: Job) -> bool:
        return self._need(job, 0) <= self.tree.capacity_bytes

    def hit_blocks(self, job: Job) -> int:
        node = self._usable(job)
        return self._deepest(job).end if node is None else node.end

    def has_room(self, job: Job) -> bool:
        return self._usable(job) is not None

    def outlives(self, job: Job, blocks: int, taken: int) -> bool:  # noqa: ARG002
        """True: growing leases take only memory that was reserved, so nothing is evicted for them."""
        return True

    def lease(self, job: Job) -> TreeLease | None:
        node = self._usable(job)
        if node is None:
            return None
        tree = self.tree
        tree.match(self._path(job), self._limit(job))
        need = self._need(job, node.end)
        if node is not tree.root:
            tree.pin(node)
            self._pinned[node.number] = node
        tree.make_room(need + self._reserved)
        self._note_removed()
        self._note_states(())
        self._reserved += need
        self._running += 1
        return TreeLease(
            job=job,
            blocks=[0] * node.end,
            promised=0,
            hits=node.end,
            stored=node.end,
            node=node.number,
            reserved_bytes=need,
            epoch=self._epoch,
        )

    def grow(self, lease: Lease, tokens: int) -> None:
        """Count what the request has computed. None of it can be found before the request ends."""
        lease.blocks.extend([0] * (-(-tokens // self.block_size) - len(lease.blocks)))
        lease.stored = max(lease.stored, min(tokens // self.block_size, len(lease.job.keys)))

    def release(self, lease: Lease) -> None:
        assert isinstance(lease, TreeLease)
        self._reserved -= lease.reserved_bytes
        self._running -= 1
        lease.blocks = []
        if lease.epoch != self._epoch:
            return  # the cache was cleared: the path that it continued is gone
        if lease.stored:
            self._insert(lease)
        if lease.node:
            node = self._pinned[lease.node]
            self.tree.pin(node, -1)
            if not node.pinned:
                del self._pinned[lease.node]

    def _insert(self, lease: TreeLease) -> None:
        path = self._path(lease.job)
        prompt = path[: min(lease.stored, self._limit(lease.job)) * KEY_BYTES]
        request = TokenRequest(prompt, path[: lease.stored * KEY_BYTES])
        self._tuner.before(self.tree, request)
        before = self.tree.insert(request.whole, self._reserved)
        self._tuner.after(self.tree, request)
        self._note_removed()
        self._note_stored(lease.job.keys[: lease.stored], before)
        self._note_states(lease.job.keys[: lease.stored])

    def clear(self) -> None:
        """Forget all contents. What running requests compute will not be inserted either: the path to it is gone."""
        self._epoch += 1
        self.tree = self.tree.empty(self.tree.clock)
        self._follow(self.tree)
        self._pinned.clear()
        self._record(KeysCleared())

    def check(self) -> None:
        """Assert the invariants. O(nodes): for tests."""
        nodes = list(self.tree.walk())
        held = [node for node in nodes if node.held]
        assert self.tree.bytes_used + self._reserved <= self.tree.capacity_bytes, "more is held than there is"
        assert self.tree.nodes == len(nodes), "nodes are neither made nor lost"
        assert self.tree.held_nodes == len(held), "somebody reads a path that is not held"
        assert self.tree.held_symbols * KEY_BYTES == sum(len(node.edge) for node in held)
        assert {node.number for node in nodes if node.pinned} == set(self._pinned)

    # ---- room

    def _path(self, job: Job) -> bytes:
        """Return the path of a job in the tree. Those used last are remembered."""
        found = self._paths.get(job) or np.array(job.keys, dtype="<u8").tobytes()
        self._paths[job] = found
        return found

    def _limit(self, job: Job) -> int:
        """Return how many blocks of the prompt could be reused: its last token is always computed."""
        return min(len(job.keys), (job.prompt_tokens - 1) // self.block_size)

    def _deepest(self, job: Job) -> StateNode:
        return self.tree.find(self._path(job), self._limit(job)).deepest

    def _usable(self, job: Job) -> StateNode | None:
        """Return the node from whose state the request would continue; None if it has to wait. One further up where the
        path's checkpoints leave it no room, and no other request would make room by ending."""
        node = self._deepest(job)
        while self._reserved + self._held_bytes(node) + self._need(job, node.end) > self.tree.capacity_bytes:
            if self._running or node.parent is None:
                return None
            node = node.parent
        return node

    def _need(self, job: Job, hits: int) -> int:
        blocks = -(-job.tokens_computed // self.block_size) - hits
        return blocks * self._block_bytes + 2 * self.tree.model.state_bytes

    def _held_bytes(self, also: StateNode | None = None) -> int:
        """Return the bytes that could not be evicted if the path to `also` were read, too: keys and values, and the
        checkpoints that stay. `utility` can drop those with one child: of n paths fewer than 2 n remain."""
        tree = self.tree
        nodes, symbols, pins = tree.held_nodes, tree.held_symbols, tree.pins
        if also is not None and also.parent is not None:
            pins += 1
            while also.parent is not None and not also.held:
                nodes += 1
                symbols += len(also.edge) // KEY_BYTES
                also = also.parent
        states = nodes if tree.rule == "lru" else min(nodes, 2 * pins)
        return states * tree.model.state_bytes + symbols * self._block_bytes

    # ---- events

    def _follow(self, tree: StateTree) -> None:
        tree.removed = []
        tree.states = [] if self._events.maxlen else None

    def _note_removed(self) -> None:
        removed = self.tree.removed
        assert removed is not None
        for edge in removed:
            self.evicted_blocks += len(edge) // KEY_BYTES
            if self._events.maxlen:
                for key in reversed(np.frombuffer(edge, dtype="<u8").tolist()):
                    self._record(KeyRemoved(key))
        removed.clear()

    def _note_stored(self, keys: tuple[int, ...], before: int) -> None:
        if self._events.maxlen and before < len(keys):
            ids = np.zeros(0, dtype=np.uint32)
            self._record(KeysStored(keys[before:], keys[before - 1] if before else 0, ids))

    def _note_states(self, path: tuple[int, ...]) -> None:
        """Record changes of checkpoints. `path`: the inserted keys; new checkpoints are on it, in ascending order."""
        states = self.tree.states
        if not states:
            return
        place = 0
        for symbol, kept in states:
            key = int.from_bytes(symbol, "little")
            if kept:
                first, place = place, path.index(key, place) + 1
                parent = path[first - 1] if first else 0
                self._record(StateStored(path[first:place], parent, np.zeros(0, dtype=np.uint32)))
            else:
                self._record(StateRemoved(key))
        states.clear()
