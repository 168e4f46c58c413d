"""Engines that answer oddly, and well: none is blamed, asked twice or left out, and its words reach the client."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from ranvier_py.core.answers.chunked import payload_of
from tests.node.node_lab import lab
from tests.proxy.test_black_holes import refusing
from tests.proxy.test_overload import QUESTIONS
from tests.proxy.test_pipeline import asked
from tests.proxy.wire import CLOSE, END, GOOD, ROLE, TOKEN, Scripted, Step, chunk, event

WHOLE = GOOD.partition(b"\r\n\r\n")[2]
EVENTS = [payload_of(ROLE), payload_of(TOKEN), payload_of(END)]
CHARACTERS = "你好".encode()
THOUGHT = {
    "type": "content_block_delta",
    "delta": {"type": "thinking_delta", "thinking": "hm"},
    "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "text": "hm"}],
    "text": "hm",
    "meta_info": {},
}
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":0}}\n\n'
HUGE = b'data: {"choices":[],"padding":"%b"}\n\n' % (b"x" * 100_000)


def same(data: bytes) -> bytes:
    return data


def in_one(payload: bytes) -> Iterable[bytes]:
    return (payload,)


def each_alone(payload: bytes) -> Iterable[bytes]:
    return (payload[at : at + 1] for at in range(len(payload)))


def within_characters(payload: bytes) -> Iterable[bytes]:
    place = payload.find(CHARACTERS) + 1
    return (payload[:place], payload[place : place + 1], payload[place + 1 :])


class Manner(NamedTuple):
    """How an engine answers: by events in chunks, or by one object of a known length, unless `framing` is another."""

    line: bytes = b"HTTP/1.1 200 OK"
    fields: bytes = b""
    kind: bytes | None = None
    framing: str = ""
    before: bytes = b""
    whole: Callable[[bytes], bytes] = same
    events: Callable[[bytes], bytes] = same
    first: bytes = b""
    cut: Callable[[bytes], Iterable[bytes]] = in_one
    chunk_end: Callable[[bytes], bytes] = same
    last: bytes = b"0\r\n\r\n"
    packed: Callable[[bytes], bytes] = same
    closes: bool = False

    def steps(self, stream: bool) -> Sequence[Step]:
        """What is sent."""
        kind = self.kind or b"content-type: %b\r\n" % (b"text/event-stream" if stream else b"application/json")
        payload = self.packed(self.first + b"".join(map(self.events, EVENTS)) if stream else self.whole(WHOLE))
        framing = self.framing or ("chunked" if stream else "length")
        head = self.before + self.line + b"\r\n" + kind + self.fields
        if framing == "chunked":
            pieces = b"".join([self.chunk_end(chunk(piece)) for piece in self.cut(payload)])
            data = head + b"transfer-encoding: chunked\r\n\r\n" + pieces + self.last
        elif framing == "length":
            data = head + b"content-length: %d\r\n\r\n" % len(payload) + payload
        else:
            data = head + b"\r\n" + payload
        return [data, CLOSE] if self.closes or framing == "close" else [data]


KINDS = {
    "as others do": Manner(),
    "comments between events": Manner(events=lambda data: b": processing\n\n" + data),
    "line ends of two": Manner(events=lambda data: data.replace(b"\n", b"\r\n")),
    "line ends of old": Manner(events=lambda data: data.replace(b"\n", b"\r")),
    "no blank behind data": Manner(events=lambda data: data.replace(b"data: ", b"data:")),
    "events of names and numbers": Manner(events=lambda data: b"id: 1\nevent: message\n" + data),
    "a mark of byte order": Manner(first=b"\xef\xbb\xbf", whole=lambda data: b"\xef\xbb\xbf" + data),
    "a chunk for each byte": Manner(cut=each_alone),
    "characters cut between chunks": Manner(
        first=event({**json.loads(EVENTS[1][6:]), "x": "\0"})
        .partition(b"\r\n")[2][:-2]
        .replace(b"\\u0000", CHARACTERS),
        cut=within_characters,
    ),
    "chunks with extensions": Manner(chunk_end=lambda data: data.replace(b"\r\n", b";a=b\r\n", 1)),
    "trailers": Manner(last=b"0\r\nx-checksum: 1\r\n\r\n"),
    "early hints": Manner(before=b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"),
    "a connection for each": Manner(fields=b"Connection: Close\r\n", closes=True),
    "HTTP/1.0": Manner(line=b"HTTP/1.0 200 OK", framing="close"),
    "a known length": Manner(framing="length"),
    "whole answers in chunks": Manner(framing="chunked"),
    "names in capitals": Manner(fields=b"SERVER: x\r\nVARY: Origin\r\n"),
    "fields twice": Manner(fields=b"server: a\r\nserver: b\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n"),
    "no reason": Manner(line=b"HTTP/1.1 200 "),
    "words of no type": Manner(kind=b"x-type: none\r\n"),
    "compressed": Manner(fields=b"content-encoding: gzip\r\n", packed=gzip.compress),
    "a huge first event": Manner(first=HUGE),
    "counts first": Manner(first=COUNTS),
    "many empty deltas": Manner(first=EVENTS[0] * 9),
    "thoughts first": Manner(first=b"data: " + json.dumps(THOUGHT).encode() + b"\n\n"),
    "white space first": Manner(first=EVENTS[1].replace(b"word", b" "), whole=lambda data: b"\n " + data + b"\n"),
    "indented": Manner(whole=lambda data: json.dumps(json.loads(data), indent=2).encode()),
}


class Odd(Scripted):
    """Answers all requests so."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def script(self) -> Sequence[Step]:
        return KINDS[self.kind].steps(bool(json.loads(self.bodies[-1])["stream"]))


async def test_engines_that_answer_oddly_and_well_are_engines_like_others() -> None:
    engines = [Odd(kind) for kind in KINDS]
    requests = [
        (path, stream) for path, stream in product(QUESTIONS, (False, True)) if path != b"/v1/embeddings" or not stream
    ]
    trouble: dict[str, list[object]] = {}
    async with lab(*engines, policy="round_robin", ask_usage=False) as node:
        for number in range(len(engines) * len(requests)):
            path, stream = requests[number // len(engines)]
            before = [len(engine.bodies) for engine in engines]
            body = {**QUESTIONS[path], "stream": stream}
            reply = await node.http.post(node.url + path.decode(), json=body)
            if reply.status_code != 200 or not ("word" in reply.text if stream else '"hi"' in reply.text):
                (engine, *_) = [each for each, count in zip(engines, before, strict=True) if len(each.bodies) > count]
                trouble.setdefault(engine.kind, []).append((path, stream, reply.status_code, reply.text[:200]))
        assert trouble == {}
        assert {engine.kind for engine in engines if len(engine.bodies) != len(requests)} == set()
        assert {each["circuit"] for each in await node.backends()} == {"closed"}
        assert set(await refusing(node)) == {None}
    assert asked(engines) == len(engines) * len(requests)
