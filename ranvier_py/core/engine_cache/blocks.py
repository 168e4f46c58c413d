"""Blocks of one engine under the engine's own names, as a tree: each block below the one that it continues.

A block that is named as a parent before it was stored is in the index too, so that its children find it when it comes.
A root stands above the first blocks of one namespace; roots are never in the index.

Rules: a block below one that is not READY is not READY itself, so resolved blocks form a tree that hangs from roots.
Unresolved blocks may form whatever an engine sends, even a ring; a walk over them has to mark what it visited.
Bounds: the owner's; `weight` is what a block counts against them. Every call is O(1), `drop` O(what it drops).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import accumulate
from itertools import chain as joined
from typing import NamedTuple

import numpy as np

from ranvier_py.core.engine_cache.sources.event_values import HELD_TIERS, EngineHash, Tier
from ranvier_py.core.ids import UNKNOWN, Fingerprint
from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import (
    ANCHOR_BLOCKS_DENSE,
    ANCHOR_STEP_BLOCKS,
    Segment,
    TokenHasher,
    TokenState,
    is_anchor,
)

new_object = object.__new__  # skips `Block.__init__`, whose values would be set again

COPIES_BITS = 16
COPIES_MASK = (1 << COPIES_BITS) - 1


class KnownBlock(Enum):
    """How much is known of a block's prefix."""

    NAME = 0  # its name, but no tokens
    TOKENS = 1  # its own tokens, but not those of all blocks before it
    READY = 2  # the tokens of its whole prefix
    OPAQUE = 3  # more than tokens went into it or into one before it: its prefix has no fingerprint of ours


class Print(NamedTuple):
    """One prefix that ends in a block, at a depth in tokens."""

    fingerprint: Fingerprint
    tokens: int


class Block:
    """One block. `copies` packs a count per tier; `reach` is the farthest tier of it and the blocks before it."""

    __slots__ = (
        "after",
        "anchor",
        "before",
        "child",
        "copies",
        "key",
        "known",
        "parent",
        "prints",
        "queued",
        "reach",
        "state",
        "token_bytes",
        "weight",
    )

    def __init__(self, key: EngineHash) -> None:
        self.key = key
        self.known = KnownBlock.NAME
        self.parent: Block | None = None
        self.child: Block | None = None  # first of the children
        self.before: Block | None = None  # neighbours among the parent's children
        self.after: Block | None = None
        self.copies = 0
        self.reach = Tier.ABSENT
        self.queued = False
        self.weight = 1
        self.token_bytes = b""  # while TOKENS
        self.state: TokenState | None = None  # while READY
        self.anchor = UNKNOWN  # the deepest prefix at an anchor that ends in this block or before it
        self.prints: tuple[Print, ...] = ()

    def attach(self, parent: Block) -> None:
        self.parent = parent
        self.after = parent.child
        if parent.child is not None:
            parent.child.before = self
        parent.child = self

    def detach(self) -> None:
        if self.parent is None:
            return
        if self.before is not None:
            self.before.after = self.after
        else:
            self.parent.child = self.after
        if self.after is not None:
            self.after.before = self.before
        self.parent = self.before = self.after = None

    def children(self) -> Iterator[Block]:
        """Yield the children, none of which may come or go meanwhile."""
        child = self.child
        while child is not None:
            yield child
            child = child.after

    def count(self, tier: Tier) -> int:
        return self.copies >> COPIES_BITS * tier & COPIES_MASK

    def more(self, tier: Tier) -> bool:
        """Count one more copy at this tier. False: the count is at its limit."""
        shift = COPIES_BITS * tier
        if self.copies >> shift & COPIES_MASK == COPIES_MASK:
            return False
        self.copies += 1 << shift
        return True

    @property
    def is_next(self) -> bool:
        """Whether it can be hashed now."""
        return self.known is TOKENS and self.parent is not None and self.parent.known is READY

    @property
    def nearest(self) -> Tier:
        """The nearest tier that has a copy of this block."""
        if not self.copies:
            return Tier.ABSENT
        return next(tier for tier in HELD_TIERS if self.count(tier))


def root(state: TokenState | None) -> Block:
    """Return a block to stand above the first blocks of a namespace; without a state, above the nameless ones."""
    block = Block(0)
    block.known = KnownBlock.OPAQUE if state is None else KnownBlock.READY
    block.state = state
    block.reach = Tier.GPU
    return block


