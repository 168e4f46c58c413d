"""What engines dropped a moment ago, so that what peers sent before they heard of it does not bring it back.

Rule: a peer's row of a prefix that a backend dropped within the last KEPT_S is refused if its evidence is older than
the removal beyond the rounding of ages. Otherwise a row that crosses the removal on its way would stay at one node
alone: nothing compares tables whose updates have all arrived. Bound: REMOVALS_MAX; of more the oldest is forgotten, and
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import BackendId

KEPT_S = 10.0
"""What is in transit between nodes arrives within seconds. Longer would keep what a healed partition brings from some
nodes and not from others."""

ROUNDING_S = 1.0
"""Ages are sent in whole seconds, rounded up: what comes from a peer looks older by up to this."""

REMOVALS_MAX = 16_384


class RecentRemovals:
    """The last removals, the oldest first. `at`: by a fingerprint of the prefix, when which backend had dropped it.
    Only rows with one of these fingerprints need be looked at."""

    def __init__(self) -> None:
        self.refused = 0
        self.at: BoundedDict[int, Mapping[BackendId, float]] = BoundedDict(REMOVALS_MAX)

    @property
    def forgotten(self) -> int:
        """How many were forgotten for want of room."""
        return self.at.dropped

    def note(self, fingerprint: int, backend: BackendId, at: float) -> None:
        """Remember that a backend has dropped a prefix by this time, and forget what is too old."""
        removals = self.at
        while removals and max(next(iter(removals.values())).values()) < at - KEPT_S:
            removals.popitem(last=False)
        removals[fingerprint] = {**removals.get(fingerprint, {}), backend: at}

    def refuse(self, token: int, text: int, backend: BackendId, evidence: float, now: float) -> bool:
        """Whether a peer's row of these fingerprints (0: none) is older than a removal that is remembered here."""
        found = [self.at[name].get(backend, -inf) for name in (token, text) if name in self.at]
        at = max(found, default=-inf)
        older = evidence <= at - 2 * ROUNDING_S and now - at < KEPT_S
        self.refused += older
        return older
