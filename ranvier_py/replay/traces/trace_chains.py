"""Blocks and chains of prompts: what an engine would cache, and what a router would know.

Prefix keys come from the node's own hasher, under a key that is no secret: a trace is one world. Where it has no
messages, their ends are inferred: after a block that several different blocks follow, and at the last whole block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import GOLDEN, MASK, Segment, mix
from ranvier_py.replay.engine.block_cache import chain_keys
from ranvier_py.replay.traces.trace import Depth

KEY = b"fingerprints of a replay"
OWN = 1 << 63  # set in what is mixed into the names of blocks that nobody else can have
OWN_BLOCKS_MAX = 1 << 24  # blocks of one request, at most


def linked(above: int, number: int) -> int:
    """The name of what follows `above` and is called `number`: unsigned 64-bit, not 0."""
    return mix((above + (number + 1) * GOLDEN) & MASK) or 1


def own_names(request: int, count: int) -> list[int]:
    """Names of `count` blocks that no other request has."""
    return [mix(OWN | request * OWN_BLOCKS_MAX + index) for index in range(count)]


def continued(keys: tuple[int, ...], ids: TokenIds, block_tokens: int, salt: bytes = b"") -> tuple[int, ...]:
    """Names of whole blocks after those of `keys`; `ids` begins where the last of them ends."""
    return keys + chain_keys(ids, block_tokens, keys[-1].to_bytes(8, "little") if keys else salt)


def joined(rest: Sequence[int], ids: TokenIds) -> TokenIds:
    """Tokens after the last whole block, and those that follow."""
    return np.concatenate((np.array(rest, dtype=np.uint32), ids)) if rest else ids


def chain_of(
    segments: Iterable[Segment], chain: Sequence[Depth] = (), ends: Sequence[int] = ()
) -> tuple[tuple[Depth, ...], tuple[int, ...]]:
    """(chain, ends) of the messages that `segments` stand for, after those that are given.

    A message that fills no further block has no prefix key of its own: its end is that of the one before.
    """
    found, at = list(chain), list(ends)
    for segment in segments:
        for tokens, fingerprint in (*segment.anchors, segment.end):
            if tokens > (found[-1].tokens if found else 0):
                found.append(Depth(tokens, fingerprint))
        if found and at[-1:] != [len(found) - 1]:
            at.append(len(found) - 1)
    return tuple(found), tuple(at)


def partings(paths: Iterable[Sequence[int]]) -> set[int]:
    """The names in these paths after which they part: those that more than one name follows."""
    following: dict[int, int] = {}
    found = set()
    for path in paths:
        for name, after in pairwise(path):
            if following.setdefault(name, after) != after:
                found.add(name)
    return found
