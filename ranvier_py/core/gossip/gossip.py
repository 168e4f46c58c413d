"""Gossip: one object, bytes in, bytes out. It composes the machines below it and decides nothing itself.

    a packet    seal.open -> sessions.accept -> membership, routes or backends, by the kind of its message
    time        each machine's tick -> messages
    a message   codec.encode -> seal -> Send, for the shell to carry

A shell (io/gossip/gossip_port.py, or the lab's simulator) calls `receive`, `contact`, `unreachable` and `tick`, looks
at `wake_at` after each, and carries what `take` gives it. Connections are the shell's: here are addresses and planes
only.

Rules: `receive` never raises, whatever the bytes. Nothing here waits, and nobody waits for it: a request is placed by
what the tables say now. Messages that can't be written or sealed are dropped and counted, never tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from struct import Struct

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.gossip.backend_state.facts import BackendFacts
from ranvier_py.core.gossip.backend_state.signed_commands import SignedCommands
from ranvier_py.core.gossip.contact.sessions import Incoming, Sessions
from ranvier_py.core.gossip.gossip_values import DATAGRAM_BYTES_MAX, Address, MemberChange, Outgoing, Peer, Plane, Send
from ranvier_py.core.gossip.membership.live_members import LiveMembers
from ranvier_py.core.gossip.membership.members import Membership
from ranvier_py.core.gossip.membership.neighbour_set import MESH_MEMBERS_MAX
from ranvier_py.core.gossip.membership.profile import LAN, Profile
from ranvier_py.core.gossip.readers.reader_claims import STREAM_MESSAGES, ReaderGossip
from ranvier_py.core.gossip.replication.route_gossip import ROUTE_MESSAGES, RouteGossip
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.replication.route_sync import RouteSync
from ranvier_py.core.gossip.wire.codec import Kind, decode, encode
from ranvier_py.core.gossip.wire.frame import OVERHEAD_BYTES, BadFrame, Reason
from ranvier_py.core.gossip.wire.keyring import KeyRing
from ranvier_py.core.gossip.wire.messages import Commands, Facts, Loads, Message, Record, State
from ranvier_py.core.gossip.wire.messages import Members as MemberList
from ranvier_py.core.gossip.wire.seal import Sealer, Subkeys
from ranvier_py.core.metrics import counter

STATE_HEAD = Struct("<4sQ")  # magic, epoch
STATE_MAGIC = b"RGS1"

STRANGERS_MAX = 8
"""Of MESH_MEMBERS_MAX addresses or more that are named at one time so many are greeted: one that answers is enough, and
DNS names them all, again and again."""

TRIED_MAX = 4096  # addresses whose next greeting takes the other plane

SEALED_OTHERWISE = (Reason.KEY, Reason.TAG)
"""Why a packet in our form stays closed: another key, or another cluster's label."""

TOPICS = ("contact", "membership", "routes", "rows", "backends", "streams")
TOPIC_OF: dict[int, str] = {
    **dict.fromkeys((Kind.HELLO, Kind.ECHO, Kind.CHALLENGE), "contact"),
    **dict.fromkeys(
        (
            Kind.PING,
            Kind.ACK,
            Kind.PING_REQUEST,
            Kind.NACK,
            Kind.PUSH,
            Kind.MEMBERS,
        ),
        "membership",
    ),
    **dict.fromkeys((Kind.ROUTE_UPDATES, Kind.DIGEST, Kind.VECTOR, Kind.RESET), "routes"),
    **dict.fromkeys(
        (Kind.TOTAL_SUM, Kind.PART_SUMS, Kind.ROWS_WANTED, Kind.ROWS, Kind.BUSY),
        "rows",
    ),
    **dict.fromkeys((Kind.LOADS, Kind.FACTS, Kind.COMMANDS), "backends"),
    **dict.fromkeys((Kind.READER_CLAIMS, Kind.SNAPSHOT_WANTED), "streams"),
    **dict.fromkeys((Kind.SNAPSHOT_CHUNK, Kind.SNAPSHOT_REFUSED), "streams"),
}
"""What a message is about, for the counters of traffic."""


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """What one node knows of itself and its cluster.

    `session` must never have been used before. `state` is what `Gossip.state` gave before a restart, or nothing;
    `wall_ms` a first guess for the epoch, which peers correct.
    """

    name: str
    host: str
    port: int
    session: int
    label: str = "ranvier"
    public: str = ""
    wall_ms: int = 0
    state: bytes = b""
    datagrams: bool = True
    profile: Profile = LAN
    routes: RouteGossipSettings = field(default_factory=RouteGossipSettings)


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
            by_topic.update(dict.fromkeys(TOPICS, 0))


