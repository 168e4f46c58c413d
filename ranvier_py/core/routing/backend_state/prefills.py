"""Long prefills, shared while they run, so that peers do not have another engine compute the same prompt.

Rules: a prefill of SHARED_TOKENS_MIN tokens or more is sent when it begins and when it ends; a peer makes the claims
of a request of its own. One that has ended stays KEPT_S longer, since the routes that replace it travel separately;
it goes if no end comes within LIFE_S, or at once if its process is gone, because another backend may get the same id.
Nothing is sent twice: a lost message costs a prefill. Bounds: FROM_ONE_MAX claims of one peer,
PREFILL_FINGERPRINTS_MAX prefixes of a prompt, evenly spread; half of the room is left to our own requests.
Invariant: when no request is in flight anywhere, no node counts one (test_prefills.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple

import numpy as np

from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.machine import Machine, Senders
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import column_field, parts_field
from ranvier_py.core.mesh.wire.frame import bad, column
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.speculation import Prefill, Speculation

INTERVAL_S = 0.05
"""The shortest time between two messages, as for loads. A prefill that begins and ends within it is not sent at all."""

LIFE_S = 30.0
KEPT_S = 0.25  # some ticks of routes
FROM_ONE_MAX = 128


PREFILLS_MAX = 128  # in a message: 130 KiB at most
PREFILL_FINGERPRINTS_MAX = 128
ENDED_MAX = 4096  # in a message


class SharedPrefill(NamedTuple):
    """A long prompt that an engine computes for the sender."""

    number: int  # u32: the sender's number of it
    backend: int  # key, u64
    generation: int  # u8: low bits of the shared generation
    fingerprints: bytes  # u64 each, little-endian


class Prefills(NamedTuple):
    """The prefills that began and ended since the sender's last message."""

    begun: tuple[SharedPrefill, ...]
    ended: bytes  # u32 each: numbers


def read_prefill(number: int, backend: int, generation: int, fingerprints: bytes) -> SharedPrefill:
    if not fingerprints:
        bad("a prefill without a prefix")
    return SharedPrefill(number, backend, generation, column(fingerprints, 8, PREFILL_FINGERPRINTS_MAX))


@dataclass(slots=True)
class ReceivedPrefill:
    """A peer's prefill. Its prefixes are claimed here `until` then: KEPT_S after its end, since the routes that replace
    it travel separately, or LIFE_S; and while its process lives, since another backend may get the id."""

    backend: BackendId
    generation: int
    claimed: Sequence[int]
    until: float


class PrefillGossip(Machine):
    """Sends the long prefills of one node, and claims the prefixes of those of its peers."""

    kinds = (
        Kind(
            "backends",
            52,
            Prefills,
            (parts_field("prefill", "I Q B *H", PREFILLS_MAX, read_prefill), column_field(4, ENDED_MAX)),
        ),
    )
    senders = Senders.SHARING

    def __init__(self, speculation: Speculation, backends: RegistrySync, outbox: list[Outgoing], now: float) -> None:
        self._speculation = speculation
        self._backends = backends
        self._outbox = outbox
        self._peers: Sequence[Peer] = ()
        self._received: dict[int, dict[int, ReceivedPrefill]] = {}  # by session and number
        self._expire_at = inf
        self._gone = (0, 0)  # numbers of backends removed and restarted at the last tick
        self._sent_at = now

    @property
    def wake_at(self) -> float:
        waits = self._peers and (self._speculation.begun or self._speculation.ended)
        return min(self._expire_at, self._sent_at + INTERVAL_S) if waits else self._expire_at

    def met(self, peers: LivePeers, now: float) -> None:  # noqa: ARG002  # as of all machines
        """Take the peers whose fingerprints are made like ours. The claims of peers that are gone are dropped."""
        self._peers = peers.sharing
        there = {peer.session for peer in peers.sharing}
        for session in [session for session in self._received if session not in there]:
            self._forget(session)

    def _forget(self, session: int) -> None:
        for received in self._received.pop(session, {}).values():
            self._speculation.remove(received.claimed, received.backend)

    def tick(self, now: float) -> None:
        own = self._speculation
        if (own.begun or own.ended) and now >= self._sent_at + INTERVAL_S:
            self._send(now)
        counters = self._backends.registry.counters
        gone = (counters.backends_removed, counters.backend_restarts)
        if now >= self._expire_at or gone != self._gone:
            self._gone = gone
            self._expire(now)

    def receive(self, peer: Peer, message: Prefills, now: float) -> None:
        known, counters = self._received.setdefault(peer.session, {}), self._speculation.counters
        room = self._speculation.capacity // 2
        for number, key, generation, fingerprints in message.begun:
            holder = self._backends.holder(key, generation, now)
            if holder is None or number in known or len(known) >= FROM_ONE_MAX or counters.fingerprints >= room:
                counters.void += 1
                continue
            claimed = self._speculation.add(np.frombuffer(fingerprints, "<u8").tolist(), holder[0])
            if claimed:
                known[number] = ReceivedPrefill(*holder, claimed, now + LIFE_S)
                counters.received += 1
        for number in np.frombuffer(message.ended, "<u4").tolist():
            if number in known:
                known[number].until = min(known[number].until, now + KEPT_S)
        self._expire_at = min([self._expire_at, *[received.until for received in known.values()]])

    def _send(self, now: float) -> None:
        own, self._sent_at = self._speculation, now
        begun: list[SharedPrefill] = []
        for number, prefill in islice(own.begun.items(), PREFILLS_MAX):
            name = self._backends.name_of(prefill.backend, prefill.generation)
            if name is not None:
                begun.append(SharedPrefill(number, *name, spread(prefill)))
        message = Prefills(tuple(begun), np.array(own.ended, "<u4").tobytes())
        own.counters.unshared += max(0, len(own.begun) - PREFILLS_MAX) if self._peers else 0
        own.begun.clear()
        own.ended.clear()
        own.counters.shared += len(begun) if self._peers else 0
        for peer in self._peers:
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))

    def _expire(self, now: float) -> None:
        least = inf
        for known in self._received.values():
            for number in [number for number, received in known.items() if self._is_over(received, now)]:
                received = known.pop(number)
                self._speculation.remove(received.claimed, received.backend)
            least = min([least, *[received.until for received in known.values()]])
        self._expire_at = least

    def _is_over(self, received: ReceivedPrefill, now: float) -> bool:
        backend = self._backends.registry.ids.current(received.backend)
        return received.until <= now or backend is None or backend.generation != received.generation


def spread(prefill: Prefill) -> bytes:
    """Return a prefill's fingerprints, u64 each, evenly thinned out until they fit, the deepest included."""
    step = -(-len(prefill.fingerprints) // PREFILL_FINGERPRINTS_MAX)
    return np.array(prefill.fingerprints[::step], "<u8").tobytes()
