"""Two real vLLM engines on a CPU behind two nodes of a cluster: what the nodes predict against what the engines found.

The model has random weights; its tokenizer, its cache, its events and its times are real. The tests go on from each
other: the engines stay, and their caches fill.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.engines.real import Chats, Process, RanvierNode, Served, Share, Vllm, share_of

pytestmark = pytest.mark.engines("vllm")

BLOCKS = 260  # 8,320 tokens of each engine
GOAL = 0.98
CROWDED = 0.95  # where three prompts at once need more than one engine has, what was there goes before its turn comes
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
SETTLED_S = 3.0  # more than an event and a route update of a peer take


class Site:
    """Two engines, and two nodes before them that may be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines = [Vllm(name, BLOCKS, folder) for name in ("a", "b")]
        self.nodes: list[RanvierNode] = []
        self.rows: list[str] = []
        for engine in self.engines:
            engine.ready()

    def processes(self) -> list[Process]:
        return [*(node.process for node in self.nodes), *(engine.process for engine in self.engines)]

    def put_before(self, policy: str) -> None:
        """Two nodes with this policy, in place of those that are there, that hear both engines."""
        for node in self.nodes:
            node.process.end()
        urls = {engine.name: engine.url for engine in self.engines}
        first = RanvierNode("one", urls, self.folder, policy, [])
        self.nodes = [first]
        first.ready(len(urls))
        second = RanvierNode("two", urls, self.folder, policy, [first.gossip])
        self.nodes.append(second)
        second.ready(len(urls))
        for node in self.nodes:
            node.until(
                "/admin/engine-cache", lambda view: [each["level"] for each in view["engines"]] == ["exact"] * len(urls)
            )

    def run(self, chats: Chats, turns: int, users: int = 3) -> list[Served]:
        return trio.run(partial(chats.run, [node.url for node in self.nodes], turns, users=users))

    def counters(self, name: str) -> float:
        return sum(engine.counter(name) for engine in self.engines)

    def send(self, name: str, served: list[Served]) -> Share:
        share = share_of(served)
        self.rows.append(share.row(name))
        return share

    def streams(self) -> list[dict[str, Any]]:
        """Both engines' streams, each from the node that reads it."""
        found = [source for node in self.nodes for source in node.ask("/admin/engine-cache")["sources"]]
        return sorted(found, key=lambda source: str(source["backend"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = Site(tmp_path_factory.mktemp("site"))
    try:
        place.put_before("affinity")
        warm = Chats(1, 3)
        place.run(warm, 1, users=1)
        yield place
    finally:
        print(*("", *place.rows), sep="\n")
        for process in place.processes():
            process.end()


@pytest.fixture(scope="module")
def chats() -> Chats:
    """They have the system prompts of the chats that warmed the engines up."""
    return Chats(1, 12)


def test_two_nodes_predict_what_two_engines_hold(site: Site, chats: Chats) -> None:
    """Each turn of a chat comes by the other node; one node reads each engine's events and tells its peer."""
    hits, queries = site.counters(HITS), site.counters(QUERIES)
    served = site.run(chats, 4)
    share = site.send("chats of four turns", served)
    assert site.counters(HITS) - hits == share.cached, "the engines' own counters say otherwise"
    assert site.counters(QUERIES) - queries == share.prompt_tokens
    assert {each.backend for each in served} == {"a", "b"}
    assert share.cached > share.prompt_tokens // 2
    assert share.precision >= GOAL, share.wrong
    assert share.recall >= GOAL, share.wrong
    assert [source["level"] for source in site.streams()] == ["exact", "exact"], "one reader for each engine"


def test_evictions_are_noticed(site: Site, chats: Chats) -> None:
    """The chats are more than fits by now: what is gone must not be promised, and what is left must."""
    more = Chats(2, 18)
    removed = sum(source["stream"]["counts"]["blocks_removed"] for source in site.streams())
    share = site.send("more than fits", [*site.run(more, 4), *site.run(chats, 2)])
    assert sum(source["stream"]["counts"]["blocks_removed"] for source in site.streams()) > removed + BLOCKS // 2
    assert share.cached > share.prompt_tokens // 3
    assert share.precision >= GOAL, share.wrong
    assert share.recall >= GOAL, share.wrong


def test_a_killed_engine_is_believed_to_be_empty_and_learned_anew(site: Site, chats: Chats) -> None:
    engine = site.engines[0]
    engine.process.end(signal.SIGKILL)
    without = site.run(chats, 1)
    assert {each.backend for each in without} == {"b"}
    engine.start()
    engine.ready()
    for node in site.nodes:
        node.until("/admin/backends", lambda view: all(is_healthy(each) for each in view["backends"]))
        node.until(
            "/admin/engine-cache", lambda view: [each["level"] for each in view["engines"]] == ["exact", "exact"]
        )
    time.sleep(SETTLED_S)
    assert {source["backend"]: source["stream"]["blocks"] for source in site.streams()}["a"] == 0
    served = [*site.run(chats, 1), *site.run(Chats(3, 8), 4)]
    site.send("one engine for all of it", without)
    everywhere = site.send("after a restart", served)
    there = site.send("... by the engine that came back", [each for each in served if each.backend == engine.name])
    assert there.cached > 0, "it was never asked for what it holds"
    assert there.precision >= GOAL, there.wrong
    assert everywhere.precision >= CROWDED, everywhere.wrong
    assert everywhere.recall >= CROWDED, everywhere.wrong


def is_healthy(backend: dict[str, Any]) -> bool:
    return backend["health"] == "healthy" and backend["circuit"] == "closed"


def test_the_first_token_comes_sooner_than_by_turns(site: Site) -> None:
    """The same kind of chats, never seen before, through nodes that place by what is held, and that place by turns."""
    found = {}
    for policy in ("affinity", "round_robin"):
        site.put_before(policy)
        runs = [site.run(Chats(seed, 10, systems=5), 4) for seed in seeds_of(policy)]
        found[policy] = site.send(policy, [each for served in runs for each in served])
    ours, by_turns = found["affinity"], found["round_robin"]
    assert ours.cached / ours.prompt_tokens > by_turns.cached / by_turns.prompt_tokens
    assert ours.first_p50_ms < by_turns.first_p50_ms


def seeds_of(policy: str) -> tuple[int, ...]:
    return (11, 12) if policy == "affinity" else (13, 14)
