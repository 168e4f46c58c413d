"""A node whose backends' names lead elsewhere after a while, or to several engines at once."""

from __future__ import annotations

from contextlib import suppress
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


async def test_several_processes_behind_one_name_are_reported_and_share_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A headless Service: of three addresses the first one would get all."""
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    async with opened(Lab, 0, 20) as place:
        node, names = await moving(place, monkeypatch, hosts)
        names.answers[NAME] = hosts
        await node.until_backend(lambda backend: backend["processes"] == 3)
        served: list[str] = []

        async def ask(number: int) -> None:
            answer = await node.chat(turn(f"number {number}"), max_tokens=60)
            served.append(answer.headers["x-engine"])

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, number)
        assert sorted(set(served)) == ["engine-0", "engine-1", "engine-2"]
        assert max(map(served.count, served)) <= 6
        (backend,) = await node.backends()
        assert backend["generation"] == 1
        assert "list each process as a backend of its own" in backend["advice"]
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_backend_processes{backend="' in page
    logged = [record.getMessage() for record in caplog.records if "backend.processes" in record.getMessage()]
    assert len(logged) == 1


async def test_start_times_that_come_back_prove_several_processes_behind_one_address() -> None:
    """A Service with one address of its own, which gives each connection to another process."""
    async with opened(Lab, 0, 20) as place:
        port = await engines_at(place, ["127.0.0.2", "127.0.0.3"])
        turns = 0

        async def balance(stream: trio.SocketStream) -> None:
            nonlocal turns
            turns += 1
            async with (
                await trio.open_tcp_stream(f"127.0.0.{2 + turns % 2}", port) as other,
                trio.open_nursery() as both,
            ):
                both.start_soon(pass_on, stream, other)
                await pass_on(other, stream)

        node = await place.start(
            backend=[await place.listen(balance)], probe_interval_s=0.05, engine_metrics_interval_s=0
        )
        await node.until_backend(lambda backend: backend["processes"] == 2)
        (backend,) = await node.backends()
        await node.until_backend(lambda later: later["probe_ms"] != backend["probe_ms"])
        (later,) = await node.backends()
        assert later["generation"] == backend["generation"] <= 3


async def pass_on(source: trio.SocketStream, sink: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in source:
            await sink.send_all(data)
        await sink.send_eof()
