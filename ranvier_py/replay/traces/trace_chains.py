"""Names of blocks, as an engine would cache them, and prefix chains, as a router would know them.

Prefix keys come from the node's own hasher, under a key that need not be secret. If a trace has no messages, their ends
are inferred: after a block that several different blocks follow, and at the prompt's last whole block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import Segment
from ranvier_py.core.splitmix import GOLDEN, MASK, mix
from ranvier_py.replay.engine.block_cache import chain_keys
from ranvier_py.replay.traces.trace import Depth

KEY = b"fingerprints of a replay"
OWN = 1 << 63  # bit that is set in the input of names that only one request has
OWN_BLOCKS_MAX = 1 << 24  # greatest number of blocks of one request


def linked(above: int, number: int) -> int:
    """Return the chained name of the block `number` that follows the block `above`: unsigned 64-bit, not 0."""
    return mix((above + (number + 1) * GOLDEN) & MASK) or 1


def own_names(request: int, count: int) -> list[int]:
    """Return names for `count` blocks that no other request has."""
    return [mix(OWN | request * OWN_BLOCKS_MAX + index) for index in range(count)]


def continued(keys: tuple[int, ...], ids: TokenIds, block_tokens: int, salt: bytes = b"") -> tuple[int, ...]:
    """Return `keys` and the names of the whole blocks that follow; `ids` begins where the last block of `keys` ends."""
    return keys + chain_keys(ids, block_tokens, keys[-1].to_bytes(8, "little") if keys else salt)


def joined(rest: Sequence[int], ids: TokenIds) -> TokenIds:
    """Return `rest`, the tokens after the last whole block, followed by `ids`."""
    return np.concatenate((np.array(rest, dtype=np.uint32), ids)) if rest else ids


def chain_of(
    segments: Iterable[Segment], chain: Sequence[Depth] = (), ends: Sequence[int] = ()
) -> tuple[tuple[Depth, ...], tuple[int, ...]]:
    """Extend (chain, ends) by the messages that `segments` stand for.

    A message that fills no further block has no prefix key of its own: it ends where the previous one does.
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
    """Return the names after which these paths part: those that more than one name follows."""
    following: dict[int, int] = {}
    found = set()
    for path in paths:
        for name, after in pairwise(path):
            if following.setdefault(name, after) != after:
                found.add(name)
    return found
