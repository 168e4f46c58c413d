"""The latest decisions of a router, and what its policy weighed for some of them while somebody looks.

Bounds: so many decisions as the operator keeps; of WEIGHED_MAX the terms, of one decision in WEIGHED_EVERY_S, since
they are computed on the path of the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ranvier_py.core.routing.placement import Decision

Terms = Sequence[Mapping[str, float]]

WEIGHED_MAX = 256
WEIGHED_EVERY_S = 0.05


class RecentDecisions:
    """See the module. `made`: time, request, decision; the latest last. `weighed_until`: while anybody looks."""

    def __init__(self, kept: int) -> None:
        self.made: deque[tuple[float, bytes, Decision]] = deque(maxlen=kept)
        self.weighed_until = 0.0
        self._weighed: deque[tuple[Decision, Terms]] = deque(maxlen=WEIGHED_MAX)
        self._next_at = 0.0

    def keep(self, kept: int) -> None:
        """Keep so many decisions from now on."""
        self.made = deque(self.made, kept)

    def weigh(self, decision: Decision, terms: Callable[[], Terms], now: float) -> None:
        """Note what the policy weighs for each candidate of a decision, in their order, if it is time for one."""
        if now >= self._next_at:
            self._next_at = now + WEIGHED_EVERY_S
            self._weighed.append((decision, terms()))

    def find(self, request_id: bytes) -> tuple[float, Decision] | None:
        """Return the last decision about a request, and when it was made."""
        return next(((at, decision) for at, each, decision in reversed(self.made) if each == request_id), None)

    def terms_of(self, decision: Decision) -> Terms | None:
        """Return what was weighed for a decision; None if nobody looked."""
        return next((terms for each, terms in self._weighed if each is decision), None)
