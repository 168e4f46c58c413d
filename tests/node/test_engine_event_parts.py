"""A node and engines that publish their KV events, between real sockets: what they hold is what the node claims."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import trio

from cluster.engine.engine_metrics import metrics_page
from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.core.engine_cache.engine_caches import EngineCaches
from ranvier_py.io.tokenizer import EMBEDDED
from ranvier_py.node.engine_cache import event_reader as reading
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from tests.node import node_lab
from tests.node.node_lab import DEADLINE_S, MODEL, Lab, Node, opened

ADAPTER = "adapter"
GOSSIP = {"gossip": "127.0.0.1:0", "insecure_gossip": True}
LONG = "Where in this library is the shelf with the old atlases, and who may borrow them, and for how long? "


async def start_engine(
    nursery: trio.Nursery, encoding: str = "map", buffer_messages: int = 10_000, **limits: Any
) -> str:
    """Its URL."""
    any_port = "tcp://127.0.0.1:0"
    kv = KvEndpoints(any_port, any_port, encoding=encoding, buffer_messages=buffer_messages)
    of_engine = partial(node_lab.start_engine, models=(MODEL, ADAPTER), kv=kv)
    return (await of_engine(nursery, tokenizer=str(EMBEDDED), **{"cache_tokens": 20_000, **limits}))[0]


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def chat(node: Node, text: str, **fields: Any) -> dict[str, Any]:
    answer = await node.chat(question(text), **{"max_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def predicted(node: Node, text: str, **fields: Any) -> tuple[int, str | None]:
    """Tokens that the node believes to be cached of this prompt, and its trust in that."""
    body = {"model": MODEL, "messages": question(text), **fields}
    (candidate,) = (await node.http.post(f"{node.control}/explain", json=body)).json()["candidates"]
    return candidate["matched_tokens"], candidate["trust"]


async def until_predicted(node: Node, wanted: Callable[[int, str | None], bool], text: str, **fields: Any) -> int:
    while True:
        tokens, trust = await predicted(node, text, **fields)
        if wanted(tokens, trust):
            return tokens
        await trio.sleep(0.02)


async def command(node: Node, path: str, **fields: Any) -> None:
    """To the engine."""
    answer = await node.http.post(f"{node.engines[0]}{path}", json=fields)
    assert answer.status_code == 200, answer.text


async def engine_cache(node: Node) -> dict[str, Any]:
    return dict(await node.ask("/admin/engine-cache"))


async def until(node: Node, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The node's view of the engine as soon as it is as expected."""
    view = await node.until("/admin/engine-cache", lambda view: holds(view["engines"][0]))
    return dict(view["engines"][0])


def place(deadline_s: float = DEADLINE_S) -> AbstractAsyncContextManager[Lab]:
    return opened(Lab, 0, deadline_s)


@asynccontextmanager
async def lab(
    encoding: str = "map", limits: Mapping[str, int] = MappingProxyType({}), **settings: Any
) -> AsyncIterator[Node]:
    async with place() as running:
        running.engines.append(await start_engine(running.nursery, encoding, **limits))
        yield await start_node(running, **settings)


async def start_node(running: Lab, **settings: Any) -> Node:
    return await running.start(**{"drain_timeout_s": 1, "probe_interval_s": 5, **settings})


def confirmed(tokens: int, trust: str | None) -> bool:
    return tokens >= 64 and trust == "CONFIRMED"


@pytest.mark.parametrize("encoding", ["map", "sglang"])
async def test_what_an_engine_computes_is_confirmed_by_its_events(encoding: str) -> None:
    async with lab(encoding) as node:
        engine = await until(node, lambda engine: engine["level"] == "exact")
        assert (engine["streams"], engine["role"]) == (1, "reader")
        assert (await chat(node, LONG * 8))["usage"]["prompt_tokens"] > 128
        engine = await until(node, lambda engine: engine["blocks"] > 8)
        assert engine["applied"] > 0
        tokens = await until_predicted(node, confirmed, LONG * 8)
        usage = (await chat(node, LONG * 8))["usage"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] - tokens <= 16
        metrics = (await node.http.get(f"{node.control}/metrics")).text
        assert 'engine_cache_level{backend="' in metrics
        assert "engine_cache_blocks{" in metrics


