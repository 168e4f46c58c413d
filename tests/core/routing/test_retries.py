"""What follows a failed attempt."""

from __future__ import annotations

import pytest

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.health import Outcome
from ranvier_py.core.routing.retries import Next, RetryBudget, RetryLimits, is_inference, may_repeat

A, B, C = BackendId(0), BackendId(1), BackendId(2)


def after(budget: RetryBudget, backend: BackendId, outcome: Outcome = Outcome.SERVER_ERROR) -> str:
    return budget.next_attempt(backend, outcome, relayed=False, others=True).value


def test_a_request_moves_on_after_so_many_failures_at_one_backend() -> None:
    budget = RetryBudget(RetryLimits(worker_retries_max=3, total_retries_max=6))
    assert [after(budget, A) for _ in range(3)] == ["again here", "again here", "elsewhere"]
    assert budget.tried == [A]
    assert [after(budget, B) for _ in range(3)] == ["again here", "again here", "elsewhere"]
    assert after(budget, C) == "give up"
    assert budget.retries == 6


def test_by_default_it_moves_on_at_once_and_gives_up_after_three_retries() -> None:
    budget = RetryBudget(RetryLimits())
    assert [after(budget, BackendId(n)) for n in range(4)] == ["elsewhere"] * 3 + ["give up"]


def test_a_busy_backend_is_not_asked_again() -> None:
    budget = RetryBudget(RetryLimits(worker_retries_max=3))
    assert after(budget, A, Outcome.OVERLOADED) == "elsewhere"


def test_with_nobody_else_it_stays_while_it_may_and_then_gives_up() -> None:
    budget = RetryBudget(RetryLimits(worker_retries_max=2))
    answers = [budget.next_attempt(A, Outcome.CONNECT_ERROR, relayed=False, others=False) for _ in range(2)]
    assert answers == [Next.AGAIN, Next.GIVE_UP]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_nothing_is_retried_once_a_byte_was_relayed(outcome: Outcome) -> None:
    budget = RetryBudget(RetryLimits(worker_retries_max=3))
    assert budget.next_attempt(A, outcome, relayed=True, others=True) is Next.GIVE_UP


def test_nothing_is_retried_for_a_client_that_is_gone() -> None:
    assert after(RetryBudget(RetryLimits()), A, Outcome.CANCELLED) == "give up"


def test_no_retries_at_all_can_be_asked_for() -> None:
    assert after(RetryBudget(RetryLimits(total_retries_max=0)), A) == "give up"


def test_only_answers_that_another_backend_may_better_are_dropped_for_a_retry() -> None:
    limits = RetryLimits()
    retried = [429, 500, *range(502, 505), *range(520, 525), 529]
    assert [status for status in range(200, 600) if limits.retries(status)] == retried


def test_options_of_retries_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        RetryLimits(worker_retries_max=0, total_retries_max=-1)
    assert len(caught.value.problems) == 2


# --- what may be sent twice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "embeddings", "rerank", "tokenize"])
def test_inference_that_leaves_nothing_behind_may_be_sent_again(path: str) -> None:
    assert may_repeat(b"POST", b"/v1/" + path.encode(), b"{}")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (b"POST", b"/v1/files"),
        (b"POST", b"/v1/batches"),
        (b"POST", b"/v1/batches/b1/cancel"),
        (b"POST", b"/v1/responses/r1/cancel"),
        (b"POST", b"/v1/chat/completions/c1"),
        (b"POST", b"/v1/load_lora_adapter"),
        (b"DELETE", b"/v1/files/f1"),
        (b"GET", b"/v1/chat/completions"),
        (b"PUT", b"/v1/completions"),
    ],
)
def test_whatever_else_is_asked_for_is_sent_once(method: bytes, path: bytes) -> None:
    assert not may_repeat(method, path, b"{}")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"store": false, "input": "hi"}', True),
        (b'{"input": "hi", "store":false, "background": false}', True),
        (b'{"input": "hi"}', False),  # stored by default
        (b'{"store": true}', False),
        (b'{"store": 0}', False),
        (b'{"store": null}', False),
        (b'{"store": false, "background": true}', False),
        (b'{"metadata": {"store": false}}', False),
        (b'{"input": "\\"store\\": false"}', False),
        (b'{"store": false, "store": true}', False),
        (b'["store", false]', False),
        (b'{"store": false', False),
        (b"", False),
        (b'{"store": false, "input": "' + b"x" * (1 << 20) + b'"}', False),  # not read
        (b'{"store": false, "input": [' + b"{}," * 20_000 + b"{}]}", False),
    ],
)
def test_a_response_may_be_sent_again_only_where_its_body_has_it_forgotten(body: bytes, expected: bool) -> None:
    assert may_repeat(b"POST", b"/v1/responses", body) is expected


def test_requests_for_inference_are_posts_to_the_paths_of_inference_stored_or_not() -> None:
    assert is_inference(b"POST", b"/v1/responses")
    assert is_inference(b"POST", b"/v1/chat/completions")
    assert not any(is_inference(method, b"/v1/chat/completions") for method in (b"OPTIONS", b"HEAD", b"GET"))
    assert not is_inference(b"POST", b"/v1/files")
