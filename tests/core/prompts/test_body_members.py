"""Members beside the history: which of them keep prompts apart, reach the template, or replace what we would read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.request_apis import APIS, CHAT, MESSAGES, RESPONSES, Api
from ranvier_py.core.tokenize.tokenize_service import chat_of
from tests.core.prompts.test_request_apis import CHAT_TOOLS, SCHEMA, Item, body_of, read, reader, texts, user

MEMBERS: list[tuple[Api, Item]] = [
    *((CHAT, {"reasoning_effort": effort}) for effort in ("low", "high", 0.0)),
    (CHAT, {"add_special_tokens": True}),
    *((CHAT, {"tool_choice": choice}) for choice in ("none", {"type": "function", "function": {"name": "read"}})),
    *((CHAT, {"reasoning": {name: value}}) for name, value in (("effort", "low"), ("enabled", True))),
    *((MESSAGES, {"thinking": {"type": kind}}) for kind in ("enabled", "disabled")),
    *((MESSAGES, {"output_config": {"effort": effort}}) for effort in ("low", "max")),
    *((MESSAGES, {"tool_choice": choice}) for choice in ({"type": "none"}, {"type": "tool", "name": "read"})),
    *((RESPONSES, {"reasoning": {"effort": effort}}) for effort in ("low", "none")),
]


def test_members_that_engines_give_the_template_keep_texts_apart() -> None:
    for api in APIS.values():
        chains = [read(api, [user("hi"), user("so?")], **fields) for of, fields in [(api, {}), *MEMBERS] if of is api]
        assert len({text for chain in chains for text in chain}) == 2 * len(chains)


@pytest.mark.parametrize(
    ("api", "more"),
    [
        (CHAT, {"tool_choice": "auto"}),
        (CHAT, {"tool_choice": "required"}),
        (MESSAGES, {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}),
        (RESPONSES, {"reasoning": {"summary": "auto"}}),
    ],
)
def test_what_leaves_the_text_as_it_is_parts_no_texts(api: Api, more: Item) -> None:
    assert read(api, [user("hi")], **more) == read(api, [user("hi")])


def test_budgets_of_reasoning_leave_the_text_as_it_is() -> None:
    thinking = [{"type": "enabled", "budget_tokens": budget} for budget in (1024, 2048)]
    assert read(MESSAGES, [user("hi")], thinking=thinking[0]) == read(MESSAGES, [user("hi")], thinking=thinking[1])


@pytest.mark.parametrize("behind", [True, False])
def test_such_members_part_turns_whose_history_is_known(behind: bool) -> None:
    growing = reader()
    for number, (api, more) in enumerate([(api, more) for api, more in MEMBERS for _ in range(2)]):
        plain: Item = {"model": f"m{number // 2}", api.history: [user("hi"), user("so?")]}
        growing.remember(growing.chat(json.dumps(plain).encode(), api=api))
        body = json.dumps({**plain, **more} if behind else {**more, **plain}).encode()
        prompt = growing.chat(body, api=api)
        assert texts(prompt) == texts(reader().chat(body, api=api))
        growing.remember(prompt)


@pytest.mark.parametrize("behind", [True, False])
def test_what_an_engine_takes_instead_of_the_messages_is_no_prefix_of_anything(behind: bool) -> None:
    """SGLang computes a chat's `input_ids` and none of its messages, and puts a session of its own before them."""
    growing = reader()
    plain: Item = {"model": "m", "messages": [user("hi"), user("so?")]}
    growing.remember(growing.chat(json.dumps(plain).encode()))
    for more in ({"input_ids": [1, 2, 3]}, {"session_params": {"id": "s"}}):
        prompt = growing.chat(json.dumps({**plain, **more} if behind else {**more, **plain}).encode())
        assert prompt.kind == "opaque"
    named = growing.chat(json.dumps({**plain, "session_params": {"session_id": "s"}}).encode())
    assert (named.kind, named.session_name) == ("chat", "s"), "vLLM's is no more than a name"
    for name in ("image_data", "video_data", "input_embeds"):
        generate = json.dumps({"text": "what is it?", name: ["x"]}).encode()
        assert reader().completion(generate, api="generate").unread == "members"


