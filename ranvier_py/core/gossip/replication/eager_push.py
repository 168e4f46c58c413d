"""Telling at once: what was learned here goes to the peers we tell directly, what was heard is told on once.

After a quiet time a route update leaves at once; those that follow within `tick_s` leave together after it. Among few
nodes everybody is told by whoever learned it. Among many, each node tells on what is new to it, once, under the
original origin and numbers; `route_post` says to whom.

Rules: a peer for whom there was no room is *lazy*: nothing more is pushed to it, which would not join what it has,
until repair has brought it up to date. Nothing is kept for anybody: what is still to be told is a range of a log.
Bounds: one range for each origin; one mark for each peer. Cost: O(1) for each route update on the way in.
"""

from __future__ import annotations

from math import inf

from ranvier_py.core.gossip.replication.route_outbox import RoutePost
from ranvier_py.core.gossip.replication.update_log import Logs

ON_ITS_WAY_S = 0.25
"""Under load something that was pushed so lately is always on its way between two nodes, and their digests differ: it
must not be sent twice. If it was lost, the next digest tells."""


class Eager:
    """What is to be pushed with the next tick."""

    def __init__(self, logs: Logs, post: RoutePost, tick_s: float) -> None:
        self.wake_at = inf
        self.lazy: dict[int, None] = {}
        self.pushed = 0  # batches
        self.relayed = 0  # batches, of others' route updates
        self.held_back = 0  # times that a peer became lazy
        self._logs = logs
        self._post = post
        self._tick_s = tick_s
        self._ticked_at = -inf
        self._told = 0  # number of our own route updates that were pushed
        self._settled = self._marked = 0  # the same at two earlier moments, ON_ITS_WAY_S apart or more
        self._marked_at = -inf
        self._heard: dict[int, tuple[int, int]] = {}  # origin -> number before what is new, who told us
        self._turn = 0

    def learned(self) -> None:
        """Our own log grew."""
        self.wake_at = min(self.wake_at, self._ticked_at + self._tick_s)

    def heard(self, origin: int, after: int, teller: int) -> None:
        """The route updates of an origin after this number are new here."""
        if self._post.relays:
            self._heard.setdefault(origin, (after, teller))
            self.wake_at = min(self.wake_at, self._ticked_at + self._tick_s)

    def meet(self) -> None:
        """The live peers changed."""
        self.lazy = {session: None for session in self.lazy if session in self._post.peers}

    def tick(self, now: float) -> None:
        if now < self.wake_at:
            return
        self.wake_at = inf
        self._ticked_at = now
        own, told, self._told = self._logs.session, self._told, self._logs.own
        heard, self._heard = self._heard, {}
        if now - self._marked_at >= ON_ITS_WAY_S:
            self._settled, self._marked, self._marked_at = self._marked, told, now
        if not self._post.listeners:
            return
        self._turn += 1
        self.pushed += self._push(own, told, own, now)
        for origin, (after, teller) in heard.items():
            self.relayed += self._push(origin, after, teller, now)

    def is_on_its_way(self, session: int, have: int, now: float) -> bool:
        """Whether a peer that has our own route updates up to this number lacks only what was pushed to it a moment
        ago."""
        lately = now - self._ticked_at < ON_ITS_WAY_S
        return lately and self._settled <= have < self._told and session not in self.lazy

    def _push(self, origin: int, after: int, teller: int, now: float) -> int:
        """Send what follows a number to everybody who may not know it. Returns the number of batches."""
        logs, post, lazy = self._logs, self._post, self.lazy
        listeners = post.listeners
        start = self._turn % len(listeners)  # whoever comes first finds room: not always the same
        in_turn = (*listeners[start:], *listeners[:start])
        told = [peer for peer in in_turn if peer.session not in (origin, teller) and peer.session not in lazy]
        batches = 0
        after = max(after, logs.base(origin))
        while told and (batch := logs.batch(origin, after, now)):
            after += len(batch.entries)
            batches += 1
            full = [peer for peer in told if not post.send(peer, batch, now)]
            for peer in full:
                lazy[peer.session] = None
                told.remove(peer)
            self.held_back += len(full)
        return batches
