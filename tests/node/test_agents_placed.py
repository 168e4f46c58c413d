"""Agents through whole nodes: each turn of a conversation reaches the engine that served it, by any API and node."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.core.routing.rates.decode_rate import LOOK_EVERY
from ranvier_py.io.tokenizer import EMBEDDED
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, Node, chat, cluster_lab, start_engine, turn
from tests.node.node_lab import lab as node_lab

CONVERSATIONS, TURNS = 12, 8
KNOWN_S = 5.0  # what waits for its tokens is sent after two
MARK = {"cache_control": {"type": "ephemeral"}}
TOOLS = [{"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}]
RULES = "You are the help desk of a small library. Answer briefly, name the shelf, and never guess. " * 4
Item = dict[str, Any]


class Conversation:
    """One conversation by one API: its next request, and what it makes of the answer."""

    path: str
    backend = ""

    def __init__(self, number: int) -> None:
        self.number = number
        self.turns = 0
        self.items: list[Item] = []
        self.served: list[str] = []
        self.reasons: list[tuple[str, str]] = []
        self.cached: list[int] = []

    @property
    def rules(self) -> str:
        """Of its own, so that conversations spread."""
        return f"You work in room {self.number}. {RULES * 8}"  # so long that nobody computes it anew to save a wait

    @property
    def question(self) -> str:
        return f"Conversation {self.number}, question {self.turns}: where are the atlases? " * 8

    async def ask(self, node: Node, *, stream: bool) -> None:
        answer = await node.http.post(f"{node.url}{self.path}", content=self.body(stream=stream))
        assert answer.status_code == 200, answer.text
        self.items.append(self.asked())
        self.backend = answer.headers["x-ranvier-backend"]
        self.served.append(answer.headers["x-engine"])
        self.reasons.append((answer.headers["x-ranvier-reason"], answer.headers["x-ranvier-matched-tokens"]))
        self.turns += 1
        self.take(events_of(answer) if stream else [answer.json()], stream=stream)

    def body(self, **fields: object) -> bytes:
        return json.dumps({"model": MODEL, **fields, **self.fields([*self.items, self.asked()])}).encode()

    async def known(self, node: Node) -> None:
        """Until this node would send the next turn where the others went."""
        with trio.move_on_after(KNOWN_S):
            while (await self.explained(node))["reason"] != "affinity":  # noqa: ASYNC110  # by what is its own, not by what all share
                await trio.sleep(BETWEEN_LOOKS_S)

    async def explained(self, node: Node) -> Item:
        found: Item = (await node.http.post(f"{node.control}/explain", content=self.body())).json()
        return found

    def asked(self) -> Item:
        return {"role": "user", "content": self.question}

    def fields(self, items: Sequence[Item]) -> Item:
        raise NotImplementedError

    def take(self, events: Sequence[Item], *, stream: bool) -> None:
        raise NotImplementedError


class Messages(Conversation):
    """As Claude's clients do: marks move, and what is marked becomes a list."""

    path = "/v1/messages"

    def fields(self, items: Sequence[Item]) -> Item:
        *before, last = items
        marked = {**last, "content": [{"type": "text", "text": last["content"], **MARK}]}
        system = [{"type": "text", "text": self.rules, **MARK}]
        return {"max_tokens": 8, "system": system, "messages": [*before, marked], "tools": TOOLS}

    def take(self, events: Sequence[Item], *, stream: bool) -> None:
        if stream:
            words = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
            usage = next(event["usage"] for event in events if event["type"] == "message_delta")
        else:
            words, usage = events[0]["content"][0]["text"], events[0]["usage"]
        self.cached.append(usage["cache_read_input_tokens"])
        self.items.append({"role": "assistant", "content": [{"type": "text", "text": words}]})


