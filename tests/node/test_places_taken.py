"""Backends that are added under two spellings: only what leads to the same address and port is refused."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from tests.io.test_discovery import SERVFAIL, FakeResolver
from tests.node.node_lab import Lab, Node, opened

NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "engine.test": ["127.0.0.1"],
    "other.test": ["127.0.0.2"],
    "service.test": ["127.0.0.1", "127.0.0.2"],
    "gone.test": SERVFAIL,
}

TWINS = [
    ("http://127.0.0.1:8000", "http://localhost:8000"),
    ("http://localhost:8000", "http://127.0.0.1:8000"),
    ("http://localhost:8000", "http://[::1]:8000"),
    ("http://localhost:8000", "http://LOCALHOST:8000/"),
    ("http://127.0.0.1:8000", "http://engine.test:8000/"),
    ("http://engine.test:8000", "http://localhost:8000"),
    ("http://engine.test:8000", "http://0.0.0.0:8000"),
    ("http://127.0.0.1:8000", "http://[::ffff:127.0.0.1]:8000"),
    ("http://[0:0:0:0:0:0:0:1]:8000", "http://[::1]:8000"),
    ("http://127.0.0.1", "http://engine.test:80/"),
    ("https://127.0.0.1", "https://localhost:443"),
    ("http://127.0.0.1:8000#rank=1", "http://localhost:8000#rank=1"),
]
STRANGERS = [
    ("http://127.0.0.1:8000", "http://localhost:8001"),
    ("http://127.0.0.1:8000", "http://other.test:8000"),
    ("http://127.0.0.1:8000", "http://127.0.0.2:8000"),
    ("http://127.0.0.1:8000", "http://[::1]:8000"),
    ("http://service.test:8000", "http://127.0.0.1:8000"),
    ("http://127.0.0.1:8000#rank=0", "http://localhost:8000#rank=1"),
    ("http://engine.test", "http://localhost"),  # a proxy there may give each name to another engine
    ("http://127.0.0.1:8000", "http://gone.test:8000"),
    ("http://127.0.0.1", "https://localhost"),
]


async def add(node: Node, path: str, url: str) -> tuple[int, str]:
    sent = {"params": {"url": url}} if path == "/add_worker" else {"json": {"url": url}}
    answer = await node.http.post(f"{node.control}{path}", **sent)  # type: ignore[arg-type]
    return answer.status_code, answer.text


@pytest.mark.parametrize("path", ["/add_worker", "/admin/backends"])
async def test_only_what_leads_to_the_same_address_and_port_is_refused(path: str) -> None:
    async with opened(Lab, 0, 20) as place:
        trio.socket.set_custom_hostname_resolver(FakeResolver(NAMES))  # type: ignore[arg-type]
        node = await place.start(backend=[])
        for first, second in TWINS + STRANGERS:
            assert (await add(node, path, first))[0] == 200, first
            status, text = await add(node, path, second)
            assert status == (409 if (first, second) in TWINS else 200), (first, second, text)
            if status == 409:
                assert "is already" in text or "is there already" in text
            for backend in await node.backends():
                await node.http.delete(f"{node.control}/admin/backends", params={"url": backend["url"]})


async def test_of_two_spellings_that_are_added_at_once_one_is_refused() -> None:
    """Neither is there when the other one's name is looked up."""
    answers: list[int] = []

    async def one(node: Node, url: str) -> None:
        answers.append((await add(node, "/add_worker", url))[0])

    async with opened(Lab, 0, 20) as place:
        trio.socket.set_custom_hostname_resolver(FakeResolver(NAMES))  # type: ignore[arg-type]
        node = await place.start(backend=["http://127.0.0.9:8000"])
        async with trio.open_nursery() as nursery:
            for host in ("localhost", "engine.test", "127.0.0.1"):
                nursery.start_soon(partial(one, node, f"http://{host}:8000"))
        assert sorted(answers) == [200, 409, 409]
        assert len(await node.backends()) == 2


async def test_a_name_that_no_resolver_answers_in_time_is_added_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier_py.io.host_names.ASKED_S", 0.05)
    async with opened(Lab, 0, 20) as place:
        trio.socket.set_custom_hostname_resolver(FakeResolver({"slow.test": 60.0}))
        node = await place.start(backend=["http://127.0.0.1:8000"])
        assert (await add(node, "/add_worker", "http://slow.test:8000"))[0] == 200
