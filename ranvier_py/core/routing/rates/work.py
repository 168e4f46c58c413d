"""The work that one router and its peers have at one backend: requests in flight, and the prefill that waits there.

The sums are kept up to date, not computed when read: placement reads those of dozens of backends for each request.
A first token that can't be seen, because the answer comes as a whole, is taken for come when it is expected
(`Unseen`): until then such a request waits like any other, and then it decodes.
Invariant: counts are exact if every `begin` has one `end`, and at most one `prefilled` between (test_backends.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

REQUEST_TOKENS = 600
"""One decoding request slows the others down as much as so many tokens of context, which each step reads. Of a data
sheet: bytes/s over bytes of a token, over the prompt tokens/s (`replay/engine/presets.py` has 430 to 1,130)."""


ROOMY = 0.5
"""While the requests that run use no more than this share of a cache, it has room for as many again."""

NEVER_S = float("-inf")


class Load(NamedTuple):
    """The load that one router, or several together, put on one backend."""

    requests: int  # in flight
    waiting: int = 0  # of these, those whose first token has not come
    tokens: int = 0  # prompt tokens to be computed for the waiting ones

    def plus(self, other: Load) -> Load:
        return Load(self.requests + other.requests, self.waiting + other.waiting, self.tokens + other.tokens)

    def minus(self, other: Load) -> Load:
        return Load(self.requests - other.requests, self.waiting - other.waiting, self.tokens - other.tokens)


NO_LOAD = Load(0)


@dataclass(slots=True, eq=False)
class InFlight:
    """One request as its backend's work counts it. `tokens`: to be computed. `context`: what decoding it weighs, in
    tokens of context. `memory`: tokens of cache that it takes until its end, beside what it shares with others.
    `since`, `area`, `computed`: the backend's sums when its first token came (unseen: when it was sent). The last three
    are what it met there when it was sent: own requests that waited, all that decoded, tokens of peers' prompts."""

    tokens: int = 0
    context: int = REQUEST_TOKENS
    memory: int = 0
    seen: bool = True
    decoding: bool = False
    ended: bool = False
    since: float = 0.0
    area: float = 0.0
    computed: int = 0
    queued: bool = False
    others: int = 0
    peer_tokens: int = 0


@dataclass(slots=True, eq=False)
class OwnWork:
    """This router's own requests at one backend, which it counts exactly."""

    inflight: int = 0
    decoding: int = 0  # of these, those whose first token has come
    tokens: int = 0  # prompt tokens to be computed for the others
    contexts: int = 0  # tokens of context of the decoding ones, with REQUEST_TOKENS for each
    memory: int = 0  # tokens of cache that those in flight take until their ends
    computed: int = 0  # prompt tokens computed so far
    ended_at: float = NEVER_S  # when the last one ended
    area: float = 0.0  # `contexts` summed over time, in token seconds, up to `area_at`
    area_at: float = 0.0

    @property
    def waiting(self) -> int:
        """Those in flight whose first token has not come."""
        return self.inflight - self.decoding

    @property
    def load(self) -> Load:
        return Load(self.inflight, self.waiting, self.tokens)

    def area_until(self, now: float) -> float:
        """Return `contexts` summed over time until now."""
        if now > self.area_at:
            self.area += self.contexts * (now - self.area_at)
            self.area_at = now
        return self.area


@dataclass(slots=True, eq=False)
class EngineRoom:
    """How many requests one engine has room for, as its metrics page shows."""

    foreign: int = 0  # requests there that no node sent, by the engine's count
    places: int | None = None  # requests that it runs at once, as far as it has shown that (`queue_read`)
    full_at: int | None = None  # requests that ran at the last look, if another seemed to wait for a place
    cache_tokens: int | None = None  # the size of its cache


