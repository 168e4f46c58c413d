"""Real processes for the benchmark of the Purdue report: engines with KV events, a node, reporters."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import trio

from tests.node.node_lab import ANNOUNCED, first_lines
from tests.proxy.wire import NO_TLS

MODEL = "lab-model"
KEY = "the operator's control key"
WORKERS = ("w0", "w1")


class Lab:
    """Two engines, a node in front of them, a reporter for each."""

    def __init__(self, nursery: trio.Nursery, http: httpx.AsyncClient) -> None:
        self.nursery = nursery  # of all processes
        self.http = http
        self.engines: dict[str, str] = {}  # their URLs, by worker
        self.node: trio.Process | None = None
        self.settings: list[str] = []
        self.control = self.url = ""

    async def start(self, *command: str, **environment: str) -> tuple[trio.Process, str]:
        """A process, and its first line, which says where it listens."""
        words, own = [sys.executable, "-m", *command], {**os.environ, **environment}
        process = await self.nursery.start(partial(trio.run_process, words, stdout=-1, env=own, check=False))
        return process, await first_lines(process)

    async def start_engine(self, name: str) -> None:
        flags = ("--listen", "127.0.0.1:0", "--name", name, "--prefill-tokens-per-s", "0", "--decode-ms", "15")
        events = ("--kv-events", "tcp://127.0.0.1:0", "--kv-replay", "tcp://127.0.0.1:0")
        _, line = await self.start("cluster", "engine", *flags, *events, "--cache-tokens", "16384")
        self.engines[name] = line.split()[4]

    async def start_node(self, *settings: str) -> None:
        """The first time on free ports, then on the same."""
        self.settings = list(settings) or self.settings
        control = self.control.removeprefix("http://") or "127.0.0.1:0"
        command = ["ranvier_py", "serve", "--listen", "127.0.0.1:0", "--control", control, "--debug-headers"]
        command += ["--log-level", "warning"]
        for name, engine in self.engines.items():
            command += ["--backend", f"{engine},name={name},kv_events=off"]
        self.node, line = await self.start(*command, *self.settings, RANVIER_CONTROL_KEY=KEY)
        ((public, self.control),) = ANNOUNCED.findall(line)
        self.url = f"http://{public}"

    async def start_reporter(self, name: str, engine: str) -> None:
        own = ("--worker-id", name, "--router", self.control, "--engine", engine, "--log-level", "warning")
        await self.start("ranvier_py", "reporter", *own, RANVIER_REPORTER_KEY=KEY)

    async def start_all(self, *settings: str) -> None:
        """The node with these settings, and the reporters."""
        await self.start_node(*settings)
        async with trio.open_nursery() as nursery:
            for name, engine in self.engines.items():
                nursery.start_soon(self.start_reporter, name, engine)

    # What clients do

    async def ask(self, prompt: list[int], tokens: int = 1) -> tuple[str, str]:
        """(worker, reason)"""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
        answer = await self.http.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-ranvier-backend"], answer.headers["x-ranvier-reason"]

    async def stay(self, prompt: list[int], *, task_status: trio.TaskStatus[tuple[str, trio.CancelScope]]) -> None:
        """A request that goes on until its scope is cancelled."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with trio.CancelScope() as scope:
            async with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                chunks = answer.aiter_raw()
                await anext(chunks)
                task_status.started((answer.headers["x-ranvier-backend"], scope))
                async for _ in chunks:
                    pass

    async def fill(self, worker: str) -> None:
        """Memory pressure: enough other prompts, past the router, that nothing of before is left."""
        for number in range(20):
            start = 100_000 + 1000 * number
            body = {"model": MODEL, "prompt": list(range(start, start + 1000)), "max_tokens": 1}
            assert (await self.http.post(f"{self.engines[worker]}/v1/completions", json=body)).status_code == 200

    # What operators see

    async def see(self, path: str) -> Any:
        return (await self.http.get(self.control + path, headers={"authorization": f"Bearer {KEY}"})).json()

    async def workers(self) -> Mapping[str, Mapping[str, Any]]:
        return {each["backend"]: each for each in (await self.see("/internal/workers"))["workers"]}

    async def until(self, holds: Callable[[Mapping[str, Mapping[str, Any]]], bool]) -> None:
        """Wait until what is known of the workers is as expected."""
        while not holds(await self.workers()):  # noqa: ASYNC110  # another process is asked
            await trio.sleep(0.02)

    async def exact(self) -> None:
        """Wait until both workers are known exactly."""
        await self.until(lambda workers: [each["level"] for each in workers.values()] == ["exact", "exact"])

    async def holders(self, prompt: list[int], tokens: int) -> list[str]:
        """Workers of which the router knows that they hold the beginning of this prompt."""
        body = {"model": MODEL, "prompt": prompt}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = (await self.http.post(f"{self.control}/explain", json=body, headers=headers)).json()
        return sorted(each["backend"] for each in answer["candidates"] if each["matched_tokens"] >= tokens)

    async def known(self, prompt: list[int], *holders: str, tokens: int = 64) -> None:
        """Wait until the router knows exactly these workers to hold a beginning of so many tokens."""
        while await self.holders(prompt, tokens) != sorted(holders):  # noqa: ASYNC110  # another process is asked
            await trio.sleep(0.02)


@asynccontextmanager
async def purdue_lab(deadline_s: float) -> AsyncIterator[Lab]:
    """Everything ends with it."""
    with trio.fail_after(deadline_s):
        client = httpx.AsyncClient(timeout=deadline_s, trust_env=False, verify=NO_TLS)
        async with client as http, trio.open_nursery() as nursery:
            lab = Lab(nursery, http)
            async with trio.open_nursery() as starting:
                for name in WORKERS:
                    starting.start_soon(lab.start_engine, name)
            yield lab
            nursery.cancel_scope.cancel()
