"""Which paths an engine lacks, by its cards or by a page of its own."""

import json
from typing import Any

import pytest

from ranvier_py.core.routing.models.served_apis import (
    EMBEDDINGS,
    GENERATING,
    MODEL_INFO,
    OPENAPI,
    POOLING,
    lacked_by_cards,
    lacked_by_page,
    page_for,
)
from ranvier_py.core.routing.request_paths import PATHS

CARDS: list[tuple[list[dict[str, Any]], frozenset[bytes] | None]] = [
    ([], None),
    ([{"id": "m", "owned_by": "vllm", "root": "m", "max_model_len": 9}], None),
    ([{"id": "embed-large"}], None),  # a name says nothing
    ([{"id": "m", "task": "embed"}], GENERATING),
    ([{"id": "m", "type": "embeddings"}], GENERATING),
    ([{"id": "m", "type": "llm"}], POOLING),
    ([{"id": "m", "type": "model"}], None),
    ([{"id": "m", "model_type": "qwen3"}], None),
    ([{"id": "m", "capabilities": {"completion_chat": True, "function_calling": True}}], POOLING),
    ([{"id": "m", "capabilities": ["completion", "embedding"]}], frozenset()),
    ([{"id": "m", "task": "embed"}, {"id": "n", "task": "generate"}], frozenset()),
    ([{"id": "m", "task": "embed"}, {"id": "n"}], None),
    ([{"id": "m", "task": 7, "tasks": [1, None, {}], "capabilities": None}], None),
]


@pytest.mark.parametrize(("cards", "lacks"), CARDS)
def test_cards_that_all_name_a_task_show_what_is_lacking(
    cards: list[dict[str, Any]], lacks: frozenset[bytes] | None
) -> None:
    assert lacked_by_cards(cards) == lacks


def test_sglangs_page_shows_whether_its_model_generates() -> None:
    assert page_for({"sglang"}) == MODEL_INFO
    assert lacked_by_page(MODEL_INFO, b'{"model_path":"m","is_generation":false}') == GENERATING
    assert lacked_by_page(MODEL_INFO, b'{"model_path":"m","is_generation":true}') == EMBEDDINGS
    for body in (b"", b"[]", b"{", b'{"is_generation":1}', b'{"is_generation":null}'):
        assert lacked_by_page(MODEL_INFO, body) is None


def test_vllms_document_has_the_paths_that_it_serves() -> None:
    assert page_for({"none", "vllm"}) == OPENAPI
    assert page_for({"llamacpp", "None"}) is None
    document = {"openapi": "3.1.0", "paths": {"/v1/embeddings": {"post": {}}, "/pooling": {}, "/health": {}}}
    for body in (json.dumps(document).encode(), json.dumps(document, indent=2).encode()):
        lacks = lacked_by_page(OPENAPI, body)
        assert lacks is not None
        assert {b"/v1/chat/completions", b"/v1/messages", b"/generate"} <= lacks
        assert lacks.isdisjoint({b"/v1/embeddings", b"/pooling", b"/v1/realtime"})
    for body in (b"", b"<html>", b'{"paths":{}}', b'{"paths":{"/health":{}}}', b"\xff" * 99):
        assert lacked_by_page(OPENAPI, body) is None, "it may serve any"


def test_what_generates_and_what_pools_are_paths_of_the_port() -> None:
    assert frozenset(PATHS) >= GENERATING | POOLING
    assert GENERATING.isdisjoint(POOLING)
    assert b"/v1/chat/completions" in GENERATING
    assert b"/v2/rerank" in POOLING
