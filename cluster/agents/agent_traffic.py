"""Sends a shape to routers as its agent did: each request at its time, but not before the one before it is answered.

The requests of one task and kind follow one another. Other tasks, titles and sub-agents run beside them. The first
requests of tasks are spread in time even if they were recorded at once, since this measures whether agents find what
was computed for them, not how equal first prompts are spread. Each request goes to the next router in turn, which is
the worst that DNS can do to a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import trio

from cluster.agents.agent_shapes import AgentRequest
from cluster.agents.engine_fleet import EngineFleet, Reuse, reuse_of

SPEED = 10.0
"""How many times faster than recorded: the engines here have no prefill, and their answers are short."""

THINK_S = 0.4
"""Least time between an answer and the next request, in which agents run a tool or wait for their user. Even on a busy
machine all nodes have learned of the answer by then."""

APART_S = 2.0
"""Between the first requests of two tasks: more than the longest first prompt and its update to all nodes take."""

TIMEOUT_S = 60.0


class RequestRefused(Exception):
    """A router or an engine answered with an error; a replay needs every request served."""


async def replayed(fleet: EngineFleet, requests: Sequence[AgentRequest], urls: Sequence[str]) -> Reuse:
    """Send these requests to engines with empty caches; return the reuse. Raises RequestRefused, httpx.HTTPError."""
    fleet.forget()
    fleet.tasks = {fleet.prompt_key(request.path, request.body): request.task for request in requests}
    tasks_in_order = list(dict.fromkeys(request.task for request in requests))
    limits = httpx.Limits(max_keepalive_connections=0)  # no connection is reused, as if the name were resolved anew
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits) as http:
        done: dict[tuple[str, str], trio.Event] = {}
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number, request in enumerate(requests):
                before, ended = done.get((request.task, request.kind)), trio.Event()
                done[request.task, request.kind] = ended
                at = began + request.at / SPEED + APART_S * tasks_in_order.index(request.task)
                nursery.start_soon(sent, http, urls[number % len(urls)], request, at, before, ended)
    return reuse_of(fleet.asked)


async def sent(
    http: httpx.AsyncClient, url: str, request: AgentRequest, at: float, before: trio.Event | None, ended: trio.Event
) -> None:
    if before is not None:
        await before.wait()
        await trio.sleep(THINK_S)
    await trio.sleep_until(at)
    answer = await http.post(f"{url}{request.path}", content=request.body, headers=list(request.headers))
    if answer.status_code != 200:
        raise RequestRefused(f"{request.path}: {answer.status_code} {answer.text[:300]}")
    ended.set()
