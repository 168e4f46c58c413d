"""Engines that refuse the key of a node's own requests are named, and so is the end of it."""

from __future__ import annotations

import logging

import pytest

from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import Lab, opened
from tests.proxy.wire import answer

DEADLINE_S = 20
PAGES = {"health": b"/health", "models": b"/v1/models", "metrics": b"/metrics"}


class Guarding(AnsweringEngine):
    """An engine that refuses one of its pages, while it has one to guard."""

    def __init__(self, guarded: bytes, status: bytes) -> None:
        self.guarded = guarded
        self.status = status

    async def answer(self, asked: Request) -> bytes:
        if asked.target.encode() == self.guarded:
            return answer(b"", status=self.status)
        return answer(b'{"data": [{"id": "m"}]}' if asked.target == "/v1/models" else b"")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("status", [b"401 Unauthorized", b"403 Forbidden"])
async def test_an_engine_that_refuses_our_key_is_named_until_it_takes_it(
    page: str, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = Guarding(PAGES[page], status)
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.engines.append(await place.listen(engine.serve))
        node = await place.start(probe_interval_s=0.2, engine_metrics_interval_s=0.2)
        await node.until_backend(lambda each: each["key_refused"].startswith(status[:3].decode()))
        shown = (await node.http.get(f"{node.control}/metrics")).text
        assert "} 1" in next(line for line in shown.splitlines() if line.startswith("ranvier_backend_key_refused{"))
        if page != "metrics":  # such a page is asked for again after minutes
            engine.guarded = b""
            await node.until_backend(lambda each: not each["key_refused"])
        assert caplog.text.count("accepted -> refused") == 1
        assert caplog.text.count("refused -> accepted") == (page != "metrics")
