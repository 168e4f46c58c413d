"""Weighted rendezvous hashing names the home backend of a prefix that nobody holds.

Rule: the home has the highest score = -weight / ln(u), where u in (0, 1) is mixed from the prefix's fingerprint and
the backend's *name*: names, not ids, so that peers agree before any gossip arrives. Shares follow the weights exactly,
and a backend that goes or comes moves only its own keys (Ranvier's jump hash over a sorted list moved 12-98 % of the
others). Each node of a cluster must give a backend the same weight.
Source: Thaler and Ravishankar 1998; the weighted form is Schindelhauer and Schomaker 2005.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.routing.placement import Candidate
from ranvier_py.core.splitmix import mix, mix_array

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

KEPT_MAX = 256  # openings in use at once; the scores of one for 64 backends are 2 kB
TABLES_MAX = 64  # pools of different models in use at once; one table of 64 backends is about 1 kB
FEW = 8  # positions: so many are scored one by one before numpy would be done
SHIFT_53 = np.uint64(11)  # the upper 53 bits make an exact float


class Rendezvous:
    """Orders candidates by their score for a key. Keeps tables of recent pools, which change no answer."""

    def __init__(self) -> None:
        self.tables: dict[int, tuple[Sequence[Candidate], Words, Floats | None]] = {}
        self.kept: dict[tuple[int, Fingerprint], list[float]] = {}  # by pool and key

    def __copy__(self) -> Rendezvous:
        return Rendezvous()

    def best(self, key: Fingerprint, candidates: Sequence[Candidate]) -> int:
        """Return the position of the key's home among `candidates`."""
        return int(self.scores(key, candidates).argmax())

    def order(self, key: Fingerprint, candidates: Sequence[Candidate]) -> list[int]:
        """Return the positions of all candidates, the home first."""
        scores = self.scores(key, candidates)
        positions: list[int] = np.argsort(scores, kind="stable")[::-1].tolist()
        return positions

    def first(self, key: Fingerprint, candidates: Sequence[Candidate], positions: Sequence[int]) -> int:
        """Return the first of `positions` for a key that may come again, an application's opening: keeps its scores."""
        place = (id(candidates), key)
        scores = self.kept.get(place)
        if scores is None:
            found: list[float] = self.scores(key, candidates).tolist()
            if id(candidates) in self.tables:  # the table keeps the tuple alive, so its id is unique
                if len(self.kept) >= KEPT_MAX:
                    self.kept.clear()
                self.kept[place] = found
            scores = found
        return max(positions, key=scores.__getitem__)

    def highest(self, key: Fingerprint, candidates: Sequence[Candidate], positions: Sequence[int]) -> int:
        """Return the first of `positions` for a key that hardly comes again. Few are scored one by one: sooner done."""
        seeds, weights = self.table(candidates)
        if weights is None and len(positions) <= FEW:
            return max(positions, key=lambda position: mix(int(seeds[position]) ^ key))
        return max(positions, key=self.scores(key, candidates).__getitem__)

    def scores(self, key: Fingerprint, candidates: Sequence[Candidate]) -> Words | Floats:
        seeds, weights = self.table(candidates)
        words = mix_array(seeds ^ np.uint64(key))
        # of equal weights the order of u is the order of the scores
        if weights is None:
            return words
        uniform = ((words >> SHIFT_53) + 0.5) * 2.0**-53
        scores: Floats = weights / -np.log(uniform)
        return scores

    def table(self, candidates: Sequence[Candidate]) -> tuple[Words, Floats | None]:
        """Return seeds and weights (None if equal). Kept for tuples, which cannot change and which the entry keeps."""
        entry = self.tables.get(id(candidates))
        if entry is not None:
            return entry[1], entry[2]
        seeds = np.array([seed_of(candidate.name) for candidate in candidates], dtype=np.uint64)
        weights = np.array([candidate.weight for candidate in candidates], dtype=np.float64)
        unequal = weights if (weights != weights[0]).any() else None
        if isinstance(candidates, tuple):
            if len(self.tables) >= TABLES_MAX:
                self.tables.clear()
                self.kept.clear()
            self.tables[id(candidates)] = (candidates, seeds, unequal)
        return seeds, unequal


def seed_of(name: str) -> int:
    """Return a backend's 64-bit seed, which is the same on every node."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
