"""WebSockets of /v1/realtime through a whole node, with a WebSocket library at both ends and with raw sockets."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.utilities import RemoteProtocolError

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.node.parts import request_parts
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, lab
from tests.planted_bugs import Bug, plant
from tests.proxy.wire import CHUNKED_HEAD, GET, Wire, answer, chunk

TARGET = "/v1/realtime"
UPGRADE = (b"connection: keep-alive, Upgrade", b"upgrade: websocket", b"sec-websocket-version: 13")


def request(*fields: bytes, target: bytes = TARGET.encode(), upgrade: Sequence[bytes] = UPGRADE) -> bytes:
    """A handshake as raw bytes."""
    lines = (b"GET %b HTTP/1.1" % target, b"host: h", b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", *upgrade, *fields)
    return b"\r\n".join(lines) + b"\r\n\r\n"


@dataclass
class Socket:
    """One end of a WebSocket."""

    wire: Wire
    protocol: WSConnection
    events: list[Event] = field(default_factory=list)
    broken: bool = False

    async def send(self, *events: Event) -> None:
        await self.wire.send(b"".join(self.protocol.send(event) for event in events))

    async def next(self) -> Event | None:
        """The next event; None at the end of the connection. Fragments are put together."""
        while not self.events:
            data = await self.wire.stream.receive_some(65536)
            if not data:
                return None
            self.protocol.receive_data(data)
            for event in self.protocol.events():
                if isinstance(event, Ping):
                    await self.send(event.response())
                else:
                    self.events.append(event)
        found = self.events.pop(0)
        if isinstance(found, (TextMessage, BytesMessage)) and not found.message_finished:
            following: Any = await self.next()
            return type(found)(data=found.data + following.data)  # type: ignore[operator]
        return found


class Engine:
    """Answers handshakes as `script` does, and everything else as a healthy engine that serves one model.

    Attributes:
        heads: of the handshakes; `over` is set when the last connection of one has ended.
    """

    def __init__(self, script: Callable[[Wire, bytes], Any], model: str = "m") -> None:
        self.script = script
        self.card = b'{"data":[{"id":"%b","owned_by":"vllm"}]}' % model.encode()
        self.heads: list[bytes] = []
        self.over = trio.Event()
        self.asked = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with Wire(stream) as wire:
                while (asked := await wire.next_request()) is not None:
                    if not asked[0].startswith(b"GET /v1/realtime"):
                        await wire.send(answer(self.card))
                        continue
                    self.heads.append(asked[0])
                    self.asked.set()
                    try:
                        await self.script(wire, asked[0])
                    finally:
                        self.over.set()
                    return


async def accepted(wire: Wire, head: bytes) -> Socket:
    """A handshake that came, taken."""
    found = Socket(wire, WSConnection(ConnectionType.SERVER))
    found.protocol.receive_data(head + wire.buffer)
    wire.buffer = b""
    found.events += found.protocol.events()
    asked = await found.next()
    assert isinstance(asked, Request)
    await found.send(AcceptConnection(subprotocol=next(iter(asked.subprotocols), None)))
    return found


async def echo(wire: Wire, head: bytes) -> None:
    """Says everything again, until the other end closes; says so of what is no WebSocket."""
    found = await accepted(wire, head)
    try:
        while (event := await found.next()) is not None:
            if isinstance(event, Message):
                await found.send(type(event)(data=event.data))
            elif isinstance(event, CloseConnection):
                await found.send(event.response())
                return
    except RemoteProtocolError as error:
        await found.send(error.event_hint or CloseConnection(1002))


async def opened(node: Node, target: str = TARGET, **fields: Any) -> Socket:
    """A client that has its WebSocket, or whatever else it got."""
    found = Socket(await node.wire(), WSConnection(ConnectionType.CLIENT))
    await found.send(Request(host="h", target=target, **fields))
    return found


async def taken(node: Node, target: str = TARGET) -> Socket:
    found = await opened(node, target)
    assert isinstance(await found.next(), AcceptConnection)
    return found


async def closed(client: Socket, code: int = 1000) -> None:
    """The client says goodbye, and the engine's answer and end arrive."""
    await client.send(CloseConnection(code))
    event = await client.next()
    assert isinstance(event, CloseConnection)
    assert event.code == code
    assert await client.next() is None
    await client.wire.aclose()


