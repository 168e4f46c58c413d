"""What routers of a replay know of the engines' caches: nothing, what answers teach, or all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ranvier_py.replay.engine.model import EngineLimits
from ranvier_py.replay.jobs import Ready, Task, execute, make_ready
from ranvier_py.replay.knowledge import KNOWLEDGE, KnowledgeName
from ranvier_py.replay.results import RunResult
from ranvier_py.replay.run import Plan, Restart
from tests.replay.knowing import pressed
from tests.replay.synthetic import BLOCK

ENGINES = 4


@cache
def ready() -> Ready:
    return make_ready(pressed(70, 6, think_s=40.0, within_s=120.0))


def working_set_tokens() -> int:
    return BLOCK * len({block for item in ready().items for block in item.request.blocks})


def replayed(knowledge: KnowledgeName, share: float = 0.25, **changed: object) -> RunResult:
    """`share`: of the working set, in all caches together."""
    limits = EngineLimits(cache_tokens=int(working_set_tokens() * share / ENGINES) // BLOCK * BLOCK, block_size=BLOCK)
    plan = replace(Plan("affinity", 1, (limits,) * ENGINES, regret=False, knowledge=knowledge), **changed)
    return execute(Task(ready(), plan), lambda: 0.0).result


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


def test_a_restart_is_known_at_once_from_its_events() -> None:
    restarts = (Restart(100.0, 0), Restart(150.0, 1))
    nothing, exact = (replayed(name, share=4.0, restarts=restarts) for name in ("estimated", "events"))
    assert overestimate(exact) < 0.005
    assert exact.failures == nothing.failures


def test_where_caches_hold_everything_knowledge_changes_nothing() -> None:
    first, *others = (replayed(name, share=4.0) for name in KNOWLEDGE)
    for other in others:
        assert other.hit_rate == pytest.approx(first.hit_rate, abs=0.005)
