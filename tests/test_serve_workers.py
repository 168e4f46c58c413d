"""`ranvier serve` with several workers: whose port it is, and what each of them is."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ranvier_py import cli
from ranvier_py.commands import exit_codes, run_serve
from ranvier_py.core.addresses import host_port
from ranvier_py.io.workers import claimed

ROOT = Path(__file__).parents[1]


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("shares", [True, False], ids=["as workers do", "alone"])
@pytest.mark.parametrize("listen", ["127.0.0.1:{}", "0.0.0.0:{}", "localhost:{}"])
def test_workers_share_no_port_with_anybody_else(
    listen: str, shares: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_serve, "run_worker", lambda *_, **__: pytest.fail("a worker was started"))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = listen.format(other.getsockname()[1])
        assert cli.main(["serve", "--workers", "2", "--listen", place]) == exit_codes.EXIT_ADDRESS
        assert capfd.readouterr().err.endswith(f"ranvier: can't listen: Address already in use ({place})\n")
    for _ in range(2):
        for claim in claimed(*host_port(place)):
            claim.close()


STARTED = """
import os, signal, sys
from ranvier_py import cli
from ranvier_py.commands import run_serve

def run_worker(*_, **__):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.write(1, b"worker\\n")
    signal.sigwait([signal.SIGTERM])
    return 0

run_serve.run_worker = run_worker
print("here", flush=True)
sys.stdin.readline()
sys.exit(cli.main(["serve", "--workers", "2", "--listen", sys.argv[1]]))
"""


@pytest.mark.parametrize("listens", [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")])
def test_of_two_that_start_workers_on_one_port_in_the_same_moment_one_ends(listens: tuple[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given: Any = {"stdin": -1, "stdout": -1, "stderr": subprocess.DEVNULL, "text": True, "cwd": ROOT}
    with ExitStack() as stack:
        places = [f"{host}:{port}" for host in listens]
        both = [stack.enter_context(subprocess.Popen([sys.executable, "-c", STARTED, at], **given)) for at in places]
        for each in both:
            stack.callback(each.kill)
            assert each.stdout.readline() == "here\n"
        for each in both:
            each.stdin.write("\n")
            each.stdin.flush()
        lines = [each.stdout.readline() for each in both]
        assert sorted(lines) == ["", "worker\n"]
        winner = both[lines.index("worker\n")]
        assert both[lines.index("")].wait(20) == exit_codes.EXIT_ADDRESS
        assert winner.stdout.readline() == "worker\n"
        with pytest.raises(OSError, match="in use"):
            claimed("127.0.0.1", port)
        winner.terminate()
        assert winner.wait(20) == 0


NODES = """
import sys, types, trio, signal
from ranvier_py import cli

async def run(config, _, *, source):
    config = source.own(config)
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        import hashlib, os
        key = hashlib.sha256(config.worker_key).hexdigest()
        shown = config.worker_key.hex() in open("/proc/self/cmdline").read() + str(dict(os.environ)) + repr(config)
        os.write(1, f"{config.control} {config.workers} {config.gossip} {key} {shown}\\n".encode())
        async for _ in signals:
            return

sys.modules["ranvier_py.node.run_node"] = types.SimpleNamespace(run=run)
sys.exit(cli.main(["serve", "--workers", "3", "--control", "127.0.0.1:9990", "--listen", "127.0.0.1:9980"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at its command line in /proc")
def test_several_workers_are_several_nodes_with_ports_of_their_own_and_one_key() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NODES],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            first, second, third = sorted(process.stdout.readline().split() for _ in range(3))
            assert first[:3] == ["127.0.0.1:9990", "3", "127.0.0.1:7946"]
            assert second[:3] == ["127.0.0.1:9991", "3", "127.0.0.1:7947"]
            assert third[:3] == ["127.0.0.1:9992", "3", "127.0.0.1:7948"]
            assert first[3:] == second[3:] == third[3:]
            assert first[4] == "False"
            process.send_signal(signal.SIGHUP)  # as `systemctl reload` does; it must not end the service
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
