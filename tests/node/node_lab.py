"""Whole nodes on real sockets in front of engines of any kind, as their clients and operators see them."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import trio

from cluster.engine.engine_models import VLLM
from cluster.engine.engine_process import serve as serve_engine
from cluster.engine.engine_routes import Engine, EngineConfig
from cluster.engine.engine_text import load_tokenizer
from cluster.engine.kv_publisher import KvEndpoints
from cluster.local_tokenizer import local_tokenizer
from ranvier_py.cli import main
from ranvier_py.config.config_loader import config_of
from ranvier_py.control.control_port import ControlPort
from ranvier_py.node.run_node import Addresses, run
from ranvier_py.replay.engine.engine_values import EngineLimits
from tests.proxy.wire import NO_TLS, Wire

DEADLINE_S = 60  # what is awaited comes within a second or two on a machine that is not crowded
BETWEEN_LOOKS_S = 0.02  # without a pause a wait would take the core from what it waits for
MODEL = "lab-model"
KEY = "3f" * 16 + "a7" * 16
ANNOUNCED = re.compile(r"listening on (\S+) control (\S+)")
"""What a process of ours writes first: where it is."""

PLACES = {"listen": "127.0.0.1:0", "control": "127.0.0.1:0"}

Messages = Sequence[dict[str, Any]]
SYSTEM = "You are the help desk of a small library. Answer briefly, name the shelf, and never guess. " * 4
QUESTION = ({"role": "user", "content": "How many words are there in this question? " * 20},)


def turn(*contents: str) -> list[dict[str, Any]]:
    """A conversation, with its system text."""
    roles = ("user", "assistant")
    return [{"role": "system", "content": SYSTEM}] + [
        {"role": roles[i % 2], "content": content} for i, content in enumerate(contents)
    ]


def chat(messages: Messages = QUESTION, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 8, **fields}).encode()


class Node:
    """One running node."""

    def __init__(self, lab: Lab, addresses: Addresses, scope: trio.CancelScope) -> None:
        self.lab, self.nursery, self.http, self.engines = lab, lab.nursery, lab.http, lab.engines
        self.address = addresses.public[0]
        self.url = "http://{}:{}".format(*self.address)
        self.control = addresses.control
        self.scope = scope

    async def chat(self, messages: Messages = QUESTION, **fields: Any) -> httpx.Response:
        return await self.http.post(f"{self.url}/v1/chat/completions", content=chat(messages, **fields))

    async def wire(self) -> Wire:
        return await Wire.connect(self.address[1])

    async def ask(self, path: str) -> Any:
        return (await self.http.get(f"{self.control}{path}")).json()

    async def until(self, path: str, holds: Callable[[Any], object]) -> Any:
        """What the node says there as soon as it is as expected."""
        while True:
            answer = await self.ask(path)
            if holds(answer):
                return answer
            await trio.sleep(BETWEEN_LOOKS_S)

    async def faults(self) -> dict[str, int]:
        """How many exceptions nobody expected, by place."""
        page = (await self.http.get(f"{self.control}/metrics")).text
        found = re.findall(r'ranvier_unexpected_errors_total\{place="(\w+)"\} (\S+)', page)
        return {place: int(float(number)) for place, number in found}

    async def until_faults(self, *places: str) -> None:
        """Until each of these places, and no other, went wrong twice: whatever it is, it goes on."""
        while sorted(found := await self.faults()) != sorted(places) or min(found.values()) < 2:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)

    async def until_routes(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The node's statistics as soon as they are as expected."""
        return dict(await self.until("/admin/routes", holds))

    async def until_backend(self, holds: Callable[[dict[str, Any]], object]) -> None:
        """Until the first backend is as expected."""
        await self.until("/admin/backends", lambda answer: holds(answer["backends"][0]))

    async def backends(self) -> list[dict[str, Any]]:
        return list((await self.ask("/admin/backends"))["backends"])

    async def sees(self, peers: int) -> None:
        """Until so many peers are alive."""
        await self.until("/admin/cluster", lambda view: states(view).count("alive") == peers)

    async def fault(self, engine: str, **fault: Any) -> None:
        answer = await self.http.post(f"{engine}/admin/faults", json=fault)
        assert answer.status_code == 200, answer.text


def states(view: dict[str, Any]) -> list[str]:
    return [member["state"] for member in view["members"]]


