"""Which backends are avoided for what they refuse, and until when."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import Backend, BackendLimits, Outcome, Registry
from ranvier_py.core.routing.blame.refusals import (
    AVOIDED_MAX,
    BLANK_STATUS,
    PROBE_IDLE_S,
    PROBE_REQUESTS,
    PROBE_S,
    REFUSALS_TO_AVOID,
    ROWS_MAX,
    UNLIKE_TO_AVOID,
    Refusals,
    kind_of,
    wording_of_blanks,
)

A, B = BackendId(0), BackendId(1)
CHAT, EMBEDDING = kind_of(b"/v1/chat/completions", "m", stream=True), kind_of(b"/v1/embeddings", "m", stream=False)


def two() -> tuple[Refusals, Backend, Backend]:
    registry = Registry(BackendLimits())
    backends = [registry.add(f"http://10.0.0.{number}:8000", name=f"e{number}") for number in (1, 2)]
    for backend in backends:
        backend.seen.outcomes[Outcome.SUCCESS] = 1
    return registry.refusals, *backends


def contradict(refusals: Refusals, backend: Backend, status: int = 404, now: float = 0.0, kind: int = CHAT) -> str:
    """Have it refuse a request that another serves; what the log gets."""
    refusals.refused(backend, kind, status, now)
    return " ".join(
        f"{change.before} -> {change.after}" for change in refusals.contradicted(backend, kind, status, now)
    )


def avoid(refusals: Refusals, backend: Backend, status: int = 404, now: float = 0.0, kind: int = CHAT) -> None:
    for _ in range(REFUSALS_TO_AVOID):
        contradict(refusals, backend, status, now, kind)


@pytest.mark.parametrize("status", [400, 404, 422, 501])
def test_refusals_in_a_row_that_another_does_not_share_have_it_avoided_by_requests_alike(status: int) -> None:
    refusals, one, _ = two()
    assert contradict(refusals, one, status) == ""
    assert not refusals.avoiding
    assert contradict(refusals, one, status) == f"serves -> refuses with {status}"
    assert (refusals.avoided(CHAT), refusals.avoided(EMBEDDING)) == ([A], [])
    assert (refusals.status_of(A), refusals.status_of(B)) == (status, 0)


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_about_all_requests(status: int) -> None:
    refusals, one, _ = two()
    contradict(refusals, one, status, kind=EMBEDDING)
    contradict(refusals, one, status)
    assert (refusals.avoided(CHAT), refusals.avoided(EMBEDDING)) == ([A], [A])


def test_it_is_a_backend_like_others_as_soon_as_it_serves_a_request_that_was_sent_since() -> None:
    refusals, one, _ = two()
    avoid(refusals, one, 401, now=10.0)
    assert refusals.served(one, CHAT, sent_at=9.0) == ()  # an older one, that ends late
    assert refusals.avoided(CHAT) == [A]
    (change,) = refusals.served(one, CHAT, sent_at=11.0)
    assert (change.before, change.after) == ("refuses with 401", "serves")
    assert not refusals.avoiding
    assert refusals.served(one, CHAT, sent_at=12.0) == ()


def test_refusals_of_many_kinds_in_a_row_have_it_avoided_by_all() -> None:
    refusals, one, _ = two()
    found = [contradict(refusals, one, 400, kind=kind) for kind in range(1, 1 + UNLIKE_TO_AVOID)]
    assert found == [*[""] * (UNLIKE_TO_AVOID - 1), "serves -> refuses with 400"]
    assert refusals.avoided(CHAT) == [A]


def test_a_row_ends_with_a_request_that_it_serves() -> None:
    refusals, one, _ = two()
    for number in range(50):
        contradict(refusals, one, now=float(number))
        refusals.served(one, CHAT, sent_at=number + 0.5)
    assert not refusals.avoiding


def test_what_is_served_elsewhere_does_not_excuse_it() -> None:
    refusals, one, _ = two()
    avoid(refusals, one)
    refusals.served(one, EMBEDDING, sent_at=1.0)
    assert refusals.avoided(CHAT) == [A]


def test_what_a_second_one_refuses_counts_for_nothing() -> None:
    refusals, one, _ = two()
    for _ in range(50):
        refusals.refused(one, CHAT, 401, 0.0)
        assert not refusals.is_proven(one, CHAT)
        refusals.shared(one, CHAT, 401)
        assert refusals.is_proven(one, CHAT)
    assert (refusals.counters.shared, refusals.counters.contradicted) == (50, {})


def test_the_second_to_be_asked_is_a_proven_one_else_one_that_has_not_refused() -> None:
    refusals, one, other = two()
    refusals.refused(one, CHAT, 400, 0.0)
    assert refusals.worse_opinions(CHAT, [one, other], 0) == [A]
    other.seen.outcomes[Outcome.SUCCESS] = 0
    assert refusals.worse_opinions(CHAT, [one, other], 0) == [A]
    refusals.refused(other, CHAT, 400, 0.0)
    assert refusals.worse_opinions(CHAT, [one, other], 0) == [A, B]
    assert refusals.worse_opinions(CHAT, [], 0) == []


def test_one_request_in_so_many_still_goes_there_but_not_too_often() -> None:
    refusals, one, _ = two()
    avoid(refusals, one)
    now, probes = 0.0, []
    for _ in range(1000):
        now += 1.0
        if refusals.probe(CHAT, (A, B), now) is not None:
            probes.append(now)
    assert probes == [float(PROBE_REQUESTS * n) for n in range(1, 1 + 1000 // PROBE_REQUESTS)]
    now = probes[-1]
    hurried = [refusals.probe(CHAT, (A, B), now + number / 1000) for number in range(1000)]
    assert [each for each in hurried if each is not None] == []
    assert refusals.probe(CHAT, (A, B), now + PROBE_S) == A
    assert refusals.probe(CHAT, (A, B), now + PROBE_S + PROBE_IDLE_S) == A  # few requests: one a minute


def test_no_request_is_sent_to_one_that_cannot_be_asked_to_find_out() -> None:
    refusals, one, _ = two()
    avoid(refusals, one)
    assert refusals.probe(CHAT, (B,), 1000.0) is None
    assert refusals.probe(EMBEDDING, (A, B), 1000.0) is None
    assert refusals.probe(CHAT, (A, B), 1000.0) == A


def test_a_backend_that_is_removed_or_restarted_has_refused_nothing() -> None:
    registry = Registry(BackendLimits())
    refusals, one = registry.refusals, registry.add("http://10.0.0.1:8000", name="e1")
    avoid(refusals, one)
    contradict(refusals, one, kind=EMBEDDING)
    registry.changes.restart(one, "seen", 1.0)
    assert (refusals.avoiding, len(refusals.rows)) == ({}, 0)
    avoid(refusals, one)
    registry.remove("e1")
    assert not refusals.avoiding


def test_models_that_clients_invent_fill_no_memory() -> None:
    refusals, one, _ = two()
    for number in range(ROWS_MAX + 5):
        refusals.refused(one, number + 1, 404, 0.0)
    assert len(refusals.rows) == ROWS_MAX
    assert refusals.counters.dropped > 0
    for number in range(AVOIDED_MAX + 5):
        avoid(refusals, one, kind=-1 - number)
        refusals.served(one, CHAT, 0.0)
    assert len([n for n in range(AVOIDED_MAX + 5) if refusals.avoided(-1 - n)]) == AVOIDED_MAX


def test_the_first_blank_answer_is_believed_and_the_next_one_doubted_even_if_it_has_words_for_others() -> None:
    refusals, one, other = two()
    assert [refusals.blank(one, CHAT, [other], now) for now in (1.0, 2.0)] == [False, True]
    refusals.served(one, CHAT, sent_at=3.0)
    assert refusals.blank(one, CHAT, [other], 4.0)
    refusals.served(one, CHAT, sent_at=5.0)
    assert not refusals.blank(one, EMBEDDING, [other], 6.0)


def test_the_first_blank_answer_of_one_that_has_served_nothing_is_doubted_where_another_one_has() -> None:
    refusals, one, other = two()
    one.seen.outcomes[Outcome.SUCCESS] = 0
    assert refusals.blank(one, CHAT, [other], 1.0)
    other.seen.outcomes[Outcome.SUCCESS] = 0
    assert not refusals.blank(other, CHAT, [one], 1.0)


def test_the_more_blank_answers_were_shared_the_more_are_believed_until_another_one_has_words() -> None:
    refusals, one, other = two()
    tried, wording = [], wording_of_blanks(CHAT)
    for number in range(64):
        if refusals.blank(one, CHAT, [other], float(number)):
            tried.append(number)
            refusals.shared(one, CHAT, BLANK_STATUS)
            refusals.wordings.shared(A, wording)
    assert len(tried) <= 6
    assert not refusals.avoided(CHAT)
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps == sorted(gaps)
    refusals.blank(one, CHAT, [other], 70.0)
    refusals.contradicted(one, CHAT, BLANK_STATUS, 71.0)
    refusals.wordings.contradicted(wording)
    assert refusals.blank(one, CHAT, [other], 72.0)


def test_blank_answers_that_others_do_not_share_have_it_avoided_until_it_has_words() -> None:
    refusals, one, _ = two()
    avoid(refusals, one, BLANK_STATUS, now=1.0)
    assert (refusals.avoided(CHAT), refusals.status_of(A)) == ([A], BLANK_STATUS)
    (change,) = refusals.served(one, CHAT, sent_at=2.0)
    assert (change.before, change.after) == ("answers nothing", "serves")


def test_failures_of_a_kind_in_a_row_have_it_avoided_if_its_circuit_does_not_open() -> None:
    refusals, one, _ = two()
    limit = one.vitals.limits.circuit_faults_to_open
    for number in range(limit - 1):
        assert refusals.failed(one, CHAT, Outcome.BROKEN, 0.0) == ()
        refusals.served(one, EMBEDDING, sent_at=float(number))
    (change,) = refusals.failed(one, CHAT, Outcome.BROKEN, 9.0)
    assert (change.before, change.after) == ("serves", "fails with 502")
    assert (refusals.avoided(CHAT), refusals.avoided(EMBEDDING)) == ([A], [])
    assert refusals.failed(one, CHAT, Outcome.TIMEOUT, 9.0) == ()
    refusals.served(one, CHAT, sent_at=10.0)
    for _ in range(limit):
        one.vitals.end(Outcome.SERVER_ERROR, 11.0)
    assert [refusals.failed(one, CHAT, Outcome.SERVER_ERROR, 11.0) for _ in range(limit)] == [()] * limit
    assert not refusals.avoiding
