"""Whatever comes to the control port of a real node is answered with a reason, and never by a 500."""

from __future__ import annotations

import json
import re

import pytest
import trio

from tests.node.node_lab import lab

DEADLINE_S = 60.0
ROUTES = (
    *("GET /healthz", "GET /readyz", "GET /metrics", "GET /admin/backends", "POST /admin/backends"),
    *("DELETE /admin/backends", "POST /admin/backends/drain", "GET /admin/routes", "GET /admin/routes/abc"),
    *("POST /admin/backends/set", "POST /admin/backends/weight", "POST /admin/node/drain", "GET /admin/sources"),
    *("GET /admin/decisions", "GET /admin/config", "GET /admin/clients", "GET /admin/engine-cache"),
    *("GET /admin/calibration", "GET /admin/prefix-routing/stats", "GET /admin/response-cache/stats"),
    "POST /admin/response-cache/invalidate",
    *("GET /admin/cluster", "GET /admin/cluster/sums", "GET /admin/kv-index/stats", "GET /admin/kv-index/backends"),
    *("POST /admin/kv-index/clear", "POST /explain", "POST /add_worker", "POST /remove_worker", "GET /list_workers"),
    *("POST /internal/eviction", "POST /internal/sync", "POST /internal/events", "GET /internal/workers"),
)
HEADS = {
    "a bracket for a host": b"host: [\r\n",
    "two hosts": b"host: a\r\nhost: b\r\n",
    "no host": b"",
    "a host that is no text": b"host: \xff\xfe\r\n",
    "a host with a long port": b"host: 127.0.0.1:99999999999999\r\n",
    "an open address": b"host: [::1\r\n",
    "a bracket for an origin": b"host: 127.0.0.1\r\norigin: http://[\r\n",
    "an origin that is no text": b"host: 127.0.0.1\r\norigin: \xff\r\n",
    "null for an origin": b"host: 127.0.0.1\r\norigin: null\r\n",
    "a header of 60 kB": b"host: 127.0.0.1\r\nx: " + b"y" * 60_000 + b"\r\n",
    "a thousand headers": b"host: 127.0.0.1\r\n" + b"x: y\r\n" * 1000,
    "a header without a name": b"host: 127.0.0.1\r\n: y\r\n",
    "another content type": b"host: 127.0.0.1\r\ncontent-type: multipart/form-data\r\n",
    "an unknown character set": b"host: 127.0.0.1\r\ncontent-type: text/html; charset=none\r\n",
    "a packed body that is none": b"host: 127.0.0.1\r\ncontent-encoding: gzip\r\n",
    "odd credentials": b"host: 127.0.0.1\r\nauthorization: Basic \xff\xff\r\n",
    "odd cookies": b"host: 127.0.0.1\r\ncookie: \x01=;;=\xff\r\n",
    "an odd accept": b"host: 127.0.0.1\r\naccept: ;q=nan,*/*;q=\xff\r\n",
    "a wish for HTTP/2": b"host: 127.0.0.1\r\nupgrade: h2c\r\nconnection: upgrade\r\nhttp2-settings: x\r\n",
}
QUERIES = {
    "half a percent": b"?url=%",
    "a percent of no text": b"?url=%ff%fe&limit=%c0%af&hash=%ff",
    "a NUL": b"?url=%00&limit=%00&hash=%00",
    "brackets": b"?url=http://[&limit=[&hash=[",
    "a large number": b"?limit=99999999999999999999999999&hash=" + b"f" * 100,
    "digits of other scripts": b"?limit=%D9%A3&hash=%D9%A3",
    "nothing": b"?url=&limit=&hash=",
    "a query of 60 kB": b"?url=" + b"a" * 60_000,
    "a thousand fields": b"?" + b"limit=1&" * 1000,
    "an empty label": b"?url=http://10.0.0..1:8000",
    "a label that is too long": b"?url=http://" + b"a" * 64 + b":8000",
    "a number beyond the last": b"?url=http://10.0.0.256:8000",
    "a port beyond the last": b"?url=http://127.0.0.1:99999",
}
BODIES = {
    "no JSON": b"{",
    "no text": b"\xff\xfe{}",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e999",
    "NaN": b'{"url":NaN,"weight":NaN,"worker_id":NaN}',
    "huge numbers": b'{"url":' + b"9" * 5000 + b',"weight":' + b"9" * 400 + b',"kv_ranks":99999999999999999999}',
    "depth": b"[" * 100_000,
    "an object of depth": b'{"url":' * 5000 + b"1" + b"}" * 5000,
    "half of a pair": b'{"url":"\\ud800","worker_id":"\\ud800","messages":[{"role":"user","content":"\\ud800"}]}',
    "a NUL in a name": b'{"url":"http://a\\u0000:1","worker_id":"\\u0000"}',
    "brackets for a host": b'{"url":"http://[","worker_id":"["}',
    "an empty label": b'{"url":"http://10.0.0..1:8000"}',
    "wrong types": b'{"url":["a"],"weight":{},"worker_id":7,"evicted_hashes":"a","active_hashes":{},"messages":7}',
    "odd messages": b'{"messages":[null,7,{"role":[],"content":{"a":1}}],"model":{"a":1},"prompt":[[[]]]}',
    "odd reports": b'{"worker_id":"w","rank":-1,"ranks":[9999999999],"next":-1,"messages":[[1]],"connected":2}',
    "a name of 20 kB": json.dumps({"url": "http://a:1", "name": "n" * 20_000}).encode(),
}


