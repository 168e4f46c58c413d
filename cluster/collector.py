"""A collector of OpenTelemetry that takes OTLP/JSON over HTTP, keeps the spans and can fail as real ones do.

    collector = Collector()
    url = f"http://127.0.0.1:{(await nursery.start(serve, collector))[1]}"
    collector.script = [Reply(503, {"retry-after": "1"}), Reply()]

`python -m cluster collector` prints each trace as a tree. Bounds: SPANS_MAX, BODY_BYTES_MAX.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

HEAD_BYTES_MAX, BODY_BYTES_MAX = 16_384, 16 << 20
SPANS_MAX = 10_000


@dataclass(frozen=True)
class Reply:
    """What a collector answers; after `pause_s`, and not at all for status 0."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    pause_s: float = 0.0


@dataclass
class Collector:
    """What came, and what is answered next: `script`, then 200 for ever."""

    script: list[Reply] = field(default_factory=list)
    heads: list[Mapping[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    spans: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=SPANS_MAX))
    resources: list[Mapping[str, Any]] = field(default_factory=list)
    came: trio.Event = field(default_factory=trio.Event)

    async def serve(self, stream: trio.abc.Stream) -> None:
        async with stream:
            data = b""
            while True:
                while b"\r\n\r\n" not in data:
                    piece = await stream.receive_some()
                    if not piece or len(data) > HEAD_BYTES_MAX:
                        return
                    data += piece
                head, _, data = data.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                length = min(int(fields.get("content-length", 0)), BODY_BYTES_MAX)
                while len(data) < length:
                    data += await stream.receive_some()
                reply = self.take({":first": first, **fields}, data[:length])
                data = data[length:]
                await trio.sleep(reply.pause_s)
                if not reply.status:
                    return
                shown = {"content-length": len(reply.body), "content-type": "application/json", **reply.headers}
                answer = "".join(f"{name}: {value}\r\n" for name, value in shown.items())
                await stream.send_all(f"HTTP/1.1 {reply.status} X\r\n{answer}\r\n".encode() + reply.body)

    def take(self, head: Mapping[str, str], body: bytes) -> Reply:
        """Take one export, unless the script fails it."""
        reply = self.script.pop(0) if self.script else Reply()
        body = gzip.decompress(body) if head.get("content-encoding") == "gzip" else body
        self.heads.append(head)
        self.bodies.append(body)
        if reply.status == 200:
            for each in json.loads(body)["resourceSpans"]:
                self.resources.append(plain(each["resource"]["attributes"]))
                self.spans += [span for scope in each["scopeSpans"] for span in scope["spans"]]
        came, self.came = self.came, trio.Event()
        came.set()
        return reply

    async def until(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Return the spans once there are so many."""
        while len(self.spans) < count:
            await self.came.wait()
        return list(self.spans)


def plain(attributes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return attributes as values."""
    read = {"stringValue": str, "intValue": int, "doubleValue": float, "boolValue": bool}
    return {each["key"]: read[kind](value) for each in attributes for kind, value in each["value"].items()}


def tree(spans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of one trace's spans, children below their parents."""
    known = {span["spanId"] for span in spans}

    def below(parent: str, depth: int) -> Iterator[str]:
        for span in sorted(spans, key=lambda span: int(span["startTimeUnixNano"])):
            above = span.get("parentSpanId", "")
            if (above if above in known else "") == parent:
                ms = (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e6
                failed = " FAILED" if "status" in span else ""
                yield f"{'  ' * depth}{span['name']} {ms:.1f} ms{failed}"
                yield from below(span["spanId"], depth + 1)

    yield from below("", 0)


async def serve(
    collector: Collector,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled. Reports where."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, collector.serve, port, host=host))
        task_status.started(listeners[0].socket.getsockname()[:2])


async def show(collector: Collector) -> None:
    """Print each trace that came."""
    while True:
        await collector.came.wait()
        traces: dict[str, list[Mapping[str, Any]]] = {}
        while collector.spans:
            span = collector.spans.popleft()
            traces.setdefault(span["traceId"], []).append(span)
        for trace_id, spans in traces.items():
            print("\n".join([f"trace {trace_id}", *(f"  {line}" for line in tree(spans))]), flush=True)


async def run(host: str, port: int) -> None:
    collector = Collector()
    async with trio.open_nursery() as nursery:
        where = await nursery.start(serve, collector, host, port)
        print("collecting on http://{}:{}".format(*where), flush=True)
        await show(collector)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster collector", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:4318", help="HOST:PORT")
    host, _, port = parser.parse_args(argv).listen.rpartition(":")
    trio.run(run, host, int(port))
    return 0
