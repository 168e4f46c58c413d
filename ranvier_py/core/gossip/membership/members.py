"""Membership: who is in the cluster and alive. SWIM with Lifeguard, and packets as evidence of life.

A synchronous state machine over messages. It never sees bytes, keys or sockets; `sessions` proves who sent a message
before it gets here. The rules are in the parts:

    identity        what this node says about itself, refuting, its epoch and name
    reports of others         what to believe of what others say
    ledger          the tables, and each step of a member through them; `roster` finds members and orders the probes
    probing         one probe in each interval; `relays` pings for others
    suspicion       time-outs, shortened by confirmations
    local_health    slower when this node or the network is unwell; `profile` has the numbers
    broadcasts      updates that spread; `post` writes the letters they ride on
    member_lists    push-pull of whole lists
    circle          whom to know directly: everybody, or in a large cluster the neighbours on some rings
    contacts        whom to greet: members known by reports of others, and the dead, for a day

A call that comes more than a probe interval after the time of the next tick means that this node was not awake: nobody
is to blame for what went unanswered. So the probe under way is void, suspicions are put off by as long, who was heard
just before counts as heard just now, and local health is at its worst. Packets that waited should still be received
before the tick.

Invariants: this node never takes itself for dead; (epoch, incarnation) held for a session never falls. Cost: O(1) for
each message beside the updates in it; O(members) for lists, and once in each round of probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import inf
from random import Random

from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Outgoing, Peer, Plane
from ranvier_py.core.gossip.membership.broadcasts import Broadcasts
from ranvier_py.core.gossip.membership.failure_detector import Prober
from ranvier_py.core.gossip.membership.identity import Identity
from ranvier_py.core.gossip.membership.local_health import LocalHealth
from ranvier_py.core.gossip.membership.member_lists import MemberLists
from ranvier_py.core.gossip.membership.member_table import Ledger
from ranvier_py.core.gossip.membership.membership_counters import Counts, MembersStatistics, MemberView
from ranvier_py.core.gossip.membership.membership_outbox import FIELDS_BYTES, Post
from ranvier_py.core.gossip.membership.merge_rules import MergeRules
from ranvier_py.core.gossip.membership.profile import Profile
from ranvier_py.core.gossip.membership.relays import Relays
from ranvier_py.core.gossip.membership.roster import Member
from ranvier_py.core.gossip.wire.messages import Ack, Message, Nack, Ping, PingRequest, Push, Record, State, Update
from ranvier_py.core.gossip.wire.messages import Members as MemberList

CORRECTIONS_MAX = 8
"""Answers to stale records in one message; the sender's next message brings the next ones."""

FAREWELLS_MAX = 32
"""Members told of leaving directly. Gossip tells the others within a second."""

EXPORTED_MAX = 256
"""Records kept across a restart: under 64 KiB, and far more than is needed to find the cluster again."""


