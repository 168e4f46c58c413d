"""What one router has at one backend: requests in flight, and the prefill that waits there.

Invariant: every `begin` has one `end`, and at most one `prefilled` between them; then all counts are exact.
"""

from __future__ import annotations


class Work:
    """Counts of one router's own requests at one backend."""

    __slots__ = ("decoding", "inflight", "pending_tokens", "progress_at")

    def __init__(self) -> None:
        self.inflight = 0
        self.decoding = 0  # of these, those whose first token has come
        self.pending_tokens = 0  # of the others: prompt tokens to be computed before it
        self.progress_at = 0.0  # when the first of the others became the first

    @property
    def waiting(self) -> int:
        """Requests in flight whose first token has not come."""
        return self.inflight - self.decoding

    def begin(self, tokens: int, now: float, *, seen: bool) -> None:
        """A request is on its way with so many tokens to compute.

        Where its first token will not be `seen`, since the answer comes as a whole, it counts as decoding at once.
        """
        if not seen:
            self.decoding += 1
        else:
            if self.inflight == self.decoding:
                self.progress_at = now
            self.pending_tokens += tokens
        self.inflight += 1

    def prefilled(self, tokens: int, now: float) -> float:
        """A first token that can be seen came; `tokens` as when it began. Returns seconds since the last progress."""
        gap_s = now - self.progress_at
        self.pending_tokens -= tokens
        self.decoding += 1
        self.progress_at = now
        return gap_s

    def end(self, tokens: int, *, decoding: bool) -> None:
        """A request ended; `tokens` as when it began, `decoding`: its first token came, or could not be seen."""
        assert self.inflight > 0, f"ended without beginning: {self!r}"
        self.inflight -= 1
        if decoding:
            self.decoding -= 1
        else:
            self.pending_tokens -= tokens
