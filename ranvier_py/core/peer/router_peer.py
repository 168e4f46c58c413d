"""One router among its peers: `RouterPeer` makes the machines of all features, hands them to the mesh and decides
nothing. Each flush turns new routes of the router's table into route updates and changes of its registry into facts.

No request waits for gossip: a request is placed by what the tables hold now and only appends to a queue. A message that
is late or lost costs cache hits, never a request. Its owner drains `changes`, `transitions`, `doubted` and the commands
from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from struct import Struct

from ranvier_py.core.clients.rule_verdicts import VerdictGossip
from ranvier_py.core.engine_cache.peers.reader_claims import ReaderClaimTable
from ranvier_py.core.engine_cache.peers.shared_streams import SharedStreams
from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.identity import first_epoch
from ranvier_py.core.mesh.mesh import Mesh, MeshSettings
from ranvier_py.core.mesh.transfer import Transfers
from ranvier_py.core.mesh.wire.codec import Codec
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.core.mesh.wire.messages import Members, Record
from ranvier_py.core.mesh.wire.seal import Sealer, Subkeys
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerSettings
from ranvier_py.core.response_cache.peers.peer_answers import AnswerSecrets, PeerAnswers
from ranvier_py.core.routing.backend_state.backend_sets import BackendSets
from ranvier_py.core.routing.backend_state.facts import BackendFacts
from ranvier_py.core.routing.backend_state.prefills import PrefillGossip
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backend_state.signed_commands import SignedCommands
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.peers.route_gossip import RouteGossip
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings
from ranvier_py.core.routing.peers.route_sync import RouteSync
from ranvier_py.core.routing.router import Router

MACHINES: Sequence[type[Machine]] = (
    *(RouteGossip, RegistrySync, SignedCommands, ReaderClaimTable),
    *(PrefillGossip, PeerAnswers, Transfers, VerdictGossip, BackendSets),
)
CODEC = Codec(kind for machine in MACHINES for kind in machine.kinds)
"""The protocol: all messages between nodes."""

FLUSH_INTERVAL_S = 0.05
"""A learned route becomes a route update within this time. Equal to the intervals at which a busy node sends route
updates and loads (`RouteGossipSettings.tick_s`, `loads.LOAD_INTERVAL_S`), so that both leave in one tick."""

IDLE_INTERVAL_S = 0.25  # between two flushes while no request is in flight; `_hurry` shortens it when work arrives

STATE_HEAD = Struct("<4sQH")  # magic, epoch, number of floors
STATE_FLOOR = Struct("<QQ")  # of signed commands: digest of a URL, clock
STATE_MAGIC = b"RGS2"


@dataclass(frozen=True, slots=True)
class GossipSettings(MeshSettings):
    """What one node is configured with about itself, its cluster and what it shares.

    `fingerprint_key` keys all fingerprints and is the same on all nodes. `state` is what `RouterPeer.state` returned
    before a restart, or empty. With an empty `admin_key` no commands are shared.
    """

    fingerprint_key: bytes = field(kw_only=True)
    state: bytes = b""
    routes: RouteGossipSettings = field(default_factory=RouteGossipSettings)
    answers: PeerAnswerSettings = field(default_factory=PeerAnswerSettings)
    admin_key: bytes = b""


class RouterPeer(Mesh):
    """One router wired to its peers: everything that it sends to them and receives from them. A node drives it, and so
    does the lab. `woken` is called when `wake_at` moves nearer between two calls of the shell."""

    def __init__(
        self,
        router: Router,
        settings: GossipSettings,
        ring: KeyRing,
        rng: Random,
        now: float,
        *,
        subkeys: Subkeys | None = None,
    ) -> None:
        epoch, floors, remembered = read_state(settings.state)
        me = settings.record(first_epoch(epoch, settings.wall_ms), settings.routes.schema)
        super().__init__(me, settings, Sealer(me.session, ring, settings.label, subkeys), CODEC, rng, now)
        session, outbox = settings.session, self.outbox
        self.router, self.settings = router, settings
        self.facts = BackendFacts(outbox, rng, now, plane_of=self.members.plane_of)
        self.signed_commands = SignedCommands(
            settings.admin_key, outbox, rng, now, wall_ms=settings.wall_ms, floors=floors
        )
        self.backends = RegistrySync(router.registry, self.facts, settings.fingerprint_key)
        router.registry.names.node_name = self.name_of
        self.route_sync = RouteSync(router.routes, self.backends, router.owners, router.checkpoints)
        self.streams = SharedStreams(session, self.backends, router.hasher, outbox, rng, now)
        self.routes = RouteGossip(
            session, self.route_sync, settings.routes, outbox, rng, now, round_trip_s=self.round_trip_s
        )
        secrets = AnswerSecrets(settings.fingerprint_key, settings.admin_key)
        self.answers = PeerAnswers(
            settings.answers, secrets, outbox, rng, now, round_trip_s=self.round_trip_s, room=self.routes.room
        )
        self.verdicts = VerdictGossip(settings.name, outbox, rng, now)
        self.prefills = PrefillGossip(router.holders.speculation, self.backends, outbox, now)
        self.backend_sets = BackendSets(self.backends, outbox, rng, now)
        self.use(
            *(self.routes, self.backends, self.signed_commands),
            *(self.streams, self.streams.claims, self.streams.transfers),
            *(self.answers, self.verdicts, self.prefills, self.backend_sets),
            Transfers(self.routes.transfer, self.streams.transfers.transfer, self.answers.fetches.transfer),
        )
        self.woken: Callable[[], object] = lambda: None
        self._flushed_at = self._flush_at = now
        self.streams.synced = lambda: self.synced
        self.backends.lacked = self.routes.compare_soon
        self.route_sync.copy.asked = self._send_everything
        router.routes.outgoing.collect(self._hurry)
        router.owners.collect(self._hurry)
        router.checkpoints.collect(router.routes.rows.index, self._hurry)
        router.registry.busied = self._hurry
        router.holders.speculation.collect(self._hurry)
        self.members.remember(remembered, now)
        self.settle(now)

    # --- the calls of the shell -------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        return min(self._flush_at, super().wake_at)

    def tick(self, now: float) -> None:
        if now >= self._flush_at:
            self.flush(now)
        super().tick(now)

    def flush(self, now: float) -> None:
        """Pass what the router learned and its registry saw since the last flush to the machines that send it."""
        busy = self.backends.look(now)
        self._flushed_at = now
        self._flush_at = now + (FLUSH_INTERVAL_S if busy else IDLE_INTERVAL_S)
        self._announce(now)

    def leave(self, now: float) -> None:
        self._send_everything(now)
        super().leave(now)

    # --- what it shows, and what the node does with it --------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether this node has the routes that its peers had when it met them, or met no peer to copy from."""
        return self.routes.synced

    def state(self) -> bytes:
        """Return what must survive a restart, at most 80 KiB: the epoch, clocks of commands, and addresses of peers."""
        _, body = CODEC.encode(Members(tuple(self.members.export()), False))
        floors = b"".join([STATE_FLOOR.pack(*floor) for floor in self.signed_commands.floors.items()])
        return STATE_HEAD.pack(STATE_MAGIC, self.me.epoch, len(floors) // STATE_FLOOR.size) + floors + body

    def transitions(self) -> list[Transition]:
        """Return the transitions of our backends that peers caused since the last call; for the log."""
        transitions, self.backends.transitions = self.backends.transitions, []
        return transitions

    def doubted(self) -> list[BackendId]:
        """Return the backends that a peer reports as unhealthy; the caller probes them now."""
        doubted = list(self.backends.doubted)
        self.backends.doubted.clear()
        return doubted

    # --- from the router --------------------------------------------------------------------------------------------

    def _announce(self, now: float, *, everything: bool = False) -> None:
        if self.synced:  # before that, peers would drop our updates if our count of generations is behind theirs
            for update, at in self.route_sync.updates(now, everything=everything):
                self.routes.announce(update, at)

    def _send_everything(self, now: float) -> None:
        """Flush, and send also what still waits for more (`RouteSync`)."""
        self.flush(now)
        self._announce(now, everything=True)

    def _hurry(self) -> None:
        """Flush after FLUSH_INTERVAL_S at the latest: there is something to send."""
        wanted_at = self._flushed_at + FLUSH_INTERVAL_S
        if wanted_at < self._flush_at:
            self._flush_at = wanted_at
            self.woken()


def read_state(data: bytes) -> tuple[int, Mapping[int, int], Sequence[Record]]:
    """Return (epoch, floors of commands, records) from the bytes of `RouterPeer.state`; (0, {}, ()) for others."""
    if len(data) < STATE_HEAD.size:
        return 0, {}, ()
    magic, epoch, floors = STATE_HEAD.unpack_from(data)
    body_at = STATE_HEAD.size + floors * STATE_FLOOR.size
    if magic != STATE_MAGIC or len(data) < body_at:
        return 0, {}, ()
    clocks = dict(STATE_FLOOR.iter_unpack(data[STATE_HEAD.size : body_at]))
    try:
        message = CODEC.decode(CODEC.number_of[Members], data[body_at:])
    except BadFrame:
        return epoch, clocks, ()
    return epoch, clocks, message.records
