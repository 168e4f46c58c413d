"""A node and engines that publish their KV events, between real sockets: what they hold is what the node claims."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import trio

from cluster.engine.engine_process import serve as serve_engine
from cluster.engine.engine_routes import Engine, EngineConfig
from cluster.engine.engine_text import load_tokenizer
from cluster.engine.kv_events import KvEvents
from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.config.config_loader import config_of
from ranvier_py.core.engine_cache.engine_caches import EngineCaches
from ranvier_py.io.tokenizer import EMBEDDED
from ranvier_py.node import event_reader as reading
from ranvier_py.node.engine_event_parts import FAULTS_LOGGED_MAX, EngineEvents
from ranvier_py.node.node import Addresses, run
from ranvier_py.replay.engine.engine_values import EngineLimits

DEADLINE_S = 20
MODEL, ADAPTER = "lab-model", "adapter"
LONG = "Where in this library is the shelf with the old atlases, and who may borrow them, and for how long? "


class Lab:
    """One engine and one node in front of it."""

    def __init__(self, engine: str, public: str, control: str, scope: trio.CancelScope) -> None:
        self.scope = scope
        self.engine = engine
        self.public = public
        self.control = control
        self.http = httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False)

    async def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
        answer = await self.http.post(f"{self.public}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def predicted(self, text: str, **fields: Any) -> tuple[int, str | None]:
        """Tokens that the node believes to be cached of this prompt, and who says so."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        answer = await self.http.post(f"{self.control}/explain", json=body)
        (candidate,) = answer.json()["candidates"]
        return candidate["matched_tokens"], candidate["trust"]

    async def send(self, path: str, **fields: Any) -> None:
        answer = await self.http.post(f"{self.engine}{path}", json=fields)
        assert answer.status_code == 200, answer.text

    async def engine_caches(self) -> dict[str, Any]:
        return dict((await self.http.get(f"{self.control}/admin/engine-cache")).json())

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The node's view of the engine as soon as it is as expected."""
        while True:
            engine = (await self.engine_caches())["engines"][0]
            if holds(engine):
                return dict(engine)
            await trio.sleep(0.02)

    async def until_predicted(self, wanted: Callable[[int, str | None], bool], text: str, **fields: Any) -> int:
        while True:
            tokens, trust = await self.predicted(text, **fields)
            if wanted(tokens, trust):
                return tokens
            await trio.sleep(0.02)


async def start_engine(
    nursery: trio.Nursery, encoding: str = "map", buffer_messages: int = 10_000, **limited: Any
) -> str:
    """Its URL."""
    limits = EngineLimits(prefill_tokens_per_s=math.inf, decode_s=0.001, **{"cache_tokens": 20_000, **limited})
    endpoints = KvEndpoints("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", buffer_messages=buffer_messages)
    events = KvEvents(endpoints, encoding)
    config = EngineConfig("engine", (MODEL, ADAPTER), limits, tokens_max=10_000, kv=events)
    engine = Engine(config, load_tokenizer(str(EMBEDDED)))
    host, port = await nursery.start(serve_engine, engine, "127.0.0.1", 0)
    return f"http://{host}:{port}"


async def start_node(nursery: trio.Nursery, engine: str, **settings: Any) -> Lab:
    values = {"listen": "127.0.0.1:0", "control": "127.0.0.1:0", "drain_timeout_s": 1, **settings}
    scope = trio.CancelScope()

    async def serve(task_status: trio.TaskStatus[Addresses]) -> None:
        with scope:
            await run(config_of(backend=[engine], **values), task_status=task_status)

    addresses = await nursery.start(serve)
    host, port = addresses.public[0]
    return Lab(engine, f"http://{host}:{port}", addresses.control, scope)


@asynccontextmanager
async def lab(
    encoding: str = "map", limits: Mapping[str, int] = MappingProxyType({}), **settings: Any
) -> AsyncIterator[Lab]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            engine = await start_engine(nursery, encoding, **limits)
            running = await start_node(nursery, engine, **settings)
            async with running.http:
                yield running
            nursery.cancel_scope.cancel()


def confirmed(tokens: int, trust: str | None) -> bool:
    return tokens >= 64 and trust == "CONFIRMED"


