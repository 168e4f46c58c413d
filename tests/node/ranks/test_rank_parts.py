"""A node places an engine with data-parallel ranks as these, though its URL was given without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from cluster.engine.engine_ranks import RANK_HEADER, Ranks
from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.engine_cache.sources.publishers import of_operator
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import Backend, BackendLimits, ProbeResult, Registry
from ranvier_py.node.ranks.rank_parts import RankParts
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest
from tests.node.node_lab import BETWEEN_LOOKS_S, DEADLINE_S, MODEL, Lab, Node, cluster_lab, opened
from tests.node.ranks.test_ranks_placed import CHATS, start_ranks, talk
from tests.node.test_reload import ReloadLab

URL = "http://engine:8000"
VLLM = ({"id": "m", "owned_by": "vllm"},)


def names(backends: list[dict[str, Any]]) -> list[str]:
    return [each["name"].partition("#")[2] for each in backends]


def question(chat: int) -> list[dict[str, Any]]:
    """A conversation that shares no prefix with another one."""
    return [{"role": "user", "content": f"chat {chat}: " + "words and words " * 40}]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_hits_are_those_of_ranks_that_an_operator_listed_from_the_first_request_on(stream: bool) -> None:
    hits = {}
    for listed in (False, True):
        async with opened(Lab, 0, DEADLINE_S) as place:
            url, ranks = await start_ranks(place, 3)
            node = await place.start(backend=[f"{url}#rank={rank}" for rank in range(3)] if listed else [url])
            hits[listed] = await talk(node, ranks, stream=stream)
            assert all(engine.live.statistics().finished >= CHATS // 3 for engine in ranks.engines)
            backends = await node.backends()
            assert await node.faults() == {}
    assert hits[False] == pytest.approx(hits[True], abs=0.05)
    assert names(backends) == ["rank=0", "rank=1", "rank=2"]


async def test_the_backend_of_the_url_gets_no_request_and_shows_what_stands_for_it() -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, ranks = await start_ranks(place, 2)
        node = await place.start(backend=[f"{url},weight=3,name=big"])
        await talk(node, ranks, stream=False, turns=1)
        whole, *parts = await node.backends()
        assert (whole["placed_as"], whole["ranks"], whole["advice"]) == (["big#rank=0", "big#rank=1"], 2, "")
        assert whole["outcomes"] == {}
        assert [(each["name"], each["url"], each["weight"]) for each in parts] == [
            (f"big#rank={rank}", f"{url}#rank={rank}", 3) for rank in range(2)
        ]
        assert sum(each["outcomes"].get("success", 0) for each in parts) == CHATS
        assert "ranvier_ranks_split_total 1.0" in (await node.http.get(f"{node.control}/metrics")).text


async def test_nodes_that_split_an_engine_each_for_itself_share_the_routes_of_its_ranks(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 0) as place:
        url, _ = await start_ranks(place, 3)  # type: ignore[arg-type]
        first, second = [await place.start(backend=[url]) for _ in range(2)]
        await first.sees(1)
        served = {}
        for chat in range(CHATS):
            answer = await first.chat(question(chat))
            served[chat] = answer.headers["x-ranvier-backend"]
        await until_equal(first, second)
        for chat, backend in served.items():
            answer = await second.chat(question(chat))
            assert (answer.headers["x-ranvier-backend"], answer.headers["x-ranvier-reason"]) == (backend, "affinity")
        assert len(set(served.values())) > 1


async def until_equal(first: Node, second: Node) -> None:
    """Until both have the routes of the other."""
    while (await first.ask("/admin/routes"))["rows"] != (await second.ask("/admin/routes"))["rows"]:  # noqa: ASYNC110  # pages
        await trio.sleep(BETWEEN_LOOKS_S)


async def test_what_an_operator_orders_for_the_url_is_done_to_all_its_ranks() -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        url, _ = await start_ranks(place, 2)
        node = await place.start(backend=[*place.engines, url])
        place_of = {"params": {"url": url}}
        for draining in (True, False):
            answer = await order(node, "drain", url, draining)
            assert answer.status_code == 200, answer.text
            assert [each["draining"] for each in await node.backends()] == [False, draining, draining, draining]
        again = await node.http.post(f"{node.control}/admin/backends", json={"url": url})
        assert again.status_code == 409
        gone = await node.http.delete(f"{node.control}/admin/backends", **place_of)  # type: ignore[arg-type]
        assert gone.status_code == 200, gone.text
        assert [each["url"] for each in await node.backends()] == place.engines


async def order(node: Node, verb: str, url: str, draining: bool) -> httpx.Response:
    body = {"url": url, "draining": draining}
    return await node.http.post(f"{node.control}/admin/backends/{verb}", json=body)


async def test_ranks_that_an_operator_lists_take_the_place_of_those_that_were_found() -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, _ = await start_ranks(place, 2)
        node = await place.start(backend=[url])
        for rank in range(2):
            added = await node.http.post(f"{node.control}/admin/backends", json={"url": f"{url}#rank={rank}"})
            assert added.status_code == 200, added.text
        whole, *parts = await node.backends()
        assert (whole["placed_as"], len(parts)) == ([], 2)


async def test_a_reload_keeps_ranks_with_their_routes_and_removes_them_with_their_url(tmp_path: Path) -> None:
    async with opened(lambda *parts: ReloadLab(*parts, folder=tmp_path), 1, DEADLINE_S) as place:
        url, ranks = await start_ranks(place, 2)
        both = [*place.engines, url]
        node = await place.start(backend=both)
        await talk(node, ranks, stream=False, turns=1)
        before = await node.backends()
        rows = (await node.ask("/admin/routes"))["rows"]

        async def reloaded(**settings: Any) -> list[dict[str, Any]]:
            place.write(**settings)
            answer = await node.http.post(f"{node.control}/admin/reload")
            assert answer.status_code == 200, answer.text
            return await node.backends()

        fields = ("name", "generation", "outcomes", "placed_as")
        after = await reloaded(backend=both, load_factor=3.0)
        assert [[each[name] for name in fields] for each in after] == [
            [each[name] for name in fields] for each in before
        ]
        assert (await node.ask("/admin/routes"))["rows"] >= rows  # answers are learned a little later
        after = await reloaded(backend=[place.engines[0], f"{url},weight=2"])
        assert [each["weight"] for each in after] == [1, 2, 2, 2]
        after = await reloaded(backend=[place.engines[0], f"{url},weight=2"], split_ranks=False)
        assert [each["placed_as"] for each in after] == [[], []]
        assert (await node.chat()).status_code == 200
        after = await reloaded(backend=[place.engines[0], f"{url},weight=2"])
        assert len(after) == 4
        assert [each["url"] for each in await reloaded(backend=place.engines)] == place.engines
        assert await node.faults() == {}


async def test_events_of_a_rank_are_read_for_its_own_backend() -> None:
    anywhere = "tcp://127.0.0.1:0"
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, ranks = await start_ranks(place, 2, kv=KvEndpoints(anywhere, anywhere))
        node = await place.start(backend=[url])

        def are_exact(view: dict[str, Any]) -> bool:
            levels = [(each["level"], each["streams"], each["role"]) for each in view["engines"]]
            return levels[1:] == [("exact", 1, "reader")] * 2 and levels[0][2] == ""

        await talk(node, ranks, stream=False, turns=1)
        view = await node.until("/admin/engine-cache", are_exact)
        assert sum(each["blocks"] for each in view["engines"][1:]) > 0
        assert "its ranks" in view["engines"][0]["why"]


async def test_what_a_reporter_pushes_of_a_rank_by_the_name_of_the_url_is_for_its_own_backend() -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, _ = await start_ranks(place, 2)
        node = await place.start(backend=[f"{url},name=w"])
        for rank in (1, 0, 1):
            body = {"worker_id": "w", "rank": rank, "ranks": [0, 1], "connected": True, "model": MODEL}
            answer = await node.http.post(f"{node.control}/internal/events", json=body)
            assert answer.status_code == 200, answer.text
        rows = (await node.ask("/internal/workers"))["workers"]
        assert sorted(each["backend"] for each in rows) == ["w#rank=0", "w#rank=1"]


class Restarting(Ranks):
    """An engine that ends, and comes back with another number of ranks."""

    is_down = False

    async def handle(self, request: HttpRequest, client: Client) -> None:
        if self.is_down:
            client.respond(500, b"")
        else:
            await super().handle(request, client)

    def become(self, count: int) -> None:
        """Show so many of its ranks from now on, as another process would."""
        self.all = getattr(self, "all", self.engines)
        self.engines = self.all[:count]
        for each in self.all:
            each.live.started_at += 100.0


@pytest.mark.slow
async def test_an_engine_that_comes_back_with_other_ranks_is_placed_as_these() -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, ranks = await start_ranks(place, 3, Restarting)
        ranks.become(2)
        node = await place.start(backend=[url], probe_interval_s=0.05)
        assert len(await node.backends()) == 3
        for count in (3, 1, 2):
            ranks.is_down = True
            await node.until_backend(lambda backend: backend["probe_detail"] == "status 500")
            ranks.become(count)
            ranks.is_down = False
            entries = count + 1 if count > 1 else 1
            await node.until("/admin/backends", lambda view, entries=entries: len(view["backends"]) == entries)
            assert (await node.chat()).status_code == 200
        assert await node.faults() == {}


class Refusing(Ranks):
    """An engine whose page has ranks, and that refuses requests in some words."""

    words = ""
    refused = 0
    refuses: Callable[[HttpRequest], bool] = staticmethod(lambda request: request.method == b"POST")

    async def handle(self, request: HttpRequest, client: Client) -> None:
        if self.refuses(request):
            self.refused += 1
            client.respond(400, b'{"error":{"message":"%b","code":400}}' % self.words.encode())
        else:
            await super().handle(request, client)


def has_rank(request: HttpRequest) -> bool:
    return any(name.lower() == RANK_HEADER for name, _ in request.headers)


@pytest.mark.parametrize(
    "words", ["data_parallel_rank 0 is out of range [0, 1).", "x-data-parallel-rank: no such field"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_refuses_its_ranks_is_asked_without_and_no_client_sees_that(
    words: str, stream: bool
) -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, ranks = await start_ranks(place, 2, Refusing)
        ranks.words, ranks.refuses = words, has_rank
        node = await place.start(backend=[url], probe_interval_s=0.05)
        for _ in range(4):
            answer = await node.chat(stream=stream)
            assert answer.status_code == 200, answer.text
        assert ranks.refused == 1 + stream  # a stream is asked for once with a question for its counts
        (whole,) = await node.backends()
        assert (whole["placed_as"], whole["outcomes"]["success"]) == ([], 4)
        assert "list each rank" in whole["advice"]


@pytest.mark.parametrize("text", ["data_parallel_rank", "Data \\n Parallel rank", "\\u0064ata parallel rank"])
async def test_no_client_ends_the_placing_by_ranks_with_a_body_that_an_error_quotes(text: str) -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        url, ranks = await start_ranks(place, 2, Refusing)
        ranks.words = "bad value: data_parallel_rank"
        node = await place.start(backend=[url])
        body = b'{"model":"lab-model","messages":[{"role":"user","content":"%b"}]}' % text.encode()
        answer = await node.http.post(f"{node.url}/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert len((await node.backends())[0]["placed_as"]) == 2


@dataclass
class Place:
    """A registry with one engine, and what places its ranks."""

    taken: str = ""  # a URL that can't be added
    spec: BackendSpec | None = None

    def __post_init__(self) -> None:
        self.config = Config()
        limits = BackendLimits(backends_max=100)
        self.registry = Registry(limits, rank_refused=lambda rank: self.parts.rank_refused(rank))  # noqa: PLW0108
        self.parts = RankParts(self)  # type: ignore[arg-type]  # as much of a node as it uses
        self.id = self.add_backend(URL, 1.0, "engine", self.spec)
        self.whole = self.registry[self.id]

    def add_backend(self, url: str, weight: float, name: str, spec: BackendSpec | None) -> BackendId:
        self.parts.adding(url)
        if url == self.taken:
            raise BadRequest("no room")
        backend = self.registry.add(url, weight=weight, name=name)
        self.parts.added(backend, spec)
        return backend.id

    def remove_backend(self, name: str) -> None:
        for each in self.registry.ids.known(name).behind.as_ranks:
            self.remove_backend(each.name)
        self.parts.removed(self.registry.remove(name))

    def look(self, placeable: int | None, *, ok: bool = True) -> int:
        """As how many backends the engine is placed after a look at its page."""
        result = ProbeResult(ok, models=("m",), cards=VLLM, placeable=placeable, ranks=placeable)
        self.parts.probed(self.id, result)
        self.registry.changes.probed(self.id, result, 1.0)
        placed = [each.url for each in self.registry if each.behind.rank is not None]
        assert (
            placed
            == [each.url for each in self.whole.behind.as_ranks]
            == [f"{URL}#rank={n}" for n in range(len(placed))]
        )
        pool = [each.name for each in self.registry.pools.pool("m", 1.0).backends]
        assert pool == ([each.name for each in self.whole.behind.as_ranks] or ["engine"])
        return len(pool)


def test_the_first_look_decides_and_later_two_in_a_row_must_agree() -> None:
    place = Place()
    assert [place.look(number) for number in (2, 2, 1, 2, 3, 2, 3, 3, 1, 4, 4, 1, 1, 2)] == (
        [2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 1, 2]
    )


def test_a_look_that_shows_nothing_changes_nothing() -> None:
    place = Place()
    assert [place.look(None), place.look(3), place.look(None), place.look(None)] == [1, 3, 3, 3]
    assert [place.look(1, ok=False), place.look(1), place.look(None), place.look(1)] == [3, 3, 3, 1]


def test_ranks_that_stay_keep_their_backends() -> None:
    place = Place()
    place.look(3)
    first, second, _ = place.whole.behind.as_ranks
    place.look(2)
    place.look(2)
    assert place.whole.behind.as_ranks == (first, second)
    place.look(4)
    place.look(4)
    assert place.whole.behind.as_ranks[:2] == (first, second)


def test_ranks_of_events_count_where_no_page_names_any_and_the_engine_is_vllm() -> None:
    place, two = Place(), of_operator("tcp://*:1", "", 2, "127.0.0.1")
    place.parts.found(place.id, two)
    assert place.whole.behind.as_ranks == ()
    assert place.look(None) == 2
    other = Place()
    other.parts.found(other.id, two)
    other.parts.probed(other.id, ProbeResult(True, models=("m",), cards=({"id": "m", "owned_by": "sglang"},)))
    assert other.whole.behind.as_ranks == ()
    assert other.look(1) == 1


def test_a_refused_rank_is_not_tried_again_until_something_else_is_shown() -> None:
    place = Place()
    place.look(2)
    rank, other = place.whole.behind.as_ranks
    assert place.registry.rank_refused(rank)
    assert place.registry.rank_refused(other)
    assert [place.look(2), place.look(2), place.look(3)] == [1, 1, 3]
    assert place.registry.rank_refused(place.whole.behind.as_ranks[0])
    assert place.look(3) == 1
    place.registry.changes.restart(place.whole, "it came back", 2.0)
    assert place.look(3) == 3


def test_a_refusal_of_a_listed_rank_is_the_operators() -> None:
    place = Place()
    listed = place.registry[place.add_backend(f"{URL}#rank=1", 1.0, "", None)]
    assert not place.registry.rank_refused(listed)
    place.parts.probed(place.id, ProbeResult(True, models=("m",), placeable=2))
    assert place.whole.behind.as_ranks == ()


def test_a_rank_that_an_operator_removed_stays_away() -> None:
    place = Place()
    place.look(2)
    place.remove_backend("engine#rank=1")
    place.parts.probed(place.id, ProbeResult(True, models=("m",), placeable=2))
    assert [each.name for each in place.whole.behind.as_ranks] == ["engine#rank=0"]


def test_where_a_rank_has_no_room_the_engine_stays_one_backend() -> None:
    place = Place(taken=f"{URL}#rank=2")
    assert [place.look(4), place.look(4), place.look(2)] == [1, 1, 2]
    assert [place.look(4), place.look(4), place.look(3), place.look(3)] == [2, 2, 2, 1]


def test_an_engine_with_an_index_by_its_url_stays_one_backend() -> None:
    place = Place(spec=BackendSpec(url=URL, kv_index="http://engine:9000/v1/kv_events"))
    assert place.look(2) == 1


def test_several_processes_are_not_split() -> None:
    place = Place()
    place.look(2)
    place.whole.behind.processes = 2
    for _ in range(2):
        place.parts.probed(place.id, ProbeResult(True, placeable=2))
    assert place.whole.behind.as_ranks == ()


def test_draining_goes_on_in_the_ranks_and_running_requests_end_where_they_began() -> None:
    place = Place()
    place.registry.dispatched(place.whole, 0.0)
    place.registry.drain(URL)
    place.parts.probed(place.id, ProbeResult(True, models=("m",), placeable=2))
    ranks: tuple[Backend, ...] = place.whole.behind.as_ranks
    assert [each.draining for each in ranks] == [True, True]
    assert place.whole.work.own.inflight == 1
    place.registry.drain(URL, draining=False)
    assert [each.draining for each in (place.whole, *ranks)] == [False, False, False]
