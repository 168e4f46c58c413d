"""What hostile clients send to the public port and to the control port, and which answers are right.

Each case is bytes as they go over the wire. `statuses` are all right answers; CLOSED means that the node closes the
connection without an answer. The node forwards a body that it does not understand, since the engine has to refuse that.
So where the framing is sound the engine's 200 is right as well.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.hostile_lab import KEY, MODEL

CLOSED = 0
REFUSED = (400,)
PASSED = (200,)
EITHER = (200, 400)
CHAT = "/v1/chat/completions"
PLAIN = b'{"model":"%b","messages":[{"role":"user","content":"hello"}]}' % MODEL.encode()


@dataclass(frozen=True, slots=True)
class RequestCase:
    name: str
    pieces: tuple[bytes, ...]
    statuses: Sequence[int]
    port: str = "public"
    half_close: bool = False
    count: int = 1  # of answers on this one connection


def raw(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join((*lines, b"", b"")) + body


def post(body: bytes, *fields: bytes, path: str = CHAT, length: bool = True) -> bytes:
    """Return a POST that is valid but for what the arguments change."""
    own = (b"content-length: %d" % len(body),) if length else ()
    line = f"POST {path} HTTP/1.1".encode("latin-1")
    return raw(line, b"host: x", b"connection: close", b"content-type: application/json", *own, *fields, body=body)


def get(target: bytes, *fields: bytes, method: bytes = b"GET") -> bytes:
    return raw(method + b" " + target + b" HTTP/1.1", b"host: x", b"connection: close", *fields)


def chat(**members: bytes) -> bytes:
    """Return the body of a chat with these members (values are JSON), which replace or join the plain ones."""
    fields = {"model": b'"%b"' % MODEL.encode(), "messages": b'[{"role":"user","content":"hello"}]'} | members
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items()) + b"}"


def completion(prompt: bytes) -> bytes:
    return b'{"model":"%b","prompt":%b}' % (MODEL.encode(), prompt)


def public_cases() -> Iterator[RequestCase]:
    yield from framing_cases()
    yield from head_cases()
    yield from path_cases()
    yield from body_cases()
    yield from connection_cases()


# --- where a request ends -------------------------------------------------------------------------------------------


def framing_cases() -> Iterator[RequestCase]:
    def case(name: str, *fields: bytes, body: bytes = b"hello", statuses: Sequence[int] = REFUSED) -> RequestCase:
        return RequestCase(name, (post(body, *fields, length=False),), statuses)

    chunked = b"transfer-encoding: chunked"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN), PLAIN)
    yield case("two lengths that differ", b"content-length: 5", b"content-length: 6")
    yield case("two lengths that agree", b"content-length: 5", b"content-length: 5")
    yield case("a list of lengths", b"content-length: 5, 5")
    yield case("a length with a sign", b"content-length: +5")
    yield case("a length below nothing", b"content-length: -1")
    yield case("a length in hexadecimal digits", b"content-length: 0x5")
    yield case("a length in two pieces", b"content-length: 5 5")
    yield case("a length beyond 64 bits", b"content-length: 99999999999999999999999", statuses=(400, 413))
    yield case("a length above the limit", b"content-length: 99999999999", statuses=(413,))
    yield case("a length of nothing", b"content-length:")
    yield case("a length in other digits", b"content-length: \xd9\xa5")
    yield case("a length and chunks", b"content-length: 5", chunked, body=chunks)
    yield case("chunks and a length", chunked, b"content-length: 5", body=chunks)
    yield case("chunks, then gzip", b"transfer-encoding: chunked, gzip", body=chunks, statuses=(400, 501))
    yield case("gzip, then chunks", b"transfer-encoding: gzip, chunked", body=chunks, statuses=(400, 501))
    yield case("identity for a coding", b"transfer-encoding: identity", statuses=(400, 501))
    yield case("a coding nobody knows", b"transfer-encoding: xchunked", statuses=(400, 501))
    yield case("chunks twice in one line", b"transfer-encoding: chunked, chunked", body=chunks)
    yield case("chunks in two lines", chunked, chunked, body=chunks)
    yield case("chunks behind a comma", b"transfer-encoding: ,chunked", body=chunks, statuses=EITHER)
    yield case("a blank before the colon", b"transfer-encoding : chunked", body=chunks)
    yield case("a coding on a line that goes on", b"transfer-encoding:\r\n chunked", body=chunks)
    yield case("a coding behind a vertical tab", b"transfer-encoding: \x0bchunked", body=chunks)
    yield case("a chunk of no size", chunked, body=b"zz\r\nhello\r\n0\r\n\r\n")
    yield case("a chunk beyond 64 bits", chunked, body=b"ffffffffffffffffff\r\nhello\r\n0\r\n\r\n", statuses=(400, 413))
    yield case("a chunk above the limit", chunked, body=b"ffffffffff\r\nhello\r\n0\r\n\r\n", statuses=(400, 413))
    yield case("a chunk below nothing", chunked, body=b"-5\r\nhello\r\n0\r\n\r\n")
    yield case("a chunk in 0x", chunked, body=b"0x5\r\nhello\r\n0\r\n\r\n")
    yield case("a chunk that is longer than it says", chunked, body=b"2\r\nhello\r\n0\r\n\r\n")
    yield case("chunks that end in line feeds", chunked, body=b"5\nhello\n0\n\n")
    yield case("a megabyte beside a chunk", chunked, body=b"5;" + b"x" * (1 << 20) + b"\r\nhello\r\n0\r\n\r\n")
    yield case(
        "a megabyte behind the last chunk",
        chunked,
        body=b"0\r\nx: " + b"x" * (1 << 20) + b"\r\n\r\n",
        statuses=(400, 413, 431),
    )
    old = raw(b"POST /v1/chat/completions HTTP/1.0", b"host: x", chunked, body=chunks)
    yield RequestCase("chunks in HTTP/1.0", (old,), REFUSED)


# --- the head -------------------------------------------------------------------------------------------------------


def head_cases() -> Iterator[RequestCase]:
    def case(name: str, data: bytes, statuses: Sequence[int] = REFUSED) -> RequestCase:
        return RequestCase(name, (data,), statuses)

    models, close = b"GET /v1/models HTTP/1.1", b"connection: close"
    large = (400, 414, 431)
    yield case("no host", raw(models, close), EITHER)
    yield case("two hosts", raw(models, b"host: a", b"host: b", close), EITHER)
    yield case("a name with a blank", get(b"/v1/models", b"bad name: x"))
    yield case("a name of nothing", get(b"/v1/models", b": x"))
    yield case("a field without a colon", get(b"/v1/models", b"nothing"))
    yield case("a zero byte in a field", get(b"/v1/models", b"x: a\x00b"))
    yield case("a return in a field", get(b"/v1/models", b"x: a\rb"))
    yield case("a field that goes on", get(b"/v1/models", b"x: a\r\n b"))
    yield case("bytes beyond ASCII in a name", get(b"/v1/models", b"n\xc3\xa4me: x"))
    yield case("ten thousand fields", get(b"/v1/models", *(b"x%d: y" % each for each in range(10_000))), large)
    yield case("a field of a megabyte", get(b"/v1/models", b"x: " + b"y" * (1 << 20)), large)
    yield case("a target of a megabyte", get(b"/v1/" + b"y" * (1 << 20)), large)
    yield case("a method in small letters", get(b"/v1/models", method=b"get"))
    yield case("a method nobody knows", get(b"/v1/models", method=b"BREW"), (400, 405, 501))
    yield case("a method of a thousand letters", get(b"/v1/models", method=b"A" * 1000))
    yield case("a method with a zero byte", get(b"/v1/models", method=b"G\x00T"))
    yield case("CONNECT", raw(b"CONNECT x:443 HTTP/1.1", b"host: x"), (400, 404, 405, 501))
    yield case("TRACE", get(b"/v1/models", method=b"TRACE"), (200, 400, 404, 405, 501))
    yield case("version 9.9", raw(b"GET /v1/models HTTP/9.9", b"host: x", close), (400, 505))
    yield case("version of letters", raw(b"GET /v1/models HTTP/x.y", b"host: x", close))
    yield case("a line of HTTP/0.9", b"GET /v1/models\r\n\r\n")
    yield case("HTTP/2 as if it were agreed", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505))
    yield case("the hello of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)))
    yield case("bytes of no meaning", bytes(range(256)) * 64)
    yield case("a return without a line feed", b"GET /v1/models HTTP/1.1\rhost: x\r\r")
    yield case("another scheme before the path", get(b"ftp://x/v1/models"), (400, 404))
    yield case("a user in the target", get(b"http://me:secret@x/v1/models"), (200, 400, 404))
    yield case("a target of two words", get(b"/v1/models /x"))
    yield case("a target that begins nowhere", get(b"v1/models"), (400, 404))
    yield case("a star for a target", get(b"*", method=b"OPTIONS"), (200, 204, 400, 404))


def path_cases() -> Iterator[RequestCase]:
    climbing = (
        *(b"/v1/../metrics", b"/v1/%2e%2e/metrics", b"/v1/%2E./metrics", b"/v1/x%2f..%2f..%2fmetrics"),
        *(b"/v1/%5c..%5cmetrics", b"/v1/..%5cmetrics", b"/v1/..\\metrics", b"/v1/x/..", b"/v1/.%2e/x"),
        *(b"/v1/%00/x", b"/v1/x%00", b"/v1/..;/metrics", b"/v1/%2e%2e%2fmetrics", b"/v1/..%2f..%2fadmin"),
    )
    for path in climbing:
        yield RequestCase(f"the path {path.decode()}", (get(path),), (400, 404))
    yield RequestCase("a path encoded twice", (get(b"/v1/%252e%252e/metrics"),), (400, 404))
    yield RequestCase("a path with half an escape", (get(b"/v1/x%z"),), (400, 404))
    yield RequestCase("a path of bytes beyond ASCII", (get(b"/v1/\xff\xfe"),), (400, 404))
    yield RequestCase("a path with a fragment", (get(b"/v1/models#x"),), (200, 400, 404))
    yield RequestCase("the control port's path", (get(b"/admin/backends"),), (404,))
    yield RequestCase("the engine's metrics", (get(b"/metrics"),), (404,))


# --- bodies ---------------------------------------------------------------------------------------------------------


def body_cases() -> Iterator[RequestCase]:
    for name, body, statuses in (*json_bodies(), *chat_bodies()):
        yield RequestCase(name, (post(body),), statuses)
    for name, prompt in prompts():
        yield RequestCase(f"a prompt of {name}", (post(completion(prompt), path="/v1/completions"),), EITHER)
    squeezed = gzip.compress(bytes(1 << 24))
    yield RequestCase("sixteen megabytes in gzip", (post(squeezed, b"content-encoding: gzip"),), EITHER)
    yield RequestCase("gzip that is none", (post(b"hello", b"content-encoding: gzip"),), EITHER)


def json_bodies() -> Iterator[tuple[str, bytes, Sequence[int]]]:
    yield "no JSON", b"hello", REFUSED
    yield "nothing", b"", EITHER
    yield "null", b"null", EITHER
    yield "a list", b"[]", EITHER
    yield "a text", b'"hello"', EITHER
    yield "half an object", PLAIN[:-1], REFUSED
    yield "an object and more", PLAIN + b"}", REFUSED
    yield "no number", chat(temperature=b"NaN"), EITHER
    yield "a number beyond all", chat(max_tokens=b"1" + b"0" * 5000), EITHER
    yield "a power beyond all", chat(max_tokens=b"1e999999"), EITHER
    yield "a hundred thousand brackets", b"[" * 100_000, REFUSED
    yield "a hundred thousand brackets and back", b"[" * 100_000 + b"]" * 100_000, EITHER
    yield "a hundred thousand objects in each other", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, EITHER
    yield "a million empty objects", chat(x=b"[" + b"{}," * 1_000_000 + b"{}]"), PASSED
    yield "eight megabytes of objects and decoys", decoys(8 << 20), PASSED
    yield "a megabyte of blanks", b" " * (1 << 20) + PLAIN, EITHER
    yield "a mark of byte order", b"\xef\xbb\xbf" + PLAIN, EITHER
    yield "bytes that are no UTF-8", chat(messages=b'[{"role":"user","content":"\xff\xfe"}]'), REFUSED
    yield "UTF-16", PLAIN.decode().encode("utf-16"), EITHER
    yield "half of a surrogate pair", chat(messages=b'[{"role":"user","content":"\\ud800"}]'), EITHER
    yield "a zero character", chat(messages=b'[{"role":"user","content":"\\u0000"}]'), EITHER
    yield "two models", b'{"model":"other",' + PLAIN[1:], (200, 400, 404)
    yield "messages twice", b'{"messages":5,' + PLAIN[1:], EITHER


def decoys(size: int) -> bytes:
    """Return a chat with very many objects, and among them members that look like the one that asks for counts."""
    unit = b'{},{"stream_options":{"include_usage":false}},'
    return chat(stream=b"true", x=b"[" + unit * (size // len(unit)) + b"{}]")


def chat_bodies() -> Iterator[tuple[str, bytes, Sequence[int]]]:
    values = (b"null", b"5", b"-1", b"1.5", b"true", b'"x"', b"[]", b"{}", b"[5]", b"[null]", b'[{"role":5}]', b"[[]]")
    for value in values:
        yield f"messages are {value.decode()}", chat(messages=value), EITHER
    for value in (b"null", b"5", b'"x"', b"[]", b'{"include_usage":"x"}', b'{"include_usage":null,"x":{}}'):
        yield f"stream_options are {value.decode()}", chat(stream=b"true", stream_options=value), EITHER
    for name in ("model", "tools", "cache_salt", "lora_path", "chat_template_kwargs", "stream", "documents"):
        for value in (b"null", b"5", b"[{}]", b'{"a":[1]}', b'"' + b"x" * (1 << 18) + b'"'):
            yield f"{name} is {value[:9].decode()}", chat(**{name: value}), (200, 400, 404)
    contents = (b"5", b"[5]", b'[{"type":"text"}]', b'[{"type":"image_url","image_url":5}]', b'{"type":"text"}', b"[]")
    for content in contents:
        yield f"content is {content.decode()}", chat(messages=b'[{"role":"user","content":%b}]' % content), EITHER
    loop = b'"{% for a in range(99999999) %}{% for b in range(99999999) %}x{% endfor %}{% endfor %}"'
    yield "a template that never ends", chat(chat_template=loop), EITHER
    yield (
        "a hundred thousand messages",
        chat(messages=b"[" + b'{"role":"user","content":"a"},' * 100_000 + b"{}]"),
        EITHER,
    )
    yield "a role of a megabyte", chat(messages=b'[{"role":"%b","content":"x"}]' % (b"r" * (1 << 20))), EITHER


def prompts() -> Iterator[tuple[str, bytes]]:
    yield "a number", b"5"
    yield "nothing", b"null"
    yield "an empty list", b"[]"
    yield "numbers below nothing", b"[-1,-2]"
    yield "numbers beyond 64 bits", b"[99999999999999999999999]"
    yield "numbers beyond 32 bits", b"[4294967296]"
    yield "broken numbers", b"[1.5,2.5]"
    yield "truths", b"[true,false]"
    yield "lists in lists", b"[[1,2],[3]]"
    yield "lists in lists in lists", b"[[[1]]]"
    yield "texts and numbers", b'["a",1]'
    yield "an object", b"{}"
    yield "a million numbers", b"[" + b"7," * 1_000_000 + b"7]"
    yield "a million letters without a gap", b'"' + b"a" * 1_000_000 + b'"'


# --- what connections do ----------------------------------------------------------------------------------------------


def connection_cases() -> Iterator[RequestCase]:
    kept = raw(b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"content-length: %d" % len(PLAIN), body=PLAIN)
    yield RequestCase("a client that ends its side at once", (post(PLAIN),), (CLOSED, 200), half_close=True)
    yield RequestCase("fifty requests at once", (kept * 49 + post(PLAIN),), PASSED, count=50)
    yield RequestCase("a request and then garbage", (kept, b"\x00\x01\x02" * 10), PASSED)
    yield RequestCase("garbage behind a body", (post(PLAIN) + b"GET /x",), PASSED)
    yield RequestCase("a header that never ends", (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n",), (408,))
    yield RequestCase("a body without its last byte", (post(PLAIN)[:-1],), (408,))
    yield RequestCase(
        "a chunk that never comes", (post(b"5\r\nhel", b"transfer-encoding: chunked", length=False),), (408,)
    )
    yield RequestCase("a body that ends early", (post(PLAIN)[:-1],), (CLOSED, 400), half_close=True)
    yield RequestCase("a header that ends early", (b"GET /v1/models HTT",), (CLOSED, 400), half_close=True)
    yield RequestCase("a connection without a request", (b"",), (CLOSED, 408))
    yield RequestCase("an expectation that can't be met", (post(PLAIN, b"expect: magic"),), (417,))
    yield RequestCase("an upgrade to websockets", (post(PLAIN, b"upgrade: websocket"),), PASSED)
    yield RequestCase("an upgrade to HTTP/2", (get(b"/v1/models", b"upgrade: h2c", b"http2-settings: AAA"),), PASSED)
    yield RequestCase("Connection names the length", (post(PLAIN, b"connection: content-length"),), EITHER)
    yield RequestCase("Connection names the host", (post(PLAIN, b"connection: host, authorization"),), EITHER)
    yield RequestCase(
        "a HEAD with a body", (get(b"/v1/models", b"content-length: 5", method=b"HEAD") + b"hello",), PASSED
    )
    yield RequestCase("a request id of a megabyte", (post(PLAIN, b"x-request-id: " + b"x" * 30_000),), (200, 400, 431))
    yield RequestCase("a request id with an escape", (post(PLAIN, b"x-request-id: \x1b[2J"),), EITHER)


# --- the control port -------------------------------------------------------------------------------------------------

BEARER = b"authorization: Bearer " + KEY.encode()
CLIENT_ERROR = tuple(range(400, 500))


def control_request(method: bytes, path: str, body: bytes) -> bytes:
    """Return a request with the operator's key."""
    fields = (BEARER, b"content-type: application/json", b"content-length: %d" % len(body))
    return get(path.encode(), *fields, method=method) + body


