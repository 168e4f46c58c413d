from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ranvier_py import __version__
from ranvier_py.config.control_settings import ControlSettings
from ranvier_py.control import control_server
from ranvier_py.control.control_port import make_app
from ranvier_py.control.control_server import DeadlineStream, serve_app
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.node.asked import Asked, ControlAnswer
from ranvier_py.node.part import Handler
from tests.node.node_lab import chat, lab, turn
from tests.proxy.wire import GOOD, NO_TLS, Scripted

KEY = "the-key-of-the-control-port"
DEADLINE_S = 10.0
HUGE_CHARACTERS = 32 * 1024 * 1024  # more than the socket buffers of loopback ever take


@dataclass
class Routes:
    """What a port of these tests serves, and what became of it."""

    added: list[str] = field(default_factory=list)
    bug: Exception | None = None
    huge_asked: trio.Event = field(default_factory=trio.Event)

    def table(self, _: ControlSettings) -> Mapping[str, Handler]:
        return {
            "GET /healthz": lambda _: {"status": "ok"},
            "GET /readyz": lambda _: ControlAnswer({"ready": False}, 503),
            "GET /metrics": lambda _: {},
            "GET /admin/backends": self.backends,
            "GET /admin/decisions": self.decisions,
            "POST /add_worker": self.add,
            "POST /explain": explain,
        }

    def backends(self, _: Asked) -> Mapping[str, Any]:
        if self.bug is not None:
            raise self.bug
        return {"backends": self.added}

    def decisions(self, _: Asked) -> Mapping[str, Any]:
        self.huge_asked.set()
        return {"text": "x" * HUGE_CHARACTERS}

    def add(self, asked: Asked) -> Mapping[str, Any]:
        self.added.append(asked.worker_url())
        return {}


async def explain(asked: Asked) -> ControlAnswer:
    return ControlAnswer(await asked.body(), kind="application/octet-stream")


@dataclass
class Served:
    """A control port, and how to end it."""

    routes: Routes
    url: str
    shutdown: trio.Event
    ended: trio.Event

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, trust_env=False, verify=NO_TLS, **options)


async def start(nursery: trio.Nursery, table: Callable[..., Mapping[str, Any]] | None = None, **options: Any) -> Served:
    """The real server, on port 0 unless it is given one."""
    routes, shutdown, ended = Routes(), trio.Event(), trio.Event()
    settings = ControlSettings(**{"host": "127.0.0.1", "port": 0, **options})
    app = make_app((table or routes.table)(settings), settings)

    async def run(task_status: trio.TaskStatus[str]) -> None:
        await serve_app(app, settings, shutdown=shutdown, task_status=task_status)
        ended.set()

    return Served(routes, await nursery.start(run), shutdown, ended)


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


async def test_a_node_is_alive_and_ready_without_engines_as_long_as_no_peer_has_one() -> None:
    async with lab() as node:
        assert await node.ask("/healthz") == {"status": "ok"}
        assert await node.ask("/readyz") == {"ready": True, "reason": ""}


async def test_a_backend_to_be_removed_may_be_named_in_the_query_or_in_the_body() -> None:
    async with lab() as node:
        place, urls = f"{node.control}/admin/backends", ("http://127.0.0.1:1", "http://127.0.0.1:2")
        for url in urls:
            await node.http.post(place, json={"url": url})
        assert (await node.http.delete(place, params={"url": urls[0]})).status_code == 200
        assert (await node.http.request("DELETE", place, json={"url": urls[1]})).status_code == 200
        assert await node.backends() == []


async def test_where_an_added_engine_publishes_its_events_can_be_set() -> None:
    body = {"url": "http://127.0.0.1:1", "kv_events": "tcp://*:5557", "kv_replay": "tcp://*:5657", "kv_ranks": 2}
    async with lab() as node:
        place = f"{node.control}/admin/backends"
        added = (await node.http.post(place, json=body)).json()
        assert {name: added[name] for name in body} == body
        off = (await node.http.post(place, json={"url": "http://127.0.0.1:2", "kv_events": "off"})).json()
        assert (off["kv_events"], "kv_replay" in off) == ("off", False)


async def test_all_that_is_wrong_with_a_backend_is_reported_at_once() -> None:
    body = {"weight": 0, "name": 5, "kv_replay": "nowhere", "kv_ranks": 999, "kv_event": "tcp://*:1"}
    async with lab() as node:
        found = error_of(await node.http.post(f"{node.control}/admin/backends", json=body))
        assert await node.backends() == []
    assert found[0] == 400
    assert [line.partition(" ")[0] for line in found[2].splitlines()] == [
        *("url:", "weight:", "name:", "kv_replay:", "kv_ranks:", "kv_event:", "kv_replay")
    ]


