"""The work that one router and its peers have at one backend: requests in flight, and the prefill that waits there.

The sums are kept up to date, not computed when read: placement reads those of dozens of backends for each request.
Invariant: all counts are exact if every `begin` has one `end`, and at most one `prefilled` between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Load(NamedTuple):
    """The load that one router, or several together, put on one backend."""

    requests: int  # in flight
    waiting: int = 0  # of these, those whose first token has not come
    tokens: int = 0  # prompt tokens to be computed for the waiting ones

    def plus(self, other: Load) -> Load:
        return Load(self.requests + other.requests, self.waiting + other.waiting, self.tokens + other.tokens)

    def minus(self, other: Load) -> Load:
        return Load(self.requests - other.requests, self.waiting - other.waiting, self.tokens - other.tokens)


NO_LOAD = Load(0)


@dataclass(slots=True, eq=False)
class Work:
    """One router's own requests at one backend and those of its peers: the engine serves all of them in turn.

    `mirrors` are the work that policies in the shadow would have there (`shadow`); they get the peers' load, too.
    """

    peers: Load = NO_LOAD  # all peers' together, as they report
    inflight: int = 0  # own requests in flight
    own_decoding: int = 0  # of these, those whose first token has come
    own_tokens: int = 0  # prompt tokens to be computed for the other own ones
    waiting: int = 0  # own and peers' requests in flight whose first token has not come
    decoding: int = 0  # own and peers' requests in flight whose first token has come
    pending_tokens: int = 0  # prompt tokens to be computed for the waiting ones
    progress_at: float = 0.0  # when the first of the waiting ones became the first
    mirrors: list[Work] = field(default_factory=list)

    @property
    def own_waiting(self) -> int:
        """Own requests in flight whose first token has not come."""
        return self.inflight - self.own_decoding

    @property
    def own_load(self) -> Load:
        return Load(self.inflight, self.own_waiting, self.own_tokens)

    def begin(self, tokens: int, now: float, *, seen: bool) -> None:
        """Count a request that was sent, with so many tokens to compute.

        If its first token can't be `seen`, because the answer comes as a whole, it counts as decoding at once.
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
        """Count a seen first token; `tokens` as for `begin`. Returns the seconds since the last progress."""
        gap_s = now - self.progress_at
        self.own_tokens -= tokens
        self.pending_tokens -= tokens
        self.waiting -= 1
        self.own_decoding += 1
        self.decoding += 1
        self.progress_at = now
        return gap_s

    def end(self, tokens: int, *, decoding: bool) -> None:
        """Count the end of a request; `tokens` as for `begin`. `decoding`: its first token came, or can't be seen."""
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
        """Set the load that the peers together report, here and in the mirrors."""
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
