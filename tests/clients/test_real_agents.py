"""Agents from npm and PyPI through nodes in front of the lab's engines: every turn finds what was computed before.

`make test-clients` installs and runs them; elsewhere they skip, and `test_agent_shapes` replays what they sent. With
RECORD_SHAPES=FOLDER the shapes of what they send now are written there.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pytest
import trio

from cluster.agents.agent_shapes import shape_of, written
from cluster.agents.engine_fleet import EngineFleet, reuse_of
from ranvier_py.io.tokenizer import EMBEDDED
from tests.clients.real_agents import AGENTS, COMMAND_S_MAX, STAMP, Step, environment
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


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("name", AGENTS)
async def test_turns_of_a_real_agent_reach_the_engine_that_holds_their_history(
    name: str, nodes: int, tmp_path: Path
) -> None:
    assert STAMP.exists(), "make test-clients installs them"
    project = tmp_path / "home" / "project"
    project.mkdir(parents=True)
    (project / "notes.txt").write_text("Books wait on shelf 7.\nAtlases stay in the hall.\n")
    async with cluster_lab(tmp_path, engines=0, deadline_s=600) as place:
        fleet = EngineFleet(ENGINES, tokenizer=str(EMBEDDED), prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
        await fleet.start(place.nursery)
        place.engines += fleet.urls
        running = await place.cluster(nodes)
        url = await place.listen(in_turn([node.address for node in running]))
        fleet.task = "S1"
        for step in AGENTS[name](url, project.parent):
            await run(step, project)
    reuse = reuse_of(fleet.asked)
    if folder := os.environ.get("RECORD_SHAPES"):
        written(shape_of(fleet.requests), name, Path(folder))
    assert reuse.turns >= TURNS_LEAST.get(name, 8)
    assert reuse.reached >= REACHED, [(each.engine, each.held) for each in fleet.asked]
    assert reuse.lost <= LOST, [(each.engine, each.held, each.reused) for each in fleet.asked]
    if name != "aider":
        kinds = {request.kind for request in fleet.requests}
        assert "sub" in kinds, "a sub-agent asked, too"
