"""Who goes first, against a scan over all candidates."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.replay.hybrid.eviction_order import EvictionOrder


@dataclass(eq=False)
class Given:
    """A candidate; its number is its place in preorder turned around, so that neither order gives the other."""

    stamp: int
    efficiency: float
    number: int

    @property
    def place(self) -> tuple[int, ...]:
        return (-self.number,)


CANDIDATES = st.lists(st.tuples(st.integers(0, 12), st.integers(-4, 6)), min_size=1, max_size=30)


def scanned(candidates: list[Given], clock: int, alpha: float) -> Given:
    """The first in preorder of those with the least score."""
    recencies = [1 / (clock - each.stamp) for each in candidates]
    efficiencies = [each.efficiency for each in candidates]

    def scaled(value: float, values: list[float]) -> float:
        low, high = min(values), max(values)
        return 1.0 if low == high else (value - low) / (high - low)

    def score(each: Given) -> float:
        recency = scaled(1 / (clock - each.stamp), recencies)
        return recency + alpha * scaled(each.efficiency, efficiencies)

    return min(sorted(candidates, key=lambda each: each.place), key=score)


@given(CANDIDATES, st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]), st.integers(1, 40))
def test_the_least_useful_candidate_is_the_one_that_a_scan_would_find(
    drawn: list[tuple[int, int]], alpha: float, later: int
) -> None:
    clock = 12 + later
    candidates = [Given(stamp, efficiency / 3, number) for number, (stamp, efficiency) in enumerate(drawn)]
    order = EvictionOrder()
    for each in candidates:
        order.add(each)
    while candidates:
        victim = order.least(clock, alpha)
        assert victim is scanned(candidates, clock, alpha)
        candidates.remove(victim)
        order.discard(victim)
        assert len(order) == len(candidates)
    assert order.least(clock, alpha) is None


def test_a_candidate_that_is_no_longer_one_is_not_found() -> None:
    order, first, second = EvictionOrder(), Given(1, 1.0, 1), Given(2, 2.0, 2)
    order.add(first)
    order.add(second)
    order.discard(first)
    order.discard(first)
    assert first not in order
    assert order.least(3, 1.0) is second
