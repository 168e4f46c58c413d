"""Engines made of one method, on real sockets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import trio

from tests.proxy.wire import Wire


class Request(NamedTuple):
    """What came: `fields` by name in lower case."""

    method: str
    target: str
    fields: Mapping[bytes, bytes]
    body: bytes

    @property
    def line(self) -> str:
        return f"{self.method} {self.target}"


class AnsweringEngine:
    """Answers each request by `answer`, which subclasses write; what it returns is sent."""

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # a node that gives up leaves an answer unread
            async with Wire(stream) as wire:
                while (came := await wire.next_request()) is not None:
                    first, *lines = came[0].strip().split(b"\r\n")
                    method, target, _ = first.decode("latin-1").split(" ")
                    fields = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
                    await wire.send(await self.answer(Request(method, target, fields, came[1])))

    async def answer(self, asked: Request) -> bytes:
        raise NotImplementedError
