"""The routes that a table has for its peers: those learned on this node, and those that engines dropped.

A route is learned here when this node served it or the engine itself reported it. A claim that is merely refreshed is
sent again when its evidence enters the next half of the time to live, which begins at another moment for each row: so
peers never forget what is in use, and a refreshed route costs at most two updates in a time to live. Of a request with
nothing new the deepest claim is sent, once a second at most: engines keep what was used last, so peers must know it.
Bounds: QUEUE_MAX of each kind; beyond that the oldest is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier_py.core.bounded import BoundedQueue
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.claims import Claims
from ranvier_py.core.routing.route_table.recent_removals import RecentRemovals
from ranvier_py.core.routing.route_table.route_values import Claim, NewRoutes, RouteTableCounters, Trust, WithdrawnRoute
from ranvier_py.core.routing.route_table.rows import Rows

QUEUE_MAX = 16_384
"""Calls of `learn` whose new routes wait to be sent, and withdrawals that do: seconds of full load."""


class OutgoingRoutes:
    """Queues of what peers have to know; whoever sends it empties `new` and `withdrawn`. Collects from `collect` on."""

    def __init__(self, rows: Rows, claims: Claims, counters: RouteTableCounters, ttl_s: float) -> None:
        self.collecting = False
        self.new: BoundedQueue[NewRoutes] = BoundedQueue(QUEUE_MAX)
        self.withdrawn: BoundedQueue[WithdrawnRoute] = BoundedQueue(QUEUE_MAX)
        self.removals = RecentRemovals()
        self._rows = rows
        self._claims = claims
        self._counters = counters
        self.set_ttl(ttl_s)

    def set_ttl(self, ttl_s: float) -> None:
        """Set the life of a claim after its last evidence."""
        self._half_ttl_s = max(1, int(ttl_s) // 2)

    def collect(self, came: Callable[[], object] = lambda: None) -> None:
        """Collect from now on. `came` is called when an entry comes into either queue while that is empty."""
        self.collecting = True
        self.new.came = self.withdrawn.came = came

    def dropped(self, row: int, backend: int, generation: int, at: float) -> None:
        """Queue for peers that an engine dropped the prefix of a row."""
        gone = WithdrawnRoute(BackendId(backend), generation, Fingerprint(self._rows.name(row)), at)
        self.removals.note(gone.fingerprint, gone.backend, at)
        self._counters.withdrawn_dropped += self.withdrawn.put(gone)

    def insist(self, fingerprint: int, backend: BackendId) -> None:
        """Send a claim again that a peer has withdrawn, if this node knows it better: by LOCAL trust or more."""
        rows, row = self._rows, self._rows.index.get(fingerprint, 0)
        claim = self._claims.get(row, backend) if row else None
        if claim is not None and claim.trust >= Trust.LOCAL:
            self._append(NewRoutes(backend, claim.generation, (rows.key(row),), rows.above(row), claim.evidence))

    def learned(self, chain: Sequence[PrefixKey], known: int, backend: BackendId, claim: Claim, now: float) -> None:
        """Queue the keys of a chain that will be new to peers, and what is above them, before the claim is stored."""
        fresh: list[PrefixKey] = []
        found: list[NewRoutes] = []  # each without a gap: peers hang each key of a chain under the next one
        index = self._rows.index
        for key in chain:
            if (key[1] or key[2]) not in index or self._is_new(key, backend, claim):
                fresh.append(key)
            elif fresh:
                found.append(NewRoutes(backend, claim.generation, fresh, key[1] or key[2], now))
                fresh = []
        if fresh:
            parent = self._add_above(known, fresh, backend, claim) if known else 0
            found.append(NewRoutes(backend, claim.generation, fresh, parent, now))
        for routes in reversed(found):
            self._append(routes)
        if not found and claim.trust == Trust.LOCAL:
            self._use_again(chain[0], backend, claim, now)

    def _use_again(self, key: PrefixKey, backend: BackendId, claim: Claim, now: float) -> None:
        """Queue the deepest claim of a request with nothing new, unless this second has it already."""
        rows, row = self._rows, self._rows.index[key[1] or key[2]]
        old = self._claims.get(row, backend)
        if old is not None and old.evidence < claim.evidence:
            self._append(NewRoutes(backend, claim.generation, (rows.key(row),), rows.above(row), now))

    def _append(self, routes: NewRoutes) -> None:
        self._counters.new_routes_dropped += self.new.put(routes)

    def _add_above(self, known: int, fresh: list[PrefixKey], backend: BackendId, claim: Claim) -> int:
        """Add the rows above a known one to `fresh` while they lack the claim. Returns the name of the row above these.

        Those rows were sent with an earlier generation's claim, if at all, which a peer may not have taken.
        """
        rows = self._rows
        row = rows.parent[known]
        while row > 0 and self._is_new(rows.key(row), backend, claim):
            fresh.append(rows.key(row))
            row = rows.parent[row]
        return rows.name(row)

    def _is_new(self, key: PrefixKey, backend: int, claim: Claim) -> bool:
        _, token, text = key
        name, index = token or text, self._rows.index
        row = index.get(name)
        if row is None or (text and token and text not in index):
            return True
        rows = self._rows
        own = rows.backend[row] == backend and rows.generation[row] == claim.generation
        if own and rows.evidence[row] == claim.evidence:
            return claim.evidence <= self._claims.horizon
        old = self._claims.get(row, backend)
        if old is None or old.generation != claim.generation or old.evidence <= self._claims.horizon:
            return True
        if old.evidence == claim.evidence:
            return False
        half = self._half_ttl_s
        return (old.evidence + name) // half != (claim.evidence + name) // half