class BlockIndex:
    """Blocks by name. `weight` is the sum over all blocks, `orphaned_weight` over those that are not resolved. `below`
    names all blocks that are held, but not in the GPU, and perhaps others."""

    def __init__(self) -> None:
        self.blocks: dict[EngineHash, Block] = {}
        self.orphaned: dict[EngineHash, Block] = {}  # oldest first
        self.below: OrderedDict[EngineHash, None] = OrderedDict()  # oldest first
        self.weight = 0
        self.orphaned_weight = 0

    def add(self, key: EngineHash) -> Block:
        block = self.blocks[key] = self.orphaned[key] = Block(key)
        self.weight += 1
        self.orphaned_weight += 1
        return block

    def born(self, key: EngineHash, parent: Block, token_bytes: bytes, weight: int, tier: Tier) -> Block:
        """Add a new stored block with all that is known of it, in one call for speed."""
        block = self.blocks[key] = self.orphaned[key] = new_object(Block)
        block.key, block.known, block.parent, block.child, block.before = key, KnownBlock.TOKENS, parent, None, None
        below = block.after = parent.child
        if below is not None:
            below.before = block
        parent.child = block
        block.copies, block.reach, block.queued = 1 << COPIES_BITS * tier, Tier.ABSENT, False
        block.token_bytes, block.weight = token_bytes, weight
        block.state, block.anchor, block.prints = None, UNKNOWN, ()
        if tier is not Tier.GPU:
            self.below[key] = None
        self.weight += weight
        self.orphaned_weight += weight
        return block

    def moved(self, block: Block) -> None:
        """Note that the copies of a block have changed."""
        if block.copies and not block.copies & COPIES_MASK:
            self.below.pop(block.key, None)
            self.below[block.key] = None

    def oldest_below(self) -> Block | None:
        """Return the block that has been held below the GPU alone for longest, and take it out of `below`."""
        while self.below:
            key, _ = self.below.popitem(last=False)
            block = self.blocks[key]
            if block.copies and not block.copies & COPIES_MASK:
                return block
        return None

    def emptied(self, tier: Tier) -> list[Block]:
        """Remove all copies at one tier. Returns the blocks that had any. O(all)."""
        copies = COPIES_MASK << COPIES_BITS * tier
        found = [block for block in self.blocks.values() if block.copies & copies]
        for block in found:
            block.copies &= ~copies
            self.moved(block)
        return found

    def weigh(self, block: Block, weight: int) -> None:
        """Change the weight of an orphaned block."""
        self.weight += weight - block.weight
        self.orphaned_weight += weight - block.weight
        block.weight = weight

    def settled(self, block: Block, known: KnownBlock) -> None:
        """Mark an orphaned block as READY or OPAQUE."""
        block.known = known
        if self.orphaned.pop(block.key, None) is not None:
            self.orphaned_weight -= block.weight

    def resolved(self, chain: Sequence[Block]) -> None:
        """Mark these blocks as READY and as queued for `settle`."""
        orphaned, weight = self.orphaned, 0
        for block in chain:
            block.known = KnownBlock.READY
            block.queued = True
            if orphaned.pop(block.key, None) is not None:
                weight += block.weight
        self.orphaned_weight -= weight

    def release(self, block: Block | None) -> None:
        """Forget a block without copies and children, then those above it that were kept only for it."""
        blocks, orphaned = self.blocks, self.orphaned
        while block is not None and not block.copies and block.child is None and not block.queued:
            key, above = block.key, block.parent
            if blocks.get(key) is not block:
                return  # `block` is a root
            del blocks[key]
            self.weight -= block.weight
            if self.below:
                self.below.pop(key, None)
            if key in orphaned:
                del orphaned[key]
                self.orphaned_weight -= block.weight
            before, after = block.before, block.after  # `detach`, inlined
            if before is not None:
                before.after = after
            elif above is not None:
                above.child = after
            if after is not None:
                after.before = before
            block.parent = block.before = block.after = None
            block = above

    def drop(self, block: Block) -> int:
        """Forget an orphaned block and all below it, held or not. Returns how many were forgotten."""
        above = block.parent
        block.detach()
        below, dropped = [block], 0
        while below:
            each = below.pop()
            if self.blocks.get(each.key) is each:
                self._forget(each)
                dropped += 1
                below.extend(each.children())
        self.release(above)
        return dropped

    def _forget(self, block: Block) -> None:
        del self.blocks[block.key]
        self.below.pop(block.key, None)
        self.weight -= block.weight
        if self.orphaned.pop(block.key, None) is not None:
            self.orphaned_weight -= block.weight


TOKEN_BYTES = 4
make = tuple.__new__  # makes named tuples in half the time of their own `__new__`
TOKENS, READY = KnownBlock.TOKENS, KnownBlock.READY

