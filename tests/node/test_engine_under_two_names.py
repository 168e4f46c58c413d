"""Nodes that write one engine's URL in two forms, or reach two engines by one: all of them name it and the remedy."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import trio

from ranvier_py.core.routing.backend_state.facts import BackendFacts
from ranvier_py.core.routing.processes import engine_names
from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import BETWEEN_LOOKS_S, ClusterLab, Lab, Node, cluster_lab, opened, start_engine
from tests.proxy.wire import answer

DEADLINE_S = 30
VLLM = b"""process_start_time_seconds 1.7537NUMBER32e+09
vllm:prefix_cache_queries_created{engine="0"} 1.7537NUMBER3269358883e+09
vllm:prefix_cache_queries_total{engine="0"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="573"} 1.0
"""
SGLANG = b"""sglang:prompt_tokens_total{model_name="m"} 4882NUMBER.0
sglang:generation_tokens_total{model_name="m"} 139795.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1000.0
"""
FORMS = {"vllm": VLLM, "sglang": SGLANG}


class Paged(AnsweringEngine):
    """An engine with a metrics page, which may be another one for each node, by the key that it asks with."""

    def __init__(self, form: bytes) -> None:
        self.form = form
        self.numbers: dict[bytes, bytes] = {}

    async def answer(self, asked: Request) -> bytes:
        number = self.numbers.get(asked.fields.get(b"authorization", b"").removeprefix(b"Bearer "), b"1")
        return answer(
            self.form.replace(b"NUMBER", number) if asked.target == "/metrics" else b'{"data": [{"id": "m"}]}'
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes repeat what they know, and look again, many times a second."""
    monkeypatch.setattr(BackendFacts, "REPEAT_S", 0.2)
    monkeypatch.setattr(engine_names, "MARGIN_S", 0.1)
    monkeypatch.setattr(engine_names, "ASKED_AGAIN_S", 0.2)


