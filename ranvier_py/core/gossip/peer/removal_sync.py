"""What engines dropped, among peers: withdrawals that an engine's own stream ordered become removals, and are followed.

Down: `RouteTable.withdrawn_news`, told with the boot that it is of, several to a route update. Up: of each fingerprint
the claim of that backend and boot is withdrawn, whoever made it, with what is below, unless its evidence is younger
than the removal. Then it was stored again meanwhile, or times are too coarse to tell: who served it says so once more,
and whoever reads the stream looks whether the engine holds it. Following is not telling: only who reads an engine's
stream says that something is gone.
Cost: 1 us for each fingerprint told, 2 us for each followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ranvier_py.core.gossip.backend_state.facts import BOOT_BITS
from ranvier_py.core.gossip.peer.registry_sync import SharedBackends
from ranvier_py.core.gossip.replication.removals import REMOVED_MAX, Removal, decode_removal, encode_removal
from ranvier_py.core.gossip.replication.route_updates import BadRouteUpdate
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import News, RouteTable, Trust
from ranvier_py.core.routing.route_table.claims import Claim

NEWS_MAX = 4096
"""With more news waiting nobody insists on anything."""


@dataclass(slots=True)
class RemovalCounters:
    """Since start. In fingerprints where nothing else is said."""

    told: int = 0
    outdated: int = 0  # of a process or a backend that is gone, not told
    heard: int = 0
    withdrawn: int = 0  # claims, with what was below each
    younger: int = 0  # claims that were kept for their evidence
    void: int = 0  # route updates of an earlier boot, or of a backend that this node does not have
    bad: int = 0  # route updates


class SharedRemovals:
    def __init__(self, routes: RouteTable, backends: SharedBackends) -> None:
        self.counters = RemovalCounters()
        self._routes = routes
        self._backends = backends
        self._rows, _, self._claims, _ = routes.parts()

    def route_updates(self) -> Iterator[tuple[bytes, float]]:
        """What was dropped since the last time, as route updates with the times of their evidence; it is used up."""
        news = self._routes.withdrawn_news
        waiting: dict[tuple[BackendId, int], list[int]] = {}
        oldest: dict[tuple[BackendId, int], float] = {}
        while news:
            backend, generation, fingerprint, at = news.popleft()
            place = (backend, generation)
            waiting.setdefault(place, []).append(fingerprint)
            oldest[place] = min(at, oldest.get(place, at))
        for place, fingerprints in waiting.items():
            for start in range(0, len(fingerprints), REMOVED_MAX):
                route_update = self._route_update(*place, fingerprints[start : start + REMOVED_MAX])
                if route_update:
                    yield route_update, oldest[place]

    def _route_update(self, number: BackendId, generation: int, fingerprints: list[int]) -> bytes:
        key = self._backends.key_of(number)
        backend = self._backends.find(key) if key is not None else None
        if key is None or backend is None or backend.generation != generation:
            self.counters.outdated += len(fingerprints)
            return b""
        self.counters.told += len(fingerprints)
        return encode_removal(Removal(key, self._backends.facts.boot(key) % (1 << BOOT_BITS), fingerprints))

    def hear(self, data: bytes, age_s: float, now: float) -> None:
        """Follow what a peer told."""
        try:
            key, boot, fingerprints = decode_removal(data)
        except BadRouteUpdate:
            self.counters.bad += 1
            return
        holder = self._backends.holder(key, boot, now)
        if holder is None:
            self.counters.void += 1
            return
        self.counters.heard += len(fingerprints)
        for fingerprint in fingerprints:
            self._follow(fingerprint, BackendId(holder[0]), now - age_s)

    def _follow(self, fingerprint: int, backend: BackendId, at: float) -> None:
        row = self._rows.index.get(fingerprint)
        claim = self._claims.get(row, backend) if row is not None else None
        if row is None or claim is None:
            return
        if claim.evidence > at:
            self.counters.younger += 1
            if claim.trust >= Trust.LOCAL:
                self._insist(row, backend, claim)
        else:
            self.counters.withdrawn += self._routes.withdraw(fingerprint, backend)

    def _insist(self, row: int, backend: BackendId, claim: Claim) -> None:
        rows, news = self._rows, self._routes.news
        key = (rows.tokens[row], rows.token[row], rows.text[row])
        if len(news) < NEWS_MAX:
            news.append(News(backend, claim.generation, (key,), rows.name(rows.parent[row]), claim.evidence))
