"""Whether a node should get requests: not while it alone reaches no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.node.node_lab import Lab, Node, cluster_lab, opened, start_engine


async def ready(node: Node) -> tuple[int, str]:
    answer = await node.http.get(f"{node.control}/readyz")
    return answer.status_code, answer.json()["reason"]


async def until_ready(node: Node, status: int) -> str:
    while (found := await ready(node))[0] != status:  # noqa: ASYNC110  # a page
        await trio.sleep(0.05)
    return found[1]


async def test_without_any_engine_a_node_alone_is_ready_and_clients_learn_when_to_try_again() -> None:
    async with opened(Lab, 0, 30) as place:
        node = await place.start(backend=[])
        assert await ready(node) == (200, "")
        answer = await node.chat()
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert (await node.http.get(f"{node.url}/health")).status_code == 200


@pytest.mark.slow
async def test_a_node_that_reaches_no_engine_is_unready_while_a_peer_calls_one_healthy(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        polled = {"probe_interval_s": 0.1, "probe_failures": 1}
        dead = "http://127.0.0.1:9"
        well = await place.start(node_name="well", backend=place.engines, **polled)
        cut = await place.start(node_name="cut", backend=[dead], **polled)
        await cut.sees(1)
        assert await until_ready(cut, 503) == "it reaches no engine, and well calls one healthy"
        assert await ready(well) == (200, "")
        await well.fault(place.engines[0], kind="status", status=503, health=True)
        await until_ready(cut, 200)  # all agree that there is none
        assert (await ready(well))[0] == 200


async def test_a_node_is_ready_again_once_it_reaches_an_engine(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        polled = {"probe_interval_s": 0.1, "probe_failures": 1}
        await place.start(backend=place.engines, **polled)
        engine, scope = await start_engine(place.nursery, 7)
        scope.cancel()
        cut = await place.start(backend=[engine], **polled)
        await until_ready(cut, 503)
        await start_engine(place.nursery, 7, port=int(engine.rpartition(":")[2]))
        await until_ready(cut, 200)
