"""Continuum's tier 4 in a whole node: streams on real sockets, placement, the control port. Names begin with CR."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio

from ranvier_py.config.config_loader import config_of, load
from ranvier_py.core.engine_cache.engine_caches import EngineCaches
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent, IndexSettings, Verb
from ranvier_py.core.engine_cache.sources.server_events import SourceOptions
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.namespaces import opening_key
from ranvier_py.node.engine_cache.index_parts import IndexedBackend, IndexParts
from tests.builders.route_tables import route_table
from tests.node.node_lab import DEADLINE_S, MODEL, Lab, Node, lab, opened, turn

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
MESSAGES = turn("Where are the atlases?")
OPENING = opening_key(MODEL, MESSAGES).hex()


class Streams:
    """An event stream for each engine, on one port: /0, /1 …"""

    def __init__(self) -> None:
        self.connections: dict[str, trio.SocketStream] = {}

    async def handle(self, stream: trio.SocketStream) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += await stream.receive_some(4096)
        await stream.send_all(HEAD)
        self.connections[request.split(b" ")[1].decode()] = stream
        await trio.sleep_forever()

    async def announce(self, engine: int, kind: str, prefix: str, tokens: int | None = None) -> None:
        while f"/{engine}" not in self.connections:
            await trio.lowlevel.checkpoint()
        data = {"prefix_hash": prefix, **({"token_count": tokens} if tokens is not None else {})}
        text = f"event: {kind}\ndata: {json.dumps(data)}\n\n"
        await self.connections[f"/{engine}"].send_all(text.encode())


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[Node, Streams]]:
    """A node in front of two engines, vllm-0 and vllm-1, each with an event stream."""
    streams = Streams()
    async with opened(Lab, 2, DEADLINE_S) as place:
        events = await place.listen(streams.handle)
        backends = [f"{url},name=vllm-{number},kv_index={events}/{number}" for number, url in enumerate(place.engines)]
        yield await place.start(**{"backend": backends, "policy": "kv_score", **settings}), streams


ENGINE = IndexedBackend(BackendId(0), "vllm-0", "http://127.0.0.1:9/never", "http://engine")


def index_parts_of(engine_caches: EngineCaches, *backends: IndexedBackend) -> IndexParts:
    """The index of a node with these backends, whose event sources are never there, and of the node's one backend."""
    settings, options = IndexSettings(ttl_s=1.0), SourceOptions(reconnect_s=60.0)
    made = IndexParts(settings, options, Random(1), engine_caches, {ENGINE.url: ENGINE.id}.get)
    for each in backends:
        made.read(each)
    return made


async def stats(node: Node, holds: Callable[[dict[str, Any]], bool], page: str = "stats") -> dict[str, Any]:
    """A page of the index as soon as it is as expected."""
    return dict(await node.until(f"/admin/kv-index/{page}", holds))


async def test_cr21_a_request_goes_where_the_events_show_that_its_opening_is_warm() -> None:
    for engine in (0, 1):  # whichever the ring would have named
        async with listening() as (node, streams):
            await streams.announce(engine, "cache_created", OPENING, 10_000)
            await stats(node, lambda found: found["index"]["entry_count"] == 1)
            answer = await node.chat(MESSAGES)
            assert answer.headers["x-ranvier-backend"] == f"vllm-{engine}"
            assert answer.headers["x-ranvier-reason"] == "kv_aware"
            assert int(answer.headers["x-ranvier-matched-tokens"]) > 0


async def test_cr21_what_was_purged_is_placed_by_the_ring() -> None:
    async with listening() as (node, streams):
        await streams.announce(0, "cache_created", OPENING, 10_000)
        await streams.announce(0, "cache_purged", OPENING)
        await stats(node, lambda found: found["event_sources"][0]["events_received"] == 2)
        assert (await node.chat(MESSAGES)).headers["x-ranvier-reason"] == "prefix_hash"