Chain = Sequence[Block]


def chain_of(first: Block, branches: list[Block]) -> list[Block]:
    """Return `first` and what continues it while tokens are known; further children go to `branches`."""
    chain = []
    below: Block | None = first
    while below is not None and below.known is TOKENS:
        chain.append(below)
        child = below.child
        if child is not None and child.after is not None:
            branches.extend(list(below.children())[1:])
        below = child
    return chain


def hash_chains(hasher: TokenHasher, chains: Sequence[Chain]) -> None:
    """Give each block its state, prints and anchor, and drop its tokens. The block above each chain has to be READY.

    Blocks that begin and end where ours do, as those of most engines, are hashed in a few vectorised calls, whatever
    they hang from. Others are hashed chain by chain, at the ends of our blocks and of theirs.
    """
    whole: list[Chain] = []
    others: list[Chain] = []
    row = hasher.block_tokens * TOKEN_BYTES
    for chain in chains:
        (whole if is_whole(chain, row) else others).append(chain)
    if whole:
        hash_whole(hasher, whole)
    if others:
        hash_others(hasher, others)


def is_whole(chain: Chain, row: int) -> bool:
    """Whether all blocks of the chain begin and end where ours do. `row` is the size of one of ours in bytes."""
    for block in chain:
        if len(block.token_bytes) % row:
            return False
    return not state_above(chain).rest


def state_above(chain: Chain) -> TokenState:
    parent = chain[0].parent
    assert parent is not None
    assert parent.state is not None
    return parent.state


def hash_whole(hasher: TokenHasher, chains: Sequence[Chain]) -> None:
    """Hash chains whose blocks begin and end where ours do."""
    pieces = [[block.token_bytes for block in chain] for chain in chains]
    size = hasher.block_tokens
    row = size * TOKEN_BYTES
    jobs = [(state_above(chain), sum(map(len, own)) // row) for chain, own in zip(chains, pieces, strict=True)]
    data = b"".join(joined.from_iterable(pieces))
    totals, fingerprints = hasher.every_block(jobs, np.frombuffer(data, dtype=np.uint32))
    dense, step = [size * blocks for blocks in ANCHOR_BLOCKS_DENSE], size * ANCHOR_STEP_BLOCKS
    place = 0
    for chain, (state, _) in zip(chains, jobs, strict=True):
        tokens, anchor = state.tokens, chain[0].parent.anchor  # type: ignore[union-attr]  # state_above saw it
        for block in chain:
            prints: tuple[Print, ...] = ()
            for _ in range(len(block.token_bytes) // row):
                fingerprint = fingerprints[place]
                place += 1
                tokens += size
                prints += (make(Print, (fingerprint, tokens)),)
                if not tokens % step or (tokens < step and tokens in dense):
                    anchor = fingerprint
            block.prints, block.anchor, block.token_bytes = prints, anchor, b""
            block.state = make(TokenState, (tokens, totals[place - 1], (), 0))


def hash_others(hasher: TokenHasher, chains: Sequence[Chain]) -> None:
    jobs: list[tuple[TokenState, TokenIds, Sequence[int]]] = []
    size = hasher.block_tokens
    for chain in chains:
        state, ids = state_above(chain), ids_of(chain)
        ours = range(size - len(state.rest), len(ids) + 1, size)
        theirs = accumulate([len(block.token_bytes) // TOKEN_BYTES for block in chain])
        jobs.append((state, ids, sorted(dict.fromkeys((*ours, *theirs)))))
    for chain, (state, _, _), segments in zip(chains, jobs, hasher.extend_many(jobs), strict=True):
        left, tokens = iter(segments), state.tokens
        for block in chain:
            tokens += len(block.token_bytes) // TOKEN_BYTES
            take_segments(block, left, tokens, size)


def take_segments(block: Block, segments: Iterator[Segment], tokens: int, size: int) -> None:
    """Give a block the segments up to its end, at the depth `tokens`."""
    prints = []
    assert block.parent is not None
    block.anchor = block.parent.anchor
    for segment in segments:
        if segment.end[0] == segment.state.tokens:
            prints.append(Print(segment.end[1], segment.end[0]))
            if is_anchor(segment.end[0] // size):
                block.anchor = segment.end[1]
        if segment.state.tokens == tokens:
            block.state = segment.state
            break
    block.prints, block.token_bytes = tuple(prints), b""


def ids_of(chain: Chain) -> TokenIds:
    return np.frombuffer(b"".join([block.token_bytes for block in chain]), dtype=np.uint32)
