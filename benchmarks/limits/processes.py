"""A limit of tokens a minute over nodes as processes, between which a relay loses datagrams: what clients are served.

The engine is in this process and notes what it serves: a request counts from when it comes there, which is at once when
it is let in, whatever becomes of the node that sent it. All else is as in `cluster.limits.limit_run`, by whose terms
it is measured.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import orjson
import trio

from benchmarks.harness.bench import ROOT
from benchmarks.harness.processes import wait_for_answer
from cluster.dns.addresses import free_port
from cluster.limits.limit_run import (
    ANSWER_TOKENS,
    CLIENTS,
    CUT_S,
    PROMPT_TOKENS,
    TOKENS_PER_S,
    LimitCase,
    Served,
    measured,
)
from cluster.network.links import CUT, Link, Links, Rule
from cluster.processes.relay import End, Relay

KEY = "rk-of-the-benchmark"
MEASURED_FROM_S, RAMP_S = 90.0, 30.0
AGAIN_S = 0.3
LATE_S = 0.05  # between two looks at how late this process is
LISTENING = re.compile(r"listening on (\S+) control (\S+)")
TEXT = "word " * (4 * PROMPT_TOKENS // 5)

Urls = Sequence[str]


class Engine:
    """Answers chats after as long as their answer takes, with counts. `served`: all that it began."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.served: list[Served] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # a node was killed
            await self._serve(stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        data = b""
        while True:
            while (end := data.find(b"\r\n\r\n") + 4) < 4:
                if not (more := await stream.receive_some()):
                    return
                data += more
            found = re.search(rb"(?i)content-length: *(\d+)", data[:end])
            length = int(found[1]) if found is not None else 0
            while len(data) < end + length:
                data += await stream.receive_some()
            is_chat, data = data.startswith(b"POST"), data[end + length :]
            body = orjson.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]})
            if is_chat:
                body = await self._answer()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            await stream.send_all(head + body)

    async def _answer(self) -> bytes:
        tokens, now = self._rng.randint(*ANSWER_TOKENS), time.monotonic()
        total, seconds = PROMPT_TOKENS + tokens, tokens / TOKENS_PER_S
        self.served.append(Served(now, total, now + seconds, 0))
        await trio.sleep(seconds)
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": total}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        return orjson.dumps({"choices": [choice], "usage": usage})


