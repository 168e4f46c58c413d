"""Hashes the tokens of blocks into fingerprints, many runs of consecutive blocks together.

Blocks that begin and end where ours do, as those of most engines, are hashed in a few vectorised calls, whatever they
hang from. Others are hashed chain by chain, at the ends of our blocks and of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from itertools import chain as joined

import numpy as np

from ranvier_py.core.engine_cache.blocks import Block, KnownBlock, Print
from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import (
    ANCHOR_BLOCKS_DENSE,
    ANCHOR_STEP_BLOCKS,
    Segment,
    TokenHasher,
    TokenState,
    is_anchor,
)

TOKEN_BYTES = 4
make = tuple.__new__  # makes named tuples in half the time of their own `__new__`
TOKENS, READY = KnownBlock.TOKENS, KnownBlock.READY

Chain = Sequence[Block]


def is_next(block: Block) -> bool:
    """Whether this block can be hashed now."""
    return block.known is TOKENS and block.parent is not None and block.parent.known is READY


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
    """Give each block its state, prints and anchor, and drop its tokens. The block above each chain has to be READY."""
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
