"""Requests that no engine survives, and engines that survive no request: a whole node, and scripted engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import pytest
import trio

from tests.node.node_lab import Node, lab
from tests.proxy.test_overload import QUESTIONS, answered
from tests.proxy.test_pipeline import at_rest
from tests.proxy.wire import CLOSE, HANG, RESET, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, answer, post

POISON = b"poison"
FAILURES: dict[str, Sequence[Step]] = {
    "500": [answer(b'{"error":{"message":"own"}}', status=500)],
    "502": [answer(b"", status=502)],
    "503": [answer(b"", status=503)],
    "521": [answer(b"", status=521)],
    "closed": [CLOSE],
    "reset": [RESET],
    "garbled": [b"nonsense\r\n\r\n", CLOSE],
}
AFTER_THE_FIRST_BYTE: Sequence[Step] = [STREAM_HEAD, ROLE, TOKEN, CLOSE]


class Poisonable(Scripted):
    """Fails requests with the poison in them, and serves all others; or fails all, if it is ill."""

    def __init__(self, failure: Sequence[Step], *, ill: bool = False) -> None:
        super().__init__()
        self.failure, self.ill = failure, ill

    def script(self) -> Sequence[Step]:
        return self.failure if self.ill or POISON in self.bodies[-1] else self.good


def question(path: bytes, number: int, *, poison: bool, stream: bool = False) -> bytes:
    """A request like no other; `/v1/responses` must forget, else it is sent once."""
    words = f"{POISON.decode() if poison else 'hello'} {number}"
    text = json.dumps({**QUESTIONS[path], "stream": stream, "store": False}).replace('"hi"', json.dumps(words))
    return post(text.encode(), target=path)


async def circuits(node: Node) -> list[str]:
    return [backend["circuit"] for backend in await node.backends()]


async def sent(node: Node, request: bytes) -> None:
    """Send a request, whatever becomes of it."""
    async with await node.wire() as client:
        await client.send(request)
        with suppress(trio.BrokenResourceError, AssertionError):
            await client.response()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("engines", [2, 3, 6])
async def test_requests_that_every_engine_fails_open_no_circuit(failure: str, engines: int) -> None:
    backends = [Poisonable(FAILURES[failure]) for _ in range(engines)]
    async with lab(*backends) as node:
        for number in range(8):
            for path in QUESTIONS:
                assert (await answered(node, question(path, number, poison=True, stream=number % 2 == 0)))[0] >= 500
        assert await circuits(node) == ["closed"] * engines
        assert (await answered(node, question(b"/v1/chat/completions", 0, poison=False)))[0] == 200


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_engine_that_fails_what_others_serve_is_blamed(failure: str) -> None:
    backends = [Poisonable(FAILURES[failure], ill=True), Poisonable([]), Poisonable([])]
    async with lab(*backends, policy="round_robin") as node:
        for number in range(30):
            path = list(QUESTIONS)[number % len(QUESTIONS)]
            assert (await answered(node, question(path, number, poison=False, stream=number % 2 == 0)))[0] == 200
        assert await circuits(node) == ["open", "closed", "closed"]
    assert len(backends[0].bodies) == 5


@pytest.mark.parametrize("failure", [FAILURES["500"], FAILURES["closed"], AFTER_THE_FIRST_BYTE])
@pytest.mark.parametrize("engines", [3, 4])
async def test_where_one_engine_alone_serves_the_others_soon_get_nothing(engines: int, failure: Sequence[Step]) -> None:
    """Though circuits take out half of them at most: clients would see each second stream cut, for ever."""
    ill = [Poisonable(failure, ill=True) for _ in range(engines - 1)]
    async with lab(*ill, Poisonable([]), policy="round_robin") as node:
        for number in range(20 * engines):
            await sent(node, question(b"/v1/chat/completions", number, poison=False, stream=True))
        await at_rest(node)
        asked = [len(engine.bodies) for engine in ill]
        for number in range(20):
            request = question(b"/v1/chat/completions", number, poison=False, stream=True)
            assert (await answered(node, request))[0] == 200
    assert [len(engine.bodies) for engine in ill] == asked


async def test_an_engine_is_blamed_as_soon_as_the_stream_of_another_has_a_token() -> None:
    backends = [Poisonable(FAILURES["500"], ill=True), Scripted(STREAM_HEAD, ROLE, TOKEN, HANG)]
    async with lab(*backends, policy="round_robin", circuit_failures=1) as node, AsyncExitStack() as stack:
        for number in range(2):  # one of them goes to the ill engine first
            client = await stack.enter_async_context(await node.wire())
            await client.send(question(b"/v1/chat/completions", number, poison=False, stream=True))
            await client.until(b"word")
        assert await circuits(node) == ["open", "closed"]


@pytest.mark.parametrize("failure", [*FAILURES.values(), AFTER_THE_FIRST_BYTE], ids=[*FAILURES, "after a token"])
async def test_a_lone_engine_is_blamed_for_different_requests_and_for_equal_ones_once(failure: Sequence[Step]) -> None:
    engine = Poisonable(failure)
    async with lab(engine) as node:
        for _ in range(20):
            await sent(node, question(b"/v1/chat/completions", 1, poison=True, stream=True))
        await at_rest(node)
        assert await circuits(node) == ["closed"]
        for number in range(2, 6):
            await sent(node, question(b"/v1/chat/completions", number, poison=True, stream=True))
        await at_rest(node)
        assert await circuits(node) == ["open"]
        await sent(node, question(b"/v1/chat/completions", 9, poison=False))
    assert len(engine.bodies) == 25  # it is asked all the same


async def test_what_may_be_sent_once_blames_the_engine_for_different_requests_alone() -> None:
    backends = [Poisonable(FAILURES["500"]) for _ in range(2)]
    stored = b'{"input":"poison %d"}'
    async with lab(*backends, policy="round_robin") as node:
        for _ in range(20):
            assert (await answered(node, post(stored % 1, target=b"/v1/responses")))[0] == 500
        assert await circuits(node) == ["closed"] * 2
        for number in range(2, 12):
            assert (await answered(node, post(stored % number, target=b"/v1/responses")))[0] == 500
        assert await circuits(node) == ["open"] * 2


async def test_failed_connects_always_count() -> None:
    backends = [Poisonable(FAILURES["500"])]
    async with lab(*backends, policy="round_robin") as node:
        await node.http.post(f"{node.control}/admin/backends", json={"url": "http://127.0.0.1:9", "name": "dead"})
        for number in range(10):
            await answered(node, question(b"/v1/chat/completions", number, poison=number % 2 == 0))
        states = dict(zip([each["name"] for each in await node.backends()], await circuits(node), strict=True))
    assert states["dead"] == "open"
