"""The lab that hostile cases run in: a real node, an engine that accepts only strict HTTP, and a hostile peer.

To a request with `x-hostile: NAME` the engine sends that case's answer, byte for byte; all others it answers like vLLM.
It reads requests with h11, which refuses what RFC 9112 forbids; each refusal is kept in `violations`.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import h11
import orjson
import trio
import trio.lowlevel

from cluster.dns.addresses import free_port
from cluster.hostile_peer import HostilePeer
from cluster.processes.children import Command, start, stop, wait_ready
from cluster.processes.commands import serve_argv
from ranvier_py.core.mesh.wire.keyring import parse_key_ring

MODEL = "lab-model"
KEY = "an operator's control key"
START_S = 60.0
READ_S = 20.0
"""The longest wait for an answer to end. The node's own time limits are shorter, so a longer wait shows a fault."""
HEALTH_S = 10.0
END_S = 15.0
FLAGS = (
    *("--header-timeout-s", "2", "--body-window-s", "2", "--idle-timeout-s", "2", "--send-window-s", "2"),
    *("--first-byte-timeout-s", "2", "--stall-timeout-s", "2", "--probe-interval-s", "0.2", "--probe-timeout-s", "1"),
    *("--circuit-failures", "1000000", "--probe-failures", "1000000", "--engine-metrics-interval-s", "0.2"),
    *("--log-level", "warning"),
)

COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
PAGES: Mapping[str, Any] = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "lab"}]},
}
FORBIDDEN_FIELDS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"x-ranvier-control-key")
)


class StrictEngine:
    """An engine on loopback. `answers`: the answers to `x-hostile` requests, by name; `pages`: by path, else vLLM's."""

    def __init__(self, answers: Mapping[str, tuple[bytes, ...]], pages: Mapping[str, bytes]) -> None:
        self.answers = answers
        self.pages = pages
        self.polled = {path: trio.Event() for path in pages}
        self.violations: list[str] = []
        self.url = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        task_status.started()
        await trio.serve_listeners(self.serve, listeners)

    async def serve(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        async with stream:
            try:
                while await self._exchange(stream, connection):
                    connection.start_next_cycle()
            except h11.RemoteProtocolError as error:
                self.violations.append(str(error))
            except (trio.BrokenResourceError, trio.ClosedResourceError, h11.LocalProtocolError):
                pass  # the node closed the connection, or sent a next request on one that this engine ends

    async def _exchange(self, stream: trio.SocketStream, connection: h11.Connection) -> bool:
        """Read one request and answer it. False: the connection is over."""
        body = bytearray()
        request: h11.Request | None = None
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(1 << 18))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
        if not isinstance(event, h11.EndOfMessage) or request is None:
            return False
        self._look(request)
        path = request.target.decode("latin-1").partition("?")[0]
        asked = dict(request.headers).get(b"x-hostile", b"").decode("latin-1")
        pieces = self.answers[asked] if asked else (self.pages[path],) if path in self.pages else ()
        if path in self.polled:
            self.polled[path].set()
        for piece in pieces:
            await stream.send_all(piece)
            await trio.lowlevel.checkpoint()
        if pieces:
            return False
        for made in answer_of(path, request.method, bytes(body)):
            data = connection.send(made)
            if data:
                await stream.send_all(data)
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    def _look(self, request: h11.Request) -> None:
        """Record a violation for what h11 accepts but an engine behind a router should never get."""
        names = [name for name, _ in request.headers]
        found = FORBIDDEN_FIELDS.intersection(names)
        if found or (len(names) != len(frozenset(names)) and names.count(b"content-length") > 1):
            self.violations.append(f"fields {sorted(found)}")
        lowered = request.target.lower()
        if not lowered.startswith(b"/") or any(
            each in lowered for each in (b"..", b"%2e%2e", b"%2f..", b"%5c", b"\\", b"%00")
        ):
            self.violations.append(f"target {request.target!r}")


