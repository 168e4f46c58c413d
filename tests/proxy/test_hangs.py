"""Engines that hang with requests in flight, in front of them a whole node."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import httpx
import pytest
import trio

from tests import waiting
from tests.node.node_lab import Lab, Node, first_lines, lab, opened, start_engine
from tests.proxy.test_overload import QUESTIONS, answered, question
from tests.proxy.wire import END, GOOD, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, Wire

FAST = {"hang_s": 0.6, "probe_timeout_s": 0.1, "engine_metrics_interval_s": 0, "policy": "round_robin"}
STREAM: Sequence[Step] = [STREAM_HEAD, ROLE, TOKEN, END]


class Hanging(Scripted):
    """Hangs at the first request for inference, after `steps`, until `free`; probes too, unless it is only `busy`."""

    def __init__(self, *steps: Step, busy: bool = False) -> None:
        super().__init__()
        self.steps, self.busy = steps, busy
        self.free = trio.Event()
        self.probes = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        async with Wire(stream) as wire:
            try:
                while (request := await wire.next_request()) is not None:
                    is_probe = request[0].startswith(b"GET ")
                    self.probes += is_probe
                    if is_probe and (self.busy or not self.bodies):
                        await wire.send(GOOD)
                        continue
                    if not is_probe:
                        self.bodies.append(request[1])
                        for step in self.steps:
                            assert isinstance(step, bytes)
                            await wire.send(step)
                    await self.free.wait()
                    await wire.send(GOOD if is_probe or not self.steps else END)
            except trio.BrokenResourceError:
                return


async def figures(node: Node) -> Counter[str]:
    page = (await node.http.get(f"{node.control}/metrics")).text
    found = re.findall(r"^ranvier_hangs_(\w+)_total (\S+)$", page, re.MULTILINE)
    return Counter({name: int(float(value)) for name, value in found})


async def until(node: Node, name: str, least: int = 1) -> Counter[str]:
    while (found := await figures(node))[name] < least:  # noqa: ASYNC110  # the node's figures wake nobody
        await trio.sleep(0.02)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", QUESTIONS)
async def test_requests_that_wait_where_an_engine_hangs_are_served_by_another(
    path: bytes, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, good = Hanging(), Scripted(*(STREAM if stream else [GOOD]))
    request = question(path, stream=stream)
    async with lab(hanging, good, **FAST) as node, trio.open_nursery() as nursery:
        got: list[int] = []

        async def ask() -> None:
            got.append((await answered(node, request))[0])

        for _ in range(4):
            nursery.start_soon(ask)
        found = await until(node, "found")
        if path == b"/v1/responses":  # the engine may have stored it
            assert found["moved"] == 0
            hanging.free.set()
        await waiting.until(lambda: len(got) == 4)
        assert got == [200] * 4
        assert (await figures(node))["moved"] == (0 if path == b"/v1/responses" else 2)
    assert len(hanging.bodies) == 2
    assert "hangs: not a byte for" in caplog.text


@pytest.mark.slow
async def test_a_stopped_engine_process_loses_its_requests_to_others_and_comes_back() -> None:
    command = [sys.executable, "-m", "cluster", "engine", "--listen", "127.0.0.1:0", "--tokenizer", "bytes"]
    async with opened(Lab, 0, 60) as place:
        start = partial(trio.run_process, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        process: trio.Process = await place.nursery.start(start)
        place.engines += [(await first_lines(process)).split()[-1], (await start_engine(place.nursery))[0]]
        node = await place.start(**FAST)
        process.send_signal(signal.SIGSTOP)
        try:
            answers: list[httpx.Response] = []

            async def ask(stream: bool) -> None:
                answers.append(await node.chat(stream=stream))

            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(ask, number % 2 == 0)
            assert [answer.status_code for answer in answers] == [200] * 6
            assert (await figures(node))["moved"] == 3
            assert [each["silent"] for each in await node.backends()] == [True, False]
            assert (await node.chat()).status_code == 200
        finally:
            process.send_signal(signal.SIGCONT)
        await node.until_backend(lambda backend: backend["health"] == "healthy")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_answers_probes_does_not_hang_however_long_an_answer_takes(stream: bool) -> None:
    busy = Hanging(*([STREAM_HEAD] if stream else []), busy=True)
    async with lab(busy, Scripted(GOOD), **FAST) as node, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(answered, node, question(b"/v1/chat/completions", stream=stream))
        await waiting.until(lambda: busy.probes >= 8)  # each of them because nothing came for a while
        found = await figures(node)
        assert (found["found"], found["moved"]) == (0, 0)
        assert {each["health"] for each in await node.backends()} == {"healthy"}
        busy.free.set()


async def test_a_head_without_an_event_is_no_answer_yet() -> None:
    engines = [Hanging(STREAM_HEAD), Scripted(*STREAM)]
    async with lab(*engines, **FAST) as node:
        bodies = [(await answered(node, question(b"/v1/messages", stream=True)))[2] for _ in range(2)]
        assert all(b"word" in body for body in bodies)
        assert (await figures(node))["moved"] == 1


async def test_nothing_is_moved_after_the_first_event() -> None:
    hanging = Hanging(STREAM_HEAD, ROLE, TOKEN)
    async with lab(hanging, Scripted(*STREAM), **FAST) as node, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await node.wire()) for _ in range(2)]
        for client in clients:
            await client.send(question(b"/v1/chat/completions", stream=True))
            await client.until(b"word")
        found = await until(node, "found")
        assert (found["moved"], found["without_room"]) == (0, 0)
        assert (await answered(node, question(b"/v1/chat/completions", stream=True)))[0] == 200
        assert len(hanging.bodies) == 1
        hanging.free.set()


async def test_an_engine_takes_only_a_few_requests_until_it_has_served_them(caplog: pytest.LogCaptureFixture) -> None:
    hanging, full = Hanging(), Hanging(busy=True)
    with caplog.at_level(logging.WARNING):
        async with lab(hanging, full, **FAST) as node, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(answered, node, question(b"/v1/chat/completions"))
            found = await until(node, "without_room", 30)  # several looks
            assert found["moved"] == 4
            full.free.set()
            assert (await until(node, "moved", 10))["moved"] == 10
            hanging.free.set()


async def test_a_lone_engine_keeps_its_requests() -> None:
    hanging = Hanging()
    async with lab(hanging, **FAST) as node, trio.open_nursery() as nursery:
        nursery.start_soon(answered, node, question(b"/v1/chat/completions"))
        assert (await until(node, "without_room", 4))["moved"] == 0
        hanging.free.set()
    assert len(hanging.bodies) == 1


async def test_a_request_that_was_moved_is_not_moved_again() -> None:
    """The second engine hangs as well, and a third one has room: it may be the request that makes them hang."""
    hanging, good = [Hanging(), Hanging()], Scripted(GOOD)
    async with lab(*hanging, good, **FAST) as node, trio.open_nursery() as nursery:
        await drained(node, 2, draining=True)
        nursery.start_soon(answered, node, question(b"/v1/chat/completions"))
        assert (await until(node, "moved"))["moved"] == 1
        await drained(node, 2, draining=False)
        found = await until(node, "found", 2)
        looks = [engine.probes for engine in hanging]
        await waiting.until(lambda: all(engine.probes > before for engine, before in zip(hanging, looks, strict=True)))
        assert (found["moved"], (await figures(node))["moved"]) == (1, 1)
        assert (await answered(node, question(b"/v1/chat/completions")))[0] == 200, "there was room"
        for engine in hanging:
            engine.free.set()
    assert [len(engine.bodies) for engine in hanging] == [1, 1]


async def drained(node: Node, number: int, *, draining: bool) -> None:
    order = {"url": node.engines[number], "draining": draining}
    assert (await node.http.post(f"{node.control}/admin/backends/drain", json=order)).is_success
