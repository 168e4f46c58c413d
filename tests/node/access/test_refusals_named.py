"""Whoever is refused gets the id under which the log has it, as with every other answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.node.parts import request_parts
from tests.node.access.key_lab import BLUE, CHAT, RED, key_lines, keys_file
from tests.node.node_lab import chat, lab
from tests.proxy.wire import GOOD, Scripted, Wire

LIMITS = {"requests_per_minute": 1, "tokens_per_minute": 9000}


def post(key: str, path: str = CHAT, body: bytes = b"", more: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nhost: h\r\nx-api-key: {key}\r\ncontent-length: {size}\r\n{more}\r\n".encode() + body
    )


REFUSED = {
    "401": post("rk-nobody", body=chat()),
    "401 of a websocket": b"GET /v1/realtime?model=a HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\n"
    b"upgrade: websocket\r\nsec-websocket-key: a\r\nsec-websocket-version: 13\r\n\r\n",
    "401 before the body": post("rk-nobody", length=9_999_999),
    "403": post(RED, "/v1/batches", b"{}"),
    "404 of a path": post(RED, "/v2/nothing", b"{}"),
    "404 of a model": post(BLUE, body=chat(model="other-model")),
    "400 of what nobody can read": post(RED, body=b"{}", more="transfer-encoding: gzip\r\n"),
    "400 of a head": b"POST / HTTP/1.1\r\n\r\n",
    "413": post(BLUE, length=10**12),
    "403 of a preflight": b"OPTIONS /v1/models HTTP/1.1\r\nhost: h\r\norigin: http://elsewhere\r\n"
    b"access-control-request-method: GET\r\n\r\n",
}


LATER = {"429": post(RED, body=chat()), "429 before the body": post(RED, length=9_999_999)}
"""Once RED had its one request."""


@pytest.mark.parametrize("own", ["", "mine-17"])
async def test_a_refusal_has_its_id_in_its_answer_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    lines: list[RequestSummary] = []
    monkeypatch.setattr(request_parts, "request_line", lambda: lines.append)
    file = keys_file(tmp_path, key_lines(RED, **LIMITS), key_lines(BLUE, models=["lab-*"]))
    async with lab(Scripted(GOOD), keys_file=file, cors_origins=["http://here"]) as node:
        for kind, request in {**REFUSED, "200": post(RED, body=chat()), **LATER}.items():
            async with await node.wire() as wire:
                status, headers = await sent(wire, request, own)
            line = lines[-1]
            assert (kind, line.status, status) == (kind, int(kind[:3]), int(kind[:3]))
            assert kind == "200" or line.id == headers["x-request-id"], kind
            is_made = re.fullmatch("[0-9a-f]{8}-[0-9a-f]+", line.id) is not None
            assert is_made if not own or "nobody can read" in kind else line.id == own, kind


async def sent(wire: Wire, request: bytes, own: str) -> tuple[int, dict[str, str]]:
    line, _, rest = request.partition(b"\r\n")
    named = f"x-request-id: {own}\r\n".encode() if own else b""
    await wire.send(line + b"\r\n" + named + rest)
    status, headers, _ = await wire.response()
    return status, dict(headers)
