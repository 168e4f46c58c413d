"""What do nodes gain by sharing their response caches, among themselves or through Redis?

Some nodes have one stub engine. Each question is sent to a random node, at a fixed time, whatever has been answered by
then. The questions are those of a trace (the turns of tau-bench's conversations, QMSum's queries about meetings), each
repeated with a frequency by Zipf's law. Each backend gets the same requests at the same nodes: `memory`, where each
node has its own answers, `cluster`, and `redis`, a redis-server on this machine. `hit_share` is the share of hits in
all requests; `ideal_share` is that of a single shared cache. Times of hits are measured by the client, from the first
byte sent to the last byte received; `first_hit_ms` is for questions new to the node, which it looked up elsewhere.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from random import Random
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import trio

from benchmarks.harness.bench import data_folder, percentiles, show_row
from benchmarks.harness.processes import Target, free_port, peers, process, stub_engines
from benchmarks.workloads.workloads import QMSUM, TAUBENCH
from cluster.load.http_client import Connection, request_bytes

BACKENDS = ("memory", "cluster", "redis")
KEY = "3f" * 16 + "a7" * 16
PATH = "/v1/chat/completions"
ZIPF = 1.0
"""The exponent of the frequencies: the question of rank r is asked in proportion to 1 / r."""


def taubench(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Yield the messages before each answer of an assistant."""
    for line in lines:
        messages = line["messages"]
        yield from (messages[:end] for end, message in enumerate(messages) if end and message["role"] == "assistant")


def qmsum(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    for line in lines:
        for query in line["queries"]:
            yield [{"role": "user", "content": f"{line['transcript']}\n\n{query['q']}"}]


TRACES = {"taubench": (TAUBENCH, taubench), "qmsum": (QMSUM, qmsum)}


def questions(trace: str, count: int, rng: Random) -> list[bytes]:
    """Draw `count` different requests of the trace, or all if there are fewer."""
    file, read = TRACES[trace]
    with gzip.open(data_folder() / "traces" / file, "rt") as stream:
        bodies = dict.fromkeys(
            json.dumps({"model": "m", "temperature": 0, "messages": messages})
            for messages in read([json.loads(line) for line in stream])
        )
    return [body.encode() for body in rng.sample(list(bodies), min(count, len(bodies)))]


@contextmanager
def redis() -> Iterator[str]:
    """Run a redis-server that writes nothing to disk. Yields its URL."""
    port = free_port()
    with process(["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning"]):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def nodes_of(backend: str, count: int, engine: str) -> Iterator[list[Target]]:
    """Run `count` nodes whose response cache has this backend."""
    flags = ["--response-cache", "--response-cache-backend", backend]
    with ExitStack() as stack:
        if backend == "redis":
            file = Path(stack.enter_context(TemporaryDirectory())) / "url"
            file.write_text(stack.enter_context(redis()))
            flags += ["--response-cache-redis-url-file", str(file)]
        yield stack.enter_context(peers([engine], count, KEY, *flags))


class Asked(NamedTuple):
    """One request: which question is sent to which node."""

    question: int
    node: int


class Got(NamedTuple):
    """The outcome of a request. `is_first`: the node had not answered this question before."""

    cached: str
    seconds: float
    is_first: bool


async def drive(
    targets: Sequence[Target], bodies: Sequence[bytes], schedule: Sequence[Asked], per_s: float
) -> list[Got]:
    """Send the requests at fixed times, each on its own connection. Returns the outcomes."""
    found: list[Got] = []
    answered: dict[Asked, None] = {}
    began = trio.current_time()

    async def one(at: float, asked: Asked) -> None:
        await trio.sleep_until(at)
        where = urlsplit(targets[asked.node].url)
        host, port = where.hostname or "", where.port or 0
        request, is_first = (
            request_bytes("/v1/chat/completions", host, port, bodies[asked.question]),
            asked not in answered,
        )
        async with Connection(host, port) as connection:
            await connection.connect()
            sent_at = time.perf_counter()
            answer = await connection.exchange(request, lambda *_: None)
            found.append(Got(answer.headers.get("x-cache", ""), time.perf_counter() - sent_at, is_first))
        assert answer.status == 200, answer.status
        answered[asked] = None

    async with trio.open_nursery() as nursery:
        for number, asked in enumerate(schedule):
            nursery.start_soon(one, began + number / per_s, asked)
    return found


def zipf_schedule(questions: int, nodes: int, requests: int, rng: Random) -> list[Asked]:
    weights = list(accumulate(1 / rank**ZIPF for rank in range(1, questions + 1)))
    chosen = rng.choices(range(questions), cum_weights=weights, k=requests)
    return [Asked(question, rng.randrange(nodes)) for question in chosen]


def row_of(trace: str, backend: str, schedule: Sequence[Asked], found: Sequence[Got]) -> dict[str, Any]:
    hits = [one for one in found if one.cached == "HIT"]
    times = {
        "hit_ms": [1000 * one.seconds for one in hits],
        "first_hit_ms": [1000 * one.seconds for one in hits if one.is_first],
    }
    return {
        "trace": trace,
        "backend": backend,
        "requests": len(found),
        "hit_share": round(len(hits) / len(found), 4),
        "ideal_share": round(1 - len({asked.question for asked in schedule}) / len(schedule), 4),
        **{name: percentiles(values) for name, values in times.items() if values},
    }


def warm_up(shape: Shape) -> tuple[list[bytes], list[Asked], float]:
    """Return bodies, schedule and rate of a warm-up, because a process's first requests take longer."""
    messages = [[{"role": "user", "content": f"{number} warm-up " * 500}] for number in range(10)]
    bodies = [json.dumps({"model": "m", "temperature": 0, "messages": each}).encode() for each in messages]
    return bodies, [Asked(number % 10, number % shape.nodes) for number in range(30 * shape.nodes)], 30.0


class Shape(NamedTuple):
    """The number of nodes, and the amount of requests."""

    nodes: int = 4
    questions: int = 120
    requests: int = 300
    bytes_per_s: int = 600_000  # of all bodies, which sets the rate: QMSum's are ten times as long


def shared(shape: Shape, traces: Sequence[str] = tuple(TRACES)) -> list[dict[str, Any]]:
    """Measure each trace with each backend, without redis if there is no redis-server. Returns their rows."""
    rows = []
    for backend in BACKENDS if which("redis-server") else BACKENDS[:2]:
        with stub_engines(1) as [engine], nodes_of(backend, shape.nodes, engine) as targets:
            trio.run(drive, targets, *warm_up(shape))
            for trace in traces:
                rng = Random(f"shared/{trace}")
                bodies = questions(trace, shape.questions, rng)
                schedule = zipf_schedule(len(bodies), shape.nodes, shape.requests, rng)
                per_s = shape.bytes_per_s * len(bodies) / sum(map(len, bodies))
                found = trio.run(drive, targets, bodies, schedule, per_s)
                rows.append(row_of(trace, backend, schedule, found))
                show_row(rows[-1])
    return sorted(rows, key=lambda row: (traces.index(row["trace"]), BACKENDS.index(row["backend"])))
