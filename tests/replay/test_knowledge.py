"""What routers of a replay know of the engines' caches: nothing, what answers teach, or all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ranvier_py.replay.engine.model import EngineLimits, EngineModel
from ranvier_py.replay.jobs import Ready, Task, execute, make_placer, make_ready
from ranvier_py.replay.knowledge import EVENTS_MAX, KNOWLEDGE, KnowledgeName
from ranvier_py.replay.replay_nodes import Nodes
from ranvier_py.replay.replay_run import Plan, Restart, Run, arrivals_of
from ranvier_py.replay.results import RunResult
from tests.replay.knowing import pressed
from tests.replay.synthetic import BLOCK

ENGINES = 4


@cache
def ready() -> Ready:
    return make_ready(pressed(70, 6, think_s=40.0, within_s=120.0))


def working_set_tokens() -> int:
    return BLOCK * len({block for item in ready().items for block in item.request.blocks})


def plan_of(knowledge: KnowledgeName, share: float = 0.25, **changed: object) -> Plan:
    """`share`: of the working set, in all caches together."""
    limits = EngineLimits(cache_tokens=int(working_set_tokens() * share / ENGINES) // BLOCK * BLOCK, block_size=BLOCK)
    return replace(Plan("affinity", 1, (limits,) * ENGINES, regret=False, knowledge=knowledge), **changed)


def replayed(knowledge: KnowledgeName, share: float = 0.25, **changed: object) -> RunResult:
    return execute(Task(ready(), plan_of(knowledge, share, **changed)), lambda: 0.0).result


def nodes_after(plan: Plan) -> Nodes:
    """The nodes as they are when a run is over."""
    engines = [EngineModel(replace(limits, cache_events_max=EVENTS_MAX)) for limits in plan.engines]
    nodes = make_placer(plan, engines, ready().summary.block_tokens)
    assert isinstance(nodes, Nodes)
    Run(plan, ready().items, arrivals_of(ready().items, plan.speed), engines, nodes).go()
    return nodes


def overestimate(result: RunResult) -> float:
    """Share of the prompt tokens that was believed cached and was not."""
    return result.predicted_hit_rate - result.hit_rate


def test_the_more_is_told_the_less_is_believed_in_vain() -> None:
    nothing, calibrated, exact = (overestimate(replayed(name)) for name in KNOWLEDGE)
    assert nothing > 0.02
    assert calibrated < nothing - 0.5 * (nothing - exact)
    assert exact < 0.005


@pytest.mark.parametrize("delay_s", [None, 0.05])
def test_of_four_nodes_each_knows_of_all_engines_what_one_of_them_heard(delay_s: float | None) -> None:
    alone = replayed("events")
    four = replayed("events", nodes=4, gossip_delay_s=delay_s)
    assert overestimate(four) < 0.02
    assert four.hit_rate > alone.hit_rate - 0.03


def test_a_trace_may_call_blocks_otherwise_than_stops() -> None:
    """As chats do: engines name blocks, routers fingerprint prefixes. Events would withdraw every claim."""
    trace = pressed(20, 4, think_s=20.0, within_s=60.0)
    renamed = [
        replace(request, blocks=tuple(block ^ 1 << 60 for block in request.blocks)) for request in trace.requests
    ]
    plan = plan_of("events")
    alike, otherwise = (
        execute(Task(make_ready(replace(trace, requests=requests)), plan), lambda: 0.0).result
        for requests in (trace.requests, renamed)
    )
    assert otherwise == alike
    assert overestimate(alike) < 0.005


RESTARTS = tuple(Restart(60.0 + 3 * number, number % ENGINES) for number in range(12))


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_restart_is_known_at_once_from_its_events(nodes: int) -> None:
    """A new process has another cache: whoever goes on reading the old one holds everything for warm that it had."""
    nothing, exact = (replayed(name, 4.0, restarts=RESTARTS, nodes=nodes) for name in ("estimated", "events"))
    assert abs(overestimate(exact)) < 0.003
    assert exact.hit_rate > nothing.hit_rate - 0.005
    assert exact.failed > 0


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_restart_begins_one_epoch_however_many_ways_it_is_seen(nodes: int) -> None:
    """Its events tell of it, then each node's probe, then the peers."""
    for router in nodes_after(plan_of("events", 4.0, restarts=RESTARTS, nodes=nodes)).routers:
        assert [backend.generation for backend in router.registry] == [1 + len(RESTARTS) // ENGINES] * ENGINES


def test_where_caches_hold_everything_knowledge_changes_nothing() -> None:
    first, *others = (replayed(name, share=4.0) for name in KNOWLEDGE)
    for other in others:
        assert other.hit_rate == pytest.approx(first.hit_rate, abs=0.005)
