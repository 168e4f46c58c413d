"""Each kind of source, as whoever fills it sees it: it gives engines, breaks, and gives engines again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from cluster.dns.addresses import free_port
from cluster.dns.dns_server import DnsFault, DnsFaultKind, ServiceRecord, Zone
from cluster.dns.dns_server import serve as serve_dns
from ranvier_py.node.discovery import dns_source, file_source

SOON_S = 0.05  # between two looks of a source, of which tests await some


class SourceLab:
    """One source. `settings`: of the node that follows it. `name`: as the node calls it."""

    name = ""
    settings: dict[str, Any]

    def url_of(self, engine: str) -> str:
        """The URL by which its entry for an engine names that."""
        return engine

    async def give(self, engines: Sequence[str]) -> None:
        """Have it name these engines from now on, by their URLs."""
        raise NotImplementedError

    async def fail(self) -> None:
        """Have it fail from now on."""
        raise NotImplementedError


class FileLab(SourceLab):
    """A file that is renamed into place."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.settings = {"backends_file": path}

    async def give(self, engines: Sequence[str]) -> None:
        self._write("".join(f'[[backend]]\nurl = "{engine}"\n' for engine in engines) or "backend = []")

    async def fail(self) -> None:
        self._write("[[backend]]\nurl = 3\n")

    def _write(self, text: str) -> None:
        new = self._path.with_name("new")
        new.write_text(text)
        new.rename(self._path)


class ManifestLab(FileLab):
    """A manifest of SMG."""

    async def give(self, engines: Sequence[str]) -> None:
        workers = [{"id": f"w{number}", "url": engine} for number, engine in enumerate(engines)]
        self._write(json.dumps({"version": 1, "workers": workers}))


@asynccontextmanager
async def file_lab(folder: Path) -> AsyncIterator[SourceLab]:
    yield FileLab(folder / "backends.toml")


@asynccontextmanager
async def manifest_lab(folder: Path) -> AsyncIterator[SourceLab]:
    yield ManifestLab(folder / "workers.json")


class DnsLab(SourceLab):
    """A name whose addresses are engines; each has the same port, on a loopback address of its own."""

    def __init__(self, zone: Zone, server: tuple[str, int], nursery: trio.Nursery, port: int) -> None:
        self.zone, self._nursery, self._port = zone, nursery, port
        self.name = f"dns engines.lab:{port}"
        self.settings = {"backend_dns": [f"engines.lab:{port}"], "backend_dns_server": "{}:{}".format(*server)}
        self._places: dict[str, str] = {}

    def url_of(self, engine: str) -> str:
        return f"http://{self._places[engine]}:{self._port}"

    async def give(self, engines: Sequence[str]) -> None:
        for engine in engines:
            if engine not in self._places:
                host = self._places[engine] = f"127.0.0.{10 + len(self._places)}"
                await self._nursery.start(partial(trio.serve_tcp, Forward(engine).serve, self._port, host=host))
        self.zone.set("engines.lab", [self._places[engine] for engine in engines])
        self.zone.fault("engines.lab", None)

    async def fail(self) -> None:
        self.zone.set("engines.lab", self.zone.names.get("engines.lab", ()))
        self.zone.fault("engines.lab", DnsFault(DnsFaultKind.SERVFAIL))


class Forward:
    """Carries connections to an engine."""

    def __init__(self, engine: str) -> None:
        self._port = int(engine.rpartition(":")[2])

    async def serve(self, stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self._port) as other, trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, stream, other)
            await self._carry(other, stream)
            nursery.cancel_scope.cancel()

    async def _carry(self, one: trio.SocketStream, other: trio.SocketStream) -> None:
        try:
            async for data in one:
                await other.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


class SrvLab(SourceLab):
    """SRV records, each with a port."""

    name = "dns _http._tcp.engines.lab"

    def __init__(self, zone: Zone, server: tuple[str, int]) -> None:
        self.zone = zone
        self.settings = {"backend_dns": ["_http._tcp.engines.lab"], "backend_dns_server": "{}:{}".format(*server)}
        zone.set("engine.lab", ["127.0.0.1"])

    async def give(self, engines: Sequence[str]) -> None:
        ports = [int(engine.rpartition(":")[2]) for engine in engines]
        self.zone.serve(self.name[4:], [ServiceRecord("engine.lab", port) for port in ports])
        self.zone.fault(self.name[4:], None)

    async def fail(self) -> None:
        self.zone.serve(self.name[4:], self.zone.services.get(self.name[4:], ()))
        self.zone.fault(self.name[4:], DnsFault(DnsFaultKind.SERVFAIL))


@asynccontextmanager
async def zone_lab() -> AsyncIterator[tuple[Zone, tuple[str, int], trio.Nursery]]:
    zone = Zone({})
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_dns, zone, "127.0.0.1", 0)
        yield zone, server, nursery
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def dns_lab(_: Path) -> AsyncIterator[SourceLab]:
    async with zone_lab() as (zone, server, nursery):
        yield DnsLab(zone, server, nursery, free_port(["127.0.0.10", "127.0.0.11", "127.0.0.12"], Random()))


@asynccontextmanager
async def srv_lab(_: Path) -> AsyncIterator[SourceLab]:
    async with zone_lab() as (zone, server, _nursery):
        yield SrvLab(zone, server)


SOURCES: dict[str, Callable[[Path], AbstractAsyncContextManager[SourceLab]]] = {
    "file": file_lab,
    "manifest": manifest_lab,
    "dns": dns_lab,
    "srv": srv_lab,
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sources looked at often."""
    monkeypatch.setattr(file_source, "LOOK_S", SOON_S)
    monkeypatch.setattr(dns_source, "LEAST_S", SOON_S)
    monkeypatch.setattr(dns_source, "MOST_S", SOON_S)
