"""Whether peers place requests on the same backends: each node compares its set of backends with those of its peers.

Rules: a node sends number and digest of its backends' keys (`registry_sync`) when they change, to newcomers, and every
REPEAT_S. A peer whose digest has differed for ASK_S is asked for its keys, so that what it lacks can be named; after
DIFFERS_S the difference is shown: before, an operator may be adding a backend to node after node. Nobody learns a URL
that it lacks. With it goes a digest of the settings that place requests, of which only that they differ is shown.
Bounds: one set for each near peer, with BACKENDS_MAX keys if it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import inf
from operator import xor
from random import Random
from typing import Any, NamedTuple

import numpy as np

from ranvier_py.core.mesh.machine import Machine, Senders
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import FLAG, U32, U64, column_field
from ranvier_py.core.metrics import gauge
from ranvier_py.core.routing.backend_state.loads import BACKENDS_MAX
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync

REPEAT_S = 30.0  # by so much a lost message delays what is shown
ASK_S = 15.0
DIFFERS_S = 30.0
NAMES_MAX = 8  # of backends in a sentence
SETTINGS = U32._replace(since=5)  # the first nodes of that version send none
U64_COLUMN = "<u8"


class BackendSet(NamedTuple):
    """The backends of the sender."""

    backends: int  # u32
    digest: int  # u64: exclusive or of their keys
    wanted: bool  # asks for the receiver's keys
    keys: bytes = b""  # u64 each, little-endian, for a receiver that asked
    settings: int = 0  # u32: digest of what decides where requests go; 0: it shows none


@dataclass(slots=True)
class PeerSet:
    """A peer's set, since when it differs from ours (inf: it does not), and when it was last asked for its keys.
    `unlike_since`: as `since`, of its settings."""

    set: BackendSet
    since: float = inf
    asked_at: float = -inf
    unlike_since: float = inf

    @property
    def is_known(self) -> bool:
        """Whether its keys have come."""
        return len(self.set.keys) == 8 * self.set.backends


@dataclass(slots=True)
class BackendSetCounters:
    differing: int = gauge("Peers whose set of backends has differed from this node's for more than half a minute.")


class BackendSets(Machine):
    """Sends this node's set, and compares those of its peers with it. `differing`: by session, in words how; `unlike`:
    whose settings are others. `settings_of`: returns the digest of ours, or 0."""

    kinds = (Kind("backends", 54, BackendSet, (U32, U64, FLAG, column_field(8, BACKENDS_MAX), SETTINGS), since=5),)
    senders = Senders.SHARING
    wake_at = 0.0  # not computed when read, which is after each packet

    def __init__(self, backends: RegistrySync, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self.counters = BackendSetCounters()
        self.differing: Mapping[int, str] = {}
        self.unlike: frozenset[int] = frozenset()
        self.settings_of: Callable[[], int] = lambda: 0
        self._backends = backends
        self._outbox = outbox
        self._rng = rng
        self._peers: dict[int, Peer] = {}
        self._own: Mapping[int, object] = {}
        self._digest = self._settings = 0
        self._sets: dict[int, PeerSet] = {}
        self._repeat_at = now + rng.uniform(0, REPEAT_S)

    def met(self, peers: LivePeers, now: float) -> None:
        before, self._peers = self._peers, {peer.session: peer for peer in peers.sharing}
        self._sets = {session: each for session, each in self._sets.items() if session in self._peers}
        self._send([peer for peer in peers.sharing if peer.session not in before])
        self.wake_at = now

    def tick(self, now: float) -> None:
        changed = self._own is not self._backends.own
        if changed:
            self._own = self._backends.own
            self._digest = reduce(xor, self._own, 0)
        if changed or now >= self._repeat_at:
            self._repeat_at = now + REPEAT_S * self._rng.uniform(0.8, 1.2)
            self._settings = self.settings_of()
            self._send(self._peers.values())
        if changed or now >= self.wake_at:
            self._look(now)

    def receive(self, peer: Peer, message: BackendSet, now: float) -> None:
        known = self._sets.get(peer.session)
        if known is not None and message.digest == known.set.digest and not message.keys:
            message = message._replace(keys=known.set.keys)
        if peer.session in self._peers and (known is None or message._replace(wanted=known.set.wanted) != known.set):
            since = [known.since, known.asked_at, known.unlike_since] if known is not None else []
            self._sets[peer.session] = PeerSet(message, *since)
            self.wake_at = now
        if message.wanted:
            self._send([peer], keys=np.fromiter(self._own, U64_COLUMN, len(self._own)).tobytes())

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_backend_sets": self.counters}

    def view(self) -> dict[str, Any]:
        name = self._backends.registry.names.node_name
        return {"backend_sets": {"differing": {name(session): text for session, text in self.differing.items()}}}

    def _look(self, now: float) -> None:
        """Compare all sets, ask peers whose set differs for their keys, and show what differs for long."""
        dues, differing, unlike = [self._repeat_at], {}, set[int]()
        for session, known in self._sets.items():
            alike = known.set.settings == self._settings or 0 in (known.set.settings, self._settings)
            known.unlike_since = inf if alike else min(known.unlike_since, now)
            dues.append(known.unlike_since + DIFFERS_S)
            if now >= known.unlike_since + DIFFERS_S:
                unlike.add(session)
            if known.set.digest == self._digest:
                known.since, known.asked_at = inf, -inf
                continue
            known.since = min(known.since, now)
            if not known.is_known and now >= max(known.since, known.asked_at) + ASK_S:
                known.asked_at = now
                self._send([self._peers[session]], wanted=True)
            if now >= known.since + DIFFERS_S:
                differing[session] = self._difference(known)
            dues += [known.since + DIFFERS_S, max(known.since, known.asked_at) + ASK_S]
        self.wake_at = min(at for at in dues if at > now)
        self.differing, self.unlike = differing, frozenset(unlike)
        self.counters.differing = len(differing)

    def _difference(self, peer: PeerSet) -> str:
        """Say how a peer's set differs from ours."""
        text = f"{peer.set.backends} there, {len(self._own)} here"
        if not peer.is_known:
            return text
        keys = dict.fromkeys(np.frombuffer(peer.set.keys, U64_COLUMN).tolist())
        found = [self._backends.find(key) for key in self._own if key not in keys]
        lacks = [backend.name for backend in found if backend is not None]
        more = f" and {len(lacks) - NAMES_MAX} more" if len(lacks) > NAMES_MAX else ""
        besides = sum(key not in self._own for key in keys)
        return f"{text}; lacks {', '.join(lacks[:NAMES_MAX]) or 'none'}{more}; has {besides} that are not here"

    def _send(self, peers: Iterable[Peer], *, wanted: bool = False, keys: bytes = b"") -> None:
        message = BackendSet(len(self._own), self._digest, wanted, keys, self._settings)
        for peer in peers:
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
