"""Incidents on real processes: from `ranvier status` alone, at default settings, each is named within ten seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from tests.node.access.key_lab import CHAT, RED, bearer, key_lines, keys_file
from tests.node.node_lab import ClusterLab, chat, cluster_lab, first_lines, turn

DEADLINE_S = 120.0
NAMED_S = 10.0
LOOK_S = 0.5  # between two looks, each of which is a process of its own


class Scene(NamedTuple):
    """A node in front of engines, all in processes of their own, and what happens to it."""

    place: ClusterLab
    engines: list[trio.Process]
    url: str
    folder: Path

    async def chats(self, count: int, headers: Mapping[str, str] = {}, first: int = 0) -> None:  # only read
        """So many conversations, each of two turns, since only a second turn shows whether the first is found."""
        for number in range(first, first + count):
            opening = f"question {number}: where are the atlases of shelf {number * 7}? " * 10
            for words in ([opening], [opening, "On the third shelf.", "And the maps?"]):
                await self.place.http.post(self.url + CHAT, content=chat(turn(*words)), headers=dict(headers))


async def engine_process(place: ClusterLab, *flags: str) -> trio.Process:
    command = [sys.executable, "-m", "cluster", "engine", "--listen", "127.0.0.1:0", "--decode-ms", "1", *flags]
    start = partial(trio.run_process, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    process: trio.Process = await place.nursery.start(start)
    found = re.search(r"http://\S+", await first_lines(process))
    assert found is not None
    place.engines.append(found[0])
    return process


async def kill_three(scene: Scene) -> None:
    for process in scene.engines[:3]:
        process.kill()


async def join_with_an_old_key(scene: Scene) -> None:
    (scene.folder / "old").write_text("19" * 16 + "c4" * 16)
    await scene.place.process(cluster_key_file=scene.folder / "old")


async def talk(scene: Scene) -> None:
    await scene.chats(30)


async def flood(scene: Scene) -> None:
    await scene.chats(20, bearer(RED))


async def fail_inside(scene: Scene) -> None:
    for url in scene.place.engines[:1]:
        fault = {"kind": "error_inside", "form": "first", "status": 500}
        assert (await scene.place.http.post(f"{url}/admin/faults", json=fault)).is_success
    async with trio.open_nursery() as nursery:  # several at once, so that both engines are asked
        for user in range(4):
            nursery.start_soon(scene.chats, 100, {}, 100 * user)


class Incident(NamedTuple):
    """What happens, and what names its cause in the status; the exit code of that."""

    begin: Callable[[Scene], Awaitable[None]]
    named: str
    code: int
    engines: int = 2
    flags: tuple[str, ...] = ()  # of the engines
    limited: bool = False
    starts: bool = False  # it begins once the process that it starts is there
    at_start: bool = False  # it is there from the start, and may be named before there is any traffic


INCIDENTS = {
    "three_engines_die": Incident(kill_three, r"DEGRADED +engine_down.*does not answer.*also", 1, engines=6),
    "a_peer_with_the_old_key": Incident(
        join_with_an_old_key, r"DEGRADED +peer_key.*another cluster key", 1, starts=True
    ),
    "the_wrong_tokenizer": Incident(
        talk, r"DEGRADED +engine_tokenizer", 1, flags=("--tokenizer", "bytes"), at_start=True
    ),
    "a_flood_of_one_tenant": Incident(flood, r"NOTICE +limit_reached.*tenant acme", 0, limited=True),
    "errors_inside_200": Incident(fail_inside, r"DEGRADED +engine_fails.*within a 200", 1),
}


@asynccontextmanager
async def before(incident: Incident, folder: Path, deadline_s: float = DEADLINE_S) -> AsyncIterator[tuple[Scene, str]]:
    """A node and its engines, all well, and the URL of its control port."""
    async with cluster_lab(folder, engines=0, deadline_s=deadline_s) as place:
        engines = [await engine_process(place, *incident.flags) for _ in range(incident.engines)]
        settings: dict[str, object] = {}
        if incident.limited:
            tenant = '[[tenant]]\nname = "acme"\nrequests_per_minute = 5\n\n'
            settings["keys_file"] = keys_file(folder, tenant, key_lines(RED, tenant="acme"))
        _, url, control = await place.addressed_process(**settings)
        place.places.append((await place.http.get(f"{control}/admin/cluster")).json()["address"])
        yield Scene(place, engines, url, folder), control
        place.nursery.cancel_scope.cancel()


@asynccontextmanager
async def happening(incident: Incident, scene: Scene) -> AsyncIterator[None]:
    """From the beginning of an incident on."""
    async with trio.open_nursery() as nursery:
        if incident.starts:
            await incident.begin(scene)
        else:
            nursery.start_soon(incident.begin, scene)
        yield
        nursery.cancel_scope.cancel()


async def status(control: str) -> tuple[str, int]:
    """What `ranvier status` prints, in one line, and its exit code."""
    command = [sys.executable, "-m", "ranvier_py", "status", "--control", control]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    return " ".join(done.stdout.decode().split()), done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", INCIDENTS)
async def test_each_incident_is_named_by_the_status_within_ten_seconds(name: str, tmp_path: Path) -> None:
    incident = INCIDENTS[name]
    async with before(incident, tmp_path) as (scene, control):
        found, code = await status(control)
        assert incident.at_start or (code, re.search(incident.named, found)) == (0, None), found
        async with happening(incident, scene):
            began = trio.current_time()
            found, code = await status(control)
            while not re.search(incident.named, found):
                assert trio.current_time() < began + NAMED_S, found
                await trio.sleep(LOOK_S)
                found, code = await status(control)
        assert code == incident.code, found
        print(f"{name}: named after {trio.current_time() - began:.1f} s")
