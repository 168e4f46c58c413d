"""Pages that a thread of the test serves, to a command or to another process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Pages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PageServer

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: bytes, fields: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (fields or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def sent(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))


class PageServer(ThreadingHTTPServer):
    def __init__(self, pages: type[Pages]) -> None:
        super().__init__(("127.0.0.1", 0), pages)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[Any] = []


@contextmanager
def serving(pages: type[Pages]) -> Iterator[PageServer]:
    with PageServer(pages) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