class Gossip:
    """Everything one node sends to its peers and receives from them. Times are seconds of one monotonic clock.

    `sends` is the list that `facts`, `orders` and `streams` write to as well. `wrong_key_source` sent the last packet
    that was sealed with another key or label; None when there was none, and whoever logs it sets it back.
    """

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        settings: GossipSettings,
        ring: KeyRing,
        *,
        sync: RouteSync,
        facts: BackendFacts,
        orders: SignedCommands,
        streams: ReaderGossip,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        subkeys: Subkeys | None = None,
    ) -> None:
        epoch, remembered = read_state(settings.state)
        me = record_of(settings, max(epoch + 1, settings.wall_ms))
        room_bytes = DATAGRAM_BYTES_MAX - OVERHEAD_BYTES
        self.settings = settings
        self.orders = orders
        self.facts = facts
        self.streams = streams
        self.sealer = Sealer(settings.session, ring, settings.label, subkeys)
        self.counters = GossipCounters(self.sealer.refused, self.sealer.sealed, self.sealer.opened)
        self.sessions = Sessions(me, outbox, rng)
        self.members = Membership(
            me, settings.profile, outbox, rng, now, room_bytes=room_bytes, datagrams=settings.datagrams
        )
        self.routes = RouteGossip(
            settings.session, sync, settings.routes, outbox, rng, now, round_trip_s=self._round_trip_s
        )
        self.live_members = LiveMembers(self.members, self.routes, facts, orders, streams)
        self.wrong_key_source: Address | None = None
        self._sends = outbox
        self._effects: list[Send] = []
        self._tried: BoundedDict[Address, bool] = BoundedDict(TRIED_MAX)
        self._changes: list[MemberChange] = []
        self.members.remember(remembered, now)
        self._settle(now)

    # --- the calls of the shell -------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick` is wanted next. Any call may bring it nearer."""
        machines = min(self.members.wake_at, self.routes.wake_at, self.facts.wake_at, self.orders.wake_at)
        return min(self.live_members.wake_at, self.streams.wake_at, machines)

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        """A packet came. Never raises."""
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
            self._take_in(incoming, plane, now)
        self._settle(now)

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
        self.members.tick(now)
        for address in self.members.needs_greeting(now):
            self._greet(address, now)
        if now >= self.live_members.wake_at:
            self.live_members.update(now)
        self.routes.tick(now)
        self.facts.tick(now)
        self.orders.tick(now)
        self.streams.tick(now)
        self._settle(now)

    def take(self) -> list[Send]:
        """What is to be carried now; handed out once."""
        effects, self._effects = self._effects, []
        return effects

    def changes(self) -> list[MemberChange]:
        """What happened to members since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def leave(self, now: float) -> None:
        """Say goodbye. Go on until `members.left_at`, so that it spreads."""
        self.members.leave(now)
        self._settle(now)

    def announce(self, route_update: bytes, at: float) -> None:
        """Something was learned here, by evidence of that time. Sent with the next tick of routes."""
        self.routes.announce(route_update, at)

    def rekey(self, ring: KeyRing) -> None:
        """From now on seal with this ring's primary and open with its keys alone."""
        self.sealer.rekey(ring)

    # --- what it shows ----------------------------------------------------------------------------------------------

    @property
    def me(self) -> Record:
        return self.members.me

    @property
    def alone(self) -> bool:
        """Nobody else is known to live: look for seeds more often."""
        return self.members.size() == 1

    def state(self) -> bytes:
        """To be kept across a restart, at most 64 KiB: the epoch, and where peers were."""
        _, body = encode(MemberList(tuple(self.members.export()), False))
        return STATE_HEAD.pack(STATE_MAGIC, self.me.epoch) + body

    # --- inside -----------------------------------------------------------------------------------------------------

    def _take_in(self, incoming: Incoming, plane: Plane, now: float) -> None:
        peer, message, proved = incoming
        if proved is not None:
            self._tried.pop(peer.address, None)
            self.members.proved(proved, now)
            self.live_members.proved(proved.session, now)
        if message is None:
            self.members.received_from(peer.session, now)
        else:
            self._hand_on(peer, message, plane, now)

    def _hand_on(self, peer: Peer, message: Message, plane: Plane, now: float) -> None:
        """To the machine whose message it is. All but membership take those of live members only."""
        if isinstance(message, ROUTE_MESSAGES):
            self.members.received_from(peer.session, now)
            if self.live_members.admits(peer.session, now):
                self.routes.receive(peer, message, now)
        elif isinstance(message, Loads | Facts):
            self.members.received_from(peer.session, now)
            self.facts.receive(peer, message, now)
        elif isinstance(message, Commands):
            self.members.received_from(peer.session, now)
            self.orders.receive(message)
        elif isinstance(message, STREAM_MESSAGES):
            self.members.received_from(peer.session, now)
            self.streams.receive(peer, message, now)
        else:
            self.members.receive(peer, message, now, plane)

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

    def _settle(self, now: float) -> None:
        """After whatever happened: follow membership, seal what waits."""
        members = self.members
        if members.gone:
            for session in members.gone:
                self.sessions.forget(session)
                self.routes.forget(session, now)
                self.facts.forget(session)
                self.streams.forget(session)
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


def record_of(settings: GossipSettings, epoch: int) -> Record:
    return Record(
        name=settings.name,
        session=settings.session,
        epoch=epoch,
        incarnation=0,
        state=State.ALIVE,
        host=settings.host,
        port=settings.port,
        schema=settings.routes.schema,
        public=settings.public,
    )


def read_state(data: bytes) -> tuple[int, Sequence[Record]]:
    """(epoch, records) of what `Gossip.state` gave. Nothing of bytes that are something else."""
    if len(data) < STATE_HEAD.size:
        return 0, ()
    magic, epoch = STATE_HEAD.unpack_from(data)
    if magic != STATE_MAGIC:
        return 0, ()
    try:
        message = decode(Kind.MEMBERS, data[STATE_HEAD.size :])
    except BadFrame:
        return epoch, ()
    assert isinstance(message, MemberList)
    return epoch, message.records
