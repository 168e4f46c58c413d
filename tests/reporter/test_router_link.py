"""Whatever a router answers costs its reports at most: the reporter goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio

from ranvier_py.core.engine_cache.sources.push_messages import MESSAGES_MAX
from ranvier_py.reporter import router_link
from ranvier_py.reporter.event_relay import EventLog, EventRelay, RouterPost
from ranvier_py.reporter.router_link import REPLY_BYTES_MAX, RouterLink


def answer(body: bytes, status: bytes = b"200 OK", head: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b" % (status, len(body), head, body)


HOSTILE = {
    "nothing": b"",
    "no HTTP": b"\x00\xff" * 100,
    "a status beyond three digits": answer(b"{}", b"99999 no"),
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}",
    "chunks of no length": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a packed body that is none": answer(b"{}", head=b"content-encoding: gzip\r\n"),
    "a header that is endless": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000,
    "a body that is endless": answer(b" " * (2 * REPLY_BYTES_MAX) + b"{}"),
    "an elsewhere": answer(b"", b"307 elsewhere", b"location: http://a..b:99999999/\r\n"),
    "odd cookies": answer(b"{}", head=b"set-cookie: \xff=\xfe; expires=never; domain=..\r\n"),
    "a refusal that is no text": answer(b'{"error":{"message":[1,{"a":null}]}}', b"400 no"),
    "an error that is a list": answer(b'{"error":[]}', b"500 no"),
    "no object": answer(b'["replay"]'),
    "depth": answer(b"[" * 50_000),
    "bytes that are no text": answer(b'{"replay":"\xff"}'),
}


class Fixed:
    """A sender that always has something to send; `replies` are what came back."""

    def __init__(self) -> None:
        self.replies: list[Mapping[str, Any]] = []
        self.done = trio.Event()

    def next(self, _: float) -> RouterPost:
        return RouterPost("/internal/events", {"messages": []})

    def answered(self, reply: Mapping[str, Any], _: float) -> None:
        self.replies.append(reply)
        if reply.get("good"):
            self.done.set()


async def serve(answers: list[bytes], stream: trio.SocketStream) -> None:
    await stream.receive_some(1 << 16)
    with suppress(trio.BrokenResourceError):  # it has read enough
        await stream.send_all(answers.pop(0) if len(answers) > 1 else answers[0])
        await stream.aclose()


async def replies(*answers: bytes, key: str = "key") -> list[Mapping[str, Any]]:
    """What came back to a reporter from a router with these answers, up to the good one behind them."""
    answered = [*answers, answer(json.dumps({"good": True}).encode())]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, partial(serve, answered), 0, host="127.0.0.1"))
            sender = Fixed()
            url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            nursery.start_soon(RouterLink(url, key).run, sender)
            await sender.done.wait()
            nursery.cancel_scope.cancel()
    return sender.replies


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
async def test_no_answer_of_a_router_ends_the_reporter(hostile: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "REFUSED_S", 0.01)
    monkeypatch.setattr(router_link, "RETRY_S", 0.01)
    assert (await replies(hostile))[-1] == {"good": True}


async def test_a_key_beyond_ascii_is_sent() -> None:
    assert await replies(key="schlüssel") == [{"good": True}]


@pytest.mark.parametrize("url", ["http://a..b:1", "http://" + "x" * 64 + ":1"])
async def test_a_name_that_can_not_be_looked_up_does_not_end_it_either(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "RETRY_S", 0.01)
    link = RouterLink(url, "")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run, Fixed())
            while link.failures < 2:  # noqa: ASYNC110  # nobody announces it
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ask", [0, -1, 2**63, 2**64 - 1, True, 1.5, "5f", None])
@pytest.mark.parametrize("first", [0, -(2**63), 2**64 - 1, "ff", None, 3])
def test_a_question_that_makes_no_sense_is_not_answered_and_harms_no_later_one(ask: object, first: object) -> None:
    log = EventLog()
    for number in range(5):
        log.append(number, b"message")
    relay = EventRelay({"worker_id": "w"}, log)
    for question in ({"ask": ask, "first": first}, {"ask": 7, "first": first}, {"ask": 8, "first": 2}):
        now = 100.0
        for _ in range(4):
            posting = relay.next(now)
            now += 10.0
            if posting is None:
                continue
            json.dumps(posting.body)
            assert posting.body["next"] <= log.next
            assert len(posting.body["messages"]) < MESSAGES_MAX
            relay.answered({"replay": question}, now)
    log.append(5, b"the last")
    assert relay.next(200.0) is not None