async def counts(node: Node) -> dict[str, int]:
    """What the metrics say of WebSockets."""
    page = (await node.http.get(f"{node.control}/metrics")).text
    lines = [line.split(" ") for line in page.splitlines() if line.startswith("ranvier_realtime_")]
    return {name.removeprefix("ranvier_realtime_").removesuffix("_total"): int(float(value)) for name, value in lines}


async def until(node: Node, **wanted: int) -> None:
    """Until the metrics of WebSockets say so."""
    while not wanted.items() <= (await counts(node)).items():  # noqa: ASYNC110  # a page states it
        await trio.sleep(BETWEEN_LOOKS_S)


# --- what passes -----------------------------------------------------------------------------------------------------


async def test_messages_on_a_websocket_reach_the_other_end_whatever_its_size() -> None:
    engine = Engine(echo)
    async with lab(engine) as node:
        client = await opened(node, f"{TARGET}?model=m", subprotocols=["realtime", "other"])
        accepted_by = await client.next()
        assert isinstance(accepted_by, AcceptConnection)
        assert accepted_by.subprotocol == "realtime"
        assert b"x-request-id" in dict(accepted_by.extra_headers)
        for message in (TextMessage(data="größer"), BytesMessage(data=bytes(range(256)) * 4096), TextMessage(data="")):
            await client.send(message)
            event = await client.next()
            assert isinstance(event, type(message))
            assert event.data == message.data
        await client.send(Ping(b"here?"))
        assert isinstance(await client.next(), Pong)
        await closed(client)
        await engine.over.wait()
        await until(node, open=0, opened=1, broken=0, idle=0)
        assert (await counts(node))["backend_bytes"] > 1 << 20
    head = engine.heads[0].lower()
    assert b"get /v1/realtime?model=m http/1.1\r\n" in head
    assert head.count(b"upgrade: websocket\r\n") == head.count(b"connection: upgrade\r\n") == 1
    assert b"sec-websocket-protocol: realtime, other\r\n" in head


async def test_what_comes_behind_the_handshake_at_once_is_not_lost_at_either_end() -> None:
    async def script(wire: Wire, head: bytes) -> None:
        found = await accepted(wire, head)
        await found.send(*(TextMessage(data=f"{number}") for number in range(3)))
        assert await found.next() == TextMessage(data="early")
        await found.send(TextMessage(data="heard"), CloseConnection(1000))
        await found.next()

    async with lab(Engine(script)) as node:
        client = Socket(await node.wire(), WSConnection(ConnectionType.CLIENT))
        handshake = client.protocol.send(Request(host="h", target=TARGET))
        other = WSConnection(ConnectionType.CLIENT)  # one that has been taken, to make a frame with
        masked = frame(other, TextMessage(data="early"))
        await client.wire.send(handshake + masked)
        assert isinstance(await client.next(), AcceptConnection)
        received = [await client.next() for _ in range(4)]
        assert [event.data for event in received if isinstance(event, TextMessage)] == ["0", "1", "2", "heard"]
        await client.wire.aclose()


def frame(protocol: WSConnection, message: TextMessage) -> bytes:
    """A frame of a client, of which no handshake is under way."""
    server = WSConnection(ConnectionType.SERVER)
    server.receive_data(protocol.send(Request(host="h", target=TARGET)))
    list(server.events())
    protocol.receive_data(server.send(AcceptConnection()))
    list(protocol.events())
    return protocol.send(message)


async def test_it_counts_as_load_while_it_is_open_and_goes_to_who_has_less() -> None:
    engines = Engine(echo), Engine(echo)
    async with lab(*engines) as node:
        await node.until("/admin/backends", lambda view: all(each["models"] for each in view["backends"]))
        clients = [await taken(node) for _ in range(4)]
        assert [each["in_flight"] for each in await node.backends()] == [2, 2]
        assert [len(engine.heads) for engine in engines] == [2, 2]
        for client in clients:
            await closed(client)
        await node.until("/admin/backends", lambda view: [each["in_flight"] for each in view["backends"]] == [0, 0])


