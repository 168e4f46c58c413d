"""Does a limit of tokens a minute hold over several nodes without a store, and how much of it is left unused?

    python -m benchmarks.limits [--only virtual | processes | scale] [--dry]

*Virtual*: simulated clusters of 1, 4, 8 and 32 nodes: 32 clients, four fifths of them at one node, ask for twice the
limit, a fifth of all datagrams is lost; then with half of the nodes cut off for 30 s, and with a node killed.
*Processes*: the same with 1, 4 and 8 nodes as processes, and an engine of this process that answers with counts. A
request that is refused is tried again at once, so somebody always waits. Goals: served in no sliding minute more than
1.02 x the limit (1.05 x with a partition), and held, with what is reserved, on average 0.98 x less one reservation;
false refusals, of requests that fit below 95 % of the limit, are at most 1 % of all requests.
*Scale*: one of 16 nodes with 50,000 keys and 2,000 tenants (`scale`); goals: 100 MB, and 5 kB/s to each peer.

The processes lose no datagrams; what loss, a cut network and a killed node do to processes is in tests/node/access.
LiteLLM with and without Redis is in `limits_peers`; SMG 1.13 limits no requests on its HTTP path.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import orjson
import trio

from benchmarks.harness.bench import ROOT, command_line, finish, show, show_row
from benchmarks.harness.processes import free_port
from benchmarks.limits.scale import Scale
from cluster.limits.limit_run import ANSWER_TOKENS, CLIENTS, PROMPT_TOKENS, LimitCase, LimitRun, Served, sliding

VIRTUAL = {
    **{f"{nodes} nodes": LimitCase(nodes, for_s=240.0) for nodes in (1, 4, 8, 32)},
    "8 nodes, partition of 30 s": LimitCase(8, cut_s=150.0, for_s=270.0),
    "8 nodes, one killed": LimitCase(8, kill_s=150.0, for_s=270.0),
}
PROCESSES = (1, 4, 8)
SCALE_PER_S = (10.0, 30.0)  # requests of each node
KEY, LIMIT, SKEW = "rk-of-the-benchmark", 100_000, 0.8
TOKENS_PER_S = 1000.0
RUN_S, MEASURED_FROM_S, RAMP_S = 150.0, 90.0, 30.0
AGAIN_S, SETTLE_S = 0.3, 3.0
LISTENING = re.compile(r"listening on (\S+)")
TEXT = "word " * (4 * PROMPT_TOKENS // 5)


class Engine:
    """Answers chats after as long as their answer takes, with counts."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    async def serve(self, stream: trio.SocketStream) -> None:
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
                tokens = self._rng.randint(*ANSWER_TOKENS)
                await trio.sleep(tokens / TOKENS_PER_S)
                usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}
                message = {"role": "assistant", "content": "x"}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                body = orjson.dumps({"choices": [choice], "usage": {**usage, "total_tokens": PROMPT_TOKENS + tokens}})
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            await stream.send_all(head + body)


async def with_processes(nodes: int, seed: int) -> Mapping[str, Any]:
    """Measure so many nodes as processes."""
    with TemporaryDirectory() as folder:
        return await served_by(lambda engine: running(nodes, engine, Path(folder)), seed, {"x-api-key": KEY}, SETTLE_S)


async def served_by(
    start: Callable[[str], AbstractContextManager[Sequence[str]]],
    seed: int,
    headers: Mapping[str, str],
    settle_s: float = 0.0,
) -> Mapping[str, Any]:
    """Measure processes in front of one engine: `start` runs them, given its URL, and gives theirs."""
    served, counts = list[Served](), {"requests": 0, "refused": 0}
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        serve = partial(trio.serve_tcp, Engine(Random(seed)).serve, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        held = start(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
        urls = await trio.to_thread.run_sync(held.__enter__)
        stack.callback(held.__exit__, None, None, None)
        await trio.sleep(settle_s)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60.0, headers=dict(headers)))
        began = time.monotonic()
        with trio.move_on_after(RUN_S):
            async with trio.open_nursery() as clients:
                for client in range(CLIENTS):
                    url = urls[0] if len(urls) == 1 or client < SKEW * CLIENTS else urls[1 + client % (len(urls) - 1)]
                    clients.start_soon(ask, http, url, Random(f"{seed} {client}"), served, counts)
        nursery.cancel_scope.cancel()
    served.sort(key=lambda one: one.at)
    minutes = sliding(served, began + MEASURED_FROM_S, began + RUN_S - 5.0, LIMIT)
    return {
        "served_most": round(max(minutes), 4),
        "served_least": round(min(minutes), 4),
        "served_mean": round(sum(minutes) / len(minutes), 4),
        **counts,
    }


