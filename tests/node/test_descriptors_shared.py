"""How a node shares its descriptors out between clients, their requests and all else."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AsyncExitStack

import pytest
import trio

from ranvier_py.config.config_loader import config_of
from ranvier_py.core.addresses import host_port
from ranvier_py.node.parts.request_parts import within_descriptors
from tests.node.node_lab import ANNOUNCED, PLACES, Lab, chat, first_lines, opened
from tests.proxy.wire import GOOD, Scripted, Wire, post


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 4096, 15_000, 20_000, 65_536, 1 << 20])
@pytest.mark.parametrize("in_flight_max", [10, 4096, 100_000])
def test_clients_and_requests_leave_a_reserve_of_whatever_there_is(descriptors: int, in_flight_max: int) -> None:
    config = within_descriptors(
        config_of(backend=["http://a:1", "http://b:1"], in_flight_max=in_flight_max), descriptors
    )
    clients, engines = config.server.connections_max, config.upstream.open_max
    assert 1 <= clients <= 10_000
    assert engines == min(clients, in_flight_max)
    assert descriptors - clients - engines >= min(descriptors // 2, 528)
    assert clients == 10_000 or clients + engines >= descriptors // 2 - 528, "no more is kept back than needed"


def test_who_has_descriptors_enough_keeps_his_limits_and_who_has_not_is_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    within_descriptors(config_of(), 1 << 20)
    assert caplog.records == []
    within_descriptors(config_of(), 1024)
    assert "node.connections_cut connections_max 10000 -> 256: this process may have 1024 files open" in caplog.text


@pytest.mark.slow
async def test_idle_clients_take_no_descriptor_that_a_request_needs() -> None:
    """A node that may have 300 files open, 400 clients that say nothing, and now and then one who asks."""
    engine = Scripted(GOOD)
    async with opened(Lab, 0, 30) as place, AsyncExitStack() as stack:
        url = await place.listen(engine.serve)
        flags = [f"--{name}={value}" for name, value in {**PLACES, "backend": url}.items()]
        command = ["sh", "-c", 'ulimit -n 300; exec "$@"', "sh", sys.executable, "-m", "ranvier_py", "serve", *flags]
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            ((public, control),) = ANNOUNCED.findall(await first_lines(process))
            port = host_port(public)[1]
            for _ in range(4):
                asking = await stack.enter_async_context(await Wire.connect(port))
                await asking.send(post(chat()))
                assert (await asking.response())[0] == 200
                for _ in range(100):
                    await stack.enter_async_context(await Wire.connect(port))
            (backend,) = (await place.http.get(f"{control}/admin/backends")).json()["backends"]
            page = (await place.http.get(f"{control}/metrics")).text
        finally:
            process.kill()
            await process.wait()
    assert (backend["circuit"], backend["health"]) == ("closed", "healthy")
    assert "ranvier_upstream_exhausted_total 0.0" in page
    assert "ranvier_server_displaced_total 0.0" not in page
    assert "ranvier_server_refused_total{" not in page
    assert 'kind="accept"' not in page
