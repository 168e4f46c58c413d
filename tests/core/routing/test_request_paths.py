"""The table of paths: docs/paths.md repeats it, and what is done with a request follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.request_paths import NEVER, PATHS, table
from ranvier_py.core.routing.retries import is_inference, may_repeat
from tests.core.routing.test_router import make_router

PAGE = Path(__file__).parents[3] / "docs" / "paths.md"
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello " * 30}],
    "input": "hello " * 30,
    "prompt": "hello " * 30,
    "text": "hello " * 30,
    "store": False,
}


def test_the_document_has_the_table_as_it_is() -> None:
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("path", PATHS, ids=bytes.decode)
def test_a_path_adds_routes_as_the_table_has_it_and_is_sent_again_where_nothing_stays(path: bytes) -> None:
    router, body = make_router(), json.dumps(BODY).encode()
    prompt = router.read(path, body)
    assert prompt.model == "m"
    assert (prompt.kind != "opaque") is PATHS[path].teaches
    attempt = router.start_attempt(prompt, router.place(prompt, router.find(prompt, 0.0)), 0.0)
    router.first_token(attempt, 0.1)
    assert (router.counters.learned_rows > 0) is PATHS[path].teaches
    computes = PATHS[path].repeated != NEVER
    assert is_inference(b"POST", path) is computes
    assert may_repeat(b"POST", path, body) is computes


@pytest.mark.parametrize(
    "body", [{"text": "hello " * 30}, {"text": ["hello " * 30]}, {"input_ids": list(range(99))}], ids=str
)
def test_generate_is_placed_by_its_text_or_its_tokens(body: dict[str, object]) -> None:
    router = make_router()
    prompts = [router.read(b"/generate", json.dumps({**body, "stream": True}).encode()) for _ in range(2)]
    attempt = router.start_attempt(prompts[0], router.place(prompts[0], router.find(prompts[0], 0.0)), 0.0)
    router.first_token(attempt, 0.1)
    router.finish_attempt(attempt, Outcome.SUCCESS, 0.1)
    found = router.find(prompts[1], 0.2)
    assert router.place(prompts[1], found).backend == attempt.target.id
    assert found.holders[0].tokens >= 32
