"""Nothing that an engine answers holds up the event loop of a node, whatever page it is or stream it ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio

from cluster.local_tokenizer import LocalTokenizer
from ranvier_py.core.prompts.body_json import MARKS_MAX
from tests.core.routing.hostile_bodies import filled, numbered
from tests.io.test_engine_poller import FakeEngine, models, page
from tests.node.node_lab import Node, lab
from tests.node.turns import DEADLINE_S, OCCUPIED_S_MAX, TRIES, watched
from tests.proxy.wire import chunk

PAGE_BYTES = 2 * 2**20 - 1024  # nearly all that is read of one
INFO_BYTES = 512 * 1024 - 1024
STREAM_BYTES = 3 * 2**20
GAUGE = b"vllm:num_requests_running"
STARTED = b"process_start_time_seconds"


def metrics() -> dict[str, bytes]:
    """Pages of metrics."""
    return {
        "empty lines": b"\n" * PAGE_BYTES,
        "short lines": filled(b"", b"{\n", b"", PAGE_BYTES),
        "many samples": filled(b"", GAUGE + b" 1\n", b"", PAGE_BYTES),
        "samples of ranks": numbered(b"", GAUGE + b'{engine="%b"} 1\n', b"", PAGE_BYTES).replace(b",", b""),
        "names without values": filled(b"", GAUGE + b" \n", b"", PAGE_BYTES),
        "one endless name": GAUGE * (PAGE_BYTES // len(GAUGE)),
        "one endless line": GAUGE + b" " * (PAGE_BYTES - 100),
        "blanks": filled(b"", GAUGE + b" " * 4000 + b"\n", b"", PAGE_BYTES),
        "braces": filled(b"", GAUGE + b"{" + b"}" * 4000 + b"\n", b"", PAGE_BYTES),
        "braces and blanks": filled(b"", GAUGE + b"{" + (b"} 1" + b"\t" * 50) * 76 + b"x\n", b"", PAGE_BYTES),
        "braces and long values": filled(
            b"", GAUGE + b"{" + (b"} " + b"1" * 40 + b" " * 200) * 16 + b"x\n", b"", PAGE_BYTES
        ),
        "very many labels": filled(b"", GAUGE + b"{" + b'a="",' * 700 + b"} 1\n", b"", PAGE_BYTES),
        "labels without an end": filled(b"", GAUGE + b"{" + b'a="\\"' * 800 + b"} 1\n", b"", PAGE_BYTES),
        "start times": filled(b"", STARTED + b"{" + b"}" * 390 + b" x\n", b"", PAGE_BYTES),
        "endless start time": STARTED + b" " * (PAGE_BYTES - 100),
        "one line of start times": STARTED * (PAGE_BYTES // len(STARTED)),
    }


JSONS = {
    "lists": (b"[", b"[],", b"]"),
    "objects": (b"[", b"{},", b"]"),
    "numbers": (b"[", b"1,", b"]"),
    "floats": (b"[", b"1e3,", b"]"),
    "long numbers": (b"[", b"12345678901234567890,", b"]"),
    "texts": (b'["', b"a", b'"]'),
    "surrogates": (b'["', b"\\ud800", b'"]'),
    "wide texts": (b'["\xf0\x9f\x98\x80', "é".encode(), b'"]'),
    "quotes": (b'["', b'\\"', b'"]'),
    "depth": (b"[" * 900, b"[],", b"]" * 900),
    "an endless number": (b"[", b"9", b"]"),
    "blanks": (b"[", b" ", b"]"),
}
WRAPPED = {
    "/v1/models": (b'{"data":[{"id":"m","x":%b}]}', b'{"data":%b}'),
    "/server_info": (b'{"kv_events":%b}', b"%b", b'{"disable_radix_cache":false,"x":%b}'),
    "/kv_event_sources": (b'{"sources":%b}', b"%b", b'{"0":{"endpoint":"tcp://*:1","topic":%b}}'),
}


def bodies(path: str) -> dict[str, bytes]:
    """As long as it is read, and with as many parts as are parsed."""
    size = PAGE_BYTES if path == "/v1/models" else INFO_BYTES
    values = {name: filled(*parts, size - 100) for name, parts in JSONS.items()}
    for name, parts in JSONS.items():
        marks = max(1, sum(map(parts[1].count, (b",", b"[", b"{"))))
        values[f"fewer {name}"] = filled(*parts, min(size - 100, MARKS_MAX // marks * len(parts[1]) - 2000))
    forms = list(enumerate(WRAPPED[path]))
    return {f"{name} {number}": form % value for name, value in values.items() for number, form in forms}


async def polled(node: Node, engine: FakeEngine, path: str) -> None:
    """Add the engine to the node, until that has read this page and all others, and remove it again."""
    url = await node.lab.listen(engine.serve)
    engine.asked.clear()
    added = await node.http.post(f"{node.control}/admin/backends", json={"url": url})
    assert added.status_code == 200, added.text
    await node.until_backend(lambda view: view["health"] == "healthy")
    while not {path, "/v1/models", "/metrics", "/kv_event_sources"} <= set(engine.asked):  # noqa: ASYNC110
        await trio.sleep(0.001)
    await node.ask("/admin/backends")
    await node.http.get(f"{node.url}/v1/models")
    removed = await node.http.request("DELETE", f"{node.control}/admin/backends", json={"url": url})
    assert removed.status_code == 200, removed.text


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/metrics", *WRAPPED])
async def test_no_page_of_an_engine_holds_up_the_event_loop(path: str) -> None:
    async with lab(engine_metrics_interval_s=0.01, deadline_s=DEADLINE_S) as node:
        for name, body in (metrics() if path == "/metrics" else bodies(path)).items():
            engine = FakeEngine({"/health": page(200), "/v1/models": models("m"), path: page(200, body)})
            async with watched() as turns:
                for _ in range(TRIES):
                    turns.take()
                    await polled(node, engine, path)
                    took_s, task = turns.take()
                    if took_s <= OCCUPIED_S_MAX:
                        break
            assert took_s <= OCCUPIED_S_MAX, f"{name}: {task}"


def streams() -> dict[str, bytes]:
    """Streams of answers."""
    lists = filled(b'{"choices":[],"usage":{"prompt_tokens":7,"input_tokens":7},"x":[', b"[],", b"[]]}", STREAM_BYTES)
    return {
        "a million lists with the counts": b"data: " + lists + b"\n\n",
        "a million lists without": b"data: " + lists.replace(b"prompt_tokens", b"x") + b"\n\n",
        "counts in events of 64 kB": filled(b"", b"data: " + lists[:64_900] + b"[]]}\n\n", b"", STREAM_BYTES),
        "many counts": filled(b"", b'data: {"choices":[],"usage":{"prompt_tokens":7}}\n\n', b"", STREAM_BYTES),
        "empty lines": b"\n" * STREAM_BYTES,
        "carriage returns": b"data: x" + b"\r" * STREAM_BYTES + b"\n\n",
        "one endless event": b"data: " + b'"prompt_tokens"' * (STREAM_BYTES // 15),
        "names without ids": filled(b"", b'data: {"response":{"id":"\n\n', b"", STREAM_BYTES),
        "members that nearly are": filled(b'data: {"delta":{', b'"content" :  ', b"}}\n\n", STREAM_BYTES),
        "nested": b"data: " + b'{"response":' * 100_000 + b"\n\n",
    }


ENDED = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/responses": {"input": "x"},
    "/generate": {"text": "x"},
}


def in_chunks(data: bytes, size: int) -> bytes:
    return b"".join([chunk(data[at : at + size]) for at in range(0, len(data), size)]) + b"0\r\n\r\n"


@pytest.fixture
def reading_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have answers read beside the event loop, as by the tokenizer's process of a node outside the lab."""
    ask = LocalTokenizer.ask

    async def asked(*arguments: Any, first: bool) -> Any:
        return await trio.to_thread.run_sync(trio.run, partial(ask, *arguments, first=first))

    monkeypatch.setattr(LocalTokenizer, "ask", asked)


@pytest.mark.slow
@pytest.mark.usefixtures("reading_elsewhere")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("size", [7, 100_000_000])
async def test_no_stream_of_an_engine_holds_up_the_event_loop(path: str, size: int) -> None:
    """In chunks of few bytes, or in one. The response cache takes it, too."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    engine = FakeEngine({"/health": page(200), "/v1/models": models("m")})
    async with lab(engine, deadline_s=DEADLINE_S, response_cache=True) as node:
        for name, events in streams().items():
            whole = (events if size > STREAM_BYTES else events[: STREAM_BYTES // 10]) + ENDED
            engine.pages[path] = head + in_chunks(whole, size)
            async with watched() as turns:
                for attempt in range(TRIES):
                    body = {"model": "m", "stream": True, "temperature": 0, "user": f"{name} {attempt}", **BODIES[path]}
                    answer = await node.http.post(f"{node.url}{path}", json=body)
                    assert answer.status_code == 200
                    took_s, task = turns.take()
                    if took_s <= OCCUPIED_S_MAX:
                        break
            assert took_s <= OCCUPIED_S_MAX, f"{name}: {task}"