async def test_cr26_the_statistics_have_the_documents_shape_and_their_totals_add_up() -> None:
    async with listening() as (node, streams):
        await streams.announce(0, "cache_created", OPENING, 10_000)
        await streams.announce(1, "cache_created", "ab", 5)
        await stats(node, lambda found: found["index"]["entry_count"] == 2)
        await node.chat(MESSAGES)
        await node.chat([{"role": "user", "content": "Something else entirely."}])
        found = await stats(node, lambda found: found["routing_decisions"]["total"] == 2)
        assert found["enabled"] is True
        config = found["config"]
        assert type(config["entry_ttl_seconds"]) is int
        assert (config["backend"], config["max_entries"], config["entry_ttl_seconds"]) == ("memory", 100_000, 600)
        assert config["event_sources_count"] == 2
        weights = ("overlap_weight", "load_weight", "health_weight", "gpu_tier_weight", "storage_tier_weight")
        assert [config["scoring"][name] for name in (*weights, "min_overlap_threshold")] == [
            0.6,
            0.3,
            0.1,
            1.0,
            0.6,
            0.3,
        ]
        assert found["index"] == {"prefix_count": 2, "entry_count": 2, "total_hits": 1, "total_evictions": 0}
        assert found["routing_decisions"] == {"kv_aware": 1, "fallback": 1, "total": 2}
        assert found["overlap_score_count"] == 1
        assert found["query_latency_count"] == 2
        first = found["event_sources"][0]
        assert (first["backend_name"], first["connected"], first["events_received"]) == ("vllm-0", True, 1)
        assert first["last_event_at"].endswith("Z")


async def test_cr27_each_backend_shows_what_came_and_what_it_changed() -> None:
    async with listening(kv_index_offloading=True) as (node, streams):
        for kind in ("cache_created", "cache_evicted", "cache_reloaded", "cache_painted", "cache_purged"):
            await streams.announce(0, kind, "ab", 7)
        found = await stats(node, lambda found: found["backends"][0]["events"]["received"] == 5, "backends")
        assert found["backends"][0]["backend_name"] == "vllm-0"
        assert found["backends"][0]["connection"]["connected"] is True
        assert found["backends"][0]["events"] == {
            "received": 5,
            "processed": 4,
            "dropped": 1,
            "index_created": 2,
            "index_evicted": 2,
        }


async def test_cr28_clearing_shows_how_much_went_and_the_index_fills_again() -> None:
    async with listening() as (node, streams):
        await streams.announce(0, "cache_created", "ab", 7)
        await stats(node, lambda found: found["index"]["entry_count"] == 1)
        answer = await node.http.post(f"{node.control}/admin/kv-index/clear")
        assert answer.json() == {"success": True, "entries_before_clear": 1, "cleared_entries": 1}
        await streams.announce(1, "cache_created", "ab", 7)
        await stats(node, lambda found: found["index"]["entry_count"] == 1)


async def test_cr16_what_nobody_asks_for_goes_when_its_time_is_over() -> None:
    """The memory of it, that is: by a tick of its own, for no question comes."""
    index_parts = index_parts_of(EngineCaches(route_table(capacity=100), lambda _: 0), ENGINE)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(index_parts.run)
            index_parts.index.apply(BackendId(0), IndexEvent(Verb.CREATED, "ab", 7), time.monotonic())
            while index_parts.index.peek("ab", BackendId(0)) is not None:  # noqa: ASYNC110  # of state nobody announces
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()


async def test_cr22_the_metrics_are_there_under_our_prefix() -> None:
    async with listening() as (node, streams):
        await streams.announce(0, "cache_created", OPENING, 10_000)
        await stats(node, lambda found: found["index"]["entry_count"] == 1)
        await node.chat(MESSAGES)
        page = (await node.http.get(f"{node.control}/metrics")).text
        for line in (
            'ranvier_kv_event_received_total{backend="vllm-0"} 1.0',
            'ranvier_kv_event_processed_total{backend="vllm-0"} 1.0',
            'ranvier_kv_event_dropped_total{backend="vllm-0"} 0.0',
            'ranvier_kv_consumer_connected{backend="vllm-0"} 1.0',
            'ranvier_kv_consumer_reconnects_total{backend="vllm-0"} 0.0',
            "ranvier_kv_index_entries 1.0",
            'ranvier_kv_index_events_total{backend="vllm-0",type="created"} 1.0',
            'ranvier_kv_index_routing_decisions_total{decision="kv_aware"} 1.0',
            'ranvier_kv_index_event_source_status{backend="vllm-0",status="connected"} 1.0',
            "ranvier_kv_index_overlap_score_count 1.0",
            "ranvier_kv_index_query_latency_seconds_count 1.0",
        ):
            assert line in page


async def test_cr32_without_the_key_nobody_asks() -> None:
    async with listening(control_key="secret") as (node, _):
        for method, page in (("GET", "stats"), ("GET", "backends"), ("POST", "clear")):
            url = f"{node.control}/admin/kv-index/{page}"
            assert (await node.http.request(method, url)).status_code == 401
            key = {"authorization": "Bearer secret"}
            assert (await node.http.request(method, url, headers=key)).status_code == 200