class Responses(Conversation):
    """As Codex does: nothing is stored, and every item has an id."""

    path = "/v1/responses"

    def asked(self) -> Item:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.question}]}

    def fields(self, items: Sequence[Item]) -> Item:
        return {"max_output_tokens": 8, "instructions": self.rules, "input": items, "store": False, "tools": []}

    def take(self, events: Sequence[Item], *, stream: bool) -> None:
        ended = self.ended(events, stream=stream)
        words = "".join(event["delta"] for event in events if str(event.get("type")).endswith(".delta"))
        if not stream:
            words = ended["output"][0]["content"][0]["text"]
        part = {"type": "output_text", "text": words, "annotations": []}
        item = {"type": "message", "id": f"msg_{self.turns}", "role": "assistant", "content": [part]}
        self.items.append(item)

    def ended(self, events: Sequence[Item], *, stream: bool) -> Item:
        ended: Item = events[-1]["response"] if stream else events[0]
        self.cached.append(ended["usage"]["input_tokens_details"]["cached_tokens"])
        return ended


class StoredTurns(Responses):
    """As who leaves his history with the engine."""

    name = ""

    def fields(self, items: Sequence[Item]) -> Item:
        before = {"previous_response_id": self.name} if self.name else {}
        return {"max_output_tokens": 8, "instructions": self.rules, "input": self.question, **before}

    def take(self, events: Sequence[Item], *, stream: bool) -> None:
        self.name = self.ended(events, stream=stream)["id"]


def events_of(answer: httpx.Response) -> list[Item]:
    lines = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line.strip() != "[DONE]"]


@pytest.mark.slow
@pytest.mark.parametrize("made", [Messages, Responses, StoredTurns])
async def test_every_turn_reaches_the_engine_of_its_conversation_by_whichever_node(
    made: Callable[[int], Conversation], tmp_path: Path
) -> None:
    async with cluster_lab(tmp_path, engines=0) as place:
        for number in range(3):
            place.engines.append((await start_engine(place.nursery, number, tokenizer=str(EMBEDDED)))[0])
        nodes = await place.cluster(2)
        conversations = [made(number) for number in range(CONVERSATIONS)]
        for number in range(TURNS):
            for each in conversations:
                node = nodes[(each.number + number) % 2]
                await node.until("/admin/backends", at_rest)  # a request ahead is a reason to leave a short history
                await each.ask(node, stream=number % 2 == 1)
            for each in conversations if number == 0 and made is not StoredTurns else ():
                await each.known(nodes[(each.number + 1) % 2])
    assert {each.number: (each.served, each.reasons) for each in conversations if len(set(each.served)) > 1} == {}
    assert len({each.served[0] for each in conversations}) > 1, "they are spread"
    reused = [each.cached[1:] for each in conversations]
    assert all(later > earlier > 0 for cached in reused for earlier, later in pairwise(cached))


def at_rest(view: Any) -> bool:
    """Whether no request is in flight anywhere, as far as a node knows."""
    return not any(one["in_flight"] or one["peer_load"] for one in view["backends"])


async def respond(node: Node, words: str = "Where are the atlases?", **fields: object) -> httpx.Response:
    body = {"model": MODEL, "input": words, "max_output_tokens": 8, **fields}
    return await node.http.post(f"{node.url}/v1/responses", content=json.dumps(body))


