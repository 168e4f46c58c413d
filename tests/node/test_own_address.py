"""A node that is told of its own address as a backend: requests would come back to it until it is full."""

from __future__ import annotations

from random import Random

from cluster.dns.addresses import free_port
from tests.node.node_lab import DEADLINE_S, Lab, Node, lab, opened
from tests.proxy.test_overload import answered
from tests.proxy.test_poison import question
from tests.proxy.wire import GOOD, Scripted

OWN_ADDRESS = "this address leads to the node itself"


async def ask(node: Node, number: int) -> int:
    return (await answered(node, question(b"/v1/chat/completions", number, poison=False)))[0]


async def until_known(node: Node, url: str) -> None:
    name = url.partition("://")[2]

    def is_known(answer: dict[str, list[dict[str, str]]]) -> bool:
        return any(each["name"] == name and each["health"] == "unhealthy" for each in answer["backends"])

    await node.until("/admin/backends", is_known)


async def test_a_node_sends_nothing_to_itself_when_it_is_added_as_a_backend() -> None:
    engine = Scripted(GOOD)
    async with lab(engine, policy="round_robin") as node:
        await node.http.post(f"{node.control}/admin/backends", json={"url": node.url})
        await until_known(node, node.url)
        assert [await ask(node, number) for number in range(9)] == [200] * 9
        found = await node.until("/admin/status", lambda status: OWN_ADDRESS in str(status["findings"]))
    assert len(engine.bodies) == 9
    assert any(each["kind"] == "engine_down" for each in found["findings"])


async def test_a_node_that_starts_with_itself_as_its_only_backend_soon_knows_it() -> None:
    """It asks before its port is open, when nothing there is wrong yet, and again as soon as it is."""
    port = free_port(["127.0.0.1"], Random())
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.engines.append(f"http://127.0.0.1:{port}")
        node = await place.start(listen=f"127.0.0.1:{port}", probe_interval_s=300)
        await until_known(node, node.url)
        assert await ask(node, 1) == 503


async def test_probes_of_other_nodes_find_a_node_alive() -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        behind = await place.start()
        place.engines[:] = [behind.url]
        before = await place.start()
        await before.until_backend(lambda backend: backend["health"] == "healthy")
        assert (await before.chat()).status_code == 200
