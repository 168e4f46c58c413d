"""Gossip: a router among its peers, bytes in, bytes out. It composes the machines below it and decides nothing itself.

    a packet    seal.open -> sessions.accept -> the machine whose message it is
    time        each machine's tick -> messages
    a message   codec.encode -> seal -> Send, for the shell to carry
    the router  every `flush_interval_s` its table's new routes become updates, what its registry did becomes facts;
                what peers send becomes routes (`replication.route_sync`) and states (`backend_state.registry_sync`)

A shell (io/gossip/gossip_port.py, or the lab's simulator) calls `receive`, `contact`, `unreachable` and `tick`, looks
at `wake_at` after each, and carries what `take` gives it. Connections are the shell's: here are addresses and planes
only. Whoever drives this drains `changes`, `transitions`, `doubted` and `commands` now and then.

Rules: `receive` never raises, whatever the bytes. Nothing here waits, and nobody waits for it: a request is placed by
what the tables say now, and only appends to a queue. Messages that can't be written or sealed are dropped and counted,
never tried again: what is sent late or not at all costs cache hits, never a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from struct import Struct

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.gossip.backend_state.facts import BackendFacts
from ranvier_py.core.gossip.backend_state.prefills import PrefillGossip
from ranvier_py.core.gossip.backend_state.registry_sync import RegistrySync
from ranvier_py.core.gossip.backend_state.signed_commands import SignedCommands
from ranvier_py.core.gossip.contact.sessions import Sessions
from ranvier_py.core.gossip.gossip_values import DATAGRAM_BYTES_MAX, Address, MemberChange, Outgoing, Peer, Plane, Send
from ranvier_py.core.gossip.membership.identity import first_epoch
from ranvier_py.core.gossip.membership.live_members import LiveMembers
from ranvier_py.core.gossip.membership.members import Membership
from ranvier_py.core.gossip.membership.neighbour_set import MESH_MEMBERS_MAX
from ranvier_py.core.gossip.membership.profile import LAN, Profile
from ranvier_py.core.gossip.peer_answers.answer_values import PeerAnswerSettings
from ranvier_py.core.gossip.peer_answers.peer_answers import ANSWER_MESSAGES, AnswerSecrets, PeerAnswers
from ranvier_py.core.gossip.readers.shared_streams import STREAM_MESSAGES, SharedStreams
from ranvier_py.core.gossip.replication.route_gossip import ROUTE_MESSAGES, RouteGossip
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.replication.route_sync import RouteSync
from ranvier_py.core.gossip.rule_verdicts import VerdictGossip
from ranvier_py.core.gossip.wire.codec import Kind, decode, encode
from ranvier_py.core.gossip.wire.frame import OVERHEAD_BYTES, BadFrame, Reason
from ranvier_py.core.gossip.wire.keyring import KeyRing
from ranvier_py.core.gossip.wire.messages import (
    Command,
    Commands,
    Facts,
    Loads,
    Message,
    Prefills,
    Record,
    RuleVerdicts,
    State,
)
from ranvier_py.core.gossip.wire.messages import Members as MemberList
from ranvier_py.core.gossip.wire.seal import Sealer, Subkeys
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.router import Router

FLUSH_INTERVAL_S = 0.05
"""What is learned becomes a route update within this. As often as route updates and loads leave a busy node
(`RouteGossipSettings.tick_s`, `loads.LOAD_INTERVAL_S`), so that they do in one tick."""

IDLE_INTERVAL_S = 0.25  # with no request in flight the registry is looked at so often; it tells when something comes

STATE_HEAD = Struct("<4sQH")  # magic, epoch, number of floors
STATE_FLOOR = Struct("<QQ")  # of signed commands: digest of a URL, clock
STATE_MAGIC = b"RGS2"

STRANGERS_MAX = 8
"""Of MESH_MEMBERS_MAX addresses or more that are named at one time so many are greeted: one that answers is enough, and
DNS names them all, again and again."""

TRIED_MAX = 4096  # addresses whose next greeting takes the other plane
SEALED_OTHERWISE = (Reason.KEY, Reason.TAG)  # of a packet in our form: another key, or another cluster's label

KINDS_BY_TOPIC = {
    "contact": (Kind.HELLO, Kind.ECHO, Kind.CHALLENGE),
    "membership": (Kind.PING, Kind.ACK, Kind.PING_REQUEST, Kind.NACK, Kind.PUSH, Kind.MEMBERS),
    "routes": (Kind.ROUTE_UPDATES, Kind.DIGEST, Kind.VECTOR, Kind.RESET),
    "rows": (
        *(Kind.TOTAL_SUM, Kind.PART_SUMS, Kind.ROWS_WANTED, Kind.ROWS, Kind.BUSY),
        *(Kind.SIDE_STATE_WANTED, Kind.SIDE_STATE),
    ),
    "backends": (Kind.LOADS, Kind.PREFILLS, Kind.FACTS, Kind.COMMANDS),
    "streams": (Kind.READER_CLAIMS, Kind.SNAPSHOT_WANTED, Kind.SNAPSHOT_CHUNK, Kind.SNAPSHOT_REFUSED),
    "answers": (
        *(Kind.ANSWER_KEYS, Kind.ANSWER_DIGEST, Kind.ANSWER_WANTED, Kind.ANSWER_PART, Kind.ANSWER_REFUSED),
        Kind.VOIDED,
    ),
    "rules": (Kind.RULE_VERDICTS,),
}
"""What a message is about, for the counters of traffic."""

BESIDE_MEMBERSHIP = (Loads, Prefills, Facts, Commands, RuleVerdicts, *STREAM_MESSAGES, *ANSWER_MESSAGES)

TOPIC_OF: dict[int, str] = {kind: topic for topic, kinds in KINDS_BY_TOPIC.items() for kind in kinds}


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """What one node knows of itself and its cluster.

    `session` must never have been used before. `fingerprint_key`: what fingerprints are keyed with, the same on all
    nodes. `state` is what `RouterPeer.state` gave before a restart, or nothing; `wall_ms` a first guess for the epoch,
    which peers correct. `admin_key` empty: no commands are shared.
    """

    name: str
    host: str
    port: int
    session: int
    fingerprint_key: bytes
    label: str = "ranvier"
    public: str = ""
    wall_ms: int = 0
    state: bytes = b""
    datagrams: bool = True
    profile: Profile = LAN
    routes: RouteGossipSettings = field(default_factory=RouteGossipSettings)
    answers: PeerAnswerSettings = field(default_factory=PeerAnswerSettings)
    admin_key: bytes = b""


@dataclass(slots=True)
class GossipCounters:
    """Packets since the start. The first three are the sealer's own."""

    refused: dict[str, int] = counter("Packets that were none, by reason.", label="reason")
    sealed: dict[int, int] = counter("Packets by the key that sealed them.", label="key")
    opened: dict[int, int] = counter("Packets by the key that opened them: one that opens none can go.", label="key")
    packets_sent: dict[str, int] = counter("Packets sent, by what they are about.", label="topic")
    bytes_sent: dict[str, int] = counter("Bytes sent, by what they are about.", label="topic")
    packets_received: dict[str, int] = counter("Packets received, by what they are about.", label="topic")
    bytes_received: dict[str, int] = counter("Bytes received, by what they are about.", label="topic")
    oversized: int = counter("Messages too long to be sealed, dropped.")

    def __post_init__(self) -> None:
        for by_topic in (self.packets_sent, self.bytes_sent, self.packets_received, self.bytes_received):
            by_topic.update(dict.fromkeys(KINDS_BY_TOPIC, 0))


