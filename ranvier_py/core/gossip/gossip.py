"""One router among its peers, bytes in, bytes out: `RouterPeer` composes the machines of gossip and decides nothing.

    packet      seal.open -> sessions.accept -> the machine that the message belongs to
    time        each machine's `tick` appends messages to the outbox
    message     codec.encode -> seal -> `Send`, which the shell carries
    router      each flush turns new routes of its table into route updates and changes of its registry into facts; what
                peers send becomes routes (`replication.route_sync`) and backend state (`backend_state.registry_sync`)

The shell (io/gossip/gossip_port.py, or the lab's simulator) calls `receive`, `contact`, `unreachable` and `tick`. After
each call it looks at `wake_at` and carries what `take` returns. The shell owns the connections; this module knows
addresses and planes only. Its owner drains `changes`, `transitions`, `doubted` and the commands from time to time.

Rules: `receive` never raises, whatever the bytes. Nothing here waits, and no request waits for gossip: a request is
placed by what the tables hold now and only appends to a queue. A message that can't be encoded or sealed is dropped and
counted, never retried: a message that is late or lost costs cache hits, never a request.
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
from ranvier_py.core.gossip.membership.live_members import LiveMembers, LivePeers
from ranvier_py.core.gossip.membership.members import Membership
from ranvier_py.core.gossip.membership.neighbour_set import MESH_MEMBERS_MAX
from ranvier_py.core.gossip.membership.profile import LAN, Profile
from ranvier_py.core.gossip.peer_answers.answer_values import PeerAnswerSettings
from ranvier_py.core.gossip.peer_answers.peer_answers import AnswerSecrets, PeerAnswers
from ranvier_py.core.gossip.readers.shared_streams import SharedStreams
from ranvier_py.core.gossip.replication.route_gossip import RouteGossip
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.replication.route_sync import RouteSync
from ranvier_py.core.gossip.rule_verdicts import VerdictGossip
from ranvier_py.core.gossip.wire.codec import KIND_OF, TOPIC_OF, decode, encode
from ranvier_py.core.gossip.wire.frame import OVERHEAD_BYTES, BadFrame, Reason
from ranvier_py.core.gossip.wire.keyring import KeyRing
from ranvier_py.core.gossip.wire.messages import Commands, Message, Prefills, Record, RuleVerdicts, State
from ranvier_py.core.gossip.wire.messages import Members as MemberList
from ranvier_py.core.gossip.wire.seal import Sealer, Subkeys
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.router import Router

FLUSH_INTERVAL_S = 0.05
"""A learned route becomes a route update within this time. Equal to the intervals at which a busy node sends route
updates and loads (`RouteGossipSettings.tick_s`, `loads.LOAD_INTERVAL_S`), so that both leave in one tick."""

IDLE_INTERVAL_S = 0.25  # between two flushes while no request is in flight; `_hurry` shortens it when work arrives

STATE_HEAD = Struct("<4sQH")  # magic, epoch, number of floors
STATE_FLOOR = Struct("<QQ")  # of signed commands: digest of a URL, clock
STATE_MAGIC = b"RGS2"

STRANGERS_MAX = 8
"""If `contact` gets MESH_MEMBERS_MAX unknown addresses or more, it greets only this many: one answer is enough, and DNS
names all of them again and again."""

TRIED_MAX = 4096  # addresses for which the plane of the next greeting is remembered
SEALED_OTHERWISE = (Reason.KEY, Reason.TAG)  # a packet of our format, sealed with another key or another label


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """What one node is configured with about itself and its cluster.

    `session` must never have been used before. `fingerprint_key` keys all fingerprints and is the same on all nodes.
    `state` is what `RouterPeer.state` returned before a restart, or empty. `wall_ms` is a first guess for the epoch,
    which peers correct. With an empty `admin_key` no commands are shared.
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
    """Packets since the start. The first three fields are the sealer's own dicts."""

    refused: dict[str, int] = counter(
        "Datagrams on the gossip port that were no gossip packet, by reason.", label="reason"
    )
    sealed: dict[int, int] = counter("Gossip packets sent, by the key that sealed them.", label="key")
    opened: dict[int, int] = counter(
        "Gossip packets received, by the key that opened them: a key that opens none can go.", label="key"
    )
    packets_sent: dict[str, int] = counter("Gossip packets sent, by what they are about.", label="topic")
    bytes_sent: dict[str, int] = counter("Bytes of gossip sent, by what it is about.", label="topic")
    packets_received: dict[str, int] = counter("Gossip packets received, by what they are about.", label="topic")
    bytes_received: dict[str, int] = counter("Bytes of gossip received, by what it is about.", label="topic")
    oversized: int = counter("Gossip messages dropped because they are too long for one packet.")

    def __post_init__(self) -> None:
        for by_topic in (self.packets_sent, self.bytes_sent, self.packets_received, self.bytes_received):
            by_topic.update(dict.fromkeys(TOPIC_OF.values(), 0))


