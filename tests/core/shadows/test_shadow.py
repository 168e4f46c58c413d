"""Policies in the shadow: other choices on the same traffic, without effect on it."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement.policies import make_policy
from ranvier_py.core.routing.request_paths import CHAT_PATH, RESPONSES_PATH
from ranvier_py.core.routing.router import Router
from ranvier_py.core.shadows.shadow import Shadow, make_shadow
from ranvier_py.core.shadows.shadows import FINISHED_MAX, Shadows
from tests.builders.route_tables import route_table
from tests.core.routing.test_router import chat, make_router, serve, start_attempt, streamed

LONG = "You are an assistant. " * 400
"""So long that a burst follows its first request rather than compute it anew."""


def shadowed(*policies: str, real: str = "affinity") -> tuple[Router, list[Shadow]]:
    router = make_router(policy=real)
    shadows = [make_shadow(router, make_policy(policy), route_table(), Random(1)) for policy in policies]
    router.observers = (Shadows(shadows, router.registry),)
    return router, shadows


def turns(count: int) -> list[bytes]:
    """A chat, turn by turn."""
    sent = [f"words of message {number}" for number in range(2 * count)]
    return [chat(*sent[: 2 * number + 1]) for number in range(count)]


def test_a_policy_that_knows_nothing_of_prefixes_would_have_lost_them() -> None:
    router, (shadow,) = shadowed("round_robin")
    for number, body in enumerate(turns(8)):
        serve(router, body, float(number))
    assert shadow.counters.elsewhere >= 5
    assert shadow.counters.saved_tokens < 0
    assert shadow.counters.saved_seconds < 0
    assert shadow.router.policy.name == "round_robin"


def test_a_shadow_lives_in_the_world_of_its_own_choices() -> None:
    """Measured in the real one, affinity beside round robin would find nothing where it never was."""
    router, (shadow,) = shadowed("affinity", real="round_robin")
    for body in turns(8):
        serve(router, body)
    assert shadow.counters.saved_tokens > 0
    assert shadow.router.counters.predicted_tokens > router.counters.predicted_tokens == 0


def test_what_engines_would_hold_is_counted_for_policies_that_look_nothing_up() -> None:
    router, (same, follows) = shadowed("round_robin", "affinity", real="round_robin")
    bodies = turns(8)
    for body in bodies:
        serve(router, body)
    assert (same.counters.elsewhere, same.counters.saved_tokens) == (0, 0)
    assert 0 < same.counters.predicted_tokens < follows.counters.predicted_tokens
    assert follows.counters.saved_tokens == follows.counters.predicted_tokens - same.counters.predicted_tokens
    assert same.counters.prompt_tokens == follows.counters.prompt_tokens == router.counters.prompt_tokens


@pytest.mark.parametrize("policy", ["round_robin", "affinity"])
def test_a_prompt_that_an_engine_computes_is_counted_for_the_next_one_there(policy: str) -> None:
    """With one engine all worlds are alike."""
    router, (shadow,) = shadowed(policy, real="least_loaded")
    for backend in list(router.registry)[1:]:
        router.registry.remove(backend.name)
    attempts = [start_attempt(router, chat("one", system=LONG)) for _ in range(3)]
    assert shadow.counters.predicted_tokens == 2 * attempts[0].prompt.tokens
    for attempt in attempts:
        router.finish_attempt(attempt, Outcome.BROKEN, 1.0)
    again = start_attempt(router, chat("one", system=LONG), 2.0)
    assert shadow.counters.predicted_tokens == 2 * attempts[0].prompt.tokens, "a failed request left nothing"
    assert (shadow.twins[again].attempt.target.id, shadow.counters.saved_tokens) == (again.target.id, 0)


def test_shadows_change_nothing_of_what_really_happens() -> None:
    alone, (watched, _) = make_router(), shadowed("least_loaded", "ttft", "random")
    for body in turns(8):
        one, other = serve(alone, body), serve(watched, body)
        assert one.decision == other.decision
    assert watched.routes.counters == alone.routes.counters
    assert [backend.load for backend in watched.registry] == [0, 0, 0, 0]


def test_what_only_one_engine_can_answer_and_what_follows_its_session_harm_no_shadow() -> None:
    router, (shadow,) = shadowed("affinity")
    attempt = start_attempt(router, b'{"input":"hi"}', path=RESPONSES_PATH)
    router.stored(attempt, "resp_1", b"", 0.0)
    second = start_attempt(router, b'{"input":"so?","previous_response_id":"resp_1"}', path=RESPONSES_PATH)
    assert (second.target.id, second.decision.reason) == (attempt.target.id, "owner")
    assert second not in shadow.twins
    named = b'{"messages":[{"role":"user","content":"%b"}],"prompt_cache_key":"s"}'
    third = start_attempt(router, named % (b"x" * 99))
    for each in (attempt, second, third):
        router.first_token(each, 0.1)
        router.finish_attempt(each, Outcome.SUCCESS, 0.2)
    fourth = start_attempt(router, named % (b"y" * 99), 0.3)
    assert (fourth.target.id, fourth.decision.reason) == (third.target.id, "session")
    assert fourth in shadow.twins
    router.finish_attempt(fourth, Outcome.SUCCESS, 0.4)


def test_answers_are_learned_in_the_shadow_too() -> None:
    router, (shadow,) = shadowed("affinity")
    attempt = serve(router, chat("one"))
    router.learn_tokens(attempt, attempt.prompt.end, (), Answer({"role": "assistant", "content": "answer" * 20}), 0.0)
    second = start_attempt(router, chat("one", "answer", "two"))
    matched = shadow.twins[second].attempt.decision.matched_tokens
    assert matched == second.decision.matched_tokens > attempt.prompt.tokens


def test_what_waits_counts_for_each_world_by_itself() -> None:
    router, (shadow,) = shadowed("least_loaded", real="affinity")
    body = streamed(chat("one", system=LONG))
    attempts = [start_attempt(router, body) for _ in range(3)]
    assert len({attempt.target.id for attempt in attempts}) == 1, "a burst of one prefix follows its first request"
    assert len({shadow.twins[attempt].attempt.target.id for attempt in attempts}) == 3
    assert shadow.counters.saved_tokens == -2 * attempts[0].prompt.tokens
    mirrored = [shadow.router.registry[backend.id] for backend in router.registry]
    assert sorted(each.work.own.inflight for each in mirrored) == [0, 1, 1, 1]
    for attempt in attempts:
        router.first_token(attempt, 1.0)
        router.finish_attempt(attempt, Outcome.SUCCESS, 2.0)
    assert [each.work.own.inflight + each.work.own.tokens + each.work.own.decoding for each in mirrored] == [0, 0, 0, 0]


def test_what_others_send_to_an_engine_is_load_in_every_world() -> None:
    router, (shadow,) = shadowed("least_loaded", real="least_loaded")
    first, second, *_ = [backend.id for backend in router.registry]
    router.registry.set_foreign_load(first, 5)
    assert shadow.router.registry[first].load == router.registry[first].load == 5
    assert shadow.router.registry[second].load == 0
    router.registry.set_foreign_load(first, 2)
    assert shadow.router.registry[first].load == 2


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.SERVER_ERROR])
def test_an_attempt_that_fails_leaves_nothing_in_the_shadow(outcome: Outcome) -> None:
    router, (shadow,) = shadowed("affinity")
    router.finish_attempt(start_attempt(router, chat("one")), outcome, 0.0)
    assert shadow.router.registry[start_attempt(router, chat("one")).target.id].work.own.inflight == 1
    assert shadow.router.routes.counters.rows == 0


def test_attempts_whose_answers_nobody_reads_are_forgotten() -> None:
    router, (shadow,) = shadowed("affinity")
    attempts: list[Attempt] = [serve(router, chat("one")) for _ in range(FINISHED_MAX + 10)]
    assert len(shadow.twins) == FINISHED_MAX
    router.answered(attempts[0], attempts[0].prompt.end, NOTHING, 0.0)  # too late, and no harm


def test_bodies_of_finished_attempts_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt keeps its body alive: a thousand long ones are a gigabyte."""
    body = chat("one")
    monkeypatch.setattr("ranvier_py.core.shadows.shadows.FINISHED_BYTES_MAX", 3 * len(body))
    router, (shadow,) = shadowed("affinity")
    for _ in range(10):
        serve(router, body)
    assert len(shadow.twins) == 3


