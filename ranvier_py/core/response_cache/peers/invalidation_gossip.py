"""Invalidations of stored answers: they reach all nodes at once, and again those that were away (`join_table`).

Instead of repeating all, peers send each other digests: who has another is sent all of ours, and sends its own,
ever more seldom while both digests stay: one of the two may have merged its invalidations, or refuse the other's.
Rules: where there is an admin key it signs invalidations, and no others are taken. It signs what is void, not since:
replaying one costs hits. The age from which answers are void is sent rounded down: the next node voids no less.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import inf
from random import Random
from struct import pack
from typing import NamedTuple

from ranvier_py.core.mesh.join_table import JoinTable
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import SIGNATURE_BYTES, parts_field
from ranvier_py.core.mesh.wire.frame import bad, text
from ranvier_py.core.pauses import doubled
from ranvier_py.core.response_cache.invalidations import GIVER_BITS, Invalidations, VoidMark, VoidScope
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerCounters

RESEND_S = 2.0  # the shortest time between two lists to one peer whose digest differs; doubled while it stays the same
RESEND_MAX_S = 60.0
OLDER_MS_MAX = (1 << 32) - 1
SIGNED = b"voided answers"
VOIDED_MAX = 128  # in a message
VOIDED_MODEL_BYTES_MAX = 1024
TENANT_BYTES = 16


class VoidedAnswers(NamedTuple):
    """An invalidation, new or passed on: answers of this model and tenant that are older than `older_ms` are void."""

    number: int  # u64, not 0: who gave it, and a count; of one scope the last of each giver holds
    older_ms: int  # u32, counted from when this message was sent
    model: str  # at most 1024 bytes; empty: any
    tenant: bytes  # 16, or empty: any
    signature: bytes  # 32: HMAC-SHA256 under the admin key; or empty


class Voided(NamedTuple):
    invalidations: tuple[VoidedAnswers, ...]


def read_voided(number: int, older_ms: int, model: bytes, tenant: bytes, signature: bytes) -> VoidedAnswers:
    if len(tenant) not in (0, TENANT_BYTES) or len(signature) not in (0, SIGNATURE_BYTES):
        bad("tenant or signature of an invalidation")
    if not number:
        bad("an invalidation without a number")
    return VoidedAnswers(number, older_ms, text(model, VOIDED_MODEL_BYTES_MAX), tenant, signature)


class SentList(NamedTuple):
    """The last list of all that counts that one peer was sent."""

    at: float
    digests: tuple[int, int]  # the peer's and ours
    times: int  # such lists since either digest changed


class InvalidationGossip(JoinTable[int, VoidedAnswers]):
    """Sends and receives invalidations. `invalidated` is called with each that is new here, from operator or peer."""

    kinds = (Kind("answers", 85, Voided, (parts_field("invalidation", "Q I *H *B *B", VOIDED_MAX, read_voided),)),)
    ROWS_MAX = VOIDED_MAX
    REPEAT_S = inf

    def __init__(
        self, known: Invalidations, admin_key: bytes, counters: PeerAnswerCounters, outbox: list[Outgoing], rng: Random
    ) -> None:
        super().__init__(outbox, rng, 0.0)
        self.known = known
        self.invalidated: Callable[[VoidMark], object] = lambda _: None
        self._key = admin_key
        self._counters = counters
        self._giver = rng.getrandbits(GIVER_BITS) or 1
        self._listed: dict[int, SentList] = {}  # by the peer's session

    def give(self, scope: VoidScope, before: float, now: float) -> None:
        """Take an invalidation that the operator gave here, and send it."""
        self._took(self.known.give(scope, before, now, self._giver))

    def receive(self, _peer: Peer, message: Voided, now: float) -> None:
        for one in message.invalidations:
            scope = VoidScope(one.model, one.tenant)
            if self._key and not hmac.compare_digest(signature_of(self._key, one.number, scope), one.signature):
                self._counters.invalidations_refused += 1
                continue
            taken = self.known.take(VoidMark(one.number, scope, now - one.older_ms / 1000, one.signature), now)
            self._counters.invalidations_received += taken is not None
            self._took(taken)

    def compare(self, peer: Peer, digest: int, now: float) -> None:
        """Send a peer all that count if the digest of what it knows differs from ours."""
        digests = digest, self.known.digest
        last = self._listed.get(peer.session) or SentList(-inf, digests, 0)
        times = last.times if digests == last.digests else 0
        if digest != self.known.digest and now - last.at >= doubled(RESEND_S, max(0, times - 1), RESEND_MAX_S):
            self._listed[peer.session] = SentList(now, digests, times + 1)
            self._send([peer], self._rows(None, now))

    def met(self, peers: LivePeers, now: float) -> None:
        there = {peer.session for peer in peers.near}
        self._listed = {session: last for session, last in self._listed.items() if session in there}
        super().met(peers, now)

    def tick(self, now: float) -> None:
        super().tick(now)
        self.known.expire(now)
        self._counters.invalidations = len(self.known)
        self._counters.invalidations_folded = self.known.folded

    def _took(self, new: VoidMark | None) -> None:
        if new is not None:
            self._changed[new.number] = None
            self.invalidated(new)

    def _rows(self, keys: dict[int, None] | None, now: float) -> Sequence[VoidedAnswers]:
        return [self._row(one, now) for one in self.known if keys is None or one.number in keys]

    def _message(self, rows: Sequence[VoidedAnswers]) -> Voided:
        return Voided(tuple(rows))

    def _row(self, one: VoidMark, now: float) -> VoidedAnswers:
        older_ms = int(min(OLDER_MS_MAX, max(0.0, 1000 * (now - one.before))))
        signature = one.signature or (signature_of(self._key, one.number, one.scope) if self._key else b"")
        return VoidedAnswers(one.number, older_ms, one.scope.model, one.scope.tenant, signature)


def signature_of(key: bytes, number: int, scope: VoidScope) -> bytes:
    """Return the HMAC-SHA256 over number and scope of an invalidation, each part with its length."""
    parts = [SIGNED, pack("<Q", number), scope.model.encode(), scope.tenant]
    return hmac.new(key, b"".join(pack("<I", len(part)) + part for part in parts), sha256).digest()
