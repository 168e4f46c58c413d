"""One node among its peers, bytes in, bytes out. It knows no feature: the machines that it is given share their state.

    packet      seal.open -> sessions.accept -> the machine that declares the message's kind
    time        each machine's `tick` appends messages to the outbox
    message     codec.encode -> seal -> `Send`, which the shell carries
The shell (io/gossip/gossip_port.py, or the lab's simulator) owns the connections. After each call of `receive`,
`contact`, `unreachable` and `tick` it looks at `wake_at` and carries what `take` returns. `receive` never raises,
whatever the bytes. A message that can't be encoded or sealed is dropped and counted, never retried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from ranvier_py.core.mesh.contact.greeter import Greeter
from ranvier_py.core.mesh.contact.sessions import Sessions
from ranvier_py.core.mesh.machine import Machines, Senders
from ranvier_py.core.mesh.membership.live_members import LiveMembers, LivePeers
from ranvier_py.core.mesh.membership.members import Membership
from ranvier_py.core.mesh.membership.profile import LAN, Profile
from ranvier_py.core.mesh.mesh_values import DATAGRAM_BYTES_MAX, Address, MemberChange, Outgoing, Peer, Plane, Send
from ranvier_py.core.mesh.wire.codec import Codec
from ranvier_py.core.mesh.wire.frame import MAGIC, OVERHEAD_BYTES, BadFrame, Reason
from ranvier_py.core.mesh.wire.messages import Message, Record, State
from ranvier_py.core.mesh.wire.seal import Sealer
from ranvier_py.core.metrics import counter, gauge

UNKNOWN_TOPIC = "unknown"  # of messages of kinds that this node does not know
SEALED_OTHERWISE = (Reason.KEY, Reason.TAG)  # a packet of our format, sealed with another key or another label


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """What one node is configured with about itself and its cluster.

    `session` must never have been used before. `wall_ms` is a first guess for the epoch, which peers correct.
    """

    name: str
    host: str
    port: int
    session: int
    label: str = "ranvier"
    public: str = ""
    wall_ms: int = 0
    release: str = ""
    datagrams: bool = True
    profile: Profile = LAN

    def record(self, epoch: int, schema: int) -> Record:
        """Return what is said about this node first. `schema` names how it makes fingerprints."""
        return Record(
            name=self.name,
            session=self.session,
            epoch=epoch,
            incarnation=0,
            state=State.ALIVE,
            host=self.host,
            port=self.port,
            schema=schema,
            public=self.public,
        )


@dataclass(slots=True)
class MeshCounters:
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
    unspoken: int = counter("Gossip messages not sent to nodes whose version of the protocol has no such message.")
    other_protocols: int = gauge("Hosts whose packets of another gossip protocol came within the last minute.")

    def begin(self, topics: Iterable[str]) -> None:
        for by_topic in (self.packets_sent, self.bytes_sent, self.packets_received, self.bytes_received):
            by_topic.update(dict.fromkeys(topics, 0))


class Mesh:
    """Contact and membership of one node, and its machines. Times are seconds of one monotonic clock.

    Whoever makes it sets its `machines` before the first call of the shell. `wrong_key_source` is the address that sent
    the last packet sealed with another key or label, or None; whoever logs it resets it to None.
    """

    def __init__(
        self,
        me: Record,
        settings: MeshSettings,
        sealer: Sealer,
        codec: Codec,
        rng: Random,
        now: float,
    ) -> None:
        self.outbox: list[Outgoing] = []
        room_bytes = DATAGRAM_BYTES_MAX - OVERHEAD_BYTES
        self.members = Membership(
            me, settings.profile, self.outbox, rng, now, room_bytes=room_bytes, datagrams=settings.datagrams
        )
        self.sealer = sealer
        self.counters = MeshCounters(sealer.refused, sealer.sealed, sealer.opened)
        self.counters.begin((*codec.topic_of.values(), UNKNOWN_TOPIC))
        self.sessions = Sessions(me, self.outbox, rng, codec, release=settings.release)
        self.live_members = LiveMembers(self.members, self._meet)
        self.wrong_key_source: Address | None = None
        self.greeter = Greeter(self.members, self.sessions, datagrams=settings.datagrams)
        self.machines = Machines(())
        self._codec = codec
        self._effects: list[Send] = []
        self._changes: list[MemberChange] = []

    # --- the calls of the shell -------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick` must be called next. Any call may bring it nearer."""
        wake_at = min(self.live_members.wake_at, self.members.wake_at)
        for machine in self.machines.called:
            wake_at = min(wake_at, machine.wake_at)
        return wake_at

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        """Take in one packet. Never raises."""
        try:
            opened = self.sealer.open(data, plane)
        except BadFrame as bad:  # the sealer has counted it
            self.wrong_key_source = source if bad.reason in SEALED_OTHERWISE else self.wrong_key_source
            if bad.reason is Reason.VERSION:
                self.sessions.others.note(source[0], data[len(MAGIC)], now)
            return
        topic = self._codec.topic_of.get(opened.kind, UNKNOWN_TOPIC)
        self.counters.packets_received[topic] += 1
        self.counters.bytes_received[topic] += len(data)
        incoming = self.sessions.accept(opened, source, now)
        if incoming is not None:
            peer, message, proved = incoming
            if proved is not None:
                self.greeter.proved(peer.address)
                self.members.proved(proved, now)
                self.live_members.proved(proved.session, now)
            if message is None:
                self.members.received_from(peer.session, now)
            else:
                self._hand_on(peer, message, plane, now)
        self.settle(now)

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        """Greet addresses that may be peers, from the operator or DNS. May be called any number of times."""
        self.greeter.contact(addresses, now)
        self.settle(now)

    def unreachable(self, address: Address, plane: Plane, now: float) -> None:
        """Note that the shell could not send to this address."""
        self.members.unreachable(address, now, plane)
        self.settle(now)

    def tick(self, now: float) -> None:
        """Do all that is due. The shell must pass packets that have already arrived to `receive` first."""
        self.members.tick(now)
        for address in self.members.needs_greeting(now):
            self.greeter.greet(address, now)
        if now >= self.live_members.wake_at:
            self.live_members.update(now)
        for machine in self.machines.called:
            machine.tick(now)
        self.counters.other_protocols = len(self.sessions.others.listed(now))
        self.settle(now)

    def take(self) -> list[Send]:
        """Return the packets to be sent now; each is handed out once."""
        effects, self._effects = self._effects, []
        return effects

    def move(self, name: str, host: str, public: str, now: float) -> None:
        """Advertise another address from now on, and be called so; `public`: of the public port, for peers to show."""
        self.members.move(name, host, public, now)
        self.settle(now)

    def leave(self, now: float) -> None:
        """Announce that this node leaves. The shell must go on until `members.left_at`, so that this spreads."""
        self.members.leave(now)
        self.settle(now)

    # --- what it shows ----------------------------------------------------------------------------------------------

    @property
    def me(self) -> Record:
        return self.members.me

    @property
    def alone(self) -> bool:
        """Whether no other live member is known, so that seeds should be looked up more often."""
        return self.members.size() == 1

    def changes(self) -> list[MemberChange]:
        """Return what happened to members since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def round_trip_s(self, session: int) -> float:
        """Return the mean round trip of direct pings to a session; 0 when none was measured."""
        member = self.members.member(session)
        return member.rtt_s if member is not None and member.rtt_s > 0 else 0.0

    def name_of(self, session: int) -> str:
        """Return the name of the node with this session."""
        member = self.members.member(session)
        return member.record.name if member is not None else f"{session:016x}"

    def has_left(self, session: int) -> bool:
        """Whether this session has said goodbye."""
        member = self.members.member(session)
        return member is not None and member.state is State.LEFT

    # --- from peers -------------------------------------------------------------------------------------------------

    def _hand_on(self, peer: Peer, message: Message, plane: Plane, now: float) -> None:
        """Pass a message to its machine, if that takes messages of this sender."""
        machine = self.machines.taking.get(type(message))
        if machine is None:  # of membership, which alone asks how a packet came
            self.members.receive(peer, message, now, plane)
            return
        self.members.received_from(peer.session, now)
        if machine.senders is not Senders.ANY and peer.session not in self.live_members.sharing:
            self.live_members.admit(peer.session, now)
        if machine.senders is not Senders.SHARING or peer.session in self.live_members.sharing:
            machine.receive(peer, message, now)

    # --- to machines and peers --------------------------------------------------------------------------------------

    def _meet(self, live: LivePeers, now: float) -> None:
        for machine in self.machines.called:
            machine.met(live, now)

    def settle(self, now: float) -> None:
        """After any event: pass changes of membership to the machines, and seal the messages that wait."""
        members = self.members
        if members.gone or members.changes:
            self.live_members.changed(now)
            for session in members.gone:
                self.sessions.forget(session)
                for machine in self.machines.called:
                    machine.forgotten(session, now)
            members.gone.clear()
            self._changes += members.changes
            members.changes.clear()
        self.sessions.me = members.me
        if self.outbox:
            self._seal(now)

    def _seal(self, now: float) -> None:
        """Encode and seal the messages of the outbox into effects. A message to several peers is encoded once."""
        sends, counters, last, written, kind, body = self.outbox, self.counters, None, 0, 0, b""
        for outgoing in sends:  # `sessions.sent` may append a greeting while this runs
            to, session, plane, message = outgoing
            version = self.sessions.sent(outgoing, now)
            if type(message) not in self._codec.written[version]:
                counters.unspoken += 1
                continue
            try:
                if message is not last or version != written:
                    kind, body = self._codec.encode(message, version)
                    last, written = message, version
                data = self.sealer.seal(plane, session, kind, body, version)
            except ValueError:
                counters.oversized += 1
                continue
            topic = self._codec.topic_of[kind]
            counters.packets_sent[topic] += 1
            counters.bytes_sent[topic] += len(data)
            self._effects.append(Send(to, plane, data))
        sends.clear()
