"""The key of the Purdue report beside our own fingerprints, wherever tokens are hashed.

Their key of a prompt is the SHA-256 of its first 64 token ids as Python writes their tuple (`prefix_hash`). It answers
one depth, and can't be found from hashes of blocks. So a node (and a reporter, which sees the tokens of an engine's
blocks) notes it while tokens are hashed anyway, together with the fingerprint of ours at that depth, and from there on
both mean one prefix: what a worker says of the key becomes a claim at the fingerprint.

Rules: a key of `length` tokens stands at the deepest anchor that is no deeper: 64 of 64, 64 of 100. A prompt that is
shorter has the key of all its tokens, as in the report, and stands at its last whole block; it never becomes the key of
what continues it. A prompt of less than one block has no fingerprint and is left alone. `told` may be called in any
thread that hashes.
Bounds: heads of prompts that are shorter than a key are remembered, `HEADS_MAX` of them, the oldest forgotten: the key
of their continuation is never known then. Cost: 13 us for each new prompt, nothing for one that continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import Segment, TokenHasher, TokenState
from ranvier_py.core.routing.placement.sticky_least_loaded import anchor_at, prefix_hash

PREFIX_TOKENS = 64
"""The report's «smart default»."""

HEADS_MAX = 65_536
"""Half a kilobyte each, if all are nearly as long as a key."""

LENGTHS_MAX = 8
"""Lengths of keys that one node keeps beside each other: each costs a hash of every new prompt."""


class KeyedPrefix(NamedTuple):
    """One prefix by both names. `root` is the running sum of the empty prefix: it tells the namespace."""

    root: int
    key: int
    fingerprint: Fingerprint
    tokens: int  # depth of the fingerprint


class _Head(NamedTuple):
    """The beginning of a prompt that is too short for its key so far."""

    root: int
    ids: tuple[int, ...]
    chain: tuple[tuple[int, Fingerprint], ...]


def key_of(token_ids: Sequence[int], length: int = 0) -> int:
    """The report's key as a number. The ids must be Python's own integers."""
    return int(prefix_hash(token_ids, length), 16)


class KeyHasher(TokenHasher):
    """Hashes tokens as TokenHasher does, and tells the keys of the prompts whose beginning it sees.

    Args:
        told: gets each key once for each time that a prompt is hashed from its start.
        shorter: whether prompts that end before `length` tokens are told of, too.
    """

    def __init__(
        self,
        key: bytes,
        block_tokens: int = 16,
        *,
        told: Callable[[KeyedPrefix], object],
        lengths: Sequence[int] = (PREFIX_TOKENS,),
        shorter: bool = True,
        short: int = 0,
    ) -> None:
        super().__init__(key, block_tokens, short=short)
        self._told = told
        self._shorter = shorter
        self._heads: dict[TokenState, _Head] = {}
        self.lengths: tuple[int, ...] = ()
        self.keep(lengths)

    def keep(self, lengths: Iterable[int]) -> None:
        """Tell keys of these lengths, in tokens, from now on."""
        self.lengths = tuple(sorted(dict.fromkeys(lengths)))[:LENGTHS_MAX]

    def extend_many(self, jobs: Sequence[tuple[TokenState, TokenIds, Sequence[int]]]) -> list[list[Segment]]:
        found = super().extend_many(jobs)
        for (state, ids, _), segments in zip(jobs, found, strict=True):
            if segments and state.tokens < self._reach:
                self._look(state, ids, segments)
        return found

    def every_block(self, jobs: Sequence[tuple[TokenState, int]], ids: TokenIds) -> tuple[list[int], list[Fingerprint]]:
        totals, fingerprints = super().every_block(jobs, ids)
        size, place = self.block_tokens, 0
        for state, blocks in jobs:
            if state.tokens < self._reach and blocks:
                seen = min(blocks, -(-(self._reach - state.tokens) // size))
                depths = range(state.tokens + size, state.tokens + seen * size + 1, size)
                ends = zip(depths, totals[place : place + seen], fingerprints[place : place + seen], strict=True)
                found = [Segment((), (end, name), TokenState(end, total, ())) for end, total, name in ends]
                self._look(state, ids[place * size : (place + blocks) * size], found)
            place += blocks
        return totals, fingerprints

    @property
    def _reach(self) -> int:
        """How deep prompts are looked at, in tokens: the longest key, as far as its fingerprint may come later."""
        return self.lengths[-1] + self.short if self.lengths else 0

    def _look(self, state: TokenState, ids: TokenIds, segments: Sequence[Segment]) -> None:
        head = self._heads.get(state) if state.tokens else _Head(state.total, (), ())
        if head is None:
            return
        longest, before, reach = self.lengths[-1], dict(head.chain), segments[-1].state.tokens
        known = head.ids + tuple(ids[: max(0, longest - state.tokens)].tolist())
        chain = dict(before)
        for segment in segments:
            chain.update((*segment.anchors, segment.end))
        for length in self.lengths:
            depth = anchor_at(length, self.block_tokens)
            if length <= reach and not (length <= state.tokens and depth in before):
                self._tell(head.root, key_of(known, length), chain, depth)
        if self._shorter and reach < longest:
            self._tell(head.root, key_of(known[:reach]), chain, segments[-1].end[0])
        for segment in segments:
            if segment.state.tokens < self._reach:
                kept = {depth: name for depth, name in chain.items() if 0 < depth <= segment.state.tokens}
                self._remember(segment.state, _Head(head.root, known[: segment.state.tokens], tuple(kept.items())))

    def _tell(self, root: int, key: int, chain: dict[int, Fingerprint], depth: int) -> None:
        fingerprint = chain.get(depth)
        if depth and fingerprint:
            self._told(KeyedPrefix(root, key, fingerprint, depth))

    def _remember(self, state: TokenState, head: _Head) -> None:
        heads = self._heads
        heads[state] = head
        if len(heads) > HEADS_MAX:
            with suppress(RuntimeError, StopIteration):  # another thread was quicker
                heads.pop(next(iter(heads)), None)