def test_a_removed_backend_at_which_only_the_shadow_was_harms_nobody() -> None:
    """Its id is free, since no real request is there. What a shadow raised, a real request would get."""
    router, (shadow,) = shadowed("round_robin")
    attempts = [start_attempt(router, streamed(chat("one", system=LONG))) for _ in range(3)]
    assert len({attempt.target.id for attempt in attempts}) == 1
    elsewhere = [attempt for attempt in attempts if shadow.twins[attempt].attempt.target.id != attempt.target.id]
    places = [shadow.twins[attempt].attempt.target.id for attempt in elsewhere]
    for place in places:
        router.registry.remove(router.registry[place].name)
    again = router.registry.add("http://10.0.0.99:8000")
    assert again.id in places
    for attempt in attempts:
        router.first_token(attempt, 1.0)
        router.answered(attempt, attempt.prompt.end, NOTHING, 2.0)
        router.finish_attempt(attempt, Outcome.SUCCESS, 2.0)
    assert shadow.router.registry[again.id].work.own.inflight == 0
    assert [backend.work.own.inflight for backend in router.registry] == [0, 0, 0]
    assert (len(elsewhere), len(shadow.router.holders.speculation)) == (2, 0)


def test_no_backend_follows_shadows_that_were_replaced() -> None:
    router, _ = shadowed("affinity", "random")
    serve(router, chat("one"))
    assert all(backend.work.mirrors for backend in router.registry)
    Shadows((), router.registry).close()
    assert not any(backend.work.mirrors for backend in router.registry)


