"""A node whose resolver hangs: engines that answer are not blamed, and nothing else waits."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest
import trio

from tests.examples import some
from tests.io.test_resolver import Hanging
from tests.node.node_lab import BETWEEN_LOOKS_S, DEADLINE_S, Lab, opened, turn


@pytest.mark.slow
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
            while len(system.hanging) < 24:  # noqa: ASYNC110  # threads
                await trio.sleep(BETWEEN_LOOKS_S)
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


@pytest.mark.parametrize("number", some([errno.EMFILE, errno.ENFILE, errno.ENOMEM]))
async def test_an_engine_whose_name_finds_no_descriptor_here_is_not_blamed(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc says EAI_SYSTEM then, which Python raises as the OSError that it stands for."""
    real, asked = socket.getaddrinfo, 0

    def look_up(host: Any, port: Any, family: int = 0, kind: int = 0, proto: int = 0, flags: int = 0) -> Any:
        nonlocal asked
        if host not in ("engine.test", b"engine.test") or flags & socket.AI_NUMERICHOST:
            return real(host, port, family, kind, proto, flags)
        asked += 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with opened(Lab, 0, DEADLINE_S) as place:
        node = await place.start(backend=["http://engine.test:1"], probe_interval_s=0.05, circuit_failures=1)
        answer = await node.chat(turn("hello"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "node_exhausted")
        await node.until("/admin/calibration", lambda view: view["polls"]["probes_not_made"] > 2)
        (backend,) = await node.backends()
        assert (backend["health"], backend["circuit"]) == ("unknown", "closed")
        assert (await node.ask("/admin/calibration"))["polls"]["probes"] == 0
        assert asked
