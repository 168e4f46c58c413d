"""Bounds how often the refusal of a credential by an engine is spread, since anybody can send wrong keys.

What this node keeps is void at each refusal. Peers and Redis have room for few invalidations before they drop all, so
they learn of SPREAD_MAX in one time to live, of which credentials that no answer here belonged to have UNKNOWN_MAX: a
node may be the first that sees a key revoked whose answers are at others. One credential is not spread again within
PAUSE_S. What is not spread is found out by each node, at the latest when answers expire.
"""

from __future__ import annotations

from collections import deque

from ranvier_py.core.bounded import BoundedDict

SPREAD_MAX, UNKNOWN_MAX = 32, 8  # half of what Redis has room for (redis_entries.INVALIDATIONS_MAX)
PAUSE_S = 1.0
KNOWN_MAX = 4096  # credentials that were answered from the cache, or had an answer kept, last


class RefusedCredentials:
    """Decides which refusals are spread: with Redis this node has no answers, and notes whose it gave or kept."""

    def __init__(self) -> None:
        self._known = BoundedDict[bytes, None](KNOWN_MAX)
        self._spread = deque[tuple[float, bytes, bool]]()  # when, of which credential, and whether it was known

    def answered(self, credential: bytes) -> None:
        """Note that the cache has, or gave, an answer of this credential."""
        self._known[credential] = None

    def spreads(self, credential: bytes, now: float, ttl_s: float, *, is_known: bool) -> bool:
        """Whether peers and Redis are to learn that an engine refused this credential. `is_known`: it has answers."""
        spread, is_known = self._spread, is_known or credential in self._known
        while spread and spread[0][0] + ttl_s <= now:
            spread.popleft()
        of_class = sum(was_known is is_known for _, _, was_known in spread)
        is_recent = any(each == credential and now - at < PAUSE_S for at, each, _ in spread)
        if is_recent or len(spread) >= SPREAD_MAX or (not is_known and of_class >= UNKNOWN_MAX):
            return False
        spread.append((now, credential, is_known))
        self._known.pop(credential, None)
        return True
