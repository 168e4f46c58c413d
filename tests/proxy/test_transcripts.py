"""Golden transcripts: the exact bytes that engines and clients get, whatever the path of a request is made of.

Each file in `transcripts/` is one exchange: what it shows, the node's settings, then blocks under `=== ` lines. What
clients and engines send is played in its order; what they got is recorded. To record it again, delete it from the file
and run this test. A block's lines end in LF, and other bytes that are not text are escaped as in Python.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from tests.node.node_lab import DEADLINE_S, Lab, Node, opened
from tests.node.test_cached_responses import until_in_flight
from tests.proxy.test_realtime import certified
from tests.proxy.wire import CLOSE, HANG, Scripted, Step, Wire, answer

FOLDER = Path(__file__).parent / "transcripts"
BLOCK = re.compile(r"^=== (.+)\n", re.MULTILINE)
PAGE = answer(b'{"data":[{"id":"lab-model","owned_by":"vllm"}]}')
NORMAL = (
    *((rb"127\.0\.0\.1:\d+", b"HOST:PORT"), (rb"x-request-id: [0-9a-f]{8}-\d+", b"x-request-id: ID")),
    (rb"date: [^\r]+ GMT", b"date: DATE"),
)
ENDS = {"closes": CLOSE, "hangs": HANG}


class Block(NamedTuple):
    name: str
    data: bytes

    @property
    def words(self) -> Sequence[str]:
        return self.name.split()

    def __str__(self) -> str:
        lines = (line.decode("latin-1").encode("unicode_escape").decode() for line in self.data.split(b"\n"))
        return f"=== {self.name}\n" + "\n".join(lines) + "\n"


def blocks_of(text: str) -> tuple[str, list[Block]]:
    intro, *parts = BLOCK.split(text)
    found = (
        b"\n".join(line.encode("latin-1").decode("unicode_escape").encode("latin-1") for line in part[:-1].split("\n"))
        for part in parts[1::2]
    )
    return intro, [Block(*pair) for pair in zip(parts[::2], found, strict=True)]


class Engine(Scripted):
    """Plays what it is handed, and keeps what clients sent; probes, which have no id, see a healthy engine."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[bytes] = []
        self.hand, self._scripts = trio.open_memory_channel[Sequence[Step]](16)

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async with Wire(stream) as wire:
                while (request := await wire.next_request()) is not None:
                    if b"\r\nx-request-id:" not in request[0].lower():
                        await wire.send(PAGE)
                        continue
                    self.got.append(b"".join(request))
                    self.asked.set()
                    self.turns = iter([await self._scripts.receive()])
                    if not await self.play(wire):
                        return


class Client:
    """One connection of a client."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.sent, self.end = wire, b"", b""

    async def finish(self) -> None:
        """Receive the answer to its end, if one is still to come."""
        sent, self.sent = self.sent, b""
        try:
            if sent:
                status, fields, _ = await self.wire.response(bodiless=sent.startswith(b"HEAD "))
                if status == 101 or fields.get("connection") == "close":
                    await self.wire.rest()
        except trio.BrokenResourceError:
            self.end = b"(reset)"


async def play(node: Node, engine: Engine, blocks: Sequence[Block], tls: ssl.SSLContext | None) -> list[Block]:
    """Play an exchange. Returns what was received."""
    clients: dict[str, Client] = {}
    for before, block in zip((None, *blocks), blocks, strict=False):
        if block.words[0] == "client" and (before is None or before.name != "asked"):
            for client in clients.values():
                await client.finish()
        match block.words:
            case ["client", name]:
                if name not in clients:
                    wire = await node.wire()
                    if tls is not None:
                        wire.stream = trio.SSLStream(
                            wire.stream, tls, server_hostname="127.0.0.1", https_compatible=True
                        )  # type: ignore[assignment]
                    clients[name] = Client(wire)
                clients[name].sent = block.data
                await clients[name].wire.send(block.data)
            case ["engine", *end]:
                engine.hand.send_nowait([block.data, *(ENDS[word] for word in end)])
            case ["asked"]:
                await engine.asked.wait()
            case [count, "in", "flight"]:
                await until_in_flight(node, int(count))
            case [name, "leaves"]:
                await clients[name].wire.more()
                await clients.pop(name).wire.aclose()
                await engine.left.wait()
    for client in clients.values():
        await client.finish()
        await client.wire.aclose()
    got = [Block(f"engine got {number}", data) for number, data in enumerate(engine.got, 1)]
    return got + [Block(f"{name} got", client.wire.seen + client.end) for name, client in clients.items()]


def normal(block: Block) -> Block:
    data = block.data
    for pattern, word in NORMAL:
        data = re.sub(pattern, word, data)
    return Block(block.name, data)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
async def test_engines_and_clients_get_the_bytes_that_were_recorded(name: str, tmp_path: Path) -> None:
    path, engine, tls = FOLDER / f"{name}.txt", Engine(), None
    intro, blocks = blocks_of(path.read_text())
    settings = {"debug_headers": False, **json.loads(intro.partition("\n")[2] or "{}")}
    if settings.pop("tls", False):
        files, tls = certified(tmp_path)
        settings |= files
    async with opened(Lab, 0, DEADLINE_S) as lab:
        lab.engines += ["http://127.0.0.1:1"] * settings.pop("dead", 0)
        lab.engines += [await lab.listen(engine.serve) for _ in range(settings.pop("engines", 1))]
        node = await lab.start(**settings)
        given = [block for block in blocks if "got" not in block.words]
        got = [normal(block) for block in await play(node, engine, given, tls)]
    if given == blocks:
        path.write_text(intro + "".join(map(str, (*given, *got))))
    assert [str(block) for block in blocks if "got" in block.words] == [str(block) for block in got]
