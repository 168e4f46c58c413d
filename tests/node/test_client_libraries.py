"""The libraries of OpenAI and Anthropic, as users call them, against a whole node in front of the lab's engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import trio

from tests.late_import import Late
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, Node, turn
from tests.node.node_lab import lab as node_lab
from tests.proxy.wire import GOOD, Scripted

anthropic, openai = Late("anthropic"), Late("openai")

ENGINES = 3
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
QUESTION = "Where are the atlases of this library, and who may take them home? " * 6
DIRECTED = f'{QUESTION}\n[call read {{"path": "atlases.txt"}}]\n[call read {{"path": "loans.txt"}}]'
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
CLAUDE_TOOLS: Any = [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}]
ITEM_TOOLS: Any = [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}]


def openai_of(url: str, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def claude_of(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)


async def run(talk: Callable[[str], None], engines: int = ENGINES, **settings: Any) -> None:
    """The libraries wait in a thread of their own."""
    async with node_lab(engines=engines, **settings) as node:
        await trio.to_thread.run_sync(talk, node.url)


async def both(talk: Callable[[str], None]) -> None:
    """Against an engine itself, where nothing is between, and against a node: users see no difference."""
    async with node_lab(engines=1) as node:
        await trio.to_thread.run_sync(talk, node.engines[0])
        await trio.to_thread.run_sync(talk, node.url)


def chat_whole_and_streamed(url: str) -> None:
    with openai_of(url) as client:
        assert [model.id for model in client.models.list().data] == [MODEL]
        whole = client.chat.completions.create(model=MODEL, messages=turn(QUESTION))
        with client.chat.completions.stream(
            model=MODEL,
            messages=turn(QUESTION),
            stream_options={"include_usage": True},
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert final.usage is not None
        assert kinds.count("content.delta") >= final.usage.completion_tokens > 8
        assert final.choices[0].message.content == whole.choices[0].message.content != ""
        assert whole.usage is not None
        assert final.usage.prompt_tokens == whole.usage.prompt_tokens
        assert final.usage.prompt_tokens_details is not None
        assert final.usage.prompt_tokens_details.cached_tokens > 0
        completion = client.completions.create(model=MODEL, prompt=list(range(64)), max_tokens=4)
        assert completion.choices[0].text


async def test_the_openai_client_works_streaming_and_not() -> None:
    await both(chat_whole_and_streamed)


def chat_with_tools(url: str) -> None:
    """Two calls, one in a stream, and then words, each turn finding all of the one before in a cache."""
    messages: list[Any] = turn(DIRECTED)
    cached: list[int] = []
    with openai_of(url) as client:
        for stream in (False, True):
            call, usage = called(client, messages, stream=stream)
            cached.append(usage.prompt_tokens_details.cached_tokens)
            assert json.loads(call["function"]["arguments"]) == {"path": ("atlases.txt", "loans.txt")[stream]}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": "On shelf 7. " * 20},
            ]
        last = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS, max_tokens=8)
        assert last.choices[0].message.content
        assert not last.choices[0].message.tool_calls
        assert last.usage is not None
        cached.append(last.usage.prompt_tokens_details.cached_tokens)
    assert 0 <= cached[0] < cached[1] < cached[2]


def called(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> tuple[dict[str, Any], Any]:
    """The only call of an answer, and its counts."""
    asked: Any = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS, "max_tokens": 64}
    if stream:
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
            completion: Any = events.get_final_completion()
    else:
        completion = client.chat.completions.create(**asked)
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "read"
    found = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": found}, completion.usage


async def test_tools_called_by_chats_are_called_through_a_node_and_every_turn_finds_the_one_before() -> None:
    await both(chat_with_tools)


def chat_with_a_choice(url: str) -> None:
    with openai_of(url) as client:
        ask = client.chat.completions.create
        found: Any = [
            ask(model=MODEL, messages=turn("Hello"), tools=CHAT_TOOLS, tool_choice=choice, max_tokens=64)
            for choice in ("required", {"type": "function", "function": {"name": "read"}}, "auto", "none")
        ]
    assert [bool(each.choices[0].message.tool_calls) for each in found] == [True, True, False, False]
    assert found[0].choices[0].message.tool_calls[0].function.arguments == '{"path": "x"}'


async def test_a_chat_that_demands_a_tool_gets_a_call() -> None:
    await both(chat_with_a_choice)


def embeddings(url: str) -> None:
    with openai_of(url) as client:
        found = client.embeddings.create(model=MODEL, input=["one", "two", "one"])
        plain = client.embeddings.create(model=MODEL, input="one", encoding_format="float")
    vectors = [each.embedding for each in found.data]
    assert vectors[0] == vectors[2] == plain.data[0].embedding != vectors[1]
    assert found.usage.prompt_tokens > plain.usage.prompt_tokens > 0


async def test_embeddings_come_in_either_encoding() -> None:
    await both(embeddings)


def response_whole_and_streamed(url: str) -> None:
    with openai_of(url) as client:
        cut = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=8)
        assert (cut.status, cut.usage.output_tokens) == ("incomplete", 8)
        whole = client.responses.create(model=MODEL, instructions="Be brief.", input=QUESTION)
        assert whole.output_text
        assert whole.usage is not None
        with client.responses.stream(model=MODEL, instructions="Be brief.", input=QUESTION) as stream:
            events = [event.type for event in stream]
            final: Any = stream.get_final_response()
        assert events[0] == "response.created"
        assert events.count("response.output_text.delta") == final.usage.output_tokens
        assert final.output_text == whole.output_text
        assert final.usage.input_tokens == whole.usage.input_tokens
        assert final.usage.input_tokens_details.cached_tokens > 0


async def test_responses_stream_the_events_that_the_openai_client_assembles() -> None:
    await both(response_whole_and_streamed)


def response_with_tools(url: str) -> None:
    """The history goes along by hand, once, and by id."""
    items: list[Any] = [{"role": "user", "content": DIRECTED}]
    with openai_of(url) as client:
        asked: Any = {"model": MODEL, "tools": ITEM_TOOLS, "max_output_tokens": 64}
        first: Any = client.responses.create(**asked, input=items)
        [call] = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "read", {"path": "atlases.txt"})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "On shelf 7. " * 20}
        with client.responses.stream(**asked, input=[*items, call.model_dump(exclude_none=True), output]) as stream:
            by_hand: Any = stream.get_final_response()
        by_id: Any = client.responses.create(**asked, input=[output], previous_response_id=first.id)
        for second in (by_hand, by_id):
            [call] = second.output
            assert json.loads(call.arguments) == {"path": "loans.txt"}
            assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens * 0.8
        result = {**output, "call_id": call.call_id}
        last = client.responses.create(**asked, input=[result], previous_response_id=by_id.id)
        assert last.output_text


async def test_tools_called_by_responses_go_on_by_hand_and_by_the_id_of_the_response_before() -> None:
    await both(response_with_tools)


def response_kept(url: str) -> None:
    with openai_of(url) as client:
        made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=8)
        assert client.responses.retrieve(made.id).output_text == made.output_text
        [item] = client.responses.input_items.list(made.id).data
        assert item.content == QUESTION
        assert client.responses.cancel(made.id).id == made.id
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="And then?", previous_response_id=made.id)


async def test_a_kept_response_is_retrieved_listed_cancelled_and_deleted() -> None:
    await both(response_kept)


def response_of_nobody(url: str) -> None:
    with openai_of(url) as client, pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="And then?", previous_response_id="resp_of_nobody")
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_a_response_that_no_engine_keeps_is_not_found() -> None:
    await run(response_of_nobody)


def claude_whole_and_streamed(url: str) -> None:
    asked: Any = {"model": MODEL, "system": "Be brief.", "max_tokens": 8}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    with claude_of(url) as client:
        assert [model.id for model in client.models.list().data] == [MODEL]
        counted = client.messages.count_tokens(**{key: asked[key] for key in ("model", "system", "messages")})
        whole: Any = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert (whole.stop_reason, final.stop_reason) == ("max_tokens", "max_tokens")
        assert text == whole.content[0].text != ""
        assert final.usage.cache_read_input_tokens
        for usage in (whole.usage, final.usage):
            assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_the_anthropic_client_works_streaming_and_not() -> None:
    await both(claude_whole_and_streamed)


def claude_with_tools(url: str) -> None:
    """As its agents do: the mark of the cache is on the last message, which is a list then."""
    messages: list[Any] = [{"role": "user", "content": DIRECTED}]
    reused: list[int] = []
    with claude_of(url) as client:
        for stream in (False, True):
            message = claude_turn(client, messages, stream=stream)
            assert message.stop_reason == "tool_use"
            [block] = message.content
            assert (block.type, block.input) == ("tool_use", {"path": ("atlases.txt", "loans.txt")[stream]})
            reused.append(message.usage.cache_read_input_tokens)
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "On shelf 7. " * 20}
            used = {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}
            messages += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        last = claude_turn(client, messages, stream=False)
    assert (last.stop_reason, last.content[0].type) == ("end_turn", "text")
    assert 0 <= reused[0] < reused[1] < last.usage.cache_read_input_tokens


def claude_turn(client: anthropic.Anthropic, messages: list[Any], *, stream: bool) -> Any:
    *before, last = messages
    content = last["content"]
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    marked = [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]
    asked: Any = {"model": MODEL, "max_tokens": 256, "tools": CLAUDE_TOOLS}
    asked["messages"] = [*before, {**last, "content": marked}]
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


async def test_tools_called_by_messages_are_called_through_a_node_and_every_turn_finds_the_one_before() -> None:
    await both(claude_with_tools)


def claude_with_a_choice(url: str) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 64, "tools": CLAUDE_TOOLS}
    asked["messages"] = [{"role": "user", "content": "Hello"}]
    with claude_of(url) as client:
        kinds = [
            client.messages.create(**asked, tool_choice=choice).content[0].type
            for choice in ({"type": "any"}, {"type": "tool", "name": "read"}, {"type": "auto"}, {"type": "none"})
        ]
    assert kinds == ["tool_use", "tool_use", "text", "text"]


async def test_a_message_that_demands_a_tool_gets_a_call() -> None:
    await both(claude_with_a_choice)


def models_one_by_one(url: str) -> None:
    name = "lab/adapter:v1"
    with openai_of(url) as client, claude_of(url) as claude:
        assert client.models.retrieve(name).id == name
        assert claude.models.retrieve(name).display_name == name
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("lab/nobody")
        assert refused.value.code == "model_not_found"
        with pytest.raises(anthropic.NotFoundError):
            claude.models.retrieve("lab/nobody")


async def test_one_model_is_retrieved_by_either_client_though_its_name_has_a_slash() -> None:
    page = b'{"object":"list","data":[{"id":"lab/adapter:v1","object":"model","created":1,"owned_by":"vllm"}]}'
    async with node_lab(Scripted(GOOD, page=page)) as node:
        await trio.to_thread.run_sync(models_one_by_one, node.url)


def errors_of_engines(url: str) -> None:
    """Each API's own shape, so each library's own classes with its own fields filled in."""
    with openai_of(url) as client, claude_of(url) as claude:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="nobody", messages=turn("Hello"))
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=turn("Hello"), max_tokens=-1)
        assert refused.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=MODEL, input=[])
        with pytest.raises(anthropic.BadRequestError) as found:
            claude.messages.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=-1)
        assert found.value.type == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError) as missing:
            claude.messages.create(model="nobody", messages=[{"role": "user", "content": "Hello"}], max_tokens=8)
        assert missing.value.type == "not_found_error"


async def test_errors_of_engines_are_those_of_each_library() -> None:
    await both(errors_of_engines)


def errors_of_a_node(url: str) -> None:
    large = "x" * 5000
    with openai_of(url) as client, claude_of(url) as claude:
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(model=MODEL, messages=turn(large))
        assert refused.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as of_response:
            client.responses.create(model=MODEL, input=large)
        assert of_response.value.status_code == 413
        assert "larger than" in of_response.value.message
        with pytest.raises(anthropic.RequestTooLargeError) as found:
            claude.messages.create(model=MODEL, messages=[{"role": "user", "content": large}], max_tokens=8)
        assert found.value.type == "request_too_large"


async def test_errors_of_a_node_are_those_of_each_library() -> None:
    await run(errors_of_a_node, body_bytes_max=4096)


def errors_without_engines(url: str) -> None:
    with openai_of(url) as client, claude_of(url) as claude:
        with pytest.raises(openai.InternalServerError) as refused:
            client.responses.create(model=MODEL, input="Hello")
        with pytest.raises(anthropic.APIStatusError) as found:
            claude.messages.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=8)
    assert (refused.value.status_code, found.value.status_code) == (503, 503)
    assert (refused.value.body or {}).keys() >= {"message", "type", "code"}
    assert found.value.type == "overloaded_error"


async def test_without_an_engine_each_library_is_refused_in_its_own_words() -> None:
    await run(errors_without_engines, engines=0)


def leave_chat(url: str) -> None:
    with openai_of(url) as client:
        stream = client.chat.completions.create(model=MODEL, messages=turn("Go on"), max_tokens=5000, stream=True)
        next(iter(stream))
        stream.close()


def leave_response(url: str) -> None:
    with openai_of(url) as client:
        stream = client.responses.create(model=MODEL, input="Go on", max_output_tokens=5000, stream=True)
        next(iter(stream))
        stream.close()


def leave_message(url: str) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 5000, "messages": [{"role": "user", "content": "Go on"}]}
    with ExitStack() as stack:
        client = stack.enter_context(claude_of(url))
        stream = stack.enter_context(client.messages.stream(**asked))
        next(stream.text_stream)


@pytest.mark.parametrize("leave", [leave_chat, leave_response, leave_message])
async def test_a_stream_that_its_client_leaves_is_cancelled_at_its_engine(leave: Callable[[str], None]) -> None:
    async with node_lab(engines=1) as node:
        await trio.to_thread.run_sync(leave, node.url)
        while not (statistics := await engine_statistics(node))["cancelled"]:  # noqa: ASYNC110  # a page states it
            await trio.sleep(BETWEEN_LOOKS_S)
    assert (statistics["cancelled"], statistics["running"], statistics["finished"]) == (1, 0, 0)


async def engine_statistics(node: Node) -> dict[str, Any]:
    return dict((await node.http.get(f"{node.engines[0]}/admin/stats")).json())


def by_other_names(url: str) -> None:
    with openai_of(url) as client:
        assert {model.id for model in client.models.list().data} == {MODEL, "gpt-4o"}
        assert client.models.retrieve("claude-opus-4-1").id == "claude-opus-4-1"
        for name in ("gpt-4o", "claude-x"):
            whole = client.chat.completions.create(model=name, messages=turn(QUESTION), max_tokens=4)
            assert whole.model == name
            with client.chat.completions.stream(model=name, messages=turn(QUESTION)) as stream:
                assert {event.chunk.model for event in stream if event.type == "chunk"} == {name}
                assert stream.get_final_completion().model == name
            assert client.responses.create(model=name, input=QUESTION, max_output_tokens=4).model == name
            with client.responses.stream(model=name, input=QUESTION, max_output_tokens=4) as answers:
                assert {event.response.model for event in answers if hasattr(event, "response")} == {name}
            assert client.completions.create(model=name, prompt=QUESTION, max_tokens=4).model == name
        with pytest.raises(openai.NotFoundError, match="The model `gone` does not exist"):
            client.chat.completions.create(model="gone", messages=turn(QUESTION))
    with claude_of(url) as claude:
        assert claude.models.retrieve("claude-opus-4-1").id == "claude-opus-4-1"
        asked: Any = {"model": "claude-opus-4-1", "max_tokens": 4, "messages": [{"role": "user", "content": QUESTION}]}
        assert claude.messages.create(**asked).model == "claude-opus-4-1"
        with claude.messages.stream(**asked) as events:
            assert events.get_final_message().model == "claude-opus-4-1"
        del asked["max_tokens"]
        assert claude.messages.count_tokens(**asked).input_tokens > 9


async def test_the_libraries_ask_for_models_by_other_names_and_read_those_in_answers() -> None:
    tables = [{"name": name, "to": MODEL, "model_in_answer": "asked"} for name in ("gpt-4o", "claude-*")]
    await run(by_other_names, model=[*tables, {"name": "gone", "to": "nowhere"}])
