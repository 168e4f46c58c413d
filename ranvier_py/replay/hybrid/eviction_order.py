"""Finds the candidate with Marconi's least score, which is evicted first. Pure.

The score is recency + alpha * efficiency, each scaled to [0, 1] over the present candidates, so every request changes
all scores. It does not change the order by recency, nor that by efficiency. `EvictionOrder` keeps both orders and walks
them together from their low ends, until no candidate that it has not seen can score below the least found (Fagin's
threshold algorithm). The result is that of a scan over all candidates; ties go to the first in preorder.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """A candidate. `number` identifies it; `place` orders candidates in preorder."""

    stamp: int
    number: int
    efficiency: float

    @property
    def place(self) -> tuple[int, ...]: ...


Candidate = TypeVar("Candidate", bound=Evictable)


class EvictionOrder(Generic[Candidate]):
    """Candidates ordered by stamp and by efficiency; neither may change while a candidate is in the order."""

    def __init__(self) -> None:
        self._members: dict[int, Candidate] = {}
        self._by_stamp: list[tuple[int, int]] = []
        self._by_efficiency: list[tuple[float, int]] = []

    def __contains__(self, node: Candidate) -> bool:
        return node.number in self._members

    def __len__(self) -> int:
        return len(self._members)

    def add(self, node: Candidate) -> None:
        self._members[node.number] = node
        insort(self._by_stamp, (node.stamp, node.number))
        insort(self._by_efficiency, (node.efficiency, node.number))

    def discard(self, node: Candidate) -> None:
        if self._members.pop(node.number, None) is None:
            return
        stamps, efficiencies = self._by_stamp, self._by_efficiency
        del stamps[bisect_left(stamps, (node.stamp, node.number))]
        del efficiencies[bisect_left(efficiencies, (node.efficiency, node.number))]

    def least(self, clock: int, alpha: float) -> Candidate | None:
        """Return the candidate of the least score at `clock`, which must be later than every stamp; None if empty."""
        if not self._members:
            return None
        stamps, efficiencies, members = self._by_stamp, self._by_efficiency, self._members
        oldest, flattest = 1 / (clock - stamps[0][0]), efficiencies[0][0]
        recency_span = 1 / (clock - stamps[-1][0]) - oldest
        efficiency_span = efficiencies[-1][0] - flattest

        def recency(stamp: int) -> float:
            return (1 / (clock - stamp) - oldest) / recency_span if recency_span else 1.0

        def efficiency(value: float) -> float:
            return (value - flattest) / efficiency_span if efficiency_span else 1.0

        best, tied = float("inf"), [0]
        for (stamp, older), (value, flatter) in zip(stamps, efficiencies, strict=True):
            recent, useful = recency(stamp), alpha * efficiency(value)
            if recent + useful > best:
                break
            for number, score in (
                (older, recent + alpha * efficiency(members[older].efficiency)),
                (flatter, recency(members[flatter].stamp) + useful),
            ):
                if score < best:
                    best, tied = score, [number]
                elif score == best and number not in tied:
                    tied.append(number)
        if len(tied) == 1:
            return members[tied[0]]
        return min((members[number] for number in tied), key=lambda node: node.place)
