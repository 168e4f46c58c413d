"""What a service manager is told by `ranvier serve`, on a socket as systemd's."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
import trio

from cluster.dns.addresses import free_port
from ranvier_py.io.service_manager import VARIABLE, notify_ready


@pytest.fixture(params=["a file", "a name"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A manager's socket, and what it calls it to its services."""
    path, is_file = str(tmp_path / "notify"), request.param == "a file"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path if is_file else f"\0{path}")
        yield server, path if is_file else f"@{path}"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_node_is_called_ready_once_it_takes_connections(
    workers: int, manager: tuple[socket.socket, str]
) -> None:
    server, name = manager
    port = free_port(["127.0.0.1"], Random())
    command = [sys.executable, "-m", "ranvier_py", "serve", f"--workers={workers}", "--gossip=off"]
    command += [f"--listen=127.0.0.1:{port}", "--control=127.0.0.1:0"]
    process = await trio.lowlevel.open_process(command, env={**os.environ, VARIABLE: name}, stdout=-3, stderr=-3)
    try:
        with trio.fail_after(60):
            assert await trio.socket.from_stdlib_socket(server).recv(1000) == b"READY=1"
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
            process.terminate()
            assert await process.wait() == 0
    finally:
        process.kill()


def test_a_node_without_a_manager_starts_in_silence() -> None:
    assert not notify_ready({})


def test_a_manager_that_is_gone_is_logged_and_is_no_reason_to_end(
    manager: tuple[socket.socket, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, name = manager
    assert notify_ready({VARIABLE: name})
    assert server.recv(1000) == b"READY=1"
    server.close()
    Path(name).unlink(missing_ok=True)
    assert not notify_ready({VARIABLE: name})
    assert "node.manager_not_told" in caplog.text


def test_a_manager_that_reads_nothing_keeps_nobody_waiting(manager: tuple[socket.socket, str]) -> None:
    _, name = manager
    while notify_ready({VARIABLE: name}):
        pass