class RouterPeer:
    """One router wired to its peers: everything that it sends to them and receives from them. A node drives it, and so
    does the lab. Times are seconds of one monotonic clock.

    `woken` is called when `wake_at` moves nearer between two calls of the shell. `wrong_key_source` is the address that
    sent the last packet sealed with another key or label, or None; whoever logs it resets it to None.
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
        self.members = Membership(
            me, settings.profile, outbox, rng, now, room_bytes=room_bytes, datagrams=settings.datagrams
        )
        self.facts = BackendFacts(outbox, rng, now, plane_of=self.members.plane_of)
        self.signed_commands = SignedCommands(
            settings.admin_key, outbox, rng, now, wall_ms=settings.wall_ms, floors=floors
        )
        self.backends = RegistrySync(router.registry, self.facts, settings.fingerprint_key)
        router.registry.names.node_name = self._name_of
        self.route_sync = RouteSync(router.routes, self.backends, router.owners, router.checkpoints)
        self.streams = SharedStreams(session, self.backends, router.hasher, outbox, rng, now)
        self.sealer = Sealer(session, ring, settings.label, subkeys)
        self.counters = GossipCounters(self.sealer.refused, self.sealer.sealed, self.sealer.opened)
        self.sessions = Sessions(me, outbox, rng)
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
        self.live_members = LiveMembers(self.members, self._meet)
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
        """When `tick` must be called next. Any call may bring it nearer."""
        machines = min(self.members.wake_at, self.routes.wake_at, self.facts.wake_at, self.signed_commands.wake_at)
        machines = min(machines, self.streams.wake_at, self.answers.wake_at, self.verdicts.wake_at)
        machines = min(machines, self.prefills.wake_at)
        return min(self._flush_at, self.live_members.wake_at, machines)

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        """Take in one packet. Never raises."""
        self._now = now
        self.backends.count_restarts(now)
        self._open(data, source, plane, now)
        self._follow(now)
        if self.backends.regained():
            self.routes.compare_soon(now)

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        """Greet addresses that may be peers, from the operator or DNS. May be called any number of times."""
        if not self.members.neighbours.is_mesh:
            known = {member.address for member in self.members.alive()}
            addresses = [address for address in addresses if address not in known]
        for address in addresses if len(addresses) < MESH_MEMBERS_MAX else addresses[:STRANGERS_MAX]:
            self._greet(address, now)
        self._settle(now)

    def unreachable(self, address: Address, plane: Plane, now: float) -> None:
        """Note that the shell could not send to this address."""
        self.members.unreachable(address, now, plane)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Do all that is due. The shell must pass packets that have already arrived to `receive` first."""
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
        """Pass what the router learned and its registry saw since the last flush to the machines that send it."""
        busy = self.backends.look(now)
        self._flushed_at = now
        self._flush_at = now + (FLUSH_INTERVAL_S if busy else IDLE_INTERVAL_S)
        self._announce(now)

    def take(self) -> list[Send]:
        """Return the packets to be sent now; each is handed out once."""
        effects, self._effects = self._effects, []
        return effects

    def leave(self, now: float) -> None:
        """Announce that this node leaves. The shell must go on until `members.left_at`, so that this spreads."""
        self._now = now
        self._send_everything()
        self.members.leave(now)
        self._settle(now)

    # --- what it shows, and what the node does with it --------------------------------------------------------------

    @property
    def me(self) -> Record:
        return self.members.me

    @property
    def alone(self) -> bool:
        """Whether no other live member is known, so that seeds should be looked up more often."""
        return self.members.size() == 1

    @property
    def synced(self) -> bool:
        """Whether this node has the routes that its peers had when it met them, or met no peer to copy from."""
        return self.routes.synced

    def state(self) -> bytes:
        """Return what must survive a restart, at most 80 KiB: the epoch, clocks of commands, and addresses of peers."""
        _, body = encode(MemberList(tuple(self.members.export()), False))
        floors = b"".join([STATE_FLOOR.pack(*floor) for floor in self.signed_commands.floors.items()])
        return STATE_HEAD.pack(STATE_MAGIC, self.me.epoch, len(floors) // STATE_FLOOR.size) + floors + body

    def changes(self) -> list[MemberChange]:
        """Return what happened to members since the last call."""
        changes, self._changes = self._changes, []
        return changes

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

    def _send_everything(self) -> None:
        """Flush, and send also what still waits for more (`RouteSync`)."""
        self.flush(self._now)
        self._announce(self._now, everything=True)

    def _hurry(self) -> None:
        """Flush after FLUSH_INTERVAL_S at the latest: there is something to send."""
        wanted_at = self._flushed_at + FLUSH_INTERVAL_S
        if wanted_at < self._flush_at:
            self._flush_at = wanted_at
            self.woken()

    # --- from peers -------------------------------------------------------------------------------------------------

    def _open(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        try:
            opened = self.sealer.open(data, plane)
        except BadFrame as bad:  # the sealer has counted it
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
            if message is None:
                self.members.received_from(peer.session, now)
            else:
                self._hand_on(topic, peer, message, plane, now)
        self._settle(now)

    def _hand_on(self, topic: str, peer: Peer, message: Message, plane: Plane, now: float) -> None:
        """Pass a message to its machine. Route messages and prefills are taken from live members only (`admits`)."""
        if topic == "membership":
            self.members.receive(peer, message, now, plane)
            return
        self.members.received_from(peer.session, now)
        if topic in ("routes", "rows"):
            if self.live_members.admits(peer.session, now):
                self.routes.receive(peer, message, now)
        elif topic == "streams":
            self.streams.receive(peer, message, now)
        elif topic == "answers":
            self.live_members.admits(peer.session, now)
            self.answers.receive(peer, message, now)
        elif isinstance(message, Prefills):
            if self.live_members.admits(peer.session, now):
                self.prefills.receive(peer, message, now)
        elif isinstance(message, Commands):
            self.signed_commands.receive(message, now)
        elif isinstance(message, RuleVerdicts):
            self.verdicts.receive(message)
        else:
            self.facts.receive(peer, message, now)

    def _follow(self, now: float) -> None:
        self.backends.follow(now)
        self.streams.follow(now, synced=self.synced)

    def _greet(self, address: Address, now: float) -> None:
        """Send a Hello, unless a proved live member is there; by datagram and stream in turn, as one may be blocked."""
        session = self.sessions.session_at(address)
        member = self.members.member(session) if session else None
        if member is not None and member.live and member.proved:
            return
        streamed = self._tried.get(address, not self.settings.datagrams)
        if self.sessions.greet(address, now, Plane.PROBE if streamed else Plane.DATAGRAM) and self.settings.datagrams:
            self._tried[address] = not streamed

    def _round_trip_s(self, session: int) -> float:
        """Return the mean round trip of direct pings to a session; 0 when none was measured."""
        member = self.members.member(session)
        return member.rtt_s if member is not None and member.rtt_s > 0 else 0.0

    def _name_of(self, session: int) -> str:
        """Return the name of the node with this session."""
        member = self.members.member(session)
        return member.record.name if member is not None else f"{session:016x}"

    # --- to peers ---------------------------------------------------------------------------------------------------

    def _meet(self, live: LivePeers, now: float) -> None:
        """Give each machine the peers that it deals with."""
        self.routes.peers(live.sharing, now, live.sessions)
        self.facts.peers(live.near, now, live.met)
        self.backends.peers(live.near)
        self.signed_commands.peers(live.near, now)
        self.streams.peers(live.sharing, live.met, live.able)
        self.answers.peers(live.near, live.sharing, now)
        self.verdicts.peers(live.near, now)
        self.prefills.peers(live.sharing)

    def _settle(self, now: float) -> None:
        """After any event: pass changes of membership to the machines, and seal the messages that wait."""
        members = self.members
        if members.gone or members.changes:
            self.live_members.changed(now)
            for session in members.gone:
                self.sessions.forget(session)
                self.routes.forget(session, now)
                self.facts.forget(session)
                self.streams.forget(session)
                self.answers.forget(session, now)
            members.gone.clear()
            self._changes += members.changes
            members.changes.clear()
        self.sessions.me = members.me
        if self._sends:
            self._seal(now)

    def _seal(self, now: float) -> None:
        """Encode and seal the messages of the outbox into effects. A message to several peers is encoded once."""
        sends, counters, last, kind, body = self._sends, self.counters, None, 0, b""
        for outgoing in sends:  # `sessions.sent` may append a greeting while this runs
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
    """Return (epoch, floors of commands, records) from the bytes of `RouterPeer.state`; (0, {}, ()) for others."""
    if len(data) < STATE_HEAD.size:
        return 0, {}, ()
    magic, epoch, floors = STATE_HEAD.unpack_from(data)
    body_at = STATE_HEAD.size + floors * STATE_FLOOR.size
    if magic != STATE_MAGIC or len(data) < body_at:
        return 0, {}, ()
    clocks = dict(STATE_FLOOR.iter_unpack(data[STATE_HEAD.size : body_at]))
    try:
        message = decode(KIND_OF[MemberList], data[body_at:])
    except BadFrame:
        return epoch, clocks, ()
    assert isinstance(message, MemberList)
    return epoch, clocks, message.records