async def test_a_node_without_event_streams_shows_that_it_has_no_index() -> None:
    async with lab() as node:
        assert await node.ask("/admin/kv-index/stats") == {"enabled": False}


def test_a_prefix_called_by_our_own_name_reaches_the_routes_of_every_policy() -> None:
    """A bridge of ours reports token fingerprints: what is gone is not followed, what is there is confirmed."""
    engine, held, gone = BackendId(0), Fingerprint(0xA1), Fingerprint(0xB2)
    routes = route_table(([(32, gone, 0), (16, held, 0)], engine, time.monotonic()), capacity=100)
    engine_caches = EngineCaches(routes, lambda _: 0)
    (stream,) = index_parts_of(engine_caches, ENGINE).streams.values()
    stream.started()
    stream.received([IndexEvent(Verb.CREATED, f"{held:016x}", 16), IndexEvent(Verb.CREATED, f"{gone:016x}", 32)])
    assert routes.counters.claims["confirmed"] == 2
    stream.received([IndexEvent(Verb.PURGED, f"{gone:016x}")])
    assert [holder.tokens for holder in routes.match([(32, gone, 0), (16, held, 0)], [0], time.monotonic())] == [16]
    assert engine_caches.level(engine) is Level.DEGRADED, "a stream without numbers is never exact"


def test_a_prefix_that_came_and_went_in_one_piece_of_the_stream_is_not_confirmed() -> None:
    engine, prefix = BackendId(0), Fingerprint(0xA1)
    routes = route_table(capacity=100)
    (stream,) = index_parts_of(EngineCaches(routes, lambda _: 0), ENGINE).streams.values()
    stream.started()
    stream.received([IndexEvent(Verb.CREATED, f"{prefix:016x}", 16), IndexEvent(Verb.PURGED, f"{prefix:016x}")])
    assert not routes.match([(16, prefix, 0)], [0], time.monotonic())
    stream.received([IndexEvent(Verb.PURGED, f"{prefix:016x}"), IndexEvent(Verb.CREATED, f"{prefix:016x}", 16)])
    assert [holder.backend for holder in routes.match([(16, prefix, 0)], [0], time.monotonic())] == [engine]


async def test_what_a_removed_engine_reports_is_not_believed_of_the_one_that_has_its_id_now() -> None:
    async with listening() as (node, streams):
        backends, (first, _) = f"{node.control}/admin/backends", node.engines
        await streams.announce(0, "cache_created", OPENING, 10_000)
        await stats(node, lambda found: found["index"]["entry_count"] == 1)
        await node.http.delete(backends, params={"url": first})
        await node.http.post(backends, json={"url": "http://127.0.0.1:9", "name": "other"})
        assert (await node.ask("/admin/kv-index/stats"))["index"]["entry_count"] == 0
        await streams.announce(0, "cache_created", OPENING, 10_000)
        await streams.announce(1, "cache_created", "ab", 5)
        found = await stats(node, lambda found: [one["events_received"] for one in found["event_sources"]] == [2, 1])
        assert found["index"]["entry_count"] == 1
        answer = await node.chat(MESSAGES)
        assert answer.status_code == 200
        assert answer.headers["x-ranvier-reason"] != "kv_aware"


@pytest.mark.parametrize(
    "bad",
    [
        {"backend": ["http://127.0.0.1:9,kv_index=ftp://127.0.0.1/"]},
        {"backend": ["http://127.0.0.1:9,kv_index=127.0.0.1:80"]},
        {"kv_index_entries_max": 99},
        {"policy_option": ["overlap_weight=0.7"]},
        {"policy_option": ["load_factor_epsilon=0.001"]},
    ],
)
def test_cr31_what_is_out_of_range_is_refused_at_the_start(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_of(**bad)


@pytest.mark.parametrize(
    "recipe",
    [
        'policy = "chwbl"\npolicy_option = ["load_factor_epsilon=0.20"]\n',
        """policy = "kv_score"
policy_option = ["load_factor_epsilon=0.20", "min_overlap_threshold=0.25"]
kv_index_entries_max = 500000
kv_index_ttl_s = 900
kv_index_offloading = true
[[backend]]
url = "http://vllm-1:8000"
name = "vllm-1"
kv_index = "http://vllm-1:8000/v1/kv_events"
""",
    ],
)
def test_cr34_the_recipes_of_tier_one_and_four_load(recipe: str, tmp_path: Any) -> None:
    file = tmp_path / "node.toml"
    file.write_text(recipe)
    config, *_ = load(file=file)
    assert config.policy in ("chwbl", "kv_score")
