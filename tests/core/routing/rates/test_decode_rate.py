"""Decode rates and lengths of answers, learned from answers of a known engine."""

from __future__ import annotations

from copy import copy
from random import Random

import pytest

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.rates.decode_rate import (
    ANSWER_TOKENS,
    LENGTHS_MAX,
    LOOK_EVERY,
    UNKNOWN_FACTOR,
    AnswerLengths,
    Decoded,
    DecodeRates,
)

STEP_S, CONTEXT_S, TOKEN_S = 0.012, 2e-7, 5e-5


def shown(count: int, *, whole: bool, factors: tuple[float, ...] = (1.0,)) -> DecodeRates:
    """What answers of engines with these rates show. `whole`: they are no streams, and only they show all rates."""
    rates, rng = DecodeRates(), Random(5)
    for number in range(count):
        backend = number % len(factors)
        tokens, contexts, computed = rng.randrange(20, 400), rng.randrange(1000, 80_000), rng.randrange(0, 20_000)
        seconds = factors[backend] * (tokens * (STEP_S + CONTEXT_S * contexts) + TOKEN_S * computed)
        known = None if whole else factors[backend] * TOKEN_S
        rates.observe(Decoded(BackendId(backend), tokens, seconds, contexts, computed), known)
    return rates


@pytest.mark.parametrize("whole", [False, True], ids=["streams", "whole answers"])
def test_the_step_and_what_contexts_add_to_it_are_learned(whole: bool) -> None:
    rates = shown(300, whole=whole)
    assert rates.per_answer_token_s == pytest.approx(STEP_S, rel=0.1)
    assert rates.per_context_s == pytest.approx(CONTEXT_S, rel=0.1)


def test_whole_answers_alone_show_what_a_prompt_token_takes() -> None:
    assert shown(300, whole=True).per_token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_each_backend_has_its_own_factor_and_one_that_has_shown_nothing_is_worth_a_look() -> None:
    rates = shown(300, whole=False, factors=(1.0, 2.0))
    assert rates.factor(BackendId(1)) / rates.factor(BackendId(0)) == pytest.approx(2.0, rel=0.1)
    assert rates.factor(BackendId(7)) == 1.0, "not always"
    for _ in range(LOOK_EVERY):
        rates.observe(Decoded(BackendId(0), 100, 1.5, 2000, 0), None)
        if rates.factor(BackendId(7)) == UNKNOWN_FACTOR:
            break
    else:
        pytest.fail("nobody looks")
    rates.forget(BackendId(1))
    assert rates.factor(BackendId(1)) == UNKNOWN_FACTOR


def test_before_any_answer_all_backends_are_alike_and_rates_follow_from_what_a_prompt_token_takes() -> None:
    rates = DecodeRates()
    rates.assume(2e-5)
    assert rates.factor(BackendId(0)) == 1.0
    assert (rates.per_answer_token_s, rates.per_context_s) == pytest.approx((4e-3, 2e-8))


def test_no_rate_is_ever_negative_whatever_answers_show() -> None:
    rates, rng = DecodeRates(), Random(2)
    for _ in range(500):
        decoded = Decoded(BackendId(0), rng.randrange(1, 50), rng.random(), rng.random() * 1e6, rng.randrange(10**6))
        rates.observe(decoded, rng.choice([None, 1e-4, 1.0]))
        assert min(rates.per_answer_token_s, rates.per_context_s, rates.per_token_s) >= 0.0
        assert rates.factor(BackendId(0)) > 0.0


def test_a_prompt_token_always_takes_some_time_whatever_whole_answers_show() -> None:
    """Else a router would believe that nothing is gained by a cache."""
    rates = DecodeRates()
    for computed in (10, 2000, 500, 4000):
        rates.observe(Decoded(BackendId(0), 100, 2.0 - computed / 4000, 1000.0, computed), None)
        assert rates.per_token_s > 0.0
    for _ in range(50):
        rates.observe(Decoded(BackendId(0), 100, 0.0, 1000.0, 100), None)
        assert rates.per_token_s > 0.0


def test_a_copy_learns_by_itself() -> None:
    rates = shown(20, whole=False)
    twin = copy(rates)
    twin.observe(Decoded(BackendId(3), 10, 99.0, 0.0, 0), 0.0)
    assert rates.factor(BackendId(3)) == 1.0 != twin.factor(BackendId(3))
    assert rates.per_answer_token_s != twin.per_answer_token_s


def test_lengths_are_learned_by_application_and_begin_at_the_mean_of_all() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(Fingerprint(1)) == ANSWER_TOKENS
    for _ in range(200):
        lengths.observe(Fingerprint(1), 20)
        lengths.observe(Fingerprint(2), 3000)
    assert lengths.expected(Fingerprint(1)) == pytest.approx(20, rel=2.0)
    assert lengths.expected(Fingerprint(2)) == pytest.approx(3000, rel=0.1)
    assert 1000 < lengths.expected(Fingerprint(3)) < 2000


def test_lengths_of_the_applications_asked_for_longest_ago_are_forgotten() -> None:
    lengths = AnswerLengths()
    for number in range(LENGTHS_MAX + 10):
        lengths.observe(Fingerprint(number + 1), 5)
    assert lengths.applications == LENGTHS_MAX
