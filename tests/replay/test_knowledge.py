"""What routers of a replay know of the engines' caches: nothing, what answers teach, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest

from ranvier_py.core.engine_cache.calibration.calibration import Calibration
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import Trust
from ranvier_py.replay.engine.block_cache import KeyRemoved, KeysStored
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.jobs import Ready, Task, execute, make_ready, make_run
from ranvier_py.replay.knowledge import KNOWLEDGE, Calibrated, KnowledgeName, NamedBlocks
from ranvier_py.replay.replay_nodes import Nodes
from ranvier_py.replay.replay_plan import Plan, Restart
from ranvier_py.replay.results import RunResult
from ranvier_py.replay.traces.trace import Depth, Trace, TraceRequest
from tests.builders.route_tables import route_table
from tests.replay.synthetic import BLOCK, conversation, name_of

pytestmark = pytest.mark.slow

ENGINES = 4


def pressed(chats: int, turns: int, *, think_s: float, within_s: float, seed: int = 1) -> Trace:
    """Conversations whose users think for long: caches are full of others' tokens when they come back."""
    rng = Random(seed)
    found = []
    for number in range(chats):
        begins, lengths = rng.uniform(0.0, within_s), rng.choice((2, 8, 24))
        at = begins
        for request in conversation(number, begins, rng.randint(1, turns), systems=8, turn_blocks=lengths):
            found.append(replace(request, at=at))
            at += 1.0 + rng.expovariate(1 / think_s)
    return Trace("pressed", sorted(found, key=lambda request: request.at), BLOCK, timed=True)


@cache
def ready() -> Ready:
    return make_ready(pressed(70, 6, think_s=40.0, within_s=120.0))


@cache
def large() -> Ready:
    return make_ready(pressed(250, 8, think_s=60.0, within_s=450.0))


def working_set_tokens(of: Ready) -> int:
    return BLOCK * len({block for item in of.items for block in item.request.blocks})


def plan_of(knowledge: KnowledgeName, share: float = 0.25, of: Ready | None = None, **changed: object) -> Plan:
    """`share`: of the working set, in all caches together."""
    tokens = int(working_set_tokens(of or ready()) * share / ENGINES) // BLOCK * BLOCK
    limits = EngineLimits(cache_tokens=tokens, block_size=BLOCK)
    return replace(Plan("affinity", 1, (limits,) * ENGINES, regret=False, knowledge=knowledge), **changed)


def replayed(knowledge: KnowledgeName, share: float = 0.25, **changed: object) -> RunResult:
    return execute(Task(ready(), plan_of(knowledge, share, **changed)), lambda: 0.0).result


def nodes_after(plan: Plan) -> Nodes:
    """The nodes as they are when a run is over."""
    run = make_run(Task(ready(), plan))
    run.go()
    assert isinstance(run.placer, Nodes)
    return run.placer


def overestimate(result: RunResult) -> float:
    """Share of the prompt tokens that was predicted to be cached and was not."""
    return result.predicted_hit_rate - result.hit_rate


@pytest.mark.parametrize("delay_s", [None, 0.05])
def test_of_four_nodes_each_knows_of_all_engines_what_one_of_them_read(delay_s: float | None) -> None:
    alone = replayed("events")
    four = replayed("events", nodes=4, gossip_delay_s=delay_s)
    assert overestimate(four) < 0.02
    assert four.hit_rate > alone.hit_rate - 0.03


def asked_again(seed: int, documents: int = 60, requests: int = 500) -> Trace:
    """Of long documents one is drawn each time, and what is asked of it fills no block."""
    rng = Random(seed)
    names = [[name_of(seed, number, block) for block in range(rng.randint(50, 150))] for number in range(documents)]
    found, at = [], 0.0
    for _ in range(requests):
        at += rng.expovariate(4.0)
        blocks = rng.choice(names)
        chain = [Depth(BLOCK * place, Fingerprint(name)) for place, name in enumerate(blocks, 1)]
        request = TraceRequest(at, "", "model", chain[-1].tokens + 7, 4, chain, [len(chain) - 1], tuple(blocks))
        found.append(request)
    return Trace("asked again", found, BLOCK, timed=True)


def test_four_nodes_find_in_small_caches_what_one_finds() -> None:
    """An engine keeps what was used last, by whomever: nodes that knew only of new blocks lost two points."""
    lost = 0.0
    for seed in range(3):
        again = make_ready(asked_again(seed))
        one, four = (
            execute(Task(again, plan_of("calibrated", 0.25, again, nodes=nodes)), lambda: 0.0).result.hit_rate
            for nodes in (1, 4)
        )
        lost += (one - four) / 3
    assert lost < 0.015


