"""The ring: peers agree, shares are even enough, only a lost backend's keys move."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from hashlib import blake2b
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement.chwbl import RINGS_MAX, Ring
from tests.core.routing.placement.engines import Engine, engines
from tests.examples import examples

RNG = Random(5)
KEYS = [RNG.getrandbits(64) for _ in range(4000)]
MASK = 2**64 - 1


@settings(max_examples=examples(25))
@given(names=st.lists(st.text(min_size=1, max_size=9), min_size=2, max_size=9, unique=True), data=st.data())
def test_removing_a_backend_moves_only_its_keys(names: list[str], data: st.DataObject) -> None:
    everyone = tuple(Engine(BackendId(number), name) for number, name in enumerate(names))
    lost = data.draw(st.sampled_from(everyone))
    rest = tuple(one for one in everyone if one is not lost)
    ring = Ring(150)
    for key in data.draw(st.lists(st.integers(0, MASK), min_size=1, max_size=50)):
        before = everyone[ring.owner(key, everyone)]
        after = rest[ring.owner(key, rest)]
        assert after is before or before is lost
        if before is lost:  # whoever was next clockwise
            assert after is everyone[list(ring.walk(key, everyone))[1]]


def test_the_walk_begins_at_the_owner_and_has_each_backend_once() -> None:
    candidates, ring = engines(*[0] * 7), Ring(150)
    for key in (0, MASK, *KEYS[:200]):
        walk = list(ring.walk(key, candidates))
        assert sorted(walk) == list(range(7))
        assert walk[0] == ring.owner(key, candidates)


def test_shares_of_150_points_differ_by_about_a_twelfth() -> None:
    candidates, even, uneven = engines(*[0] * 8), Ring(150), Ring(1)
    counts = Counter(even.owner(key, candidates) for key in KEYS)
    assert 0.75 * 500 < min(counts.values()) <= max(counts.values()) < 1.25 * 500
    few = Counter(uneven.owner(key, candidates) for key in KEYS)
    assert max(few.values()) > 1.5 * 500


def points_by_hand(name: str, points: int) -> list[int]:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    found = []
    for number in range(1, points + 1):
        word = (seed + number * 0x9E3779B97F4A7C15) & MASK
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
        found.append(word ^ word >> 31)
    return found


def test_owners_are_those_of_a_ring_laid_out_by_hand() -> None:
    candidates = engines(*[0] * 5)
    neighbours = sorted((point, one.id) for one in candidates for point in points_by_hand(one.name, 150))
    places = [point for point, _ in neighbours]
    theirs = tuple(Engine(BackendId(90 - one.id), one.name) for one in reversed(candidates))  # of a peer
    ring = Ring(150)
    for key in KEYS[:500]:
        assert ring.owner(key, candidates) == neighbours[bisect_left(places, key) % len(neighbours)][1]
        assert theirs[ring.owner(key, theirs)].name == candidates[ring.owner(key, candidates)].name


def test_the_kept_rings_are_bounded_and_change_no_answer() -> None:
    ring = Ring(10)
    for _ in range(3 * RINGS_MAX):
        candidates = engines(0, 0, 0)
        assert ring.owner(KEYS[0], candidates) == Ring(10).owner(KEYS[0], list(candidates))
        assert len(ring.layouts) <= RINGS_MAX
