"""One router among its peers: `RouterPeer` makes the machines of all features, hands them to the mesh and decides
nothing. Each flush turns new routes of the router's table into route updates and changes of its registry into facts.

No request waits for gossip: a request is placed by what the tables hold now and only appends to a queue. A message that
is late or lost costs cache hits, never a request. Its owner drains `changes`, `transitions`, `doubted` and the commands
from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from random import Random
from struct import Struct
from typing import NamedTuple, get_type_hints

from ranvier_py.core.access.limits.limit_gossip import LimitGossip
from ranvier_py.core.access.revocations import Revocations
from ranvier_py.core.clients.rule_verdicts import VerdictGossip
from ranvier_py.core.engine_cache.peers.reader_claims import ReaderClaimTable
from ranvier_py.core.engine_cache.peers.shared_streams import SharedStreams
from ranvier_py.core.engine_cache.peers.snapshot_transfer import SnapshotTransfers
from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.machine import Machine, Machines
from ranvier_py.core.mesh.membership.own_record import first_epoch
from ranvier_py.core.mesh.mesh import Mesh, MeshSettings
from ranvier_py.core.mesh.transfer import Transfers
from ranvier_py.core.mesh.wire.codec import Codec, Kind
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.core.mesh.wire.messages import Members, Record
from ranvier_py.core.mesh.wire.seal import Sealer, Subkeys
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerSettings
from ranvier_py.core.response_cache.peers.peer_answers import AnswerSecrets, PeerAnswers
from ranvier_py.core.routing.backend_state.backend_lists import BackendLists
from ranvier_py.core.routing.backend_state.backend_sets import BackendSets
from ranvier_py.core.routing.backend_state.facts import BackendFacts
from ranvier_py.core.routing.backend_state.order_notes import Carrier, Order, OrderNotes
from ranvier_py.core.routing.backend_state.prefills import PrefillGossip
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backend_state.signed_commands import SignedCommands, WorkerCommands
from ranvier_py.core.routing.backend_state.status_reports import StatusReports
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.peers.route_gossip import RouteGossip
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings
from ranvier_py.core.routing.peers.route_sync import RouteSync
from ranvier_py.core.routing.router import Router

FLUSH_INTERVAL_S = 0.05
"""A learned route becomes a route update within this time. Equal to the intervals at which a busy node sends route
updates and loads (`RouteGossipSettings.tick_s`, `loads.LOAD_INTERVAL_S`), so that both leave in one tick."""

IDLE_INTERVAL_S = 0.25  # between two flushes while no request is in flight; `hurry` shortens it when work arrives

STATE_HEAD = Struct("<4sQH")  # magic, epoch, number of floors
STATE_FLOOR = Struct("<QQ")  # of signed commands: digest of a URL, clock
STATE_LENGTH = Struct("<H")  # of the revocations of keys that follow
STATE_MAGIC, STATE_MAGIC_BEFORE = b"RGS3", b"RGS2"
"""What an earlier version wrote has no revocations."""


@dataclass(frozen=True, slots=True)
class GossipSettings(MeshSettings):
    """What one node is configured with about itself, its cluster and what it shares.

    `fingerprint_key` keys all fingerprints and is the same on all nodes. `state` is what `RouterPeer.state` returned
    before a restart, or empty. With an empty `admin_key` no commands are shared. `worker_key`: of the workers of one
    node, and `worker_ports`: where these gossip.
    """

    fingerprint_key: bytes = field(kw_only=True)
    state: bytes = b""
    routes: RouteGossipSettings = field(default_factory=RouteGossipSettings)
    answers: PeerAnswerSettings = field(default_factory=PeerAnswerSettings)
    admin_key: bytes = b""
    worker_key: bytes = b""
    worker_ports: range = range(0)


@dataclass(frozen=True, slots=True)
class Features:
    """What one router shares with its peers. Each field that is a machine is called by the mesh, in this order."""

    router: Router
    route_sync: RouteSync
    routes: RouteGossip
    backends: RegistrySync
    order_notes: OrderNotes
    backend_lists: BackendLists
    signed_commands: SignedCommands
    worker_commands: WorkerCommands
    revocations: Revocations
    streams: SharedStreams
    reader_claims: ReaderClaimTable
    snapshots: SnapshotTransfers
    answers: PeerAnswers
    verdicts: VerdictGossip
    prefills: PrefillGossip
    backend_sets: BackendSets
    limits: LimitGossip
    status_reports: StatusReports
    transfers: Transfers

    @property
    def facts(self) -> BackendFacts:
        """What all nodes know of backends; a machine that `backends` calls."""
        return self.backends.facts

    def machines(self) -> Sequence[Machine]:
        shared = [getattr(self, each.name) for each in fields(self)]
        return [each for each in shared if isinstance(each, Machine)]


def kinds_of(features: type[Features]) -> Iterator[Kind]:
    """Yield the messages that these features declare."""
    for made in get_type_hints(features).values():
        if issubclass(made, Machine):
            yield from made.kinds


CODEC = Codec(kinds_of(Features))
"""The protocol: all messages between nodes."""


class FlushTimes:
    """When a node flushes: after IDLE_INTERVAL_S, but after FLUSH_INTERVAL_S if it is busy, or once it has something to
    send. `woken` is called when that moves nearer between two calls of the shell."""

    def __init__(self, now: float) -> None:
        self.last = self.next = now
        self.woken: Callable[[], object] = lambda: None

    def flushed(self, now: float, *, busy: bool) -> None:
        self.last = now
        self.next = now + (FLUSH_INTERVAL_S if busy else IDLE_INTERVAL_S)

    def hurry(self) -> None:
        """Note that there is something to send."""
        wanted_at = self.last + FLUSH_INTERVAL_S
        if wanted_at < self.next:
            self.next = wanted_at
            self.woken()


class RouterPeer(Mesh):
    """One router wired to its peers: everything that it sends to them and receives from them. A node drives it, and so
    does the lab."""

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
        epoch, floors, remembered, revoked = read_state(settings.state)
        me = settings.record(first_epoch(epoch, settings.wall_ms), settings.routes.schema)
        super().__init__(me, settings, Sealer(me.session, ring, settings.label, subkeys), CODEC, rng, now)
        self.features = features_of(self, router, settings, rng, now, floors=floors, revoked=revoked)
        self.machines = Machines(self.features.machines())
        self.flushes = FlushTimes(now)
        self._wire()
        self.members.remember(remembered, now)
        self.settle(now)

    def _wire(self) -> None:
        """Let the features, and the router's tables, call each other and this node."""
        features, router, hurry = self.features, self.features.router, self.flushes.hurry
        router.registry.names.node_name = self.name_of
        features.streams.synced = lambda: self.synced
        features.backends.lacked = features.routes.compare_soon
        features.route_sync.copy.asked = self._send_everything
        router.routes.outgoing.collect(hurry)
        router.owners.collect(hurry)
        router.checkpoints.collect(router.routes.rows.index, hurry)
        router.registry.busied = hurry
        router.holders.speculation.collect(hurry)

    # --- the calls of the shell -------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        return min(self.flushes.next, super().wake_at)

    def tick(self, now: float) -> None:
        if now >= self.flushes.next:
            self.flush(now)
        super().tick(now)

    def flush(self, now: float) -> None:
        """Pass what the router learned and its registry saw since the last flush to the machines that send it."""
        self.flushes.flushed(now, busy=self.features.backends.look(now))
        self._announce(now)

    def leave(self, now: float) -> None:
        self._send_everything(now)
        super().leave(now)

    # --- what it shows, and what the node does with it --------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether this node has the routes that its peers had when it met them, or met no peer to copy from."""
        return self.features.routes.synced

    def state(self) -> bytes:
        """Return what must survive a restart, at most 112 KiB: the epoch, clocks of commands, revocations of keys, and
        addresses of peers."""
        _, body = CODEC.encode(Members(tuple(self.members.export()), False))
        floors = b"".join([STATE_FLOOR.pack(*floor) for floor in self.features.signed_commands.floors.items()])
        head = STATE_HEAD.pack(STATE_MAGIC, self.me.epoch, len(floors) // STATE_FLOOR.size)
        revoked = self.features.revocations.stored()
        return head + floors + STATE_LENGTH.pack(len(revoked)) + revoked + body

    def transitions(self) -> list[Transition]:
        """Return the transitions of our backends that peers caused since the last call; for the log."""
        backends = self.features.backends
        transitions, backends.transitions = backends.transitions, []
        return transitions

    def doubted(self) -> list[BackendId]:
        """Return the backends that a peer reports as unhealthy; the caller probes them now."""
        doubted = list(self.features.backends.doubted)
        self.features.backends.doubted.clear()
        return doubted

    # --- from the router --------------------------------------------------------------------------------------------

    def _announce(self, now: float, *, everything: bool = False) -> None:
        if self.synced:  # before that, peers would drop our updates if our count of generations is behind theirs
            for update, at in self.features.route_sync.updates(now, everything=everything):
                self.features.routes.announce(update, at)

    def _send_everything(self, now: float) -> None:
        """Flush, and send also what still waits for more (`RouteSync`)."""
        self.flush(now)
        self._announce(now, everything=True)


def features_of(
    peer: Mesh,
    router: Router,
    settings: GossipSettings,
    rng: Random,
    now: float,
    *,
    floors: Mapping[int, int],
    revoked: bytes,
) -> Features:
    """Make the features of a node. `floors`: of signed commands, and `revoked`: keys, from before a restart."""
    session, outbox, round_trip_s = settings.session, peer.outbox, peer.round_trip_s
    facts = BackendFacts(outbox, rng, now, plane_of=peer.members.plane_of)
    commands = SignedCommands(settings.admin_key, outbox, rng, now, wall_ms=settings.wall_ms, floors=floors)
    wall_ms, admin_key = settings.wall_ms, settings.admin_key
    revocations = Revocations(admin_key, outbox, rng, now, wall_ms=wall_ms, stored=revoked)
    workers = WorkerCommands(
        *(settings.worker_key, outbox, Random(session), now),  # noqa: S311  # its own draws, for times alone: no seed's run moves
        is_worker=lambda address: address[0] == peer.me.host and address[1] in settings.worker_ports,
        wall_ms=wall_ms,
    )
    backends = RegistrySync(router.registry, facts, settings.fingerprint_key)
    notes = OrderNotes(outbox, partial(followed, backends, commands, workers), peer.name_of)
    backends.drained_by = partial(notes.ordered_by, Carrier.DRAIN)
    route_sync = RouteSync(router.routes, backends, router.owners, router.checkpoints)
    streams = SharedStreams(session, backends, router.hasher, outbox, rng, now)
    routes = RouteGossip(session, route_sync, settings.routes, outbox, rng, now, round_trip_s=round_trip_s)
    secrets = AnswerSecrets(settings.fingerprint_key, settings.admin_key)
    answers = PeerAnswers(settings.answers, secrets, outbox, rng, now, round_trip_s=round_trip_s, room=routes.room)
    return Features(
        router=router,
        route_sync=route_sync,
        routes=routes,
        backends=backends,
        order_notes=notes,
        backend_lists=BackendLists(backends, outbox),
        signed_commands=commands,
        worker_commands=workers,
        revocations=revocations,
        streams=streams,
        reader_claims=streams.claims,
        snapshots=streams.transfers,
        answers=answers,
        verdicts=VerdictGossip(settings.name, outbox, rng, now),
        prefills=PrefillGossip(router.holders.speculation, backends, outbox, now),
        backend_sets=BackendSets(backends, outbox, rng, now),
        limits=LimitGossip(session, outbox, rng, now, left=peer.has_left, name_of=peer.name_of),
        status_reports=StatusReports(outbox, rng, now),
        transfers=Transfers(routes.transfer, streams.transfers.transfer, answers.fetches.transfer),
    )


def followed(backends: RegistrySync, commands: SignedCommands, workers: WorkerCommands, order: Order) -> str | None:
    """Return why a peer's order is not followed; "" if it is, None: not yet."""
    if order.change == Carrier.DRAIN:
        return "" if backends.facts.of(order.subject).drain_clock >= order.clock else None
    table = commands if order.change == Carrier.COMMAND else workers
    return table.outcome(order.subject, order.clock)


class SavedState(NamedTuple):
    """What `RouterPeer.state` keeps: epoch, clocks of commands by URL, members, and revocations of keys as bytes."""

    epoch: int = 0
    floors: Mapping[int, int] = {}
    records: Sequence[Record] = ()
    revoked: bytes = b""


def read_state(data: bytes) -> SavedState:
    """Return what is in the bytes of `RouterPeer.state`; nothing for others."""
    if len(data) < STATE_HEAD.size:
        return SavedState()
    magic, epoch, floors = STATE_HEAD.unpack_from(data)
    floors_end = body_at = STATE_HEAD.size + floors * STATE_FLOOR.size
    if magic == STATE_MAGIC and len(data) >= floors_end + STATE_LENGTH.size:
        body_at += STATE_LENGTH.size + STATE_LENGTH.unpack_from(data, floors_end)[0]
    elif magic != STATE_MAGIC_BEFORE:
        return SavedState()
    if len(data) < body_at:
        return SavedState()
    clocks = dict(STATE_FLOOR.iter_unpack(data[STATE_HEAD.size : floors_end]))
    found = SavedState(epoch, clocks, (), data[floors_end + STATE_LENGTH.size : body_at])
    try:
        message = CODEC.decode(CODEC.number_of[Members], data[body_at:])
    except BadFrame:
        return found
    return found._replace(records=message.records)
