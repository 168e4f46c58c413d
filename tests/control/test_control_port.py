from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ranvier_py.config.config_loader import read_backend
from ranvier_py.config.control_settings import ControlSettings
from ranvier_py.control import control_server
from ranvier_py.control.control_port import make_app
from ranvier_py.control.control_server import DeadlineStream, serve_app
from ranvier_py.control.response_admin import invalidate_responses
from ranvier_py.core.errors import BadRequest, NoBackend, NotFound
from ranvier_py.core.metrics import Sample
from tests.proxy.wire import NO_TLS

KEY = "the-key-of-the-control-port"
DEADLINE_S = 10.0
HUGE_CHARACTERS = 32 * 1024 * 1024  # more than the socket buffers of loopback ever take


class FakePort:
    """A node that is nothing but its control port. Says no the way the real one does."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, Any]] = {}
        self.explained: list[bytes] = []
        self.readiness = (False, "no backend may be used")
        self.metric_names = "ranvier"
        self.bug: Exception | None = None
        self.lonely = False
        self.huge_asked = trio.Event()
        self.worker_reports: Any = None

    def backends(self) -> Sequence[Mapping[str, Any]]:
        if self.bug is not None:
            raise self.bug
        return list(self.known.values())

    def add_backend(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        spec = read_backend(fields)
        self.known[spec.url] = {**spec.model_dump(), "draining": False}
        return self.known[spec.url]

    def remove_backend(self, url: str) -> Mapping[str, Any]:
        if url not in self.known:
            raise NotFound(f"no backend {url}")
        return self.known.pop(url)

    def drain_backend(self, url: str, draining: bool) -> Mapping[str, Any]:
        if url not in self.known:
            raise NotFound(f"no backend {url}")
        self.known[url]["draining"] = draining
        return self.known[url]

    def routes(self) -> Mapping[str, Any]:
        return {"routes": 3, "capacity": 10, "depths": {16: 2}}

    def route_tree(self, fingerprint: int, limit: int) -> Sequence[Mapping[str, Any]]:
        return [{"fingerprint": f"{fingerprint:016x}", "tokens": 16}][:limit] if fingerprint == 0xABC else []

    def prefix_routing(self) -> Mapping[str, Any]:
        return {"enabled": False}

    def clients(self) -> Mapping[str, Any]:
        return {"clients": []}

    def response_cache(self) -> Mapping[str, Any]:
        return {"enabled": False}

    async def reload(self) -> Mapping[str, Any]:
        raise NotFound("this node was started without a configuration that could be read again")

    async def invalidate_responses(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        return await invalidate_responses(None, wanted)

    async def explain(self, body: bytes, headers: object) -> Mapping[str, Any]:
        if body == b"nobody":
            raise NoBackend("no backend serves this")
        if not body.startswith(b"{"):
            raise BadRequest("the body is not JSON")
        self.explained.append(body)
        return {"chosen": "a", "reason": "affinity", "candidates": []}

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        if limit == 999:
            self.huge_asked.set()
            return [{"text": "x" * HUGE_CHARACTERS}]
        return [{"reason": "affinity"}] * min(limit, 60)

    def ready(self) -> tuple[bool, str]:
        return self.readiness

    def metrics(self) -> Sequence[Sample]:
        return [Sample("requests", "counter", "Requests.", 5)]

    def engine_caches(self) -> Mapping[str, Any]:
        return {"engines": [{"name": "a", "level": "exact"}]}

    def calibration(self) -> Mapping[str, Any]:
        return {"route_precision": 0.5}

    def cluster(self) -> Mapping[str, Any]:
        if self.lonely:
            raise NotFound("this node does not gossip")
        return {"name": "n1", "members": []}

    async def route_sums(self) -> bytes:
        return b"\x01" * 8

    def config(self) -> Mapping[str, Any]:
        return {"listen": "0.0.0.0:8080", "control_key": "***"}


class Served:
    """A control port in front of a fake node, and how to end it."""

    def __init__(self, port: FakePort, url: str, shutdown: trio.Event, ended: trio.Event) -> None:
        self.port = port
        self.url = url
        self.shutdown = shutdown
        self.ended = ended

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, trust_env=False, verify=NO_TLS, **options)


async def start(nursery: trio.Nursery, worker_reports: Any = None, **options: Any) -> Served:
    """The real server, on port 0 unless it is given one."""
    port, shutdown, ended = FakePort(), trio.Event(), trio.Event()
    port.worker_reports = worker_reports
    control: Any = port
    settings = ControlSettings(**{"host": "127.0.0.1", "port": 0, **options})

    async def run(task_status: trio.TaskStatus[str]) -> None:
        await serve_app(make_app(control, settings), settings, shutdown=shutdown, task_status=task_status)
        ended.set()

    return Served(port, await nursery.start(run), shutdown, ended)


@pytest.fixture
async def served(nursery: trio.Nursery) -> Served:
    return await start(nursery)


@pytest.fixture
async def locked(nursery: trio.Nursery) -> Served:
    return await start(nursery, key=KEY)


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """(status, code, message), after checking that the error has OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["message"]


