"""Plans of two legs, as where one engine prefills and another decodes: nothing on the path assumes one leg."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import pytest
import trio

from ranvier_py.core.prompts.body_json import Splice
from ranvier_py.core.routing.attempt import Edit, Leg, Plan, PoolMatch
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy import pipeline
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.stages import relay
from tests.node.node_lab import BETWEEN_LOOKS_S, chat, lab
from tests.proxy.test_overload import QUESTIONS, answered, question
from tests.proxy.test_pipeline import OWN, asked, at_rest, sharing
from tests.proxy.wire import CHUNKED_HEAD, CLOSE, END, GOOD, HANG, ROLE, STREAM_HEAD, TOKEN, Step, answer, chunk, post

PREFILLED, PREFILLED_AGAIN = (
    answer(
        b'{"choices":[{"index":0}],"content":[],"output":[],"meta_info":{},"kv_transfer_params":{"id":%d}}' % number,
        b"content-type: application/json",
    )
    for number in (1, 2)
)
STREAM: list[Step] = [STREAM_HEAD + ROLE + TOKEN + END]


def member(text: bytes, body: bytes) -> Sequence[Splice]:
    place = body.rindex(b"}")
    return ((place, place, b"," + text),)


def not_streamed(body: bytes) -> Sequence[Splice]:
    place = body.find(b'"stream": true')
    return ((place, place + len(b'"stream": true'), b'"stream": false'),) if place >= 0 else ()


def handed_on(body: bytes) -> Sequence[Edit]:
    params = json.dumps(json.loads(body)["kv_transfer_params"]).encode()
    return (partial(member, b'"kv_transfer_params":' + params),)


def prefill_and_decode(router: Router, call: Call, found: PoolMatch) -> Plan:
    prompt = call.read.prompt
    decode = router.place(prompt, found)
    prefill = router.place(prompt, router.find(prompt, found.at, [decode.backend]))
    return Leg(prefill, (partial(member, b'"max_tokens":1'), not_streamed), handed_on), Leg(decode)


@pytest.fixture(autouse=True)
def _two_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "one_leg", prefill_and_decode)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_gets_the_last_legs_answer_made_with_what_the_first_one_handed_on(stream: bool) -> None:
    paths = [path for path in QUESTIONS if path != b"/v1/embeddings"]
    for path in paths:
        backends = sharing(2, [PREFILLED], STREAM if stream else [GOOD])
        async with lab(*backends) as node:
            status, _, body = await answered(node, question(path, stream=stream))
            routes = await at_rest(node)
        prefill, decode = sorted(
            (json.loads(each.bodies[0]) for each in backends), key=lambda each: "kv_transfer_params" in each
        )
        assert (status, b"word" in body or b"hi" in body, b"kv_transfer" in body) == (200, True, False), path
        assert (prefill["max_tokens"], prefill.get("stream", False)) == (1, False)
        assert "stream_options" not in prefill
        assert decode["kv_transfer_params"] == {"id": 1}
        assert routes["outcomes"] == {"success": 2}


async def test_both_engines_of_a_plan_are_learned_to_hold_the_prompt() -> None:
    async with lab(*sharing(2, [PREFILLED], [GOOD])) as node:
        await node.chat()
        await at_rest(node)
        explained = (await node.http.post(f"{node.control}/explain", content=chat())).json()
    assert [candidate["matched_tokens"] > 0 for candidate in explained["candidates"]] == [True, True]


async def test_a_last_leg_that_fails_begins_another_plan_since_what_was_handed_on_serves_once() -> None:
    backends = sharing(3, [PREFILLED], [CLOSE], [PREFILLED_AGAIN], [GOOD])
    async with lab(*backends) as node:
        assert (await node.chat()).status_code == 200
        assert (await at_rest(node))["outcomes"] == {"success": 3, "broken": 1}
    bodies = [json.loads(body) for backend in backends for body in backend.bodies]
    assert sorted(body["kv_transfer_params"]["id"] for body in bodies if "kv_transfer_params" in body) == [1, 2]


@pytest.mark.parametrize(
    "turn",
    [
        [CLOSE],
        [answer(OWN, status=503)],
        [CHUNKED_HEAD + chunk(b'{"choices"'), CLOSE],
        [answer(b'{"error":{"message":"x","code":500}}', b"content-type: application/json")],
        [CHUNKED_HEAD + chunk(b"x" * 2000)],
    ],
    ids=["closed", "full", "cut", "an error within a 200", "too long"],
)
async def test_a_first_leg_that_fails_begins_another_plan(turn: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "READ_BYTES_MAX", 1000)
    backends = sharing(3, turn, [PREFILLED], [GOOD])
    async with lab(*backends) as node:
        assert (await node.chat()).status_code == 200
        assert (await at_rest(node))["outcomes"]["success"] == 2
    assert asked(backends) == 3


async def test_an_error_of_a_first_leg_that_is_the_clients_ends_the_plan() -> None:
    backends = sharing(2, *[[answer(OWN, status=400)]] * 3)
    async with lab(*backends) as node:
        refused = await node.chat()
        assert (refused.status_code, refused.content) == (400, OWN)
        assert set((await at_rest(node))["outcomes"]) == {"refused"}
    assert not [body for backend in backends for body in backend.bodies if b'"max_tokens":1' not in body]


async def test_a_client_that_leaves_during_a_first_leg_ends_it() -> None:
    backends = sharing(2, [HANG])
    async with lab(*backends) as node:
        async with await node.wire() as wire:
            await wire.send(post(chat()))
            while not asked(backends):  # noqa: ASYNC110  # whichever of them is asked
                await trio.sleep(BETWEEN_LOOKS_S)
        (engine,) = (each for each in backends if each.bodies)
        await engine.left.wait()
        assert (await at_rest(node))["outcomes"] == {"cancelled": 1}
