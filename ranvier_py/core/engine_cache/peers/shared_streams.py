"""Event streams among peers: keys of engines, who subscribes to which stream, and snapshots to and from peers.

Out: how well this node knows the streams that it receives becomes its reports, which gossip spreads. In: the reports of
others, and which members live, go to `Ownership`, which decides whether this node begins, reads or ends a stream. No
node asks another for permission, and a node that knows no others reads everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.peer_access import SnapshotAnswer, StreamSharer
from ranvier_py.core.engine_cache.peers.ownership import STATE_OF, Ownership, ReaderState
from ranvier_py.core.engine_cache.peers.reader_claims import ReaderClaim, ReaderClaimTable
from ranvier_py.core.engine_cache.peers.snapshot_transfer import SnapshotTransfers, Subject
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.metrics import Sample
from ranvier_py.core.prompts.fingerprint import TokenHasher
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync

LEVEL_OF = {state: level for level, state in STATE_OF.items()}


class SharedStreams(Machine, StreamSharer):
    """See the module. `moved` is called when the streams change that this node is to subscribe to or to read. `synced`
    says whether this node knows its peers. `claims` and `transfers` are machines of their own."""

    def __init__(
        self, session: int, backends: RegistrySync, hasher: TokenHasher, outbox: list[Outgoing], rng: Random, now: float
    ) -> None:
        super().__init__()
        self.moved: Callable[[], object] = lambda: None
        self.synced: Callable[[], bool] = lambda: True
        self.live: Sequence[int] = ()  # all members that could read a stream, but us
        self.claims = ReaderClaimTable(session, outbox, rng, now, self.follow)
        self.transfers = SnapshotTransfers(hasher, outbox, rng, self._snapshot)
        self.ownership = Ownership(session, now)
        self._backends = backends
        self._keys: dict[BackendId, int] = {}
        self._ids: dict[int, BackendId] = {}
        self._wanted: Mapping[BackendId, Sequence[int]] = {}
        self._followed: Sequence[int] = ()  # of `live`

    def streams(self, backends: Mapping[BackendId, Sequence[int]], now: float) -> None:
        self._wanted = backends
        self._assign_keys(now)

    def subscribes(self, backend: BackendId) -> bool:
        return self.ownership.subscribes(self._keys.get(backend, 0))

    def reads(self, backend: BackendId) -> bool:
        return self.ownership.reads(self._keys.get(backend, 0))

    def report(self, backend: BackendId, level: Level, now: float) -> None:
        if self.subscribes(backend):
            self._reach(self._keys[backend], STATE_OF[level], now)

    def unable(self, backend: BackendId, is_unable: bool, now: float) -> None:
        key = self._keys.get(backend)
        if key is not None and is_unable is not self.ownership.is_unable(key):
            self._reach(key, ReaderState.UNABLE if is_unable else ReaderState.NONE, now)

    def ask(self, backend: BackendId, rank: int, ask: int, now: float) -> None:
        key = self._keys.get(backend)
        if key is None:
            super().ask(backend, rank, ask, now)
        else:
            self.transfers.ask(Subject(key, rank), ask, self.ownership.snapshot_sources(key), now)

    def snapshots(self) -> list[SnapshotAnswer]:
        answers = super().snapshots()
        taken, self.transfers.taken = self.transfers.taken, []
        for (key, rank), ask, snapshot in taken:
            if key in self._ids:
                answers.append(SnapshotAnswer(self._ids[key], rank, ask, snapshot))
        return answers

    def level(self, backend: BackendId) -> Level | None:
        subscribers = self.ownership.subscribers(self._keys.get(backend, 0))
        return LEVEL_OF[subscribers.states[subscribers.reader]] if subscribers and subscribers.reader else None

    @property
    def wake_at(self) -> float:
        """When `follow` must be called next."""
        return self.ownership.wake_at

    def follow(self, now: float) -> None:
        """Take in reports and members, begin and end what is due; cheap if idle."""
        claims, ownership = self.claims, self.ownership
        if self.live is not self._followed:
            self._followed = self.live
            ownership.members(self._followed, now)
            self._receive(claims.known.values(), now)
        if claims.new:
            new, claims.new = claims.new, []
            self._receive(new, now)
        if self.synced():
            ownership.met(now)
        if ownership.wake_at <= now:
            if ownership.tick(now):
                self.moved()
            for key, state in ownership.mine().items():
                claims.report(key, state)

    def met(self, peers: LivePeers, now: float) -> None:
        self.live = peers.able
        self.follow(now)

    def tick(self, now: float) -> None:
        self.follow(now)

    def view(self) -> dict[str, Any]:
        """Return for each backend id its reader, standby and subscribers and how well each of them knows the stream."""
        shown: dict[str, Any] = {}
        for backend, key in self._keys.items():
            found = self.ownership.subscribers(key)
            if found is not None:
                shown[str(backend)] = {
                    "reader": f"{found.reader:016x}" if found.reader else None,
                    "standby": f"{found.standby:016x}" if found.standby else None,
                    "subscribers": {f"{member:016x}": state.name.lower() for member, state in found.states.items()},
                    "ours": self.ownership.reads(key),
                }
        return {"streams": shown, "handovers": self.ownership.handovers}

    def samples(self) -> Iterator[Sample]:
        reading = sum([self.ownership.reads(key) for key in self._keys.values()])
        subscribed = sum([self.ownership.subscribes(key) for key in self._keys.values()])
        yield Sample("streams_read", "gauge", "Streams of KV events that this node reads.", reading)
        stood_by = "Streams of KV events that this node would read if their reader died."
        yield Sample("streams_stood_by", "gauge", stood_by, subscribed - reading)
        moved = "Streams of KV events handed over to peers or taken over."
        yield Sample("stream_handovers", "counter", moved, self.ownership.handovers)

    def _receive(self, claims: Iterable[ReaderClaim], now: float) -> None:
        live = dict.fromkeys(self._followed)
        for claim in claims:
            if claim.member in live:
                self.ownership.reported(claim.member, claim.backend, ReaderState(claim.state), now)

    def _assign_keys(self, now: float) -> None:
        keys = {backend: key for backend in self._wanted if (key := self._backends.key_of(backend)) is not None}
        if keys == self._keys:
            return
        named = dict.fromkeys(keys.values())
        gone = [key for key in self._ids if key not in named]
        self._keys, self._ids = keys, {key: backend for backend, key in keys.items()}
        for key in gone:
            self.claims.report(key, ReaderState.NONE)
        if self.ownership.backends(self._ids, now):
            self.moved()
        self._receive(self.claims.known.values(), now)

    def _reach(self, key: int, state: ReaderState, now: float) -> None:
        self.ownership.reached(key, state, now)
        self.claims.report(key, state)

    def _snapshot(self, subject: Subject) -> SnapshotWriter | None:
        backend = self._ids.get(subject.backend)
        return self.give(backend, subject.rank) if backend is not None else None