# --- health and metrics ---------------------------------------------------------------------------------------------


async def test_a_node_is_alive_before_it_is_ready(served: Served) -> None:
    async with served.client() as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        response = await client.get("/readyz")
        assert (response.status_code, response.json()["reason"]) == (503, "no backend may be used")
        served.port.readiness = (True, "")
        assert (await client.get("/readyz")).json() == {"ready": True, "reason": ""}


# --- backends -------------------------------------------------------------------------------------------------------


async def test_a_backend_to_be_removed_may_be_named_in_the_query_or_in_the_body(served: Served) -> None:
    async with served.client() as client:
        for url in ("http://a:1", "http://b:1"):
            await client.post("/admin/backends", json={"url": url})
        assert (await client.delete("/admin/backends", params={"url": "http://a:1"})).status_code == 200
        assert (await client.request("DELETE", "/admin/backends", json={"url": "http://b:1"})).status_code == 200
    assert served.port.known == {}


async def test_where_an_added_engine_publishes_its_events_can_be_set(served: Served) -> None:
    body = {"url": "http://a:1", "kv_events": "tcp://*:5557", "kv_replay": "tcp://*:5657", "kv_ranks": 2}
    async with served.client() as client:
        added = (await client.post("/admin/backends", json=body)).json()
        assert {name: added[name] for name in body} == body
        off = (await client.post("/admin/backends", json={"url": "http://b:1", "kv_events": "off"})).json()
        assert (off["kv_events"], "kv_replay" in off) == ("off", False)


async def test_all_that_is_wrong_with_a_backend_is_reported_at_once(served: Served) -> None:
    body = {"weight": 0, "name": 5, "kv_replay": "nowhere", "kv_ranks": 999, "kv_event": "tcp://*:1"}
    async with served.client() as client:
        found = error_of(await client.post("/admin/backends", json=body))
    assert found[0] == 400
    assert [line.partition(" ")[0] for line in found[2].splitlines()] == [
        *("url:", "weight:", "name:", "kv_replay:", "kv_ranks:", "kv_event:", "kv_replay")
    ]
    assert served.port.known == {}