def by_name(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


async def pair(place: ClusterLab, first: str, second: str, **settings: object) -> list[Node]:
    nodes = [
        await place.start(node_name=f"node-{name}", backend=[url], backend_api_key=f"key{name}", **settings)
        for name, url in (("a", first), ("b", second))
    ]
    for node in nodes:
        await node.sees(1)
    return nodes


async def logged(caplog: pytest.LogCaptureFixture, event: str, count: int) -> list[str]:
    """The levels of the lines of this event as soon as there are so many."""
    while len(lines := [each for each in caplog.records if each.getMessage().startswith(event)]) < count:  # noqa: ASYNC110
        await trio.sleep(BETWEEN_LOOKS_S)
    return [line.levelname for line in lines]


async def gauge(node: Node, name: str) -> str:
    page = (await node.http.get(f"{node.control}/metrics")).text
    (value,) = re.findall(rf"ranvier_backend_{name}\{{[^}}]+\}} (\S+)", page)
    return str(value)


@pytest.mark.parametrize("kind", FORMS)
async def test_an_engine_with_another_url_on_another_node_is_named_by_both_until_it_has_one(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with cluster_lab(tmp_path, 0, DEADLINE_S) as place:
        url = await place.listen(Paged(FORMS[kind]).serve)
        nodes = await pair(place, url, by_name(url))
        for node, other in zip(nodes, ("node-b", "node-a"), strict=True):
            await node.until_backend(lambda each, other=other: each["twins"] == [f"node {other}"])
            (backend,) = await node.backends()
            assert "a URL that is the same on all nodes" in backend["advice"]
            assert await gauge(node, "twins") == "1.0"
        assert await logged(caplog, "backend.twins", 2) == ["WARNING"] * 2
        await nodes[1].http.delete(f"{nodes[1].control}/admin/backends", params={"url": by_name(url)})
        await nodes[1].http.post(f"{nodes[1].control}/admin/backends", json={"url": url})
        for node in nodes:
            await node.until_backend(lambda each: each["twins"] == [] and each["advice"] == "")
            assert await gauge(node, "twins") == "0.0"
        assert await logged(caplog, "backend.twins", 3) == ["WARNING", "WARNING", "INFO"], (
            "of who still has the backend"
        )


async def test_one_real_engine_by_two_urls_shares_no_routes_and_that_is_named(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 1, DEADLINE_S) as place:
        (url,) = place.engines
        nodes = await pair(place, url, by_name(url))
        for node in nodes:
            await node.until_backend(lambda each: len(each["twins"]) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
async def test_two_engines_by_one_url_are_named_by_both_nodes_and_no_longer_restart_in_turn(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with cluster_lab(tmp_path, 0, DEADLINE_S) as place:
        engine = Paged(FORMS[kind])
        engine.numbers = {b"keya": b"1", b"keyb": b"2"}
        url = await place.listen(engine.serve)
        nodes = await pair(place, url, url, probe_interval_s=0.1)
        for node, other in zip(nodes, ("node-b", "node-a"), strict=True):
            await node.until_backend(lambda each, other=other: each["strangers"] == [f"node {other}"])
            (backend,) = await node.backends()
            assert "means the same on all nodes" in backend["advice"]
            assert await gauge(node, "strangers") == "1.0"
        assert await logged(caplog, "backend.strangers", 2) == ["WARNING"] * 2
        found = []
        for _ in range(2):  # a probe that was under way when both named them may count once more
            probes = (await nodes[0].ask("/admin/calibration"))["polls"]["probes"]
            await nodes[0].until("/admin/calibration", lambda view, probes=probes: view["polls"]["probes"] > probes + 7)
            found.append([(await node.backends())[0]["generation"] for node in nodes])
        assert found[0] == found[1]
        await nodes[1].http.delete(f"{nodes[1].control}/admin/backends", params={"url": url})
        await nodes[0].until_backend(lambda each: each["strangers"] == [] and each["advice"] == "")


@pytest.mark.slow
async def test_an_engine_that_restarts_is_not_two_engines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster_lab(tmp_path, 0, DEADLINE_S) as place:
        url, _ = await start_engine(place.nursery, age_s=100.0)
        nodes = await pair(place, url, url, probe_interval_s=0.1)
        await place.http.post(f"{url}/admin/restart")
        for node in nodes:
            await node.until_backend(lambda each: each["generation"] == 2)
        for node in nodes:
            probes = (await node.ask("/admin/calibration"))["polls"]["probes"]
            await node.until("/admin/calibration", lambda view, probes=probes: view["polls"]["probes"] > probes + 7)
            assert (await node.backends())[0]["generation"] == 2
        assert "backend.strangers" not in caplog.text
        assert "backend.twins" not in caplog.text


async def test_one_engine_twice_on_one_node_is_named_also_where_it_shows_nothing_of_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for form in (VLLM, SGLANG, b"nothing 1\n"):
        async with opened(Lab, 0, DEADLINE_S) as place:
            url = await place.listen(Paged(form).serve)
            node = await place.start(backend=[url, by_name(url)], probe_interval_s=0.1)
            first, second = (each["name"] for each in await node.backends())
            await node.until(
                "/admin/backends",
                lambda view, names=([f"{second} here"], [f"{first} here"]): (
                    tuple(each["twins"] for each in view["backends"]) == names
                ),
            )
    assert caplog.text.count("backend.twins") == 6


async def test_engines_that_start_together_are_no_twins(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.engines += [(await start_engine(place.nursery, number))[0] for number in range(4)]
        node = await place.start(probe_interval_s=0.1)
        await node.until("/admin/backends", lambda view: all(each["health"] == "healthy" for each in view["backends"]))
        for number in range(8):
            assert (await node.chat([{"role": "user", "content": f"question {number}"}])).status_code == 200
        assert not any(each["twins"] for each in await node.backends())
        assert "backend.twins" not in caplog.text
