"""PU4, PU6, PU12 from the router's side: the routes over HTTP, who may use them, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.core.engine_cache.sources.push_credentials import credential, worker_of
from ranvier_py.core.ids import BackendId
from ranvier_py.node.engine_cache import pushed_events as worker_reports
from tests.control.test_control_port import error_of
from tests.control.test_control_port import start as start_port
from tests.node.test_purdue_reports import World, key
from tests.proxy.wire import NO_TLS

CONTROL_KEY = "the-key-of-the-control-port"
OK = {"status": "ok"}


class Served:
    def __init__(self, world: World, url: str) -> None:
        self.world = world
        self.url = url

    def client(self, bearer: str = "") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=10.0, trust_env=False, verify=NO_TLS)

    async def post(self, path: str, body: Any, bearer: str = "") -> httpx.Response:
        async with self.client(bearer) as client:
            return await client.post(path, **{"content" if isinstance(body, bytes) else "json": body})


async def start(nursery: trio.Nursery, at: int = 0, **options: Any) -> Served:
    """A control port, on any free port or at this one, in front of a node's core."""
    world = World()
    port = await start_port(nursery, lambda _: world.reports.routes(), port=at, **options)
    return Served(world, port.url)


@pytest.fixture
async def served(nursery: trio.Nursery) -> Served:
    return await start(nursery)


@pytest.fixture
async def locked(nursery: trio.Nursery) -> Served:
    return await start(nursery, key=CONTROL_KEY)


def hexed(*numbers: int) -> list[str]:
    return [f"{key(number):064x}" for number in numbers]


async def test_pu4_an_eviction_report_as_the_report_has_it_is_a_200_and_counts(served: Served) -> None:
    await served.post("/internal/sync", {"worker_id": "w0", "active_hashes": hexed(1, 2)})
    answer = await served.post("/internal/eviction", {"worker_id": "w0", "evicted_hashes": hexed(1)})
    assert (answer.status_code, answer.json()) == (200, OK)
    assert len(served.world.reports.map) == 1


async def test_pu6_a_snapshot_as_the_report_has_it_is_a_200_and_replaces_what_was_known(served: Served) -> None:
    for hashes in (hexed(1, 2), hexed(2, 3)):
        answer = await served.post("/internal/sync", {"worker_id": "w0", "active_hashes": hashes})
        assert (answer.status_code, answer.json()) == (200, OK)
    assert [*served.world.reports.map.workers[BackendId(0)].hashes] == [key(2), key(3)]
    workers = (await served.client().get("/internal/workers", params={"hash": hexed(3)[0]})).json()["workers"]
    assert [(each["backend"], each["hashes"], each["holds"]) for each in workers] == [("w0", 2, True)]


async def test_px8_a_large_snapshot_is_taken_in_a_little_at_a_time_while_the_node_goes_on(served: Served) -> None:
    hashes = [f"{number:064x}" for number in range(1, 40_001)]
    sizes: dict[int, None] = {}

    async def look() -> None:
        while True:
            sizes[len(served.world.reports.map)] = None
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        answer = await served.post("/internal/sync", {"worker_id": "w0", "active_hashes": hashes})
        nursery.cancel_scope.cancel()
    assert answer.json() == OK
    assert len(served.world.reports.map) == 40_000
    steps = sorted(sizes)
    assert max(later - earlier for earlier, later in pairwise(steps)) < 1000, "others have their turn every 3 ms"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/internal/eviction", b"{", 400, "not JSON"),
        ("/internal/eviction", [], 400, "must be a JSON object"),
        ("/internal/eviction", {"evicted_hashes": []}, 400, "worker_id"),
        ("/internal/eviction", {"worker_id": "w0"}, 400, "evicted_hashes is missing"),
        ("/internal/eviction", {"worker_id": "w0", "evicted_hashes": "ab"}, 400, "must be a list"),
        ("/internal/eviction", {"worker_id": "w0", "evicted_hashes": ["ab"]}, 400, "64 hexadecimal digits"),
        ("/internal/eviction", {"worker_id": "w0", "evicted_hashes": [5]}, 400, "64 hexadecimal digits"),
        ("/internal/eviction", {"worker_id": "w0", "evicted_hashes": ["g" * 64]}, 400, "64 hexadecimal digits"),
        ("/internal/eviction", {"worker_id": "stranger", "evicted_hashes": []}, 404, "no backend"),
        ("/internal/sync", {"worker_id": "w0"}, 400, "active_hashes is missing"),
        ("/internal/sync", {"worker_id": "w0", "active_hashes": [["0" * 64, 16]]}, 400, "64 hexadecimal digits"),
        ("/internal/sync", {"worker_id": "w0", "active_hashes": [], "model": 3}, 400, "model"),
        ("/internal/events", {"worker_id": "stranger"}, 404, "no backend"),
        ("/internal/events", {"worker_id": "w0", "rank": -1}, 400, "rank"),
        ("/internal/events", {"worker_id": "w0", "rank": 1, "ranks": [0]}, 400, "one of ranks"),
        ("/internal/events", {"worker_id": "w0", "messages": [[1, "?"]]}, 400, "base64"),
        ("/internal/events", {"worker_id": "w0", "messages": [1]}, 400, "[number, base64]"),
        ("/internal/events", {"worker_id": "w0", "messages": [["1", ""]]}, 400, "whole numbers"),
    ],
)
async def test_px2_what_makes_no_sense_is_refused_with_words_and_changes_nothing(
    served: Served, path: str, body: Any, status: int, words: str
) -> None:
    await served.post("/internal/sync", {"worker_id": "w0", "active_hashes": hexed(1)})
    found, _, message = error_of(await served.post(path, body))
    assert found == status
    assert words in message
    assert len(served.world.reports.map) == 1