BAD_REQUESTS = [
    ("POST", "/admin/backends", b"", 400, "the body is empty, expected a JSON object with url, weight, name"),
    ("POST", "/admin/backends", b"{", 400, "not JSON"),
    ("POST", "/admin/backends", b"\xff\xfe", 400, "not JSON"),
    ("POST", "/admin/backends", b"[]", 400, "JSON object"),
    ("POST", "/admin/backends", b"{}", 400, "url: is missing"),
    ("POST", "/admin/backends", b'{"url": 5}', 400, "url: must be a valid string"),
    ("POST", "/admin/backends", b'{"url": "nonsense"}', 400, "must be a URL"),
    ("POST", "/admin/backends", b'{"url": "http://10.0.0..1:8000"}', 400, "url: the host must have no empty label"),
    ("POST", "/admin/backends", b'{"url": "http://10.0.0.256:8000"}', 400, "no IPv4 address"),
    ("POST", "/admin/backends", b'{"url": "http://%s.b"}' % (b"a" * 64), 400, "at most 63 characters"),
    (
        "POST",
        "/admin/backends",
        b'{"url": "http://a", "kv_events": "tcp://a..b:5557"}',
        400,
        "kv_events: the host must",
    ),
    ("POST", "/admin/backends", b'{"url": "http://a", "kv_index": "http://a..b"}', 400, "kv_index: the host must"),
    ("POST", "/admin/backends", b'{"url": "http://a", "weight": "2"}', 400, "weight"),
    ("POST", "/admin/backends", b'{"url": "http://a", "weight": 1e999}', 400, "infinity"),
    ("POST", "/admin/backends", b'{"url": "http://a", "name": null}', 400, "name"),
    (
        "POST",
        "/admin/backends",
        b'{"url": "http://a", "wieght": 2}',
        400,
        "wieght: no such key; did you mean weight?",
    ),
    ("POST", "/admin/backends", b'{"url": "http://a", "kv_ranks": true}', 400, "kv_ranks: must be a valid integer"),
    ("DELETE", "/admin/backends", b"", 400, "expected a JSON object with url"),
    ("DELETE", "/admin/backends?url=http://x", b"", 404, "no backend http://x"),
    ("DELETE", "/admin/backends", b"{}", 400, "url is missing"),
    ("POST", "/admin/backends/drain", b'{"url": "http://x"}', 404, "no backend http://x"),
    ("POST", "/admin/backends/drain", b'{"url": "http://x", "draining": 1}', 400, "draining"),
    ("POST", "/admin/backends/drain", b'{"url": "http://x", "drain": true}', 400, "drain: there is no such member"),
    ("POST", "/add_worker", b"", 400, "?url="),
    ("POST", "/add_worker?url=nonsense", b"", 400, "must be a URL"),
    ("POST", "/add_worker?url=http://a..b", b"", 400, "no empty label"),
    ("POST", "/add_worker?url=http://[fe80::1%25eth0]", b"", 400, "without a zone"),
    ("POST", "/remove_worker?url=http://x", b"", 404, "no backend"),
    ("GET", "/admin/routes/xyz", b"", 400, "hexadecimal"),
    ("GET", "/admin/routes/0", b"", 400, "hexadecimal"),
    ("GET", "/admin/routes/11112222333344445", b"", 400, "hexadecimal"),
    ("GET", "/admin/routes/abcd", b"", 404, "000000000000abcd"),
    ("GET", "/admin/routes/abc?limit=-1", b"", 400, "limit"),
    ("GET", "/admin/decisions?limit=ten", b"", 400, "limit"),
    ("GET", "/admin/decisions?limit=0", b"", 400, "limit"),
    ("POST", "/explain", b"no", 400, "not JSON"),
    ("POST", "/explain", b"nobody", 503, "no backend serves this"),
    ("GET", "/nowhere", b"", 404, "/nowhere"),
    ("GET", "/add_worker?url=http://a", b"", 405, "GET /add_worker"),
]


async def test_bad_input_is_refused_with_a_reason_and_never_a_500(served: Served) -> None:
    async with served.client() as client:
        for method, path, body, status, words in BAD_REQUESTS:
            found = error_of(await client.request(method, path, content=body))
            assert found[0] == status, (method, path, body, found)
            assert words in found[2], (method, path, body, found)
    assert served.port.known == {}


async def test_the_answer_to_a_wrong_method_names_the_right_one(served: Served) -> None:
    async with served.client() as client:
        assert (await client.get("/explain")).headers["allow"] == "POST"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
