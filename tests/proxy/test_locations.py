"""Redirects of engines name no engine to clients."""

from __future__ import annotations

import pytest

from ranvier_py.proxy.answers.locations import as_path
from tests.node.node_lab import lab
from tests.proxy.test_overload import answered
from tests.proxy.wire import Scripted, answer, post

ENGINES = ("10.0.0.1", "engine.internal", "::1")


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (b"http://10.0.0.1:8000/v1/embeddings", b"/v1/embeddings"),
        (b"https://10.0.0.1/v1/files/f1?x=1#y", b"/v1/files/f1?x=1#y"),
        (b"HTTP://Engine.Internal:8000", b"/"),
        (b"//10.0.0.1:8000/v1/x", b"/v1/x"),
        (b"http://key@10.0.0.1:8000//elsewhere/x", b"/elsewhere/x"),  # never a host of its own
        (b"http://[::1]:8000/v1/x", b"/v1/x"),
        (b"http://10.9.9.9:8000/v1/audio/speech", b"/v1/audio/speech"),  # its own name of itself
        (b"http://10.9.9.9:8000/v1/audio/speech/?a=b", b"/v1/audio/speech/?a=b"),
        (b"http://10.9.9.9/v1/x", b"/v1/x"),
        (b"http://[fe80::1%25eth0]:8000/v1/x", b"/v1/x"),
        (b"http://engine-7:8000/v1/x", b"/v1/x"),
        (b"http://storage.example/v1/audio/speech/", b"/v1/audio/speech/"),
        (b"https://8.8.8.8/v1/x", b"https://8.8.8.8/v1/x"),
        (b"https://storage.example/v1/files/f1", b"https://storage.example/v1/files/f1"),
        (b"/v1/x", b"/v1/x"),
        (b"x/y", b"x/y"),
        (b"mailto:a@10.0.0.1", b"mailto:a@10.0.0.1"),
        (b"http://[10.0.0.1/x", b"http://[10.0.0.1/x"),
        (b"", b""),
    ],
)
def test_a_location_at_an_engine_becomes_a_path(location: bytes, shown: bytes) -> None:
    assert as_path(location, b"/v1/audio/speech", ENGINES) == shown


@pytest.mark.parametrize("status", [201, 301, 302, 307, 308])
@pytest.mark.parametrize("target", [b"/v1/embeddings", b"/v1/audio/speech/", b"/v1/files"])
async def test_no_client_is_sent_past_the_node(target: bytes, status: int) -> None:
    engine = Scripted()
    async with lab(engine) as node:
        place = node.engines[0].encode()
        engine.turns = iter([[answer(b"", b"Location: " + place + b"/v1/x/", b"x-y: z", status=status)]])
        found, headers, _ = await answered(node, post(b'{"input":"hi"}', target=target))
    assert (found, headers["location"], headers["x-y"]) == (status, "/v1/x/", "z")
