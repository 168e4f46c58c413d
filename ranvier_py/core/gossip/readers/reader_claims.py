"""Who stands how to which event stream: each member's own word, numbered by itself, the latest of each counts.

What a node says goes to its peers within `say_interval_s`, once for all that changed; a newcomer is told everything,
and everybody tells somebody all of it now and then. In a cluster whose members are not all peers, what is new is passed
on by whoever hears it. So it reaches all that can be reached, in any order and however often. Also the levels in status
come from here: whoever reads a stream says how well it knows it.

Rules: nobody says anything of another; a word counts while its member lives, which its user sees to.
Bounds: STANDINGS_KEPT_MAX words; beyond, new ones are dropped and counted. Cost: 21 bytes for each word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random

from ranvier_py.core.gossip.gossip_values import Outgoing, Peer, Plane
from ranvier_py.core.gossip.wire.messages import Stand, Standings

STANDINGS_KEPT_MAX = 16_384
"""A reader and a former one of each of 4096 engines, and twice as many that can't."""

PER_MESSAGE = 2048  # 43 kB: far below a frame
SAY_INTERVAL_S = 0.25  # an engine whose stream has gaps changes its level many times a second
REPAIR_INTERVAL_S = 10.0
EVERYONE_MAX = 16
"""So many peers are told what is new; more hear it through others."""


class StandingBook:
    """The words of one node and of all that it heard of. `news` is drained by the owner."""

    def __init__(self, session: int, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self.news: list[Stand] = []
        self.heard = self.dropped = 0
        self._session = session
        self._outbox = outbox
        self._rng = rng
        self._known: dict[tuple[int, int], Stand] = {}  # by member and backend
        self._changed: dict[tuple[int, int], None] = {}
        self._peers: Sequence[Peer] = ()
        self._passes_on = False
        self._said_at = -inf
        self._repair_at = now + rng.uniform(0, REPAIR_INTERVAL_S)

    @property
    def wake_at(self) -> float:
        at = self._repair_at if self._peers and self._known else inf
        return min(at, self._said_at + SAY_INTERVAL_S) if self._changed else at

    def say(self, backend: int, standing: int) -> None:
        """How we stand to a stream; cheap when nothing changed."""
        place = (self._session, backend)
        known = self._known.get(place)
        if known is None and (not standing or len(self._known) >= STANDINGS_KEPT_MAX):
            self.dropped += bool(standing)
        elif known is None or known.standing != standing:
            clock = 1 if known is None else known.clock + 1
            self._known[place] = Stand(backend, self._session, clock, standing)
            self._changed[place] = None

    def standing(self, member: int, backend: int) -> int:
        known = self._known.get((member, backend))
        return known.standing if known is not None else 0

    def all(self) -> Mapping[tuple[int, int], Stand]:
        """By member and backend."""
        return self._known

    def peers(self, live: Sequence[Peer], *, passes_on: bool) -> None:
        """Who is there now. `passes_on`: there are members that are no peers of ours."""
        before = {peer.session: None for peer in self._peers}
        self._peers = live
        self._passes_on = passes_on or len(live) > EVERYONE_MAX
        newcomers = [peer for peer in live if peer.session not in before]
        if newcomers and self._known:
            chosen = newcomers if len(newcomers) <= EVERYONE_MAX else self._rng.sample(newcomers, EVERYONE_MAX)
            self._tell(chosen, list(self._known.values()))

    def forget(self, session: int) -> None:
        """This member is gone for good."""
        for place in [place for place in self._known if place[0] == session]:
            del self._known[place]
            self._changed.pop(place, None)

    def tick(self, now: float) -> None:
        if self._changed and now >= self._said_at + SAY_INTERVAL_S:
            self._said_at = now
            changed, self._changed = [self._known[place] for place in self._changed], {}
            peers = self._peers
            self._tell(peers if len(peers) <= EVERYONE_MAX else self._rng.sample(peers, EVERYONE_MAX), changed)
        if now >= self._repair_at:
            self._repair_at = now + REPAIR_INTERVAL_S * self._rng.uniform(0.8, 1.2)
            if self._peers and self._known:
                self._tell([self._rng.choice(self._peers)], list(self._known.values()))

    def receive(self, message: Standings) -> None:
        for stand in message.standings:
            place = (stand.member, stand.backend)
            known = self._known.get(place)
            if stand.member == self._session or (known is not None and stand.clock <= known.clock):
                continue
            if known is None and len(self._known) >= STANDINGS_KEPT_MAX:
                self.dropped += 1
                continue
            self.heard += 1
            self._known[place] = stand
            self.news.append(stand)
            if self._passes_on:
                self._changed[place] = None

    def _tell(self, peers: Sequence[Peer], standings: Sequence[Stand]) -> None:
        for start in range(0, len(standings), PER_MESSAGE):
            message = Standings(tuple(standings[start : start + PER_MESSAGE]))
            for peer in peers:
                self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
