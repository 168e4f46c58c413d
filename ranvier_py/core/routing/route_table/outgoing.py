"""What a table has for its peers: what was learned here, and what engines dropped.

Learned is what this node served and what engines said themselves. A claim that is only refreshed is sent again when its
evidence enters another half of the time to live, each row at a time of its own: so peers hold for ever what is in use,
and one route costs at most two updates in a time to live. Of a request that has nothing new in it the deepest claim is
sent, too, once a second: an engine keeps what was used last, so peers have to know of it.
Bounds: QUEUE_MAX of each kind; beyond, the oldest goes and is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.claims import Claims
from ranvier_py.core.routing.route_table.route_values import Claim, NewRoutes, RouteTableCounters, Trust, WithdrawnRoute
from ranvier_py.core.routing.route_table.rows import Rows

QUEUE_MAX = 16_384
"""Calls of `learn` whose new routes wait to be sent: seconds of full load."""


class OutgoingRoutes:
    """For whoever sends them, who empties `new` and `withdrawn`. Nothing is noted before `collect`."""

    def __init__(self, rows: Rows, claims: Claims, counters: RouteTableCounters, ttl_s: float) -> None:
        self.collecting = False
        self.new: deque[NewRoutes] = deque()
        self.withdrawn: deque[WithdrawnRoute] = deque()
        self._rows = rows
        self._claims = claims
        self._counters = counters
        self.set_ttl(ttl_s)
        self._came: Callable[[], object] = lambda: None

    def set_ttl(self, ttl_s: float) -> None:
        """Life of a claim after its last evidence."""
        self._half_ttl_s = max(1, int(ttl_s) // 2)

    def collect(self, came: Callable[[], object] = lambda: None) -> None:
        """From now on. `came` is called when the first of either kind comes."""
        self.collecting = True
        self._came = came

    def dropped(self, row: int, backend: int, generation: int, at: float) -> None:
        """An engine dropped the prefix of a row."""
        if len(self.withdrawn) >= QUEUE_MAX:
            self.withdrawn.popleft()
            self._counters.withdrawn_dropped += 1
        self.withdrawn.append(WithdrawnRoute(BackendId(backend), generation, Fingerprint(self._rows.name(row)), at))
        if len(self.withdrawn) == 1:
            self._came()

    def insist(self, fingerprint: int, backend: BackendId) -> None:
        """Send once more a claim that we know better than a peer, who takes it for withdrawn."""
        rows, row = self._rows, self._rows.index.get(fingerprint, 0)
        claim = self._claims.get(row, backend) if row else None
        if claim is not None and claim.trust >= Trust.LOCAL:
            self._append(NewRoutes(backend, claim.generation, (rows.key(row),), rows.above(row), claim.evidence))

    def learned(self, chain: Sequence[PrefixKey], known: int, backend: BackendId, claim: Claim, now: float) -> None:
        """Before a claim is stored: which of these keys will be new to peers, and what stands above them."""
        fresh: list[PrefixKey] = []
        found: list[NewRoutes] = []  # each without a gap: peers take what comes together for one below the other
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
        """A request had nothing new in it."""
        rows, row = self._rows, self._rows.index[key[1] or key[2]]
        old = self._claims.get(row, backend)
        if old is not None and old.evidence < claim.evidence:
            self._append(NewRoutes(backend, claim.generation, (rows.key(row),), rows.above(row), now))

    def _append(self, routes: NewRoutes) -> None:
        if len(self.new) >= QUEUE_MAX:
            self.new.popleft()
            self._counters.new_routes_dropped += 1
        self.new.append(routes)
        if len(self.new) == 1:
            self._came()

    def _add_above(self, known: int, fresh: list[PrefixKey], backend: BackendId, claim: Claim) -> int:
        """Add the rows above a known one that lack the claim, too. Returns the name of the row above them.

        They were sent with a claim of an earlier generation, if at all: a peer that knew better has not taken them.
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
