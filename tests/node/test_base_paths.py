"""An engine whose pages all lie below a path, behind a gateway: requests, probes and locations."""

from __future__ import annotations

from pathlib import Path

import trio

from tests.node.discovery.source_labs import kubernetes_lab
from tests.node.fleet.test_backend_orders import command
from tests.node.node_lab import Lab, Node, cluster_lab, opened
from tests.node.test_cluster_of_nodes import ADMIN_KEY

BASE = b"/llm/gemma"


class Gateway:
    """Carries requests below a path to an engine, without that path; keeps the targets of all."""

    def __init__(self, engine: str) -> None:
        self._port = int(engine.rpartition(":")[2])
        self.targets: list[bytes] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self._port) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, engine, stream)
            async for data in stream:
                method, _, rest = bytes(data).partition(b" ")
                if method in (b"GET", b"POST"):
                    self.targets.append(rest.partition(b" ")[0])
                await engine.send_all(bytes(data).replace(b" " + BASE + b"/", b" /", 1))
            nursery.cancel_scope.cancel()

    async def _carry(self, engine: trio.SocketStream, stream: trio.SocketStream) -> None:
        async for data in engine:
            await stream.send_all(data)


async def check(node: Node, gateway: Gateway) -> None:
    await node.until_backend(lambda backend: backend["health"] == "healthy" and backend["models"])
    assert (await node.chat()).status_code == 200
    assert len(gateway.targets) > 2
    assert [target for target in gateway.targets if not target.startswith(BASE + b"/")] == []
    assert BASE + b"/v1/chat/completions" in gateway.targets
    assert BASE + b"/v1/models" in gateway.targets


async def test_what_is_written_precedes_the_paths_of_requests_and_probes() -> None:
    async with opened(Lab, 1, 30) as place:
        gateway = Gateway(place.engines[0])
        url = await place.listen(gateway.serve)
        await check(await place.start(backend=[f"{url},base_path={BASE.decode()}"]), gateway)


async def test_operators_give_one_while_nodes_run_to_one_or_to_all(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        gateway = Gateway(place.engines[0])
        url = await place.listen(gateway.serve)
        first = await place.start(backend=[], gossip_admin_key=ADMIN_KEY)
        second = await place.start(backend=[], gossip_admin_key=ADMIN_KEY)
        await first.sees(1)
        assert "added" in await command(first, "add", url, f"base_path={BASE.decode()}", "--cluster")
        for node in (first, second):
            assert (await node.backends())[0]["base_path"] == BASE.decode()
            await check(node, gateway)
        assert "set" in await command(first, "set", url, "base_path=", "--cluster")
        assert ["base_path" in backend for node in (first, second) for backend in await node.backends()] == [False] * 2


async def test_a_pod_may_have_it_as_an_annotation(tmp_path: Path) -> None:
    async with opened(Lab, 1, 30) as place, kubernetes_lab("pods", tmp_path) as source:
        gateway = Gateway(place.engines[0])
        url = await place.listen(gateway.serve)
        source.pod(url, annotations={"ranvier.io/base-path": BASE.decode()})  # type: ignore[attr-defined]
        node = await place.start(backend=[], **source.settings)
        await node.until("/admin/backends", lambda answer: answer["backends"])
        await check(node, gateway)
