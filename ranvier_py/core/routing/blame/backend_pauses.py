"""Which backends want a pause, and from whom: they answered that they have no room (`judgements`).

Invariant: who pauses is asked last, all the same if no other can be, and opens no circuit (test_overload.py). It ends
by itself. A pause for one credential concerns no other; all requests without one have the same. They are kept as
digests.
Bounds: CREDENTIALS_MAX; the oldest goes, and is counted. No pause is longer than `judgements.PAUSE_MAX_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter

CREDENTIALS_MAX = 4096
"""Of clients that were limited in the last half minute: 1 MB."""


@dataclass(slots=True)
class PauseCounters:
    """What happened since the start."""

    begun: dict[str, int] = counter("Pauses that backends asked for: from everybody, or one credential.", label="whom")
    dropped: int = counter("Pauses of one credential dropped for want of room.")


class Pauses:
    """The pauses of all backends. `now` is in seconds of any steady clock."""

    __slots__ = ("_everybody", "_personal", "counters", "over_at")

    def __init__(self) -> None:
        self.counters = PauseCounters()
        self._everybody: dict[BackendId, float] = {}  # until when
        self._personal: BoundedDict[bytes, dict[BackendId, float]] = BoundedDict(CREDENTIALS_MAX)  # by credential
        self.over_at = 0.0  # when the last pause of all ends

    def begin(self, backend: BackendId, until: float, credential: bytes | None = None) -> None:
        """Have it pause until then, at least. `credential`: for requests with this one alone."""
        self.counters.begun["everybody" if credential is None else "credential"] += 1
        ends = self._everybody
        if credential is not None:
            ends = self._personal.get(credential, {})
            self._personal[credential] = ends
            self.counters.dropped = self._personal.dropped
        ends[backend] = max(until, ends.get(backend, until))
        self.over_at = max(self.over_at, until)

    def of(self, credential: Callable[[], bytes], now: float) -> tuple[BackendId, ...]:
        """Return the backends that pause for requests with this credential, which is computed only if it matters."""
        if now >= self.over_at:
            self._everybody.clear()
            self._personal.clear()
            return ()
        own = self._personal.get(credential(), {}) if self._personal else {}
        return tuple(sorted({id_ for ends in (self._everybody, own) for id_, until in ends.items() if now < until}))

    def left_s(self, backend: BackendId, now: float) -> float:
        """Return how long it pauses for everybody, from now; 0 if it does not."""
        return max(0.0, self._everybody.get(backend, now) - now)

    def forget(self, backend: BackendId) -> None:
        """Forget its pause for everybody: another process is behind it, or another backend has its id."""
        self._everybody.pop(backend, None)
