"""Purdue's life cycle of a prefix (cold start, stickiness, eviction, recovery) as a replay, judged by the engines."""

from __future__ import annotations

import orjson
import pytest

from ranvier_py.core.ids import Fingerprint
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.jobs import Task, execute, make_ready
from ranvier_py.replay.knowledge import KnowledgeName
from ranvier_py.replay.replay_plan import Plan, Restart
from ranvier_py.replay.traces.trace import Depth, Trace, TraceRequest
from tests.replay.synthetic import BLOCK, name_of

PREFIX_BLOCKS = 8
CACHE_BLOCKS = 64
LIMITS = EngineLimits(cache_tokens=CACHE_BLOCKS * BLOCK, block_size=BLOCK)
PRESSURE_S, AFTER_S = 10.0, 30.0


def asked(at: float, session: str, blocks: int, prefix: str = "") -> TraceRequest:
    """A request whose first blocks are those of `prefix`, and the others its own."""
    names = [
        name_of(prefix if prefix and index < PREFIX_BLOCKS else session, prefix and index < PREFIX_BLOCKS, index)
        for index in range(blocks)
    ]
    return TraceRequest(
        at=at,
        session=session,
        model="model",
        prompt_tokens=blocks * BLOCK + 5,
        answer_tokens=20,
        chain=[Depth((index + 1) * BLOCK, Fingerprint(name)) for index, name in enumerate(names)],
        ends=[blocks - 1],
        blocks=tuple(names),
    )


def rows(*requests: TraceRequest, knowledge: KnowledgeName, restarts: tuple[Restart, ...] = ()) -> dict[str, dict]:
    """What became of each request, by its session."""
    ready = make_ready(Trace("states", sorted(requests, key=lambda each: each.at), BLOCK, timed=True))
    plan = Plan(
        "sticky_least_loaded", 1, (LIMITS,) * 2, regret=False, per_request=True, knowledge=knowledge, restarts=restarts
    )
    lines = execute(Task(ready, plan), lambda: 0.0).lines.splitlines()
    return {row["session"]: row for row in map(orjson.loads, lines)}


def four_states(cause: str) -> dict[str, dict]:
    begun = [asked(0.0, "cold", 10, "hot"), asked(4.0, "sticky", 10, "hot")]
    ended = [asked(AFTER_S, "evicted", 10, "hot"), asked(AFTER_S + 4.0, "recovered", 10, "hot")]
    if cause == "eviction":
        pressure = [asked(PRESSURE_S + number * 0.2, f"other-{number}", 30) for number in range(40)]
        return rows(*begun, *pressure, *ended, knowledge="events")
    return rows(*begun, *ended, knowledge="estimated", restarts=(Restart(PRESSURE_S, 0), Restart(PRESSURE_S, 1)))


@pytest.mark.parametrize("cause", ["eviction", "restart"])
def test_a_prefix_goes_through_the_four_states_of_the_report(cause: str) -> None:
    reported = four_states(cause)
    cold, sticky, evicted, recovered = (reported[name] for name in ("cold", "sticky", "evicted", "recovered"))
    assert (cold["reason"], cold["cached"]) == ("miss", 0)
    assert (sticky["reason"], sticky["cached"]) == ("hit", PREFIX_BLOCKS * BLOCK)
    assert sticky["engine"] == cold["engine"]
    assert (evicted["reason"], evicted["cached"]) == ("miss", 0)
    assert (recovered["reason"], recovered["cached"]) == ("hit", PREFIX_BLOCKS * BLOCK)
    assert recovered["engine"] == evicted["engine"]


def test_without_pressure_the_prefix_stays() -> None:
    """What the test above shows is the pressure's doing, and not that of time."""
    calm = rows(asked(0.0, "cold", 10, "hot"), asked(AFTER_S, "late", 10, "hot"), knowledge="events")
    assert (calm["late"]["reason"], calm["late"]["cached"]) == ("hit", PREFIX_BLOCKS * BLOCK)
