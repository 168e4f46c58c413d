"""Membership: which nodes are in the cluster and alive. SWIM with Lifeguard, and any packet as evidence of life.

A synchronous state machine over messages: it sees no bytes, keys or sockets, and `sessions` has proved who sent a
message before it gets here. A call that comes more than a probe interval after the next due tick means that this node
was not awake: then the probe under way is void, suspicions and signs of life move by the delay. Invariants: this node
never takes itself for dead; (epoch, incarnation) held for a session never falls (test_members_properties.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from math import inf
from random import Random

from ranvier_py.core.mesh.membership.broadcasts import FIELDS_BYTES, MembershipOutbox, best_plane
from ranvier_py.core.mesh.membership.failure_detector import FailureDetector
from ranvier_py.core.mesh.membership.member_lists import MemberLists
from ranvier_py.core.mesh.membership.member_table import MemberTable
from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.membership.merge_rules import MergeRules
from ranvier_py.core.mesh.membership.profile import Profile
from ranvier_py.core.mesh.membership.relays import Relays
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Ack, Message, Nack, Ping, PingRequest, Push, Record, State, Update
from ranvier_py.core.mesh.wire.messages import Members as MemberList

CORRECTIONS_MAX = 8  # answers to stale records in one message; the sender's next message brings the next ones
FAREWELLS_MAX = 32  # members that this node sends its leaving directly. It reaches the others by gossip in a second.
EXPORTED_MAX = 256  # records kept across a restart: under 64 KiB, and far more than is needed to find the cluster again


class Membership:
    """All of membership behind one object. Times are seconds of one monotonic clock.

    `room_bytes` is how much of a message's body fits a datagram; with `datagrams` False everything goes on streams. The
    owner drains `sends` (its own list), `changes`, `gone` and `needs_greeting` after each call, and calls `tick` at
    `wake_at` or later.
    """

    def __init__(
        self,
        me: Record,
        profile: Profile,
        sends: list[Outgoing],
        rng: Random,
        now: float,
        *,
        room_bytes: int,
        datagrams: bool = True,
    ) -> None:
        room = room_bytes - FIELDS_BYTES
        self.table = table = MemberTable(me, profile, room, rng)
        self._rng = rng
        self._identity = table.identity
        self._health = table.health
        self._counters = table.counters
        self._broadcasts = table.broadcasts
        self._outbox = MembershipOutbox(sends, table.broadcasts, room, datagrams=datagrams)
        self._detector = FailureDetector(table, self._outbox, now)
        self._relays = Relays(table, self._outbox)
        self._rules = MergeRules(table, self._outbox)
        self.lists = MemberLists(table, sends, room if datagrams else 0, now)
        self.neighbours = table.neighbours
        self.changes = table.changes  # what the operator wants to see; the owner drains it
        self.gone = table.dead.gone  # sessions to forget everywhere; the owner drains it
        self.left_at = inf  # after `leave`: when the leaving has spread and this node may stop
        self._awake_at = now  # lateness before this time was dealt with
        self._ticked_at = now
        self._broadcasts.push(Update(me), now)

    # --- what it knows ------------------------------------------------------------------------------------------------

    @property
    def me(self) -> Record:
        """What this node says about itself. Its epoch and name may change; keep the epoch across restarts."""
        return self._identity.record

    def alive(self) -> Sequence[Member]:
        """The others that are ALIVE or SUSPECT. The same object until something changes."""
        return self.table.roster.alive()

    def everybody(self) -> Iterable[Member]:
        """All other members, the dead included."""
        return self.table.roster.values()

    def member(self, session: int) -> Member | None:
        """Return a known member, perhaps dead."""
        return self.table.roster.get(session)

    def size(self) -> int:
        """Live members, this node included."""
        return self.table.members

    def statistics(self) -> MembershipCounters:
        """The counters, with the gauges as they are now."""
        table, counters = self.table, self._counters
        counters.alive = table.roster.live
        counters.suspects = len(table.suspicions)
        counters.dead = len(table.dead.died)
        counters.contacts = len(table.contacts)
        counters.queued = len(self._broadcasts)
        counters.relays = len(self._relays)
        counters.health = self._health.score
        counters.helped_share = self._health.helped_share
        counters.strained = self._health.strained
        return counters

    # --- time ---------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick`, and `needs_greeting` after it, must be called next. Any call may bring it nearer."""
        table = self.table
        if self._identity.record.state is State.LEFT:
            return min(self._broadcasts.wake_at, self._relays.wake_at)
        if table.neighbours.widened:
            return 0.0
        return min(self._timers_at, table.greetings.wake_at, table.contacts.wake_at)

    @property
    def _timers_at(self) -> float:
        return min(
            self._detector.wake_at,
            self._relays.wake_at,
            self._broadcasts.wake_at,
            self.table.suspicions.wake_at,
            self.lists.wake_at,
        )

    def tick(self, now: float) -> None:
        """Do all that is due."""
        if not self._identity.leaving:
            self._note_lateness(now)
            self._probe(now)
            self._expire(now)
            self.lists.tick(now)
            self.table.reap(now)
        self._relays.tick(now)
        if now >= self._broadcasts.wake_at:
            self._gossip(now)
        self._ticked_at = now

    def needs_greeting(self, now: float) -> list[Address]:
        """Return the addresses to send a Hello to now. Each is returned once; the rate is limited here."""
        if self._identity.leaving:
            return []
        table = self.table
        for session in table.neighbours.unmet() if table.neighbours.widened else ():
            table.greetings.want(session, table.members, now)
        if now < table.greetings.wake_at and now < table.contacts.wake_at:
            return []
        wanted = dict.fromkeys(table.greetings.due(table.roster, table.neighbours, now))
        for address in table.contacts.due(table.members, now):
            if not table.roster.at(address):
                wanted[address] = None
        wanted.pop((self.me.host, self.me.port), None)
        self._counters.greetings += len(wanted)
        return list(wanted)

    # --- what happens -------------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: Message, now: float, plane: Plane = Plane.DATAGRAM) -> None:
        """Take a message from a proved session. `plane` is the one it came by, so that the answer takes the same."""
        self._wake_up(now)
        self.received_from(peer.session, now)
        if correction := self._rules.superseded(peer.session):
            self._correct(peer, [correction])
        match message:
            case Ping(seq, updates):
                self._take_in(peer, updates, now)
                self._outbox.ack(peer, seq, plane)
            case Ack(seq, updates):
                if not self._detector.acked(peer, seq, now):
                    self._relays.acked(peer.session, seq)
                self._take_in(peer, updates, now)
            case PingRequest():
                self._take_in(peer, message.updates, now)
                target = self.member(message.session)
                first = () if target is None else self._detector.accusation(target)
                self._relays.relay(peer, message, plane, first, now)
            case Nack(seq):
                self._detector.nacked(peer.session, seq)
            case Push(updates):
                self._take_in(peer, updates, now)
            case MemberList():
                self._read_list(peer, message, now, plane)
            case _:
                raise AssertionError(f"{type(message).__name__} is not a message of membership")
        if self.table.dead.returned:
            self.table.dead.returned = False
            self.lists.hurry(now)

    def proved(self, record: Record, now: float) -> None:
        """Note that a session has just proved to be live; `record` is what it says about itself."""
        if record.session == self.me.session:
            return
        self._wake_up(now)
        if record.state is not State.LEFT:
            record = record._replace(state=State.ALIVE)
        before = self.member(record.session)
        was_dead = before is not None and not before.live
        address = (record.host, record.port)
        correction = self._rules.merge(Update(record), record.session, now)
        member = self.member(record.session)
        if member is not None:
            self.table.proved(member)
            self._detector.proved(record.session)
            self.received_from(record.session, now)
        elif correction is not None:  # a later session has its name
            self._correct(Peer(record.session, address), [correction])
        self.lists.met(address, record.session, was_dead, now)

    def received_from(self, session: int, now: float) -> None:
        """Note that a packet of this session was opened: it is alive, whatever others report."""
        member = self.table.roster.get(session)
        if member is None:
            return
        member.received_at = now
        if member.record.state is State.ALIVE:
            return
        if member.record.state is not State.LEFT or now - member.since > self._farewell_s:
            self._rules.accuse(member, now)

    def unreachable(self, address: Address, now: float, plane: Plane = Plane.DATAGRAM) -> None:
        """Note that the edge could not send to this address: it counts like a ping without an answer."""
        self._counters.sends_failed += 1
        self._detector.unreachable(address, plane, now, relayed=self._relays.pinging(address))

    def move(self, name: str, host: str, public: str, now: float) -> None:
        """Change what this node says about itself; whoever knows it learns that by gossip."""
        self._identity.move(name, host, public)
        self._broadcasts.push(Update(self.me), now)

    def is_namesake(self, session: int) -> bool:
        """Whether this session had this node's name when it began."""
        return self._identity.is_namesake(session)

    def regain_name(self, now: float, free_s: float) -> str:
        """Take the given name again if this node has another one, and no live member has had that for `free_s`. Returns
        the name that it had; "" if it keeps it."""
        mine = self._identity
        holders = [each for each in self.everybody() if each.record.name == mine.given_name] if mine.is_renamed else []
        if not mine.is_renamed or mine.leaving or any(each.live or now - each.since < free_s for each in holders):
            return ""
        before = mine.record.name
        mine.regain(max((each.record.epoch for each in holders), default=0))
        self._broadcasts.push(Update(self.me), now)
        return before

    def leave(self, now: float) -> None:
        """Announce that this node leaves, which spreads until `left_at`. Pings are still answered after that."""
        if self._identity.leaving:
            return
        self._identity.leave()
        self._broadcasts.push(Update(self.me), now)
        met = self.neighbours.acquainted()
        for member in self._rng.sample(met, min(len(met), FAREWELLS_MAX)):
            self._outbox.push(member.address, member.session, [Update(self.me)], best_plane(member))
        self.left_at = now + self._farewell_s

    # --- across restarts ----------------------------------------------------------------------------------------------

    def export(self) -> list[Record]:
        """Return the records to look for after a restart: the live members, then those that died last."""
        dead = (self.member(session) for session in reversed(self.table.dead.died))
        fallen = (member.record for member in dead if member is not None and member.record.state is State.DEAD)
        return list(islice(chain((member.record for member in self.alive()), fallen), EXPORTED_MAX))

    def plane_of(self, session: int) -> Plane:
        """Return how short and frequent messages reach this member, as the probes found out."""
        member = self.member(session)
        return best_plane(member) if member is not None and self._outbox.datagrams else Plane.PROBE

    def remember(self, records: Sequence[Record], now: float) -> None:
        """Take what `export` returned before a restart. Only addresses count: sessions there prove themselves anew."""
        for record in records:
            self.table.contacts.remember((record.host, record.port), now)

    # --- parts of the above -------------------------------------------------------------------------------------------

    @property
    def _farewell_s(self) -> float:
        """One dissemination time: within it an update is sent as often as it ever will be."""
        return self._health.profile.gossip_interval_s * self._broadcasts.times

    def _take_in(self, peer: Peer, updates: Sequence[Update], now: float) -> None:
        """Merge the updates of a peer, and send it corrections of those that are stale."""
        if updates:
            self._correct(peer, self._rules.merge_all(updates, peer.session, now))

    def _read_list(self, peer: Peer, message: MemberList, now: float, plane: Plane) -> None:
        self._rules.joining = self.lists.joining
        corrections = self._rules.merge_all(map(Update, message.records), peer.session, now, listed=True)
        if message.reply:
            self.lists.answer(peer, now, plane)
        else:
            self.lists.read(peer.session)
            self._correct(peer, corrections)

    def _correct(self, peer: Peer, corrections: Sequence[Update]) -> None:
        if not corrections:
            return
        self._counters.corrections += min(len(corrections), CORRECTIONS_MAX)
        self._counters.corrections_dropped += max(0, len(corrections) - CORRECTIONS_MAX)
        member = self.member(peer.session)
        plane = Plane.DATAGRAM if member is None else best_plane(member)
        self._outbox.push(peer.address, peer.session, corrections[:CORRECTIONS_MAX], plane)

    def _wake_up(self, now: float) -> None:
        """Check whether this node was awake, before reports about others are judged. Usually one comparison."""
        interval_s = self._health.profile.probe_interval_s
        if now - self._ticked_at > interval_s and not self._identity.leaving and self._late_s(now) > interval_s:
            self._start_over(now)

    def _late_s(self, now: float) -> float:
        return now - max(self._timers_at, self._awake_at)

    def _note_lateness(self, now: float) -> None:
        late_s = self._late_s(now)
        if late_s > self._health.profile.probe_interval_s:
            self._start_over(now)
        elif late_s > self._health.profile.probe_timeout_s / 2:
            self._counters.late_ticks += 1
            self._health.worse()

    def _start_over(self, now: float) -> None:
        """Void or postpone what elapsed while this node was not awake."""
        late_s = self._late_s(now)
        self._awake_at = now
        self._counters.late_wakes += 1
        self._health.worst()
        self._detector.void(now)
        self._relays.clear()
        self.table.suspicions.postpone(late_s)
        for member in self.alive():
            member.received_at = min(now, member.received_at + late_s)

    def _probe(self, now: float) -> None:
        failed = self._detector.tick(now)
        if failed is None:
            return
        if failed.record.state is State.ALIVE:
            self.table.suspect(failed, failed.record, self.me.session, now, "did not answer a probe")
        else:
            self.table.confirm(failed, self.me.session, now)
        self._rules.accuse(failed, now)

    def _expire(self, now: float) -> None:
        """Declare members dead whose suspicion is over, unless a packet of the member itself came meanwhile."""
        for session in self.table.suspicions.expired(now):
            member, suspicion = self.member(session), self.table.suspicions.get(session)
            assert member is not None
            assert suspicion is not None
            evidence_until = member.received_at + self._health.profile.evidence_s
            if member.received_at > suspicion.since and now < evidence_until:
                self._counters.vetoes += 1
                self.table.suspicions.rearm(session, evidence_until)
            else:
                why = f"suspected by {len(suspicion.accusers)} for {now - suspicion.since:.1f} s"
                self.table.bury(member, member.record._replace(state=State.DEAD), now, why)
            self._rules.accuse(member, now)

    def _gossip(self, now: float) -> None:
        """Send the updates that wait to a few random members."""
        met = self.neighbours.acquainted()
        for member in self._rng.sample(met, min(len(met), self._health.profile.gossip_fanout)):
            if not self._outbox.gossip(member):
                break
        self._broadcasts.ticked(now)
        if self._broadcasts.storming:
            self.lists.soon(now)
