"""Which nodes count against the same limits, how fresh their counts are, and what is kept for those that vanished.

A node takes part from its first counts on. It has vanished once nothing came of it for STALE_S, or it is dead: a
partition looks like a death, so its share of each limit stays its own until it is back, also by its name, or has said
goodbye; for VANISHED_S, or for ever if `keeps`. Shares follow what each node took lately; all together SHARED of a
limit, and the rest in equal parts, so that idle nodes have one. Invariant: shares of all sum up to 1 (test_shares.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log

from ranvier_py.core.access.limits.count import Count, KeptShare
from ranvier_py.core.access.limits.meters import LimitSpan, Meter
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.options import Options, option
from ranvier_py.core.splitmix import mix

BEAT_S = 0.4  # between two datagrams that say no more than that a node is there
LOSS_MAX, MISTAKEN_MAX = 0.2, 1e-4
"""At most so many datagrams are lost, and so often a node that is there may be taken for one that vanished: two nodes
decide about one limit then."""
BEATS_LOST = ceil(log(MISTAKEN_MAX) / log(LOSS_MAX))  # 6 in a row
STALE_S = (BEATS_LOST + 0.5) * BEAT_S
"""Half a beat for the way. Streams, which have to send again for seconds where much is lost, show no less how fresh
counts are, but not whether a node is there."""
VANISHED_S = 3600.0
FREED_S = 3.0  # of silence, after which a session that vanished has no request in flight any more
SHARED = 0.9


KEEP, OPEN = "keep", "open"


@dataclass(frozen=True, slots=True)
class LimitOptions(Options):
    """What becomes of shares that nobody uses."""

    SECTION = "Access"

    on_partition: str = option(
        OPEN,
        "What becomes of the share of each limit that a node has which vanished, by death or partition, an hour later: "
        "open: the others have it. keep: it stays its own until the node is back or says goodbye.",
        key="limit_on_partition",
        one_of=(KEEP, OPEN),
    )


@dataclass(slots=True)
class SeenPeer:
    """When a node's counts came last, and when anything did."""

    fresh_at: float
    seen_at: float


