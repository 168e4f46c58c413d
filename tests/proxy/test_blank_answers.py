"""Engines that answer at once, and with nothing: a whole node, and scripted engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from tests.node.node_lab import lab
from tests.proxy.test_black_holes import Busy, load, refusing
from tests.proxy.test_overload import QUESTIONS, answered
from tests.proxy.test_pipeline import asked
from tests.proxy.test_poison import question
from tests.proxy.wire import GOOD, STREAM_HEAD, Scripted, Step, answer, event

COUNTS = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
LAST = b"0\r\n\r\n"
GENERATING = [path for path in QUESTIONS if path != b"/v1/embeddings"]


def choice(**members: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "logprobs": None, **members}], "usage": COUNTS}


def blank(path: bytes, finish: str | None = "stop", space: str = "") -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """An answer without a word, or of white space alone, as one object and as events."""
    if path == b"/v1/chat/completions":
        message = {"role": "assistant", "content": space, "tool_calls": [], "reasoning": None}
        events = [choice(delta={"role": "assistant", "content": ""}), *[choice(delta={"content": space})] * len(space)]
        return choice(message=message, finish_reason=finish), [*events, choice(delta={}, finish_reason=finish)]
    if path == b"/v1/completions":
        return choice(text=space, finish_reason=finish), [choice(text=space, finish_reason=finish)]
    if path == b"/generate":
        ids = [220] if space else []
        whole = {"text": space, "output_ids": ids, "meta_info": {"finish_reason": {"type": finish}, **COUNTS}}
        return whole, [whole]
    if path == b"/v1/messages":
        text, usage = {"type": "text", "text": space}, {"input_tokens": 3, "output_tokens": 1}
        step = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": space}}
        reason = {"stop": "end_turn", "length": "max_tokens"}.get(finish or "", finish)
        turn = {"type": "message", "role": "assistant", "stop_reason": reason, "usage": usage}
        return {**turn, "content": [text]}, [
            {"type": "message_start", "message": {**turn, "content": [], "stop_reason": None}},
            {"type": "content_block_start", "index": 0, "content_block": {**text, "text": ""}},
            *([step] if space else []),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage},
            {"type": "message_stop"},
        ]
    part = {"type": "output_text", "text": space, "annotations": []}
    item = {"type": "message", "id": "m", "role": "assistant", "content": [part], "status": "completed"}
    response = {"id": "r", "object": "response", "status": "completed", "text": {"format": {"type": "text"}}}
    return {**response, "output": [item]}, [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "item": {**item, "content": []}},
        {"type": "response.content_part.added", "part": {**part, "text": ""}},
        *[{"type": "response.output_text.delta", "delta": space}] * len(space),
        {"type": "response.output_text.done", "text": space},
        {"type": "response.content_part.done", "part": part},
        {"type": "response.output_item.done", "item": item},
        {"type": "response.completed", "response": {**response, "output": [item]}},
    ]


class Blank(Scripted):
    """Answers each request for text without a word, for this reason; or those alone whose bodies have `only`."""

    def __init__(self, finish: str | None = "stop", only: bytes = b"", space: str = "") -> None:
        super().__init__()
        self.finish, self.only, self.space, self.well = finish, only, space, False

    def script(self) -> Sequence[Step]:
        path, body = self.heads[-1].split(b" ")[1], self.bodies[-1]
        if self.well or path not in GENERATING or self.only not in body:
            return self.good
        whole, events = blank(path, self.finish, self.space)
        return (
            [STREAM_HEAD, *map(event, events), LAST]
            if json.loads(body)["stream"]
            else [answer(json.dumps(whole).encode())]
        )


SPACES = ["", " ", " \n"]


@pytest.mark.parametrize(("finish", "space"), [("stop", ""), ("length", ""), ("stop", " "), ("length", "\n\n ")])
@pytest.mark.parametrize("policy", ["affinity", "least_loaded"])
async def test_one_whose_answers_are_blank_gets_hardly_any_request(policy: str, finish: str, space: str) -> None:
    engines = [Blank(finish, space=space), Busy(), Busy(), Busy()]
    async with lab(*engines, policy=policy) as node:
        await load(node, 24)
        before = len(engines[0].bodies)
        assert set(await load(node, 24)) == {200}
        assert await refusing(node) == [200, None, None, None]
    assert before <= 24
    assert len(engines[0].bodies) - before <= 8


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("stream", [False, True])
async def test_no_client_sees_a_second_blank_answer_of_one_while_others_have_words(stream: bool, space: str) -> None:
    engines = [Blank(space=space), Scripted(GOOD)]
    async with lab(*engines, policy="round_robin") as node:
        engines[0].well = True
        assert set(await load(node, 6, clients=1)) == {200}
        engines[0].well = False
        sick = 0
        for number in range(24):
            path = GENERATING[number % len(GENERATING)]
            body = (await answered(node, question(path, number, poison=False, stream=stream)))[2]
            sick += b"hi" not in body and b"word" not in body
    assert sick <= len(GENERATING)  # one of each API is believed, since it may be right


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_has_words_for_most_and_none_for_some_is_believed_once(stream: bool) -> None:
    engines = [Blank(), Scripted(GOOD)]
    async with lab(*engines, policy="round_robin") as node:
        blank = 0
        for number in range(48):
            engines[0].well = number % 6 != 0  # each second one that it gets is right
            path = GENERATING[0]
            body = (await answered(node, question(path, number, poison=False, stream=stream)))[2]
            blank += b"hi" not in body and b"word" not in body
    assert blank <= 1


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_all_engines_answer_without_a_word_is_what_the_client_wants(stream: bool, space: str) -> None:
    engines = [Blank(space=space), Blank(space=space), Blank(space=space)]
    async with lab(*engines) as node:
        for number in range(60):
            path = GENERATING[number % len(GENERATING)]
            status, _, body = await answered(node, question(path, number, poison=False, stream=stream))
            assert (status, b"error" in body) == (200, False)
        assert await refusing(node) == [None, None, None]
    assert asked(engines) <= 60 + 5 * len(GENERATING)  # ever more of them in a row are believed


async def test_requests_that_want_no_word_blame_no_engine_that_has_words_for_others() -> None:
    engines = [Blank(only=b"hello 1"), Blank(only=b"hello 1"), Blank(only=b"hello 1")]
    async with lab(*engines) as node:
        for _ in range(3):
            assert set(await load(node, 20)) == {200}
            assert await refusing(node) == [None, None, None]


async def test_a_lone_engine_is_asked_once_whatever_it_answers() -> None:
    engine = Blank()
    async with lab(engine) as node:
        for number in range(20):
            path = GENERATING[number % len(GENERATING)]
            assert (await answered(node, question(path, number, poison=False, stream=number % 2 == 0)))[0] == 200
        assert await refusing(node) == [None]
    assert len(engine.bodies) == 20


async def test_it_is_as_others_as_soon_as_it_has_words() -> None:
    ill, well = Blank(), Scripted(GOOD)
    async with lab(ill, well, policy="round_robin") as node:
        await load(node, 12)
        assert await refusing(node) == [200, None]
        ill.well = True
        well.turns = iter([[answer(b"", status=529)]] * 1000)
        assert (await answered(node, question(b"/v1/completions", 1, poison=False)))[0] == 200  # nobody else has room
        well.turns = iter([[GOOD]] * 1000)
        ill.bodies.clear()
        await load(node, 12, clients=1)
    assert len(ill.bodies) >= 2


OTHER_ENDS: dict[str, dict[str, Any]] = {
    "a call": {"message": {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}},
    "reasoning": {"message": {"content": "", "reasoning_content": "hm"}},
    "a refusal": {"message": {"content": None, "refusal": "no"}},
    "a filter": {"message": {"content": ""}, "finish_reason": "content_filter"},
}


@pytest.mark.parametrize("kind", OTHER_ENDS)
async def test_calls_reasoning_refusals_and_filtered_answers_are_not_blank(kind: str) -> None:
    other = answer(json.dumps(choice(**{"finish_reason": "stop", **OTHER_ENDS[kind]})).encode())
    engines = [Scripted(other), Scripted(GOOD)]
    async with lab(*engines, policy="round_robin") as node:
        for number in range(12):
            await answered(node, question(b"/v1/chat/completions", number, poison=False))
        assert await refusing(node) == [None, None]
    assert asked(engines) == 12


@pytest.mark.parametrize("path", GENERATING)
async def test_white_space_of_an_engine_that_has_words_is_relayed_at_once(path: bytes) -> None:
    more, engine = trio.Event(), Scripted(GOOD)
    events = [event(each) for each in blank(path, None, " ")[1]]
    end = 1 if path in (b"/v1/completions", b"/generate") else {b"/v1/messages": 3, b"/v1/responses": 4}.get(path, 2)
    async with lab(engine) as node, await node.wire() as client:
        await answered(node, question(path, 0, poison=False))
        engine.turns = iter([[STREAM_HEAD, *events[:end], more, LAST]])
        await client.send(question(path, 1, poison=False, stream=True))
        assert await client.until(events[end - 1])  # though nothing says yet that a word follows
        more.set()
        await client.until(LAST)


@pytest.mark.parametrize("space", [" ", "\n\n"])
async def test_white_space_before_words_blames_nobody(space: str) -> None:
    events = [
        choice(delta={"content": space}),
        choice(delta={"content": "word"}),
        choice(delta={}, finish_reason="stop"),
    ]
    engines = [Scripted(STREAM_HEAD, *map(event, events), LAST), Scripted(STREAM_HEAD, *map(event, events), LAST)]
    async with lab(*engines, ask_usage=False) as node:
        for number in range(12):
            body = (await answered(node, question(b"/v1/chat/completions", number, poison=False, stream=True)))[2]
            assert body == b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
        assert await refusing(node) == [None, None]
    assert asked(engines) == 12
