"""Eager push: what was learned here goes to our targets at once; what was received is passed on once.

After a quiet time an update leaves at once; those that follow within `tick_s` leave together after it. In a small
cluster every node gets an update from the node that learned it. In a large one each node passes on what is new to it,
once, under the original origin and numbers; `route_outbox` chooses to which peers. Rules: a peer for which there was no
room is *lazy*: nothing more is pushed to it until repair has brought it up to date, because it would leave a gap there.
Nothing is kept for any peer: what is still to be sent is a range of a log.
Bounds: one range for each origin; one mark for each peer.
"""

from __future__ import annotations

from math import inf

from ranvier_py.core.routing.peers.route_outbox import RouteOutbox
from ranvier_py.core.routing.peers.update_log import UpdateLogs

IN_TRANSIT_S = 0.25
"""How long a pushed update counts as in transit. Under load there is always one between two nodes, so their digests
differ: repair must not send it again. If it was lost, a later digest finds it."""


class EagerPush:
    """Keeps which ranges of the logs are to be pushed with the next tick, and pushes them."""

    def __init__(self, logs: UpdateLogs, outbox: RouteOutbox, tick_s: float) -> None:
        self.wake_at = inf
        self.lazy: dict[int, None] = {}
        self._logs = logs
        self._outbox = outbox
        self._tick_s = tick_s
        self._ticked_at = -inf
        self._sent = 0  # our own route updates up to this number were pushed
        self._settled = self._marked = 0  # `_sent` at two earlier moments, IN_TRANSIT_S apart or more
        self._marked_at = -inf
        self._received: dict[int, tuple[int, int]] = {}  # origin -> (number before what is new, sender's session)
        self._turn = 0

    def learned(self) -> None:
        """Push soon: our own log grew."""
        self.wake_at = min(self.wake_at, self._ticked_at + self._tick_s)

    def received(self, origin: int, after: int, sender: int) -> None:
        """Pass on an origin's route updates after this number, which are new here."""
        self._received.setdefault(origin, (after, sender))
        self.wake_at = min(self.wake_at, self._ticked_at + self._tick_s)

    def meet(self) -> None:
        """React to a change of the live peers."""
        self.lazy = {session: None for session in self.lazy if session in self._outbox.peers}

    def tick(self, now: float) -> None:
        if now < self.wake_at:
            return
        self.wake_at = inf
        self._ticked_at = now
        own, sent, self._sent = self._logs.session, self._sent, self._logs.own
        received, self._received = self._received, {}
        if now - self._marked_at >= IN_TRANSIT_S:
            self._settled, self._marked, self._marked_at = self._marked, sent, now
        if not self._outbox.targets:
            return
        self._turn += 1
        self._outbox.counters.pushed += self._push(own, sent, own, now)
        for origin, (after, sender) in received.items():
            self._outbox.counters.relayed += self._push(origin, after, sender, now)

    def is_in_transit(self, session: int, have: int, now: float) -> bool:
        """Whether a peer that has our own updates up to number `have` lacks only what was pushed to it just now."""
        lately = now - self._ticked_at < IN_TRANSIT_S
        return lately and self._settled <= have < self._sent and session not in self.lazy

    def _push(self, origin: int, after: int, sender: int, now: float) -> int:
        """Send an origin's updates after a number to the targets that may lack them. Returns the number of batches."""
        logs, outbox, lazy = self._logs, self._outbox, self.lazy
        start = self._turn % len(outbox.targets)  # the first ones find room: begin with another peer each time
        in_turn = (*outbox.targets[start:], *outbox.targets[:start])
        targets = [peer for peer in in_turn if peer.session not in (origin, sender) and peer.session not in lazy]
        batches = 0
        after = max(after, logs.base(origin))
        while targets and (batch := logs.batch(origin, after, now)):
            after += len(batch.entries)
            batches += 1
            full = [peer for peer in targets if not outbox.send(peer, batch, now)]
            for peer in full:
                lazy[peer.session] = None
                targets.remove(peer)
            outbox.counters.held_back += len(full)
        return batches
