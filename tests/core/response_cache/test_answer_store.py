"""Answers in memory come and go by use, age and room."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.response_cache.answer_store import ENTRY_BYTES, AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.invalidations import VoidScope
from ranvier_py.core.response_cache.stored_answers import StoredAnswer


def answer(at: float = 0.0, size: int = 100, model: str = "m", tenant: bytes = b"t") -> StoredAnswer:
    return StoredAnswer("chat", model, tenant, b"application/json", b"x" * size, b"", False, at, (1, 1))


def store(capacity: int = 3, bytes_max: int = 1 << 20, ttl_s: float = 60.0) -> AnswerStore:
    return AnswerStore(ResponseCacheOptions(capacity=capacity, bytes_max=bytes_max, ttl_s=ttl_s))


def keys(answers: AnswerStore, now: float = 0.0) -> list[bytes]:
    return [key for key in (b"%d" % number for number in range(10)) if answers.find(key, now, inf) is not None]


def test_the_least_recently_used_goes_first() -> None:
    answers = store()
    for number in range(3):
        answers.keep(b"%d" % number, answer())
    answers.find(b"0", 0.0, inf)
    answers.keep(b"3", answer())
    assert keys(answers) == [b"0", b"2", b"3"]
    assert answers.counters.evictions == 1


def test_an_answer_is_kept_for_its_time_and_found_by_who_takes_it_that_old() -> None:
    answers = store(ttl_s=60)
    answers.keep(b"0", answer(at=10))
    assert answers.find(b"0", 69.9, inf) is not None
    assert answers.find(b"0", 30, 20) is not None
    assert answers.find(b"0", 30, 19) is None
    assert answers.find(b"0", 10, 0) is None, "no-cache"
    assert answers.find(b"0", 70, inf) is None
    assert (answers.counters.entries, answers.counters.size_bytes) == (0, 0)


def test_answers_are_invalidated_by_model_tenant_and_age() -> None:
    answers = store(capacity=10)
    for number, (model, tenant, at) in enumerate([("a", b"t", 0), ("a", b"u", 0), ("b", b"t", 20), ("b", b"t", 50)]):
        answers.keep(b"%d" % number, answer(at, model=model, tenant=tenant))
    assert answers.void(VoidScope("a", b"u")) == 1
    assert answers.void(before=20) == 2
    assert keys(answers, 50) == [b"3"]
    assert answers.void() == 1
    assert answers.void() == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30_000)), max_size=40))
def test_room_is_kept_to_whatever_comes(puts: list[tuple[int, int]]) -> None:
    answers = store(capacity=5, bytes_max=65_536)
    for key, size in puts:
        answers.keep(b"%d" % key, answer(size=size))
        held = keys(answers)
        sizes = [found.size for name in held if (found := answers.find(name, 0, inf)) is not None]
        assert answers.counters.entries == len(held) <= 5
        assert answers.counters.size_bytes == sum(sizes) + ENTRY_BYTES * len(held) <= 65_536
