"""What real engines say of the APIs that they serve is read by nodes as it is meant."""

from __future__ import annotations

from pathlib import Path

import httpx
import orjson
import pytest

from ranvier_py.core.routing.models.served_apis import MODEL_INFO, OPENAPI, lacked_by_page, page_for
from tests.engines.real import ATTENTION, RanvierNode, Vllm
from tests.engines.records import records

GENERATING = {b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"}
EMBEDDING = {b"/v1/embeddings"}
BLOCKS = 160  # more than one prompt may have
POOLING = ATTENTION._replace(served=(*ATTENTION.served, "--runner", "pooling", "--convert", "embed"))
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
}


@pytest.mark.engines("vllm")
def test_requests_without_a_model_go_to_the_vllm_engine_that_serves_their_api(tmp_path: Path) -> None:
    engines = [Vllm("chats", BLOCKS, tmp_path), Vllm("vectors", BLOCKS, tmp_path, POOLING)]
    processes = [engine.process for engine in engines]
    try:
        for engine in engines:
            engine.ready()
        pages = [httpx.get(f"{engine.url}{OPENAPI}", trust_env=False).content for engine in engines]
        chats, vectors = [lacked_by_page(OPENAPI, page) for page in pages]
        assert chats is not None
        assert vectors is not None
        assert not GENERATING & chats
        assert chats >= EMBEDDING
        assert vectors >= GENERATING
        assert not EMBEDDING & vectors
        node = RanvierNode("one", {each.name: each.url for each in engines}, tmp_path, "round_robin", [])
        processes.append(node.process)
        node.ready(2)
        node.until("/admin/backends", lambda view: all(each["models"] for each in view["backends"]))
        for path, body in [*ASKED.items()] * 3:
            answer = httpx.post(f"{node.url}{path}", json=body, timeout=120.0, trust_env=False)
            expected = "vectors" if "embeddings" in path else "chats"
            assert (answer.status_code, answer.headers["x-ranvier-backend"]) == (200, expected), (path, answer.text)
    finally:
        for process in processes:
            process.end()


@pytest.mark.engines("sglang")
def test_sglang_shows_which_apis_it_serves_where_nodes_look() -> None:
    for (models, info), (lacked, served) in zip(
        records("sglang", oracle="sglang_pages"), [(EMBEDDING, GENERATING), (GENERATING, EMBEDDING)], strict=True
    ):
        assert page_for(str(card.get("owned_by")) for card in orjson.loads(models)["data"]) == MODEL_INFO
        found = lacked_by_page(MODEL_INFO, info)
        assert found is not None
        assert found >= lacked
        assert not served & found
