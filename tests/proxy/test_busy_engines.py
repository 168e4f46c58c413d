"""Engines that are too busy to answer probes, in front of them a whole node: they are alive."""

from __future__ import annotations

import logging

import pytest
import trio

from tests.node.node_lab import Node, lab
from tests.proxy.test_overload import QUESTIONS, answered, question
from tests.proxy.wire import END, GOOD, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, Wire

FAST = {"probe_interval_s": 0.05, "probe_timeout_s": 0.05, "engine_metrics_interval_s": 0}


class SlowToProbes(Scripted):
    """Answers no probe, and requests at once; or pages alone, once it is `free`."""

    def __init__(self, *script: Step) -> None:
        super().__init__(*script)
        self.probes = 0
        self.free = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        async with Wire(stream) as wire:
            try:
                while (request := await wire.next_request()) is not None:
                    self.bodies.append(request[1])
                    if request[0].startswith(b"GET /health"):
                        self.probes += 1
                        await self.free.wait()
                    if not await self.play(wire):
                        return
            except trio.BrokenResourceError:
                return


async def silent(node: Node) -> None:
    await node.until("/admin/backends", lambda answer: all(each["silent"] for each in answer["backends"]))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_time_out_at_all_probes_are_asked_if_no_other_can_be(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[Step] = [STREAM_HEAD, ROLE, TOKEN, END] if stream else [GOOD]
    engines = [SlowToProbes(*steps) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        async with lab(*engines, **FAST) as node:
            for path in QUESTIONS:
                await silent(node)
                status, headers, _ = await answered(node, question(path, stream=stream))
                assert (status, headers["x-ranvier-reason"]) == (200, "silent")
            page = (await node.http.get(f"{node.control}/metrics")).text
            assert 'ranvier_decisions_total{reason="silent"} 6' in page
    assert caplog.text.count("pool.silent") == 1


async def test_an_engine_that_serves_all_the_time_is_healthy_though_no_probe_is_answered() -> None:
    engine = SlowToProbes(GOOD)
    async with lab(engine, **FAST) as node:
        await silent(node)
        before = engine.probes
        states = set()
        while engine.probes < before + 8:
            assert (await answered(node, question(b"/v1/chat/completions")))[0] == 200
            states.add((await node.backends())[0]["health"])
        assert states == {"healthy"}


async def test_engines_that_refuse_are_not_asked() -> None:
    async with lab(**FAST, backend=["http://127.0.0.1:9"]) as node:
        await node.until_backend(lambda backend: backend["health"] == "unhealthy")
        assert (await answered(node, question(b"/v1/chat/completions")))[0] == 503
