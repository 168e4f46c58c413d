"""How `ranvier serve` ends at a second Ctrl-C, and that all of its lines have one form."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx
import pytest
import trio

from cluster.dns.addresses import free_port
from tests.node.node_lab import Lab, chat, opened
from tests.proxy.wire import HANG, STREAM_HEAD, TOKEN, Scripted

SAME_SIGNAL_S = 0.6  # a signal that comes sooner counts as the same


async def lines_of(
    command: Sequence[str], events: dict[str, trio.Event], at: list[trio.Process]
) -> list[dict[str, Any]]:
    """All that a process writes, each line as JSON. `events`: set once a line has this event, or begins with it."""
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    at.append(process)
    found, text = [], b""
    assert process.stdout is not None
    async for piece in process.stdout:
        *lines, text = (text + piece).split(b"\n")
        for line in lines:
            found.append(json.loads(line))
            for event, seen in events.items():
                if found[-1]["event"].startswith(event):
                    seen.set()
    await process.wait()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_cuts_what_is_answered_and_every_line_is_json(
    workers: int, second: signal.Signals
) -> None:
    port = free_port(["127.0.0.1"], Random())
    async with opened(Lab, 0, 60) as place:
        engine = await place.listen(Scripted(STREAM_HEAD, TOKEN, HANG).serve)
        command = [
            sys.executable,
            "-m",
            "ranvier_py",
            "serve",
            f"--workers={workers}",
            "--gossip=off",
            "--log-format=json",
        ]
        command += [
            f"--listen=127.0.0.1:{port}",
            "--control=127.0.0.1:0",
            f"--backend={engine}",
            "--drain-timeout-s=3600",
        ]
        events = {name: trio.Event() for name in ("node.announced", "node.draining")}
        started: list[trio.Process] = []
        found: list[dict[str, Any]] = []

        async def follow() -> None:
            found.extend(await lines_of(command, events, started))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await events["node.announced"].wait()
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with place.http.stream("POST", url, content=chat(stream=True)) as answer:
                assert answer.status_code == 200
                started[0].send_signal(signal.SIGINT)
                await events["node.draining"].wait()
                await trio.sleep(SAME_SIGNAL_S)
                started[0].send_signal(second)
                with pytest.raises(httpx.TransportError):
                    async for _ in answer.aiter_bytes():
                        pass
        assert started[0].returncode == (130 if second is signal.SIGINT else 0)
    assert [each["outcome"] for each in found if each["event"] == "request"] == ["cut"]


@pytest.mark.slow
async def test_the_last_words_of_a_node_are_json_too() -> None:
    async with opened(Lab, 0, 60) as place:
        taken = (await place.listen(Scripted(HANG).serve)).partition("://")[2]
        flags = [f"--listen={taken}", "--control=127.0.0.1:0", "--log-format=json"]
        found = await lines_of([sys.executable, "-m", "ranvier_py", "serve", *flags], {}, [])
    assert found[-1]["level"] == "error"
    assert "can't listen" in found[-1]["why"]
