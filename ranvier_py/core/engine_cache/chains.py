"""From the tokens of blocks to fingerprints: runs of blocks, one after the other, hashed together.

Blocks of an engine that end where ours do, which is what engines have, are hashed in a few vectorised calls, whatever
they hang from. Others are hashed chain by chain, at our ends and at theirs.
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
make = tuple.__new__  # of named tuples: half the time of their own
TOKENS, READY = KnownBlock.TOKENS, KnownBlock.READY

Chain = Sequence[Block]


def is_next(block: Block) -> bool:
    """Whether this block can be hashed now."""
    return block.known is TOKENS and block.parent is not None and block.parent.known is READY


def chain_of(first: Block, branches: list[Block]) -> list[Block]:
    """`first` and what follows it, one block after the other, while tokens are known. Other ways go to `branches`."""
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
    """Give each block its state, prints and anchor, and take its tokens. What stands above a chain is READY."""
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
    """Whether all its blocks begin and end where ours do. `row`: bytes of one of ours."""
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
    """Chains of blocks that begin and end at ends of ours."""
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
    """Those up to the end of this block, which is at `tokens`."""
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
