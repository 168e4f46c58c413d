"""A redis-server of a test's own: on a Unix socket, in a directory of its own, killed and started again at will."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ranvier_py.io.redis_pool import RedisPool

redis = pytest.importorskip("redis", reason="the extra redis is not installed")

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    BINARY is None, reason="no redis-server on this machine; on Debian and Ubuntu: apt install redis-server"
)
READY = b"accept connections"


def pool_of(url: str, **options: Any) -> RedisPool:
    """Connections as a node has them by default."""
    return RedisPool(url, "kv_redis_url", **{"size": 8, "timeout_s": 1.0, "connect_s": 3.0, **options})


class RedisServer:
    """One server. It keeps what it was told in its append-only file, so a killed one comes back with it."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.socket = directory / "s"
        self.url = f"unix://{self.socket}"
        self._command = [
            str(BINARY), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(directory), "--save", "",
            "--appendonly", "yes", "--appendfsync", "no", "--daemonize", "no", *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it serves."""
        process = self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if READY in line:
                return
        raise AssertionError(b"".join(lines).decode())

    def kill(self, number: int = signal.SIGKILL) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.kill(process.pid, number)
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()

    def pause(self) -> None:
        """It takes what is sent and answers nothing, until it is killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on, with what it was sent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """For looking and for spoiling."""
        return redis.Redis.from_url(self.url, socket_timeout=5)


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="redis") as directory:
        server = RedisServer(Path(directory), *options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="module")
def one_server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    """An empty one."""
    one_server.client().flushall()
    one_server.client().config_resetstat()
    return one_server


@pytest.fixture
def mortal() -> Iterator[RedisServer]:
    """One that may be killed."""
    with redis_server() as running:
        yield running
