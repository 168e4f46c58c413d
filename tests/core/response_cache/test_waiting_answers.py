"""Answers that wait to be written: found meanwhile, bounded, and invalidated like others."""

from __future__ import annotations

from ranvier_py.core.response_cache.invalidations import VoidScope
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.core.response_cache.waiting_answers import ANSWERS_MAX, BYTES_MAX, WaitingAnswers


def answer(size: int = 10, model: str = "m", tenant: bytes = b"t", at: float = 0.0) -> StoredAnswer:
    return StoredAnswer("chat", model, tenant, b"application/json", b"x" * size, b"", False, at, (1, 1))


def test_answers_are_found_until_they_are_removed_and_leave_oldest_first() -> None:
    waiting = WaitingAnswers()
    for number in range(3):
        assert waiting.add(b"%d" % number, answer(number), None)
    assert [key for key, _ in waiting.oldest(2)] == [b"0", b"1"]
    assert waiting.find(b"1") == answer(1)
    ((key, first),) = waiting.oldest(1)
    waiting.add(key, answer(9), None)
    waiting.remove(key, first)
    assert waiting.find(key) == answer(9), "a newer one"
    waiting.remove(key)
    waiting.remove(key)
    assert [found.size for _, found in waiting.drain()] == [1, 2]
    assert len(waiting) == 0


def test_there_is_room_for_so_many_answers_and_bytes() -> None:
    waiting = WaitingAnswers()
    quarter = answer(BYTES_MAX // 4)
    assert sum(waiting.add(b"%d" % number, quarter, None) for number in range(6)) == 4
    waiting.remove(b"2")
    assert waiting.add(b"6", quarter, None)
    assert not waiting.add(b"7", answer(1), None)
    few = WaitingAnswers()
    assert sum(few.add(b"%d" % number, answer(), None) for number in range(ANSWERS_MAX + 5)) == ANSWERS_MAX


def test_an_answer_takes_the_room_of_the_one_that_it_replaces() -> None:
    half, many = WaitingAnswers(), WaitingAnswers()
    for number in range(2):
        assert half.add(b"%d" % number, answer(BYTES_MAX // 2), None)
    assert half.add(b"1", answer(BYTES_MAX // 2, at=1), None)
    assert not half.add(b"1", answer(BYTES_MAX // 2 + 1, at=2), None)
    assert half.find(b"1") == answer(BYTES_MAX // 2, at=1)
    for number in range(ANSWERS_MAX):
        assert many.add(b"%d" % number, answer(), None)
    assert many.add(b"0", answer(at=1), None)
    assert len(many) == ANSWERS_MAX


def test_waiting_answers_are_invalidated_by_model_tenant_and_age() -> None:
    waiting = WaitingAnswers()
    for number, (model, tenant, at) in enumerate([("a", b"t", 0), ("a", b"u", 0), ("b", b"t", 20), ("b", b"t", 50)]):
        waiting.add(b"%d" % number, answer(1, model, tenant, at), None)
    waiting.void(VoidScope("a", b"u"))
    waiting.void(VoidScope(), 20)
    assert [key for key, _ in waiting.drain()] == [b"3"]
