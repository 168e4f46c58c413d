"""A node names the clients that break their own prefixes, where and by what, while it serves them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ranvier_py.node import client_parts
from tests.node.node_lab import MODEL, Node, chat, printed, turn
from tests.node.node_lab import lab as node_lab
from tests.proxy.wire import GOOD, Scripted

SECRET = "a plan that nobody may read"


async def ask(node: Node, nonce: str, *contents: str, session: str = "s", **fields: Any) -> None:
    messages = turn(*contents)
    messages[0]["content"] += f" Request {nonce}, {SECRET}."
    headers = {"user-agent": "opencode/1.18.33", "x-session-id": session}
    answer = await node.http.post(f"{node.url}/v1/chat/completions", content=chat(messages, **fields), headers=headers)
    assert answer.status_code == 200


def of(view: dict[str, Any], client: str) -> dict[str, Any]:
    return next((row for row in view["clients"] if row["client"] == client), {"turns": 0, "breaks": []})


async def test_a_nonce_before_the_history_is_named_with_its_client_its_place_and_its_cost() -> None:
    async with node_lab(engines=1) as node:
        await ask(node, "4be01", "First question.", stream=True)  # streams show how fast an engine is
        await node.until("/admin/clients", lambda view: of(view, "opencode").get("reused_share") is not None)
        await ask(node, "91c2f", "First question.", "An answer.", "Second question.")
        await ask(node, "91c2f", "First question.", "An answer.", "Second question.", "Good.", "Third question.")
        view = await node.until("/admin/clients", lambda view: of(view, "opencode")["breaks"])
        row = of(view, "opencode")
        (found,) = row["breaks"]
        assert (row["turns"], row["sessions"], found["count"]) == (3, 1, 1)
        assert (found["cause"], found["path"], found["scope"]) == ("nonce", "$.messages[0].content", "turn")
        assert 0 < found["tokens"] == row["break_tokens"] < row["prompt_tokens"]
        assert found["prefill_s"] == row["break_prefill_s"] > 0, "the engine's rate is known from its first answer"
        metrics = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_prefix_breaks_total{cause="nonce",client="opencode"} 1.0' in metrics
        assert 'ranvier_prefix_break_prefill_seconds_total{cause="nonce",client="opencode"}' in metrics
        assert 'ranvier_client_turns_total{client="opencode"} 3.0' in metrics
        page = await printed("clients", "--control", node.control)
        assert "opencode: 3 turns" in page
        assert "$.messages[0].content  within a session" in page
        assert await printed("lint", "--url", node.control, status=1) == page, "a prefix broke"
        assert SECRET not in page + metrics + str(view)


async def test_conversations_that_only_grow_break_nothing_and_what_engines_reused_is_shown() -> None:
    async with node_lab(engines=1) as node:
        long = "What is on the shelves of this library? " * 40
        for count in (1, 3, 5):
            await ask(node, "4be01", *[long, "Books.", "Which?", "Many.", "Name one."][:count])
        view = await node.until("/admin/clients", lambda view: of(view, "opencode").get("reused_share"))
        row = of(view, "opencode")
        assert row["breaks"] == []
        assert 0.3 < row["reused_share"] <= 1.0
        assert view["compared"] == 1, "what goes on from a known history is not read again"


async def test_a_session_that_goes_on_by_another_model_or_with_other_tools_broke_by_that() -> None:
    engine = Scripted(GOOD)
    engine.page = json.dumps({"data": [{"id": name, "object": "model"} for name in (MODEL, "another")]}).encode()
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    async with node_lab(engine) as node:
        await node.until_backend(lambda backend: len(backend["models"]) == 2)
        contents = ["What is on the shelves of this library? " * 20]
        for fields in ({"tools": tools[:1]}, {"tools": tools}, {"tools": tools, "model": "another"}):
            await ask(node, "4be01", *contents, **fields)
            contents += ["Books.", "Which of them?"]
        view = await node.until("/admin/clients", lambda view: len(of(view, "opencode")["breaks"]) == 2)
        causes = {each["cause"]: (each["path"], each["count"]) for each in of(view, "opencode")["breaks"]}
        assert causes == {"tools_changed": ("$.tools[1]", 1), "model": ("$.model", 1)}
        metrics = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_prefix_breaks_total{cause="model",client="opencode"} 1.0' in metrics


async def test_prompts_that_are_too_many_or_too_large_to_compare_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_parts, "BODY_BYTES_MAX", 400)
    async with node_lab(engines=1) as node:
        await ask(node, "4be01", "A question that is long. " * 40)
        view = await node.until("/admin/clients", lambda view: view["left_out"])
        assert (view["left_out"], view["compared"]) == (1, 0)
        assert of(view, "opencode")["turns"] == 1
