"""Suspicions under way: who is suspected, by whom, until when (SWIM, shortened by confirmations as in Lifeguard).

A suspicion starts with one accuser and the longest time-out. Each further accuser, counted once, brings the deadline
nearer, down to the shortest after `confirmations` of them. Deadlines are in a heap; an entry that was overtaken by a
confirmation, a postponement or the end of the suspicion is recognised by its deadline and skipped.

Invariant: each suspicion has one entry in the heap with its present deadline, so `wake_at` is never too late.
Cost: O(log suspicions) for each call; `postpone` is O(suspicions). Bounds: one suspicion for each
live member, `confirmations + 1` accusers in each.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from ranvier_py.core.gossip.membership.profile import Profile


class Suspicion:
    """One suspicion. `accusers` in the order they were heard of, each once."""

    __slots__ = ("accusers", "deadline", "postponed_s", "since")

    def __init__(self, accuser: int, now: float) -> None:
        self.since = now
        self.accusers = {accuser: None}
        self.deadline = inf
        self.postponed_s = 0.0

    @property
    def accuser(self) -> int:
        """Whoever was first, as far as this node knows."""
        return next(iter(self.accusers))


class Suspicions:
    """All suspicions by session."""

    __slots__ = ("_deadlines", "_suspicions", "wake_at")

    def __init__(self) -> None:
        self.wake_at = inf
        self._suspicions: dict[int, Suspicion] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._suspicions)

    def get(self, session: int) -> Suspicion | None:
        return self._suspicions.get(session)

    def begin(self, session: int, accuser: int, profile: Profile, members: int, now: float) -> None:
        """Start one, or start it again at a new incarnation: what was said of the old one does not count."""
        suspicion = self._suspicions[session] = Suspicion(accuser, now)
        self._set(session, suspicion, now + profile.suspicion_s(members, 0))

    def confirm(self, session: int, accuser: int, profile: Profile, members: int) -> bool:
        """Somebody else suspects it too. Returns whether that shortened the suspicion, which others should hear."""
        suspicion = self._suspicions.get(session)
        if suspicion is None or accuser in suspicion.accusers:
            return False
        if len(suspicion.accusers) > profile.confirmations(members):
            return False
        suspicion.accusers[accuser] = None
        lasts_s = profile.suspicion_s(members, len(suspicion.accusers) - 1) + suspicion.postponed_s
        self._set(session, suspicion, min(suspicion.deadline, suspicion.since + lasts_s))
        return True

    def rearm(self, session: int, deadline: float) -> None:
        """Put off the end: the member itself was heard."""
        self._set(session, self._suspicions[session], deadline)

    def postpone(self, by_s: float) -> None:
        """Put off all of them: this node was not awake to hear a refutation."""
        for suspicion in self._suspicions.values():
            suspicion.deadline += by_s
            suspicion.postponed_s += by_s
        self._deadlines = [(suspicion.deadline, session) for session, suspicion in self._suspicions.items()]
        heapify(self._deadlines)
        self._skip()

    def end(self, session: int) -> None:
        """Refuted, dead or forgotten."""
        if self._suspicions.pop(session, None) is not None:
            self._skip()

    def expired(self, now: float) -> list[int]:
        """Sessions whose suspicion is over, in the order of their deadlines. Each must be ended or re-armed."""
        over: dict[int, None] = {}  # a deadline that was set twice to the same moment is in the heap twice
        while self._deadlines and self._deadlines[0][0] <= now:
            over[heappop(self._deadlines)[1]] = None
            self._skip()
        return list(over)

    def _set(self, session: int, suspicion: Suspicion, deadline: float) -> None:
        suspicion.deadline = deadline
        heappush(self._deadlines, (deadline, session))
        self._skip()

    def _skip(self) -> None:
        """Drop entries at the top that no suspicion has any more."""
        while self._deadlines:
            deadline, session = self._deadlines[0]
            suspicion = self._suspicions.get(session)
            if suspicion is not None and suspicion.deadline == deadline:
                self.wake_at = deadline
                return
            heappop(self._deadlines)
        self.wake_at = inf
