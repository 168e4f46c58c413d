"""The roster: all other members, the path by which each is reached, and the order in which they are probed.

`Roster` finds members by session and by name, the dead included until they are forgotten; a name leads to its latest
session. `Paths` remembers where UDP is dropped silently (consul#19965, #2200), and probes by stream first there: of one
member after MISSES_MAX probes that only the stream answered, of all when nearly all of the last WINDOW were. One answer
to a datagram puts a member back. The thresholds lie far apart, so that a network that only loses much never swings
between. Invariants: each member's session and name lead to it; `live` counts the live ones (test_roster.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from random import Random

from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.mesh_values import Address
from ranvier_py.core.mesh.wire.messages import Record, State

MISSES_MAX = 3
"""After this many probes in a row that only the stream got through, datagrams count as not reaching the member. At 10 %
loss each way chance alone makes that of one probe in a hundred and fifty. One is enough for a member that never
answered a datagram."""

WINDOW = 16  # probes: eight seconds of them
FIRST = 4  # enough at the start: at 30 % loss chance alone makes four misses in a row of one start in fifteen
TRIAL_S = 60.0  # the longest time between two datagrams to a member that none reaches; from 1 s, doubled each time


@dataclass(eq=False, slots=True)
class Member:
    """One other member. Times are in seconds of this node's clock; -inf is never."""

    record: Record
    since: float  # when it entered its state
    received_at: float = -inf  # when the last packet of the member itself came
    accused_at: float = -inf  # when it was last sent an accusation to refute
    proved: bool = False  # whether its session has proved to us that it is live
    misses: int = 0  # probes in a row whose datagram came to nothing while the stream passed
    passed: bool = False  # whether it ever answered a datagram
    trial_at: float = -inf  # when a datagram is tried again beside the stream
    failures: int = 0  # probes in a row without any answer
    rtt_s: float = nan

    @property
    def session(self) -> int:
        return self.record.session

    @property
    def state(self) -> State:
        return self.record.state

    @property
    def address(self) -> Address:
        return (self.record.host, self.record.port)

    @property
    def live(self) -> bool:
        return self.record.state <= State.SUSPECT

    @property
    def datagrams(self) -> bool:
        """Whether datagrams reach this member, as far as is known, so that no stream is needed."""
        return self.misses < (MISSES_MAX if self.passed else 1)


class Roster(dict[int, Member]):
    """All members but this node, the dead included, by session. Only its methods change it."""

    __slots__ = ("_alive", "_names", "live")

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, int] = {}
        self._alive: tuple[Member, ...] | None = ()
        self.live = 0

    def named(self, name: str) -> Member | None:
        session = self._names.get(name)
        return None if session is None else self[session]

    def alive(self) -> tuple[Member, ...]:
        """Return the live members, in the order in which they became known. The same object until a member comes, goes
        or changes its schema."""
        if self._alive is None:
            self._alive = tuple([one for one in self.values() if one.record.state <= State.SUSPECT])
        return self._alive

    def at(self, address: Address) -> list[Member]:
        """Return the live members at this address: one, unless several claim it. O(members): for rare events."""
        host, port = address
        return [one for one in self.alive() if one.record.host == host and one.record.port == port]

    def add(self, record: Record, now: float) -> Member:
        """Add a session that is not known yet, with a name that no member has."""
        assert record.session not in self
        assert record.name not in self._names
        member = self[record.session] = Member(record, now)
        self._names[record.name] = record.session
        self._count(member, 1)
        return member

    def change(self, member: Member, record: Record, now: float) -> None:
        """Replace the record of a member. A new name must be free."""
        before, was_live = member.record, member.live
        if record.name != before.name:
            assert record.name not in self._names
            del self._names[before.name]
            self._names[record.name] = record.session
        if record.state is not before.state:
            member.since = now
        member.record = record
        self.live += member.live - was_live
        if member.live is not was_live or record.schema != before.schema:
            self._alive = None

    def remove(self, member: Member) -> None:
        del self[member.session]
        del self._names[member.record.name]
        self._count(member, -1)

    def _count(self, member: Member, by: int) -> None:
        if member.live:
            self._alive = None
            self.live += by


