"""Suspicions under way: which members are suspected, by whom, until when (SWIM; confirmations shorten them: Lifeguard).

A suspicion starts with one accuser and the longest time-out. Each further accuser, counted once, brings the deadline
nearer; after `confirmations` of them it is the shortest. Cost: O(1) for each change, O(suspicions) when a deadline may
have passed. Bounds: one suspicion for each live member, `confirmations + 1` accusers in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ranvier_py.core.mesh.membership.profile import Profile


@dataclass(slots=True)
class Suspicion:
    """One suspicion. `accusers` are in the order in which their accusations came, each once."""

    since: float
    accusers: dict[int, None]
    deadline: float
    postponed_s: float = 0.0

    @property
    def accuser(self) -> int:
        """The first accuser, as far as this node knows."""
        return next(iter(self.accusers))


class Suspicions(dict[int, Suspicion]):
    """All suspicions by session, to be changed by these methods alone. No deadline is before `wake_at`, which is looked
    for anew only then: thousands may begin and end with one packet."""

    def __init__(self) -> None:
        super().__init__()
        self.wake_at = inf

    def begin(self, session: int, accuser: int, profile: Profile, members: int, now: float) -> None:
        """Start a suspicion, or start it again at a new incarnation: accusers of the old one do not count."""
        deadline = now + profile.suspicion_s(members, 0)
        self[session] = Suspicion(now, {accuser: None}, deadline)
        self.wake_at = min(self.wake_at, deadline)

    def confirm(self, session: int, accuser: int, profile: Profile, members: int) -> bool:
        """Add an accuser. Returns whether that shortened the suspicion, so that others should know."""
        suspicion = self.get(session)
        if suspicion is None or accuser in suspicion.accusers:
            return False
        if len(suspicion.accusers) > profile.confirmations(members):
            return False
        suspicion.accusers[accuser] = None
        lasts_s = profile.suspicion_s(members, len(suspicion.accusers) - 1) + suspicion.postponed_s
        self.rearm(session, min(suspicion.deadline, suspicion.since + lasts_s))
        return True

    def rearm(self, session: int, deadline: float) -> None:
        """Set the deadline: nearer by a confirmation, later since a packet of the member itself came."""
        self[session].deadline = deadline
        self.wake_at = min(self.wake_at, deadline)

    def postpone(self, by_s: float) -> None:
        """Postpone all deadlines: this node was not awake to receive a refutation."""
        for suspicion in self.values():
            suspicion.deadline += by_s
            suspicion.postponed_s += by_s
        self.wake_at += by_s

    def end(self, session: int) -> None:
        """End a suspicion, if there is one: its member has refuted it, is dead or forgotten."""
        self.pop(session, None)

    def expired(self, now: float) -> list[int]:
        """Return the sessions whose suspicion is over, by deadline. The caller must end or re-arm each."""
        if now < self.wake_at:
            return []
        over = [(one.deadline, session) for session, one in self.items() if one.deadline <= now]
        self.wake_at = min((one.deadline for one in self.values() if one.deadline > now), default=inf)
        return [session for _, session in sorted(over)]
