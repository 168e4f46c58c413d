"""Request bodies become the tokens that SGLang itself makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import pytest

from cluster.agents.agent_shapes import names, requests_of
from ranvier_py.core.prompts.request_apis import APIS
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.core.tokenize.tokenize_job import job_of
from ranvier_py.core.tokenize.tokenize_service import TokenizeWork
from ranvier_py.io.tokenizer import EMBEDDED, ChatTokenizer
from tests.core.prompts.test_request_apis import reader
from tests.engines.records import records

pytestmark = pytest.mark.engines("sglang")

CLAUDE_CHOICES = ({"type": "none"}, {"type": "auto"}, {"type": "any"})
Body = tuple[str, dict[str, Any]]
"""The API, and a body of it."""


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(str(EMBEDDED))


def compare(bodies: list[Body], tokenizer: ChatTokenizer, folder: Path) -> None:
    """Each body's tokens are the first of SGLang's; what SGLang has beyond them is a generation prompt."""
    file = folder / "bodies"
    file.write_text("".join(f"{json.dumps(body)}\n" for body in bodies))
    theirs = list(records("sglang", file, EMBEDDED, oracle="sglang_chats"))
    assert [found for found in theirs if found[0] is None] == []
    assert len(theirs) == len(bodies)
    for (api, body), (tokens,) in zip(bodies, theirs, strict=True):
        prompt = reader().chat(json.dumps(body).encode(), api=APIS[api])
        _, job = job_of(prompt, with_body=True, by_sglang=True)
        ours = tokenizer.tokenize(TokenizeWork(job, reads_parts=tokenizer.profile.parts).chat()).ids.tolist()
        assert ours == tokens[: len(ours)], (api, body)
        assert len(tokens) - len(ours) < 16


def of_agents() -> Iterator[Body]:
    """All but those with sealed reasoning, which SGLang opens or leaves out. Fillers of options are no valid ones."""
    for name in names():
        for request in requests_of(name, "m")[::3]:
            body = json.loads(request.body)
            items = body.get("input") or ()
            if not any("encrypted_content" in item for item in items):
                kept = {name: body[name] for name in body if name not in ("reasoning", "include")}
                yield PATHS[request.path.encode()].reader, kept


def test_bodies_of_real_agents_become_the_tokens_that_sglang_makes_of_them(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    bodies = list(of_agents())
    assert {api for api, _ in bodies} == set(APIS)
    assert len(bodies) > 50
    compare(bodies, tokenizer, tmp_path)


def test_tools_become_the_tokens_that_sglang_makes_of_them(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """Whatever a client left out, added or reordered."""
    values = {"description": "d", "name": "f", "parameters": {"b": 1, "a": {}}, "strict": True, "defer_loading": False}
    functions = [{name: values[name] for name in order} for order in permutations(values)]
    some = [names for size in range(len(values) + 1) for names in combinations(values, size)]
    functions += [{"name": "f", "x": 1, **{name: values[name] for name in names}} for names in some]
    functions += [{"name": "f", "strict": None, "defer_loading": None, "description": None}]
    outer: list[dict[str, Any]] = [{"type": "function"}, {}, {"defer_loading": True}, {"defer_loading": None, "x": 1}]
    tools = [{**more, "function": function} for more, function in product(outer, functions)]
    user = [{"role": "user", "content": "hi"}]
    bodies: list[Body] = [("chat", {"model": "m", "messages": user, "tools": [tool]}) for tool in tools]
    schema = {"type": "object", "properties": {}}
    for more in ({}, {"description": ""}, {"description": "d"}, {"strict": True}):
        custom = [{"name": "f", "input_schema": schema, **more}, {"type": "web_search_20250305", "name": "web_search"}]
        flat = [{"type": "function", "parameters": schema, "name": "f", **more}]
        bodies.append(("messages", {"model": "m", "max_tokens": 9, "messages": user, "tools": custom}))
        bodies.append(("responses", {"model": "m", "input": user, "tools": flat}))
    two = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in "fg"]
    one, others = {"name": "g"}, ("none", "auto", "required")
    custom = [{"name": name, "input_schema": schema} for name in "fg"]
    flat = [{"type": "function", "name": name, "parameters": schema} for name in "fg"]
    asked: list[tuple[str, dict[str, Any], Sequence[object]]] = [
        ("chat", {"messages": user, "tools": two}, (*others, {"type": "function", "function": one})),
        ("messages", {"messages": user, "tools": custom, "max_tokens": 9}, (*CLAUDE_CHOICES, {"type": "tool", **one})),
        ("responses", {"input": user, "tools": flat}, (*others, {"type": "function", **one})),
    ]
    bodies += [(api, {"model": "m", **body, "tool_choice": choice}) for api, body, some in asked for choice in some]
    compare(bodies, tokenizer, tmp_path)


def test_lists_of_texts_become_the_tokens_that_sglang_makes_of_them(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    inputs = [{**text, "type": "input_text"} for text in texts]
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": texts}
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": texts},
        {"role": "user", "content": texts},
        {"role": "assistant", "content": texts, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": texts},
    ]
    turns = [
        {"role": "user", "content": texts},
        {"role": "assistant", "content": [*texts, use]},
        {"role": "user", "content": [result, *texts]},
    ]
    items = [
        {"role": "developer", "content": inputs},
        {"role": "developer", "content": "short"},
        {"role": "user", "content": inputs},
        {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "t1", "output": "done"},
    ]
    compare(
        [
            ("chat", {"model": "m", "messages": chat}),
            ("messages", {"model": "m", "max_tokens": 9, "messages": turns, "system": texts}),
            ("messages", {"model": "m", "max_tokens": 9, "messages": turns, "system": "one"}),
            ("messages", {"model": "m", "max_tokens": 9, "messages": turns}),
            ("responses", {"model": "m", "input": items, "instructions": "Be brief."}),
        ],
        tokenizer,
        tmp_path,
    )