async def test_a_bug_is_a_500_that_shows_nothing_and_the_log_has_it(
    served: Served, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    served.port.bug = kind("a bug that shows s3cret")
    with caplog.at_level(logging.ERROR):
        async with served.client() as client:
            response = await client.get("/admin/backends")
    assert error_of(response)[:2] == (500, "internal_error")
    assert "s3cret" not in response.text
    assert "GET /admin/backends" in caplog.text


# --- seeing ---------------------------------------------------------------------------------------------------------


async def test_routes_decisions_and_configuration_can_be_seen(served: Served) -> None:
    async with served.client() as client:
        assert (await client.get("/admin/routes")).json() == {"routes": 3, "capacity": 10, "depths": {"16": 2}}
        tree = (await client.get("/admin/routes/0xABC")).json()
        assert tree == {
            "fingerprint": "0000000000000abc",
            "routes": [{"fingerprint": "0000000000000abc", "tokens": 16}],
        }
        assert len((await client.get("/admin/decisions", params={"limit": 2})).json()["decisions"]) == 2
        assert len((await client.get("/admin/decisions")).json()["decisions"]) == 50
        assert (await client.get("/admin/config")).json()["control_key"] == "***"
        assert (await client.get("/admin/engine-cache")).json() == {"engines": [{"name": "a", "level": "exact"}]}
        assert (await client.get("/admin/calibration")).json() == {"route_precision": 0.5}


async def test_the_cluster_can_be_seen_where_there_is_one(served: Served) -> None:
    async with served.client() as client:
        assert (await client.get("/admin/cluster")).json() == {"name": "n1", "members": []}
        assert (await client.get("/admin/cluster/sums")).content == b"\x01" * 8
        served.port.lonely = True
        assert error_of(await client.get("/admin/cluster"))[0] == 404


async def test_a_body_above_the_limit_is_refused(nursery: trio.Nursery) -> None:
    served = await start(nursery, body_bytes_max=1000)
    async with served.client() as client:
        assert (await client.post("/explain", content=b"{" + b" " * 1001)).status_code == 413
    assert served.port.explained == []


# --- who may ask ----------------------------------------------------------------------------------------------------

GUARDED = ["/metrics", "/admin/backends", "/admin/routes", "/admin/config", "/list_workers", "/nowhere"]


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "the-key-of-the-control-port", "Basic abc"])
async def test_without_the_key_nothing_but_health_is_served(locked: Served, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    async with locked.client(headers=headers) as client:
        for path in GUARDED:
            response = await client.get(path)
            assert error_of(response)[:2] == (401, "unauthorized")
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.post("/add_worker?url=http://a")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
    assert locked.port.known == {}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_with_the_key_all_is_served(locked: Served, scheme: str) -> None:
    async with locked.client(headers={"authorization": f"{scheme} {KEY}"}) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/add_worker?url=http://a")).status_code == 200


async def test_metrics_may_be_public_and_nothing_else_is_then(nursery: trio.Nursery) -> None:
    served = await start(nursery, key=KEY, metrics_public=True)
    async with served.client() as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/admin/backends")).status_code == 401


async def test_without_a_key_a_web_page_can_not_command_the_node(served: Served) -> None:
    """A page open in a browser on this machine may send requests to loopback, with its Origin or under its own name."""
    async with served.client() as client:
        for headers in ({"origin": "http://evil.example"}, {"host": "evil.example:9180"}, {"origin": "null"}):
            response = await client.post("/add_worker?url=http://a", headers=headers)
            assert error_of(response)[:2] == (403, "forbidden")
        own = {"origin": served.url}
        assert (await client.post("/add_worker?url=http://b", headers=own)).status_code == 200
        local = {"host": "localhost:9180"}
        assert (await client.get("/list_workers", headers=local)).json() == {"urls": ["http://b:80"]}


# --- the end --------------------------------------------------------------------------------------------------------


async def raw_client(served: Served) -> trio.SocketStream:
    address, _, port = served.url.removeprefix("http://").partition(":")
    return await trio.open_tcp_stream(address, int(port))


async def test_the_end_waits_for_nobody_who_is_idle(nursery: trio.Nursery) -> None:
    served = await start(nursery, close_grace_s=3600.0, idle_timeout_s=3600.0)
    async with await raw_client(served) as stream:
        await wait_all_tasks_blocked(0.05)
        served.shutdown.set()
        with trio.fail_after(DEADLINE_S):
            assert await stream.receive_some() == b""
            await served.ended.wait()


async def test_a_connection_ends_with_its_answer(nursery: trio.Nursery) -> None:
    """Kept ones would never time out on this stack, and 256 of them would shut the port."""
    served = await start(nursery, idle_timeout_s=3600.0)
    async with await raw_client(served) as stream:
        await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with trio.fail_after(DEADLINE_S):
            answer = await read_all(stream)
    assert b"connection: close" in answer
    assert answer.endswith(b'{"status":"ok"}')


async def test_a_large_answer_arrives_whole(served: Served) -> None:
    async with served.client() as client:
        (decision,) = (await client.get("/admin/decisions?limit=999")).json()["decisions"]
    assert len(decision["text"]) == HUGE_CHARACTERS


async def read_all(stream: trio.SocketStream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


async def stalled_reader(served: Served) -> trio.SocketStream:
    """A client that has asked for much and reads nothing."""
    stream = await raw_client(served)
    await stream.send_all(b"GET /admin/decisions?limit=999 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await served.port.huge_asked.wait()
    await wait_all_tasks_blocked(0.05)
    return stream


async def test_a_stalled_reader_does_not_hold_up_the_end_of_the_process(nursery: trio.Nursery) -> None:
    """hypercorn's own serve hangs here for as long as the client likes."""
    served = await start(nursery, close_grace_s=0.05, send_timeout_s=3600.0)
    async with await stalled_reader(served):
        served.shutdown.set()
        with trio.fail_after(DEADLINE_S):
            await served.ended.wait()


async def test_a_stalled_reader_does_not_hold_up_a_cancelled_node() -> None:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            served = await start(nursery, close_grace_s=3600.0, send_timeout_s=3600.0)
            stream = await stalled_reader(served)
            nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(stream)


async def test_a_send_that_nobody_takes_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.testing.open_stream_to_socket_listener(listener) as client:
        accepted = await listener.accept()
        stream = DeadlineStream(accepted, send_timeout_s=30.0)
        with trio.CancelScope(shield=True), pytest.raises(trio.BrokenResourceError, match="does not read"):
            await stream.send_all(b"x" * HUGE_CHARACTERS)
        assert trio.current_time() >= 30.0
        assert accepted.socket.fileno() == -1
        with pytest.raises(trio.BrokenResourceError):  # reset: what was left is dropped, not kept for a later reader
            await read_all(client)


async def test_a_send_while_another_task_sends_breaks_and_is_no_bug() -> None:
    """hypercorn answers garbage behind a request at once, and ends the connection, while the request is answered."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.testing.open_stream_to_socket_listener(listener):
        stream = DeadlineStream(await listener.accept(), send_timeout_s=30.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.stream.send_all, b"x" * HUGE_CHARACTERS)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BrokenResourceError, match="the connection ends"):
                await stream.send_all(b"y")
            nursery.cancel_scope.cancel()
        stream.abort()


async def test_a_client_that_never_finishes_its_header_is_cut_off(nursery: trio.Nursery) -> None:
    served = await start(nursery, idle_timeout_s=0.05)
    with trio.fail_after(DEADLINE_S):
        async with await raw_client(served) as stream:
            await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: ")
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""


async def test_many_who_never_end_their_requests_keep_nobody_from_asking(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else whoever reaches the port makes an orchestrator believe that the node is dead."""
    monkeypatch.setattr(control_server, "CONNECTIONS_MAX", 4)
    served = await start(nursery)
    async with served.client() as client, AsyncExitStack() as held:
        with trio.fail_after(DEADLINE_S):
            for _ in range(9):
                stream = await held.enter_async_context(await raw_client(served))
                await stream.send_all(b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
                assert (await client.get("/healthz", headers={"connection": "close"})).status_code == 200
    assert "control.cut 4 connections" in caplog.text


UPGRADE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, http2-settings\r\nUpgrade: "
UPGRADES = {
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.1 4"),
    "h2c": (UPGRADE + b"h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", b"HTTP/1.1 200"),
    "a WebSocket": (
        UPGRADE + b"websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"HTTP/1.1 200",
    ),
}


@pytest.mark.parametrize("case", UPGRADES)
async def test_nobody_is_followed_to_another_protocol(
    nursery: trio.Nursery, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections of HTTP/2 would stay for ever, and 256 of them would shut out whoever asks for health."""
    served = await start(nursery)
    data, status = UPGRADES[case]
    with trio.fail_after(DEADLINE_S):
        async with await raw_client(served) as stream:
            await stream.send_all(data)
            answer = await read_all(stream)
    assert answer.startswith(status)
    assert b"HTTP/1.1 101" not in answer
    assert "Traceback" not in caplog.text
    assert caplog.records == []


async def test_an_address_in_use_is_an_error_at_once(served: Served) -> None:
    taken = ControlSettings(host="127.0.0.1", port=int(served.url.rpartition(":")[2]))
    with pytest.raises(OSError, match="in use"):
        await serve_app(None, taken, shutdown=trio.Event())
