"""A bug in any loop of a node costs what that loop was doing: it is counted, the loop goes on, and the node serves."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.node.fingerprints import tokenizer_process
from tests.examples import whole
from tests.house import loops
from tests.node.discovery.source_labs import SOURCES, quick
from tests.node.node_lab import ClusterLab, Node, opened, start_engine, turn
from tests.planted_bugs import Bug, plant

DEADLINE_S = 60
BODY = b"x" * (4 << 20)  # more than sockets hold, for whatever engine refuses it
TOKENIZED = "ranvier_py.io.tokenizer_process"

COUNTED = r'ranvier_unexpected_errors_total\{place="\w+"\}|ranvier_server_errors_total\{kind="internal_error"\}'

ELSEWHERE = {
    "ClusterParts._sums": "a part of one request of the control port, where a bug is a logged 500",
    "EngineAsker._asked": "a part of one question to an engine, which TokenizerFit.loop asks",
    "Feed.lines": "a part of one request of the control port, which ends with it",
    "LimitParts.loop": "goes round only where clients have keys; test_limits_of_nodes.py has it meet a bug",
    "NameParts.refuse_twin": "a part of one request of the control port, where a bug is a logged 500",
    "PublicPort._stop_on_signal": "ends the node, as it was asked to",
    "PublicPort._cut_at_next": "ends the node, as it was asked to",
    "Reloads.loop": "goes round for hang-ups alone, each of which reads one file; test_reload.py has it meet a bug",
    "RedisLink.prepare": "a part of one request; without a Redis it never goes round",
    "SharedOrders.answers": "a part of one request of the control port, where a bug is a logged 500",
    "SharedOrders.lists": "a part of one request of the control port, where a bug is a logged 500",
    "while_allowed": "a part of one request of the control port, which ends with it",
    "Splice._from_backend": "a part of one WebSocket; test_realtime.py has it meet a bug",
    "Splice._from_client": "a part of one WebSocket; test_realtime.py has it meet a bug",
    "TlsTransport.handshake": "a part of one connection by TLS; test_realtime.py has it meet a bug",
    "TlsTransport._refuse_plain_http": "a part of one connection, which ends with it",
    "Wire._watch": "goes round for events that no connection has",
    "WorkerReports._reconcile": "a part of the answer to one report",
    "SharedAnswer.flush": "a part of one request, which others share, and ends with its answer",
    "SharedAnswer._await_engine.pass_on": "a part of one request, which others share, and ends with its answer",
    "stepped": "a part of Feed.loop; goes round for the map of prefixes alone, which is made while somebody looks",
    "greeted": "a part of `ranvier check`, which is no node",
    "receive_frame": "a part of TokenizerProcess.run; a node does not start without",
}
"""Loops that nothing here reaches, and why none of them is one that serves for ever."""

TIMES_MAX = {"Connections.accept": 2}
"""Who would see it has to come through the loop itself."""

ALL = [place for place in whole(loops("control", "io", "node", "proxy"), ()) if place[1] not in ELSEWHERE]


async def server_sent(stream: trio.SocketStream) -> None:
    await stream.receive_some(4096)
    await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: \n\n")
    await stream.aclose()


@asynccontextmanager
async def everything(folder: Path, *, process: bool) -> AsyncIterator[tuple[ClusterLab, dict[str, Any]]]:
    """An engine that publishes its events, streams of an index, and settings that have a node run all its parts."""
    async with (
        opened(partial(ClusterLab, folder=folder), 0, DEADLINE_S) as lab,
        SOURCES["dns"](folder) as names,
        SOURCES["service"](folder) as service,
    ):
        if process:
            lab.tokenizer_of = tokenizer_process
        kv = KvEndpoints("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        lab.engines += [(await start_engine(lab.nursery, kv=kv))[0], (await start_engine(lab.nursery, 1))[0]]
        index = await lab.listen(server_sent)
        streams = (f"{index}/events", f"{index.replace('http', 'ws')}/events")
        for source in (names, service):
            await source.give(lab.engines[:1])
        yield (
            lab,
            {
                **names.settings,
                **service.settings,
                "state_folder": folder,
                "backend": [f"{url},kv_index={events}" for url, events in zip(lab.engines, streams, strict=True)],
                "policy": "kv_score",
                "kv_index_backend": "redis",
                "kv_redis_url": "redis://127.0.0.1:1",
                "response_cache": True,
                "response_cache_backend": "redis",
                "response_cache_redis_retry_s": 0.05,
                "kv_index_reconnect_s": 0.05,
                "probe_interval_s": 0.1,
                "engine_metrics_interval_s": 0.1,
                "record_file": folder / "record",
                "gossip_state_file": folder / "state",
                "otel_endpoint": "http://127.0.0.1:1",
            },
        )


async def traffic(node: Node, number: int) -> None:
    """Something for each part to do. Whatever a planted bug breaks is broken."""
    with suppress(httpx.HTTPError):
        await node.chat(turn(f"hello {number} " * 100))
    with suppress(httpx.HTTPError):
        await node.http.post(f"{node.url}/v1/audio/speech", content=BODY)
    with suppress(httpx.HTTPError):
        await node.http.post(f"{node.url}/v1/chat/completions", content=b'{"model":"unknown-%d"}' % number)
    with suppress(httpx.HTTPError), trio.move_on_after(0.1):  # waited for, for a peer may know of it
        await node.http.get(f"{node.url}/v1/responses/resp_of_nobody")
    control = urlsplit(node.control)
    for host, port in (node.address, (control.hostname, control.port)):
        with suppress(OSError, trio.BrokenResourceError), trio.move_on_after(1):
            async with await trio.open_tcp_stream(host, port) as wire:
                await wire.send_all(b"no HTTP\r\n\r\n")
                await wire.receive_some()
                await wire.send_all(b"and more")


async def until_served(node: Node) -> None:
    """The engines are served by what a bug was in, too: they may have been taken for dead."""
    status = 0
    while status != 200:
        with suppress(httpx.HTTPError):
            status = (await node.chat(turn("hello"))).status_code


async def noted(node: Node) -> int:
    """How often something went wrong that nobody expected, of the node itself or of one request."""
    page = ""
    with suppress(httpx.HTTPError):
        page = (await node.http.get(f"{node.control}/metrics")).text
    found = re.findall(rf"^(?:{COUNTED}) (\S+)$", page, re.MULTILINE)
    return sum(int(float(number)) for number in found)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of generators that a bug left open
@pytest.mark.parametrize(("module", "name"), ALL, ids=[name for _, name in ALL])
async def test_a_bug_in_a_loop_is_counted_and_the_loop_goes_on(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bug = Bug(TIMES_MAX.get(name, 100))
    async with everything(tmp_path, process=module == TOKENIZED) as (lab, settings):
        plant(monkeypatch, module, name, bug)  # after the engines, whose server is the same
        nodes = [await lab.start(**settings), await lab.start()]
        while bug.left and not sum([await noted(node) for node in nodes]):
            await traffic(nodes[0], bug.rounds)
        bug.left, rounds = 0, bug.rounds
        while bug.rounds == rounds or not sum([await noted(node) for node in nodes]):
            await traffic(nodes[0], bug.rounds)
        await until_served(nodes[0])


def test_what_is_left_out_is_still_there() -> None:
    assert set(ELSEWHERE) < {name for _, name in loops("control", "io", "node", "proxy")}


__all__ = ["quick"]
