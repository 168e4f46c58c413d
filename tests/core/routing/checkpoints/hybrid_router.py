"""A router before engines of hybrid models, and requests of so many tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import Segment, TokenState, anchors_between
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_apis import CHAT
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.checkpoints.cache_profile import profile_named
from ranvier_py.core.routing.router import Router
from tests.core.routing.test_router import make_router

BLOCK = 16


def hybrid_router(profile: str, backends: int = 1, policy: str = "affinity") -> Router:
    router = make_router(backends, texts_match=False, policy=policy)
    for backend in router.registry:
        router.registry.reported_hit(backend, backend.generation, CHAT.name)  # so that its zeros count
        router.checkpoints.set_profile(backend.id, profile_named(profile))
    return router


@cache
def name_of(path: tuple[str, ...], tokens: int) -> Fingerprint:
    return Fingerprint(Random(repr((path, tokens))).getrandbits(63) or 1)


def chain(*messages: tuple[str, int], tokenized: bool = True) -> Boundary:
    """The end of these messages: each a name, and its tokens. Equal names in equal places are equal messages."""
    at, path, length = Boundary(None, Fingerprint(0), 0), (), 0
    for message, tokens in messages:
        path, before, length = (*path, message), length, length + tokens
        end = length // BLOCK * BLOCK
        depths = [blocks * BLOCK for blocks in anchors_between(before // BLOCK, end // BLOCK)]
        anchors = [(depth, name_of(path, depth)) for depth in depths if depth < end]
        at = Boundary(at, name_of(path, 0), length, BLOCK)
        if tokenized:
            at.tokenized(Segment(tuple(anchors), (end, name_of(path, end)), TokenState(length, 0, ())))
    return at


def prompt_of(*messages: tuple[str, int], tokenized: bool = True, api: str = CHAT.name) -> Prompt:
    end = chain(*messages, tokenized=tokenized)
    body = b'{"messages":[]}'
    return Prompt("chat", "m", stream=True, end=end, base=end.root(), tail=(), body=body, api=api)


def send(router: Router, *messages: tuple[str, int], now: float = 0.0, api: str = CHAT.name) -> Attempt:
    prompt = prompt_of(*messages, api=api)
    found = router.find(prompt, now)
    return router.start_attempt(prompt, router.place(prompt, found), now, found=found)


def serve(
    router: Router,
    asked: Sequence[tuple[str, int]],
    answer: tuple[str, int],
    now: float = 0.0,
    cached: int | None = None,
    api: str = CHAT.name,
) -> Attempt:
    """A request and its whole answer. `cached`: by the engine's count."""
    attempt = send(router, *asked, now=now, api=api)
    router.first_token(attempt, now)
    length = attempt.prompt.end.length
    counts = Answer(prompt_tokens=length, cached_tokens=cached, completion_tokens=answer[1])
    router.answered(attempt, chain(*asked, answer), counts, now)
    router.finish_attempt(attempt, Outcome.SUCCESS, now)
    return attempt


def credit(router: Router, *messages: tuple[str, int], now: float = 0.0, backend: int = 0) -> tuple[int, int]:
    """(K, R) of this prompt there."""
    found = router.find(prompt_of(*messages), now, touch=False).credit.get(BackendId(backend))
    return (found.held, found.tokens) if found is not None else (0, 0)