@dataclass(slots=True, eq=False)
class Work:
    """One router's own requests at one backend and those of its peers, which the engine serves in turn, and its room.

    `mirrors` are the work that policies in the shadow would have there (`shadow`); they get the peers' load, too.
    """

    own: OwnWork = field(default_factory=OwnWork)
    peers: Load = NO_LOAD  # all peers' together, as they report
    waiting: int = 0  # own and peers' requests in flight whose first token has not come
    decoding: int = 0  # own and peers' requests in flight whose first token has come
    pending_tokens: int = 0  # prompt tokens to be computed for the waiting ones
    progress_at: float = 0.0  # when the first of the waiting ones became the first
    room: EngineRoom = field(default_factory=EngineRoom)
    mirrors: list[Work] = field(default_factory=list)
    burst: int = 0  # own requests sent within UNREPORTED_S of `burst_at`
    burst_at: float = NEVER_S

    def queue_read(self, running: int | None, waiting: int | None, usage: float | None = None) -> None:
        """Take how many requests run and wait there, by its metrics page, and the share of its cache that they use.

        Requests that wait although all that run decode wait for a place: more than these have never run at once. Not
        if they may wait for room in the cache. What has just come waits as well, until a step ends: so one look shows
        nothing, two in a row with equally many do."""
        room = self.room
        if room.places and running:
            room.places = max(room.places, running)
        for_place = running and waiting and running <= self.decoding + room.foreign and (usage or 0.0) <= ROOMY
        if for_place and running == room.full_at:
            room.places = room.places or running
        room.full_at = running if for_place else None

    def begin(self, request: InFlight, now: float) -> None:
        """Count a request that was sent."""
        own = self.own
        if not self.waiting:
            self.progress_at = now
        self.waiting += 1
        own.inflight += 1
        own.memory += request.memory
        own.tokens += request.tokens
        self.pending_tokens += request.tokens
        if not request.seen:
            request.since, request.area, request.computed = now, own.area_until(now), own.computed
            return
        request.queued, request.others = own.inflight - own.decoding > 1, self.decoding
        request.peer_tokens = self.peers.tokens

    def prefilled(self, request: InFlight, now: float) -> float:
        """Count a first token. Returns the seconds since the last progress."""
        own = self.own
        gap_s = now - self.progress_at
        area = own.area_until(now)
        own.tokens -= request.tokens
        self.pending_tokens -= request.tokens
        own.computed += request.tokens
        self.waiting -= 1
        own.decoding += 1
        self.decoding += 1
        own.contexts += request.context
        self.progress_at = now
        request.decoding = True
        if request.seen:
            request.since, request.area, request.computed = now, area, own.computed
        return gap_s

    def end(self, request: InFlight, now: float) -> None:
        """Count the end of a request."""
        own = self.own
        assert own.inflight > 0, f"ended without beginning: {self!r}"
        assert not request.ended, f"ended twice: {self!r}"
        request.ended = True
        own.ended_at = now
        own.area_until(now)
        own.inflight -= 1
        own.memory -= request.memory
        if request.decoding:
            own.decoding -= 1
            self.decoding -= 1
            own.contexts -= request.context
        else:
            own.tokens -= request.tokens
            self.pending_tokens -= request.tokens
            self.waiting -= 1

    def guess(self, load: Load, sign: int) -> None:
        """Add what peers may have sent, or with `sign` -1 take it back."""
        self.waiting += sign * load.waiting
        self.pending_tokens += sign * load.tokens

    def set_peers(self, load: Load, now: float) -> None:
        """Set the load that the peers together report, here and in the mirrors."""
        before, self.peers = self.peers, load
        came = load.waiting < before.waiting or load.tokens < before.tokens  # a first token
        if came or (load.waiting and not before.waiting and not self.own.waiting):
            self.progress_at = now
        more = load.minus(before)
        self.waiting += more.waiting
        self.decoding += more.requests - more.waiting
        self.pending_tokens += more.tokens
        for mirror in self.mirrors:
            mirror.set_peers(load, now)


UNREPORTED_S = 0.1
"""What peers have sent is reported after this time at the latest: every 50 ms, and on its way."""


class Unseen:
    """What can't be seen: first tokens of whole answers, until they are expected, and what peers send at this moment.

    Clients reach all nodes alike, so peers send as much as this node does, and to the same place. One request says
    nothing; of each further one within UNREPORTED_S every peer is taken to have sent the like, until it has reported.
    Bounded by the requests in flight, and of the last UNREPORTED_S. `peers`: how many there are.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Work, InFlight | Load]] = []
        self._added = 0
        self.due_at = inf
        self.peers = 0

    def sent(self, work: Work, tokens: int, now: float) -> None:
        """Guess what peers send while this node sends a request of so many tokens to be computed."""
        if not self.peers:
            return
        if now - work.burst_at >= UNREPORTED_S:
            work.burst, work.burst_at = 0, now
        work.burst += 1
        if work.burst > 1:
            guess = Load(self.peers, self.peers, self.peers * tokens)
            work.guess(guess, 1)
            self.add(work, guess, now + UNREPORTED_S)

    def add(self, work: Work, what: InFlight | Load, at: float) -> None:
        """Count at this time a first token, or what peers were taken to have sent."""
        self._added += 1
        heappush(self._due, (at, self._added, work, what))
        self.due_at = self._due[0][0]

    def settle(self, now: float) -> None:
        """Count all first tokens that were expected until now, and no more what peers have reported since."""
        due = self._due
        while due and due[0][0] <= now:
            expected_at, _, work, request = heappop(due)
            if isinstance(request, Load):
                work.guess(request, -1)
            elif not request.ended:
                work.prefilled(request, expected_at)
        self.due_at = due[0][0] if due else inf