@contextmanager
def running(nodes: int, engine: str, folder: Path) -> Iterator[Sequence[str]]:
    """So many nodes that gossip, with one key; gives where each takes chats."""
    keys, secret = folder / "keys.toml", folder / "cluster.key"
    digest = sha256(KEY.encode()).hexdigest()
    keys.write_text(f'[[key]]\nid = "b"\nsha256 = "{digest}"\ntokens_per_minute = {LIMIT}\n')
    secret.write_text("3f" * 16 + "a7" * 16)
    processes, urls, places = list[subprocess.Popen[str]](), list[str](), list[str]()
    try:
        for number in range(nodes):
            place = f"127.0.0.1:{free_port()}"
            options = ["--listen=127.0.0.1:0", "--control=127.0.0.1:0", f"--gossip={place}", f"--backend={engine}"]
            options += [f"--keys-file={keys}", f"--cluster-key-file={secret}", *[f"--join={one}" for one in places]]
            command = [sys.executable, "-m", "ranvier_py", "serve", f"--node-name=n{number}", *options]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            processes.append(process)
            assert process.stdout is not None
            found = LISTENING.search(process.stdout.readline())
            assert found is not None
            urls.append(f"http://{found[1]}/v1/chat/completions")
            places.append(place)
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def ask(http: httpx.AsyncClient, url: str, rng: Random, served: list[Served], counts: dict[str, int]) -> None:
    """One client, in a closed loop."""
    await trio.sleep(rng.random() * RAMP_S)
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": ANSWER_TOKENS[1]})
    while True:
        at = time.monotonic()
        response = await http.post(url, content=body)
        counts["requests"] += 1
        if response.status_code == 200:
            tokens = response.json()["usage"]["total_tokens"]
            served.append(Served(at, tokens, time.monotonic(), 0))
            await trio.sleep(rng.expovariate(LIMIT / (CLIENTS * 60.0 * (PROMPT_TOKENS + 2000) / 2)))
        else:
            counts["refused"] += response.status_code == 429
            await trio.sleep(AGAIN_S * (0.5 + rng.random()))


def measured(only: Sequence[str], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "virtual" in only:
        found["virtual"] = {}
        for name, case in VIRTUAL.items():
            found["virtual"][name] = LimitRun(case, seed).go()._asdict()
            show_row({"virtual": name, **found["virtual"][name]})
    if "processes" in only:
        found["processes"] = {}
        for nodes in PROCESSES:
            found["processes"][f"{nodes} nodes"] = trio.run(with_processes, nodes, seed)
            show_row({"processes": nodes, **found["processes"][f"{nodes} nodes"]})
    if "scale" in only:
        found["scale"] = {}
        for per_s in SCALE_PER_S:
            found["scale"][f"{per_s:g} requests per s and node"] = Scale(per_s, seed).go()
            show_row({"scale": per_s, **found["scale"][f"{per_s:g} requests per s and node"]})
    return found


def main() -> int:
    parser: argparse.ArgumentParser = command_line(__doc__, seed="clients and answers")
    kinds = ("scale", "virtual", "processes")
    parser.add_argument("--only", nargs="*", default=kinds, choices=kinds, help="all by default")
    options = parser.parse_args()
    result = measured(options.only, options.seed)
    show("")
    return finish("limits", options, result, whole=set(options.only) == set(kinds))


if __name__ == "__main__":
    sys.exit(main())
