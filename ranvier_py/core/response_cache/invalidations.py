"""Knows which stored answers are void, whenever and from wherever they come back.

An invalidation voids all answers of a model and a tenant (or of any) that were asked for up to a moment. It is kept for
as long as such an answer could still come: from a peer that was cut off, or from an engine that was computing it.
Between nodes it travels as a duration, "those older than this", so no two machines' clocks are compared. Transit makes
the moment later, never earlier: a little more may be void, but nothing less.

Rules: of two invalidations with one scope the greater number and the later moment hold. If these come from different
ones, the result is a third with the next number, at which all nodes arrive, so they agree in whatever order they take
them. After the answers' time to live nothing is left to void, and the invalidation is forgotten; nor is one kept that
an invalidation of everything covers.
Bound: SCOPES_MAX scopes. One more merges them all into one of everything, so what was void stays void.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SCOPES_MAX = 1024  # pairs of model and tenant within the time to live of an answer; 200 bytes each
CLOSE_S = 1.0  # how far apart two nodes may date one invalidation: the transit time of messages
NUMBER_BITS = 62  # of a new number, so that there is always a next one in 64
NUMBER_MAX = 1 << NUMBER_BITS + 1  # greatest number taken from a peer: random ones, each raised a little, are below it
STEP_SHIFT = 20  # from a new number to a step to it: 42 bits


class VoidScope(NamedTuple):
    """Whose answers are void. `model` empty: of all models. `tenant` empty: of all tenants."""

    model: str = ""
    tenant: bytes = b""


EVERYTHING = VoidScope()


class VoidMark(NamedTuple):
    """Answers of this scope that were asked for at `before`, or earlier, are void.

    `number` identifies it at all nodes. `signature` is of the node that gave it, if the operator requires signatures.
    """

    number: int
    scope: VoidScope
    before: float
    signature: bytes = b""


class Invalidations:
    """The invalidations at one node. No answer older than `ttl_s` is served. Times are of one monotonic clock."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.folded = 0
        self._latest: dict[VoidScope, VoidMark] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def __iter__(self) -> Iterator[VoidMark]:
        return iter(self._latest.values())

    def give(self, scope: VoidScope, before: float, now: float, number: int) -> VoidMark:
        """Take an operator's invalidation, given at this node. `number`: random, of NUMBER_BITS."""
        known = self._latest.get(scope)
        if known is not None:  # a random step: another node that knows the same may give one, too
            number = max(number, known.number + 1 + (number >> STEP_SHIFT))
        made = VoidMark(number, scope, before)
        self.take(made, now)
        return self._latest.get(scope, made)

    def take(self, new: VoidMark, now: float) -> bool:
        """Take an invalidation. Returns whether it changed anything."""
        known = self._latest.get(new.scope)
        everything = self._latest.get(EVERYTHING)
        if new.before + self.ttl_s <= now or (known is not None and new.number == known.number):
            return False
        if everything is not None and known is None and new.before <= everything.before:
            return False
        merged = new if known is None else merge(known, new)
        if merged == known:
            return False
        if new.scope == EVERYTHING:
            self._latest = {one.scope: one for one in self if one.before > merged.before}
        self._latest[new.scope] = merged
        if len(self._latest) > SCOPES_MAX:
            self._fold()
        return True

    def void(self, model: str, tenant: bytes, asked_at: float) -> bool:
        """Whether an answer that was asked for at that time is void."""
        latest = self._latest
        if not latest:
            return False
        scopes = (EVERYTHING, VoidScope(model), VoidScope("", tenant), VoidScope(model, tenant))
        return any(one in latest and asked_at <= latest[one].before for one in scopes)

    def expire(self, now: float) -> None:
        """Forget invalidations that can void nothing any more."""
        for scope in [one.scope for one in self if one.before + self.ttl_s <= now]:
            del self._latest[scope]

    @property
    def digest(self) -> int:
        """A u64 that is equal where two nodes know the same invalidations."""
        found = 0
        for one in self:
            found ^= one.number
        return found

    def _fold(self) -> None:
        latest = max(self, key=lambda one: (one.before, one.number))
        self.folded += 1
        self._latest = {EVERYTHING: VoidMark(latest.number, EVERYTHING, latest.before)}


def merge(known: VoidMark, new: VoidMark) -> VoidMark:
    """Return the invalidation that follows from two with one scope."""
    greater = max(known, new, key=lambda one: one.number)
    before = max(known.before, new.before)
    if before - greater.before > CLOSE_S:  # the other is later, of a node that did not know the greater
        return VoidMark(greater.number + 1, known.scope, before)
    return greater._replace(before=before)


def covers(scope: VoidScope, model: str, tenant: bytes) -> bool:
    """Whether answers of this model and tenant belong to the scope."""
    return scope.model in ("", model) and scope.tenant in (b"", tenant)
