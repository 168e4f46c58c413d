"""Answers under way that several clients get: who leaves when, step by step."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import trio

from ranvier_py.core.prompts.fingerprint import TextHasher
from ranvier_py.core.prompts.tenants import CREDENTIAL, Tenants
from ranvier_py.core.response_cache.answer_store import AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.cache_keys import Question
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.client import Client, ServerCounters, Watchdog
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import HttpRequest, HttpResponseHead
from ranvier_py.proxy.shared_answer import SharedAnswer
from ranvier_py.proxy.stages.response_cache import ResponseCache
from ranvier_py.proxy.transport import PlainTransport

QUESTION = Question(b"key", "chat", "m", stream=True, wants_usage=False, max_age_s=60.0)
BODY = json.dumps({"model": "m", "messages": [], "temperature": 0}).encode()


@contextmanager
def clients(count: int) -> Iterator[list[Client]]:
    """Clients of a server that is at work for each."""
    pairs = [socket.socketpair() for _ in range(count)]
    watchdog, counters = Watchdog(1.0), ServerCounters()
    try:
        yield [Client(PlainTransport(ours), "", ServerLimits(), watchdog, counters, handling=True) for ours, _ in pairs]
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()


REQUEST = HttpRequest(b"POST", b"/v1/chat/completions", [(b"host", b"h")], BODY)


def served(client: Client) -> Call:
    return Call(REQUEST, client, time.monotonic(), id=b"id")


async def test_who_asks_when_all_others_have_just_left_gets_an_answer_of_its_own() -> None:
    asked: list[Call] = []

    def forward(request: Call) -> Steps[None]:
        asked.append(request)
        yield trio.sleep_forever

    cache = ResponseCache(AnswerStore(ResponseCacheOptions()), Tenants(CREDENTIAL, TextHasher(b"s" * 32)))
    with clients(3) as (first, second, third), closing(cache.answer(leader := served(first), forward)) as leading:
        next(leading)
        with closing(cache.answer(served(second), forward)) as following:
            next(following)
            first.hang_up()
        with closing(cache.answer(late := served(third), forward)) as other:
            next(other)
    assert asked == [leader, late]


async def test_a_piece_that_comes_before_a_follower_has_begun_to_wait_ends_its_wait(
    autojump_clock: trio.testing.MockClock,  # a wait in vain is over at once
) -> None:
    with clients(1) as (leader,):
        shared = SharedAnswer(QUESTION, REQUEST, leader, 1000)
        with shared.followed() as follower:
            waiting = shared.kept.change  # as steps yield it
            shared.relay_head(HttpResponseHead(200, b"OK"), (), b"piece")
            with trio.fail_after(1):
                await waiting()
            assert shared.kept.next_piece(follower) == b"piece"