def test_the_effort_that_is_asked_for_reaches_the_template_as_engines_pass_it_on() -> None:
    def given(api: Api, **more: object) -> Any:
        return chat_of(body_of(api, [user("hi")], **more), api).template.get("chat_template_kwargs")

    high = {"reasoning_effort": "high", "enable_thinking": True}
    assert given(CHAT, reasoning_effort="high") == high
    assert given(RESPONSES, reasoning={"effort": "high"}) == high
    assert given(MESSAGES, output_config={"effort": "high"}, thinking={"type": "disabled"}) == high
    none = {"reasoning_effort": "none", "enable_thinking": False}
    assert given(MESSAGES, thinking={"type": "disabled"}) == none
    own = {"enable_thinking": True, "a": 1}
    assert given(CHAT, reasoning_effort="none", chat_template_kwargs=own) == {**own, "reasoning_effort": "none"}
    assert given(CHAT, chat_template_kwargs=own) == own
    assert given(CHAT) is None


def test_what_engines_render_differently_is_not_tokenized() -> None:
    with pytest.raises(TemplateRefused):
        chat_of(body_of(CHAT, [user("hi")], add_special_tokens=True))


def test_tools_that_may_not_be_chosen_are_rendered_as_vllm_does_by_default() -> None:
    """Agents ask so for a summary behind a long history, which the engine holds with its tools."""
    tools = chat_of(body_of(CHAT, [user("hi")], tools=CHAT_TOOLS)).tools
    assert chat_of(body_of(CHAT, [user("hi")], tools=CHAT_TOOLS, tool_choice="none")).tools == tools


def test_tools_are_rendered_as_vllm_dumps_them_however_clients_write_them() -> None:
    """Made with vLLM 0.32: ChatCompletionToolsParam(**tool).model_dump()."""
    whole = {"name": "f", "description": None, "parameters": SCHEMA}

    def rendered(api: Api, tool: Item) -> Any:
        tools = chat_of(body_of(api, [user("hi")], tools=[tool]), api).tools
        assert tools is not None
        return json.dumps(tools[0])

    def dumped(**more: object) -> str:
        return json.dumps({"type": "function", "function": {**whole, **more}})

    for spelled in ({"parameters": SCHEMA, "name": "f"}, {"x": 1, "name": "f", "parameters": SCHEMA, "strict": None}):
        for tool in ({"type": "function", "function": spelled}, {"function": spelled, "type": "function", "x": 1}):
            assert rendered(CHAT, tool) == dumped()
        assert rendered(RESPONSES, {"type": "function", **spelled}) == dumped()
    assert rendered(MESSAGES, {"input_schema": SCHEMA, "name": "f"}) == dumped()
    assert rendered(MESSAGES, {"name": "f", "description": "", "input_schema": SCHEMA}) == dumped(description="")
    strict = {"strict": True, "name": "f"}
    assert rendered(CHAT, {"type": "function", "function": strict}) == dumped(parameters=None, strict=True)
    assert rendered(MESSAGES, {**strict, "input_schema": SCHEMA}) == dumped(strict=True)
    deferred = {"type": "function", "function": {"name": "f"}, "defer_loading": True}
    inner = {**whole, "parameters": None, "defer_loading": True}
    assert rendered(CHAT, deferred) == json.dumps({"type": "function", "function": inner, "defer_loading": True})
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert rendered(MESSAGES, search) == json.dumps(search), "no function"


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(
    ("more", "differ"),
    [
        ({}, False),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": None}, False),
        ({"echo": True}, True),
        ({"echo": False}, False),
        ({"logprob_start_len": 0}, True),
        ({"logprob_start_len": -1}, False),
        ({"n": 1}, False),
        ({"n": 2}, True),
        ({"best_of": 4}, True),
        ({"n": "many"}, False),
        ({"tools": CHAT_TOOLS, "tool_choice": "none"}, True),
        ({"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "read"}}}, True),
        ({"tools": CHAT_TOOLS, "tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
    ],
)
def test_counts_of_prompts_that_engines_compute_anew_or_several_times_are_known_for_that(
    more: Item, differ: bool, behind: bool
) -> None:
    """One such chat withdrew warm routes of others with the same system prompt: engines answer 0 cached tokens."""
    growing = reader()
    for turns in (1, 3, 5):
        plain: Item = {"model": "m", "messages": [user(f"turn {number}") for number in range(turns)]}
        body = json.dumps({**plain, **more} if behind else {**more, **plain}).encode()
        prompt = growing.chat(body, api=CHAT)
        growing.remember(prompt)
        assert prompt.counts_differ is differ
    assert growing.memory.counters.found > 0
    completion = growing.completion(json.dumps({"model": "m", "prompt": "text", **more}).encode())
    assert completion.counts_differ is differ