async def test_what_an_engine_computes_is_confirmed_by_its_events() -> None:
    async with lab() as node:
        engine = await node.until(lambda engine: engine["level"] == "exact")
        assert (engine["streams"], engine["role"]) == (1, "reader")
        assert (await node.chat(LONG * 8))["usage"]["prompt_tokens"] > 128
        engine = await node.until(lambda engine: engine["blocks"] > 8)
        assert engine["applied"] > 0
        tokens = await node.until_predicted(confirmed, LONG * 8)
        usage = (await node.chat(LONG * 8))["usage"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] - tokens <= 16
        metrics = (await node.http.get(f"{node.control}/metrics")).text
        assert 'engine_cache_level{backend="' in metrics
        assert "engine_cache_blocks{" in metrics


async def test_what_nobody_routed_here_is_known_too() -> None:
    """Requests that reach the engine by another way, and adapters and salts apart from each other."""
    async with lab() as node:
        await node.until(lambda engine: engine["level"] == "exact")
        body = {"messages": [{"role": "user", "content": LONG * 8}], "max_tokens": 4}
        for fields in ({"model": ADAPTER}, {"model": MODEL, "cache_salt": "s"}):
            answer = await node.http.post(f"{node.engine}/v1/chat/completions", json={**body, **fields})
            assert answer.status_code == 200
            await node.until_predicted(confirmed, LONG * 8, **fields)
        assert (await node.predicted(LONG * 8))[0] == 0
        assert (await node.predicted(LONG * 8, cache_salt="t"))[0] == 0


async def test_an_eviction_is_noticed() -> None:
    async with lab(limits={"cache_tokens": 1024}) as node:
        await node.until(lambda engine: engine["level"] == "exact")
        await node.chat(LONG * 8)
        await node.until_predicted(confirmed, LONG * 8)
        for number in range(8):
            await node.chat(f"{number} " + LONG * 8)
        await node.until_predicted(lambda tokens, _: tokens == 0, LONG * 8)
        await node.until_predicted(confirmed, "7 " + LONG * 8)


async def test_a_restart_and_a_cleared_cache_void_all_claims() -> None:
    async with lab() as node:
        await node.until(lambda engine: engine["level"] == "exact")
        for path in ("/admin/clear", "/admin/restart"):
            await node.chat(LONG * 8)
            await node.until_predicted(confirmed, LONG * 8)
            await node.send(path)
            await node.chat("Something else: " + LONG)  # an engine that says nothing can't be known to be another
            await node.until_predicted(lambda tokens, _: tokens == 0, LONG * 8)
            await node.until(lambda engine: engine["level"] == "exact")
        assert (await node.engine_caches())["counts"]["voided"] >= 2


async def test_lost_messages_are_asked_for_again() -> None:
    async with lab() as node:
        await node.until(lambda engine: engine["level"] == "exact")
        await node.send("/admin/kv", lose=1)
        await node.chat(LONG * 8)
        await node.chat("Something else: " + LONG)
        engine = await node.until(lambda engine: engine["gaps"] == 1 and engine["level"] == "exact")
        assert engine["restarts"] == 0
        await node.until_predicted(confirmed, LONG * 8)


async def test_sglangs_events_do_as_well() -> None:
    async with lab(encoding="sglang") as node:
        await node.until(lambda engine: engine["level"] == "exact")
        await node.chat(LONG * 8)
        await node.until_predicted(confirmed, LONG * 8)


@pytest.mark.parametrize(
    ("ours", "why"), [(16, "nothing missed; block_size_tokens should be 64, as it has"), (64, "nothing missed")]
)
async def test_larger_blocks_are_matched_as_deep_as_ours_are_equal(ours: int, why: str) -> None:
    async with lab(limits={"block_size": 64}, block_size_tokens=ours) as node:
        await node.until(lambda engine: engine["level"] == "exact")
        await node.chat(LONG * 8)
        tokens = await node.until_predicted(confirmed, LONG * 8)
        usage = (await node.chat(LONG * 8))["usage"]["prompt_tokens_details"]
        assert tokens == usage["cached_tokens"] or ours == 16
        assert (await node.engine_caches())["engines"][0]["why"] == why


async def test_events_can_be_turned_off() -> None:
    async with lab(kv_events="off") as node:
        await node.chat(LONG * 8)
        engine = (await node.engine_caches())["engines"][0]
        assert (engine["level"], engine["streams"], engine["role"]) == ("estimated", 0, "")
        assert (await node.predicted(LONG * 8))[1] == "LOCAL"


async def test_a_bug_in_the_engine_cache_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    async with lab() as node:
        monkeypatch.setattr(EngineCaches, "sweep", fail)
        monkeypatch.setattr(EngineEvents, "look", fail)
        while (await node.engine_caches())["faults"] <= FAULTS_LOGGED_MAX:
            pass
        assert (await node.chat(LONG))["usage"]
    reported = [record for record in caplog.records if ".failed" in record.message]
    assert len(reported) == FAULTS_LOGGED_MAX


