"""Whole nodes that keep answers in a real Redis. Names begin with the criterion (CR)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ranvier_py.config.config_loader import config_of, load
from ranvier_py.control.status_page import response_cache_lines
from ranvier_py.core.errors import ConfigError
from ranvier_py.node.parts.response_parts import INDEX_REDIS, RESPONSES_REDIS, redis_pools_of
from tests.io.redis_server import RedisServer, needs_redis, redis_server
from tests.node.node_lab import MODEL, Node, lab
from tests.node.test_cached_responses import STREAM, ask, counted, results
from tests.node.test_reload import reloadable
from tests.proxy.wire import GOOD, Scripted

URL = "redis://somebody:hunter2@127.0.0.1:6379"


@asynccontextmanager
async def two_nodes(server: RedisServer, engine: Scripted, **settings: Any) -> AsyncIterator[tuple[Node, Node]]:
    """Of one engine and one Redis, with nothing else in common."""
    shared: dict[str, Any] = {
        "response_cache": True,
        "response_cache_backend": "redis",
        "response_cache_redis_url": server.url,
        "response_cache_redis_retry_s": 0.05,
        **settings,
    }
    async with lab(engine, **shared) as one, lab(engine, **shared) as two:
        for node in (one, two):
            await connected(node)
        yield one, two


async def connected(node: Node, holds: bool = True) -> None:
    await node.until("/admin/response-cache/stats", lambda stats: stats["redis"]["connected"] == holds)


async def wrote(node: Node, answers: int) -> None:
    await node.until("/admin/response-cache/stats", lambda stats: stats["redis"]["written"] >= answers)


async def invalidate(node: Node, **fields: Any) -> Any:
    return (await node.http.post(f"{node.control}/admin/response-cache/invalidate", json=fields)).json()


@needs_redis
async def test_cr14_what_one_node_was_answered_another_answers_and_operators_see_and_clear_it() -> None:
    engine = Scripted(GOOD)
    with redis_server() as server:
        async with two_nodes(server, engine) as (one, two):
            first = await ask(one)
            await wrote(one, 1)
            second, third = await ask(two), await ask(two, "bob")
            assert results(first, await ask(one), second, third) == ["MISS", "HIT", "HIT", "MISS"]
            assert second.content == first.content
            assert len(engine.bodies) == 2
            assert await counted(two) == {"hit": 1, "miss": 1, "skip": 0}
            stats = await two.ask("/admin/response-cache/stats")
            assert (stats["backend_type"], stats["config"]["backend"]) == ("redis", "redis")
            assert (
                stats["redis"].items()
                >= {"fallback_active": False, "errors": {"connection": 0, "timeout": 0, "other": 0}}.items()
            )
            assert stats["redis"]["connections"].keys() == {"active", "idle"}
            await wrote(two, 1)
            assert await invalidate(two, model=MODEL, tenant="alice") == {
                "success": True,
                "action": "invalidate",
                "cleared_entries": None,
            }
            assert results(await ask(one), await ask(one, "bob")) == ["MISS", "HIT"]
            await wrote(one, 2)
            assert (await invalidate(one, clear_all=True))["cleared_entries"] == 2
            assert results(await ask(two, "bob")) == ["MISS"]
            page = (await two.http.get(f"{two.control}/metrics")).text
            for line in (
                'ranvier_cache_backend_type{backend="redis"} 1.0',
                "ranvier_cache_redis_connections_idle ",
                'ranvier_cache_redis_latency_seconds_count{operation="get"} ',
                'ranvier_cache_redis_errors_total{type="timeout"} 0.0',
                "ranvier_cache_fallback_active 0.0",
                "ranvier_response_cache_redis_found_total 1.0",
            ):
                assert line in page


@needs_redis
async def test_equal_requests_that_wait_for_redis_are_one_look_up_and_all_get_what_it_finds() -> None:
    engine = Scripted(GOOD)
    with redis_server() as server:
        async with two_nodes(server, engine, response_cache_redis_timeout_s=30.0) as (one, two):
            await ask(one)
            await wrote(one, 1)
            found: list[Any] = []

            async def again(**fields: Any) -> None:
                found.append(await ask(two, **fields))

            server.pause()
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(lambda number=number: again(stream=number % 2 == 0))
                await two.until("/admin/response-cache/stats", lambda stats: stats["redis"]["connections"]["active"])
                server.resume()
            assert results(*found) == ["HIT"] * 10
            assert len({each.content for each in found}) == 2, "whole, and as a stream"
            stats = await two.ask("/admin/response-cache/stats")
            assert stats["redis"]["found"] < 10
    assert len(engine.bodies) == 1


@needs_redis
async def test_a_stream_in_redis_is_replayed_by_another_node() -> None:
    engine = Scripted(*STREAM)
    with redis_server() as server:
        async with two_nodes(server, engine, ask_usage=False) as (one, two):
            first = await ask(one, stream=True)
            await wrote(one, 1)
            second = await ask(two, stream=True)
            assert results(first, second) == ["MISS", "HIT"]
            assert second.content == first.content


@needs_redis
async def test_cr13_redis_that_dies_costs_no_request_and_memory_stands_in_until_it_is_back() -> None:
    engine = Scripted(GOOD)
    with redis_server() as server:
        async with two_nodes(server, engine) as (one, two):
            await ask(one)
            await wrote(one, 1)
            server.kill()
            assert results(*[await ask(one) for _ in range(3)]) == ["MISS", "HIT", "HIT"]
            stats = await one.ask("/admin/response-cache/stats")
            (line,) = [each for each in response_cache_lines(stats) if each.lstrip().startswith("redis")]
            assert "connected=no fallback_active=yes" in line
            assert stats["redis"]["fallback_active"] is True
            assert stats["redis"]["errors"]["connection"] >= 1
            assert (stats["entries"], stats["redis"]["fallback_hits"]) == (1, 2)
            server.start()
            for node in (one, two):
                await connected(node)
            await ask(one)
            await one.until("/admin/response-cache/stats", lambda stats: not stats["redis"]["waiting"])
            assert results(await ask(two)) == ["HIT"]


@needs_redis
async def test_cr10_the_time_to_live_changes_at_once_and_the_backend_with_a_restart(tmp_path: Path) -> None:
    with redis_server() as server:
        shared = {"response_cache": True, "response_cache_backend": "redis", "response_cache_redis_url": server.url}
        async with reloadable(tmp_path, **shared) as (node, changed):
            await connected(node)
            await ask(node)
            await wrote(node, 1)
            assert results(await ask(node)) == ["HIT"]
            assert (await changed(response_cache_ttl_s=0.001))["applied"] == ["response_cache_ttl_s"]
            assert results(await ask(node)) == ["MISS"]
            answer = await changed(response_cache_ttl_s=0.001, response_cache_backend="memory")
            assert answer["restart_needed"] == ["response_cache_backend"]
            assert (await node.ask("/admin/response-cache/stats"))["backend_type"] == "redis"


def test_cr14_parts_with_the_same_redis_share_one_pool_and_others_have_their_own() -> None:
    both: dict[str, Any] = {
        "response_cache": True,
        "response_cache_backend": "redis",
        "kv_index_backend": "redis",
        "response_cache_redis_connections_max": 5,
    }
    for urls in ({"response_cache_redis_url": URL}, {"kv_redis_url": URL}):
        pools = redis_pools_of(config_of(**both, **urls))
        assert pools[INDEX_REDIS] is pools[RESPONSES_REDIS]
    pools = redis_pools_of(config_of(**both, response_cache_redis_url=URL, kv_redis_url=f"{URL}/1"))
    assert pools[INDEX_REDIS] is not pools[RESPONSES_REDIS]
    assert redis_pools_of(config_of(**{**both, "response_cache": False}, kv_redis_url=URL)).keys() == {INDEX_REDIS}
    assert redis_pools_of(config_of()) == {}


@needs_redis
async def test_cr14_the_index_and_the_response_cache_use_the_same_connections() -> None:
    with redis_server() as server:
        settings = {"kv_index_backend": "redis", "response_cache_redis_connections_max": 2}
        async with two_nodes(server, Scripted(GOOD), **settings) as (one, two):
            for node in (one, two):
                await node.until("/admin/kv-index/stats", lambda stats: not stats["shared"]["fallback_active"])
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(lambda number=number: ask(one, f"somebody {number}"))
            await wrote(one, 20)
            assert len(server.client().client_list()) <= 2 * 2 + 1


@pytest.mark.parametrize(
    "bad",
    [
        {"response_cache_backend": "redis"},
        {"response_cache_backend": "memcached"},
        {"response_cache_redis_prefix": "cr:*:"},
        {"response_cache_redis_connections_max": 0},
        {"response_cache_redis_timeout_s": 0},
        {"response_cache_fallback_capacity": 0},
        {"response_cache_redis_retry_s": -1},
    ],
)
def test_cr31_a_response_cache_in_a_redis_that_cannot_be_is_refused_at_the_start(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="response_cache_"):
        load(bad)


def test_cr12_the_url_of_the_response_cache_may_be_in_a_file_or_the_environment_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "url").write_text(f"{URL}\n")
    (tmp_path / "node.toml").write_text(
        f"""response_cache = true
response_cache_backend = "redis"
response_cache_redis_url_file = "{tmp_path}/url"
"""
    )
    of_file, *_ = load(file=tmp_path / "node.toml")
    monkeypatch.setenv("RANVIER_RESPONSE_CACHE_REDIS_URL", URL)
    of_environment, *_ = load()
    for config in (of_file, of_environment):
        assert config.response_cache_redis_url is not None
        assert config.response_cache_redis_url.get_secret_value() == URL
        assert config.masked()["response_cache_redis_url"] == "***"
        assert "hunter2" not in repr(config)
