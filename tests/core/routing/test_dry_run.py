"""A dry run (`/explain`) leaves every byte of a router's state as it was, whatever its policy and the question."""

from __future__ import annotations

import array
import json
from collections import OrderedDict, deque
from collections.abc import Mapping
from enum import Enum
from random import Random
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import pytest

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.engine_cache.prefix_index.prefix_index import KvIndex
from ranvier_py.core.errors import RanvierError, ResponseLost
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.fingerprint import Segment
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement.kv_score import KvScore
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH
from ranvier_py.core.routing.router import Router
from tests.core.routing.test_router import chat, make_router, start_attempt, streamed

NAMED = b'{"messages":[{"role":"user","content":"%b"}],"prompt_cache_key":"s"}'  # of a session
PLAIN = (int, float, str, bytes, bool, type(None), Enum, FunctionType, MethodType, type)


def state_of(root: object) -> list[str]:
    """Every attribute, item and number that can be reached from here, in its order, each object once."""
    found: list[str] = []
    seen: dict[int, object] = {}
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, PLAIN) or callable(value):
            found.append(f"{path} = {value!r}" if not callable(value) else f"{path} is {id(value)}")
            continue
        if id(value) in seen:
            found.append(f"{path} again")
            continue
        seen[id(value)] = value
        if isinstance(value, Random):
            found.append(f"{path} = {hash(value.getstate())}")
        elif isinstance(value, np.ndarray):
            found.append(f"{path} = {hash(value.tobytes())}")
        elif isinstance(value, array.array | bytearray | memoryview):
            found.append(f"{path} = {hash(bytes(value))}")
        elif isinstance(value, Mapping):
            found.append(f"{path} has {len(value)} in {type(value).__name__}")
            for number, (key, item) in enumerate(value.items()):
                waiting += [(f"{path}.key{number}", key), (f"{path}.value{number}", item)]
        elif isinstance(value, list | tuple | deque | set | frozenset):
            found.append(f"{path} has {len(value)}")
            waiting += [(f"{path}[{number}]", item) for number, item in enumerate(value)]
        else:
            names = [*getattr(value, "__dict__", ())]
            names += [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            found.append(f"{path} is a {type(value).__name__}")
            waiting += [(f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    return found


def busy_router(policy: str) -> Router:
    """One that has served, learned and failed, with requests under way."""
    router = make_router(policy=policy)
    if isinstance(router.policy, KvScore):
        router.policy.index = KvIndex()
    for number in range(12):
        attempt = start_attempt(
            router, streamed(chat("one", f"answer {number % 3}", f"question {number}")), float(number)
        )
        router.first_token(attempt, number + 0.01 * attempt.decision.computed_tokens)
        router.finish_attempt(attempt, Outcome.SUCCESS, number + 0.9)
        answer = Answer({"role": "assistant", "content": "answer" * 20}, "answer", 300, 128, 30)
        router.learn_tokens(attempt, attempt.prompt.end, (), answer, float(number))
    for number in range(3):
        start_attempt(router, streamed(chat("one", f"answer {number}", f"under way {number}")), 20.0)
    for _ in range(5):
        failed = start_attempt(router, chat("failing"), 21.0)
        router.finish_attempt(failed, Outcome.CONNECT_ERROR, 21.0)
    router.registry.add("http://10.0.0.9:8000")  # of which nothing is known yet
    return router


BODIES = {
    "a hit": (CHAT_PATH, chat("one", "answer 1", "question 1", "more", "still more")),
    "what was asked before": (CHAT_PATH, chat("one", "answer 2", "question 2")),
    "a shared beginning": (CHAT_PATH, chat("something else")),
    "a miss": (CHAT_PATH, chat("new", system="Another application. " * 30)),
    "a completion": (COMPLETION_PATH, json.dumps({"model": "m", "prompt": "once " * 300}).encode()),
    "token ids": (COMPLETION_PATH, json.dumps({"model": "m", "prompt": list(range(300))}).encode()),
    "what is not understood": (CHAT_PATH, b'{"model": "m"}'),
    "another namespace": (CHAT_PATH, b'{"model":"new","cache_salt":"s","messages":[{"role":"user","content":"hi"}]}'),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dry_run_leaves_every_byte_of_a_router_as_it_was(policy: str) -> None:
    router = busy_router(policy)
    before = state_of(router)
    assert state_of(router) == before
    for now in (22.0, 5_000.0):  # as a circuit opens again, and after the routes have expired
        for path, body in BODIES.values():
            prompt = router.read(path, body, dry=True)
            router.too_little(prompt, router.find(prompt, now, touch=False))
            report = router.explain(prompt, now)
            assert report["chosen"]
            assert len(report["candidates"]) > 0
    assert state_of(router) == before


def test_what_is_tokenized_for_a_dry_run_is_no_knowledge_of_the_router() -> None:
    router = busy_router("ttft")
    before = state_of(router)
    prompt = router.read(*BODIES["what was asked before"], dry=True)
    hasher = router.hasher
    ancestor = prompt.end.tokenized_ancestor()
    assert ancestor.state is not None
    count = prompt.end.messages - ancestor.messages
    ids = np.arange(64 * count, dtype=np.uint32)
    segments: list[Segment] = hasher.extend(ancestor.state, ids, [64 * (one + 1) for one in range(count)])
    router.absorb(prompt, ancestor, segments)
    assert prompt.end.state is not None
    router.explain(prompt, 30.0)
    assert state_of(router) == before


def test_a_dry_run_that_nobody_may_serve_changes_nothing_either() -> None:
    router = busy_router("affinity")
    for backend in list(router.registry):
        router.registry.remove(backend.name)
    before = state_of(router)
    prompt = router.read(*BODIES["a hit"], dry=True)
    with pytest.raises(RanvierError):
        router.explain(prompt, 30.0)
    assert state_of(router) == before


def test_a_dry_run_follows_a_session_and_misses_a_lost_response_without_counting_either() -> None:
    router = busy_router("affinity")
    first = start_attempt(router, NAMED % (b"x" * 99))
    router.first_token(first, 0.1)
    router.finish_attempt(first, Outcome.SUCCESS, 0.2)
    before = state_of(router)
    report = router.explain(router.read(CHAT_PATH, NAMED % (b"y" * 99), dry=True), 30.0)
    assert (report["chosen"], report["reason"]) == (first.target.name, "session")
    lost = router.read(RESPONSES_PATH, b'{"input":"so?","previous_response_id":"resp_9"}', dry=True)
    with pytest.raises(ResponseLost):
        router.explain(lost, 30.0)
    assert state_of(router) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dry_run_names_who_is_chosen_then(policy: str) -> None:
    router = busy_router(policy)
    for number in range(8):
        for path, body in BODIES.values():
            now = 22.0 + number
            explained = router.explain(router.read(path, body, dry=True), now)
            prompt = router.read(path, body)
            decision = router.place(prompt, router.find(prompt, now))
            assert (explained["chosen"], explained["reason"]) == (decision.backend_name, decision.reason)


def test_the_walk_notices_what_a_dry_run_might_change() -> None:
    router = busy_router("ttft")
    seen = [state_of(router)]
    router.find(router.read(*BODIES["a hit"]), 40.0)
    seen.append(state_of(router))
    router.routes.match((), (), 50.0)
    seen.append(state_of(router))
    assert seen[0] != seen[1] != seen[2]
    assert isinstance(OrderedDict(), Mapping)
    assert BackendId(0) == 0
