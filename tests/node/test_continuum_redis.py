"""Two whole nodes that share Continuum's index through a real Redis. Names begin with the criterion (CR)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import trio

from ranvier_py.config.config_loader import config_of, load
from ranvier_py.core.engine_cache.engine_caches import EngineCaches
from ranvier_py.core.engine_cache.prefix_index.shared_index import SharedIndex
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.placement.kv_score import KvScore
from ranvier_py.io import redis_pool
from ranvier_py.io.redis_index import RedisOptions
from ranvier_py.node.engine_cache.index_parts import IndexedTokenizer
from ranvier_py.node.parts.response_parts import redis_pools_of
from tests.builders.route_tables import route_table
from tests.io.redis_server import needs_redis, pool_of, redis_server
from tests.node.node_lab import DEADLINE_S, Node, turn
from tests.node.test_continuum_tier4 import ENGINE, OPENING, index_parts_of, listening, stats

URL = "redis://somebody:hunter2@127.0.0.1:6379"


async def second(node: Node, **settings: Any) -> Node:
    """Another node in front of the same engines, which reads none of their streams."""
    backends = [f"{url},name=vllm-{number}" for number, url in enumerate(node.engines)]
    return await node.lab.start(backend=backends, policy="kv_score", **settings)


@needs_redis
async def test_cr20_a_node_places_by_what_another_node_has_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ranvier_py.node.engine_cache.index_parts.PREPARE_S", DEADLINE_S
    )  # however busy this machine is
    with redis_server() as server:
        shared: dict[str, Any] = {"kv_index_backend": "redis", "kv_redis_url": server.url}
        async with listening(**shared) as (node, streams):
            other = await second(node, **shared)
            by_ring = (await node.chat(turn("What is cold?"))).headers["x-ranvier-backend"]
            warm = 1 - int(by_ring.removeprefix("vllm-"))
            await stats(node, lambda found: not found["shared"]["fallback_active"])
            await streams.announce(warm, "cache_created", OPENING, 10_000)
            await stats(node, lambda found: found["shared"]["written"] >= 1)
            answer = await other.chat(turn("What is warm?"))  # the first that it sees
            assert answer.headers["x-ranvier-backend"] == f"vllm-{warm}"
            found = await stats(other, lambda found: found["routing_decisions"]["kv_aware"] >= 1)
            assert found["index"]["entry_count"] == 0
            assert found["shared"]["answered"] >= 1
            await other.http.post(f"{other.control}/admin/kv-index/clear")
            await stats(node, lambda found: found["index"]["entry_count"] == 0)


@needs_redis
async def test_cr26_the_state_of_the_shared_index_can_be_seen_and_its_address_without_secrets() -> None:
    with redis_server("--requirepass", "hunter2") as server:
        url = f"unix://:hunter2@{server.socket}"
        async with listening(kv_index_backend="redis", kv_redis_url=url) as (node, streams):
            await stats(node, lambda found: not found["shared"]["fallback_active"])
            await streams.announce(0, "cache_created", "ab", 10)
            found = await stats(node, lambda found: found["shared"]["written"] >= 1)
            assert found["config"]["backend"] == "redis"
            assert len(found["shared"]["generation"]) == 16
            assert found["shared"]["server"] == server.url
            page = (await node.http.get(f"{node.control}/metrics")).text
            for line in (
                "ranvier_kv_index_fallback_active 0.0",
                'ranvier_kv_index_redis_errors_total{type="timeout"} 0.0',
                "ranvier_kv_index_shared_outages_total 0.0",
                "ranvier_kv_index_redis_latency_seconds_count",
            ):
                assert line in page
            pages = [
                (await node.http.get(f"{node.control}/admin/{name}")).text for name in ("kv-index/stats", "config")
            ]
            assert "hunter2" not in page + "".join(pages)


async def test_cr21_a_node_whose_redis_is_not_there_starts_and_places_by_what_it_receives() -> None:
    async with listening(kv_index_backend="redis", kv_redis_url="redis://127.0.0.1:1") as (node, streams):
        await streams.announce(1, "cache_created", OPENING, 10_000)
        await stats(node, lambda found: found["index"]["entry_count"] == 1)
        answer = await node.chat(turn("Where are the atlases?"))
        assert answer.headers["x-ranvier-backend"] == "vllm-1"
        found = await stats(node, lambda found: found["shared"]["errors"]["connection"] >= 1)
        assert found["shared"]["fallback_active"] is True


class Tokenizing:
    """A teacher that takes until `shared` has an answer, or the deadline."""

    def __init__(self, shared: SharedIndex | None) -> None:
        self.shared = shared

    async def tokenize_first(self, prompt: Any, deadline_s: float) -> bool:
        with trio.move_on_after(deadline_s):
            while self.shared is not None and not self.shared.counters.answered:
                await trio.lowlevel.checkpoint()
        return True

    submit = finish = None


class Opened:
    """A prompt with an opening."""

    def opening(self, bytes_max: int, source: str) -> bytes:
        return b"\xab"


@needs_redis
async def test_cr19_redis_is_asked_while_a_prompt_is_tokenized_before_it_is_placed() -> None:
    with redis_server() as server:
        client = server.client()
        client.hset("ranvier:kvidx:routers", "another", 1)
        client.hset("ranvier:kvidx:another:ab", "http://engine", "77 h")
        index_parts = index_parts_of(EngineCaches(route_table(capacity=100), lambda _: 0))
        shared = index_parts.share(pool_of(server.url), RedisOptions().prefix).shared
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(index_parts.run)
                while not shared.sharing:
                    await trio.lowlevel.checkpoint()
                tokenizer_worker = IndexedTokenizer(Tokenizing(shared), index_parts)  # type: ignore[arg-type]
                assert await tokenizer_worker.tokenize_first(Opened(), 0.01)  # type: ignore[arg-type]
                assert shared.counters.asked == 0, "no policy wants it"
                index_parts.join(KvScore())
                assert await tokenizer_worker.tokenize_first(Opened(), DEADLINE_S)  # type: ignore[arg-type]
                assert index_parts.index.holders("ab", time.monotonic())[ENGINE.id].tokens == 77
                nursery.cancel_scope.cancel()


async def test_cr19_a_redis_that_does_not_answer_is_waited_for_until_the_deadline_and_no_longer() -> None:
    """Its first 5 ms are those of the question; nobody answers here, for nobody runs the link."""
    index_parts = index_parts_of(EngineCaches(route_table(capacity=100), lambda _: 0))
    shared = index_parts.share(pool_of("redis://127.0.0.1:1"), RedisOptions().prefix).shared
    index_parts.join(KvScore())
    tokenizer_worker = IndexedTokenizer(Tokenizing(None), index_parts)  # type: ignore[arg-type]
    for sharing in (False, True):  # away: nobody waits at all
        shared.sharing = sharing
        with trio.fail_after(DEADLINE_S):
            assert await tokenizer_worker.tokenize_first(Opened(), 1.0)  # type: ignore[arg-type]
    assert index_parts.index.holders("ab", time.monotonic()) == {}


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_index_backend": "redis"},
        {"kv_index_backend": "memcached"},
        {"kv_redis_prefix": "cr:*:"},
        {"kv_redis_prefix": "cr[a]"},
        {"kv_redis_prefix": "c r"},
        {"kv_redis_prefix": ""},
        {"kv_redis_timeout_s": 0},
    ],
)
def test_cr31_a_shared_index_that_cannot_be_is_refused_at_the_start(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv_"):
        load(bad)


def test_cr31_without_the_client_of_redis_the_node_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_pool, "redis", None)
    config = config_of(backend=["http://127.0.0.1:9"], kv_index_backend="redis", kv_redis_url=URL)
    with pytest.raises(ConfigError, match=r"ranvier-py\[redis\]"):
        redis_pools_of(config)


def test_cr34_the_recipe_of_tier_four_with_redis_loads_and_hides_its_password(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        f"""policy = "kv_score"
kv_index_backend = "redis"
kv_redis_url = "{URL}"
kv_redis_prefix = "cr:kvidx:"
kv_index_entries_max = 500000
kv_index_ttl_s = 900
"""
    )
    config, *_ = load(file=file)
    assert config.redis.prefix == "cr:kvidx:"
    assert config.masked()["kv_redis_url"] == "***"
    assert "hunter2" not in repr(config)