def test_a_trace_may_call_blocks_otherwise_than_prefix_keys() -> None:
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
def test_a_restart_begins_one_generation_however_often_it_is_seen(nodes: int) -> None:
    """In its events, then by each node's probe, then by the peers."""
    for router in nodes_after(plan_of("events", 4.0, restarts=RESTARTS, nodes=nodes)).routers:
        assert [backend.generation for backend in router.registry] == [1 + len(RESTARTS) // ENGINES] * ENGINES


# --- calibration ------------------------------------------------------------------------------------------------------


class Learned(NamedTuple):
    """What came of a run with as much known: shares of predicted, and of cached, tokens that were right."""

    hit_rate: float
    precision: float
    recall: float
    calibrations: Sequence[Calibration]

    @property
    def error(self) -> float:
        return 1 - self.precision


@cache
def learned(knowledge: KnowledgeName, share: float, policy: str = "affinity", nodes: int = 1, seed: int = 1) -> Learned:
    plan = plan_of(knowledge, share, large(), policy=policy, nodes=nodes, per_request=True, gossip_delay_s=0.05)
    plan = replace(plan, seed=seed)
    run = make_run(Task(large(), plan))
    run.go()
    assert isinstance(run.placer, Nodes)
    rows = [row for row in run.rows if "cached" in row]
    predicted = [min(row["matched"], row["prompt"] - 1) // BLOCK * BLOCK for row in rows]
    right = sum(min(tokens, row["cached"]) for tokens, row in zip(predicted, rows, strict=True))
    found = run.placer.knowledge
    return Learned(
        sum(row["cached"] for row in rows) / sum(row["prompt"] for row in rows),
        right / sum(predicted),
        right / sum(row["cached"] for row in rows),
        found.calibrations if isinstance(found, Calibrated) else (),
    )


@pytest.mark.parametrize(
    ("share", "policy", "nodes"),
    [
        (0.25, "affinity", 1),
        (0.5, "affinity", 1),
        (0.25, "ttft", 1),
        pytest.param(0.25, "affinity", 2, marks=pytest.mark.slow),
    ],
)
def test_calibration_alone_recovers_half_of_what_events_would(share: float, policy: str, nodes: int) -> None:
    """Of the tokens predicted in vain; and what is believed no more is not what would have been found."""
    nothing, calibrated, exact = (learned(each, share, policy, nodes) for each in KNOWLEDGE)
    assert nothing.error > 0.02
    assert exact.error < 0.005
    assert nothing.error - calibrated.error >= 0.5 * (nothing.error - exact.error)
    assert calibrated.recall > 0.97
    seeds = range(2, 3) if nodes > 1 else ()  # what gossip draws moves the hits of one run by a point
    rates = [
        fmean([first.hit_rate, *(learned(each, share, policy, nodes, seed).hit_rate for seed in seeds)])
        for each, first in zip(KNOWLEDGE, (nothing, calibrated, exact), strict=True)
    ]
    assert rates[1] > min(rates[0], rates[2]) - 0.01


def test_a_cache_that_holds_everything_is_never_doubted() -> None:
    nothing, calibrated = learned("estimated", 4.0), learned("calibrated", 4.0)
    assert calibrated.hit_rate == nothing.hit_rate
    assert calibrated.precision == nothing.precision > 0.999
    [view, *_] = calibrated.calibrations[0].backends().values()
    assert (view.capacity_learned_tokens, view.counters.refuted, view.biases) == (None, 0, {})
    assert view.precision == pytest.approx(1.0)


def test_the_learned_capacity_is_near_the_engines_own() -> None:
    """And nothing to complain of, since the engine's metrics name the same."""
    own = working_set_tokens(large()) * 0.25 / ENGINES
    for view in learned("calibrated", 0.25).calibrations[0].backends().values():
        assert view.capacity_learned_tokens is not None
        assert own / 2 < view.capacity_learned_tokens < 1.5 * own
        assert not view.biases
        assert view.counters.refuted > 0


def test_a_router_and_its_calibration_agree_on_the_error() -> None:
    run = learned("calibrated", 0.5)
    views = run.calibrations[0].backends().values()
    right = sum(view.counters.right_tokens for view in views)
    assert right / sum(view.counters.predicted_tokens for view in views) == pytest.approx(run.precision)
    assert right / sum(view.counters.cached_tokens for view in views) == pytest.approx(run.recall)
    assert (
        sum(view.counters.error_tokens.count for view in views)
        == sum(view.counters.answers for view in views)
        == len(large().items)
    )


def test_a_modelled_engine_is_known_exactly_by_the_table() -> None:
    routes, engine = route_table(capacity=100), BackendId(0)
    engine_caches, source, blocks = EngineCaches(routes, lambda _: 1), Source(engine, "events"), NamedBlocks(BLOCK)
    engine_caches.open(source, blocks, 0.0)
    engine_caches.set_level(source, Level.EXACT, "it is a model", 0.0)
    blocks.read(KeysStored((1, 2, 3, 4, 5), 0, np.array([], dtype=np.uint32)))
    engine_caches.changed(source, blocks.changes(), 1.0)
    chain = [(80, 5, 0), (64, 4, 0), (32, 2, 0), (16, 1, 0)]
    assert routes.match(chain, [1], 2.0) == [Holder(engine, 64, Trust.CONFIRMED)]
    routes.learn(chain, engine, 1, Trust.LOCAL, 2.0)
    blocks.read(KeyRemoved(4))
    engine_caches.changed(source, blocks.changes(), 3.0)
    assert routes.match(chain, [1], 3.0) == [Holder(engine, 32, Trust.CONFIRMED)]