def packet(route: str, head: bytes = b"host: 127.0.0.1\r\n", query: bytes = b"", body: bytes | None = None) -> bytes:
    method, path = route.encode().split(b" ")
    length = b"" if body is None else b"content-length: %d\r\n" % len(body)
    return b"%b %b%b HTTP/1.1\r\n%b%b\r\n%b" % (method, path, query, head, length, body or b"")


def hostile(route: str) -> dict[str, bytes]:
    cases = {name: packet(route, head=head) for name, head in HEADS.items()}
    cases |= {f"query: {name}": packet(route, query=query) for name, query in QUERIES.items()}
    cases |= {f"path: {name}": packet(route + name) for name in ("/%ff", "/%00", "%2f..%2f..", "/..%5c")}
    return cases | {f"body: {name}": packet(route, body=body) for name, body in BODIES.items()}


def test_there_are_many() -> None:
    assert len(hostile("GET /")) >= 40


async def ask(port: int, request: bytes) -> bytes:
    """All that is answered until the port closes."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        answer = b""
        try:
            await stream.send_all(request)
            async for piece in stream:
                answer += piece
        except trio.BrokenResourceError:  # it was refused before it was read
            pass
        return answer


@pytest.mark.slow
async def test_no_request_to_the_control_port_of_a_node_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    wrong: list[str] = []
    async with lab(deadline_s=2 * DEADLINE_S) as place:
        port = int(place.control.rpartition(":")[2])
        with trio.fail_after(DEADLINE_S):
            for route in ROUTES:
                for name, request in hostile(route).items():
                    answer = await ask(port, request)
                    found = re.match(rb"HTTP/1.1 (\d{3}) ", answer)
                    if found is None or (found[1][:1] == b"5" and found[1] != b"503"):
                        wrong.append(f"{route} {name}: {answer[:80]!r}")
        assert (await place.http.get(f"{place.control}/healthz")).status_code == 200
    assert wrong == []
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("status_of", [("GET /admin/config", 200), ("GET /nowhere", 404), ("DELETE /healthz", 405)])
async def test_a_body_where_none_is_asked_for_costs_no_answer(status_of: tuple[str, int]) -> None:
    """A megabyte is more than sockets hold: closed before it is read, the kernel would take the answer back."""
    route, status = status_of
    async with lab(deadline_s=DEADLINE_S) as place:
        port = int(place.control.rpartition(":")[2])
        for size in (1, 1 << 20, 8 << 20):
            answer = await ask(port, packet(route, body=b"x" * size))
            assert answer.startswith(b"HTTP/1.1 %d " % status), (size, answer[:80])


async def test_a_body_above_the_limit_is_refused_with_a_status() -> None:
    async with lab(deadline_s=DEADLINE_S) as place:
        port = int(place.control.rpartition(":")[2])
        answer = await ask(port, packet("POST /admin/backends", body=b"x" * (17 << 20)))
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:80]
