"""What a computed token costs beside its own time: it evicts another, which may be needed again."""

from __future__ import annotations

from copy import copy
from math import e

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.rates.evictions import FADE_S, PRIOR_TOKENS, RECENT_S, Evictions, RecentTokens

FIRST, SECOND = BackendId(0), BackendId(1)


@pytest.mark.parametrize(
    ("times", "computed", "again", "price"),
    [
        (100, 5000, 0, 1.0),
        (100, 5000, 5000, pytest.approx(2.0, abs=0.02)),
        (1, 100, 100, pytest.approx(1.0 + 100 / (100 + PRIOR_TOKENS))),
        (100, 0, 5000, 2.0),  # at one engine, which another one had evicted: never more than twice
    ],
    ids=["nothing comes again", "all comes again", "one short prompt", "what is computed elsewhere"],
)
def test_a_prefill_counts_once_and_up_to_once_more_by_the_share_that_was_evicted(
    times: int, computed: int, again: int, price: float
) -> None:
    evictions = Evictions()
    for number in range(times):
        evictions.add(FIRST, computed, again, float(number))
    assert evictions.price(FIRST) == price
    assert evictions.price(SECOND) == 1.0


def test_evictions_fade_with_time_and_late_reports_count_in_full() -> None:
    evictions = Evictions()
    evictions.add(FIRST, 10_000, 10_000, 1000.0)
    evictions.add(FIRST, 10_000, 10_000, 0.0)
    assert evictions.price(FIRST) == pytest.approx(1.0 + 20_000 / (20_000 + PRIOR_TOKENS))
    evictions.add(FIRST, 0, 0, 1000.0 + 20 * FADE_S)
    assert evictions.price(FIRST) == pytest.approx(1.0, abs=1e-6)


def test_a_copy_learns_alone_and_a_backend_that_is_gone_leaves_nothing() -> None:
    evictions = Evictions()
    evictions.add(FIRST, 10_000, 10_000, 0.0)
    twin = copy(evictions)
    twin.forget(FIRST)
    assert (evictions.price(FIRST) > 1.5, twin.price(FIRST)) == (True, 1.0)


def test_a_request_evicts_of_recent_chats_what_does_not_fit_beside_it_and_never_more_than_they_have() -> None:
    recent = RecentTokens()
    recent.add(FIRST, 6000, 0, 0.0)
    assert [recent.evicted_by(FIRST, tokens, 0, 10_000, 0.0) for tokens in (4000, 5000, 20_000)] == [0, 1000, 6000]
    assert recent.evicted_by(SECOND, 20_000, 0, 10_000, 0.0) == 0
    assert recent.evicted_by(FIRST, 20_000, 0, 10_000, RECENT_S) == pytest.approx(6000 / e)


def test_a_request_evicts_no_more_than_it_takes_of_chats_that_do_not_fit_anyway() -> None:
    recent = RecentTokens()
    recent.add(FIRST, 50_000, 0, 0.0)
    assert [recent.evicted_by(FIRST, 1000, held, 10_000, 0.0) for held in (0, 2000)] == [1000, 3000]


def test_a_chat_that_goes_on_has_its_tokens_once() -> None:
    recent = RecentTokens()
    recent.add(FIRST, 3000, 0, 0.0)
    for turn in range(8):
        recent.add(FIRST, 100, 3000 + 100 * turn, 0.0)
    assert recent.evicted_by(FIRST, 10_000, 0, 10_000, 0.0) == 3800
    assert recent.evicted_by(FIRST, 100, 3800, 3900, 0.0) == 0, "of its own it evicts nothing"
    recent.add(FIRST, 100, 3800, 100 * RECENT_S)
    assert recent.evicted_by(FIRST, 10_000, 0, 10_000, 100 * RECENT_S) == 3900, "all of it is recent again"


def test_recent_chats_of_a_copy_and_of_a_backend_that_is_gone_are_its_own() -> None:
    recent = RecentTokens()
    recent.add(FIRST, 6000, 0, 0.0)
    twin = copy(recent)
    twin.forget(FIRST)
    assert [each.evicted_by(FIRST, 6000, 0, 10_000, 0.0) for each in (recent, twin)] == [2000, 0]
