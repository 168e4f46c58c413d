"""First contact between two sessions, and the gate that every packet passes afterwards.

    A -> Hello(record A, c1)  B -> Echo(record B, c1, c2)  A -> Echo(record A, c2, 0): each has proved to be live

Rules: a session that repeated a number of ours is bound to its record and address; what it sealed before is refused for
ever. Invariant: a packet is taken once, and of a live session (test_sessions.py, test_sessions_replay.py). Answers go
to the address in a record, never to a packet's source (NAT). No answer to a stranger is longer than the question;
answers are limited. Bounds: RESEND_MAX, ANSWERED_MAX; the oldest goes first.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.contact.challenges import ANY, Challenges, RateLimit
from ranvier_py.core.mesh.contact.known_sessions import SESSIONS_MAX, KnownSession, KnownSessions, SessionCounters
from ranvier_py.core.mesh.contact.other_protocols import OtherProtocols
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import BODY_BYTES_MIN, HELLO, Codec
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.mesh.wire.messages import Ack, Challenge, Echo, Hello, Message, Nack, Record
from ranvier_py.core.mesh.wire.seal import Opened

ANSWERED_MAX = 8192  # strangers remembered; a packet of one beyond may be answered again, within the rate
RESEND_S = 2.0
RESEND_MAX = 1024  # messages kept to be sent again, one for each address, at most a datagram each: 1.2 MiB
GREET_INTERVAL_S = 0.5  # how soon the same address is greeted again: a lost Hello costs half a second
GREETINGS_PER_INTERVAL = 1024
ANSWER_INTERVAL_S = 0.2
ANSWERS_PER_INTERVAL = 256  # 1280 answers to strangers a second: a thousand nodes that start at once are done in one


class Incoming(NamedTuple):
    """A packet that was taken; in any case it shows that `peer` is alive.

    `message` is its content, None if it was about contact or can't be read. `proved` is the session's record, set once
    for each proof that the session is live.
    """

    peer: Peer
    message: Message | None = None
    proved: Record | None = None


class Sessions:
    """First contact and the gate. It appends its messages to `sends`; the owner calls `sent` with all that is sent.

    `me` is our own record; the owner replaces it whenever membership does.
    """

    def __init__(
        self, me: Record, sends: list[Outgoing], rng: Random, codec: Codec, sessions_max: int = SESSIONS_MAX
    ) -> None:
        self.me = me
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
        self._send(address, 0, plane, Hello(self.me, self._challenges.ask(ANY, now)))
        return True

    def sent(self, outgoing: Outgoing, now: float) -> None:
        """Note that a message is sent now. A datagram is kept for a while, in case its receiver does not know us.

        A message to a session that we do not know is followed by a greeting: its answer would be refused. So is one
        over a stream to a session that may not know us: that session could not challenge us.
        """
        to, session, plane, message = outgoing
        if isinstance(message, Hello | Echo | Challenge):
            return
        if plane is Plane.DATAGRAM:
            self._resend[to] = (outgoing, now)
        known = self._known.get(session)
        if known is None or not (known.knows_us or plane is Plane.DATAGRAM):
            self.greet(to, now, plane)

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
            message = self._codec.decode(opened.kind, opened.body)
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

    def _hello(self, opened: Opened, hello: Hello, known: KnownSession | None, now: float) -> Incoming | None:
        """Answer a Hello: prove ourselves, and ask for a proof unless the session has proved this address. A
        replayed Hello only makes us write to its author, whose record has the address."""
        record = hello.record
        if record.session != opened.session:
            self._counters.record += 1
            return None
        address = (record.host, record.port)
        if known is not None and known.address == address:
            known.knows_us = False
            self._send(address, record.session, opened.plane, Echo(self.me, hello.challenge, 0))
            return Incoming(Peer(record.session, address))
        echo = Echo(self.me, hello.challenge, self._challenges.ask(record.session, now))
        if len(self._codec.encode(echo)[1]) > len(opened.body):
            self._counters.short += 1
        elif self._may_answer(opened, address, now):
            self._send(address, record.session, opened.plane, echo)
        return None if known is None else Incoming(Peer(record.session, known.address))

    def _echo(self, opened: Opened, echo: Echo, known: KnownSession | None, now: float) -> Incoming | None:
        """Take an Echo, which is a proof if it repeats our number. Send a proof in return if it asks for one."""
        record = echo.record
        if record.session != opened.session:
            self._counters.record += 1
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
        if echo.challenge:
            self._send(known.address, record.session, opened.plane, Echo(self.me, echo.challenge, 0))
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
        self._send(address, opened.session, opened.plane, Echo(self.me, challenge.challenge, ask))
        if again is not None and again.session == opened.session:
            self._counters.resent += 1
            self._sends.append(again)
        return None if known is None else Incoming(Peer(opened.session, address))
