"""First contact between two sessions, and the gate that every packet passes afterwards.

    A -> Hello(record A, c1)  B -> Echo(record B, c1, c2)  A -> Echo(record A, c2, 0): each has proved to be live

Rules: a session that repeated a number of ours is bound to its record and address; what it sealed before is refused for
ever. Contact is written in BASE_VERSION and says what its sender speaks; all else in the highest that both speak, to
strangers in the lowest. Answers go to the address in a record, never to a packet's source (NAT), are limited, and to a
stranger no longer than its question. Invariant: a packet is taken once, and of a live session (test_sessions.py).
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.contact.challenges import ANY, Challenges, RateLimit
from ranvier_py.core.mesh.contact.other_protocols import OtherProtocols
from ranvier_py.core.mesh.contact.session_counters import SessionCounters
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import BODY_BYTES_MIN, HELLO, Codec
from ranvier_py.core.mesh.wire.frame import BASE_VERSION, PROTOCOL_VERSION, SPOKEN, BadFrame, common_version
from ranvier_py.core.mesh.wire.messages import Ack, Challenge, Echo, Hello, Message, Nack, Record
from ranvier_py.core.mesh.wire.seal import Opened

SESSIONS_MAX = 4096  # four times the largest cluster: room for the runs before a storm of restarts
RETIRED_MAX = 1024
ANSWERED_MAX = 8192  # strangers remembered; a packet of one beyond may be answered again, within the rate
RESEND_S = 2.0
RESEND_MAX = 1024  # messages kept to be sent again, one for each address, at most a datagram each: 1.2 MiB
GREET_INTERVAL_S = 0.5  # how soon the same address is greeted again: a lost Hello costs half a second
GREETINGS_PER_INTERVAL = 1024
ANSWER_INTERVAL_S = 0.2
ANSWERS_PER_INTERVAL = 256  # 1280 answers to strangers a second: a thousand nodes that start at once are done in one

WINDOW = 4096  # packets. A node of a large cluster sends 50 a second: a packet later than 80 s is lost.
WINDOW_MASK = (1 << WINDOW) - 1


class Incoming(NamedTuple):
    """A packet that was taken; in any case it shows that `peer` is alive.

    `message` is its content, None if it was about contact or can't be read. `proved` is the session's record, set once
    for each proof that the session is live.
    """

    peer: Peer
    message: Message | None = None
    proved: Record | None = None


class ReplayWindow:
    """The counters of one sender that may still come: those above `floor`, each once.

    It holds the highest counter so far, and one bit for each of the WINDOW counters up to it, set if that counter has
    not come yet. A sender counts all its packets to all receivers, so gaps are the rule.
    """

    __slots__ = ("highest", "missing")

    def __init__(self, floor: int) -> None:
        self.highest = floor
        self.missing = 0

    def take(self, counter: int) -> bool:
        """Take a counter. Returns False if it has come before, or is too old for the window to know."""
        ahead = counter - self.highest
        if ahead > 0:
            skipped = (1 << ahead) - 2 if ahead < WINDOW else WINDOW_MASK - 1
            self.missing = (self.missing << ahead | skipped) & WINDOW_MASK if ahead < WINDOW else skipped
            self.highest = counter
            return True
        if -ahead >= WINDOW:
            return False
        bit = 1 << -ahead
        if not self.missing & bit:
            return False
        self.missing ^= bit
        return True


class KnownSession:
    """One proved session. `knows_us`: it has shown that we are proved to it as well. `version`: in which it is written
    to; `release`: of its software."""

    __slots__ = ("address", "floor", "knows_us", "received_at", "record", "release", "version", "windows")

    def __init__(self, record: Record, counter: int, now: float) -> None:
        self.record = record
        self.address: Address = (record.host, record.port)
        self.floor = counter
        self.received_at = now
        self.knows_us = False
        self.version, self.release = PROTOCOL_VERSION, ""
        self.windows: list[ReplayWindow | None] = [None] * len(Plane)

    def take(self, plane: Plane, counter: int) -> bool:
        window = self.windows[plane]
        if window is None:
            window = self.windows[plane] = ReplayWindow(self.floor)
        return window.take(counter)

    def highest(self) -> int:
        return max([self.floor, *(window.highest for window in self.windows if window is not None)])


class KnownSessions(dict[int, KnownSession]):
    """The proved sessions. Of two with one name the higher epoch displaces the other at once; membership decides about
    any others. What a forgotten one sealed before counts no more. `counters` are those of the gate."""

    __slots__ = ("_by_name", "_counters", "_retired", "_sessions_max", "by_address")

    def __init__(self, counters: SessionCounters, sessions_max: int) -> None:
        super().__init__()
        self.by_address: dict[Address, int] = {}
        self._counters = counters
        self._sessions_max = sessions_max
        self._by_name: dict[str, int] = {}
        self._retired: BoundedDict[int, int] = BoundedDict(RETIRED_MAX)

    def retired_at(self, session: int) -> int:
        """Return the highest counter of a session that was forgotten; 0 for others."""
        return self._retired.get(session, 0)

    def prove(self, record: Record, counter: int, now: float) -> KnownSession:
        """Take up a live session. `counter` is that of its proof: packets with lower ones are refused from now on."""
        other = self._by_name.get(record.name, 0)
        if other and self[other].record.epoch < record.epoch:
            self._counters.replaced += 1
            self.forget(other)
        if len(self) >= self._sessions_max:
            self._counters.evicted += 1
            self.forget(min(self, key=lambda session: self[session].received_at))
        self._counters.proved += 1
        self._retired.pop(record.session, None)
        known = self[record.session] = KnownSession(record, counter, now)
        self.bind(known, record)
        return known

    def bind(self, known: KnownSession, record: Record) -> None:
        """Give a session its record, and the place and the name in it."""
        self._unbind(known)
        known.record, known.address = record, (record.host, record.port)
        self.by_address[known.address] = record.session
        self._by_name.setdefault(record.name, record.session)

    def forget(self, session: int) -> None:
        known = self.pop(session, None)
        if known is not None:
            self._unbind(known)
            self._retired[session] = known.highest()

    def _unbind(self, known: KnownSession) -> None:
        session = known.record.session
        if self.by_address.get(known.address) == session:
            del self.by_address[known.address]
        if self._by_name.get(known.record.name) == session:
            del self._by_name[known.record.name]


class Sessions:
    """First contact and the gate. It appends its messages to `sends`; the owner calls `sent` with all that is sent.

    `me` is our own record; the owner replaces it whenever membership does. `about`: the highest version that this node
    speaks, and the release of its software, as it says them.
    """

    def __init__(
        self,
        me: Record,
        sends: list[Outgoing],
        rng: Random,
        codec: Codec,
        sessions_max: int = SESSIONS_MAX,
        release: str = "",
    ) -> None:
        self.me = me
        self.about = PROTOCOL_VERSION, release
        self._codec = codec
        self._sends = sends
        self._challenges = Challenges(rng)
        self._counters = SessionCounters()
        self._known = KnownSessions(self._counters, sessions_max)
        self._answered: BoundedDict[tuple[int, Plane], int] = BoundedDict(ANSWERED_MAX)  # the last answered counter
        self._resend: BoundedDict[Address, tuple[Outgoing, float]] = BoundedDict(RESEND_MAX)
        self._greetings = RateLimit(GREET_INTERVAL_S, GREETINGS_PER_INTERVAL)
        self._answers = RateLimit(ANSWER_INTERVAL_S, ANSWERS_PER_INTERVAL)
        self.others = OtherProtocols()

    def address_of(self, session: int) -> Address | None:
        """Return the address of a proved session; None for others."""
        known = self._known.get(session)
        return None if known is None else known.address

    def known(self, session: int) -> KnownSession | None:
        """Return a proved session, to be read; None for others."""
        return self._known.get(session)

    def session_at(self, address: Address) -> int:
        """Return the session that last proved that it is at this address; 0 if none is known."""
        return self._known.by_address.get(address, 0)

    def statistics(self) -> SessionCounters:
        """The counters, with the gauges as they are now."""
        counters = self._counters
        counters.sessions = len(self._known)
        return counters

    # --- what we send -------------------------------------------------------------------------------------------------

    def greet(self, address: Address, now: float, plane: Plane = Plane.DATAGRAM) -> bool:
        """Send a Hello, unless the address is ours or was greeted just now. Returns whether it was sent."""
        if address == (self.me.host, self.me.port) or not self._greetings.may(address, now):
            return False
        self._counters.greetings += 1
        self._send(address, 0, plane, Hello(self.me, self._challenges.ask(ANY, now), *self.about))
        return True

    def sent(self, outgoing: Outgoing, now: float) -> int:
        """Note that a message is sent now. Returns the version to write it in. A datagram is kept for a while, in case
        its receiver does not know us.

        A message to a session that we do not know is followed by a greeting: its answer would be refused. So is one
        over a stream to a session that may not know us: that session could not challenge us.
        """
        to, session, plane, message = outgoing
        if isinstance(message, Hello | Echo | Challenge):
            return BASE_VERSION
        if plane is Plane.DATAGRAM:
            self._resend[to] = (outgoing, now)
        known = self._known.get(session)
        if known is None or not (known.knows_us or plane is Plane.DATAGRAM):
            self.greet(to, now, plane)
        return SPOKEN[0] if known is None else known.version

    def forget(self, session: int) -> None:
        """Forget a session that membership has forgotten. If it returns, it has to prove itself again."""
        self._known.forget(session)

    def _send(self, to: Address, session: int, plane: Plane, message: Message) -> None:
        self._sends.append(Outgoing(to, session, plane, message))

    # --- what comes ---------------------------------------------------------------------------------------------------

    def accept(self, opened: Opened, source: Address, now: float) -> Incoming | None:
        """Return what an opened packet brought; None if it is refused or its sender stays a stranger. Never raises."""
        if opened.session == self.me.session:
            self._counters.own += 1
            return None
        known = self._known.get(opened.session)
        if opened.receiver != self.me.session and (opened.receiver or opened.kind != HELLO.number):
            self._counters.receiver += 1
            if known is None:
                self._challenge(opened, source, now)
            return None
        if not self._may_pass(opened, known, source, now):
            return None
        try:
            message = self._codec.decode(opened.kind, opened.body, opened.version)
        except BadFrame:
            self._counters.body += opened.kind in self._codec.topic_of
            self._counters.unknown += opened.kind not in self._codec.topic_of
            return None if known is None else Incoming(Peer(opened.session, known.address))
        if isinstance(message, Hello):
            return self._hello(opened, message, known, now)
        if isinstance(message, Echo):
            return self._echo(opened, message, known, now)
        if isinstance(message, Challenge):
            return self._challenged(opened, message, known, source, now)
        assert known is not None
        if isinstance(message, Ack | Nack):  # it took our question, so it knows us
            known.knows_us = True
        return Incoming(Peer(opened.session, known.address), message)

    def _may_pass(self, opened: Opened, known: KnownSession | None, source: Address, now: float) -> bool:
        """Whether to read a packet for us: a stranger's if it is about contact, a known session's if it is new. Only a
        Hello may be for any session; a stranger's datagram for another one is challenged, so that a node that comes
        back meets those that still probe its old session."""
        if known is None:
            if self._codec.topic_of.get(opened.kind) != "contact":
                self._counters.stranger += 1
                self._challenge(opened, source, now)
                return False
        elif not known.take(opened.plane, opened.counter):
            self._counters.replay += 1
            return False
        else:
            known.received_at = now
        return True

    def _challenge(self, opened: Opened, source: Address, now: float) -> None:
        if opened.plane is not Plane.DATAGRAM:
            return
        if len(opened.body) < BODY_BYTES_MIN:
            self._counters.short += 1
        elif self._may_answer(opened, source, now):
            question = Challenge(self._challenges.ask(opened.session, now))
            self._send(source, opened.session, opened.plane, question)

    def _may_answer(self, opened: Opened, to: Address, now: float) -> bool:
        """Whether to answer a stranger: not a packet that was answered, nor an older one, nor beyond the rate: replayed
        packets use up at most one answer each."""
        key = opened.session, opened.plane
        if opened.counter <= max(self._answered.get(key, 0), self._known.retired_at(opened.session)):
            self._counters.replay += 1
            return False
        self._answered[key] = opened.counter
        if not self._answers.may(to, now):
            self._counters.limited += 1
            return False
        return True

    def _understood(self, opened: Opened, message: Hello | Echo, now: float) -> bool:
        """Whether a handshake is of the session that sealed it, and of a node that speaks a version of ours."""
        if message.record.session != opened.session:
            self._counters.record += 1
            return False
        if not common_version(message.speaks, self.about[0]):
            self._counters.version += 1
            self.others.note(message.record.host, message.speaks, now)
            return False
        return True

    def _hello(self, opened: Opened, hello: Hello, known: KnownSession | None, now: float) -> Incoming | None:
        """Answer a Hello: prove ourselves, and ask for a proof unless the session has proved this address. A
        replayed Hello only makes us write to its author, whose record has the address."""
        record = hello.record
        if not self._understood(opened, hello, now):
            return None
        address = (record.host, record.port)
        if known is not None and known.address == address:
            known.knows_us = False
            self._send(address, record.session, opened.plane, Echo(self.me, hello.challenge, 0, *self.about))
            return Incoming(Peer(record.session, address))
        echo = Echo(self.me, hello.challenge, self._challenges.ask(record.session, now), *self.about)
        if len(self._codec.encode(echo)[1]) > len(opened.body):
            self._counters.short += 1
        elif self._may_answer(opened, address, now):
            self._send(address, record.session, opened.plane, echo)
        return None if known is None else Incoming(Peer(record.session, known.address))

    def _echo(self, opened: Opened, echo: Echo, known: KnownSession | None, now: float) -> Incoming | None:
        """Take an Echo, which is a proof if it repeats our number. Send a proof in return if it asks for one."""
        record = echo.record
        if not self._understood(opened, echo, now):
            return None
        proof = self._challenges.answered(record.session, echo.nonce, now)
        if not proof and known is None:
            self._counters.nonce += 1
            return None
        proved = None
        if known is None:
            if opened.counter <= self._known.retired_at(record.session):
                self._counters.replay += 1
                return None
            known = self._known.prove(record, opened.counter, now)
            proved = record
        elif proof and known.record != record:  # membership may not have taken the earlier one, of a lower epoch
            self._known.bind(known, record)
            proved = record
        known.knows_us = not echo.challenge
        known.version, known.release = common_version(echo.speaks, self.about[0]), echo.release
        if echo.challenge:
            self._send(known.address, record.session, opened.plane, Echo(self.me, echo.challenge, 0, *self.about))
        return Incoming(Peer(record.session, known.address), proved=proved)

    def _challenged(
        self, opened: Opened, challenge: Challenge, known: KnownSession | None, source: Address, now: float
    ) -> Incoming | None:
        """Answer a Challenge of a session that did not know us: prove ourselves, and send the dropped message again. A
        stranger's is heeded only from an address that we wrote to within RESEND_S."""
        address = source if known is None else known.address
        again, sent_at = self._resend.pop(address, (None, now))
        if again is None or sent_at < now - RESEND_S:
            again = None
            if known is None:
                self._counters.unsolicited += 1
                return None
        ask = self._challenges.ask(opened.session, now) if known is None else 0
        self._send(address, opened.session, opened.plane, Echo(self.me, challenge.challenge, ask, *self.about))
        if again is not None and again.session == opened.session:
            self._counters.resent += 1
            self._sends.append(again)
        return None if known is None else Incoming(Peer(opened.session, address))