async def test_the_model_that_the_query_names_has_the_engine() -> None:
    engines = Engine(echo, "one"), Engine(echo, "two & more")
    async with lab(*engines) as node:
        await node.until("/admin/backends", lambda view: all(each["models"] for each in view["backends"]))
        for _ in range(3):
            await closed(await taken(node, f"{TARGET}?intent=x&model=two+%26%20more"))
        client = await opened(node, f"{TARGET}?model=three")
        event = await client.next()
        assert isinstance(event, RejectConnection)
        assert event.status_code == 404
        await client.wire.aclose()
    assert [len(engine.heads) for engine in engines] == [0, 3]


def certified(folder: Path) -> tuple[dict[str, Path], ssl.SSLContext]:
    """What a node has to speak TLS, and who trusts it."""
    authority, files = trustme.CA(), {"tls_certificate_file": folder / "chain", "tls_key_file": folder / "key"}
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(files["tls_key_file"])
    files["tls_certificate_file"].write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return files, trusting


async def test_it_goes_through_tls_of_which_no_side_can_end_alone(tmp_path: Path) -> None:
    files, trusting = certified(tmp_path)
    engine = Engine(echo)
    async with lab(engine, **files) as node:
        wire = await node.wire()
        wire.stream = trio.SSLStream(  # type: ignore[assignment]  # what a Wire needs of one
            wire.stream, trusting, server_hostname="127.0.0.1", https_compatible=True
        )
        client = Socket(wire, WSConnection(ConnectionType.CLIENT))
        await client.send(Request(host="h", target=TARGET))
        assert isinstance(await client.next(), AcceptConnection)
        await client.send(TextMessage(data="x" * 300_000))
        event = await client.next()
        assert isinstance(event, TextMessage)
        assert len(event.data) == 300_000
        await closed(client)
        await engine.over.wait()


# --- how it ends -----------------------------------------------------------------------------------------------------


async def test_an_engine_that_is_killed_closes_the_client() -> None:
    async def script(wire: Wire, head: bytes) -> None:
        await accepted(wire, head)
        wire.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with lab(Engine(script)) as node:
        client = await taken(node)
        assert await client.wire.cut()
        await client.wire.aclose()
        await until(node, open=0, broken=1)


@pytest.mark.parametrize("name", ["Splice._from_client", "Splice._from_backend"])
async def test_a_bug_in_a_websocket_is_counted_and_ends_that_one_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lab(Engine(echo)) as node:
        bug = Bug(times_max=1)
        plant(monkeypatch, "ranvier_py.proxy.realtime", name, bug)
        client = await taken(node)
        await client.send(TextMessage("hello"))
        assert await client.wire.cut()
        await client.wire.aclose()
        await until(node, open=0, opened=1)
        assert bug.left == 0
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_unexpected_errors_total{place="connection"} 1.0' in page
        await closed(await taken(node))


async def test_a_bug_in_a_tls_handshake_is_counted_and_ends_that_connection_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files, trusting = certified(tmp_path)
    async with lab(Engine(echo), **files) as node:
        bug = Bug(times_max=1)
        plant(monkeypatch, "ranvier_py.proxy.transport", "TlsTransport.handshake", bug)
        for fails in (True, False):
            wire = await node.wire()
            stream = trio.SSLStream(wire.stream, trusting, server_hostname="127.0.0.1", https_compatible=True)
            with pytest.raises(trio.BrokenResourceError) if fails else nullcontext():
                await stream.do_handshake()
            await stream.aclose()
        assert bug.left == 0
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_unexpected_errors_total{place="connection"} 1.0' in page


async def test_an_engine_that_ends_without_a_word_ends_the_clients_side() -> None:
    async def script(wire: Wire, head: bytes) -> None:
        await accepted(wire, head)

    async with lab(Engine(script)) as node:
        client = await taken(node)
        assert await client.next() is None, "an end, and no break"
        await client.wire.aclose()
        await until(node, open=0, broken=0)