class Nodes:
    """Nodes as processes, each behind an address of the relay, and one key; what the case says becomes of them."""

    def __init__(self, case: LimitCase, seed: int) -> None:
        self.case, self.links = case, Links(Link(loss=case.loss))
        real, shown = ([f"127.0.{net}.{2 + number}" for number in range(case.nodes)] for net in (8, 9))
        port = free_port([*real, *shown], Random())
        self.ends = [End((one, port), (other, port)) for one, other in zip(real, shown, strict=True)]
        self.relay = Relay(self.ends, self.links, Random(seed))
        self.processes: list[subprocess.Popen[str]] = []

    @contextmanager
    def running(self, folder: Path, engine: str) -> Iterator[Urls]:
        """Run them until the end of the block; yields where each takes chats, once each has counts of all others."""
        keys, secret = folder / "keys.toml", folder / "cluster.key"
        digest = sha256(KEY.encode()).hexdigest()
        keys.write_text(f'[[key]]\nid = "b"\nsha256 = "{digest}"\ntokens_per_minute = {self.case.per_minute}\n')
        secret.write_text("3f" * 16 + "a7" * 16)
        fixed = [f"--backend={engine}", f"--keys-file={keys}", f"--cluster-key-file={secret}"]
        urls, controls = list[str](), list[str]()
        try:
            for number in range(self.case.nodes):
                public, control = self._start(number, fixed)
                urls.append(f"http://{public}/v1/chat/completions")
                controls.append(control)
            for control in controls:
                wait_for_answer(f"{control}/admin/access", self._is_whole)
            yield urls
        finally:
            for process in self.processes:
                process.terminate()
            for process in self.processes:
                process.wait()

    def _start(self, number: int, fixed: Sequence[str]) -> tuple[str, str]:
        (real, port), (shown, _) = self.ends[number].real, self.ends[number].shown
        options = ["--listen=127.0.0.1:0", "--control=127.0.0.1:0", *fixed]
        options += [f"--gossip={real}:{port}", f"--advertise={shown}:{port}"]
        options += [f"--join={end.shown[0]}:{port}" for end in self.ends[:number]]
        command = [sys.executable, "-m", "ranvier_py", "serve", f"--node-name=n{number}", *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        found = LISTENING.search(process.stdout.readline())
        assert found is not None
        return found[1], found[2]

    def _is_whole(self, page: bytes) -> bool:
        return bool(orjson.loads(page)["nodes"] == self.case.nodes)

    async def trouble(self) -> None:
        """Cut half of them off for a while, or kill the last one, when the case says so."""
        if self.case.cut_s:
            await trio.sleep(self.case.cut_s)
            half = self.case.first_half
            self.links.add(Rule(half, range(len(half), self.case.nodes), CUT))
            self.relay.wake()
            await trio.sleep(CUT_S)
            self.links.heal()
            self.relay.wake()
        if self.case.kill_s:
            await trio.sleep(self.case.kill_s)
            self.processes[-1].kill()


async def with_processes(case: LimitCase, seed: int) -> Mapping[str, Any]:
    """Measure nodes as processes."""
    with TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            nodes = Nodes(case, seed)
            await nursery.start(nodes.relay.run)
            start = partial(nodes.running, Path(folder))
            found = await served_by(start, case, seed, {"x-api-key": KEY}, nodes.trouble)
            nursery.cancel_scope.cancel()
    return found


async def no_trouble() -> None: ...


async def served_by(
    start: Callable[[str], AbstractContextManager[Urls]],
    case: LimitCase,
    seed: int,
    headers: Mapping[str, str],
    trouble: Callable[[], Awaitable[None]] = no_trouble,
) -> Mapping[str, Any]:
    """Measure processes in front of one engine: `start` runs them, given its URL, and gives theirs; `trouble` begins
    with the load. `late_s`: at most so late was this process, with clients, engine and relay."""
    engine, refusals, late = Engine(Random(seed)), list[float](), [0.0]
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        (listener,) = await nursery.start(partial(trio.serve_tcp, engine.serve, 0, host="127.0.0.1"))
        held = start(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
        urls = await trio.to_thread.run_sync(held.__enter__)
        stack.callback(held.__exit__, None, None, None)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60.0, headers=dict(headers)))
        began = time.monotonic()
        nursery.start_soon(look_how_late, late)
        with trio.move_on_after(case.for_s):
            async with trio.open_nursery() as clients:
                clients.start_soon(trouble)
                for client in range(CLIENTS):
                    url = urls[case.node_of(client)]
                    clients.start_soon(ask, http, url, Random(f"{seed} {client}"), case.think_s, refusals)
        nursery.cancel_scope.cancel()
    begin, end = began + MEASURED_FROM_S, began + case.for_s
    shares = measured(engine.served, refusals, begin, end, case.per_minute)
    return {**shares._asdict(), "late_s": round(late[0], 3)}


async def look_how_late(most: list[float]) -> None:
    while True:
        due = trio.current_time() + LATE_S
        await trio.sleep_until(due)
        most[0] = max(most[0], trio.current_time() - due)


async def ask(http: httpx.AsyncClient, url: str, rng: Random, mean_s: float, refusals: list[float]) -> None:
    """One client, in a closed loop, that waits so long on average from an answer to its next request."""
    await trio.sleep(rng.random() * RAMP_S)
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": ANSWER_TOKENS[1]})
    while True:
        try:
            response = await http.post(url, content=body)
        except httpx.TransportError:  # the node was killed
            await trio.sleep(1.0)
            continue
        if response.status_code == 200:
            await trio.sleep(rng.expovariate(1 / mean_s))
        else:
            if response.status_code == 429:
                refusals.append(time.monotonic())
            await trio.sleep(AGAIN_S * (0.5 + rng.random()))
