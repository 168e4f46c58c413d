"""All live sessions in a few pseudo-random orders, the same ones at every node.

Whoever is next to a node on some ring is its neighbour, and it theirs: nodes that see the same members agree on that
without a word. Each ring alone leads to everybody; a few together are a random graph, in which any two nodes are a few
steps apart. Cost: 2 us for a session that was not asked for lately.
"""

from __future__ import annotations

from functools import lru_cache

from ranvier_py.core.prompts.fingerprint import GOLDEN, MASK, mix

RINGS_MAX = 8
PLACES_REMEMBERED = 8192
"""Sessions of the largest cluster, twice; 1 MiB. A pure function, so forgetting only costs time."""


@lru_cache(PLACES_REMEMBERED)
def positions_of(session: int) -> tuple[int, ...]:
    """Where a session stands on each of RINGS_MAX rings: u64."""
    return tuple(mix((session + ring * GOLDEN) & MASK) for ring in range(RINGS_MAX))
