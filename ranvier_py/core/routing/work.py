"""What one router has at one backend: requests in flight, and the prefill that waits there.

Invariant: every `begin` has one `end`, and at most one `prefilled` between them; then all counts are exact.
"""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """What one router, or several together, have at one backend."""

    requests: int
    waiting: int = 0  # of these, those whose first token has not come
    tokens: int = 0  # of these: prompt tokens to be computed before it

    def plus(self, other: Load) -> Load:
        return Load(self.requests + other.requests, self.waiting + other.waiting, self.tokens + other.tokens)

    def minus(self, other: Load) -> Load:
        return Load(self.requests - other.requests, self.waiting - other.waiting, self.tokens - other.tokens)


NO_LOAD = Load(0)


class Work:
    """Counts of one router's own requests at one backend."""

    __slots__ = ("inflight", "own_decoding", "own_progress_at", "own_tokens")

    def __init__(self) -> None:
        self.inflight = 0
        self.own_decoding = 0  # of these, those whose first token has come
        self.own_tokens = 0  # of the others: prompt tokens to be computed before it
        self.own_progress_at = 0.0  # when one of them became the first of those that wait

    @property
    def waiting(self) -> int:
        """Requests that it waits with for their first token."""
        return self.inflight - self.own_decoding

    @property
    def progress_at(self) -> float:
        """When the first of those that wait became the first."""
        return self.own_progress_at

    @property
    def own_waiting(self) -> int:
        """Requests in flight whose first token has not come."""
        return self.inflight - self.own_decoding

    @property
    def own_load(self) -> Load:
        return Load(self.inflight, self.inflight - self.own_decoding, self.own_tokens)

    def begin(self, tokens: int, now: float, *, seen: bool) -> None:
        """A request is on its way with so many tokens to compute.

        Where its first token will not be `seen`, since the answer comes as a whole, it counts as decoding at once.
        """
        if not seen:
            self.own_decoding += 1
        else:
            if self.inflight == self.own_decoding and not self.waiting:
                self.own_progress_at = now
            self.own_tokens += tokens
        self.inflight += 1

    def prefilled(self, tokens: int, now: float) -> float:
        """A first token that can be seen came; `tokens` as when it began. Returns seconds since the last progress."""
        gap_s = now - self.progress_at
        self.own_tokens -= tokens
        self.own_decoding += 1
        self.own_progress_at = now
        return gap_s

    def end(self, tokens: int, *, decoding: bool) -> None:
        """A request ended; `tokens` as when it began, `decoding`: its first token came, or could not be seen."""
        assert self.inflight > 0, f"ended without beginning: {self!r}"
        self.inflight -= 1
        if decoding:
            self.own_decoding -= 1
        else:
            self.own_tokens -= tokens


class SharedWork(Work):
    """The same together with what peers have there: the engine serves all in turn. Satisfies what policies ask of a
    backend's work."""

    __slots__ = ()

    def peers_now(self) -> Load:
        """What peers have there, as they report."""
        raise NotImplementedError

    def peers_progress_at(self) -> float:
        """When a first token of theirs was heard of, or that one of them had become the first."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        return self.inflight - self.own_decoding + self.peers_now().waiting

    @property
    def progress_at(self) -> float:
        return max(self.own_progress_at, self.peers_progress_at())

    @property
    def decoding(self) -> int:
        peers = self.peers_now()
        return self.own_decoding + peers.requests - peers.waiting

    @property
    def pending_tokens(self) -> int:
        return self.own_tokens + self.peers_now().tokens