class Paths:
    """What this node's probes found out about datagrams. `passing`: they are taken to reach more than a few members."""

    __slots__ = ("_answered", "_counters", "_missed", "_roster", "passing")

    def __init__(self, roster: Roster, counters: MembershipCounters) -> None:
        self.passing = True
        self._roster = roster
        self._counters = counters
        self._missed = 0  # one bit for each answered probe, the newest lowest: 1 if only the stream got through
        self._answered = 0  # how many such bits there are, up to WINDOW

    def met(self, member: Member) -> None:
        """Presume of a newcomer what holds for nearly all; its first probe tries a datagram all the same."""
        if not self.passing:
            presume_missed(member)

    def passed(self, member: Member) -> None:
        """Note that a member answered a datagram."""
        member.misses = 0
        member.passed = True
        member.trial_at = -inf
        self._note(0)

    def missed(self, member: Member, now: float, *, tried: bool = True) -> None:
        """Note that a member answered on the stream alone. `tried`: whether a datagram was sent, too."""
        if tried:
            self._counters.datagrams_missed += 1
            member.misses = min(member.misses + 1, 255)
            over = member.misses - MISSES_MAX
            member.trial_at = now + min(2.0 ** (over - 1), TRIAL_S) if over > 0 else -inf
        self._note(1)

    def _note(self, missed: int) -> None:
        self._answered = min(self._answered + 1, WINDOW)
        self._missed = (self._missed << 1 | missed) & ((1 << WINDOW) - 1)
        misses = self._missed.bit_count()
        if self.passing and self._answered >= FIRST and 8 * misses >= 7 * self._answered:
            self.passing = False
            self._counters.datagrams_given_up += 1
            for member in self._roster.alive():
                presume_missed(member)
        elif not self.passing and 2 * misses <= self._answered:
            self.passing = True


def presume_missed(member: Member) -> None:
    if member.misses < MISSES_MAX:
        member.misses = MISSES_MAX
        member.trial_at = -inf


URGENT_MAX = 16  # members to be probed before their turn; further ones wait for the round
LOOK_AHEAD = 8
"""Among this many next members of the round the most silent one is probed first. In a cluster of ten nodes, where eight
are nearly the whole round, it takes a second off the slowest detections."""


class ProbeOrder:
    """The order of probing: all live members, shuffled, each once; newcomers at random places (SWIM 4.3).

    Between two probes of one member lie at most 2n - 2 others; twice as many while urgent members, which get every
    other turn, never run out. Bound: one place for each live member.
    """

    __slots__ = ("_hastened", "_rest", "_rng", "_urgent")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._rest: list[int] = []  # of this round
        self._urgent: dict[int, None] = {}
        self._hastened = False  # whether the last member was out of turn

    def insert(self, session: int) -> None:
        """Insert a newcomer at a random place in the rest of this round, so that it need not wait for the next one."""
        self._rest.insert(self._rng.randint(0, len(self._rest)), session)

    def remove(self, session: int) -> None:
        """Remove a member that is not live any more, if it has a place in the rest of this round."""
        if session in self._rest:
            self._rest.remove(session)

    def hasten(self, session: int) -> None:
        """Let this session be probed next, unless URGENT_MAX already are."""
        if len(self._urgent) < URGENT_MAX:
            self._urgent[session] = None

    def next(self, roster: Roster) -> Member | None:
        """Return the member to probe now; None when no member is live."""
        member = None if self._hastened else self._next_urgent(roster)
        self._hastened = member is not None
        if member is not None:
            return member
        if not self._rest:
            self._rest = [member.session for member in roster.alive()]
            self._rng.shuffle(self._rest)
        return self._next_in_order(roster)

    def _next_urgent(self, roster: Roster) -> Member | None:
        while self._urgent:
            session = next(iter(self._urgent))
            del self._urgent[session]
            if (member := roster.get(session)) is not None and member.live:
                return member
        return None

    def _next_in_order(self, roster: Roster) -> Member | None:
        """Return the most silent of the next LOOK_AHEAD members; one that it overtakes keeps a place in the round."""
        chosen, chosen_at = None, 0
        for at, session in enumerate(self._rest[:LOOK_AHEAD]):
            member = roster.get(session)
            assert member is not None
            if chosen is None or member.received_at < chosen.received_at:
                chosen, chosen_at = member, at
        if chosen is not None:
            self._rest[chosen_at] = self._rest[0]
            del self._rest[0]
        return chosen