def test_a_second_try_avoids_the_failed_backend_in_the_shadow_too() -> None:
    """Else the shadow of the real policy would find at a dead backend what the real one has to compute elsewhere."""
    router, (shadow,) = shadowed("affinity")
    first = serve(router, chat("one"))
    prompt = router.read(CHAT_PATH, chat("one", "answer", "two"))
    router.finish_attempt(
        router.start_attempt(prompt, router.place(prompt, router.find(prompt, 1.0)), 1.0), Outcome.BROKEN, 1.0
    )
    found = router.find(prompt, 1.0, [first.target.id])
    second = router.start_attempt(prompt, router.place(prompt, found), 1.0, found=found)
    assert second.target.id != first.target.id
    assert shadow.twins[second].attempt.target.id == second.target.id
    assert (shadow.counters.elsewhere, shadow.counters.saved_tokens) == (0, 0)


def test_the_shadow_of_the_same_policy_saves_exactly_nothing() -> None:
    """Rounding would be shown as «-0»."""
    router, (shadow,) = shadowed("affinity")
    bodies = [*turns(5), *(chat(f"{number}", "x" * number) for number in range(45))]
    for number, body in enumerate(bodies):
        attempt = start_attempt(router, streamed(body), float(number))
        router.first_token(attempt, number + 0.1 + number / 7)
        router.finish_attempt(attempt, Outcome.SUCCESS, number + 0.9 + number / 7)
    counters = shadow.counters
    assert (counters.placed, counters.elsewhere, counters.saved_tokens, counters.saved_seconds) == (50, 0, 0, 0.0)


@pytest.mark.parametrize(("room_for", "found_again"), [(5.5, 5), (3.5, 0)])
def test_no_world_supposes_more_than_an_engine_has_room_for(room_for: float, found_again: int) -> None:
    """One engine gets five chats in turn, twice."""
    router, (shadow,) = shadowed("affinity")
    for backend in list(router.registry)[1:]:
        router.registry.remove(backend.name)
    (backend,) = router.registry
    bodies = [streamed(chat(f"chat {number}", system=f"{number} {LONG}")) for number in range(5)]
    tokens = router.read(CHAT_PATH, bodies[0]).tokens
    backend.work.room.cache_tokens = int(room_for * tokens)
    for number, body in enumerate(2 * bodies):
        attempt = start_attempt(router, body, float(number))
        router.first_token(attempt, number + 0.5)
        router.finish_attempt(attempt, Outcome.SUCCESS, number + 0.9)
    assert shadow.counters.predicted_tokens == found_again * tokens
    assert shadow.counters.saved_tokens == 0


def test_what_a_shadow_sends_to_one_engine_waits_there_though_real_requests_are_answered() -> None:
    """The real ones are spread over four engines, and answered together; those of the shadow, one after another."""
    router, (shadow,) = shadowed("chwbl", real="round_robin")
    for number in range(40):  # an engine takes a second for a prompt
        attempt = start_attempt(router, streamed(chat(f"{number} {LONG}")), 10.0 * number)
        router.first_token(attempt, 10.0 * number + 1.0)
        router.finish_attempt(attempt, Outcome.SUCCESS, 10.0 * number + 2.0)
    mirrored = [shadow.router.registry[backend.id] for backend in router.registry]
    for each in list(router.registry)[1:]:
        router.registry.drain(each.name, True)
    attempts = [start_attempt(router, streamed(chat(f"new {number} {LONG}")), 1000.0) for number in range(4)]
    assert [each.work.own.inflight for each in mirrored] == [4, 0, 0, 0]
    for attempt in attempts:
        router.first_token(attempt, 1001.0)
        router.finish_attempt(attempt, Outcome.SUCCESS, 1002.0)
    shadows = router.observers[0]
    assert isinstance(shadows, Shadows)
    assert [backend.work.own.inflight for backend in router.registry] == [0, 0, 0, 0]
    shadows.tick({}, 1100.0)
    assert [each.work.own.inflight for each in mirrored] == [0, 0, 0, 0]
