"""Nodes' sides of the response cache on a real Redis, and what tests do with them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from math import inf
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.core.response_cache.answer_store import ResponseCacheOptions
from ranvier_py.core.response_cache.redis_answer_options import RedisAnswerOptions
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.io.redis_answers import RedisAnswers
from ranvier_py.io.redis_pool import RedisPool
from tests.waiting import until

DEADLINE_S = 20.0
SEEDS = count()
PREFIX = RedisAnswerOptions().key_prefix


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second between two ticks."""
    monkeypatch.setattr("ranvier_py.io.redis_answers.TICK_S", 0.02)


def made(url: str, ttl_s: float = 300.0, **options: Any) -> RedisAnswers:
    chosen = RedisAnswerOptions(**{"retry_s": 0.02, **options})
    pool = RedisPool(url, "url", size=chosen.connections_max, timeout_s=chosen.timeout_s, connect_s=chosen.connect_s)
    return RedisAnswers(pool, chosen, ResponseCacheOptions(ttl_s=ttl_s), Random(next(SEEDS)))


def answer(size: int = 100, model: str = "m", tenant: bytes = b"t", age_s: float = 0.0) -> StoredAnswer:
    body = b"x" * size
    at = time.monotonic() - age_s
    return StoredAnswer("chat", model, tenant, b"application/json", body, b"", False, at, (1, 1))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@asynccontextmanager
async def running(*nodes: RedisAnswers, shares: bool = True) -> AsyncIterator[None]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.run)
            for node in nodes if shares else ():
                await until(lambda node=node: node.sharing)  # type: ignore[misc]
            yield
            nursery.cancel_scope.cancel()


async def written(node: RedisAnswers, number: int, stored: StoredAnswer | None = None) -> None:
    """Keep one, and wait until Redis has it; again after an outage that only a busy machine made."""
    before, stored = node.counters.written, stored or answer()
    while node.counters.written == before:
        await until(lambda: node.sharing)
        node.keep(key(number), stored)
        await until(lambda: not node.sharing or not node.counters.waiting)


async def found(node: RedisAnswers, number: int, max_age_s: float = inf) -> StoredAnswer | None:
    return await node.find(key(number), max_age_s)


async def has(node: RedisAnswers, *numbers: int) -> list[int]:
    return [number for number in numbers if await found(node, number) is not None]
