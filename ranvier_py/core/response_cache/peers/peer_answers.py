"""Stored answers among peers, for one node: composes keys, fetches and invalidations, and takes what peers send.

The node calls `keys.add` and `keys.drop` for what it stores, `ask` for a request that lacks an answer, and
`invalidations.give` for the operator. It sets `fetches.find`, `fetches.arrived` and `invalidations.invalidated`.
Invariant: a request waits for a peer no longer than its deadline (test_peer_answers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple

from ranvier_py.core.mesh.machine import Machine, Senders
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import FLAG, U32, U64
from ranvier_py.core.response_cache.invalidations import Invalidations
from ranvier_py.core.response_cache.peers.answer_fetches import AnswerFetches
from ranvier_py.core.response_cache.peers.answer_keys import KEYS_KIND, AnswerKeyGossip, AnswerKeys
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerCounters, PeerAnswerSettings
from ranvier_py.core.response_cache.peers.invalidation_gossip import InvalidationGossip, Voided

DIGEST_INTERVAL_S = 2.0  # the longest that a lost message stays unnoticed, while nothing else is sent


class AnswerDigest(NamedTuple):
    """The number of the sender's last AnswerKeys, and the digest of what it knows to be void."""

    version: int  # u32
    voided: int  # u64
    wanted: bool  # asks for the receiver's whole AnswerKeys


class AnswerSecrets(NamedTuple):
    """The key that names answers between nodes, and the one that signs invalidations, if there is one."""

    fingerprint_key: bytes
    admin_key: bytes = b""


class PeerAnswers(Machine):
    """Shares stored answers with peers (see the module)."""

    kinds = (KEYS_KIND, Kind("answers", 81, AnswerDigest, (U32, U64, FLAG)), *InvalidationGossip.kinds)
    senders = Senders.MET_FIRST

    def __init__(
        self,
        settings: PeerAnswerSettings,
        secrets: AnswerSecrets,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        round_trip_s: Callable[[int], float] = lambda _: 0.0,
        room: Callable[[float], int] = lambda _: 1 << 30,
    ) -> None:
        self.settings = settings
        self.counters = PeerAnswerCounters()
        self.keys = AnswerKeyGossip(secrets.fingerprint_key, settings, self.counters, outbox, room)
        self.fetches = AnswerFetches(settings, self.counters, outbox, round_trip_s, self.keys.lacks)
        known = Invalidations(settings.ttl_s)
        self.invalidations = InvalidationGossip(known, secrets.admin_key, self.counters, outbox, rng)
        self._outbox = outbox
        self._rng = rng
        self._near: Sequence[Peer] = ()
        self._digest_at = now

    def ask(self, key: bytes, age_max_s: float, now: float) -> int | None:
        """Ask a peer for the answer of this key. Returns the question's number; None if there is no peer to ask."""
        name = self.keys.name_of(key)
        oldest = now - min(age_max_s, self.settings.ttl_s)
        return self.fetches.ask(name, self.keys.holders(name, oldest), age_max_s, now)

    @property
    def wake_at(self) -> float:
        at = 0.0 if self.fetches.hurries else self._digest_at if self._near and self._has_any else inf
        return min(at, self.keys.wake_at, self.invalidations.wake_at)

    def tick(self, now: float) -> None:
        """Send what is due."""
        self.fetches.hurries = False
        self.keys.tick(now)
        self.invalidations.tick(now)
        if self._has_any and now >= self._digest_at:
            self._digest_at = now + DIGEST_INTERVAL_S * self._rng.uniform(0.8, 1.2)
            self.keys.expire(now - self.settings.ttl_s)
            self._send(self._near, wanted=False)

    def met(self, peers: LivePeers, now: float) -> None:
        """Take the peers. Only those whose fingerprints are made like ours share answers."""
        self._near = peers.near
        sharing = peers.sharing if self.settings.shares else ()
        self.keys.peers(sharing)
        self.fetches.peers(sharing, now)
        self.invalidations.met(peers, now)

    def counted(self) -> Mapping[str, Any]:
        return {"peer_answers": self.counters}

    def receive(self, peer: Peer, message: AnswerKeys | AnswerDigest | Voided, now: float) -> None:
        """Take a message about answers from a proved session."""
        if isinstance(message, Voided):
            self.invalidations.receive(peer, message, now)
        elif isinstance(message, AnswerDigest):
            self._compare(peer, message, now)
        elif self.settings.shares and not self.keys.receive(peer, message, now):
            self._send([peer], wanted=True)

    def _compare(self, peer: Peer, message: AnswerDigest, now: float) -> None:
        self.invalidations.compare(peer, message.voided, now)
        if not self._has_any and message.voided:
            self._send([peer], wanted=False)  # it sends us none otherwise: nothing else shows it what we lack
        if not self.settings.shares:
            return
        if message.wanted:
            self.keys.owe(peer.session)
        elif message.version and self.keys.is_behind(peer.session, message.version):
            self._send([peer], wanted=True)

    @property
    def _has_any(self) -> bool:
        """Whether there may be keys or invalidations that peers lack."""
        return self.settings.shares or len(self.invalidations.known) > 0

    def _send(self, peers: Sequence[Peer], *, wanted: bool) -> None:
        message = AnswerDigest(self.keys.version, self.invalidations.known.digest, wanted)
        for peer in peers:
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.ANSWERS, message))
