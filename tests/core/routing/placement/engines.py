"""Backends as a policy sees them, for the tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.placement import Holder, Match


@dataclass(slots=True)
class Engine:
    """A placement.Candidate that is what it is said to be."""

    id: BackendId
    name: str
    weight: float = 1.0
    load: int = 0
    pending_tokens: int = 0
    decoding: int = 0
    waiting: int = 0
    progress_at: float = 0.0
    success_rate: float = 1.0
    inflight: int = 0
    own_decoding: int = 0
    contexts: int = 0
    memory: int = 0
    cache_tokens: int | None = None
    places: int | None = None

    def bear(self, computed_tokens: int) -> None:
        """One more request came, and waits for its prefill."""
        self.load += 1
        self.pending_tokens += computed_tokens


def engines(*loads: int) -> tuple[Engine, ...]:
    """e0, e1, … with so many requests each."""
    return tuple(Engine(BackendId(number), f"e{number}", load=load) for number, load in enumerate(loads))


def match_of(
    *held: tuple[int, int], prompt: int = 1000, home: int = 7, home_tokens: int = 0, opening: bytes = b""
) -> Match:
    """`held`: (backend, tokens) pairs, listed deepest first as the route table lists them."""
    holders: Sequence[Holder] = sorted(
        (Holder(BackendId(backend), tokens, 1) for backend, tokens in held), key=lambda one: -one.tokens
    )
    return Match(holders, prompt, Fingerprint(home), home_tokens, Fingerprint(home ^ 1), opening=opening)


NO_MATCH = Match((), 0, Fingerprint(0))
