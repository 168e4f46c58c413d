"""Computes what a cache without a size limit reuses of a trace, by the positions where it keeps checkpoints. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from types import MappingProxyType

from ranvier_py.core.routing.checkpoints.cache_profile import (
    EXTRA_BUFFER,
    MARCONI,
    NO_BUFFER,
    CheckpointProfile,
    aligned,
)
from ranvier_py.replay.hybrid.alpha_search import TokenRequest
from ranvier_py.replay.hybrid.state_tree import common_symbols

TOKEN_BYTES = 4
WORTH_TOKENS = 256
"""Least tokens of a prefix that count as worth looking up."""

CHECKPOINT_PROFILES = MappingProxyType(
    {
        "vllm_align_528": aligned(528),
        "vllm_align_528_without_junctions": aligned(528, junction=False),
        "vllm_align_1056": aligned(1056),
        "vllm_all_528": CheckpointProfile(528, every=True),
        "sglang_no_buffer": NO_BUFFER,
        "sglang_extra_buffer": EXTRA_BUFFER,
        "marconi": MARCONI,
    }
)
"""The profiles whose reuse on our traces is known to the token."""


@dataclass(slots=True, eq=False)
class MarkedNode:
    """A node with its edge, which begins at token `start`. `marks`: ascending positions of checkpoints on the edge."""

    edge: bytes
    start: int
    children: dict[bytes, MarkedNode] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.edge) // TOKEN_BYTES


class EndlessCheckpoints:
    """A `TraceCache` without a size limit that keeps checkpoints where a profile says.

    `written`: checkpoints that were kept. `credited`: tokens in whole blocks of 16 that were computed before, which a
    router that knows only attention expects to be reused. `worth`: requests with at least 256 tokens that were computed
    before; `in_vain`: those of them that reuse nothing.
    """

    def __init__(self, profile: CheckpointProfile) -> None:
        self.profile = profile
        self.root = MarkedNode(b"", 0)
        self.written = 0
        self.credited = 0
        self.worth = 0
        self.in_vain = 0
        self._asked = (0, 0)

    def lookup(self, request: TokenRequest) -> int:
        prompt = len(request.prompt) // TOKEN_BYTES
        common, reused = self._find(request.prompt, prompt - 1)
        self._asked = (common, reused)
        self.credited += common // 16 * 16
        self.worth += common >= WORTH_TOKENS
        self.in_vain += common >= WORTH_TOKENS and not reused
        return reused

    def insert(self, request: TokenRequest) -> None:
        prompt, total = len(request.prompt) // TOKEN_BYTES, len(request.whole) // TOKEN_BYTES
        path = self._add(request.whole)
        for position in dict.fromkeys(self.profile.kept(prompt, total, *self._asked)):
            node = next(node for node in path if position <= node.end)
            if position not in node.marks:
                insort(node.marks, position)
                self.written += 1

    def _find(self, path: bytes, most: int) -> tuple[int, int]:
        """Return (K, R) as in `cache_profile`: tokens of `path` computed before, and reused; both at most `most`."""
        node, common, reused = self.root, 0, 0
        while (child := node.children.get(path[common * TOKEN_BYTES : (common + 1) * TOKEN_BYTES])) is not None:
            node = child
            common += self._common(child, path)
            known = bisect_right(child.marks, min(common, most))
            if known:
                reused = child.marks[known - 1]
            if common < child.end:
                break
        return min(common, most), reused

    def _add(self, path: bytes) -> list[MarkedNode]:
        """Insert a path and return its nodes; it ends at the end of the last node."""
        node, found = self.root, []
        while node.end * TOKEN_BYTES < len(path):
            at = node.end * TOKEN_BYTES
            child = node.children.get(path[at : at + TOKEN_BYTES])
            if child is None:
                child = node.children[path[at : at + TOKEN_BYTES]] = MarkedNode(path[at:], node.end)
            elif (common := self._common(child, path)) < child.end - child.start:
                child = self._split(node, child, common)
            found.append(child)
            node = child
        return found

    def _split(self, parent: MarkedNode, node: MarkedNode, tokens: int) -> MarkedNode:
        """Split a node after so many tokens of its edge. Returns the upper part."""
        at = tokens * TOKEN_BYTES
        upper = MarkedNode(node.edge[:at], node.start)
        parent.children[node.edge[:TOKEN_BYTES]] = upper
        known = bisect_right(node.marks, upper.end)
        upper.marks, node.marks = node.marks[:known], node.marks[known:]
        upper.children[node.edge[at : at + TOKEN_BYTES]] = node
        node.edge, node.start = node.edge[at:], upper.end
        return upper

    def _common(self, node: MarkedNode, path: bytes) -> int:
        """Return how many leading tokens of the node's edge `path` has in the same place."""
        at = node.start * TOKEN_BYTES
        return len(node.edge) // TOKEN_BYTES if path.startswith(node.edge, at) else common_symbols(node.edge, path, at)
