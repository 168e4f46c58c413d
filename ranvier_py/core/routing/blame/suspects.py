"""Whom the failures of one request blame: the backends, or the request.

Invariant: what every engine fails blames none (test_suspects.py, test_poison.py). Rule, once it has ended or a backend
has begun to serve it: if one served it, all that failed it are to blame. If several failed it, or one failed and
another refused it, the request is. If a single one failed it and nobody else could tell, it is blamed, but only once
for equal requests: who repeats what breaks engines opens no circuit. Bound: the tries of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.health import FAULTS, Outcome


class Fault(NamedTuple):
    """A failure that a process of a backend is blamed for. `cause`: counted once for equal ones, unless it is None.
    `was_seen`: the client had a part of the answer, so that nobody could mend it."""

    backend: BackendId
    generation: int
    outcome: Outcome
    cause: int | None = None
    was_seen: bool = False
    sent_at: float = 0.0


class Suspects:
    """The failures of one request that nobody was blamed for yet. `cause` is equal for equal requests."""

    __slots__ = ("_faults", "cause")

    def __init__(self, cause: int) -> None:
        self.cause = cause
        self._faults: list[Fault] = []

    def add(
        self, backend: BackendId, generation: int, outcome: Outcome, *, was_seen: bool = False, sent_at: float = 0.0
    ) -> bool:
        """Take in how a try ended that was sent then. Returns whether its blame is settled later, by `settle`."""
        # a failed connect says nothing of the request, and always counts
        if outcome not in FAULTS or outcome is Outcome.CONNECT_ERROR:
            return False
        self._faults.append(Fault(backend, generation, outcome, was_seen=was_seen, sent_at=sent_at))
        return True

    def settle(self, outcome: Outcome) -> Sequence[Fault]:
        """Return who is to blame, when the request has ended so; SUCCESS also if it is about to. Empties the list."""
        faults, self._faults = self._faults, []
        if outcome is Outcome.SUCCESS:
            return faults
        several = any(fault.backend != faults[0].backend for fault in faults)
        if several or outcome is Outcome.REFUSED:
            return ()
        return [fault._replace(cause=self.cause) for fault in faults]
