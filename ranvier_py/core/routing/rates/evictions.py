"""What a computed token costs beside its own time, by backend: it evicts another, which may be needed again.

Where a cache is full, each token that is computed evicts one. The share of the computed tokens that the backend had
computed before, and evicted since, is the chance that the evicted one will be computed again. So a prefill counts
1 + that share. Where nothing is evicted that is needed again, as in a roomy cache, the share is 0. Before that is
known, and where few long chats fill a cache, what the chats of the last minute have there tells it (`RecentTokens`).
Sums fade over FADE_S and RECENT_S. Bounds: one entry per backend.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.rates.moments import kept

FADE_S = 240.0  # evictions of the last minutes count; 100 or 600 change little

RECENT_S = 90.0  # a chat that went on a minute ago will probably go on

PRIOR_TOKENS = 4000
"""So many tokens are taken for computed for the first time beside those that were counted: else one short prompt that
comes again would double the price."""

NOTHING = (0.0, 0.0)


@dataclass(slots=True)
class Computed:
    """Fading sums over the prompt tokens that a backend computed, of which it had computed some before."""

    tokens: float = 0.0
    again: float = 0.0
    at: float = 0.0  # monotonic seconds of the latest


class Evictions:
    """By backend: tokens that it computed, and of these those that it had computed before and evicted since."""

    def __init__(self) -> None:
        self._computed: dict[BackendId, Computed] = {}
        self.seen = False  # whether any backend had to compute tokens again; until then each price is 1

    def __copy__(self) -> Evictions:
        twin = Evictions()
        twin.seen = self.seen
        twin._computed = {backend: copy(computed) for backend, computed in self._computed.items()}
        return twin

    def add(self, backend: BackendId, tokens: int, again: int, at: float) -> None:
        """Count tokens that the backend computes, and tokens that it computed before and no longer has."""
        before = self._computed.get(backend)
        if before is None:
            before = self._computed[backend] = Computed()
        if at > before.at:
            share = kept(before.at, at, FADE_S)
            before.tokens *= share
            before.again *= share
            before.at = at
        before.tokens += tokens
        before.again += again
        self.seen = self.seen or again > 0

    def price(self, backend: BackendId) -> float:
        """Return what a second of prefill there counts: 1 to 2."""
        computed = self._computed.get(backend)
        if computed is None or not computed.again:
            return 1.0
        return 1.0 + min(1.0, computed.again / (computed.tokens + PRIOR_TOKENS))

    def forget(self, backend: BackendId) -> None:
        self._computed.pop(backend, None)


class RecentTokens:
    """By backend: tokens of its cache that chats have which went on there lately. They fade with the time since."""

    def __init__(self) -> None:
        self.known: dict[BackendId, tuple[float, float]] = {}  # tokens, and when a request was added last

    def __copy__(self) -> RecentTokens:
        twin = RecentTokens()
        twin.known = self.known.copy()
        return twin

    def add(self, backend: BackendId, tokens: float, held: int, at: float) -> None:
        """Count a request that adds so many tokens there to the `held` ones that its chat has."""
        before, since = self.known.get(backend, NOTHING)
        self.known[backend] = (max(before * kept(since, at, RECENT_S), held) + tokens, at)

    def evicted_by(self, backend: BackendId, tokens: float, held: int, size: int, at: float) -> float:
        """Return how many tokens of other chats such a request would evict from a cache of `size` tokens."""
        before, since = self.known.get(backend, NOTHING)
        before *= kept(since, at, RECENT_S)
        # what all do not fit into has lost much already, and no request takes more than it needs
        return max(0.0, min(before - held, held + tokens, max(before, held) + tokens - size))

    def forget(self, backend: BackendId) -> None:
        self.known.pop(backend, None)
