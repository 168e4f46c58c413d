"""What one router has at one backend, and its peers: requests in flight, and the prefill that waits there.

Invariant: every `begin` has one `end`, and at most one `prefilled` between them; then all counts are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True)
class PeerWork:
    """What peers have at one backend together, as they report."""

    load: Load = NO_LOAD
    moved_at: float = 0.0  # when a first token of theirs was reported, or that one of them had become the first


@dataclass(slots=True, eq=False)
class Work:
    """One router's own requests at one backend beside those of its peers: the engine serves all in turn."""

    peers: PeerWork = field(default_factory=PeerWork)
    inflight: int = 0  # own requests
    own_decoding: int = 0  # of these, those whose first token has come
    own_tokens: int = 0  # of the others: prompt tokens to be computed before it
    own_progress_at: float = 0.0  # when one of them became the first of those that wait

    @property
    def waiting(self) -> int:
        """Requests in flight, anybody's, whose first token has not come."""
        return self.inflight - self.own_decoding + self.peers.load.waiting

    @property
    def decoding(self) -> int:
        """Those whose first token has come."""
        peers = self.peers.load
        return self.own_decoding + peers.requests - peers.waiting

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens to be computed for those that wait."""
        return self.own_tokens + self.peers.load.tokens

    @property
    def progress_at(self) -> float:
        """When the first of those that wait became the first."""
        return max(self.own_progress_at, self.peers.moved_at)

    @property
    def own_waiting(self) -> int:
        """Own requests in flight whose first token has not come."""
        return self.inflight - self.own_decoding

    @property
    def own_load(self) -> Load:
        return Load(self.inflight, self.own_waiting, self.own_tokens)

    def begin(self, tokens: int, now: float, *, seen: bool) -> None:
        """A request is on its way with so many tokens to compute.

        Where its first token will not be `seen`, since the answer comes as a whole, it counts as decoding at once.
        """
        if not seen:
            self.own_decoding += 1
        else:
            if not self.waiting:
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