class LimitPeers:
    """The nodes besides this one. `left`: whether a session said goodbye; `name_of` a session's node."""

    def __init__(self, me: int, left: Callable[[int], bool], name_of: Callable[[int], str]) -> None:
        self.me = me
        self.keeps = False
        self.changed: Callable[[], object] = lambda: None  # called when nodes vanish or are back
        self.live: Mapping[int, Peer] = {}  # that take part
        self.vanished: dict[int, float] = {}  # since when it is silent
        self.freed: list[int] = []  # sessions that have nothing in flight any more
        self._left, self._name_of = left, name_of
        self._running: dict[int, float] = {}  # of those that vanished, who may have requests in flight
        self._met: Mapping[int, Peer] = {}
        self._seen: dict[int, SeenPeer] = {}  # who takes part
        self._names: dict[int, str] = {}
        self._oldest = inf
        self._homes: dict[int, int] = {}

    def met(self, peers: Sequence[Peer], now: float) -> None:
        """Take the live members."""
        self._met = {peer.session: peer for peer in peers}
        self._names.update((peer.session, self._name_of(peer.session)) for peer in peers)
        self.look(now)

    def fresh(self, session: int, now: float) -> bool:
        """Note that a node's counts are fresh. Returns whether it was not known to take part."""
        is_new = session not in self._seen or session in self.vanished
        self._seen[session] = SeenPeer(now, now)
        if is_new:
            self.look(now)
        return is_new

    def seen(self, session: int, now: float) -> bool:
        """Note that a node is there. Returns whether it had vanished."""
        seen = self._seen.get(session)
        if seen is None:
            return False
        seen.seen_at = now
        is_back = session in self.vanished
        if is_back:
            self.look(now)
        return is_back

    def look(self, now: float) -> None:
        """Find out who vanished and who is back."""
        live, vanished = {}, len(self.vanished)
        for session, seen in list(self._seen.items()):
            if session in self._met and now - seen.seen_at <= STALE_S:
                live[session] = self._met[session]
                self.vanished.pop(session, None)
            elif self._is_gone(session, now):
                self.vanished.pop(session, None)
                self.freed.append(session)
                del self._seen[session]
                self._names.pop(session, None)
            elif session not in self.vanished:
                self.vanished[session] = self._running[session] = seen.seen_at
        for session, since in list(self._running.items()):
            if session not in self.vanished:
                del self._running[session]
            elif now - since >= FREED_S:
                del self._running[session]
                self.freed.append(session)
        if live != self.live or len(self.vanished) != vanished:
            self.live = live
            self._homes.clear()
            self.changed()
        self._oldest = min((self._seen[session].fresh_at for session in live), default=inf)

    def _is_gone(self, session: int, now: float) -> bool:
        if self._left(session):
            return True
        name = self._names.get(session, "")
        if session not in self._met and any(self._names.get(other) == name for other in self._met):  # it is back
            return True
        return not self.keeps and now - self.vanished.get(session, now) > VANISHED_S

    def staleness(self, now: float) -> float:
        """Return how old the oldest counts of the live ones are."""
        return max(0.0, now - self._oldest) if self.live else 0.0

    # --- who decides ------------------------------------------------------------------------------------------------

    def home(self, key: int) -> Peer | None:
        """Return the node that decides about a limit near its end; None for this one."""
        chosen = self._homes.get(key)
        if chosen is None:
            chosen = self._homes[key] = max((mix(session ^ key), session) for session in (*self.live, self.me))[1]
            if len(self._homes) > 4096:
                self._homes.clear()
        return self.live.get(chosen)

    # --- shares -----------------------------------------------------------------------------------------------------

    def share(self, count: Count, *sessions: int, before: float = inf) -> list[float]:
        """Return the shares of a limit that some nodes have, by what each took lately, `before` some moment: of what
        those have left that vanished before."""
        everybody = (self.me, *self.live, *[one for one in self.vanished if one not in count.allowed])
        left = max(0.0, 1 - sum(allowed.share for allowed in count.allowed.values()))
        by_origin = (count.taken_before(before) if before < inf else None) or count.by_origin
        taken = {one: max(0.0, by_origin.get(one, 0.0)) for one in everybody}
        whole, equal = sum(taken.values()), left / len(everybody)
        if whole <= 0:
            return [equal for _ in sessions]
        return [SHARED * left * taken[one] / whole + (1 - SHARED) * equal for one in sessions]

    def held(self, amount: float, count: Count, taken: float) -> float:
        """Return what of a limit of this amount is kept for nodes that vanished, beside what they have taken."""
        if count.span is LimitSpan.REQUEST:  # what they had in flight is free again
            return 0.0
        if any(one not in self.vanished for one in count.allowed):
            count.allowed = {one: share for one, share in count.allowed.items() if one in self.vanished}
        new = [one for one in self.vanished if one not in count.allowed]
        silent = min((self.vanished[session] for session in new), default=inf)  # else a share falls while others take
        shares = zip(new, self.share(count, *new, before=silent), strict=True) if new else ()
        kept = {one: KeptShare(share, count.by_origin.get(one, 0.0), taken) for one, share in shares}
        if kept:
            count.allowed = {**count.allowed, **kept}
        held = 0.0
        for session, allowed in count.allowed.items():
            own = count.by_origin.get(session, 0.0)
            if count.span is LimitSpan.MINUTE:
                held += max(0.0, allowed.share * amount - own)
            else:
                held += max(0.0, allowed.own + allowed.share * max(0.0, amount - allowed.all) - own)
        return held

    def in_share(self, meter: Meter, count: Count, amount: float, room: float) -> bool:
        """Whether this node's share has room for so much, where so much is left of the limit."""
        (share,) = self.share(count, self.me)
        if count.span is LimitSpan.MINUTE:
            return count.by_origin.get(self.me, 0.0) + amount <= share * meter.amount
        return amount <= share * room
