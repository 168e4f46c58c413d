"""Knows which stored answers are void, whenever and from wherever they come back.

Rule: an invalidation is kept for as long as such an answer could still come, from a peer that was cut off or an engine
that was computing it. Between nodes it travels as a duration, so no two clocks are compared; transit only makes the
moment later. Of one scope the last of each giver holds, beside those of others. Bound: MARKS_MAX invalidations. One
more merges them all into one of everything; until that is forgotten, none is taken that it covers.
Invariant: nodes know the same, in whatever order they take it, and no void answer returns (test_invalidations.py,
test_invalidation_gossip.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

MARKS_MAX = 4096  # within the time to live of an answer, of each scope one for each node that gave some; 200 bytes each
COUNT_BITS = 24  # of a number: the giver's count; the bits above name the giver
GIVER_BITS = 38


DIGEST_BYTES = 16  # of a tenant, and of a credential


def parts_of(owner: bytes) -> Sequence[bytes]:
    """Return the tenant and the credential that an answer belongs to; one value where they are the same."""
    return (owner,) if len(owner) != 2 * DIGEST_BYTES else (owner[:DIGEST_BYTES], owner[DIGEST_BYTES:])


class VoidScope(NamedTuple):
    """Whose answers are void. `model` empty: of all models. `tenant`, or a credential; empty: of all."""

    model: str = ""
    tenant: bytes = b""

    def covers(self, model: str, tenant: bytes) -> bool:
        """Whether answers of this model and tenant belong to it."""
        return self.model in ("", model) and (not self.tenant or self.tenant in parts_of(tenant))


EVERYTHING = VoidScope()


class VoidMark(NamedTuple):
    """Answers of this scope that were asked for at `before`, or earlier, are void.

    `number` identifies it at all nodes: who gave it, and a count. `signature` is of that node, if the operator requires
    signatures.
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
        self._folded_before = -inf
        self._given = 0
        self._marks: dict[VoidScope, dict[int, VoidMark]] = {}  # of each scope, by giver
        self._count = 0  # of all of these

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[VoidMark]:
        for alike in self._marks.values():
            yield from alike.values()

    def give(self, scope: VoidScope, before: float, now: float, giver: int) -> VoidMark | None:
        """Take an operator's invalidation, given at this node: `giver`, a random number. Returns as `take`."""
        first, last = giver << COUNT_BITS, self._marks.get(scope, {}).get(giver)
        taken = 0 if last is None else last.number - first  # perhaps by another node in our name
        self._given = 1 + max(self._given, taken)
        return self.take(VoidMark(first + self._given, scope, before), now)

    def take(self, new: VoidMark, now: float) -> VoidMark | None:
        """Take an invalidation. Returns it, or the one that it was merged into; None if it changes nothing."""
        giver = new.number >> COUNT_BITS
        known = self._marks.get(new.scope, {}).get(giver)
        if new.before <= max(now - self.ttl_s, self._folded_before) or (known and known.number >= new.number):
            return None
        if known is not None:
            new = new._replace(before=max(new.before, known.before))
        self._count += known is None
        self._marks.setdefault(new.scope, {})[giver] = new
        return new if len(self) <= MARKS_MAX else self._fold()

    def void(self, model: str, tenant: bytes, asked_at: float) -> bool:
        """Whether an answer that was asked for at that time is void."""
        marks = self._marks
        if not marks:
            return False
        scopes = [VoidScope(one, part) for one in ("", model) for part in (b"", *parts_of(tenant))]
        return any(asked_at <= one.before for scope in scopes if scope in marks for one in marks[scope].values())

    def expire(self, now: float) -> None:
        """Forget invalidations that can void nothing any more."""
        for one in [one for one in self if one.before + self.ttl_s <= now]:
            alike = self._marks[one.scope]
            del alike[one.number >> COUNT_BITS]
            self._count -= 1
            if not alike:
                del self._marks[one.scope]

    @property
    def digest(self) -> int:
        """A u64 that is equal where two nodes know the same invalidations."""
        found = 0
        for one in self:
            found ^= one.number
        return found

    def _fold(self) -> VoidMark:
        latest = max(self, key=lambda one: (one.before, one.number))
        self.folded += 1
        self._folded_before = latest.before
        made = VoidMark(latest.number, EVERYTHING, latest.before)
        self._marks, self._count = {EVERYTHING: {made.number >> COUNT_BITS: made}}, 1
        return made
