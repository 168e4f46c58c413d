"""Challenges are good for one session and a short while; answers to strangers are paced."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.contact.challenges import ANY, CHALLENGE_S, Challenges, RateLimit
from tests.examples import examples


@settings(max_examples=examples(100))
@given(st.integers(1, 2**64 - 1), st.floats(0, 1e9), st.floats(0, 10))
def test_an_answer_is_good_for_2_to_4_seconds(session: int, now: float, later: float) -> None:
    challenges = Challenges(Random(1))
    nonce = challenges.ask(session, now)
    good = challenges.answered(session, nonce, now + later)
    if later < CHALLENGE_S - 1e-3:
        assert good
    if later > 2 * CHALLENGE_S + 1e-3:
        assert not good


def test_an_answer_is_good_for_the_session_that_was_asked_and_the_node_that_asked() -> None:
    ours, theirs = Challenges(Random(1)), Challenges(Random(2))
    nonce = ours.ask(7, 5.0)
    assert nonce
    assert ours.answered(7, nonce, 5.0)
    assert not ours.answered(8, nonce, 5.0)
    assert not theirs.answered(7, nonce, 5.0)
    assert not ours.answered(7, nonce ^ 1, 5.0)
    assert not ours.answered(7, 0, 5.0)


def test_a_greeting_is_answered_by_whoever_is_there() -> None:
    challenges = Challenges(Random(1))
    nonce = challenges.ask(ANY, 5.0)
    assert [challenges.answered(session, nonce, 6.0) for session in (7, 8)] == [True, True]
    assert not challenges.answered(7, nonce, 5.0 + 2 * CHALLENGE_S)


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1.5)), max_size=40))
def test_a_rate_limit_lets_each_through_once_in_its_interval_and_not_too_many(
    tries: list[tuple[str, float]],
) -> None:
    limit = RateLimit(1.0, 2)
    now = 0.0
    done: list[tuple[str, float]] = []
    for key, step in tries:
        now += step
        recent = [other for other, at in done if at > now - 1.0]
        assert limit.may((key, 1), now) == (key not in recent and len(recent) < 2)
        if key not in recent and len(recent) < 2:
            done.append((key, now))