BAD_BACKENDS = [
    (b"", "the body is empty, expected a JSON object with url, weight, name"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[]", "JSON object"),
    (b"{}", "url: is missing"),
    (b'{"url": 5}', "url: must be a valid string"),
    (b'{"url": "nonsense"}', "must be a URL"),
    (b'{"url": "http://10.0.0..1:8000"}', "url: the host must have no empty label"),
    (b'{"url": "http://10.0.0.256:8000"}', "no IPv4 address"),
    (b'{"url": "http://%s.b"}' % (b"a" * 64), "at most 63 characters"),
    (b'{"url": "http://a", "kv_events": "tcp://a..b:5557"}', "kv_events: the host must"),
    (b'{"url": "http://a", "kv_index": "http://a..b"}', "kv_index: the host must"),
    (b'{"url": "http://a", "weight": "2"}', "weight"),
    (b'{"url": "http://a", "weight": 1e999}', "infinity"),
    (b'{"url": "http://a", "name": null}', "name"),
    (b'{"url": "http://a", "wieght": 2}', "wieght: no such key; did you mean weight?"),
    (b'{"url": "http://a", "kv_ranks": true}', "kv_ranks: must be a valid integer"),
]

BAD_REQUESTS = [
    *(("POST", "/admin/backends", body, 400, words) for body, words in BAD_BACKENDS),
    ("DELETE", "/admin/backends", b"", 400, "expected a JSON object with url"),
    ("DELETE", "/admin/backends?url=http://x", b"", 404, "no backend 'http://x'"),
    ("DELETE", "/admin/backends", b"{}", 400, "url is missing"),
    ("POST", "/admin/backends/drain", b'{"url": "http://x"}', 404, "no backend 'http://x'"),
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
    ("POST", "/explain", b"no", 400, "not valid JSON"),
    ("POST", "/explain", b'{"messages": [{"role": "user", "content": "hi"}]}', 503, "No backend"),
    ("GET", "/nowhere", b"", 404, "/nowhere"),
    ("GET", "/add_worker?url=http://a", b"", 405, "GET /add_worker"),
]


async def test_bad_input_is_refused_with_a_reason_and_never_a_500() -> None:
    async with lab() as node:
        for method, path, body, status, words in BAD_REQUESTS:
            found = error_of(await node.http.request(method, f"{node.control}{path}", content=body))
            assert found[0] == status, (method, path, body, found)
            assert words in found[2], (method, path, body, found)
        assert await node.backends() == []


async def test_the_answer_to_a_wrong_method_names_the_right_one(served: Served) -> None:
    async with served.client() as client:
        assert (await client.get("/explain")).headers["allow"] == "POST"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
async def test_a_bug_is_a_500_that_shows_nothing_and_the_log_has_it(
    served: Served, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    served.routes.bug = kind("a bug that shows s3cret")
    with caplog.at_level(logging.ERROR):
        async with served.client() as client:
            response = await client.get("/admin/backends")
    assert error_of(response)[:2] == (500, "internal_error")
    assert "s3cret" not in response.text
    assert "GET /admin/backends" in caplog.text


async def test_decisions_and_the_tree_of_a_route_can_be_seen() -> None:
    async with lab(engines=1) as node:
        for number in range(3):
            await node.chat(turn(f"hello {number}"))
        (newest, _) = (await node.ask("/admin/decisions?limit=2"))["decisions"]
        assert newest["backend"] == (await node.backends())[0]["name"]
        assert len((await node.ask("/admin/decisions"))["decisions"]) == 3
        await node.until_routes(lambda found: found["rows"])
        chain = (await node.http.post(f"{node.control}/explain", content=chat(turn("hello 0")))).json()["chain"]
        known = next(key["text_fingerprint"] for key in reversed(chain) if key["text_fingerprint"])
        tree = await node.ask(f"/admin/routes/0x{known.upper()}?limit=1")
        assert tree["fingerprint"] == known
        assert known in tree["routes"][0]["text_fingerprints"]
        assert error_of(await node.http.get(f"{node.control}/admin/cluster"))[0] == 404


async def test_a_body_above_the_limit_is_refused(nursery: trio.Nursery) -> None:
    served = await start(nursery, body_bytes_max=1000)
    async with served.client() as client:
        assert (await client.post("/explain", content=b"{" + b" " * 1001)).status_code == 413


GUARDED = ["/metrics", "/admin/backends", "/explain", "/nowhere"]


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
    assert locked.routes.added == []


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
        assert (await client.get("/admin/backends", headers=local)).json() == {"backends": ["http://b"]}


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
        assert len((await client.get("/admin/decisions")).json()["text"]) == HUGE_CHARACTERS


async def read_all(stream: trio.SocketStream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


async def stalled_reader(served: Served) -> trio.SocketStream:
    """A client that has asked for much and reads nothing."""
    stream = await raw_client(served)
    await stream.send_all(b"GET /admin/decisions HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await served.routes.huge_asked.wait()
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


async def test_the_release_and_the_protocol_are_a_metric() -> None:
    async with lab(Scripted(GOOD)) as node:
        page = (await node.http.get(f"{node.control}/metrics")).text
    assert f'ranvier_build_info{{protocol="{PROTOCOL_VERSION}",version="{__version__}"}} 1.0' in page
