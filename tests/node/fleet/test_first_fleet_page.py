"""Twenty minutes to a fleet, walked as docs/first-fleet.md leads, from an empty folder, with real processes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import trio

from cluster.dns.addresses import free_port
from tests.node.node_lab import BETWEEN_LOOKS_S, first_lines
from tests.node.test_reload_of_processes import drained, taken_by
from tests.page_commands import commands, environment, ran, shell

PAGE = "docs/first-fleet.md"
DEADLINE_S = 300
PORTS = (9001, 9002, 9003, 8080, 8081, 8082, 9180, 9190, 9200, 7946, 7956, 7966)


class Walk:
    """Somebody in a folder, with a terminal for each command that does not end. `ports`: what stands for the page's."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.folder, self._nursery, self._rng = folder, nursery, Random()
        self.ports = dict[int, int]()
        for port in PORTS:
            self.ports[port] = free_port(["127.0.0.1"], self._rng, taken_by(*self.ports.values()))

    def here(self, command: str) -> str:
        return re.sub(r"\b[789]\d{3}\b", lambda found: str(self.ports.get(int(found[0]), found[0])), command)

    async def open(self, command: str, lines: int) -> trio.Process:
        """Run a command in a terminal of its own, until it says where it listens."""
        program, *words = shlex.split(self.here(command))
        started = [sys.executable, *(("-m", "ranvier_py") if program == "ranvier" else ()), *words]
        process = await trio.lowlevel.open_process(
            started, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, cwd=self.folder, env=environment()
        )
        self._nursery.start_soon(drained, process.stderr, process)
        await first_lines(process, lines)
        return process

    async def type(self, command: str) -> str:
        return await shell(self.here(command), self.folder)

    async def type_all(self, those: Sequence[str]) -> str:
        return "\n".join([await self.type(each) for each in those])

    async def until(self, word: str) -> None:
        """Look at the verdict until it has a word."""
        while word not in (await self.look("ranvier status")):  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)

    async def look(self, command: str) -> str:
        """Type a command whose exit code tells a state."""
        return (await ran(self.here(f"{command} --control {self.a}"), self.folder)).stdout.decode()

    @property
    def a(self) -> str:
        return f"127.0.0.1:{self.ports[9180]}"


@pytest.mark.slow
async def test_its_commands_lead_from_an_empty_folder_to_a_fleet(tmp_path: Path) -> None:
    processes: list[trio.Process] = []
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            walk = Walk(tmp_path, nursery)
            try:
                await walked(walk, processes)
            finally:
                with trio.CancelScope(shield=True):
                    for process in processes:
                        process.terminate()
                    for process in processes:
                        await process.wait()


async def walked(walk: Walk, processes: list[trio.Process]) -> None:
    *engines, file = commands(PAGE, "Engines, found by themselves")
    processes += [await walk.open(each, 1) for each in engines]
    await walk.type_all([file, *commands(PAGE, "Keys and limits")])
    await walk.type_all(commands("docs/access.md", "From nothing to three tenants")[:5])
    *common, check, a, b, c, body, chat = commands(PAGE, "Three nodes")
    await walk.type_all(common)
    assert "checked" in await walk.type(check)
    nodes = [await walk.open(each, 2) for each in (a, b, c)]
    processes += nodes
    await walk.type(body)
    assert '"choices"' in await walk.type(chat)
    await walk.until("3 engines")
    await walk.until("5 peers")
    assert not any(b"node.no_backends" in each.logged for each in nodes)  # type: ignore[attr-defined]

    processes[1].terminate()
    await walk.until("engine_down")
    one, remove, listed = commands(PAGE, "An incident, and its end")
    assert "engine_down" in await walk.look(one)
    removed = await walk.type(f"{remove} --control {walk.a}")
    assert removed.count("done") == 5
    assert str(walk.ports[9002]) not in await walk.type(f"{listed} --control {walk.a}")

    drain, list_nodes = commands(PAGE, "A rolling upgrade")
    assert "unready" in await walk.type(drain)
    nodes[2].terminate()
    assert await nodes[2].wait() == 0
    processes.append(await walk.open(c, 2))
    await walk.until("5 peers")
    assert "c-1" in await walk.type(list_nodes)
    assert '"choices"' in await walk.type(chat)
