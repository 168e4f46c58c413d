"""Backends as a policy sees them, for the tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.backend import SeenOfBackend
from ranvier_py.core.routing.placement import Holder, Match
from ranvier_py.core.routing.rates.work import Work


@dataclass(slots=True)
class Engine:
    """A placement.Candidate that is what it is said to be."""

    id: BackendId
    name: str
    weight: float = 1.0
    load: int = 0
    work: Work = field(default_factory=Work)
    seen: SeenOfBackend = field(default_factory=SeenOfBackend)

    def bear(self, computed_tokens: int) -> None:
        """One more request came, and waits for its prefill."""
        self.load += 1
        self.work.pending_tokens += computed_tokens


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