async def test_what_nobody_routed_here_is_known_too() -> None:
    """Requests that reach the engine by another way, and adapters and salts apart from each other."""
    async with lab() as node:
        await until(node, lambda engine: engine["level"] == "exact")
        body = {"messages": [{"role": "user", "content": LONG * 8}], "max_tokens": 4}
        for fields in ({"model": ADAPTER}, {"model": MODEL, "cache_salt": "s"}):
            answer = await node.http.post(f"{node.engines[0]}/v1/chat/completions", json={**body, **fields})
            assert answer.status_code == 200
            await until_predicted(node, confirmed, LONG * 8, **fields)
        assert (await predicted(node, LONG * 8))[0] == 0
        assert (await predicted(node, LONG * 8, cache_salt="t"))[0] == 0


async def test_an_eviction_is_noticed() -> None:
    async with lab(limits={"cache_tokens": 1024}) as node:
        await until(node, lambda engine: engine["level"] == "exact")
        await chat(node, LONG * 8)
        await until_predicted(node, confirmed, LONG * 8)
        for number in range(8):
            await chat(node, f"{number} " + LONG * 8)
        await until_predicted(node, lambda tokens, _: tokens == 0, LONG * 8)
        await until_predicted(node, confirmed, "7 " + LONG * 8)


async def test_a_restart_and_a_cleared_cache_void_all_claims() -> None:
    async with lab() as node:
        await until(node, lambda engine: engine["level"] == "exact")
        for path in ("/admin/clear", "/admin/restart"):
            await chat(node, LONG * 8)
            await until_predicted(node, confirmed, LONG * 8)
            await command(node, path)
            await chat(node, "Something else: " + LONG)  # an engine that says nothing can't be known to be another
            await until_predicted(node, lambda tokens, _: tokens == 0, LONG * 8)
            await until(node, lambda engine: engine["level"] == "exact")
        assert (await engine_cache(node))["counts"]["voided"] >= 2


async def test_lost_messages_are_asked_for_again() -> None:
    async with lab() as node:
        await until(node, lambda engine: engine["level"] == "exact")
        await command(node, "/admin/kv", lose=1)
        await chat(node, LONG * 8)
        await chat(node, "Something else: " + LONG)
        engine = await until(node, lambda engine: engine["gaps"] == 1 and engine["level"] == "exact")
        assert engine["restarts"] == 0
        await until_predicted(node, confirmed, LONG * 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "why"), [(16, "nothing missed; block_size_tokens should be 64, as it has"), (64, "nothing missed")]
)
async def test_larger_blocks_are_matched_as_deep_as_ours_are_equal(ours: int, why: str) -> None:
    async with lab(limits={"block_size": 64}, block_size_tokens=ours) as node:
        await until(node, lambda engine: engine["level"] == "exact")
        await chat(node, LONG * 8)
        tokens = await until_predicted(node, confirmed, LONG * 8)
        usage = (await chat(node, LONG * 8))["usage"]["prompt_tokens_details"]
        assert tokens == usage["cached_tokens"] or ours == 16
        assert (await engine_cache(node))["engines"][0]["why"] == why


async def test_of_a_hybrid_engine_attention_confirms_nothing_and_the_status_states_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def page(*args: Any, **fields: Any) -> bytes:
        return metrics_page(*args, **fields).replace(b",num_gpu_blocks=", b',mamba_block_size="1056",num_gpu_blocks=')

    monkeypatch.setattr("cluster.engine.engine_routes.metrics_page", page)
    async with lab() as node:
        await until(node, lambda engine: engine["level"] == "estimated" and engine["why"].startswith("a hybrid"))
        await chat(node, LONG * 8)
        await until(node, lambda engine: engine["blocks"] > 8)
        tokens, trust = await predicted(node, LONG * 8)
        assert (tokens > 64, trust) == (True, "LOCAL")


