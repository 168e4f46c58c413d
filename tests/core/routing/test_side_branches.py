"""Titles, suggestions and sub-agents that agents send beside a chat do not lead it away from what was computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import pytest

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement import Candidate, Choice, Match
from ranvier_py.core.routing.placement.affinity import Affinity
from ranvier_py.core.routing.route_table import Trust
from ranvier_py.core.routing.router import Attempt, Router
from tests.core.routing.test_router import chat as plain_chat
from tests.core.routing.test_router import make_router, serve, start_attempt

OPENING = "You are an agent that works in a repository. " * 400  # nearly all of every prompt
TITLE = "Name this conversation in three words. " * 20


def chat(*contents: str, system: str = OPENING) -> bytes:
    plain = json.loads(plain_chat(*(f"{words} " for words in contents), system=system))
    return json.dumps({**plain, "stream": True, "prompt_cache_key": "session"}).encode()


def opened_everywhere(seed: int) -> Router:
    """Every engine has the opening of all chats."""
    router = make_router(backends=4, seed=seed)
    boundary = router.read("/v1/chat/completions", chat("hello")).end.first
    for backend in router.registry:
        router.routes.learn(router.holders.chain(boundary), backend.id, backend.generation, Trust.LOCAL, 0.0)
    return router


def served(router: Router, body: bytes, now: float, answer: str = "") -> Attempt:
    attempt = serve(router, body, now)
    if answer:
        message = {"role": "assistant", "content": f"{answer} " * 200}
        router.learn_tokens(attempt, attempt.prompt.end, (), Answer(message), now)
    return attempt


def talk(router: Router, *, suggestions: bool, changed: bool, turns: int = 8) -> list[int]:
    """Where the turns of one chat go. While each is answered another agent of the same opening asks something."""
    rng = Random(7)
    contents, found, now = ["one"], [], 1.0
    open_ones: list[Attempt] = []
    for number in range(turns):
        attempt = start_attempt(router, chat(*contents), now)
        others = start_attempt(router, chat(f"another {number}"), now)
        for each in (attempt, others):
            router.first_token(each, now + rng.uniform(0.0005, 0.05))  # quick engines, whose times are noise
        found.append(attempt.target.id)
        message = {"role": "assistant", "content": f"thoughts and answer {number} " * 200}
        answer = Answer(message, prompt_tokens=attempt.prompt.tokens, cached_tokens=attempt.decision.matched_tokens)
        for each in (attempt, others, *open_ones):
            router.finish_attempt(each, Outcome.SUCCESS, now + 0.1)
        router.learn_tokens(attempt, attempt.prompt.end, (), answer, now + 0.1)
        contents.append((f"answer {number} " if changed else f"thoughts and answer {number} ") * 10)
        open_ones = [start_attempt(router, chat(*contents, "what next?"), now + 0.2)] if suggestions else []
        contents.append(f"question {number}")
        now += 0.3
    return found


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize(("suggestions", "changed"), [(True, False), (False, True), (True, True)])
def test_side_branches_and_answers_that_come_back_changed_leave_a_chat_where_it_is(
    seed: int, suggestions: bool, changed: bool
) -> None:
    """Agents drop the thoughts of an answer, or cut it: the history goes on from the prompt by another way then."""
    assert len(set(talk(opened_everywhere(seed), suggestions=suggestions, changed=changed))) == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_chat_begins_where_its_opening_is_at_home_and_not_where_its_title_was_made(seed: int) -> None:
    alone, router = make_router(seed=seed), make_router(seed=seed)
    served(router, chat("one", system=TITLE), 1.0)
    attempt = start_attempt(router, chat("one"), 2.0)
    assert attempt.decision.reason == "cold"
    assert attempt.target.id == start_attempt(alone, chat("another", system=OPENING), 2.0).target.id


@pytest.mark.parametrize("seed", range(8))
def test_first_prompts_of_one_opening_that_come_at_once_are_computed_once(seed: int) -> None:
    """A node knows what is under way. Peers learn of it when it is served, and may compute it beside it."""
    router = make_router(seed=seed)
    attempts = [start_attempt(router, chat(f"task {number}"), 0.001 * number) for number in range(3)]
    assert [attempt.decision.reason for attempt in attempts] == ["cold", "affinity", "affinity"]
    assert len({attempt.target.id for attempt in attempts}) == 1


class Seeing(Affinity):
    """Keeps what it was asked last."""

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        self.seen = match
        return super().choose(match, candidates, rng)


@pytest.mark.parametrize("branch", ["", "what would the user ask next?"])
@pytest.mark.parametrize("answer", ["answer", "thoughts and an answer"])
def test_most_of_a_prompt_with_one_continuation_is_the_chats_own(branch: str, answer: str) -> None:
    """Its answer as the engine made it and a side branch are no other chats. Two chats are."""
    router = make_router()
    router.policy = policy = Seeing()
    served(router, chat("one"), 1.0, answer=answer)
    if branch:
        served(router, chat("one", "answer", branch), 2.0)
    beside = start_attempt(router, chat("one", "answer", branch or "read"), 3.0)
    start_attempt(router, chat("one", "answer", "two"), 3.0)
    assert policy.seen.holders
    assert not policy.seen.shared
    router.finish_attempt(beside, Outcome.SUCCESS, 3.1)
    for number in range(2):
        served(router, chat(f"another {number}"), 4.0)
    start_attempt(router, chat("a third"), 5.0)
    assert policy.seen.shared
