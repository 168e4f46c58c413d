"""Weighted rendezvous hashing: peers agree, shares follow weights, only a lost backend's keys move."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from math import log
from random import Random

import pytest

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.placement.rendezvous import KEPT_MAX, TABLES_MAX, Rendezvous
from tests.core.routing.placement.engines import Engine

RNG = Random(5)
KEYS = [Fingerprint(RNG.getrandbits(64)) for _ in range(4000)]


def engines(*weights: float) -> tuple[Engine, ...]:
    return tuple(Engine(BackendId(number), f"e{number}", weight) for number, weight in enumerate(weights))


def homes(candidates: tuple[Engine, ...]) -> list[str]:
    rendezvous = Rendezvous()
    return [candidates[rendezvous.best(key, candidates)].name for key in KEYS]


@pytest.mark.parametrize("weights", [(1,) * 8, (1, 2, 4, 1.5)])
def test_removing_a_backend_moves_its_own_keys_only(weights: tuple[float, ...]) -> None:
    before = homes(engines(*weights))
    after = homes(tuple(one for one in engines(*weights) if one.name != "e2"))
    for old, new in zip(before, after, strict=True):
        assert old in (new, "e2")
    assert "e2" not in after


@pytest.mark.parametrize("weights", [(1,) * 16, (1, 2, 3, 4), (0.5, 100)])
def test_shares_follow_the_weights(weights: tuple[float, ...]) -> None:
    """Chi-square against the expected shares; the bound is far above the 99.9 % quantile for 15 degrees of freedom."""
    counts = Counter(homes(engines(*weights)))
    chi_square = 0.0
    for number, weight in enumerate(weights):
        expected = len(KEYS) * weight / sum(weights)
        chi_square += (counts[f"e{number}"] - expected) ** 2 / expected
    assert chi_square < 38


def test_the_order_begins_at_the_home_and_continues_with_who_inherits() -> None:
    candidates = engines(1, 2, 3, 1)
    rendezvous = Rendezvous()
    for key in KEYS[:200]:
        order = rendezvous.order(key, candidates)
        assert sorted(order) == [0, 1, 2, 3]
        assert order[0] == rendezvous.best(key, candidates)
        heirs = tuple(one for one in candidates if one.id != order[0])
        assert heirs[rendezvous.best(key, heirs)].id == order[1]


def test_a_home_is_the_same_on_every_machine_and_in_every_version() -> None:
    """Peers of different versions must agree; change this only together with the wire version."""
    candidates = engines(*[1] * 6)
    rendezvous = Rendezvous()
    assert [rendezvous.best(Fingerprint(key), candidates) for key in (1, 2, 3, 2**64 - 1)] == [5, 2, 1, 4]


def score_by_hand(key: int, one: Engine) -> float:
    mask = 2**64 - 1
    word = key ^ int.from_bytes(blake2b(one.name.encode(), digest_size=8).digest(), "little")
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    word ^= word >> 31
    return -one.weight / log(((word >> 11) + 0.5) / 2**53)


@pytest.mark.parametrize("weights", [(1,) * 8, (3, 1, 2, 5)])
def test_the_home_is_the_best_by_the_formula_worked_by_hand(weights: tuple[float, ...]) -> None:
    candidates = engines(*weights)
    theirs = tuple(Engine(BackendId(90 - one.id), one.name, one.weight) for one in reversed(candidates))
    assert homes(candidates) == homes(theirs), "of peers with other ids and another order, too"
    for key, home in zip(KEYS[:500], homes(candidates), strict=False):
        assert home == max(candidates, key=lambda one: score_by_hand(key, one)).name


def test_the_kept_tables_are_bounded_and_change_no_answer() -> None:
    rendezvous = Rendezvous()
    for _ in range(3 * TABLES_MAX):
        candidates = engines(1, 1, 2)
        assert rendezvous.order(KEYS[0], candidates) == Rendezvous().order(KEYS[0], list(candidates))
        assert len(rendezvous.tables) <= TABLES_MAX


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 1, 3)])
def test_the_first_of_some_is_the_first_of_them_in_the_order_of_all(weights: tuple[float, ...]) -> None:
    rendezvous, candidates = Rendezvous(), engines(*weights)
    for key in [*KEYS[: KEPT_MAX + 20], *KEYS[: KEPT_MAX + 20]]:
        among = [3, 0, 2]
        expected = next(place for place in Rendezvous().order(key, candidates) if place in among)
        assert rendezvous.first(key, candidates, among) == expected
        assert rendezvous.first(key, list(candidates), among) == expected, "a list may change: nothing is kept of it"
        assert len(rendezvous.kept) <= KEPT_MAX


def test_scores_are_forgotten_with_the_pool_that_they_are_of() -> None:
    """Another pool at the same place in memory would be ranked by them."""
    rendezvous = Rendezvous()
    for number in range(3 * TABLES_MAX):
        candidates = engines(1, 1, 1 + number % 5)
        rendezvous.first(KEYS[0], candidates, [0, 1, 2])
        assert {pool for pool, _ in rendezvous.kept} <= rendezvous.tables.keys()