async def printed(*words: str, status: int = 0) -> str:
    """What `ranvier` with these words prints, in this process: one of its own would take half a second to import."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = await trio.to_thread.run_sync(main, words)
    assert code == status, out.getvalue()
    return out.getvalue()


async def first_lines(process: trio.Process, count: int = 1) -> str:
    """What it writes until it has written so many lines."""
    assert process.stdout is not None
    text = b""
    while text.count(b"\n") < count:
        text += (piece := await process.stdout.receive_some())
        assert piece, f"it ended after {text!r}"
    return text.decode()


class Serving(Protocol):
    """What a test uses in place of an engine."""

    async def serve(self, stream: trio.SocketStream) -> None: ...


class Lab:
    """Nodes that come and go in front of some engines."""

    def __init__(self, nursery: trio.Nursery, http: httpx.AsyncClient) -> None:
        self.nursery = nursery
        self.http = http
        self.engines: list[str] = []
        self.tokenizer_of = local_tokenizer

    async def listen(self, serve: Callable[[trio.SocketStream], Awaitable[object]]) -> str:
        """The URL at which connections are served so."""
        listeners = await self.nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        return f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"

    async def start(self, **settings: Any) -> Node:
        values = {
            **PLACES,
            "debug_headers": True,
            "backend": self.engines,
            "probe_interval_s": 60,
            "drain_timeout_s": 5,
            **settings,
        }
        scope = trio.CancelScope()

        async def serve(task_status: trio.TaskStatus[Addresses]) -> None:
            with scope:
                await run(
                    config_of(**values), lambda: ControlPort, tokenizer_of=self.tokenizer_of, task_status=task_status
                )

        return Node(self, await self.nursery.start(serve), scope)


class ClusterLab(Lab):
    """Each node is told of those before it; `key_file` is the key of all."""

    def __init__(self, nursery: trio.Nursery, http: httpx.AsyncClient, folder: Path) -> None:
        super().__init__(nursery, http)
        self.key_file = folder / "key"
        self.key_file.write_text(KEY)
        self.places: list[str] = []

    async def start(self, **settings: Any) -> Node:
        gossip = {"gossip": "127.0.0.1:0", "join": list(self.places), "cluster_key_file": self.key_file}
        node = await super().start(**{**gossip, "drain_timeout_s": 1, **settings})
        self.places.append((await node.ask("/admin/cluster"))["address"])
        return node

    async def process(self, **settings: object) -> trio.Process:
        """One more node, in a process of its own, as soon as it serves. It is killed with the lab."""
        return (await self.addressed_process(**settings))[0]

    async def addressed_process(self, **settings: object) -> tuple[trio.Process, str, str]:
        """The same, with the URLs of its public and its control port. A switch is True."""
        flags = {**PLACES, "gossip": "127.0.0.1:0", "cluster_key_file": self.key_file, **settings}.items()
        words = [*flags, *(("join", place) for place in self.places), *(("backend", url) for url in self.engines)]
        options = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in words]
        command = [sys.executable, "-m", "ranvier_py", "serve", *options]
        start = partial(trio.run_process, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        process: trio.Process = await self.nursery.start(start)
        ((public, control),) = ANNOUNCED.findall(await first_lines(process))
        return process, f"http://{public}", control

    async def cluster(self, count: int, **settings: Any) -> list[Node]:
        nodes = [await self.start(**settings) for _ in range(count)]
        for node in nodes:
            await node.sees(count - 1)
        return nodes


async def start_engine(
    nursery: trio.Nursery,
    number: int = 0,
    port: int = 0,
    tokenizer: str = "bytes",
    models: tuple[str, ...] = (MODEL,),
    kv: KvEndpoints | None = None,
    *,
    host: str = "127.0.0.1",
    age_s: float = 0.0,
    owner: str = VLLM,
    embeds: bool = False,
    **limits: float,
) -> tuple[str, trio.CancelScope]:
    """One engine without a prefill to wait for, which started so long ago; its URL, and how to end it."""
    known = EngineLimits(**{"prefill_tokens_per_s": math.inf, "decode_s": 0.001, **limits})  # type: ignore[arg-type]
    kinds: dict[str, Any] = {"kv": kv, "owner": owner, "embeds": embeds}
    config = EngineConfig(name=f"engine-{number}", models=models, limits=known, tokens_max=200_000, **kinds)
    scope, engine = trio.CancelScope(), Engine(config, load_tokenizer(tokenizer))
    engine.live.started_at -= age_s

    async def serve(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
        with scope:
            await serve_engine(engine, host, port, task_status=task_status)

    host, port = await nursery.start(serve)
    return f"http://{host}:{port}", scope


Place = TypeVar("Place", bound=Lab)


@asynccontextmanager
async def opened(
    made: Callable[[trio.Nursery, httpx.AsyncClient], Place], engines: int, deadline_s: float
) -> AsyncIterator[Place]:
    """A place without nodes yet, and with so many engines."""
    with trio.fail_after(deadline_s):
        client = httpx.AsyncClient(timeout=deadline_s, trust_env=False, verify=NO_TLS)
        async with trio.open_nursery() as nursery, client as http:
            place = made(nursery, http)
            place.engines += [(await start_engine(nursery, number))[0] for number in range(engines)]
            yield place
            nursery.cancel_scope.cancel()


def cluster_lab(
    folder: Path, engines: int = 3, deadline_s: float = DEADLINE_S
) -> AbstractAsyncContextManager[ClusterLab]:
    return opened(partial(ClusterLab, folder=folder), engines, deadline_s)


@asynccontextmanager
async def lab(
    *backends: Serving, engines: int = 0, deadline_s: float = DEADLINE_S, **settings: Any
) -> AsyncIterator[Node]:
    """One node in front of what a test uses as backends, and of so many engines."""
    async with opened(Lab, engines, deadline_s) as place:
        place.engines += [await place.listen(backend.serve) for backend in backends]
        yield await place.start(**settings)
