"""Redirects of engines name no engine to clients."""

from __future__ import annotations

import pytest

from ranvier_py.proxy.answers.locations import Places
from tests.node.node_lab import lab
from tests.proxy.test_overload import answered
from tests.proxy.wire import Scripted, answer, post

ENGINES = frozenset(("10.0.0.1", "engine.internal", "::1"))


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
        (b"http://engine-7.models.svc.cluster.local./v1/x", b"/v1/x"),
        (b"https://gpu3.corp/v1/x", b"/v1/x"),
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
    assert Places(b"/v1/audio/speech", "", ENGINES).as_path(location) == shown


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (b"http://10.0.0.1/team/a/v1/x", b"/v1/x"),
        (b"/team/a/v1/x?y", b"/v1/x?y"),
        (b"/team/a//evil.example/x", b"/evil.example/x"),
        (b"/team/ab/v1/x", b"/team/ab/v1/x"),
        (b"http://elsewhere.example/team/a/v1/files", b"/v1/files"),
        (b"http://elsewhere.example/team/a/v1/x", b"http://elsewhere.example/team/a/v1/x"),
    ],
)
def test_what_precedes_all_paths_of_a_backend_precedes_none_of_the_node(location: bytes, shown: bytes) -> None:
    assert Places(b"/v1/files", "/team/a", ENGINES).as_path(location) == shown


@pytest.mark.parametrize("status", [201, 301, 302, 307, 308])
@pytest.mark.parametrize("target", [b"/v1/embeddings", b"/v1/audio/speech/", b"/v1/files"])
async def test_no_client_is_sent_past_the_node(target: bytes, status: int) -> None:
    engine = Scripted()
    async with lab(engine) as node:
        place = node.engines[0].encode()
        engine.turns = iter([[answer(b"", b"Location: " + place + b"/v1/x/", b"x-y: z", status=status)]])
        found, headers, _ = await answered(node, post(b'{"input":"hi"}', target=target))
    assert (found, headers["location"], headers["x-y"]) == (status, "/v1/x/", "z")


@pytest.mark.parametrize(
    ("field", "sent", "shown"),
    [
        (b"Content-Location", b"%b/v1/files/f1", "/v1/files/f1"),
        (b"Refresh", b"5; url=%b/v1/batches/b1", "5; url=/v1/batches/b1"),
        (b"Refresh", b"0;URL='%b/v1/x'", "0;URL='/v1/x'"),
        (b"Refresh", b"5", "5"),
        (
            b"Link",
            b'<%b/v1/files?after=f1>; rel="next", </v1/x>; rel=prev',
            '</v1/files?after=f1>; rel="next", </v1/x>; rel=prev',
        ),
        (
            b"Link",
            b"<https://docs.example/a>; rel=help, <%b/v1/x>; rel=up",
            "<https://docs.example/a>; rel=help, </v1/x>; rel=up",
        ),
    ],
)
@pytest.mark.parametrize("status", [200, 202, 300])
async def test_no_other_field_names_an_engine_either(field: bytes, sent: bytes, shown: str, status: int) -> None:
    engine = Scripted()
    async with lab(engine) as node:
        place = node.engines[0].encode()
        value = sent.replace(b"%b", place)
        engine.turns = iter([[answer(b"", field + b": " + value, status=status)]])
        _, headers, _ = await answered(node, post(b"{}", target=b"/v1/files"))
    assert headers[field.decode().lower()] == shown