def control_cases() -> Iterator[RequestCase]:
    def case(name: str, data: bytes, statuses: Sequence[int] = CLIENT_ERROR) -> RequestCase:
        return RequestCase(name, (data,), statuses, "control")

    sent = partial(control_request, b"POST")
    paths = ("/admin/backends", "/admin/config", "/admin/cluster", "/admin/decisions", "/admin/routes", "/metrics")
    for path in paths:
        yield case(f"{path} without the key", get(path.encode()), (401, 403))
    for key in (b"", b"Bearer", b"Bearer \xff\xfe", b"Basic " + KEY.encode(), b"Bearer " + b"x" * 20_000):
        yield case(f"a key that begins with {key[:9]!r}", get(b"/admin/backends", b"authorization: " + key))
    for host in (b"[", b"[::1", b"]", b"a b", b"\xff", b"x:99999", b"%zz"):
        yield case(f"the host {host!r}", raw(b"GET /admin/config HTTP/1.1", b"host: " + host, b"connection: close"))
    yield case("an origin that is no address", get(b"/admin/config", b"origin: http://["))
    urls = (
        *("http://10.0.0..1:8000", "http://10.0.0.256:8000", "http://[::1", "http://", "ftp://x:1", "http://x:0", ""),
        *("http://x:99999", "http://" + "a" * 64 + ":1", "http://a..b:1", "http://x/\\u0000", "http://x y:1"),
        *("http://me:secret@x:1", "http://x:1/?q", "http://x:1/#f", "http://-x-:y", "//x", "http://1.2.3:9"),
    )
    for url in urls:
        yield case(f"the backend {url[:40]}", sent("/admin/backends", b'{"url":"%b"}' % url.encode()))
    for events in ("tcp://a..b:5557", "tcp://x", "ipc:///x", "tcp://" + "a" * 64 + ":1"):
        body = b'{"url":"http://127.0.0.1:1","kv_events":"%b"}' % events.encode()
        yield case(f"events at {events[:20]}", sent("/admin/backends", body))
    bodies = (b"", b"null", b"[]", b"5", b"{", b'{"url":5}', b'{"url":null}', b'{"other":1}', b"\xff", b"[" * 100_000)
    for body in bodies:
        yield case(f"a backend of {body[:12]!r}", sent("/admin/backends", body))
    for weight in (b"0", b"-1", b"NaN", b"1e400", b'"x"', b"null", b"[]"):
        body = b'{"url":"http://127.0.0.1:1","weight":%b}' % weight
        yield case(f"a weight of {weight.decode()}", sent("/admin/backends", body))
    for query in ("limit=-1", "limit=x", "limit=99999999999999999999", "limit=1.5"):
        yield case(f"decisions with {query}", get(f"/admin/decisions?{query}".encode(), BEARER), (200, *CLIENT_ERROR))
    for fingerprint in ("x", "-1", "%00", "f" * 17, "..", "%2e%2e"):
        yield case(f"the route {fingerprint}", get(f"/admin/routes/{fingerprint}".encode(), BEARER))
    for body in (b"", b"[]", b"null", b"hello", b'{"messages":5}', b"[" * 100_000, decoys(1 << 18)):
        yield case(f"explain {body[:9]!r}", sent("/explain", body), EITHER)
    for path in ("/internal/eviction", "/internal/sync", "/internal/events"):
        for body in (b"", b"[]", b'{"worker_id":5}', b'{"worker_id":"w","hashes":"x"}', b"\x80", b"\xc1" * 99):
            yield case(f"{path} of {body[:9]!r}", sent(path, body), CLIENT_ERROR)
    yield case("a worker without an address", sent("/add_worker", b""))
    queries = ("http://10.0.0..1:8000", "http://10.0.0.256:8000", f"http://{'a' * 64}:1", "http://[::1", "http://")
    yield from (case(f"the worker {url[:40]}", sent(f"/add_worker?url={url}", b"")) for url in queries)
    yield case("a body that nobody asked for", control_request(b"GET", "/admin/config", b"x" * (1 << 20)), (200,))
    yield case("removing nobody", control_request(b"DELETE", "/admin/backends", b'{"url":"http://nobody:1"}'))
    yield case("a method it does not have", get(b"/healthz", method=b"DELETE"))
    yield case("a body above the limit", get(b"/explain", BEARER, b"content-length: 99999999999", method=b"POST"))
