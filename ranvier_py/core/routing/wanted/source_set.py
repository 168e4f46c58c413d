"""What one source wants, and how far it can be believed.

Rules: a source that fails keeps its last good set. An empty set after a failure is not obeyed until one with backends
has come: what broke may have lost them. After a good set it is obeyed. Bound: `backends_max` of one set, in its order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.routing.wanted.found_backend import OF_OPERATORS, FoundBackend, SourceName, SpecT


class Belief(Enum):
    STARTING = "starting"  # it has not answered yet
    GOOD = "good"
    UNSURE = "unsure"  # it may have nothing any more: that is asked again before it counts
    FAILING = "failing"


@dataclass(slots=True)
class SourceCounters:
    backends: int = gauge("Backends that a source of backends wants.")
    failing: int = gauge("1 while a source of backends fails, and its last good set holds.")
    sets: int = counter("Sets of backends taken from a source.")
    failures: int = counter("Times that a source of backends could not be read.")
    empty_ignored: int = counter("Empty sets of a source that were not obeyed, since they came after a failure.")
    left_out: int = gauge("Backends in the last set of a source that could not be used.")


@dataclass(slots=True)
class SourceSet(Generic[SpecT]):
    """`found`: by URL. `why`: of a state that is not good. `left_out`: what of its set can't be used, for people."""

    name: SourceName
    since: float
    found: dict[str, FoundBackend[SpecT]] = field(default_factory=dict)
    state: Belief = Belief.STARTING
    why: str = ""
    good_at: float | None = None
    left_out: tuple[str, ...] = ()
    counters: SourceCounters = field(default_factory=SourceCounters)

    @property
    def confirms(self) -> bool:
        """Whether what it wants is known to be so now."""
        return self.state is Belief.GOOD or self.name.kind in OF_OPERATORS

    def take(
        self, found: Iterable[FoundBackend[SpecT]], now: float, *, backends_max: int, left_out: Iterable[str] = ()
    ) -> bool:
        """Take a set that it gives. Returns False if that is not obeyed. Of two entries with one URL the first holds
        that does not end."""
        listed: dict[str, FoundBackend[SpecT]] = {}
        for each in found:
            if each.url not in listed or (listed[each.url].draining and not each.draining):
                listed[each.url] = each
        if not listed and self.found and self.state is Belief.FAILING:
            self.counters.empty_ignored += 1
            self.why = "its set is empty since it failed: not obeyed until it names a backend"
            return False
        more = len(listed) - backends_max
        self.left_out = (*left_out, *([f"{more} of {len(listed)}: at most {backends_max}"] if more > 0 else []))
        self.found = dict(list(listed.items())[:backends_max])
        self._enter(Belief.GOOD, "", now)
        self.good_at = now
        self.counters.sets += 1
        self.counters.backends, self.counters.left_out = len(self.found), len(self.left_out)
        return True

    def fail(self, why: str, now: float) -> bool:
        """Note that it can't be read. Returns whether that is new."""
        self.counters.failures += 1
        is_new = self.state is not Belief.FAILING or self.why != why
        self._enter(Belief.FAILING, why, now)
        return is_new

    def doubt(self, why: str, now: float) -> None:
        """Note that its set may be empty now. A failure before still counts."""
        if self.state is not Belief.FAILING:
            self._enter(Belief.UNSURE, why, now)

    def _enter(self, state: Belief, why: str, now: float) -> None:
        self.since = now if state is not self.state else self.since
        self.state, self.why = state, why
        self.counters.failing = int(state is Belief.FAILING)
