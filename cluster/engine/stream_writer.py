"""Writes the answers of the fake engine that come token by token."""

from __future__ import annotations

from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-engine: %s\r\ntransfer-encoding: chunked\r\n%s\r\n"
)


class StreamWriter:
    """Writes a body of unknown length: in chunks, for HTTP/1.0 until the end. The head goes out with the first part."""

    def __init__(self, request: HttpRequest, client: Client, name: str) -> None:
        self.started = False
        self.client = client
        self._chunked = request.http_minor >= 1
        head = STREAM_HEAD % (name.encode(), b"" if request.keep_alive else b"connection: close\r\n")
        self._head = head if self._chunked else head.replace(b"transfer-encoding: chunked\r\n", b"")
        if not self._chunked:
            client.must_close = True

    async def write(self, data: bytes) -> None:
        head, self._head, self.started = self._head, b"", True
        if not data and not head:
            return  # an empty chunk would end the body
        if self._chunked:
            framed = (b"%x\r\n" % len(data), data, b"\r\n") if data else ()
            self.client.send(head, *framed)
        else:
            self.client.send(head + data)
        await self.client.flush()

    async def end(self) -> None:
        if self._chunked:
            self.client.send(b"0\r\n\r\n")
            await self.client.flush()