class Members:
    """All of membership behind one object. Times are seconds of one monotonic clock.

    `size_of` tells the bytes of an update on the wire; `room_bytes` what a datagram holds of a message's body;
    `datagrams` False sends everything on streams. Whoever owns this drains `outbox` (its own list), `changes`, `gone`
    and `needs_greeting` after each call, and calls `tick` at `wake_at` or later.
    """

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        me: Record,
        profile: Profile,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        size_of: Callable[[Update], int],
        room_bytes: int,
        datagrams: bool = True,
    ) -> None:
        room = room_bytes - FIELDS_BYTES
        self._counts = counts = Counts()
        self._rng = rng
        self._identity = Identity(me)
        self._health = LocalHealth(profile)
        self._broadcasts = Broadcasts(profile.retransmit_mult, profile.gossip_interval_s, size_of, room, counts)
        self._post = Post(outbox, self._broadcasts, size_of=size_of, room_bytes=room, datagrams=datagrams)
        self._ledger = Ledger(me, self._broadcasts, self._health, counts, rng)
        self._prober = Prober(self._ledger, self._post, self._health, counts, rng)
        self._relays = Relays(self._ledger.roster, self._post, counts)
        self._merge_rules = MergeRules(self._identity, self._ledger, self._post, self._health, counts)
        parts = self._identity, self._ledger, self._health
        self._lists = MemberLists(*parts, outbox, counts, rng, size_of=size_of, datagram_bytes=room if datagrams else 0)
        self.neighbours = self._ledger.neighbours
        self.left_at = inf  # after `leave`: when the news has spread and this node may stop
        self._awake_at = now  # lateness before this is settled
        self._ticked_at = now
        self._prober.start(now)
        self._lists.start(now)
        self._broadcasts.push(Update(me), now)

    # --- what it knows ------------------------------------------------------------------------------------------------

    @property
    def me(self) -> Record:
        """What this node says about itself. Its epoch and name may change; keep the epoch across restarts."""
        return self._identity.record

    @property
    def changes(self) -> list[MemberChange]:
        """What the operator wants to see. Drain it."""
        return self._ledger.changes

    @property
    def gone(self) -> list[int]:
        """Sessions to forget everywhere. Drain it."""
        return self._ledger.gone

    def alive(self) -> Sequence[Member]:
        """The others that are ALIVE or SUSPECT. The same object until something changes."""
        return self._ledger.roster.alive()

    def member(self, session: int) -> Member | None:
        """Somebody known, perhaps dead."""
        return self._ledger.roster.get(session)

    def by_name(self, name: str) -> Member | None:
        """The latest session of this name, perhaps dead."""
        return self._ledger.roster.named(name)

    def size(self) -> int:
        """Live members, this node included."""
        return self._ledger.members

    # --- time ---------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick`, and `needs_greeting` after it, are wanted next. Any call may bring it nearer."""
        ledger = self._ledger
        if self._identity.record.state is State.LEFT:
            return min(self._broadcasts.wake_at, self._relays.wake_at)
        if ledger.neighbours.widened:
            return 0.0
        return min(
            self._prober.wake_at,
            self._relays.wake_at,
            self._broadcasts.wake_at,
            ledger.suspicions.wake_at,
            self._lists.wake_at,
            ledger.greetings.wake_at,
            ledger.contacts.wake_at,
        )

    @property
    def _timers_at(self) -> float:
        return min(
            self._prober.wake_at,
            self._relays.wake_at,
            self._broadcasts.wake_at,
            self._ledger.suspicions.wake_at,
            self._lists.wake_at,
        )

    def tick(self, now: float) -> None:
        """Do all that is due."""
        if not self._identity.leaving:
            self._note_lateness(now)
            self._probe(now)
            self._expire(now)
            self._lists.tick(now)
            self._ledger.reap(now)
        self._relays.tick(now)
        if now >= self._broadcasts.wake_at:
            self._gossip(now)
        self._ticked_at = now

    def needs_greeting(self, now: float) -> list[Address]:
        """Addresses to send a Hello to now. Each is given once; the rate is limited here."""
        if self._identity.leaving:
            return []
        ledger = self._ledger
        for session in ledger.neighbours.unmet() if ledger.neighbours.widened else ():
            ledger.greetings.want(session, ledger.members, now)
        if now < ledger.greetings.wake_at and now < ledger.contacts.wake_at:
            return []
        wanted = dict.fromkeys(ledger.greetings.due(ledger.roster, ledger.neighbours, now))
        for address in ledger.contacts.due(ledger.members, now):
            if not ledger.roster.at(address):
                wanted[address] = None
        wanted.pop((self.me.host, self.me.port), None)
        self._counts.greetings += len(wanted)
        return list(wanted)

    # --- what happens -------------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: Message, now: float, plane: Plane = Plane.DATAGRAM) -> None:
        """A message from a proved session. `plane` is where it came from, so that the answer takes the same way."""
        self._wake_up(now)
        self.heard(peer.session, now)
        if correction := self._merge_rules.superseded(peer.session):
            self._correct(peer, [correction])
        match message:
            case Ping(seq, updates):
                self._take_in(peer, updates, now)
                self._post.ack(peer, seq, plane)
            case Ack(seq, updates):
                if not self._prober.acked(peer, seq, now):
                    self._relays.acked(peer.session, seq)
                self._take_in(peer, updates, now)
            case PingRequest():
                self._take_in(peer, message.updates, now)
                target = self.member(message.session)
                first = () if target is None else self._prober.accusation(target)
                self._relays.ask(peer, message, plane, first, self._health.profile, now)
            case Nack(seq):
                self._prober.nacked(peer.session, seq)
            case Push(updates):
                self._take_in(peer, updates, now)
            case MemberList():
                self._read_list(peer, message, now, plane)
            case _:
                raise AssertionError(f"{type(message).__name__} is not a message of membership")
        if self._ledger.returned:
            self._ledger.returned = False
            self._lists.hurry(now)

    def proved(self, record: Record, now: float) -> None:
        """This session has just proved to be live, and says this about itself."""
        if record.session == self.me.session:
            return
        self._wake_up(now)
        if record.state is not State.LEFT:
            record = record._replace(state=State.ALIVE)
        before = self.member(record.session)
        was_dead = before is not None and not before.live
        address = (record.host, record.port)
        correction = self._merge_rules.hear(Update(record), record.session, now)
        member = self.member(record.session)
        if member is not None:
            self._ledger.proved(member)
            self._prober.proved(record.session)
            self.heard(record.session, now)
        elif correction is not None:  # it has lost its name
            self._correct(Peer(record.session, address), [correction])
        self._lists.met(address, record.session, was_dead, now)

    def heard(self, session: int, now: float) -> None:
        """A packet of this session opened: it is alive, whatever others say."""
        member = self.member(session)
        if member is None:
            return
        member.heard_at = now
        if member.record.state is State.ALIVE:
            return
        if member.record.state is not State.LEFT or now - member.since > self._farewell_s:
            self._merge_rules.accuse(member, now)

    def unreachable(self, address: Address, now: float, plane: Plane = Plane.DATAGRAM) -> None:
        """The edge could not send there: as good as a ping without an answer."""
        self._counts.sends_failed += 1
        self._prober.unreachable(address, plane, now, relayed=self._relays.pinging(address))

    def leave(self, now: float) -> None:
        """Say goodbye. Until `left_at` the news spreads, and pings are answered as long as this object lives."""
        if self._identity.leaving:
            return
        self._identity.leave()
        self._broadcasts.push(Update(self.me), now)
        met = self.neighbours.acquainted()
        for member in self._rng.sample(met, min(len(met), FAREWELLS_MAX)):
            self._post.tell(member.address, member.session, [Update(self.me)], self._post.best_plane(member))
        self.left_at = now + self._farewell_s

    # --- across restarts ----------------------------------------------------------------------------------------------

    def export(self) -> list[Record]:
        """Whom to look for after a restart: the live, then the last of the dead."""
        dead = (self.member(session) for session in reversed(self._ledger.dead))
        fallen = (member.record for member in dead if member is not None and member.record.state is State.DEAD)
        return list(islice(chain((member.record for member in self.alive()), fallen), EXPORTED_MAX))

    def remember(self, records: Sequence[Record], now: float) -> None:
        """What `export` gave before the restart. Only the addresses count: whoever is there now proves itself."""
        for record in records:
            self._ledger.contacts.remember((record.host, record.port), now)

    # --- what it shows ------------------------------------------------------------------------------------------------

    def statistics(self) -> MembersStatistics:
        """Counters and sizes."""
        ledger = self._ledger
        return MembersStatistics(
            counts=replace(self._counts),
            alive=ledger.roster.live,
            suspects=len(ledger.suspicions),
            dead=len(ledger.dead),
            contacts=len(ledger.contacts),
            queued=len(self._broadcasts),
            relays=len(self._relays),
            health=self._health.score,
            helped_share=self._health.helped_share,
            strained=self._health.strained,
        )

    def view(self, now: float) -> list[MemberView]:
        """Every member, the dead included. O(members)."""
        return [MemberView.of(member, now) for member in self._ledger.roster.everybody()]

    # --- parts of the above -------------------------------------------------------------------------------------------

    @property
    def _farewell_s(self) -> float:
        """One dissemination time: an update has been sent as often as it is sent."""
        return self._health.profile.gossip_interval_s * self._broadcasts.times

    def _take_in(self, peer: Peer, updates: Sequence[Update], now: float) -> None:
        """News from somebody. What it has wrong it is told."""
        if updates:
            told = [self._merge_rules.hear(update, peer.session, now) for update in updates]
            self._correct(peer, [correction for correction in told if correction is not None])

    def _read_list(self, peer: Peer, message: MemberList, now: float, plane: Plane) -> None:
        self._merge_rules.joining = self._lists.joining
        told = self._merge_rules.hear_list(message.records, peer.session, now)
        if message.reply:
            self._lists.answer(peer, now, plane)
        else:
            self._lists.read(peer.session)
            self._correct(peer, told)

    def _correct(self, peer: Peer, corrections: Sequence[Update]) -> None:
        if not corrections:
            return
        self._counts.corrections += min(len(corrections), CORRECTIONS_MAX)
        self._counts.corrections_dropped += max(0, len(corrections) - CORRECTIONS_MAX)
        member = self.member(peer.session)
        plane = Plane.DATAGRAM if member is None else self._post.best_plane(member)
        self._post.tell(peer.address, peer.session, corrections[:CORRECTIONS_MAX], plane)

    def _wake_up(self, now: float) -> None:
        """Before what is said about others is judged: was this node awake? The usual case costs one comparison."""
        if now - self._ticked_at > self._health.profile.probe_interval_s and not self._identity.leaving:
            late_s = self._late_s(now)
            if late_s > self._health.profile.probe_interval_s:
                self._start_over(late_s, now)

    def _late_s(self, now: float) -> float:
        return now - max(self._timers_at, self._awake_at)

    def _note_lateness(self, now: float) -> None:
        late_s = self._late_s(now)
        if late_s > self._health.profile.probe_interval_s:
            self._start_over(late_s, now)
        elif late_s > self._health.profile.probe_timeout_s / 2:
            self._counts.late_ticks += 1
            self._health.worse()

    def _start_over(self, late_s: float, now: float) -> None:
        """This node was not awake for so long."""
        self._awake_at = now
        self._counts.late_wakes += 1
        self._health.worst()
        self._prober.void(now)
        self._relays.clear()
        self._ledger.suspicions.postpone(late_s)
        for member in self.alive():
            member.heard_at = min(now, member.heard_at + late_s)

    def _probe(self, now: float) -> None:
        failed = self._prober.tick(now)
        if failed is None:
            return
        if failed.record.state is State.ALIVE:
            self._ledger.suspect(failed, failed.record, self.me.session, now, "did not answer a probe")
        else:
            self._ledger.confirm(failed, self.me.session, now)
        self._merge_rules.accuse(failed, now)

    def _expire(self, now: float) -> None:
        """Suspicions that are over: death, unless the member itself was heard meanwhile."""
        for session in self._ledger.suspicions.expired(now):
            member, suspicion = self.member(session), self._ledger.suspicions.get(session)
            assert member is not None
            assert suspicion is not None
            evidence_until = member.heard_at + self._health.profile.evidence_s
            if member.heard_at > suspicion.since and now < evidence_until:
                self._counts.vetoes += 1
                self._ledger.suspicions.rearm(session, evidence_until)
            else:
                why = f"suspected by {len(suspicion.accusers)} for {now - suspicion.since:.1f} s"
                self._ledger.bury(member, member.record._replace(state=State.DEAD), now, why)
            self._merge_rules.accuse(member, now)

    def _gossip(self, now: float) -> None:
        """Send what waits to a few members at random."""
        met = self.neighbours.acquainted()
        for member in self._rng.sample(met, min(len(met), self._health.profile.gossip_fanout)):
            if not self._post.gossip(member):
                break
        self._broadcasts.ticked(now)
        if self._broadcasts.storming:
            self._lists.soon(now)