def answer_of(path: str, method: bytes, body: bytes) -> list[h11.Event]:
    """Return vLLM's answer: 200 with a page, a completion or a stream, else 404."""
    kind, status, data = b"application/json", 200, b""
    if path in PAGES:
        data = orjson.dumps(PAGES[path])
    elif path == "/metrics":
        kind, data = b"text/plain; version=0.0.4", b"vllm:num_requests_running 0\n"
    elif method == b"POST" and path.startswith("/v1/"):
        if b'"stream":true' in body:
            kind, data = b"text/event-stream", b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n' * 3
            data += b"data: [DONE]\n\n"
        else:
            data = orjson.dumps(COMPLETION)
    else:
        status, data = 404, b'{"detail":"Not Found"}'
    fields = [(b"content-type", kind), (b"content-length", b"%d" % len(data))]
    sent = b"" if method == b"HEAD" else data
    return [h11.Response(status_code=status, headers=fields), h11.Data(data=sent), h11.EndOfMessage()]


@dataclass
class HostileLab:
    """A running node with its engine, its peer and its addresses."""

    engine: StrictEngine
    peer: HostilePeer
    process: subprocess.Popen[bytes]
    log: Path
    public: tuple[str, int]
    control: tuple[str, int]
    gossip: tuple[str, int]

    async def talk(self, to: tuple[str, int], pieces: tuple[bytes, ...], *, half_close: bool = False) -> bytes:
        """Send the pieces, and read until the node closes the connection or READ_S have passed."""
        reply = bytearray()
        with trio.move_on_after(READ_S) as waited:
            try:
                stream = await trio.open_tcp_stream(*to)
            except OSError as error:
                return f"({error})".encode()
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(send_all, stream, pieces, half_close)
                try:
                    while data := await stream.receive_some(1 << 18):
                        reply += data
                except trio.BrokenResourceError:
                    pass
                nursery.cancel_scope.cancel()
        if waited.cancelled_caught:
            return b"(no end) " + bytes(reply[:200])
        return bytes(reply)

    async def alive(self) -> str:
        """Return why the node does not serve as before; "" if it does."""
        if self.process.poll() is not None:
            return f"the node ended with code {self.process.returncode}"
        with trio.move_on_after(HEALTH_S):
            health = await self.talk(self.control, (b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",))
            if not health.startswith(b"HTTP/1.1 200"):
                return f"/healthz answers {health[:80]!r}"
            chat = await self.talk(self.public, (chat_bytes(),))
            return "" if chat.startswith(b"HTTP/1.1 200") else f"a plain chat is answered with {chat[:200]!r}"
        return f"the node took more than {HEALTH_S:g} s for its health and a chat"


async def send_all(stream: trio.SocketStream, pieces: tuple[bytes, ...], half_close: bool) -> None:
    try:
        for piece in pieces:
            await stream.send_all(piece)
        if half_close:
            await stream.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the node has refused what was sent so far


def chat_bytes() -> bytes:
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}]})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def hostile_lab(answers: Mapping[str, tuple[bytes, ...]], folder: Path, rng: Random) -> AsyncIterator[HostileLab]:
    """Run a node with its engine and its only peer until the block ends; then terminate the node."""
    ring = rng.randbytes(32).hex()
    public, control, gossip, joined = (("127.0.0.1", free_port(["127.0.0.1"], Random())) for _ in range(4))
    engine, peer = StrictEngine(answers, {}), HostilePeer(joined, parse_key_ring(ring), rng)
    flags = ["--gossip", address_text(gossip), "--join", address_text(joined), *FLAGS]
    for name, secret in (("cluster-key", ring), ("control-key", KEY)):
        file = folder / name
        file.write_text(secret)
        file.chmod(0o600)
        flags += [f"--{name}-file", str(file)]
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await nursery.start(peer.run)
        argv = serve_argv(address_text(public), address_text(control), [engine.url], flags)
        node = start(Command("node", tuple(argv), *control, "/healthz"), folder)
        try:
            await wait_ready(node, START_S)
            yield HostileLab(engine, peer, node.process, node.log, public, control, gossip)
        finally:
            await stop([node], END_S)
            nursery.cancel_scope.cancel()


def address_text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