class RouterPeer:
    """One router and everything it sends to its peers and receives from them, wired. A node drives it, and so does the
    lab. Times are seconds of one monotonic clock.

    `woken` is called when `wake_at` came nearer between two calls. `wrong_key_source` sent the last packet that was
    sealed with another key or label; None when there was none, and whoever logs it sets it back.
    """

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
        place, schema = (settings.host, settings.port), settings.routes.schema
        epoch = first_epoch(epoch, settings.wall_ms)
        me = Record(settings.name, settings.session, epoch, 0, State.ALIVE, *place, schema, settings.public)
        session, room_bytes = settings.session, DATAGRAM_BYTES_MAX - OVERHEAD_BYTES
        outbox: list[Outgoing] = []
        self.router = router
        self.settings = settings
        self.facts = BackendFacts(session, outbox, rng, now, datagrams=settings.datagrams)
        self.signed_commands = SignedCommands(
            settings.admin_key, outbox, rng, now, wall_ms=settings.wall_ms, floors=floors
        )
        self.backends = RegistrySync(router.registry, self.facts, settings.fingerprint_key)
        self.route_sync = RouteSync(router.routes, self.backends, router.owners, router.checkpoints)
        self.streams = SharedStreams(session, self.backends, router.hasher, outbox, rng, now)
        self.sealer = Sealer(session, ring, settings.label, subkeys)
        self.counters = GossipCounters(self.sealer.refused, self.sealer.sealed, self.sealer.opened)
        self.sessions = Sessions(me, outbox, rng)
        self.members = Membership(
            me, settings.profile, outbox, rng, now, room_bytes=room_bytes, datagrams=settings.datagrams
        )
        self.routes = RouteGossip(
            session, self.route_sync, settings.routes, outbox, rng, now, round_trip_s=self._round_trip_s
        )
        self.answers = PeerAnswers(
            settings.answers,
            AnswerSecrets(settings.fingerprint_key, settings.admin_key),
            outbox,
            rng,
            now,
            round_trip_s=self._round_trip_s,
            room=self.routes.room,
        )
        self.verdicts = VerdictGossip(settings.name, outbox, rng, now)
        self.prefills = PrefillGossip(router.speculation, self.backends, outbox, now)
        self.live_members = LiveMembers(
            *(self.members, self.routes, self.facts, self.signed_commands),
            streams=self.streams,
            answers=self.answers,
            verdicts=self.verdicts,
            prefills=self.prefills,
        )
        self.woken: Callable[[], object] = lambda: None
        self.wrong_key_source: Address | None = None
        self._sends = outbox
        self._effects: list[Send] = []
        self._tried: BoundedDict[Address, bool] = BoundedDict(TRIED_MAX)
        self._changes: list[MemberChange] = []
        self._now = self._flushed_at = self._flush_at = now
        self.route_sync.copy.asked = self._send_everything
        router.routes.outgoing.collect(self._hurry)
        router.owners.collect(self._hurry)
        router.checkpoints.collect(router.routes.names(), self._hurry)
        router.registry.busied = self._hurry
        router.speculation.collect(self._hurry)
        self.members.remember(remembered, now)
        self._settle(now)

    # --- the calls of the shell -------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick` is wanted next. Any call may bring it nearer."""
        machines = min(self.members.wake_at, self.routes.wake_at, self.facts.wake_at, self.signed_commands.wake_at)
        machines = min(machines, self.streams.wake_at, self.answers.wake_at, self.verdicts.wake_at)
        machines = min(machines, self.prefills.wake_at)
        return min(self._flush_at, self.live_members.wake_at, machines)

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        """A packet came. Never raises."""
        self._now = now
        self.backends.count_restarts(now)
        self._open(data, source, plane, now)
        self._follow(now)
        if self.backends.regained():
            self.routes.compare_soon(now)

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        """These may be peers, says the operator or DNS. Say it as often as you like, in any order."""
        if not self.members.neighbours.is_mesh:
            known = {member.address for member in self.members.alive()}
            addresses = [address for address in addresses if address not in known]
        for address in addresses if len(addresses) < MESH_MEMBERS_MAX else addresses[:STRANGERS_MAX]:
            self._greet(address, now)
        self._settle(now)

    def unreachable(self, address: Address, plane: Plane, now: float) -> None:
        """The shell could not send there."""
        self.members.unreachable(address, now, plane)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Do all that is due. What has arrived must have been received before."""
        self._now = now
        if now >= self._flush_at:
            self.flush(now)
        self.members.tick(now)
        for address in self.members.needs_greeting(now):
            self._greet(address, now)
        if now >= self.live_members.wake_at:
            self.live_members.update(now)
        self.routes.tick(now)
        self.facts.tick(now)
        self.signed_commands.tick(now)
        self.streams.tick(now)
        self.answers.tick(now)
        self.verdicts.tick(now)
        self.prefills.tick(now)
        self._settle(now)
        self._follow(now)

    def flush(self, now: float) -> None:
        """Hand down what the router learned and saw since the last time."""
        busy = self.backends.look(now)
        self._flushed_at = now
        self._flush_at = now + (FLUSH_INTERVAL_S if busy else IDLE_INTERVAL_S)
        self._announce(now)

    def take(self) -> list[Send]:
        """What is to be carried now; handed out once."""
        effects, self._effects = self._effects, []
        return effects

    def leave(self, now: float) -> None:
        """Say goodbye. Go on until `members.left_at`, so that it spreads."""
        self._now = now
        self._send_everything()
        self.members.leave(now)
        self._settle(now)

    def rekey(self, ring: KeyRing) -> None:
        """From now on seal with this ring's primary and open with its keys alone."""
        self.sealer.rekey(ring)

    # --- what it shows, and what the node does with it --------------------------------------------------------------

    @property
    def me(self) -> Record:
        return self.members.me

    @property
    def alone(self) -> bool:
        """Nobody else is known to live: look for seeds more often."""
        return self.members.size() == 1

    @property
    def synced(self) -> bool:
        """Whether this node has had its peers' routes as they were when it met them."""
        return self.routes.synced

    def state(self) -> bytes:
        """To be kept across a restart, at most 80 KiB: the epoch, the clocks of commands, and where peers were."""
        _, body = encode(MemberList(tuple(self.members.export()), False))
        floors = b"".join([STATE_FLOOR.pack(*floor) for floor in self.signed_commands.floors.items()])
        return STATE_HEAD.pack(STATE_MAGIC, self.me.epoch, len(floors) // STATE_FLOOR.size) + floors + body

    def changes(self) -> list[MemberChange]:
        """What happened to members since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def transitions(self) -> list[Transition]:
        """What peers made of our backends since the last call; for the log."""
        transitions, self.backends.transitions = self.backends.transitions, []
        return transitions

    def doubted(self) -> list[BackendId]:
        """Backends that a peer calls ill, to be probed now."""
        doubted = list(self.backends.doubted)
        self.backends.doubted.clear()
        return doubted

    def commands(self) -> list[Command]:
        """What the operator commanded on another node, to be followed."""
        commands, self.signed_commands.new = self.signed_commands.new, []
        return commands

    # --- from the router --------------------------------------------------------------------------------------------

    def _announce(self, now: float, *, everything: bool = False) -> None:
        if self.synced:  # before, our count of generations may be behind the peers', who would not believe an update
            for update, at in self.route_sync.updates(now, everything=everything):
                self.routes.announce(update, at)

    def _send_everything(self) -> None:
        """What waits, too."""
        self.flush(self._now)
        self._announce(self._now, everything=True)

    def _hurry(self) -> None:
        """There is something to send: do not wait until the next look of an idle node."""
        wanted_at = self._flushed_at + FLUSH_INTERVAL_S
        if wanted_at < self._flush_at:
            self._flush_at = wanted_at
            self.woken()

    # --- from peers -------------------------------------------------------------------------------------------------

    def _open(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        try:
            opened = self.sealer.open(data, plane)
        except BadFrame as bad:  # counted there
            self.wrong_key_source = source if bad.reason in SEALED_OTHERWISE else self.wrong_key_source
            return
        topic = TOPIC_OF.get(opened.kind, "contact")
        self.counters.packets_received[topic] += 1
        self.counters.bytes_received[topic] += len(data)
        incoming = self.sessions.accept(opened, source, now)
        if incoming is not None:
            peer, message, proved = incoming
            if proved is not None:
                self._tried.pop(peer.address, None)
                self.members.proved(proved, now)
                self.live_members.proved(proved.session, now)
            self._hand_on(peer, message, plane, now)
        self._settle(now)

    def _hand_on(self, peer: Peer, message: Message | None, plane: Plane, now: float) -> None:
        """To the machine whose message it is. All but membership take those of live members only."""
        if isinstance(message, ROUTE_MESSAGES):
            self.members.received_from(peer.session, now)
            if self.live_members.admits(peer.session, now):
                self.routes.receive(peer, message, now)
            return
        if message is None or isinstance(message, BESIDE_MEMBERSHIP):
            self.members.received_from(peer.session, now)
        if isinstance(message, Loads | Facts):
            self.facts.receive(peer, message, now)
        elif isinstance(message, Prefills):
            if self.live_members.admits(peer.session, now):
                self.prefills.receive(peer, message, now)
        elif isinstance(message, Commands):
            self.signed_commands.receive(message, now)
        elif isinstance(message, RuleVerdicts):
            self.verdicts.receive(message)
        elif isinstance(message, STREAM_MESSAGES):
            self.streams.receive(peer, message, now)
        elif isinstance(message, ANSWER_MESSAGES):
            self.live_members.admits(peer.session, now)
            self.answers.receive(peer, message, now)
        elif message is not None:
            self.members.receive(peer, message, now, plane)

    def _follow(self, now: float) -> None:
        self.backends.follow(now)
        self.streams.follow(now, synced=self.synced)

    def _greet(self, address: Address, now: float) -> None:
        """Send a Hello, over datagrams and streams in turn: one of the two may be blocked."""
        session = self.sessions.session_at(address)
        member = self.members.member(session) if session else None
        if member is not None and member.live and member.proved:
            return
        streamed = self._tried.get(address, not self.settings.datagrams)
        if self.sessions.greet(address, now, Plane.PROBE if streamed else Plane.DATAGRAM) and self.settings.datagrams:
            self._tried[address] = not streamed

    def _round_trip_s(self, session: int) -> float:
        """The mean of direct pings; 0 when none was measured."""
        member = self.members.member(session)
        return member.rtt_s if member is not None and member.rtt_s > 0 else 0.0

    # --- to peers ---------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """After whatever happened: follow membership, seal what waits."""
        members = self.members
        if members.gone:
            for session in members.gone:
                self.sessions.forget(session)
                self.routes.forget(session, now)
                self.facts.forget(session)
                self.streams.forget(session)
                self.prefills.forget(session)
                self.answers.forget(session, now)
            members.gone.clear()
        if members.changes:
            self._changes += members.changes
            members.changes.clear()
            self.live_members.changed(now)
        self.sessions.me = members.me
        if self._sends:
            self._seal(now)

    def _seal(self, now: float) -> None:
        """Messages -> effects. One message to many is written once."""
        sends, counters, last, kind, body = self._sends, self.counters, None, 0, b""
        for outgoing in sends:  # `sent` may append a greeting
            to, session, plane, message = outgoing
            self.sessions.sent(outgoing, now)
            try:
                if message is not last:
                    kind, body = encode(message)
                    last = message
                data = self.sealer.seal(plane, session, kind, body)
            except ValueError:
                counters.oversized += 1
                continue
            topic = TOPIC_OF[kind]
            counters.packets_sent[topic] += 1
            counters.bytes_sent[topic] += len(data)
            self._effects.append(Send(to, plane, data))
        sends.clear()


def read_state(data: bytes) -> tuple[int, Mapping[int, int], Sequence[Record]]:
    """(epoch, floors of commands, records) of what `RouterPeer.state` gave; nothing of other bytes."""
    if len(data) < STATE_HEAD.size:
        return 0, {}, ()
    magic, epoch, floors = STATE_HEAD.unpack_from(data)
    body_at = STATE_HEAD.size + floors * STATE_FLOOR.size
    if magic != STATE_MAGIC or len(data) < body_at:
        return 0, {}, ()
    clocks = dict(STATE_FLOOR.iter_unpack(data[STATE_HEAD.size : body_at]))
    try:
        message = decode(Kind.MEMBERS, data[body_at:])
    except BadFrame:
        return epoch, clocks, ()
    assert isinstance(message, MemberList)
    return epoch, clocks, message.records