async def test_a_client_that_is_gone_frees_the_engine() -> None:
    engine = Engine(echo)
    async with lab(engine) as node:
        client = await taken(node)
        client.wire.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await client.wire.aclose()
        await engine.over.wait()
        await until(node, open=0, broken=1)
        assert (await node.backends())[0]["in_flight"] == 0


async def test_a_client_that_has_ended_its_side_still_gets_what_the_engine_sends() -> None:
    async def script(wire: Wire, head: bytes) -> None:
        found = await accepted(wire, head)
        assert await found.next() == TextMessage(data="that's all")
        assert await found.next() is None
        await found.send(TextMessage(data="x" * 300_000), CloseConnection(1000))

    engine = Engine(script)
    async with lab(engine) as node:
        client = await taken(node)
        await client.send(TextMessage(data="that's all"))
        await client.wire.stream.send_eof()
        event = await client.next()
        assert isinstance(event, TextMessage)
        assert len(event.data) == 300_000
        assert isinstance(await client.next(), CloseConnection)
        assert await client.next() is None
        await engine.over.wait()
        await client.wire.aclose()


@pytest.mark.parametrize("garbage", [b"\xff" * 4096, b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n", bytes(9)])
async def test_garbage_after_the_handshake_is_the_engines_to_refuse(garbage: bytes) -> None:
    """Nothing of it is ever taken for another request."""
    engine = Engine(echo)
    async with lab(engine) as node:
        client = await taken(node)
        await client.wire.send(garbage)
        event = await client.next()
        assert isinstance(event, CloseConnection)
        assert event.code == 1002
        assert await client.next() is None
        await client.wire.aclose()
        await until(node, open=0)
    assert len(engine.heads) == 1


async def test_a_silent_websocket_is_closed() -> None:
    engine = Engine(echo)
    async with lab(engine, realtime_idle_timeout_s=0.2) as node:
        client = await taken(node)
        await client.send(TextMessage(data="hello"))
        assert await client.next() == TextMessage(data="hello")
        assert await client.next() is None
        await engine.over.wait()
        await client.wire.aclose()
        await until(node, open=0, idle=1, broken=0)


async def test_a_drain_lets_it_speak_until_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_parts, "SAME_SIGNAL_S", 0.0)
    engine = Engine(echo)
    async with lab(engine, drain_timeout_s=3600) as node:
        client = await taken(node)
        os.kill(os.getpid(), signal.SIGTERM)
        while (await node.http.get(f"{node.control}/readyz")).status_code != 503:  # noqa: ASYNC110  # a page
            await trio.sleep(BETWEEN_LOOKS_S)
        await client.send(TextMessage(data="still here"))
        assert await client.next() == TextMessage(data="still here")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await client.next() is None, "an end, and no break"
        await engine.over.wait()
        await client.wire.aclose()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refusal",
    [
        answer(b'{"error":"no model"}', b"x-own: 1", status=404),
        answer(b"", b"upgrade: websocket", b"sec-websocket-version: 13", status=426),
        CHUNKED_HEAD + chunk(b"no websockets here") + b"0\r\n\r\n",
    ],
)
async def test_the_answer_of_an_engine_that_refuses_reaches_the_client(refusal: bytes) -> None:
    async def script(wire: Wire, _head: bytes) -> None:
        await wire.send(refusal)
        await wire.more()

    async with lab(Engine(script)) as node:
        client = await node.wire()
        await client.send(request())
        found = await client.rest()
        head, _, body = found.partition(b"\r\n\r\n")
        expected, _, content = refusal.partition(b"\r\n\r\n")
        assert body == content
        assert set(expected.split(b"\r\n")) <= set(head.split(b"\r\n"))
        assert b"connection: close" in head
        await client.aclose()
        await until(node, open=0, opened=0)


