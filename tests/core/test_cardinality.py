"""How many different keys there were, about."""

from __future__ import annotations

from copy import copy
from random import Random

import pytest

from ranvier_py.core.cardinality import Cardinality


@pytest.mark.parametrize("count", [0, 1, 10, 1_000, 10_000, 100_000])
def test_the_estimate_is_within_its_error_however_often_each_key_comes(count: int) -> None:
    rng, seen = Random(7), Cardinality()
    for key in [rng.getrandbits(64) for _ in range(count)]:
        seen.add(key)
        seen.add(key)
    assert abs(seen.estimate() - count) <= 0.05 * count


def test_keys_at_the_ends_of_their_range_count_like_others() -> None:
    seen = Cardinality()
    for key in (0, 1, 2**63, 2**64 - 1):
        seen.add(key)
    assert 2 <= seen.estimate() <= 4


def test_a_copy_counts_apart() -> None:
    seen = Cardinality()
    twin = copy(seen)
    twin.add(1 << 60)
    assert (seen.estimate(), twin.estimate()) == (0, 1)