async def test_pu12_without_a_key_nobody_may_report_where_there_is_one(locked: Served) -> None:
    body = {"worker_id": "w0", "active_hashes": hexed(1)}
    assert (await locked.post("/internal/sync", body)).status_code == 401
    assert (await locked.post("/internal/sync", body, "wrong")).status_code == 401
    assert (await locked.post("/internal/sync", body, CONTROL_KEY)).status_code == 200


async def test_pu12_a_workers_credential_speaks_for_that_worker_and_opens_nothing_else(locked: Served) -> None:
    own = credential(CONTROL_KEY, "w0")
    assert (await locked.post("/internal/sync", {"worker_id": "w0", "active_hashes": hexed(1)}, own)).status_code == 200
    erasing = await locked.post("/internal/sync", {"worker_id": "w1", "active_hashes": []}, own)
    assert error_of(erasing)[0] == 403
    async with locked.client(own) as client:
        for path in ("/admin/backends", "/metrics", "/admin/routes"):
            assert (await client.get(path)).status_code == 401
        assert (await client.delete("/admin/backends", params={"url": "w1"})).status_code == 401


def test_pu12_a_credential_is_made_of_the_control_key_and_the_name() -> None:
    assert worker_of(credential(CONTROL_KEY, "http://10.0.0.1:8000"), CONTROL_KEY) == "http://10.0.0.1:8000"
    assert worker_of(credential("another key", "w0"), CONTROL_KEY) is None
    name = credential(CONTROL_KEY, "w0").partition(".")[0]
    for forged in ("", ".", name, f"{name}.", f"{name}.00", "\x00.x", "ä.b", "w" * 5000):
        assert worker_of(forged, CONTROL_KEY) is None


@pytest.mark.parametrize(
    ("path", "name"), [("eviction", "evicted_hashes"), ("sync", "active_hashes"), ("events", "messages")]
)
@pytest.mark.parametrize("item", ["{}", "[]", "1", '""', '"a"', "null", '{"a":1}', "[[[]]]", '[1,"QUFB"]'])
async def test_a_body_of_many_small_parts_is_refused_before_it_is_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, name: str, item: str
) -> None:
    """Parsing 16 MiB of them took seconds."""
    parsed: list[int] = []
    monkeypatch.setattr(worker_reports, "object_of", lambda data: parsed.append(len(data)) or {})
    body = f'{{"worker_id":"w0","{name}":[{",".join([item] * 300_000)}]}}'
    answer = await served.post(f"/internal/{path}", body.encode())
    assert (answer.status_code, parsed) == (400, [])


async def test_the_report_of_a_worker_that_is_no_backend_is_refused_before_it_is_parsed(
    locked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(worker_reports, "object_of", lambda data: parsed.append(len(data)) or {})
    body = {"worker_id": "stranger", "messages": [[1, "QUFB" * 100_000]]}
    answer = await locked.post("/internal/events", body, credential(CONTROL_KEY, "stranger"))
    assert (answer.status_code, parsed) == (404, [])