async def test_a_refusal_is_read_by_a_library() -> None:
    async def script(wire: Wire, _head: bytes) -> None:
        await wire.send(answer(b'{"detail":"not now"}', status=403))
        await wire.more()

    async with lab(Engine(script)) as node:
        client = await opened(node)
        event = await client.next()
        assert isinstance(event, RejectConnection)
        assert event.status_code == 403
        content = await client.next()
        assert isinstance(content, RejectData)
        assert content.data == b'{"detail":"not now"}'
        await client.wire.aclose()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 101 Own\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 101 Own\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_an_engine_that_agrees_to_something_else_is_a_502(reply: bytes) -> None:
    async def script(wire: Wire, _head: bytes) -> None:
        await wire.send(reply)
        await wire.more()

    async with lab(Engine(script)) as node:
        client = await node.wire()
        await client.send(request())
        status, _, body = await client.response()
        assert (status, b'"upstream_garbled"' in body) == (502, True)
        await client.aclose()


async def test_an_engine_that_agrees_to_what_nobody_asked_for_is_a_502() -> None:
    async def script(wire: Wire, _head: bytes) -> None:
        await wire.send(b"HTTP/1.1 101 Own\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        await wire.more()

    plain: list[tuple[bytes, ...]] = [(), UPGRADE[:1], UPGRADE[1:]]
    async with lab(Engine(script), circuit_failures=1000) as node:
        for upgrade in plain:
            client = await node.wire()
            await client.send(request(upgrade=upgrade))
            assert (await client.response())[0] == 502
            await client.aclose()


async def test_without_a_backend_the_error_has_openais_shape(logged: list[RequestSummary]) -> None:
    async with lab(Engine(echo)) as node:
        backends = await node.backends()
        await node.http.delete(f"{node.control}/admin/backends", params={"url": backends[0]["url"]})
        client = await node.wire()
        await client.send(request())
        status, headers, body = await client.response()
        assert (status, headers["retry-after"]) == (503, "1")
        assert b'"code":"no_backend"' in body
        await client.aclose()
    assert [(line.path, line.status) for line in logged] == [("/v1/realtime", 503)]


async def test_where_nobody_listens_another_engine_is_asked(logged: list[RequestSummary]) -> None:
    engine = Engine(echo)
    async with lab(engine, policy="round_robin") as node:
        await node.http.post(f"{node.control}/admin/backends", json={"url": "http://127.0.0.1:9"})
        for _ in range(2):
            await closed(await taken(node))
        await until(node, open=0, opened=2)
    assert len(engine.heads) == 2
    assert [(line.status, line.outcome) for line in logged] == [(101, "success")] * 2
    assert all(line.sent_bytes > 0 for line in logged)


async def test_more_than_may_be_open_are_refused_until_one_ends() -> None:
    async with lab(Engine(echo), realtime_connections_max=2) as node:
        first, second = await taken(node), await taken(node)
        client = await opened(node)
        event = await client.next()
        assert isinstance(event, RejectConnection)
        assert event.status_code == 503
        await client.wire.aclose()
        await closed(first)
        await until(node, open=1, refused=1)
        await closed(await taken(node))
        await closed(second)


async def test_a_connection_that_has_served_requests_may_go_on_as_a_websocket() -> None:
    engine = Engine(echo)
    async with lab(engine) as node:
        client = await node.wire()
        await client.send(b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n" * 2)
        for _ in range(2):
            assert (await client.response())[0] == 200
        await client.send(request())
        assert b"101 " in await client.until(b"\r\n\r\n")
        await client.aclose()
        await engine.over.wait()
    assert len(engine.heads) == 1


async def test_a_handshake_pipelined_behind_a_request_is_not_sent_into_its_own_websocket() -> None:
    async def script(wire: Wire, head: bytes) -> None:
        await wire.send(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        await wire.more()
        received.append(wire.buffer)

    received: list[bytes] = []
    engine = Engine(script)
    async with lab(engine) as node, await node.wire() as client:
        await client.send(GET + request(b"transfer-encoding: chunked") + b"0\r\n\r\n" + b"frames")
        await engine.over.wait()
    assert received == [b"frames"]