async def test_a_response_is_asked_for_and_deleted_where_it_is_kept(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        nodes = await place.cluster(2)
        kept = [await respond(nodes[0], f"Question {number}") for number in range(LOOK_EVERY + 2)]
        assert len({answer.headers["x-engine"] for answer in kept}) > 1
        for answer in kept:
            path = f"{nodes[1].url}/v1/responses/{answer.json()['id']}"
            for method, more in (("GET", ""), ("GET", "/input_items?limit=2"), ("POST", "/cancel"), ("DELETE", "")):
                found = await nodes[1].http.request(method, path + more)
                assert (found.status_code, found.headers["x-engine"]) == (200, answer.headers["x-engine"])
            gone = await nodes[1].http.get(path)
            assert (gone.status_code, gone.headers["x-engine"]) == (404, answer.headers["x-engine"])


@pytest.mark.slow
async def test_a_response_that_nobody_knows_or_whose_engine_restarted_is_a_404_and_asked_nowhere_else(
    tmp_path: Path,
) -> None:
    async with cluster_lab(tmp_path, engines=2) as place:
        nodes = await place.cluster(2, probe_interval_s=0.1)
        answer = await respond(nodes[0])
        name, engine = answer.json()["id"], answer.headers["x-engine"]
        url = place.engines[int(engine[-1])]
        assert (await respond(nodes[1], previous_response_id=name)).status_code == 200
        for unknown in (
            await respond(nodes[1], previous_response_id="resp_of_nobody"),
            await nodes[0].http.get(f"{nodes[0].url}/v1/responses/resp_of_nobody"),
        ):
            assert_lost(unknown)
        before = {one["name"]: one["generation"] for one in await nodes[1].backends()}
        await place.http.post(f"{url}/admin/restart")
        for node in nodes:
            await node.until(
                "/admin/backends",
                lambda view: any(one["generation"] > before[one["name"]] for one in view["backends"]),
            )
            assert_lost(await respond(node, previous_response_id=name))


async def test_a_response_of_an_engine_that_died_is_a_404(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=0) as place:
        url, scope = await start_engine(place.nursery, 0)
        other, _ = await start_engine(place.nursery, 1)
        place.engines += [url]
        node = await place.start()
        name = (await respond(node)).json()["id"]
        added = await node.http.post(f"{node.control}/admin/backends", json={"url": other})
        assert added.status_code in (200, 201), added.text
        scope.cancel()
        assert_lost(await respond(node, previous_response_id=name))
        assert_lost(await node.http.get(f"{node.url}/v1/responses/{name}"))
        assert (await respond(node)).status_code == 200, "what needs no history goes on elsewhere"


async def test_the_only_engine_is_asked_for_what_it_may_have_kept_before_its_node_began(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        first = await place.start()
        name = (await respond(first)).json()["id"]
        first.scope.cancel()
        node = await place.start(join=[])
        assert (await respond(node, previous_response_id=name)).status_code == 200
        unknown = await respond(node, previous_response_id="resp_of_nobody")
        assert (unknown.status_code, "not found" in unknown.text) == (404, True), "its engine's own words"


async def test_a_node_that_joins_later_knows_which_engine_keeps_what(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        first = await place.start()
        kept = [await respond(first, f"Question {number}") for number in range(4)]
        late = await place.start()
        for answer in kept:
            while (found := await respond(late, previous_response_id=answer.json()["id"])).status_code == 404:  # noqa: ASYNC110  # gossip
                await trio.sleep(BETWEEN_LOOKS_S)
            assert found.headers["x-engine"] == answer.headers["x-engine"]


def assert_lost(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert answer.status_code == 404
    expected = {"type": "invalid_request_error", "code": "previous_response_not_found", "param": "previous_response_id"}
    assert {name: error[name] for name in expected} == expected


async def test_tenants_do_not_reach_what_another_ones_engine_keeps() -> None:
    async with node_lab(engines=2, tenant_isolation="credential") as node:

        async def asked(key: str, **fields: object) -> httpx.Response:
            body = {"model": MODEL, "input": "Hello", "max_output_tokens": 8, **fields}
            return await node.http.post(
                f"{node.url}/v1/responses", content=json.dumps(body), headers={"authorization": f"Bearer {key}"}
            )

        name = (await asked("one")).json()["id"]
        assert (await asked("one", previous_response_id=name)).status_code == 200
        assert_lost(await asked("two", previous_response_id=name))
        path = f"{node.url}/v1/responses/{name}"
        assert_lost(await node.http.get(path, headers={"authorization": "Bearer two"}))
        assert (await node.http.get(path, headers={"authorization": "Bearer one"})).status_code == 200


SESSIONS: Sequence[tuple[Mapping[str, str], Mapping[str, object]]] = (
    ({"X-Claude-Code-Session-Id": "s"}, {}),
    ({"session-id": "s"}, {}),
    ({"x-session-affinity": "s"}, {}),
    ({"x-parent-session-id": "s", "x-session-id": "child"}, {}),
    ({}, {"prompt_cache_key": "s"}),
    ({}, {"session_params": {"session_id": "s"}}),
    ({}, {"metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'}}),
)


@pytest.mark.parametrize(("headers", "fields"), SESSIONS)
async def test_what_has_no_known_prefix_follows_its_session(
    headers: Mapping[str, str], fields: Mapping[str, object]
) -> None:
    async with node_lab(engines=3) as node:
        path = f"{node.url}/v1/chat/completions"
        served = []
        for number in range(8):
            words = f"{number} What was said so far, in other words. " * 20
            body = chat([{"role": "user", "content": words}], **fields)
            answer = await node.http.post(path, content=body, headers=headers)
            served.append((answer.headers["x-engine"], answer.headers["x-ranvier-reason"]))
    assert len({engine for engine, _ in served}) == 1
    assert [reason for _, reason in served[1:]] == ["session"] * 7


SUB_AGENTS: Sequence[tuple[Mapping[str, str], Mapping[str, str]]] = (
    ({"x-session-id": "s"}, {"x-session-id": "child", "x-parent-session-id": "s"}),
    ({"session-id": "s"}, {"session-id": "s", "thread-id": "child", "x-codex-parent-thread-id": "s"}),
    ({"x-claude-code-session-id": "s"}, {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a1"}),
)


async def ask_of_session(node: Node, headers: Mapping[str, str], role: str, words: str) -> tuple[str, str]:
    """Engine and reason of a chat with this system prompt."""
    turns = [{"role": "system", "content": f"{role} " * 99}, {"role": "user", "content": f"{words} " * 20}]
    fields = {name: value.replace("s", words, 1) if value == "s" else value for name, value in headers.items()}
    answer = await node.http.post(f"{node.url}/v1/chat/completions", content=chat(turns), headers=fields)
    return answer.headers["x-engine"], answer.headers["x-ranvier-reason"]


@pytest.mark.parametrize(("parent", "child"), SUB_AGENTS)
async def test_a_sub_agent_of_which_nothing_is_known_begins_where_its_parent_is(
    parent: Mapping[str, str], child: Mapping[str, str]
) -> None:
    async with node_lab(engines=4) as node:
        parents = [
            await ask_of_session(node, parent, f"Agent {number}.", f"{number}") for number in range(LOOK_EVERY + 2)
        ]
        children = [await ask_of_session(node, child, f"Helper {number}!", f"{number}") for number in range(6)]
        again = [await ask_of_session(node, child, "Helper 0!", f"{number}") for number in range(6)]
        title = [await ask_of_session(node, parent, f"Title {number}?", f"{number}") for number in range(6)]
    assert len({engine for engine, _ in parents}) > 1, "they are spread"
    assert children == [(engine, "session") for engine, _ in parents[:6]]
    assert {engine for engine, _ in again} == {children[0][0]}, "its prefix is known there, and counts more"
    assert "session" not in {reason for _, reason in [*again, *title]}


async def test_a_known_prefix_counts_more_than_a_session() -> None:
    async with node_lab(engines=3) as node:
        path = f"{node.url}/v1/chat/completions"
        history = turn("Where are the atlases? " * 10)
        holder = (await node.chat(history)).headers["x-engine"]
        for number in range(9):
            await node.http.post(path, content=chat([{"role": "user", "content": f"{number} " * 99}]))
        for session in ("a", "b", "c", "d"):
            words = [{"role": "user", "content": f"{session} " * 99}]
            await node.http.post(path, content=chat(words), headers={"x-session-id": session})
            answer = await node.http.post(path, content=chat(history), headers={"x-session-id": session})
            assert answer.headers["x-engine"] == holder
