"""A node whose backends' names lead elsewhere after a while, or to several engines at once."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from ranvier_py.core.addresses import host_port
from tests.io.test_discovery import SERVFAIL, FakeResolver
from tests.node.node_lab import Lab, Node, chat, opened, start_engine, turn

NAME = "engine.test"


async def engines_at(place: Lab, hosts: list[str]) -> int:
    """One engine at each of these addresses, all at one port. Their names are engine-0, engine-1, …"""
    port = 0
    for number, host in enumerate(hosts):
        url, _ = await start_engine(place.nursery, number, port, host=host, age_s=100.0 * number)
        port = host_port(url.removeprefix("http://"))[1]
    return port


async def moving(
    place: Lab, monkeypatch: pytest.MonkeyPatch, hosts: list[str], **settings: Any
) -> tuple[Node, FakeResolver]:
    """A node with one backend by name, which leads to the first of these engines; all are there."""
    monkeypatch.setattr("ranvier_py.io.host_names.INTERVAL_S", 0.05)
    monkeypatch.setattr("ranvier_py.io.resolver.FRESH_S", 0.02)
    port = await engines_at(place, hosts)
    names = FakeResolver({NAME: hosts[:1]})
    trio.socket.set_custom_hostname_resolver(names)
    node = await place.start(backend=[f"http://{NAME}:{port}"], **settings)
    return node, names


async def served_by(node: Node, text: str = "hello") -> str:
    answer = await node.chat(turn(text))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-engine"]


@pytest.mark.parametrize("stream", [False, True])
async def test_under_steady_traffic_a_name_that_moves_takes_connections_and_routes_with_it(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of before still runs and keeps its connections open: only the name says that it is not ours."""
    async with opened(Lab, 0, 20) as place:
        node, names = await moving(place, monkeypatch, ["127.0.0.2", "127.0.0.3"])
        assert await served_by(node) == "engine-0"
        names.answers[NAME] = ["127.0.0.3"]
        seen: list[tuple[str, int]] = []
        while not seen or seen[-1] != ("engine-1", 2):
            answer = await node.chat(turn("hello"), stream=stream)
            (backend,) = await node.backends()
            seen.append((answer.headers["x-engine"], backend["generation"]))
        for number in range(5):
            assert await served_by(node, f"again {number}") == "engine-1"
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert "ranvier_upstream_outdated_total 0.0" not in page, page


async def test_an_answer_that_was_begun_before_a_name_moved_ends_and_is_not_learned_as_the_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(Lab, 0, 20) as place:
        node, names = await moving(place, monkeypatch, ["127.0.0.2", "127.0.0.3"])
        request = {"content": chat(turn("tell me all"), stream=True, max_tokens=400)}
        async with node.http.stream("POST", f"{node.url}/v1/chat/completions", **request) as answer:
            names.answers[NAME] = ["127.0.0.3"]
            await node.until_backend(lambda backend: backend["generation"] == 2)
            text = (await answer.aread()).decode()
            assert answer.headers["x-engine"] == "engine-0"
        assert "[DONE]" in text
        answer = await node.chat(turn("tell me all"))
        assert (answer.headers["x-engine"], answer.headers["x-ranvier-matched-tokens"]) == ("engine-1", "0")


async def test_a_resolver_that_fails_or_hangs_or_an_address_that_stays_closes_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(Lab, 0, 20) as place:
        node, names = await moving(place, monkeypatch, ["127.0.0.2", "127.0.0.3"])
        assert await served_by(node) == "engine-0"
        for answer in (SERVFAIL, ["127.0.0.3", "127.0.0.2"], ["127.0.0.2"], 30.0):
            names.answers[NAME] = answer  # type: ignore[assignment]
            asked = len(names.asked)
            while len(names.asked) < asked + (1 if isinstance(answer, float) else 3):  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert await served_by(node) == "engine-0"
        (backend,) = await node.backends()
        assert backend["generation"] == 1
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert "ranvier_upstream_outdated_total 0.0" in page
        assert "ranvier_upstream_connects_total 1.0" in page
