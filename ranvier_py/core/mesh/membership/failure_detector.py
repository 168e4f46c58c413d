"""The failure detector: one probe at a time, each within one interval, asks whether a member is alive (SWIM).

    at 0           ping by datagram; on the stream where `Paths` knows that datagrams do not pass, now and then on both
    at time-out    no answer: ping on the path that was not tried, and ask k random others to ping the member
    at interval    still no answer: the probe failed, unless packets of the member itself came in meanwhile

Any answer ends the probe, the member's own or a relay's. A member whose session is not proved is greeted instead, by
both paths in turn. Invariant: `wake_at` is finite: probing never stops (test_failure_detector.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ranvier_py.core.mesh.membership.broadcasts import MembershipOutbox
from ranvier_py.core.mesh.membership.member_table import MemberTable
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.mesh_values import Address, Peer, Plane
from ranvier_py.core.mesh.wire.messages import State, Update

SPARE_RELAYS = 4  # members drawn beyond those asked, so that suspects can be passed over
GREETINGS = 3
"""Probes of a member without proof until it is suspected. They come a second apart, and greetings to one address half a
second; some greetings by datagram follow pings on behalf of others, so two probes may leave one path out."""

RTT_WEIGHT = 0.2  # of the newest measurement in the mean


@dataclass(eq=False, slots=True)
class Probe:
    """The probe under way."""

    member: Member
    seq: int
    stream_seq: int
    started_at: float
    help_at: float
    ends_at: float
    helped: bool = False
    stream_first: bool = False
    tried: bool = False  # a datagram was sent
    relays: dict[int, bool] = field(default_factory=dict)  # session -> whether it sent a nack


class FailureDetector:
    """Probes one member after the other."""

    def __init__(self, table: MemberTable, outbox: MembershipOutbox, now: float) -> None:
        """The first probe comes after a random part of an interval, so that nodes started together probe apart."""
        self._table = table
        self._outbox = outbox
        self._health = table.health
        self._counters = table.counters
        self._rng = table.rng
        self._probe: Probe | None = None
        self._rescued: Probe | None = None  # answered on the stream; its datagram may be answered until the next probe
        self._next_at = self.wake_at = now + self._rng.uniform(0, self._health.interval_s)

    def _arm(self) -> None:
        """Set `wake_at`, after each change of the probe under way."""
        probe = self._probe
        if probe is None:
            self.wake_at = self._next_at
        else:
            self.wake_at = probe.ends_at if probe.helped else probe.help_at

    def tick(self, now: float) -> Member | None:
        """Do what is due. Returns the member that failed its probe."""
        failed = None
        probe = self._probe
        if probe is not None and now >= probe.ends_at:
            failed = self._fail(probe)
        elif probe is not None and not probe.helped and now >= probe.help_at:
            self._get_help(probe)
        if self._probe is None and now >= self._next_at:
            self._begin(now)
        self._arm()
        return failed

    def acked(self, peer: Peer, seq: int, now: float) -> bool:
        """Take an ack. Returns whether it answers the probe."""
        probe = self._probe
        if probe is None or seq not in (probe.seq, probe.stream_seq):
            return self._late(peer, seq)
        direct = peer.session == probe.member.session
        if not direct and peer.session not in probe.relays:
            return False
        if direct and (seq == probe.seq or probe.stream_first):
            self._measure(probe, now)
        if direct and seq == probe.seq:
            self._table.paths.passed(probe.member)
        elif direct:
            self._counters.stream_rescues += 1
            self._rescued = probe
        self._succeed(probe)
        return True

    def _late(self, peer: Peer, seq: int) -> bool:
        """Take an ack of a datagram that comes after the one on the stream: datagrams do pass."""
        probe = self._rescued
        if probe is None or seq != probe.seq or peer.session != probe.member.session:
            return False
        self._table.paths.passed(probe.member)
        self._rescued = None
        return True

    def nacked(self, session: int, seq: int) -> None:
        """Note the nack of a relay: the relay is well, but the target has not answered it."""
        probe = self._probe
        if probe is not None and seq == probe.seq and session in probe.relays:
            probe.relays[session] = True

    def proved(self, session: int) -> None:
        """End the probe of a session that has just proved to be live: that is an answer."""
        if self._probe is not None and self._probe.member.session == session:
            self._succeed(self._probe)

    def unreachable(self, address: Address, plane: Plane, now: float, *, relayed: bool) -> None:
        """Note that the edge could not send there. `relayed`: we ping there on behalf of a node that follows it up.

        The wait for a direct answer ends at once (memberlist#242: it counted as success). Another member is probed
        next, but not if `relayed`: all relays would probe the dead member, and then theirs, until every node does.
        """
        probe = self._probe
        if probe is not None and probe.member.address == address:
            if plane is self._first_plane(probe):
                probe.help_at = min(probe.help_at, now)
                self._arm()
            return
        for member in () if relayed else self._table.roster.at(address):
            self._table.probe_order.hasten(member.session)

    def void(self, now: float) -> None:
        """Void the probe under way, since this node was not awake. The next one starts an interval later."""
        if self._probe is not None:
            self._counters.probes_void += 1
            self._probe = None
        self._next_at = now + self._health.profile.probe_interval_s
        self._arm()

    def accusation(self, member: Member) -> tuple[Update, ...]:
        """Return the accusation to send a suspect with a ping, so that it can refute; empty for other members."""
        suspicion = self._table.suspicions.get(member.session)
        return () if suspicion is None else (Update(member.record, suspicion.accuser),)

    def _first_plane(self, probe: Probe) -> Plane:
        return Plane.PROBE if probe.stream_first or not self._outbox.datagrams else Plane.DATAGRAM

    def _begin(self, now: float) -> None:
        table, health = self._table, self._health
        self._next_at = now + health.interval_s
        rescued, self._rescued = self._rescued, None
        if rescued is not None:  # only the stream got the last probe through: its datagram counts as missed
            table.paths.missed(rescued.member, now, tried=rescued.tried)
        member = table.probe_order.next(table.roster)
        if member is None:
            return
        self._counters.probes += 1
        seqs = self._outbox.next_seq(), self._outbox.next_seq()
        probe = self._probe = Probe(member, *seqs, now, now + health.timeout_s, now + health.interval_s)
        if not member.proved:
            table.greetings.urge(member.address, now)
            return
        probe.stream_first = self._outbox.datagrams and not member.datagrams
        if probe.stream_first:
            self._counters.stream_first += 1
            self._ping(probe, Plane.PROBE)
        if not probe.stream_first or now >= member.trial_at:
            self._ping(probe, Plane.DATAGRAM)

    def _ping(self, probe: Probe, plane: Plane) -> None:
        """Ping the probed member on this plane. The outbox puts datagrams on the stream where there are none."""
        member, by_stream = probe.member, plane is Plane.PROBE
        probe.tried |= not by_stream
        seq = probe.stream_seq if by_stream else probe.seq
        self._outbox.ping(member.address, member.session, seq, plane, self.accusation(member))

    def _get_help(self, probe: Probe) -> None:
        probe.helped = True
        member = probe.member
        accusation = self.accusation(member)
        if self._outbox.datagrams and member.proved:
            if not probe.stream_first:
                self._ping(probe, Plane.PROBE)
            elif not probe.tried:
                self._ping(probe, Plane.DATAGRAM)
        for relay in self._draw_relays(member):
            probe.relays[relay.session] = False
            self._outbox.request_ping(relay, probe.seq, member, accusation)

    def _draw_relays(self, target: Member) -> list[Member]:
        """Draw k others at random, suspects last. Drawing without repetition finds an only candidate, too."""
        met = self._table.neighbours.acquainted()
        wanted = self._health.profile.relays
        drawn = self._rng.sample(met, min(len(met), wanted + SPARE_RELAYS))
        fit = [member for member in drawn if member is not target]
        fit.sort(key=lambda member: member.state is State.SUSPECT)
        return fit[:wanted]

    def _succeed(self, probe: Probe) -> None:
        self._probe = None
        probe.member.failures = 0
        self._arm()
        self._health.better()
        self._health.answered(probe.helped)
        self._counters.probes_helped += probe.helped

    def _fail(self, probe: Probe) -> Member | None:
        self._probe = None
        member = probe.member
        if not member.live or self._table.roster.get(member.session) is not member:
            return None  # buried or replaced by a later session while it was probed
        if member.received_at >= probe.started_at:
            self._counters.probes_spared += 1
            return None
        member.failures = min(member.failures + 1, 255)
        if not member.proved and member.failures < GREETINGS and self._outbox.datagrams:
            self._counters.probes_repeated += 1
            self._table.probe_order.hasten(member.session)
            return None
        self._counters.probes_failed += 1
        self._health.worse(len(probe.relays) - sum(probe.relays.values()) if probe.relays else 1)
        return member

    def _measure(self, probe: Probe, now: float) -> None:
        rtt_s = now - probe.started_at
        mean_s = probe.member.rtt_s
        known = mean_s == mean_s  # NaN before the first  # noqa: PLR0124
        probe.member.rtt_s = mean_s + RTT_WEIGHT * (rtt_s - mean_s) if known else rtt_s
