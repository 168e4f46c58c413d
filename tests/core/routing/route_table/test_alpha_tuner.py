"""Alpha by replay: which weight would have saved most of the latest requests."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.answers.answer_stream import NOTHING
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.route_table import RouteTable, RouteTableOptions, Trust
from ranvier_py.core.routing.route_table.alpha_tuner import (
    ALPHAS,
    KEYS_MAX,
    WARM,
    WINDOW,
    AlphaJob,
    AlphaTuner,
    LoggedRequest,
    chat_of,
    decode_job,
    encode_job,
    found_alpha,
    saved_by,
)
from ranvier_py.core.routing.route_table.utility_queue import UtilityQueue
from ranvier_py.core.routing.router import Router
from tests.core.routing.test_router import chat, make_router, serve


def long_and_short(seed: int = 1) -> list[LoggedRequest]:
    """Long documents that come again after a while, among short prompts that never do."""
    rng = Random(seed)
    found = []
    for number in range(WARM + WINDOW):
        if number % 4:
            keys = [(64, 10_000 + number, 0)]
        else:
            document = rng.randrange(12)
            keys = [(4096, 100 + document, 0)]
        found.append(LoggedRequest(number, keys[0][0], keys))
    return found


def everything_once_more() -> list[LoggedRequest]:
    """The latest forty prompts are asked for again and again: the longest unused one is always the one to forget."""
    return [
        LoggedRequest(number, depth, [(depth, 100 + number // 80 * 40 + number % 40, 0)])
        for number in range(WARM + WINDOW)
        for depth in [64 if number % 40 < 39 else 8192 * (1 + number // 80 % 2)]
    ]


def test_long_prompts_that_come_again_are_worth_an_alpha() -> None:
    requests = long_and_short()
    assert saved_by(AlphaJob(0.0, 16, requests), 1.0) > 1.2 * saved_by(AlphaJob(0.0, 16, requests), 0.0)
    assert found_alpha(AlphaJob(0.0, 16, requests)) > 0.0


def test_alpha_moves_by_half_of_the_step_until_no_step_gains_two_percent() -> None:
    requests = long_and_short()
    best = max(ALPHAS, key=lambda alpha: (saved_by(AlphaJob(0.0, 16, requests), alpha), -alpha))
    alpha, steps = 0.0, [found_alpha(AlphaJob(0.0, 16, requests))]
    assert steps[0] == pytest.approx(best / 2)
    for _ in range(8):
        alpha = found_alpha(AlphaJob(alpha, 16, requests))
    gain = saved_by(AlphaJob(0.0, 16, requests), best) / saved_by(AlphaJob(0.0, 16, requests), alpha)
    assert gain < 1.02  # nearer it goes for no gain


def test_two_percent_is_the_least_that_alpha_moves_for() -> None:
    """Where a table holds all there is no alpha is better than the one in use, whatever that is."""
    requests = long_and_short()
    for alpha in (0.0, 0.7, 2.0):
        assert found_alpha(AlphaJob(alpha, 10_000, requests)) == alpha


def test_it_goes_back_to_the_longest_unused_where_that_is_best() -> None:
    requests = everything_once_more()
    job = AlphaJob(2.0, 40, requests)
    assert saved_by(job, 0.0) > 1.1 * saved_by(job, 2.0)
    for _ in range(6):
        job = job._replace(alpha=found_alpha(job))
    assert job.alpha <= 0.2
    assert saved_by(job, job.alpha) > saved_by(job, 0.0) / 1.02


def test_where_time_is_short_the_alpha_in_use_and_lru_are_compared_at_least() -> None:
    job = AlphaJob(1.0, 40, everything_once_more())
    assert found_alpha(job, lambda: True) == 0.5


def test_equal_requests_give_equal_alphas() -> None:
    job = AlphaJob(0.4, 16, long_and_short())
    assert found_alpha(job) == found_alpha(job)


def test_a_job_arrives_as_it_was_sent() -> None:
    job = AlphaJob(0.3, 1234, [LoggedRequest(7, 100, [(96, 2**64 - 1, 5), (16, 0, 9)]), LoggedRequest(8, 3, [])])
    assert decode_job(encode_job(job)) == job
    assert decode_job(encode_job(AlphaJob(0.0, 1, ()))) == AlphaJob(0.0, 1, [])
    with pytest.raises(ValueError, match="unexpected end"):
        decode_job(encode_job(job)[:-1])


def tuned_router(capacity: int) -> tuple[Router, AlphaTuner]:
    router = make_router()
    router.routes = RouteTable(capacity=capacity, options=RouteTableOptions("utility"))
    tuner = AlphaTuner(router.routes, router.chain)
    router.observers = (tuner,)
    return router, tuner


def answer(router: Router, number: int) -> None:
    """A chat of one message, served and answered."""
    attempt = serve(router, chat(f"words of chat {number} " * 4))
    router.answered(attempt, attempt.prompt.end, NOTHING, 0.0)


def test_requests_are_kept_as_they_are_answered_and_a_full_table_is_tuned() -> None:
    router, tuner = tuned_router(40)
    for number in range(2 * WINDOW):
        assert not tuner.due or number >= WINDOW
        answer(router, number)
    assert tuner.due
    job = tuner.job()
    assert job is not None
    assert (job.alpha, job.capacity, len(job.requests)) == (1.0, 40, WARM + WINDOW)
    assert all(request.chain for request in job.requests)
    assert not tuner.due
    tuner.take(0.5)
    tuner.take(None)
    tuner.take(7.0)
    queue = router.routes.leaves
    assert isinstance(queue, UtilityQueue)
    counters = tuner.counters
    assert (queue.alpha, counters.alpha, counters.tunings, counters.changes, counters.failed) == (0.5, 0.5, 3, 1, 2)


def test_while_nothing_is_evicted_nothing_is_tuned() -> None:
    router, tuner = tuned_router(1_000_000)
    for number in range(WINDOW + 1):
        answer(router, number)
    assert not tuner.due


def test_of_a_large_table_a_sample_of_whole_chats_is_kept_and_the_table_is_smaller_by_as_much() -> None:
    routes = RouteTable(capacity=20_000, options=RouteTableOptions("utility"))
    for number in range(1, 20_100):
        routes.learn([(64, number, 0)], BackendId(0), 0, Trust.LOCAL, 1.0)
    tuner = AlphaTuner(routes, Boundary.chain)
    rng, root = Random(3), Boundary(None, Fingerprint(1), 0)
    attempt = make_attempt()
    chats = [Boundary(Boundary(root, Fingerprint(9), 64), Fingerprint(rng.getrandbits(64)), 128) for _ in range(4000)]
    for end in chats[:WINDOW]:
        tuner.answered(attempt, end, NOTHING, 1.0)
    assert tuner.due
    assert tuner.job() is None  # too many chats for so few requests: from now on a sample
    for end in (*chats, *chats):
        tuner.answered(attempt, Boundary(end, Fingerprint(rng.getrandbits(64)), 192), NOTHING, 2.0)
    for number in range(20_100, 20_200):
        routes.learn([(64, number, 0)], BackendId(0), 0, Trust.LOCAL, 2.0)
    job = tuner.job()
    assert job is not None
    share = job.capacity / 20_000
    assert share == pytest.approx(0.005, rel=0.1)
    kept = {request.chain[1][2] for request in job.requests}
    assert 0.4 * share < len(kept) / len(chats) < 1.8 * share
    assert all(chat_of(end) in kept for end in chats if chat_of(end) % 2**32 < share * 2**32 * 0.99)


def test_a_request_of_too_many_prefixes_is_counted_and_left_out() -> None:
    router, tuner = tuned_router(1)
    for number in range(2):
        answer(router, number)
    end = Boundary(None, Fingerprint(1), 0)
    for number in range(KEYS_MAX + 2):
        end = Boundary(end, Fingerprint(number + 2), 16 * number)
    tuner.answered(make_attempt(), end, NOTHING, 1.0)
    assert tuner.counters.left_out == 1


def make_attempt() -> Attempt:
    """Of a chat; nothing else of it is looked at."""
    return serve(make_router(), chat("hello " * 100))
