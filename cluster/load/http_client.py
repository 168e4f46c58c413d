"""A lean HTTP/1.1 client: one keep-alive connection to one origin, over trio sockets and httptools. No TLS.

Each conversation has its own client, so it resolves the name anew and follows DNS round-robin. A client never sends a
request twice: a connection that the server has closed while idle is replaced before sending; any later failure is the
caller's to count.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import Self

import httptools
import trio

from cluster.load.answer import Failure

READ_BYTES = 65_536
"""One read: enough for a whole answer or a burst of chunks."""


class ExchangeFailed(Exception):
    """The request got no complete answer. The connection is closed; whether the server did the work is not known."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class ResponseReader:
    """Callbacks of httptools: keeps status and headers, and hands the body on as it comes."""

    def __init__(self, on_body: Callable[[bytes, int], None]) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.hand_on = on_body
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keep_alive = False
        self.headers_complete = False
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.keep_alive = self.parser.should_keep_alive()
        self.headers_complete = True

    def on_body(self, data: bytes) -> None:
        self.hand_on(data, self.status)

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200  # after a 1xx the answer is still to come
        if not self.complete:
            self.headers.clear()
            self.headers_complete = False

    def end_of_input(self) -> None:
        """The server closed the connection. This completes only an answer without a length and without chunks."""
        framed = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()
        self.complete = self.headers_complete and not framed


class Connection:
    """A client's connection to one origin. Use it as an async context manager, or close it."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.stream: trio.SocketStream | None = None
        self.node = ""
        """Address and port of the connected node; empty before the first connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.socket.close()
            self.stream = None

    async def connect(self) -> trio.SocketStream:
        """Return the open connection, or a new one to the next address of the name. Raises ExchangeFailed."""
        if self.stream is not None and not self.is_spent():
            return self.stream
        self.close()
        try:
            self.stream = await trio.open_tcp_stream(self.host, self.port)
        except socket.gaierror as error:
            raise ExchangeFailed(Failure("name not found", f"{self.host}: {error.strerror}")) from error
        except OSError as error:
            raise ExchangeFailed(
                Failure(f"connect: {error_name(error)}", f"{self.host}:{self.port}: {error}")
            ) from error
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = self.stream.socket.getpeername()
        self.node = f"{peer[0]}:{peer[1]}"
        return self.stream

    def is_spent(self) -> bool:
        """Whether an idle connection is useless: it has something to read, its end or bytes that nobody asked for."""
        assert self.stream is not None
        poller = select.poll()
        poller.register(self.stream.socket.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    async def exchange(self, request: bytes, on_body: Callable[[bytes, int], None]) -> ResponseReader:
        """Send one request, read one answer; `on_body(data, status)` is called as the body arrives.

        Raises ExchangeFailed. A cancelled or failed exchange closes the connection, so the server notices.
        """
        reader = ResponseReader(on_body)
        stream = await self.connect()
        try:
            await stream.send_all(request)
            while not reader.complete:
                data = await stream.receive_some(READ_BYTES)
                if not data:
                    reader.end_of_input()
                    break
                reader.parser.feed_data(data)
        except trio.BrokenResourceError as error:
            self.close()
            word = error_name(error.__cause__)
            raise ExchangeFailed(Failure(f"connection lost {stage(reader)}", f"{self.node}: {word}")) from error
        except httptools.HttpParserError as error:
            self.close()
            raise ExchangeFailed(Failure("answer is not HTTP", f"{self.node}: {error}")) from error
        except BaseException:
            self.close()
            raise
        if not reader.complete:
            self.close()
            raise ExchangeFailed(Failure(f"connection closed {stage(reader)}", self.node))
        if not reader.keep_alive:
            self.close()
        return reader


def stage(reader: ResponseReader) -> str:
    return "in mid-answer" if reader.headers_complete else "before an answer"


def error_name(error: BaseException | None) -> str:
    """Return the system's short text for an error; if trio has tried several addresses, for the last one."""
    cause = error.__cause__ if error is not None else None
    if isinstance(cause, ExceptionGroup):
        error = cause.exceptions[-1]
    if isinstance(error, OSError) and error.errno:
        return os.strerror(
            error.errno
        ).lower()  # not error.strerror, to which trio adds the address: such errors would not group
    return type(error).__name__


def request_bytes(path: str, host: str, port: int, body: bytes, api_key: str = "", *, method: str = "POST") -> bytes:
    """Return an HTTP/1.1 request with a JSON body."""
    authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"user-agent: ranvier-lab\r\naccept: */*\r\n{authorization}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body


async def fetch(
    host: str, port: int, path: str, *, method: str = "GET", body: bytes = b"", api_key: str = ""
) -> tuple[int, bytes]:
    """Send one request on its own connection, and return status and body. Raises ExchangeFailed."""
    got = bytearray()
    async with Connection(host, port) as connection:
        request = request_bytes(path, host, port, body, api_key, method=method)
        reader = await connection.exchange(request, lambda data, _: got.extend(data))
    return reader.status, bytes(got)
