"""What answers count that no engine computes for their request: those of the response cache and of a request that waits
for an equal one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.node.access.key_lab import CHAT, RED, asked, bearer
from tests.node.access.test_limits_of_requests import BODIES, SHORT, counted, limited, used
from tests.node.node_lab import Node
from tests.node.test_cached_responses import until_in_flight
from tests.proxy.wire import Scripted, answer


async def test_hits_of_the_response_cache_are_requests_without_tokens(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(100, 50)))
    settings = {"response_cache": True}
    limits = {"requests_per_minute": 3, "tokens_per_minute": 100_000}
    async with limited(tmp_path, engine, settings=settings, **limits) as node:
        answers = [await asked(node, bearer(RED), temperature=0) for _ in range(4)]
        assert [one.status_code for one in answers] == [200, 200, 200, 429]
        assert [one.headers.get("x-cache") for one in answers[:3]] == ["MISS", "HIT", "HIT"]
        limit = (await node.ask("/admin/access"))["limits"]["key red"]["limits"]
        assert {one["limit"]: one["used"] for one in limit} == {"requests per minute": 3, "tokens per minute": 150}
    assert len(engine.heads) == 1


async def test_who_waits_for_an_equal_request_is_a_request_without_tokens(tmp_path: Path) -> None:
    go_on = trio.Event()
    engine = Scripted(go_on, answer(counted(100, 50)))
    limits = {"requests_per_minute": 9, "tokens_per_minute": 100_000}
    async with limited(tmp_path, engine, settings={"response_cache": True}, **limits) as node:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(partial(asked, node, bearer(RED), temperature=0))
            await until_in_flight(node, 4)
            go_on.set()
        assert used(await node.ask("/admin/access")) == {"requests per minute": (4, 0), "tokens per minute": (150, 0)}
    assert len(engine.heads) == 1


PRICED = {"name": "lab-model", "cost": {"input": 2, "output": 4, "cached_answers": 0.1}}
"""An answer of 100 and 50 tokens costs 400, one that no engine computes 40."""


@asynccontextmanager
async def priced(folder: Path, engine: Scripted, amount: int) -> AsyncIterator[Node]:
    """A node where RED has a budget of cost, and answers of the response cache have their price."""
    tenant = f'budget = [{{amount = {amount}, window = "hour", unit = "cost"}}]\ntokens_per_minute = 100000'
    async with limited(folder, engine, settings={"response_cache": True, "model": [PRICED]}, tenant=tenant) as node:
        yield node


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_a_hit_costs_the_share_that_its_model_names(tmp_path: Path, path: str) -> None:
    engine = Scripted(answer(BODIES[path]))
    asks = {"model": "lab-model", "messages": SHORT, "input": "a", "max_tokens": 8, "temperature": 0, "store": False}
    async with priced(tmp_path, engine, 100_000) as node:
        for _ in range(3):
            assert (await asked(node, bearer(RED), path, json.dumps(asks).encode())).status_code == 200
        taken = used(await node.ask("/admin/access"), "tenant acme")
        assert taken == {"cost per hour": (480, 0), "tokens per minute": (150, 0)}
    assert len(engine.heads) == 1


async def test_who_waits_for_an_equal_request_pays_the_share_of_what_it_costs(tmp_path: Path) -> None:
    go_on = trio.Event()
    engine = Scripted(go_on, answer(counted(100, 50)))
    async with priced(tmp_path, engine, 100_000) as node:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(partial(asked, node, bearer(RED), temperature=0))
            await until_in_flight(node, 4)
            go_on.set()
        taken = used(await node.ask("/admin/access"), "tenant acme")
        assert taken == {"cost per hour": (520, 0), "tokens per minute": (150, 0)}
    assert len(engine.heads) == 1


async def test_a_hit_beyond_a_budget_of_cost_is_refused_if_it_has_a_price(tmp_path: Path) -> None:
    """The first may cost 400 and as much again for its answer's length; two hits of 40 are left."""
    async with priced(tmp_path, Scripted(answer(counted(100, 50))), 490) as node:
        answers = [await asked(node, bearer(RED), temperature=0, messages=SHORT, max_tokens=20) for _ in range(4)]
        assert [one.status_code for one in answers] == [200, 200, 200, 429]
        assert answers[-1].json()["error"]["code"] == "insufficient_quota"
        assert used(await node.ask("/admin/access"), "tenant acme")["cost per hour"] == (480, 0)


async def test_hits_are_requests_for_the_limits_of_their_model(tmp_path: Path) -> None:
    models = '[[tenant.model_limits]]\nmodels = "lab-*"\nrequests_per_minute = 2\n'
    async with limited(
        tmp_path, Scripted(answer(counted(1, 1))), settings={"response_cache": True}, tenant=models
    ) as node:
        answers = [await asked(node, bearer(RED), temperature=0) for _ in range(3)]
        assert [one.status_code for one in answers] == [200, 200, 429]
