"""A WebSocket ends with the key that opened it: a close frame that says why, and nothing further for its engine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Request, TextMessage

from ranvier_py.core.answers.websocket_messages import HELD_BYTES_MAX, UNREAD
from ranvier_py.io.keys import FollowedFile
from ranvier_py.proxy import realtime
from ranvier_py.proxy.realtime import OTHER_MODELS
from ranvier_py.proxy.stages import identify
from ranvier_py.proxy.stages.reserve import UNCOUNTED
from tests.node.access.key_lab import BLUE, RED, bearer, key_lines, keys_file
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, cluster_lab, lab
from tests.proxy.test_realtime import TARGET, Engine, Socket, accepted, certified, closed, echo, until
from tests.proxy.test_realtime import request as handshake
from tests.proxy.wire import Wire

PARTED_S = 3.0  # a second, and two for a machine that is busy


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FollowedFile.__init__.__kwdefaults__, "interval_s", 0.05)


async def opened(node: Node, key: str, wire: Wire | None = None, target: str = TARGET) -> Socket:
    found = Socket(wire or await node.wire(), WSConnection(ConnectionType.CLIENT))
    headers = [(name.encode(), value.encode()) for name, value in bearer(key).items()]
    await found.send(Request(host="h", target=target, extra_headers=headers))
    assert isinstance(await found.next(), AcceptConnection)
    return found


async def parted(client: Socket, words: str) -> None:
    with trio.fail_after(PARTED_S):
        event = await client.next()
    assert isinstance(event, CloseConnection)
    assert (event.code, event.reason) == (1008, words)
    await client.send(event.response())
    assert await client.next() is None
    await client.wire.aclose()


def rewritten(path: Path, *lines: str) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(lines))
    os.replace(new, path)


def expire(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identify, "time", SimpleNamespace(time=lambda: time.time() + 7200))


GOES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "the key has expired": expire,
    "the key is disabled": lambda path, _: rewritten(path, key_lines(RED, disabled=True), key_lines(BLUE)),
    "the key is not known here": lambda path, _: rewritten(path, key_lines(BLUE)),
    OTHER_MODELS: lambda path, _: rewritten(path, key_lines(RED, models=["other-*"]), key_lines(BLUE)),
    UNCOUNTED: lambda path, _: rewritten(
        path, key_lines(RED, tokens_per_minute=1000), key_lines(BLUE, tokens_per_minute=1000, uncounted=True)
    ),
}


@pytest.mark.parametrize("words", GOES)
async def test_a_websocket_is_closed_when_its_key_goes_and_that_of_another_key_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    path, engine = keys_file(tmp_path, key_lines(RED, expires=soon), key_lines(BLUE)), Engine(echo)
    async with lab(engine, keys_file=path) as node:
        red, blue = await opened(node, RED), await opened(node, BLUE)
        GOES[words](path, monkeypatch)
        await parted(red, words)
        await until(node, open=1, parted=1, idle=0, broken=0)
        await blue.send(TextMessage(data="still here"))
        assert await blue.next() == TextMessage(data="still here")
        await closed(blue)


async def listened(wire: Wire, head: bytes, got: list[str]) -> None:
    """Keeps every message, and says nothing but that it closes, too."""
    found = await accepted(wire, head)
    while (event := await found.next()) is not None:
        if isinstance(event, TextMessage):
            got.append(event.data)
        elif isinstance(event, BytesMessage):
            got.append(event.data.decode())
        elif isinstance(event, CloseConnection):
            await found.send(event.response())
            return


SESSIONS: dict[str, Any] = {
    "itself": {"model": "MODEL"},
    "its session": {"session": {"model": "MODEL"}},
    "a part of its session": {"session": {"audio": {"input": {"transcription": {"model": "MODEL"}}}}},
}

SPELLED: dict[str, Callable[[str], list[Event]]] = {
    "text": lambda text: [TextMessage(data=text)],
    "binary": lambda text: [BytesMessage(data=text.encode())],
    "in pieces": lambda text: [TextMessage(data=text[:20], message_finished=False), TextMessage(data=text[20:])],
    "escaped": lambda text: [TextMessage(data=text.replace("model", "\\u006dodel"))],
}


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("named", SESSIONS)
async def test_a_key_of_some_models_names_no_other_after_the_handshake(
    tmp_path: Path, named: str, spelled: str
) -> None:
    got: list[str] = []
    engine = Engine(lambda wire, head: listened(wire, head, got))
    text = json.dumps({"type": "session.update", **SESSIONS[named]})
    ours, other = [SPELLED[spelled](text.replace("MODEL", model)) for model in ("m", "n")]
    async with lab(engine, keys_file=keys_file(tmp_path, key_lines(RED, models=["m"]), key_lines(BLUE))) as node:
        red, blue = [await opened(node, key, target=f"{TARGET}?model=m") for key in (RED, BLUE)]
        await red.send(*ours, TextMessage(data="model n"), *other, TextMessage(data="unheard"))
        await parted(red, OTHER_MODELS)
        assert len(got) == 2
        await blue.send(*other, CloseConnection(1000))
        assert isinstance(await blue.next(), CloseConnection)
        await blue.wire.aclose()
    assert [*map(json.loads, (got[0], got[2]))] == [json.loads(text.replace("MODEL", model)) for model in ("m", "n")]
    assert got[1] == "model n"


UNMASKED = b"\0\0\0\0"
UNREADABLE = {
    "too long": b"\x81\xff" + (HELD_BYTES_MAX + 1).to_bytes(8),
    "too long in pieces": (b"\x01\xff" + HELD_BYTES_MAX.to_bytes(8) + UNMASKED + bytes(HELD_BYTES_MAX))
    + (b"\x80\x81" + UNMASKED + b"x"),
    "compressed": b"\xc1\x80" + UNMASKED,
    "no JSON": b"\x81\x89" + UNMASKED + b'{"model":',
    "nested": b"\x81\xfe" + (60_009).to_bytes(2) + UNMASKED + b'{"model":' + b"[" * 60_000,
}


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_what_cannot_be_read_of_a_key_of_some_models_reaches_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(realtime, "CLOSE_S", 0.5)  # a close amid a frame is not seen
    got: list[str] = []
    engine = Engine(lambda wire, head: listened(wire, head, got))
    async with lab(engine, keys_file=keys_file(tmp_path, key_lines(RED, models=["m"]))) as node:
        red = await opened(node, RED, target=f"{TARGET}?model=m")
        await red.wire.send(UNREADABLE[kind])
        await parted(red, UNREAD)
        await engine.over.wait()
    assert got == []


async def test_engines_are_offered_no_compression_for_a_key_of_some_models(tmp_path: Path) -> None:
    engine = Engine(echo)
    async with lab(engine, keys_file=keys_file(tmp_path, key_lines(RED, models=["m"]), key_lines(BLUE))) as node:
        for key in (RED, BLUE):
            fields = (f"authorization: Bearer {key}".encode(), b"sec-websocket-extensions: permessage-deflate")
            async with await node.wire() as wire:
                await wire.send(handshake(*fields, target=b"/v1/realtime?model=m"))
                assert (await wire.response())[0] == 101
    assert [b"permessage-deflate" in head for head in engine.heads] == [False, True]


async def test_a_websocket_whose_messages_were_not_read_is_closed_when_its_key_becomes_one_of_some_models(
    tmp_path: Path,
) -> None:
    path = keys_file(tmp_path)
    async with lab(Engine(echo), keys_file=path) as node:
        red = await opened(node, RED, target=f"{TARGET}?model=m")
        rewritten(path, key_lines(RED, models=["m"]), key_lines(BLUE))
        await parted(red, OTHER_MODELS)


async def test_a_websocket_is_closed_when_its_key_loses_the_model_that_a_message_named(tmp_path: Path) -> None:
    path = keys_file(tmp_path, key_lines(RED, models=["m", "n"]), key_lines(BLUE))
    async with lab(Engine(echo), keys_file=path) as node:
        red = await opened(node, RED, target=f"{TARGET}?model=m")
        update = TextMessage(data='{"model": "n"}')
        await red.send(update)
        assert await red.next() == update
        rewritten(path, key_lines(RED, models=["m"]), key_lines(BLUE))  # its session is of n by now
        await parted(red, OTHER_MODELS)


async def test_a_websocket_is_closed_when_its_key_loses_the_model_that_it_named_alone(tmp_path: Path) -> None:
    path, engine = keys_file(tmp_path, key_lines(RED), key_lines(BLUE, models=["m*"])), Engine(echo)
    async with lab(engine, keys_file=path) as node:
        red = await opened(node, RED, target=f"{TARGET}?model=m")
        blue = await opened(node, BLUE, target=f"{TARGET}?model=m")
        rewritten(path, key_lines(RED, models=["other-*"]), key_lines(BLUE, models=["other-*", "m"]))
        await parted(red, OTHER_MODELS)
        await blue.send(TextMessage(data="still here"))
        assert await blue.next() == TextMessage(data="still here")
        await closed(blue)


async def test_a_key_with_limits_that_nobody_could_count_opens_none_unless_they_allow_it(tmp_path: Path) -> None:
    limits = {"tokens_per_minute": 1000}
    path = keys_file(tmp_path, key_lines(RED, **limits), key_lines(BLUE, **limits, uncounted=True))
    async with lab(engine := Engine(echo), keys_file=path) as node:
        async with await node.wire() as wire:
            await wire.send(handshake(f"authorization: Bearer {RED}".encode()))
            assert (await wire.response())[0] == 403
        await closed(await opened(node, BLUE))
    assert len(engine.heads) == 1


async def test_a_key_that_is_revoked_on_one_node_closes_its_websockets_on_all(tmp_path: Path) -> None:
    settings = {"keys_file": keys_file(tmp_path), "gossip_admin_key": "an-admin-key-of-the-cluster"}
    async with cluster_lab(tmp_path, engines=0) as place:
        place.engines.append(await place.listen(Engine(echo).serve))
        nodes = [await place.start(**settings) for _ in range(2)]
        await nodes[1].sees(1)
        opened_by_red = [await opened(node, RED) for node in nodes]
        order = {"id": "red", "hours": 1}
        answer = await nodes[0].http.post(f"{nodes[0].control}/admin/access/revoke", json=order)
        assert answer.status_code == 200, answer.text
        for red in opened_by_red:
            await parted(red, "the key was revoked")


async def script_in_pieces(wire: Wire, head: bytes, more: trio.Event) -> None:
    found = await accepted(wire, head)
    frame = found.protocol.send(TextMessage(data="x" * 70_000))
    await wire.send(frame[:40_000])
    await more.wait()
    await wire.send(frame[40_000:] + found.protocol.send(TextMessage(data="never seen")))
    assert await found.next() is None


async def test_the_current_frame_is_relayed_to_its_end_first(tmp_path: Path) -> None:
    more = trio.Event()
    engine = Engine(lambda wire, head: script_in_pieces(wire, head, more))
    path = keys_file(tmp_path)
    async with lab(engine, keys_file=path) as node:
        red = await opened(node, RED)
        rewritten(path, key_lines(BLUE))
        await until(node, parted=1, open=1)
        await red.send(TextMessage(data="not for the engine any more"))
        more.set()
        event = await red.next()
        assert isinstance(event, TextMessage)
        assert len(event.data) == 70_000
        await parted(red, "the key is not known here")
        await engine.over.wait()


@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_goes_on_sending_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(realtime, "CLOSE_S", 0.5)
    path, (files, trusting) = keys_file(tmp_path), certified(tmp_path)
    async with lab(Engine(echo), keys_file=path, **(files if tls else {})) as node:
        wire = await node.wire()
        if tls:
            wire.stream = trio.SSLStream(  # type: ignore[assignment]  # what a Wire needs of one
                wire.stream, trusting, server_hostname="127.0.0.1", https_compatible=True
            )
        red = await opened(node, RED, wire)
        rewritten(path, key_lines(BLUE))
        with trio.fail_after(PARTED_S), pytest.raises(trio.BrokenResourceError):
            await talk(red)
        await until(node, open=0, parted=1, idle=0)
        await wire.stream.aclose()


async def talk(client: Socket) -> None:
    """Send empty messages as fast as a microphone sends its own."""
    while True:
        await client.wire.send(b"\x81\x80mask" * 100)
        await trio.sleep(BETWEEN_LOOKS_S)
