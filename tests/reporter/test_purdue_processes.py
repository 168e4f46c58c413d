"""The benchmark of the Purdue report on real processes: a node, two engines, a reporter beside each.

The report names four states and shows no number. Here each is checked, and so is what it promises where a router is
killed. Of reports that are lost, and of their sizes, see test_event_relay.py.
"""

from __future__ import annotations

import pytest
import trio

from tests.reporter.purdue_lab import WORKERS, Lab, purdue_lab

pytestmark = pytest.mark.slow

DEADLINE_S = 240.0  # five processes start, each of which loads a library or two, where ten others do, too
PROMPT = list(range(200))
BLOCKS = len(PROMPT) // 16


def other(worker: str) -> str:
    return WORKERS[1 - WORKERS.index(worker)]


async def load(lab: Lab, nursery: trio.Nursery, worker: str) -> list[trio.CancelScope]:
    """Requests that stay, until this worker has more of them than the other."""
    counts, scopes = dict.fromkeys(WORKERS, 0), []
    number = 0
    while counts[worker] <= counts[other(worker)]:
        number += 1
        served, scope = await nursery.start(lab.stay, list(range(5000 * number, 5000 * number + 100)))
        counts[served] += 1
        scopes.append(scope)
    return scopes


async def test_pu9_pu10_the_four_states_then_a_killed_router_on_real_processes() -> None:
    async with purdue_lab(DEADLINE_S) as lab:
        await lab.start_all("--policy", "sticky_least_loaded")
        await lab.exact()

        first, reason = await lab.ask(PROMPT)
        assert reason == "miss", "1 cold start: nobody holds it, and the claim is made at once"
        await lab.until(lambda workers: workers[first]["hashes"] >= BLOCKS)  # and the worker says so

        async with trio.open_nursery() as nursery:
            scopes = await load(lab, nursery, first)
            assert await lab.ask([*PROMPT[:64], 9, 9, 9]) == (first, "hit"), "2 stickiness: the other one is idler"
            await lab.fill(first)
            await lab.known(PROMPT)  # 3 eviction: memory pressure is reported
            assert await lab.ask(PROMPT) == (other(first), "miss"), "4 recovery: another worker takes it"
            await lab.known(PROMPT, other(first))
            assert await lab.ask(PROMPT) == (other(first), "hit")
            for scope in scopes:
                scope.cancel()

        holder = other(first)
        assert lab.node is not None
        lab.node.kill()
        await lab.node.wait()
        await lab.start_node()
        await lab.exact()
        await lab.until(lambda workers: workers[holder]["hashes"] >= BLOCKS)
        async with trio.open_nursery() as nursery:
            scopes = await load(lab, nursery, holder)
            assert await lab.ask(PROMPT) == (holder, "hit"), "by what the worker reported alone: no request came before"
            for scope in scopes:
                scope.cancel()


async def test_px2_px8_events_are_known_exactly_and_reported_anew_after_a_restart() -> None:
    """A node alone makes its key up when it starts, so that nothing of before has a meaning to it."""
    async with purdue_lab(DEADLINE_S) as lab:
        await lab.start_all()
        await lab.exact()
        first, _ = await lab.ask(PROMPT)
        await lab.until(lambda workers: workers[first]["hashes"] >= BLOCKS)
        claims = (await lab.see("/admin/routes"))["claims"]
        assert claims["confirmed"] >= 5, "a claim at each anchor of the prompt"
        for worker in WORKERS:
            await lab.fill(worker)
        await lab.known(PROMPT)  # the removals have come, however late
        first, reason = await lab.ask(PROMPT)
        assert reason != "affinity", "it was evicted, and nobody believes otherwise"
        await lab.exact()
        assert lab.node is not None
        lab.node.kill()
        await lab.node.wait()
        await lab.start_node()
        await lab.exact()
        await lab.known(PROMPT, first)
        assert await lab.ask(PROMPT) == (first, "affinity")
