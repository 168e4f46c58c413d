"""A consistent-hash ring: each backend has points on a circle of 64 bits; a key belongs to the next point clockwise.

The points of a backend are mixed from its *name* and their number, so that peers agree, and a backend that goes or
comes moves its own keys only, each to whoever is next. Shares are uneven by about 1 / sqrt(points): 8 % with 150.

Source: Karger et al. 1997; 150 points each, whatever the weight, are Continuum's («virtual nodes»).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ranvier_py.core.routing.placement import Candidate
from ranvier_py.core.routing.placement.rendezvous import Words, mix, seed_of

RINGS_MAX = 64  # pools of different models in use at once; a ring of 64 backends is about 150 kB
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the step of splitmix64


class Ring:
    """Finds the owners of keys. Keeps the layouts of recent pools; the answers do not depend on them."""

    __slots__ = ("layouts", "points")

    def __init__(self, points: int) -> None:
        self.points = points  # of each backend
        self.layouts: dict[int, tuple[Sequence[Candidate], Words, list[int]]] = {}

    def owner(self, key: int, candidates: Sequence[Candidate]) -> int:
        """Position of the backend to which a key of 64 bits belongs."""
        places, owners = self.layout(candidates)
        return owners[int(places.searchsorted(np.uint64(key))) % len(owners)]

    def walk(self, key: int, candidates: Sequence[Candidate]) -> Iterator[int]:
        """Positions of all backends, the owner first, then each as its first point comes clockwise."""
        places, owners = self.layout(candidates)
        start = int(places.searchsorted(np.uint64(key)))
        seen = [False] * len(candidates)
        for step in range(start, start + len(owners)):
            position = owners[step % len(owners)]
            if not seen[position]:
                seen[position] = True
                yield position

    def layout(self, candidates: Sequence[Candidate]) -> tuple[Words, list[int]]:
        """Places in ascending order, and whose they are. Kept for tuples, which cannot change."""
        entry = self.layouts.get(id(candidates))
        if entry is not None:
            return entry[1], entry[2]
        seeds = np.array([seed_of(candidate.name) for candidate in candidates], dtype=np.uint64)
        places = mix(seeds[:, None] + GOLDEN * np.arange(1, self.points + 1, dtype=np.uint64)).ravel()
        order = places.argsort(kind="stable")
        owners: list[int] = (order // self.points).tolist()
        if isinstance(candidates, tuple):
            if len(self.layouts) >= RINGS_MAX:
                self.layouts.clear()
            self.layouts[id(candidates)] = (candidates, places[order], owners)
        return places[order], owners