async def test_of_two_nodes_one_reads_and_both_know() -> None:
    """What the engine stores, drops and says after the reader has gone reaches the other node."""
    with trio.fail_after(2 * DEADLINE_S):
        async with trio.open_nursery() as nursery:
            engine = await start_engine(nursery, cache_tokens=1024)
            gossip = {"gossip": "127.0.0.1:0", "insecure_gossip": True}
            first = await start_node(nursery, engine, **gossip)
            place = (await first.http.get(f"{first.control}/admin/cluster")).json()["address"]
            second = await start_node(nursery, engine, **gossip, join=[place])
            nodes = [first, second]
            for node in nodes:
                await node.until(lambda engine: engine["level"] == "exact")
            reading = await readers(nodes, 1)
            (other,) = [node for node in nodes if node is not reading[0]]
            assert (await other.engine_caches())["engines"][0]["why"] == "a peer's to read"
            await reading[0].chat(LONG * 8)
            for node in nodes:
                await node.until_predicted(lambda tokens, _: tokens >= 64, LONG * 8)
            for number in range(8):
                await reading[0].chat(f"{number} " + LONG * 8)
            for node in nodes:
                await node.until_predicted(lambda tokens, _: tokens == 0, LONG * 8)
            reading[0].scope.cancel()
            await readers([other], 1)
            await other.until(lambda engine: engine["level"] == "exact")
            await other.chat(LONG * 9)
            await other.until_predicted(confirmed, LONG * 9)
            for node in nodes:
                await node.http.aclose()
            nursery.cancel_scope.cancel()


async def test_an_engine_that_one_node_cannot_receive_is_left_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's port may be closed to one machine and open to the next."""
    monkeypatch.setattr(reading, "LOST_S", 0.3)
    with trio.fail_after(2 * DEADLINE_S):
        async with trio.open_nursery() as nursery:
            engine = await start_engine(nursery)
            gossip = {"gossip": "127.0.0.1:0", "insecure_gossip": True}
            nobody = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = nobody[0].socket.getsockname()[1]
            await nobody[0].aclose()
            deaf = await start_node(nursery, f"{engine},kv_events=tcp://127.0.0.1:{port}", **gossip)
            await readers([deaf], 1)
            await readers([deaf], 0)
            place = (await deaf.http.get(f"{deaf.control}/admin/cluster")).json()["address"]
            other = await start_node(nursery, engine, **gossip, join=[place])
            await readers([other], 1)
            await other.until(lambda engine: engine["level"] == "exact")
            engine_seen = await deaf.until(lambda engine: engine["level"] == "exact" and engine["role"] != "reader")
            assert engine_seen["why"] == "not to be reached from here"
            for node in (deaf, other):
                await node.http.aclose()
            nursery.cancel_scope.cancel()


async def readers(nodes: list[Lab], count: int) -> list[Lab]:
    """Those who read the engine's events, once they are so many."""
    while True:
        found = [node for node in nodes if (await node.engine_caches())["engines"][0]["role"] == "reader"]
        if len(found) == count:
            return found
        await trio.sleep(0.05)


async def test_where_an_engine_publishes_is_taken_over_the_control_port() -> None:
    """The same fields as in the configuration, and `off` is off."""
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            engine, silent = await start_engine(nursery), await start_engine(nursery)
            async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http:
                events = (await http.get(f"{engine}/kv_event_sources")).json()
            (source,) = events["sources"] if isinstance(events, dict) and "sources" in events else events.values()
            node = await start_node(nursery, silent)
            await node.http.delete(f"{node.control}/admin/backends", params={"url": silent})
            sent = {"kv_events": source["endpoint"], "kv_replay": source["replay_endpoint"]}
            for body in ({"url": engine, **sent}, {"url": silent, "kv_events": "off"}):
                answer = await node.http.post(f"{node.control}/admin/backends", json=body)
                assert answer.status_code == 200, answer.text
            await node.until(lambda engine: engine["level"] == "exact")
            assert [one["level"] for one in (await node.engine_caches())["engines"]] == ["exact", "estimated"]
            refused = await node.http.post(
                f"{node.control}/admin/backends", json={"url": "http://a:1", "kv_index": "http://a:1/events"}
            )
            assert (refused.status_code, "kv_index" in refused.text) == (400, True)
            await node.http.aclose()
            nursery.cancel_scope.cancel()
