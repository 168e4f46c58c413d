"""Claims: which backend holds the prefix of a row, who says so, and when that was last seen.

Most rows have one claim, which is in the columns. A row shared by several backends keeps the others in a small dict.

Invariant (monotone): a backend that holds a prefix holds every shorter one. If a row has a live claim, its parent has
one of the same backend and generation with at least that trust and evidence. So raising a claim may end at the first
row above that has it already (test_routes_properties.py). Generations of one backend only grow: a claim of an older
generation than the known one is void and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table.route_values import BACKENDS_MAX, Claim, Trust
from ranvier_py.core.routing.route_table.rows import LANES, NO_BACKEND, SHARED, LeafQueue, Rows

Integers = npt.NDArray[np.signedinteger[Any]]

CLIMB_TOGETHER_MIN = 64
"""Fewer claims are raised faster one by one: 16 turns of chats of 30 messages in a third of the time (measured)."""

BEFORE_ALL = -(2**31)
"""A second before all evidence. What peers saw before this machine started has negative seconds."""


class Hidden(NamedTuple):
    """Which claims of one backend are hidden, because they are too old for its cache."""

    second: int  # claims with evidence up to this second
    left: Mapping[int, int]  # by later second: claims of it that are deeper than so many tokens


class ClimbingClaims(NamedTuple):
    """Claims on their way up the tree, one element each; `rows` are where they are now."""

    rows: Integers
    backends: Integers
    generations: Integers
    evidence: Integers

    def at(self, here: npt.NDArray[np.bool_]) -> ClimbingClaims:
        return ClimbingClaims._make([column[here] for column in self])


class Claims:
    """The claims of all rows; `counts` is by trust. `now` is the latest time, in seconds, that the table has seen."""

    def __init__(self, rows: Rows, leaves: LeafQueue, ttl_s: float) -> None:
        self._rows = rows
        self._leaves = leaves
        self.ttl_s = ttl_s
        self.others: dict[int, dict[int, Claim]] = {}  # by SHARED row and backend: those not in columns
        self.lowered: dict[int, dict[int, int]] = {}  # row -> backend -> tier, for what is below the GPU
        self.hidden: dict[int, Hidden] = {}  # by backend
        self.now = 0.0
        self.counts = [0, 0, 0, 0]

    @property
    def horizon(self) -> float:
        """The second up to which evidence is too old: claims that have none after it have expired."""
        return self.now - self.ttl_s

    def raise_from(self, row: int, backend: int, claim: Claim) -> None:
        """Give a live claim to a row and its ancestors. Trust and evidence of a claim only rise while it lives."""
        rows = self._rows
        parents, backends, generations = rows.parent, rows.backend, rows.generation
        trusts, evidences = rows.trust, rows.evidence
        generation, trust, evidence = claim
        horizon = self.now - self.ttl_s
        while row > 0:
            holder = backends[row]
            if (
                holder == backend
                and generations[row] == generation
                and trusts[row] >= trust
                and evidences[row] > horizon
            ):
                if evidences[row] >= evidence:
                    return
                evidences[row] = evidence
            elif holder == NO_BACKEND:
                backends[row], generations[row], trusts[row], evidences[row] = backend, generation, trust, evidence
                rows.best[row] = trust
                self.counts[trust] += 1
            elif not self._merge(row, backend, claim):
                return
            row = parents[row]

    def raise_many(self, rows: Integers, backends: Integers, generations: Integers, evidence: Integers) -> None:
        """Raise many REMOTE claims, one from each of these rows, as `raise_from` would: together, level by level."""
        latest = np.argsort(evidence, kind="stable")[::-1]
        places = rows[latest].astype(np.int64) * BACKENDS_MAX + backends[latest]
        _, once = np.unique(places, return_index=True)  # a parent comes once for each of its new rows
        order = latest[np.sort(once)[::-1]]  # ascending evidence: where paths meet, the latest is written last
        climbing = ClimbingClaims(rows[order], backends[order], generations[order], evidence[order])
        holder, number = np.frombuffer(self._rows.backend, np.int16), np.frombuffer(self._rows.generation, np.int32)
        known, parents = np.frombuffer(self._rows.evidence, np.int32), np.frombuffer(self._rows.parent, np.int32)
        while len(climbing.rows) >= CLIMB_TOGETHER_MIN:
            rows, backends, generations, evidence = climbing
            own = (holder[rows] == backends) & (number[rows] == generations) & (known[rows] > self.horizon)
            if not own.all():
                self._raise_each(climbing.at(~own))
            climbing = climbing.at(own & (known[rows] < evidence))  # `_raise_each` may have raised some of these
            known[climbing.rows] = climbing.evidence
            climbing = climbing._replace(rows=parents[climbing.rows])
            climbing = climbing.at(climbing.rows > 0)
        self._raise_each(climbing)

    def _raise_each(self, climbing: ClimbingClaims) -> None:
        for row, backend, generation, evidence in zip(*[column.tolist() for column in climbing], strict=True):
            self.raise_from(row, backend, Claim(generation, Trust.REMOTE, evidence))

    def of(self, row: int) -> Iterator[tuple[int, Claim]]:
        """Yield all claims of a row, by backend. A caller that drops any of them must make a list first."""
        rows = self._rows
        if rows.backend[row] == NO_BACKEND:
            return
        yield rows.backend[row], Claim(rows.generation[row], rows.trust[row], rows.evidence[row])
        if rows.flags[row] & SHARED:
            yield from self.others[row].items()

    def get(self, row: int, backend: int) -> Claim | None:
        rows = self._rows
        if rows.backend[row] == backend:
            return Claim(rows.generation[row], rows.trust[row], rows.evidence[row])
        if rows.flags[row] & SHARED:
            return self.others[row].get(backend)
        return None

    def is_hidden(self, backend: int, evidence: int, tokens: int) -> bool:
        """Whether a claim of this backend with this evidence, at a row of so many tokens, must not be matched."""
        hidden = self.hidden.get(backend)
        return hidden is not None and (evidence <= hidden.second or tokens > hidden.left.get(evidence, tokens))

    def drop(self, row: int, backend: int) -> None:
        """Forget the backend's claim on a row, which must be there."""
        rows = self._rows
        claim = self.get(row, backend)
        assert claim is not None
        if row in self.lowered:
            self.set_tier(row, backend, 0)
        self.counts[claim.trust] -= 1
        others = self.others.get(row)
        if rows.backend[row] == backend:
            if others is None:
                rows.backend[row] = NO_BACKEND
            else:
                self._write(row, *others.popitem())
        elif others is not None:
            del others[backend]
        if others is not None and not others:
            del self.others[row]
            rows.flags[row] &= ~SHARED
        self._rank(row)

    def drop_all(self, row: int) -> None:
        """Forget all claims of a row that is about to be released."""
        rows = self._rows
        if rows.backend[row] != NO_BACKEND:
            self.counts[rows.trust[row]] -= 1
            rows.backend[row] = NO_BACKEND
            if rows.flags[row] & SHARED:
                for claim in self.others.pop(row).values():
                    self.counts[claim.trust] -= 1
                rows.flags[row] &= ~SHARED
            self.lowered.pop(row, None)
        rows.best[row] = 0

    def set_tier(self, row: int, backend: int, tier: int) -> None:
        """Note at which tier a backend holds a row that it has a claim for. 0, the GPU, is the default."""
        if tier:
            self.lowered.setdefault(row, {})[backend] = tier
        elif (tiers := self.lowered.get(row)) is not None and tiers.pop(backend, 0) and not tiers:
            del self.lowered[row]

    def tiered(self, rows: Sequence[int], holders: Sequence[Holder]) -> list[Holder]:
        """Return the holders of these rows, with tier 1 for those that hold them below the GPU."""
        tiers = {backend: 1 for row in rows for backend in self.lowered.get(row, ())}
        return [holder._replace(tier=tiers.get(holder.backend, 0)) for holder in holders] if tiers else list(holders)

    def _merge(self, row: int, backend: int, claim: Claim) -> bool:
        """Raise the claim at one row. False: the row, and so all its ancestors, had it or a better one already."""
        rows = self._rows
        others = self.others.get(row)
        if rows.backend[row] == backend:
            old = Claim(rows.generation[row], rows.trust[row], rows.evidence[row])
        elif others is None or backend not in others:
            self._add(row, backend, claim)
            return True
        else:
            old = others[backend]
        if old.generation > claim.generation:
            return False
        if old.generation == claim.generation and old.evidence > self.horizon:
            if old.trust >= claim.trust and old.evidence >= claim.evidence:
                return False
            if old.trust > claim.trust or old.evidence > claim.evidence:
                claim = Claim(claim.generation, max(old.trust, claim.trust), max(old.evidence, claim.evidence))
        if others is not None and backend in others:
            others[backend] = claim
        else:
            self._write(row, backend, claim)
        if claim.trust != old.trust:
            self.counts[old.trust] -= 1
            self.counts[claim.trust] += 1
            self._rank(row)
        return True

    def _add(self, row: int, backend: int, claim: Claim) -> None:
        """Add a claim to a row that has one already."""
        rows = self._rows
        self.counts[claim.trust] += 1
        self.others.setdefault(row, {})[backend] = claim
        rows.flags[row] |= SHARED
        rows.best[row] = max(rows.best[row], claim.trust)

    def _write(self, row: int, backend: int, claim: Claim) -> None:
        rows = self._rows
        rows.backend[row] = backend
        rows.generation[row], rows.trust[row], rows.evidence[row] = claim

    def _rank(self, row: int) -> None:
        """Compute the row's best trust anew; move a queued row that lost trust to the lower lane."""
        rows = self._rows
        best = rows.best[row] = max((claim.trust for _, claim in self.of(row)), default=0)
        if best < rows.lane[row] & LANES[-1]:
            self._leaves.remove(row)
            if best:
                self._leaves.push(row)
