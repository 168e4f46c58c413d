"""Repair of missed route updates: digests find a difference, version vectors name it, pieces of the logs close it.

    A -> B  Digest, every half second    B -> A  Vector (reply), if its hash is another
    A -> B  Vector, and what B lacks, oldest first, within the budget    B -> A  what A lacks
Rules: what can't be had as route updates, or would take longer than REPAIR_S, is answered with Resets: then tables are
compared (`pull`). A batch that leaves a gap is dropped, and its sender asked soon: a number in a vector is never ahead
of the route updates. Bounds: one waiting question for each peer, asked at most every ASK_INTERVAL_S.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from random import Random

from ranvier_py.core.mesh.budget import MESSAGE_BYTES
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.routing.peers.eager_push import EagerPush
from ranvier_py.core.routing.peers.route_messages import Digest, Reset, Vector, wire_bytes
from ranvier_py.core.routing.peers.route_outbox import RouteOutbox
from ranvier_py.core.routing.peers.update_log import BATCH_BYTES_MAX, UpdateLogs

ASK_INTERVAL_S = 0.2
"""The shortest time between two questions to one peer: the answer to the last one takes a round trip."""

REPAIR_S = 4.0
"""If sending route updates within the budget for one peer would take longer, tables are compared instead."""


class Repair:
    """Sends and answers digests and vectors, and supplies peers from the logs."""

    def __init__(self, logs: UpdateLogs, outbox: RouteOutbox, eager: EagerPush, rng: Random, now: float) -> None:
        self._logs = logs
        self._outbox = outbox
        self._eager = eager
        self._settings = outbox.settings
        self._rng = rng
        self._digest_at = now + rng.uniform(0, outbox.settings.digest_interval_s)
        self._ask_at: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}

    @property
    def wake_at(self) -> float:
        if not self._outbox.order:
            return inf
        return min(self._digest_at, *self._ask_at.values()) if self._ask_at else self._digest_at

    def meet(self) -> None:
        """React to a change of the live peers."""
        peers = self._outbox.peers
        self._ask_at = {session: at for session, at in self._ask_at.items() if session in peers}
        self._asked_at = {session: at for session, at in self._asked_at.items() if session in peers}

    def missed(self, session: int, now: float) -> None:
        """Ask this live peer soon: it has something that we lack."""
        if session in self._outbox.peers and session not in self._ask_at:
            earliest = max(now, self._asked_at.get(session, -inf) + ASK_INTERVAL_S)
            self._ask_at[session] = earliest + self._rng.uniform(0, ASK_INTERVAL_S / 4)

    def tick(self, now: float) -> None:
        outbox, logs = self._outbox, self._logs
        asked = [session for session, at in self._ask_at.items() if at <= now] if self._ask_at else ()
        for session in asked:
            del self._ask_at[session]
            self._asked_at[session] = now
            outbox.send(outbox.peers[session], self._vector(reply=False), now)
        if now >= self._digest_at:
            self._digest_at = now + self._settings.digest_interval_s * self._rng.uniform(0.8, 1.2)
            if outbox.order:
                waiting = [outbox.peers[session] for session in self._eager.lazy]
                peer = self._rng.choice(waiting or outbox.order)
                outbox.send(peer, Digest(logs.vector.hash, self._settings.schema), now)

    # --- what peers send ---------------------------------------------------------------------------------------------

    def digest(self, peer: Peer, message: Digest, now: float) -> None:
        if message.schema != self._settings.schema:
            self._outbox.counters.foreign += 1
        elif message.vector_hash == self._logs.vector.hash:
            self._eager.lazy.pop(peer.session, None)
        else:
            self._outbox.counters.mismatches += 1
            self._outbox.send(peer, self._vector(reply=True), now)

    def vector(self, peer: Peer, message: Vector, now: float) -> None:
        """Answer a peer's vector and send what it lacks; nothing for an empty one: a newcomer asks for whole tables."""
        if message.reply:
            self._outbox.send(peer, self._vector(reply=False), now)
            if not message.entries:
                return
        self._supply(peer, dict(message.entries), now)

    def _vector(self, *, reply: bool) -> Vector:
        entries = tuple(self._logs.vector.items())
        return Vector(entries or ((self._logs.session, 0),), reply)

    def _supply(self, peer: Peer, theirs: Mapping[int, int], now: float) -> None:
        """Send a peer the route updates that it lacks, or a Reset for an origin whose updates can't be had here."""
        logs = self._logs
        lacking: dict[int, int] = {}
        for origin, number in logs.vector.items():
            have = theirs.get(origin, 0)
            if have < number and origin != peer.session and not logs.is_spent(origin):
                lacking[origin] = have
        if self._eager.is_in_transit(peer.session, lacking.get(logs.session, logs.own), now):
            del lacking[logs.session]
        if self._is_too_much(lacking):
            for origin in lacking:
                self._reset(peer, origin, logs.vector[origin], now)
            return
        there = {origin: have for origin, have in lacking.items() if have >= logs.base(origin)}
        for origin in lacking:
            if origin not in there:
                self._reset(peer, origin, logs.base(origin), now)
        if self._send_oldest_first(peer, there, now) and len(there) == len(lacking):
            self._eager.lazy.pop(peer.session, None)

    def _is_too_much(self, lacking: Mapping[int, int]) -> bool:
        room = int(REPAIR_S * self._settings.peer_bytes_per_s)
        for origin, have in lacking.items():
            room -= self._logs.bytes_after(origin, have)
            if room <= 0:
                return True
        return False

    def _send_oldest_first(self, peer: Peer, lacking: Mapping[int, int], now: float) -> bool:
        """Send within half of the room, as the rest is for new updates. Returns whether all of it was sent."""
        logs = self._logs
        room = self._outbox.room(peer, now) // 2
        for origin, have in sorted(lacking.items(), key=lambda item: logs.evidence_after(*item)):
            after = have
            while batch := logs.batch(origin, after, now, min(BATCH_BYTES_MAX, room - MESSAGE_BYTES)):
                room -= wire_bytes(batch)
                if room < 0 or not self._outbox.send(peer, batch, now):
                    return False
                after += len(batch.entries)
        return True

    def _reset(self, peer: Peer, origin: int, base: int, now: float) -> None:
        self._outbox.counters.resets_sent += self._outbox.send(peer, Reset(origin, base), now)
