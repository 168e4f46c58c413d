"""What the response cache has in Redis: generations, what was invalidated in them, entries, and sums that expire."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.response_cache.redis_entries import (
    GENERATION_BYTES_MAX,
    INVALIDATIONS_MAX,
    ExpiringSum,
    Generation,
    answer_in,
    entry_name,
    entry_of,
    generation_in,
    new_generation,
)
from ranvier_py.core.response_cache.stored_answers import StoredAnswer

KEY = b"k" * 32
MOST = 1 << 20
SERVER_MS = 1_700_000_000_000.0  # Redis's clock at our moment 0
ANSWER = StoredAnswer("chat", "a", b"t", b"application/json", b"{}", b"", False, 90.0, (1, 2))


def fresh(seed: int = 1) -> Generation:
    return new_generation(Random(seed))


def voided(generation: Generation, *chosen: tuple[str | None, bytes | None, int | None]) -> Generation:
    for each in chosen:
        more = generation.without(*each)
        assert more is not None
        generation = more
    return generation


def test_a_generation_comes_back_from_redis_with_what_was_invalidated_in_it() -> None:
    generation = voided(fresh(), ("a", None, None), ("\ud800", b"t\0", 5), (None, None, 7))
    assert generation_in(generation.raw) == generation
    assert generation.number == 3
    assert fresh(1).id != fresh(2).id


@given(st.binary(max_size=300))
def test_no_garbage_is_a_generation(raw: bytes) -> None:
    found = generation_in(raw)
    assert found is None or found.raw == raw
    assert generation_in(fresh().raw + raw) is None or not raw


@pytest.mark.parametrize("foreign", [None, b"", 5, "text", b"\x93\x01\xa1a\x90", b"x" * (GENERATION_BYTES_MAX + 1)])
def test_what_else_may_stand_there_is_none(foreign: object) -> None:
    assert generation_in(foreign) is None


def test_one_generation_has_room_for_so_many_invalidations_and_bytes() -> None:
    generation = fresh()
    for _ in range(INVALIDATIONS_MAX):
        generation = voided(generation, ("a", None, None))
    assert generation.without("a", None, None) is None
    assert generation_in(generation.raw) == generation
    assert fresh().without("m" * GENERATION_BYTES_MAX, None, None) is None


@pytest.mark.parametrize(
    ("chosen", "is_void"),
    [
        (("a", None, None), True),
        (("b", None, None), False),
        ((None, b"t", None), True),
        (("a", b"u", None), False),
        ((None, None, round(SERVER_MS + 90_001)), True),
        ((None, None, round(SERVER_MS + 90_000)), True),
        ((None, None, round(SERVER_MS + 89_999)), False),
        (("b", None, round(SERVER_MS + 90_001)), False),
    ],
)
def test_an_entry_is_void_if_it_fits_what_was_invalidated_since(
    chosen: tuple[str | None, bytes | None, int | None], is_void: bool
) -> None:
    generation = fresh()
    entry = entry_of(KEY, ANSWER, generation, 100.0, SERVER_MS + 100_000)
    later = voided(generation, chosen)
    for now in (100.0, 160.0):
        found = answer_in(KEY, entry, later, now, SERVER_MS + 1000 * now, MOST)
        assert (found is None) == is_void
    known = entry_of(KEY, ANSWER, later, 100.0, SERVER_MS + 100_000)
    assert answer_in(KEY, known, later, 100.0, SERVER_MS + 100_000, MOST) is not None, "its writer knew"


def test_an_entry_has_its_age_by_the_clock_of_redis_whatever_the_readers_own_shows() -> None:
    generation = fresh()
    entry = entry_of(KEY, ANSWER, generation, 100.0, SERVER_MS)
    for now in (5.0, 1e6):
        found = answer_in(KEY, entry, generation, now, SERVER_MS + 30_000, MOST)
        assert found == ANSWER._replace(stored_at=now - 40.0)
        earlier = answer_in(KEY, entry, generation, now, SERVER_MS - 30_000, MOST)
        assert earlier == ANSWER._replace(stored_at=now - 10.0), "a clock that was set back makes nothing younger"


def test_an_entry_that_was_cut_changed_or_moved_is_no_answer() -> None:
    generation = fresh()
    entry = entry_of(KEY, ANSWER, generation, 100.0, SERVER_MS)
    for place in range(len(entry)):
        for bad in (entry[:place], entry[:place] + bytes([entry[place] ^ 1]) + entry[place + 1 :]):
            assert answer_in(KEY, bad, generation, 100.0, SERVER_MS, MOST) is None
    assert answer_in(b"j" * 32, entry, generation, 100.0, SERVER_MS, MOST) is None


def test_names_of_entries_hold_the_generation() -> None:
    assert entry_name("p:", fresh(), b"\xab") == f"p:{fresh().id}:ab"


def test_a_sum_forgets_what_has_expired() -> None:
    kept = ExpiringSum(100.0)
    for second in range(200):
        kept.add(10, float(second))
    number, size = kept.total(200.0)
    assert 100 - 100 / 32 - 1 <= number <= 100 + 1
    assert size == 10 * number
    assert kept.total(299.9)[0] < 5
    assert kept.total(300.0) == (0, 0)
    kept.add(1, 300.0)
    kept.clear()
    assert kept.total(300.0) == (0, 0)