@pytest.mark.slow
async def test_a_hybrid_engine_whose_events_have_its_states_is_exact() -> None:
    """Its checkpoints are those of its events, as far as the last whole block of a single prompt."""
    async with lab(limits={"cache": "vllm_align", "block_size": 272}, engine_metrics_interval_s=0.1) as node:  # type: ignore[dict-item]
        await chat(node, f"One more: {LONG * 24}")
        await until(node, lambda engine: engine["level"] == "exact" and engine["profile"] == "vllm-align:272")
        await chat(node, LONG * 24)
        await until_predicted(node, lambda tokens, trust: trust == "CONFIRMED", LONG * 24)
        body = {"model": MODEL, "messages": question(LONG * 24)}
        while True:
            (candidate,) = (await node.http.post(f"{node.control}/explain", json=body)).json()["candidates"]
            if candidate.get("credit_tokens"):
                break
            await trio.sleep(0.05)
        usage = (await chat(node, LONG * 24))["usage"]
        assert candidate["credit_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_events_can_be_turned_off() -> None:
    async with lab(kv_events="off") as node:
        await chat(node, LONG * 8)
        engine = (await engine_cache(node))["engines"][0]
        assert (engine["level"], engine["streams"], engine["role"]) == ("estimated", 0, "")
        assert (await predicted(node, LONG * 8))[1] == "LOCAL"


@pytest.mark.slow
async def test_a_bug_in_the_engine_cache_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    async with lab() as node:
        monkeypatch.setattr(EngineCaches, "sweep", fail)
        monkeypatch.setattr(EngineEvents, "look", fail)
        await node.until_faults("engine_events", "sweep")
        assert (await chat(node, LONG))["usage"]
    reported = [record.message for record in caplog.records if record.exc_info]
    assert sorted(reported) == ["unexpected.error in engine_events", "unexpected.error in sweep"]


@pytest.mark.slow
async def test_of_two_nodes_one_reads_and_both_know() -> None:
    """What the engine stores, drops and publishes after the reader has gone reaches the other node."""
    async with place(2 * DEADLINE_S) as running:
        running.engines.append(await start_engine(running.nursery, cache_tokens=1024))
        first = await start_node(running, **GOSSIP)
        address = (await first.ask("/admin/cluster"))["address"]
        nodes = [first, await start_node(running, **GOSSIP, join=[address])]
        for node in nodes:
            await until(node, lambda engine: engine["level"] == "exact")
        reader = await readers(nodes, 1)
        (other,) = [node for node in nodes if node is not reader[0]]
        await until(other, lambda engine: engine["role"] == "standby")
        await chat(reader[0], LONG * 8)
        for node in nodes:
            await until_predicted(node, lambda tokens, _: tokens >= 64, LONG * 8)
        for number in range(8):
            await chat(reader[0], f"{number} " + LONG * 8)
        for node in nodes:
            await until_predicted(node, lambda tokens, _: tokens == 0, LONG * 8)
        reader[0].scope.cancel()
        await readers([other], 1)
        await until(other, lambda engine: engine["level"] == "exact")
        await chat(other, LONG * 9)
        await until_predicted(other, confirmed, LONG * 9)


@pytest.mark.slow
async def test_an_engine_that_one_node_cannot_receive_is_left_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's port may be closed to one machine and open to the next."""
    monkeypatch.setattr(reading, "LOST_S", 0.3)
    async with place(2 * DEADLINE_S) as running:
        engine = await start_engine(running.nursery)
        nobody = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = nobody[0].socket.getsockname()[1]
        await nobody[0].aclose()
        deaf = await start_node(running, backend=[f"{engine},kv_events=tcp://127.0.0.1:{port}"], **GOSSIP)
        await readers([deaf], 1)
        await readers([deaf], 0)
        address = (await deaf.ask("/admin/cluster"))["address"]
        other = await start_node(running, backend=[engine], **GOSSIP, join=[address])
        await readers([other], 1)
        await until(other, lambda engine: engine["level"] == "exact")
        engine_seen = await until(deaf, lambda engine: engine["level"] == "exact" and engine["role"] != "reader")
        assert engine_seen["why"] == "not to be reached from here"


async def readers(nodes: list[Lab], count: int) -> list[Lab]:
    """Those who read the engine's events, once they are so many."""
    while True:
        found = [node for node in nodes if (await engine_cache(node))["engines"][0]["role"] == "reader"]
        if len(found) == count:
            return found
        await trio.sleep(0.05)


async def test_where_an_engine_publishes_is_taken_over_the_control_port() -> None:
    """The same fields as in the configuration, and `off` is off."""
    async with place() as running:
        engine, silent = [await start_engine(running.nursery) for _ in range(2)]
        events = (await running.http.get(f"{engine}/kv_event_sources")).json()
        (source,) = events["sources"] if isinstance(events, dict) and "sources" in events else events.values()
        node = await start_node(running, backend=[silent])
        backends = f"{node.control}/admin/backends"
        await node.http.delete(backends, params={"url": silent})
        sent = {"kv_events": source["endpoint"], "kv_replay": source["replay_endpoint"]}
        for body in ({"url": engine, **sent}, {"url": silent, "kv_events": "off"}):
            answer = await node.http.post(backends, json=body)
            assert answer.status_code == 200, answer.text
        await until(node, lambda engine: engine["level"] == "exact")
        assert [one["level"] for one in (await engine_cache(node))["engines"]] == ["exact", "estimated"]
        refused = await node.http.post(backends, json={"url": "http://a:1", "kv_index": "http://a:1/events"})
        assert (refused.status_code, "kv_index" in refused.text) == (400, True)
