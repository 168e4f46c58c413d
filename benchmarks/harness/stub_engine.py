"""An engine that only answers, as fast as Python can: `python -m benchmarks.harness.stub_engine PORT`.

It is one epoll loop that parses only lengths, so that a benchmark of routers does not measure the engine: it answers
several times as many requests as any router forwards. A POST gets a chat completion, or its equivalent for /v1/messages
and /v1/responses; with "stream": true it gets a hundred server-sent events. GET /manner/… sets how these are written
from then on: `at_once` in one write; `writes` each event in its own write, back to back, as engines write their tokens;
`steps` in pieces of ten, interleaved over all running streams. (Routers that rewrite the body move `stream` to its end,
and drop fields that they do not know.) Any other GET gets what routers ask of engines that they register. The engine
trusts its clients and is only for benchmarks.
"""

from __future__ import annotations

import re
import select
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

CHUNKS = 100
CHUNKS_PER_WRITE = 10
"""Events in one piece of a stream in `steps`; between two pieces the loop serves all other connections."""

COMPLETION = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15}}'
)
MESSAGE = (
    b'{"id":"c","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"hello"}],'
    b'"stop_reason":"end_turn","usage":{"input_tokens":10,"output_tokens":5}}'
)
RESPONSE = (
    b'{"id":"resp_c","object":"response","created_at":1,"status":"completed","model":"m","output":[{"type":"message",'
    b'"id":"msg_c","role":"assistant","status":"completed","content":[{"type":"output_text","text":"hello"}]}],'
    b'"usage":{"input_tokens":10,"output_tokens":5,"total_tokens":15}}'
)
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":" tok"}}]}\n\n'
)
ABOUT = b'{"object":"list","data":[{"id":"m","object":"model"}],"model_path":"m","status":"ok"}'


def plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chat_request(body: bytes) -> bytes:
    """Return the HTTP request of a chat with this body."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def read_message(sock: socket.socket, first: bytes = b"") -> bytes:
    """Read one HTTP message, whose head must come in one piece; b"" if the other side has closed."""
    pieces = [first or sock.recv(1 << 18)]
    end = pieces[0].find(b"\r\n\r\n") + 4
    length = LENGTH.search(pieces[0], 0, end)
    missing = end + (int(length[1]) if length else 0) - len(pieces[0])
    while missing > 0 and pieces[-1]:
        pieces.append(sock.recv(1 << 18))
        missing -= len(pieces[-1])
    return b"".join(pieces) if pieces[-1] else b""


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = chunk(EVENT)
PIECE = CHUNK * CHUNKS_PER_WRITE
STREAM_END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
STREAM = STREAM_HEAD + CHUNK * CHUNKS + STREAM_END
ANSWERS = {b"/v1/messages": plain(MESSAGE), b"/v1/responses": plain(RESPONSE)}
ANSWER, INFORMATION = plain(COMPLETION), plain(ABOUT)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
STREAMED = re.compile(rb'"stream": ?true')
FIRST_BYTES, LAST_BYTES = 200, 1000
"""Bytes of each piece of a body that are searched for `stream`, before and after the messages; all would cost more."""


@dataclass(slots=True)
class Connection:
    sock: socket.socket
    missing: int = 0  # bytes of the body that are still to come
    streams: bool = False
    answer: bytes = b""  # the answer if it does not stream
    pieces: int = 0  # pieces left of the running stream


class Stub:
    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.listener.setblocking(False)
        self.connections: dict[int, Connection] = {}
        self.streaming: dict[int, Connection] = {}
        self.manner = "at_once"
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self.epoll.poll(0 if self.streaming else -1):
                if fd == self.listener.fileno():
                    self.accept()
                else:
                    self.read(fd, self.connections[fd])
            for fd, connection in list(self.streaming.items()):
                self.write_piece(fd, connection)

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections[sock.fileno()] = Connection(sock)
        self.epoll.register(sock, select.EPOLLIN)

    def read(self, fd: int, connection: Connection) -> None:
        data = b""
        with suppress(OSError):
            data = connection.sock.recv(1 << 18)
        if not data:
            self.close(fd, connection)
            return
        if connection.missing:
            end = 0
            connection.missing -= len(data)
        else:
            end = data.find(b"\r\n\r\n") + 4
            length = LENGTH.search(data, 0, end)
            connection.missing = int(length[1]) - (len(data) - end) if length else 0
            path = data[:FIRST_BYTES].partition(b" ")[2].partition(b" ")[0]
            connection.answer = INFORMATION if data.startswith(b"GET") else ANSWERS.get(path, ANSWER)
            connection.streams = False
            if path.startswith(b"/manner/"):
                self.manner = path.rpartition(b"/")[2].decode()
        for first, last in ((end, end + FIRST_BYTES), (max(end, len(data) - LAST_BYTES), len(data))):
            connection.streams = connection.streams or STREAMED.search(data, first, last) is not None
        if connection.missing <= 0:
            connection.missing = 0
            self.answer(fd, connection)

    def answer(self, fd: int, connection: Connection) -> None:
        with suppress(OSError):
            if not connection.streams:
                connection.sock.send(connection.answer)
            elif self.manner == "steps":
                connection.sock.send(STREAM_HEAD)
                connection.pieces = CHUNKS // CHUNKS_PER_WRITE
                self.streaming[fd] = connection
            elif self.manner == "writes":
                send = connection.sock.send  # the stream is 16 kB, which fits into an empty socket buffer
                send(STREAM_HEAD)
                for _ in range(CHUNKS):
                    send(CHUNK)
                send(STREAM_END)
            else:
                connection.sock.send(STREAM)

    def write_piece(self, fd: int, connection: Connection) -> None:
        try:
            connection.sock.send(PIECE if connection.pieces else STREAM_END)
        except BlockingIOError:
            return
        except OSError:
            self.close(fd, connection)
            return
        if connection.pieces == 0:
            del self.streaming[fd]
        connection.pieces -= 1

    def close(self, fd: int, connection: Connection) -> None:
        self.epoll.unregister(fd)
        self.streaming.pop(fd, None)
        del self.connections[fd]
        connection.sock.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        Stub(int(sys.argv[1])).run()
