"""What a hostile engine answers: to requests (`x-hostile` names the case), and to the polls of the node itself.

`statuses` are those that the client may get: the engine's own status where its answer is valid HTTP, 502 where it is
not, CLOSED where the answer breaks off after the client has got a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from cluster.hostile_requests import CLOSED

BAD = (502,)
CUT = (CLOSED, 200, 502)
"""A fault that comes after the status, which may have reached the client by then."""
TYPE = b"content-type: application/json"


@dataclass(frozen=True, slots=True)
class AnswerCase:
    name: str
    pieces: tuple[bytes, ...]
    statuses: Sequence[int]
    stream: bool = False


def answer(*fields: bytes, body: bytes = b"{}", line: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join((line, *fields, b"", b"")) + body


def answer_cases() -> Iterator[AnswerCase]:
    yield from framing_answers()
    yield from head_answers()
    yield from stream_answers()


def framing_answers() -> Iterator[AnswerCase]:
    def case(name: str, *fields: bytes, body: bytes = b"{}", statuses: Sequence[int] = BAD) -> AnswerCase:
        return AnswerCase(name, (answer(TYPE, *fields, body=body),), statuses)

    chunked, chunks = b"transfer-encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n"
    yield case("two lengths that differ", b"content-length: 2", b"content-length: 3")
    yield case("a length below nothing", b"content-length: -2")
    yield case("a length beyond 64 bits", b"content-length: 99999999999999999999999")
    yield case("a length of letters", b"content-length: two")
    yield case("a length and chunks", b"content-length: 2", chunked, body=chunks)
    yield case("chunks in two lines", chunked, chunked, body=chunks)
    yield case("chunks and another coding", b"transfer-encoding: gzip, chunked", body=chunks)
    yield case("chunks, then another coding", b"transfer-encoding: chunked, gzip", body=chunks)
    yield case("a coding nobody knows", b"transfer-encoding: xchunked", body=chunks)
    yield case("Connection names the length", b"connection: content-length", b"content-length: 2", statuses=(200, 502))
    yield case(
        "Connection names the coding", b"connection: transfer-encoding", chunked, body=chunks, statuses=(200, 502)
    )
    yield case("a body shorter than its length", b"content-length: 200", statuses=CUT)
    yield case("a body longer than its length", b"content-length: 2", body=b"{}more\r\n\r\n", statuses=(200,))
    yield case("a chunk of no size", chunked, body=b"zz\r\n{}\r\n0\r\n\r\n", statuses=CUT)
    yield case("a chunk beyond 64 bits", chunked, body=b"ffffffffffffffffff\r\n{}\r\n", statuses=CUT)
    yield case("chunks that end early", chunked, body=b"2\r\n{}\r\n", statuses=CUT)
    yield case("a line of a chunk that never ends", chunked, body=b"2;" + b"x" * (1 << 20), statuses=CUT)
    yield case("a body until the end", body=b'{"a":1}', statuses=(200,))


def head_answers() -> Iterator[AnswerCase]:
    def case(name: str, data: bytes, statuses: Sequence[int] = BAD) -> AnswerCase:
        return AnswerCase(name, (data,), statuses)

    length = b"content-length: 2"
    yield case("nothing", b"")
    yield case("no HTTP", b"hello\r\n\r\n")
    yield case("random bytes", bytes(range(256)) * 8)
    yield case("a status of two digits", answer(length, line=b"HTTP/1.1 99 X"))
    yield case("a status of four digits", answer(length, line=b"HTTP/1.1 2000 X"))
    yield case("a status of letters", answer(length, line=b"HTTP/1.1 abc X"))
    yield case("a status that nobody knows", answer(length, line=b"HTTP/1.1 799 X"), (799, 502))
    yield case("version 9.9", answer(length, line=b"HTTP/9.9 200 OK"))
    yield case("a switch of protocols", answer(length, line=b"HTTP/1.1 101 Switching"), BAD)
    yield case("a thousand times continue", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000 + answer(length), (200, 502))
    yield case("a head of ten megabytes", answer(*[b"x: " + b"y" * 10_000] * 1000, length))
    yield case("a hundred thousand fields", answer(*[b"x: y"] * 100_000, length))
    yield case("a name with a blank", answer(b"bad name: x", length))
    yield case("a zero byte in a field", answer(b"x: a\x00b", length))
    yield case("a return in a field", answer(b"x: a\rset-cookie: b", length))
    yield case("a field that goes on", answer(b"x: a\r\n b", length), (200, 502))
    yield case("a head that never ends", b"HTTP/1.1 200 OK\r\nx: y\r\n", (502, 504))
    yield case("not modified, with a body", answer(length, line=b"HTTP/1.1 304 X"), (304, 502))
    yield case("our own fields", answer(b"x-request-id: a\tb", b"x-ranvier-backend: me", length), (200,))


def stream_answers() -> Iterator[AnswerCase]:
    def case(name: str, *pieces: bytes, status: int = 200) -> AnswerCase:
        head = answer(b"content-type: text/event-stream", b"connection: close", body=b"")
        return AnswerCase(name, (head, *pieces), (status,), stream=True)

    done = b"data: [DONE]\n\n"
    delta = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    yield case("no events", b"hello", status=502)  # none has any output
    yield case("an event of no JSON", b"data: {\n\n", done)
    yield case("an event that never ends", b"data: " + b"x" * (4 << 20))
    yield case("a hundred thousand empty events", b"data:\n\n" * 100_000, done)
    yield case("events of blanks and line ends", b"\n\r\n\r" * 50_000, done)
    yield case("an event of brackets", b"data: " + b"[" * 100_000 + b"\n\n", done)
    yield case("choices that are none", b'data: {"choices":5}\n\n', b'data: {"choices":[5]}\n\n', done)
    yield case("a delta that is none", b'data: {"choices":[{"delta":5}]}\n\n', done, status=502)
    yield case("usage that is none", delta, b'data: {"choices":[],"usage":5}\n\n', done)
    yield case("usage below nothing", delta, b'data: {"choices":[],"usage":{"prompt_tokens":-5}}\n\n', done)
    huge = b'data: {"choices":[],"usage":{"prompt_tokens":%b,"prompt_tokens_details":{"cached_tokens":1e400}}}\n\n'
    yield case("usage beyond 64 bits", delta, huge % (b"9" * 400), done)
    yield case("usage a thousand times", delta, b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n' * 1000, done)
    yield case("more after the end", delta, done, delta * 100)
    yield case("bytes that are no UTF-8", b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n', done)


def poll_cases() -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, path, page): what an engine answers when the node polls this path."""

    def page(body: bytes, kind: bytes = TYPE) -> bytes:
        return answer(kind, b"content-length: %d" % len(body), body=body)

    models = "/v1/models"
    cards: Sequence[object] = (
        *(None, 5, [], {"data": 5}, {"data": [5]}, {"data": [{"id": 5}]}, {"data": [{"id": "x" * 100_000}]}),
        *({"data": [{"id": "m", "max_model_len": -1}]}, {"data": [{"id": "m", "created": "x", "root": 5}]}),
        *({"data": [{"id": f"m{each}"} for each in range(20_000)]}, {"data": [{"id": ""}, {"id": "\n"}]}),
    )
    for number, card in enumerate(cards):
        yield f"models {number}", models, page(orjson.dumps(card))
    yield "models with numbers beyond all", models, page(b'{"data":[{"id":"m","created":1e999,"x":%b}]}' % (b"9" * 500))
    yield "models with no number", models, page(b'{"data":[{"id":"m","created":NaN}]}')
    yield "models in brackets", models, page(b"[" * 100_000)
    yield "models in no JSON", models, page(b"\xff\xfe")
    yield "models of ten megabytes", models, page(b'"' + b"x" * (10 << 20) + b'"')
    yield "models without a length", models, answer(TYPE, b"content-length: 99999999", body=b"{")
    yield (
        "models elsewhere",
        models,
        answer(b"location: http://[", b"content-length: 0", body=b"", line=b"HTTP/1.1 302 X"),
    )
    yield "models in garbage", models, b"\x00\x01\x02"
    for name, body in (
        ("no numbers", b"vllm:num_requests_running x\n"),
        ("no end", b'vllm:num_requests_running{a="' + b"x" * (1 << 20)),
        ("infinite", b"vllm:num_requests_running inf\nvllm:kv_cache_usage_perc nan\nvllm:num_requests_waiting -5\n"),
        ("much", b"x_total 1\n" * 1_000_000),
        ("bytes", bytes(range(256)) * 100),
        ("odd caches", b'vllm:cache_config_info{block_size="0",num_gpu_blocks="-1"} 1.0\n'),
        ("great caches", b'vllm:cache_config_info{block_size="9999999999999",num_gpu_blocks="1e99"} 1.0\n'),
    ):
        yield f"metrics with {name}", "/metrics", page(body, b"content-type: text/plain")
    for name, body in (
        ("a text", b'"x"'),
        ("ports beyond all", b'[{"endpoint":"tcp://x:99999999"}]'),
        ("a bad host", b'[{"endpoint":"tcp://a..b:5557","replay_endpoint":"tcp://[:1"}]'),
        ("brackets", b"[" * 100_000),
    ):
        yield f"event sources of {name}", "/kv_event_sources", page(body)
        yield f"server info of {name}", "/server_info", page(body)
