"""Whole nodes in one process and engines that publish KV events: each engine is read by one node, and known to all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.node.node_lab import ClusterLab, Node, cluster_lab
from tests.node.test_engine_event_parts import LONG, MODEL, start_engine

DEADLINE_S = 40
ENGINES = 3


@asynccontextmanager
async def lab(folder: Path, cache_tokens: int = 20_000, buffer_messages: int = 10_000) -> AsyncIterator[ClusterLab]:
    async with cluster_lab(folder, engines=0, deadline_s=DEADLINE_S) as place:
        for _ in range(ENGINES):
            place.engines += [await start_engine(place.nursery, "map", buffer_messages, cache_tokens=cache_tokens)]
        yield place


async def read_by_one_each(nodes: Sequence[Node]) -> list[int]:
    """Waits until it is so and all nodes know all engines exactly. Which node reads which engine, by number."""
    while True:
        views = [(await node.ask("/admin/engine-cache"))["engines"] for node in nodes]
        readers = [[view[engine]["role"] == "reader" for view in views] for engine in range(ENGINES)]
        if all(line["level"] == "exact" for view in views for line in view) and all(map(one, readers)):
            return [marks.index(True) for marks in readers]
        await trio.sleep(0.05)


def one(marks: list[bool]) -> bool:
    return marks.count(True) == 1


async def until_believed(node: Node, wanted: Callable[[list[int]], bool]) -> None:
    """Waits until the node believes so many tokens of the long prompt to be at the engines."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": LONG * 8}]}
    while True:
        candidates = (await node.http.post(f"{node.control}/explain", json=body)).json()["candidates"]
        if wanted([candidate["matched_tokens"] for candidate in candidates]):
            return
        await trio.sleep(0.02)


@pytest.mark.slow
async def test_each_engine_is_read_by_one_node_and_by_another_when_that_one_goes(tmp_path: Path) -> None:
    async with lab(tmp_path) as place:
        nodes = await place.cluster(3)
        owners = await read_by_one_each(nodes)
        nodes.pop(owners[0]).scope.cancel()
        await read_by_one_each(nodes)


@pytest.mark.slow
async def test_who_stood_by_reads_on_exactly_what_the_engine_can_not_replay(tmp_path: Path) -> None:
    """The one who read is killed; then, once another stands by, so is the next: all routers are replaced in turn."""
    async with lab(tmp_path, buffer_messages=4) as place:
        nodes = await place.cluster(3)
        await read_by_one_each(nodes)
        for _ in range(2):
            for number in range(8):
                for url in place.engines:
                    await ask(place, url, f"{number}. " + LONG * 2)
            await until_stood_by(nodes)
            owners = await read_by_one_each(nodes)
            nodes.pop(owners[0]).scope.cancel()
            nodes.append(await place.start())
        await until_stood_by(nodes)
        await read_by_one_each(nodes)


async def until_stood_by(nodes: Sequence[Node]) -> None:
    """Waits until those who stand by know all that readers know, exactly."""
    while True:
        views = [await node.ask("/admin/engine-cache") for node in nodes]
        read, kept = ([one["stream"] for view in views for one in view[role]] for role in ("sources", "standby"))
        blocks = [sum([one["blocks"] for one in each if one["level"] == "exact"]) for each in (read, kept)]
        if blocks[0] == blocks[1] > 0 and len(read) == len(kept) == ENGINES:
            return
        await trio.sleep(0.05)


@pytest.mark.slow
async def test_what_an_engine_drops_is_forgotten_by_nodes_that_do_not_read_it(tmp_path: Path) -> None:
    async with lab(tmp_path, cache_tokens=1200) as place:
        nodes = await place.cluster(2)
        await read_by_one_each(nodes)
        for url in place.engines:
            await ask(place, url, LONG * 8)
        for node in nodes:
            await until_believed(node, lambda tokens: min(tokens) >= 64)  # the engines said so: no node served it
        for url in place.engines:
            for number in range(12):
                await ask(place, url, f"{number}. " + LONG * 8)  # the cache has room for a few
        for node in nodes:
            await until_believed(node, lambda tokens: max(tokens) == 0)


async def ask(place: ClusterLab, url: str, text: str) -> None:
    """Past all nodes."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    assert (await place.http.post(f"{url}/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.slow
async def test_a_node_that_joins_takes_over_what_is_its_own_and_nothing_is_lost(tmp_path: Path) -> None:
    async with lab(tmp_path) as place:
        first = await place.start()
        assert await read_by_one_each([first]) == [0] * ENGINES
        second = await place.start()
        for node in (first, second, first):
            await node.until("/admin/cluster", all_with_their_owners)
        await read_by_one_each([first, second])


def all_with_their_owners(view: dict[str, Any]) -> bool:
    """Whether each engine has a reader and a standby, as this node sees it, and both know it exactly."""
    streams = view["streams"].values()
    return len(streams) == ENGINES and all(
        stream["subscribers"] == dict.fromkeys((stream["reader"], stream["standby"]), "exact")
        and stream["ours"] == (stream["reader"] == view["session"])
        for stream in streams
    )
