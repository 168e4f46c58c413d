"""A node before an engine with data-parallel ranks, which have one port and a cache each."""

from __future__ import annotations

import math
from functools import partial
from typing import TypeVar

import pytest

from cluster.engine.engine_process import serve as serve_engine
from cluster.engine.engine_ranks import Ranks
from cluster.engine.engine_routes import EngineConfig
from cluster.engine.engine_text import load_tokenizer
from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.replay.engine.engine_values import EngineLimits
from tests.node.node_lab import MODEL, Lab, Node, opened, turn
from tests.node.node_lab import chat as chat_body
from tests.proxy.wire import GOOD, Scripted

CHATS, TURNS = 8, 4


Kind = TypeVar("Kind", bound=Ranks)


async def start_ranks(
    place: Lab,
    count: int,
    kind: type[Kind] = Ranks,  # type: ignore[assignment]
    kv: KvEndpoints | None = None,
) -> tuple[str, Kind]:
    limits = EngineLimits(prefill_tokens_per_s=math.inf, decode_s=0.001)
    config = EngineConfig(name="engine", models=(MODEL,), limits=limits, tokens_max=200_000, kv=kv)
    ranks = kind(config, load_tokenizer("bytes"), count)
    host, port = await place.nursery.start(partial(serve_engine, ranks, "127.0.0.1", 0))
    return f"http://{host}:{port}", ranks


async def open_only(node: Node, rank: int | None) -> None:
    """Let only this rank get requests; None: all do."""
    for each in await node.backends():
        _, is_rank, number = each["url"].partition("#rank=")
        draining = bool(is_rank) and rank not in (None, int(number))
        if each["draining"] is not draining:
            asked = {"url": each["url"], "draining": draining}
            assert (await node.http.post(f"{node.control}/admin/backends/drain", json=asked)).is_success


async def talk(node: Node, ranks: Ranks, *, stream: bool, turns: int = TURNS) -> float:
    """The share of the prompts' tokens that the engine found in its caches, over chats that take turns. They begin at
    one rank after the other, where alone they can: which rank gets an unknown chat is a matter of hashes."""
    for length in range(1, turns + 1):
        for chat in range(CHATS):
            await open_only(node, chat % len(ranks.engines) if length == 1 else None)
            messages = turn(
                *[f"chat {chat}, message {number}: " + "words and words " * 40 for number in range(2 * length - 1)]
            )
            messages[0]["content"] = f"You are helper {chat}. " * 40
            answer = await node.chat(messages, stream=stream)
            assert answer.status_code == 200, answer.text
    all_of = [engine.live.statistics() for engine in ranks.engines]
    prompt_tokens = sum(each.prompt_tokens for each in all_of)  # 0 if another engine got all of a few chats
    return sum(each.cached_tokens for each in all_of) / prompt_tokens if prompt_tokens else 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_each_turn_reaches_the_rank_that_holds_its_chat(stream: bool) -> None:
    async with opened(Lab, 0, 30) as place:
        url, ranks = await start_ranks(place, 3)
        node = await place.start(backend=[f"{url}#rank={rank}" for rank in range(3)])
        hits = await talk(node, ranks, stream=stream)
        assert all(engine.live.statistics().finished >= CHATS // 3 for engine in ranks.engines)
        assert hits > 0.5  # of four turns, the first finds nothing
        backends = await node.backends()
        assert [each["url"] for each in backends] == [f"{url}#rank={rank}" for rank in range(3)]
        assert {(each["ranks"], each["advice"]) for each in backends} == {(1, "")}


async def test_a_client_chooses_no_rank_where_the_node_does() -> None:
    engine, chosen = Scripted(GOOD), {"x-data-parallel-rank": "7"}
    async with opened(Lab, 0, 30) as place:
        url = await place.listen(engine.serve)
        node = await place.start(backend=[f"{url}#rank=3"])
        body = chat_body(data_parallel_rank=7)
        assert (await place.http.post(f"{node.url}/v1/chat/completions", content=body, headers=chosen)).is_success
    assert (
        engine.heads[0].lower().count(b"x-data-parallel-rank") == engine.heads[0].count(b"x-data-parallel-rank: 3") == 1
    )
    assert b"data_parallel_rank" not in engine.bodies[0]


async def test_an_engine_with_ranks_as_one_backend_is_reported_with_the_remedy() -> None:
    async with opened(Lab, 0, 30) as place:
        url, _ = await start_ranks(place, 2)
        node = await place.start(backend=[url], split_ranks=False)
        await node.until_backend(lambda backend: backend["ranks"] == 2)
        (backend,) = await node.backends()
        assert f"{url}#rank=0 to {url}#rank=1" in backend["advice"]
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_backend_ranks{backend="' in page
        for rank in range(2):
            added = await node.http.post(f"{node.control}/admin/backends", json={"url": f"{url}#rank={rank}"})
            assert added.status_code == 200, added.text
        refused = await node.http.post(f"{node.control}/admin/backends", json={"url": f"{url}#rank=x"})
        assert refused.status_code == 400
        assert "rank=N" in refused.text
