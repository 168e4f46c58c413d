"""Claims that traffic made of a worker, and that the worker has to confirm within a lease. Pure.

A snapshot may have been taken before the prompt was cached, so what it lacks proves nothing of what was served a moment
ago; it does two syncs later.

Bound: `LEASES_MAX`, the oldest is dropped and counted: its claim then ends by its time to live. Cost: 0.5 us.
"""

from __future__ import annotations

from collections.abc import Iterator

from ranvier_py.core.ids import BackendId, Fingerprint

LEASE_S = 10.0
"""Two syncs: a snapshot that was taken just before the first token says nothing of it, the next one does."""

LEASES_MAX = 65_536


class Leases:
    """(backend, fingerprint) -> when it ends."""

    def __init__(self) -> None:
        self._ends: dict[tuple[BackendId, Fingerprint], float] = {}  # all of one length, so the first ends first
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, lease: tuple[BackendId, Fingerprint]) -> bool:
        return lease in self._ends

    def begin(self, backend: BackendId, fingerprint: Fingerprint, now: float) -> None:
        """From now on, unless it has one: being served again confirms nothing."""
        self._ends.setdefault((backend, fingerprint), now + LEASE_S)
        if len(self._ends) > LEASES_MAX:
            del self._ends[next(iter(self._ends))]
            self.dropped += 1

    def settle(self, backend: BackendId, fingerprint: Fingerprint) -> None:
        """The worker said something of it."""
        self._ends.pop((backend, fingerprint), None)

    def ended(self, now: float) -> Iterator[tuple[BackendId, Fingerprint]]:
        """Those that are over, which end with it."""
        while self._ends:
            lease, until = next(iter(self._ends.items()))
            if until > now:
                return
            del self._ends[lease]
            yield lease
