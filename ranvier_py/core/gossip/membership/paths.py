"""Which way to a member: datagrams, or the stream. Some networks drop UDP and say nothing (consul#19965, #2200).

memberlist finds that out anew with every probe, after the datagram's time-out. Here it is remembered:

    one member    MISSES_MAX probes in a row that only the stream got through, or its first one: from then on its
                  stream comes first
    nearly all    of the last WINDOW probes that were answered: then so it is for everybody, newcomers included

One datagram in answer and the member is back on datagrams. They are tried beside the stream, at once after the verdict
and then ever more seldom, up to TRIAL_S. This is what *this* node's pings found, there and back, so ways that are
blocked in one direction, or between two nodes alone, are known for what they are at both ends.

The two thresholds lie far apart (7/8 and 1/2), so that a network that only loses much never swings between them: at
30 % loss each way a datagram and its answer fail in half of all probes. A wrong verdict costs a stream that was not
needed, until the next probe. Cost: O(1) for each probe; O(members) when nearly all change.
"""

from __future__ import annotations

from math import inf

from ranvier_py.core.gossip.membership.membership_counters import Counts
from ranvier_py.core.gossip.membership.roster import MISSES_MAX, Member, Roster

WINDOW = 16
"""Probes: eight seconds of them."""

FIRST = 4
"""So many are enough at the start. At 30 % loss chance alone makes four misses in a row of one start in fifteen."""

TRIAL_S = 60.0
"""The longest time between two datagrams to a member that none reaches; from 1 s, doubled each time."""


class Ways:
    """What the probes of this node found out about datagrams. `passing`: they reach more than a few members."""

    __slots__ = ("_answered", "_counts", "_missed", "_roster", "passing")

    def __init__(self, roster: Roster, counts: Counts) -> None:
        self.passing = True
        self._roster = roster
        self._counts = counts
        self._missed = 0  # a bit for each answered probe, the newest lowest: whether only the stream answered
        self._answered = 0  # how many of them there are, up to WINDOW

    def met(self, member: Member) -> None:
        """A newcomer: what holds for nearly all is presumed of it, and tried with its first probe."""
        if not self.passing:
            self._presume(member)

    def wants_trial(self, member: Member, now: float) -> bool:
        """Whether a datagram should go out beside the stream. Asked once for each probe."""
        return now >= member.trial_at

    def passed(self, member: Member) -> None:
        """It answered a datagram."""
        member.misses = 0
        member.passed = True
        member.trial_at = -inf
        self._note(0)

    def missed(self, member: Member, now: float, *, tried: bool = True) -> None:
        """It answered on the stream alone. Not `tried`: no datagram was sent."""
        if tried:
            self._counts.datagrams_missed += 1
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
            self._counts.datagrams_given_up += 1
            for member in self._roster.alive():
                self._presume(member)
        elif not self.passing and 2 * misses <= self._answered:
            self.passing = True

    def _presume(self, member: Member) -> None:
        if member.misses < MISSES_MAX:
            member.misses = MISSES_MAX
            member.trial_at = -inf
