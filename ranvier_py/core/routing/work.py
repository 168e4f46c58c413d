"""What one router has at one backend, and its peers: requests in flight, and the prefill that waits there.

Sums are kept, not computed when they are read: placement reads them of dozens of backends for each request.
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


@dataclass(slots=True, eq=False)
class Work:
    """One router's own requests at one backend and those of its peers: the engine serves all in turn.

    `mirrors` are what other policies would have there in this router's place (`shadow`): peers are the same for all.
    """

    peers: Load = NO_LOAD  # of all of them together, as they report
    inflight: int = 0  # own requests
    own_decoding: int = 0  # of these, those whose first token has come
    own_tokens: int = 0  # of the others: prompt tokens to be computed before it
    waiting: int = 0  # anybody's requests in flight whose first token has not come
    decoding: int = 0  # those whose first token has come
    pending_tokens: int = 0  # prompt tokens to be computed for those that wait
    progress_at: float = 0.0  # when the first of those that wait became the first
    mirrors: list[Work] = field(default_factory=list)

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
            self.decoding += 1
        else:
            if not self.waiting:
                self.progress_at = now
            self.waiting += 1
            self.own_tokens += tokens
            self.pending_tokens += tokens
        self.inflight += 1

    def prefilled(self, tokens: int, now: float) -> float:
        """A first token that can be seen came; `tokens` as when it began. Returns seconds since the last progress."""
        gap_s = now - self.progress_at
        self.own_tokens -= tokens
        self.pending_tokens -= tokens
        self.waiting -= 1
        self.own_decoding += 1
        self.decoding += 1
        self.progress_at = now
        return gap_s

    def end(self, tokens: int, *, decoding: bool) -> None:
        """A request ended; `tokens` as when it began, `decoding`: its first token came, or could not be seen."""
        assert self.inflight > 0, f"ended without beginning: {self!r}"
        self.inflight -= 1
        if decoding:
            self.own_decoding -= 1
            self.decoding -= 1
        else:
            self.own_tokens -= tokens
            self.pending_tokens -= tokens
            self.waiting -= 1

    def set_peers(self, load: Load, now: float) -> None:
        """What the peers have there together, as they report, is now this."""
        before, self.peers = self.peers, load
        came = load.waiting < before.waiting or load.tokens < before.tokens  # a first token
        if came or (load.waiting and not before.waiting and not self.own_waiting):
            self.progress_at = now
        more = load.minus(before)
        self.waiting += more.waiting
        self.decoding += more.requests - more.waiting
        self.pending_tokens += more.tokens
        for mirror in self.mirrors:
            mirror.set_peers(load, now)
