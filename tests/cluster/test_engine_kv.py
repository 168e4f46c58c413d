"""The fake engine's KV events: shapes, truth against its own cache, restart, and the page that says where."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
import trio

from cluster.engine.engine_process import config_of, parser, serve
from cluster.engine.engine_ranks import Ranks
from cluster.engine.engine_routes import Engine, EngineConfig
from cluster.engine.engine_text import ByteTokenizer
from cluster.engine.kv_events import ENCODINGS, KvEncoder, Scope
from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.sources.engine_metrics import read_metrics
from ranvier_py.core.engine_cache.sources.event_values import BlocksStored, CacheCleared, Tier
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.core.engine_cache.sources.publishers import Publisher, at_home, read_event_sources, read_server_info
from ranvier_py.replay.engine.block_cache import KeyRemoved, KeysCleared, KeysStored, StateRemoved, StateStored
from ranvier_py.replay.engine.engine_values import EngineLimits
from tests.core.engine_cache import model
from tests.io.engine_events.kv_fakes import Received, reading, until
from tests.proxy.wire import NO_TLS

SMALL = EngineLimits(cache_tokens=640, prefill_tokens_per_s=1e6, decode_s=0.0)
IDS = np.arange(32, dtype=np.uint32)
EVENTS = [KeysStored((5, 2**64 - 2), 0, IDS), KeyRemoved(5), KeyRemoved(2**64 - 2), KeysCleared()]


def reported(encoding: str, scope: Scope = Scope()) -> Any:  # noqa: B008  # a tuple
    encoder = KvEncoder(encoding, 16)
    encoder.note(5, scope)
    return msgpack.unpackb(encoder.batch(EVENTS, 1.5))


def test_the_shape_is_that_of_vllm() -> None:
    """As sent by vLLM 0.32."""
    at, events, rank = reported("map")
    assert (at, rank) == (1.5, 0)
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [5, 2**64 - 2],
        "parent_block_hash": None,
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert events[1] == {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0}
    assert events[3] == {"type": "AllBlocksCleared"}


def test_the_older_shape_is_an_array() -> None:
    events = reported("array", Scope("french", "pepper"))[1]
    keys = [["french", "pepper"], ["french"]]
    assert events[0][:5] == ["BlockStored", [5, 2**64 - 2], None, list(range(32)), 16]
    assert events[0][5:] == [None, "GPU", "french", keys]
    assert events[1:] == [["BlockRemoved", [5], "GPU"], ["BlockRemoved", [2**64 - 2], "GPU"], ["AllBlocksCleared"]]


def test_sglang_signs_its_hashes_and_removes_many_at_once() -> None:
    events = reported("sglang", Scope("", "pepper"))[1]
    assert events[0]["block_hashes"] == [5, -2]
    assert events[0]["cache_salt"] == "pepper"
    assert "extra_keys" not in events[0]
    assert events[1] == {"type": "BlockRemoved", "block_hashes": [5, -2], "medium": "GPU"}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_shape_is_read_without_a_rest(encoding: str) -> None:
    decoder = EventDecoder()
    encoder = KvEncoder(encoding, 16)
    batch = decoder.decode(encoder.batch(EVENTS, 1.5))
    assert len(batch.events) == (3 if encoding == "sglang" else 4)
    assert (decoder.counters.unread, decoder.counters.fields_skipped, decoder.counters.tags_skipped) == (0, 0, 0)


STATES = [KeysStored((5, 6), 0, IDS), StateStored((5, 6), 0, IDS), StateRemoved(6), KeyRemoved(6)]


def test_a_checkpoint_is_a_block_in_each_group_of_states() -> None:
    """As vLLM 0.32 sends it: the groups of recurrent layers first, named as attention's block is, its tokens all of
    those since the checkpoint before."""
    _, events, _ = msgpack.unpackb(KvEncoder("map", 16, state_groups=2).batch(STATES, 1.5))
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert [(each["group_idx"], each["kv_cache_spec_kind"], each["block_hashes"]) for each in stored] == [
        (2, "full_attention", [5, 6]),
        (0, "mamba", [6]),
        (1, "mamba", [6]),
    ]
    assert [each["token_ids"] for each in stored] == [list(range(32))] * 3
    removed = [(each["group_idx"], each["block_hashes"]) for each in events if each["type"] == "BlockRemoved"]
    assert removed == [(0, [6]), (1, [6]), (2, [6])]


def test_groups_stand_in_the_older_shape_too_and_sglang_is_silent_of_states() -> None:
    events = msgpack.unpackb(KvEncoder("array", 16, state_groups=1).batch(STATES, 1.5))[1]
    assert [event[9:] for event in events if event[0] == "BlockStored"] == [[1, "full_attention"], [0, "mamba"]]
    assert [event[3] for event in events if event[0] == "BlockRemoved"] == [0, 1]
    silent = msgpack.unpackb(KvEncoder("sglang", 16).batch(STATES, 1.5))[1]
    assert [event["block_hashes"] for event in silent] == [[5, 6], [6]]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_states_are_read_without_a_rest(encoding: str) -> None:
    decoder = EventDecoder()
    batch = decoder.decode(KvEncoder(encoding, 16, state_groups=1).batch(STATES, 1.5))
    assert [event.group for event in batch.events if not isinstance(event, CacheCleared)] == [1, 0, 0, 1]
    assert (decoder.counters.unread, decoder.counters.fields_skipped, decoder.counters.tags_skipped) == (0, 0, 0)


# --- a running engine -----------------------------------------------------------------------------------------------


class Lab:
    def __init__(self, engine: Engine, client: httpx.AsyncClient, received: Received) -> None:
        self.engine, self.client, self.received = engine, client, received
        self.decoder = EventDecoder()

    async def ask(self, prompt: list[int], **fields: Any) -> int:
        """Returns how much of it the engine had."""
        body = {"model": "lab", "prompt": prompt, "max_tokens": 5, **fields}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def received_all(self) -> None:
        assert self.engine.kv is not None
        await until(lambda: self.received.machine.next_seq == self.engine.kv.publisher.next_number)

    def residency(self) -> Residency:
        """All that was told, applied anew."""
        residency = Residency(model.hasher(), model.namespace_of)
        for _, payload in self.received.applied:
            for event in self.decoder.decode(payload).events:
                residency.apply(event)
            while not residency.settle().complete:
                pass
        return residency

    def table(self) -> dict[int, int]:
        """How many copies of each block the engine has."""
        cache = self.engine.live.model.cache
        return {key: 1 + len(cache._copies.get(key, ())) for key in cache._by_key}


@asynccontextmanager
async def lab(encoding: str = "map", limits: EngineLimits = SMALL) -> AsyncIterator[Lab]:
    endpoints = KvEndpoints(
        "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", encoding=encoding, replays_topic=encoding == "map"
    )
    config = EngineConfig("e1", ("lab", "adapter"), limits, limits.cache_tokens, kv=endpoints)
    engine = Engine(config, ByteTokenizer())
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(serve, engine, "127.0.0.1", 0)
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", verify=NO_TLS) as client:
                publisher = await found(client, encoding)
                async with reading(publisher) as received:
                    await until(lambda: received.level is Level.EXACT)
                    yield Lab(engine, client, received)
            nursery.cancel_scope.cancel()


async def found(client: httpx.AsyncClient, encoding: str) -> Publisher:
    read, path = (
        (read_server_info, "/server_info") if encoding == "sglang" else (read_event_sources, "/kv_event_sources")
    )
    sources = at_home(read((await client.get(path)).content), "127.0.0.1", ["127.0.0.1"])
    assert sources.refused == ()
    assert len(sources.publishers) == 1
    return sources.publishers[0]


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_whoever_listens_knows_the_engine_block_by_block(encoding: str) -> None:
    """Through evictions, and with prompts that share their beginnings."""
    async with lab(encoding) as engine:
        for number in range(30):
            await engine.ask([*range(number % 4, number % 4 + 48), *range(1000 * number, 1000 * number + 30)])
        await engine.received_all()
        assert engine.engine.live.model.cache.evicted_blocks > 0
        assert engine.residency().copies(Tier.GPU) == engine.table()
        counts = engine.decoder.counters
        assert (counts.unread, counts.refused, counts.tags_skipped, counts.fields_skipped) == (0, 0, 0, 0)


async def test_a_hybrid_engine_reports_where_it_will_go_on() -> None:
    """What three questions about one document find: nothing, nothing but the junction to keep, and that."""
    limits = replace(SMALL, cache_tokens=16_000, block_size=80, cache="vllm_align")
    async with lab(limits=limits) as engine:
        document = list(range(250))
        assert [await engine.ask([*document, *[number] * 100]) for number in range(3)] == [0, 0, 240]
        page = (await engine.client.get("/metrics")).content
        await engine.received_all()
        events = [event for _, payload in engine.received.applied for event in engine.decoder.decode(payload).events]
        stored = [event for event in events if isinstance(event, BlocksStored)]
        dense = next(event for event in stored if event.kind == "full_attention")
        assert (dense.group, dense.block_tokens, len(dense.hashes)) == (6, 80, 4)
        junctions = [event.group for event in stored if event.kind == "mamba" and event.hashes == dense.hashes[2:3]]
        assert junctions == list(range(6)), "one block in each group"
        assert read_metrics(page).hybrid is True


async def test_salt_and_adapter_are_reported() -> None:
    async with lab() as engine:
        await engine.ask(list(range(40)), cache_salt="pepper")
        await engine.ask(list(range(40)), model="adapter")
        await engine.received_all()
        tiers = engine.residency().tiers()
        for scope in (model.Scope(None, None, "pepper"), model.Scope("adapter", None, None)):
            assert model.fingerprint(list(range(32)), scope) in tiers
        assert model.fingerprint(list(range(32))) not in tiers


async def test_messages_that_were_lost_are_reported_again() -> None:
    async with lab() as engine:
        assert (await engine.client.post("/admin/kv", json={"lose": 2})).status_code == 200
        for number in range(6):
            await engine.ask(list(range(100 * number, 100 * number + 40)))
        await engine.received_all()
        assert engine.received.machine.counters.repaired >= 1
        assert engine.residency().copies(Tier.GPU) == engine.table()
        assert (await engine.client.post("/admin/kv", json={"lose": "many"})).status_code == 400


@pytest.mark.parametrize("encoding", ["map", "sglang"])
async def test_a_restarted_engine_counts_from_zero(encoding: str) -> None:
    async with lab(encoding) as engine:
        for number in range(5):
            await engine.ask(list(range(100 * number, 100 * number + 40)))
        await engine.received_all()
        assert (await engine.client.post("/admin/restart")).status_code == 200
        await until(lambda: engine.received.counters.connects == 2)
        await engine.ask(list(range(7, 47)))
        await engine.received_all()
        assert engine.residency().copies(Tier.GPU) == engine.table()
        assert len(engine.table()) == 2


async def test_a_cleared_cache_is_reported() -> None:
    async with lab() as engine:
        await engine.ask(list(range(40)))
        await engine.client.post("/admin/clear")
        await engine.received_all()
        assert engine.residency().copies(Tier.GPU) == {} == engine.table()


def test_the_options_of_the_command_state_where() -> None:
    arguments = parser().parse_args(["--kv-events", "tcp://*:0", "--kv-replay", "tcp://*:0", "--kv-encoding", "array"])
    kv = config_of(arguments).kv
    assert kv == KvEndpoints("tcp://*:0", "tcp://*:0", encoding="array", replays_topic=False)
    assert config_of(parser().parse_args([])).kv is None
    assert config_of(parser().parse_args([])).limits.block_size == 16
    hybrid = config_of(parser().parse_args(["--cache", "vllm_all", "--hybrid-model", "qwen3.5-9b"])).limits
    assert (hybrid.cache, hybrid.hybrid_model, hybrid.block_size) == ("vllm_all", "qwen3.5-9b", 528)
    with pytest.raises(ValueError, match="needs --kv-events"):
        config_of(parser().parse_args(["--kv-replay", "tcp://*:0"]))


async def test_an_engine_without_events_has_no_page_about_them() -> None:
    engine = Engine(EngineConfig("e1", ("lab",), SMALL, 640), ByteTokenizer())
    async with trio.open_nursery() as nursery:
        host, port = await nursery.start(serve, engine, "127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", verify=NO_TLS) as client:
            assert (await client.get("/kv_event_sources")).status_code == 404
        nursery.cancel_scope.cancel()


async def test_each_rank_publishes_its_own_events_under_its_number() -> None:
    ranks = Ranks(config_of(parser().parse_args(["--kv-events", "tcp://127.0.0.1:0"])), ByteTokenizer(), 2)
    body = {"model": "lab-model", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 5}
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(serve, ranks, "127.0.0.1", 0)
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", verify=NO_TLS) as client:
                sources, _ = read_event_sources((await client.get("/kv_event_sources")).content)
                await client.post("/v1/chat/completions", json=body, headers={"x-data-parallel-rank": "1"})
            nursery.cancel_scope.cancel()
    assert [publisher.rank for publisher in sources] == [0, 1]
    assert [engine.kv.publisher.published for engine in ranks.engines if engine.kv] == [0, 1]
