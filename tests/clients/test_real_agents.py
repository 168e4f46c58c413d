"""Agents from npm and PyPI through nodes in front of the lab's engines: every turn finds what was computed before.

`make test-clients` installs and runs them; elsewhere they skip, and `test_agent_shapes` replays what they sent. With
RECORD_SHAPES=FOLDER the shapes of what they send now are written there: of one session each, where those that are kept
are of several at once.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import orjson
import pytest
import trio

from cluster.agents.agent_shapes import AgentRequest, requests_of, shape_of, written
from cluster.agents.engine_fleet import MODEL, EngineFleet, reuse_of
from ranvier_py.io.tokenizer import EMBEDDED
from tests.clients.real_agents import AGENTS, BY_TABLES, COMMAND_S_MAX, STAMP, TABLES, Step, environment
from tests.node.node_lab import cluster_lab

ENGINES = 3
REACHED = 0.99  # of consecutive turns
LOST = 0.01  # of all prompt tokens, beside what the client's own prompts allow
PREFILL_TOKENS_PER_S = 20_000
TURNS_LEAST = {"aider": 3}  # others call tools

pytestmark = pytest.mark.skipif(not os.environ.get("TEST_CLIENTS"), reason="make test-clients runs it")


async def run(step: Step, project: Path) -> None:
    given = {**environment(project.parent), **step.environment}
    with trio.fail_after(COMMAND_S_MAX):
        done = await trio.run_process(
            list(step.argv),
            cwd=project,
            env=given,
            stdin=step.words.encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-2000:]


def in_turn(addresses: Sequence[tuple[str, int]]) -> Callable[[trio.SocketStream], Awaitable[None]]:
    """What serves each connection by the next node, as DNS does."""
    turns = cycle(addresses)

    async def relay(source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                await target.send_all(data)
            await target.send_eof()

    async def serve(client: trio.SocketStream) -> None:
        node = await trio.open_tcp_stream(*next(turns))
        async with client, node, trio.open_nursery() as nursery:
            nursery.start_soon(relay, client, node)
            nursery.start_soon(relay, node, client)

    return serve


def project_in(folder: Path) -> Path:
    """What an agent works on; its home is around it."""
    assert STAMP.exists(), "make test-clients installs them"
    project = folder / "home" / "project"
    project.mkdir(parents=True)
    (project / "notes.txt").write_text("Books wait on shelf 7.\nAtlases stay in the hall.\n")
    return project


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("name", [*AGENTS, *BY_TABLES])
async def test_turns_of_a_real_agent_reach_the_engine_that_holds_their_history(
    name: str, nodes: int, tmp_path: Path
) -> None:
    project = project_in(tmp_path)
    async with cluster_lab(tmp_path, engines=0, deadline_s=600) as place:
        fleet = EngineFleet(ENGINES, tokenizer=str(EMBEDDED), prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
        await fleet.start(place.nursery)
        place.engines += fleet.urls
        running = await place.cluster(nodes, model=TABLES)
        url = await place.listen(in_turn([node.address for node in running]))
        fleet.task = "S1"
        for step in {**AGENTS, **BY_TABLES}[name](url, project.parent):
            await run(step, project)
    reuse = reuse_of(fleet.asked)
    assert reuse.turns >= TURNS_LEAST.get(name, 8)
    assert reuse.reached >= REACHED, [(each.engine, each.held) for each in fleet.asked]
    assert reuse.lost <= LOST, [(each.engine, each.held, each.reused) for each in fleet.asked]
    if name != "aider":
        kinds = {request.kind for request in fleet.requests}
        assert "sub" in kinds, "a sub-agent asked, too"


def names_in(requests: Sequence[AgentRequest]) -> dict[str, set[str]]:
    """Kinds of requests, and all names of header fields and of members of bodies."""
    return {
        "kinds": {f"{each.kind} {each.path}" for each in requests},
        "fields": {name.lower() for each in requests for name, _ in each.headers},
        "members": {name for each in requests for name in orjson.loads(each.body)},
    }


@pytest.mark.skipif(not os.environ.get("RECORD_SHAPES"), reason="RECORD_SHAPES=FOLDER names where shapes are written")
@pytest.mark.parametrize("name", AGENTS)
async def test_what_an_agent_sends_has_the_structure_of_its_recorded_shape(name: str, tmp_path: Path) -> None:
    """It asks an engine itself: nodes add a request's id, and to streams that counts are wanted."""
    project, folder = project_in(tmp_path), Path(os.environ["RECORD_SHAPES"])
    fleet = EngineFleet(1, tokenizer=str(EMBEDDED))
    async with trio.open_nursery() as nursery:
        await fleet.start(nursery)
        fleet.task = "S1"
        for step in AGENTS[name](fleet.urls[0], project.parent):
            await run(step, project)
        nursery.cancel_scope.cancel()
    written(shape_of(fleet.requests), name, folder)
    again = requests_of(name, MODEL, folder)
    assert [(each.kind, each.path) for each in again] == [(each.kind, each.path) for each in fleet.requests]
    assert names_in(again) == names_in(requests_of(name, MODEL))
