"""A node whose resolver hangs: engines that answer are not blamed, and nothing else waits."""

from __future__ import annotations

import pytest
import trio

from tests.io.test_resolver import Hanging
from tests.node.node_lab import DEADLINE_S, Lab, opened, turn


async def test_a_resolver_that_hangs_for_many_names_opens_no_circuit_and_stops_no_learning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = [b"localhost"]
    system = Hanging(monkeypatch, good)
    try:
        async with opened(Lab, 1, 3 * DEADLINE_S) as place:
            url = place.engines[0].replace("127.0.0.1", "localhost")
            node = await place.start(backend=[url], probe_interval_s=0.05, probe_timeout_s=2.0)
            await node.until_backend(lambda backend: backend["health"] == "healthy")
            good.clear()
            for number in range(50):
                added = await node.http.post(f"{node.control}/admin/backends", json={"url": f"http://bad{number}.test"})
                assert added.status_code == 200
            while len(system.hanging) < 24:
                await trio.lowlevel.checkpoint()
            assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            probes = (await node.ask("/admin/calibration"))["polls"]["probes"]
            await node.until("/admin/calibration", lambda view: view["polls"]["probes"] > probes + 5)
            for number in range(50):
                await node.http.delete(f"{node.control}/admin/backends", params={"url": f"http://bad{number}.test"})
            assert (await node.chat(turn("hello"))).status_code == 200
            await node.until_routes(lambda routes: routes["tokenizer_worker"]["learned"] > 0)
            (backend,) = await node.backends()
            assert (backend["health"], backend["circuit"]) == ("healthy", "closed")
    finally:
        system.release.set()
