"""Agents from npm and PyPI whose engines fail within a 200, are silent before they begin, or lack the model.

`make test-clients` runs them. What the libraries of OpenAI and Anthropic see of the same stands in
`tests/node/test_client_libraries.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.clients.real_agents import AGENTS, MODEL, Step, environment
from tests.clients.test_real_agents import project_in
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, Node, opened
from tests.proxy.test_pipeline import at_rest

DEADLINE_S = 120
SENT = re.compile(rb"(GET|POST) (/v1/(?:chat/completions|messages|responses))(?:\?\S+)? HTTP/1.1\r\n")
OURS = b": keepalive\n\n"
REFUSAL = "This model does not support what was asked for."
SHOWN = {
    **dict.fromkeys(("codex", "opencode", "qwen"), REFUSAL),
    "claude-code": "API Error",  # it asks once more for a whole answer, and names what is wrong with that
}
"""What an agent writes when a stream fails at once; those that are missing here ask again for minutes."""

pytestmark = pytest.mark.skipif(not os.environ.get("TEST_CLIENTS"), reason="make test-clients runs it")


class Line:
    """What is between an agent and its node; it notes what passes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.sent, self.came = bytearray(), bytearray()

    @property
    def asked(self) -> list[bytes]:
        """The methods of what was asked of a model."""
        return [method for method, _ in SENT.findall(self.sent)]

    async def serve(self, agent: trio.SocketStream) -> None:
        node = await trio.open_tcp_stream(*self._address)
        async with agent, node, trio.open_nursery() as nursery:
            nursery.start_soon(relay, agent, node, self.sent)
            nursery.start_soon(relay, node, agent, self.came)


async def relay(source: trio.SocketStream, target: trio.SocketStream, passed: bytearray) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in source:
            passed += data
            await target.send_all(data)
        await target.send_eof()


@asynccontextmanager
async def place_of(folder: Path, engines: int, **settings: Any) -> AsyncIterator[tuple[Node, Line, str, Path]]:
    """A node in front of engines, the line to it with its URL, and what an agent works on."""
    project = project_in(folder)
    async with opened(Lab, engines, DEADLINE_S) as place:
        node = await place.start(**settings)
        line = Line(node.address)
        yield node, line, await place.listen(line.serve), project


class Run:
    """One run of an agent, in a process group that ends as one: some agents are two processes."""

    def __init__(self, step: Step, project: Path) -> None:
        self.words = step.words.encode()
        given = {**environment(project.parent), **step.environment}
        self._written = project.parent / "written"
        with self._written.open("wb") as target:
            self._process = subprocess.Popen(
                list(step.argv),
                cwd=project,
                env=given,
                stdin=subprocess.PIPE,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self.words)
        self._process.stdin.close()

    @property
    def status(self) -> int | None:
        return self._process.poll()

    @property
    def text(self) -> str:
        return self._written.read_text(errors="replace")

    async def ended(self) -> int:
        while self.status is None:  # noqa: ASYNC110  # a process
            await trio.sleep(BETWEEN_LOOKS_S)
        return self._process.wait()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@asynccontextmanager
async def running(step: Step, project: Path) -> AsyncIterator[Run]:
    run = Run(step, project)
    try:
        yield run
    finally:
        run.end()


async def fail(node: Node, *forms: str, status: int = 500) -> None:
    for engine, form in zip(node.engines, forms, strict=False):
        await node.fault(engine, kind="error_inside", form=form, status=status)


async def hits(node: Node) -> list[int]:
    pages = [(await node.http.get(f"{engine}/admin/stats")).json() for engine in node.engines]
    return [sum(page["faults"].values()) for page in pages]


@pytest.mark.parametrize("forms", [("first", "empty"), ("announced", "done"), ("commented", "first")])
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_sees_nothing_of_failures_within_a_200_while_another_engine_serves(
    name: str, forms: Sequence[str], tmp_path: Path
) -> None:
    async with place_of(tmp_path, 3, policy="round_robin") as (node, line, url, project):
        await fail(node, *forms)
        async with running(AGENTS[name](url, project.parent)[0], project) as run:
            assert await run.ended() == 0, run.text[-2000:]
        outcomes = (await at_rest(node))["outcomes"]
        assert any(await hits(node))
    assert outcomes["success"] == len(line.asked) > 0
    assert "fault on demand" not in run.text
    assert b'"error":{' not in line.came


@pytest.mark.parametrize(("form", "status", "outcome"), [("first", 400, "refused"), ("empty", 500, "server_error")])
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_that_nobody_serves_shows_the_error_or_asks_again(
    name: str, form: str, status: int, outcome: str, tmp_path: Path
) -> None:
    async with place_of(tmp_path, 2) as (node, line, url, project):
        await fail(node, form, form, status=status)
        async with running(AGENTS[name](url, project.parent)[0], project) as run:
            while run.status is None and (len(line.asked) < 3 or (name in SHOWN and form == "first")):  # noqa: ASYNC110
                await trio.sleep(BETWEEN_LOOKS_S)
            ended = run.status
        assert set((await at_rest(node))["outcomes"]) - {"cancelled"} == {outcome}
    if name in SHOWN and form == "first":
        assert ended not in (0, None)
        assert SHOWN[name] in run.text


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_waits_for_an_engine_that_is_silent_before_it_begins(name: str, tmp_path: Path) -> None:
    """Longer than heads wait: comments of ours come, in the form of its API."""
    async with place_of(tmp_path, 1, sse_keepalive_s=0.5) as (node, line, url, project):
        await node.fault(node.engines[0], kind="stall", seconds=7, after_tokens=0, count=3)
        async with running(AGENTS[name](url, project.parent)[0], project) as run:
            assert await run.ended() == 0, run.text[-2000:]
        outcomes = (await at_rest(node))["outcomes"]
        assert any(await hits(node))
    assert outcomes == {"success": len(line.asked)}
    assert OURS in line.came


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_names_the_model_that_no_engine_has(name: str, tmp_path: Path) -> None:
    async with place_of(tmp_path, 2) as (_, line, url, project):
        step = AGENTS[name](url, project.parent)[0]
        for file in filter(Path.is_file, project.parent.rglob(".*/*")):
            file.write_text(renamed(file.read_text()))
        given = {key: renamed(value) for key, value in step.environment.items()}
        async with running(Step([*map(renamed, step.argv)], step.words, given), project) as run:
            assert await run.ended() != 0 or name == "aider", run.text[-2000:]
    assert b"HTTP/1.1 404" in line.came
    assert b'"not_found_error"' in line.came or b'"model_not_found"' in line.came
    assert "nobody's-model" in run.text


def renamed(text: str) -> str:
    return text.replace(MODEL, "nobody's-model")


async def test_codex_is_refused_a_socket_once_and_goes_on_at_once(tmp_path: Path) -> None:
    async with place_of(tmp_path, 1) as (_, line, url, project):
        step = AGENTS["codex"](url, project.parent)[0]
        with (project.parent / ".codex" / "config.toml").open("a") as config:
            config.write("supports_websockets = true\n")
        async with running(step, project) as run:
            assert await run.ended() == 0, run.text[-2000:]
    assert line.asked[0] == b"GET"
    assert set(line.asked[1:]) == {b"POST"}
    assert line.came.startswith(b"HTTP/1.1 426 ")
    assert "Reconnecting" not in run.text
