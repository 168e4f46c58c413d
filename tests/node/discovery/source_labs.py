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
from cluster.kubernetes.api_server import ApiServer
from cluster.kubernetes.api_server import serve as serve_api
from ranvier_py.node.discovery import dns_source, file_source, kubernetes_watch

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
        try:
            other = await trio.open_tcp_stream("127.0.0.1", self._port)
        except OSError:  # the engine is gone, or resets at once: so is this connection of it
            await stream.aclose()
            return
        async with other, trio.open_nursery() as nursery:
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


class KubernetesLab(SourceLab):
    """An API server in whose cluster engines run as pods."""

    def __init__(self, api: ApiServer, port: int, credentials: Path, target: str, name: str) -> None:
        self.api, self.name = api, name
        self.settings = {
            "backend_kubernetes": [target],
            "kubernetes_api": f"http://127.0.0.1:{port}",
            "kubernetes_credentials": credentials,
        }
        credentials.mkdir(exist_ok=True)
        (credentials / "token").write_text("token")
        (credentials / "namespace").write_text(api.namespace)

    async def fail(self) -> None:
        self.api.status = 500
        self.api.cut()

    def pod(self, engine: str, *, ready: bool = True, **meta: Any) -> None:
        """Have a pod that is this engine."""
        host, port = engine.removeprefix("http://").split(":")
        conditions = [{"type": "Ready", "status": str(ready)}]
        body = {
            "spec": {"containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": int(port)}]}]},
            "status": {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}], "conditions": conditions},
        }
        self.api.put("pods", f"pod-{port}", body, **{"labels": {"app": "vllm"}, **meta})


class PodsLab(KubernetesLab):
    async def give(self, engines: Sequence[str]) -> None:
        self.api.status = 0
        for _, name in [key for key in self.api.objects if key[0] == "pods"]:
            if not any(engine.endswith(name.removeprefix("pod-")) for engine in engines):
                self.api.drop("pods", name)
        for engine in engines:
            self.pod(engine)


class ServiceLab(KubernetesLab):
    """Each engine has a slice of its own, for want of another port."""

    async def give(self, engines: Sequence[str]) -> None:
        self.api.status = 0
        if ("services", "vllm") not in self.api.objects:
            self.api.put("services", "vllm", {"spec": {"selector": {"app": "vllm"}}})
        ports = [int(engine.rpartition(":")[2]) for engine in engines]
        for _, name in [key for key in self.api.objects if key[0] == "endpointslices"]:
            if int(name.removeprefix("vllm-")) not in ports:
                self.api.drop("endpointslices", name)
        for engine, port in zip(engines, ports, strict=True):
            self.pod(engine)
            self.slice(f"vllm-{port}", port, [self.endpoint(engine)])

    def endpoint(self, engine: str, **conditions: bool) -> dict[str, Any]:
        pod = f"pod-{engine.rpartition(':')[2]}"
        uid = self.api.objects["pods", pod]["metadata"]["uid"]
        target = {"kind": "Pod", "name": pod, "uid": uid}
        return {"addresses": ["127.0.0.1"], "conditions": conditions, "targetRef": target}

    def slice(self, name: str, port: int | None, endpoints: Sequence[dict[str, Any]]) -> None:
        body = {
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
            "endpoints": list(endpoints) or None,
        }
        self.api.put("endpointslices", name, body, labels={"kubernetes.io/service-name": "vllm"})


class PoolLab(PodsLab):
    async def give(self, engines: Sequence[str]) -> None:
        if ("inferencepools", "gemma") not in self.api.objects:
            spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}
            self.api.put("inferencepools", "gemma", {"spec": spec})
        await super().give(engines)

    def pod(self, engine: str, *, ready: bool = True, **meta: Any) -> None:
        """All engines of a pool have its port, but for this annotation."""
        annotations = {"smg.ai/worker-ports": engine.rpartition(":")[2], **meta.pop("annotations", {})}
        super().pod(engine, ready=ready, annotations=annotations, **meta)


KUBERNETES: dict[str, tuple[type[KubernetesLab], str, str]] = {
    "pods": (PodsLab, "pods=app=vllm", "kubernetes pods/app=vllm"),
    "service": (ServiceLab, "service=vllm", "kubernetes service/vllm"),
    "pool": (PoolLab, "pool=gemma", "kubernetes pool/gemma"),
}


@asynccontextmanager
async def kubernetes_lab(kind: str, folder: Path) -> AsyncIterator[SourceLab]:
    lab, target, name = KUBERNETES[kind]
    api = ApiServer()
    async with trio.open_nursery() as nursery:
        port = await nursery.start(serve_api, api, None)
        yield lab(api, port, folder / "credentials", target, name)
        nursery.cancel_scope.cancel()


SOURCES: dict[str, Callable[[Path], AbstractAsyncContextManager[SourceLab]]] = {
    "file": file_lab,
    "manifest": manifest_lab,
    "dns": dns_lab,
    "srv": srv_lab,
    **{kind: partial(kubernetes_lab, kind) for kind in KUBERNETES},
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sources looked at often."""
    monkeypatch.setattr(file_source, "LOOK_S", SOON_S)
    monkeypatch.setattr(kubernetes_watch, "PAUSE_S", SOON_S)
    monkeypatch.setattr(kubernetes_watch, "PAUSE_S_MAX", SOON_S)
    monkeypatch.setattr(dns_source, "LEAST_S", SOON_S)
    monkeypatch.setattr(dns_source, "MOST_S", SOON_S)
