"""What policies in the shadow say of recorded traffic is what a replay of the recording finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.health import Outcome
from ranvier_py.core.routing.placement.policies import POLICIES, make_policy
from ranvier_py.core.routing.request_record import Header, record_of
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.shadow import Shadows, make_shadow
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.jobs import Task, execute, make_ready, make_run
from ranvier_py.replay.knowledge import Calibrated
from ranvier_py.replay.replay_nodes import Nodes
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import Trace
from tests.replay.synthetic import BLOCK, chats

NEAR = 0.02
ROOMY = EngineLimits(cache_tokens=200_000, block_size=BLOCK)
TIGHT = EngineLimits(cache_tokens=12_000, block_size=BLOCK)
LOOKING_NOTHING_UP = tuple(name for name in POLICIES if not make_policy(name).depths_wanted)


class Recording(Observer):
    """Keeps the line of each attempt that was answered."""

    def __init__(self) -> None:
        self.lines = [Header(0.0, BLOCK, "0" * 16).line()]
        self._answers: dict[Attempt, tuple[Boundary, Answer]] = {}

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        self._answers[attempt] = end, answer

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        end, answer = self._answers.pop(attempt, (None, NOTHING))
        self.lines.append(record_of(attempt, outcome, now, 0.0, end, answer).line())


def served_with_shadows(
    plan: Plan, trace: Trace, path: Path, policies: Sequence[str], *, stream: bool
) -> tuple[Shadows, dict[str, Any]]:
    """Serve a trace with these policies in the shadow, which draw as a replay does, and record it. Returns the shadows,
    and the measures."""
    run = make_run(Task(make_ready(trace, stream=stream), plan))
    assert isinstance(run.placer, Nodes)
    (router,), knowledge = run.placer.routers, run.placer.knowledge
    assert isinstance(knowledge, Calibrated)
    (calibration,), recording = knowledge.calibrations, Recording()
    made = [make_shadow(router, make_policy(name), RouteTable(), Random(f"{plan.seed}/0")) for name in policies]
    shadows = Shadows(made, router.registry)
    router.observers += (shadows, recording)

    class Limiting(Observer):
        """Does once a second what a node does."""

        second = 0

        def attempt_sent(self, attempt: Attempt, now: float) -> None:
            if int(now) != self.second:
                self.second = int(now)
                shadows.limit(calibration.backends())

    router.observers += (Limiting(),)
    run.go()
    path.write_bytes(b"".join(recording.lines))
    return shadows, run.tally.measures(run.span_s)


def disagreements(plan: Plan, trace: Trace, path: Path, policies: Sequence[str], *, stream: bool) -> dict[str, Any]:
    """Serve a trace by one policy beside these in the shadow. Returns those of which a replay of the recording finds
    other shares cached or saved: the shadow's, and the replay's."""
    shadows, measures = served_with_shadows(plan, trace, path, policies, stream=stream)
    ready, really = make_ready(open_trace(path), stream=stream), measures["cached_tokens"] / measures["prompt_tokens"]
    found = {}
    for shadow in shadows.shadows:
        name, own = shadow.router.policy.name, shadow.counters
        hits = execute(Task(ready, replace(plan, policy=name, speed=1.0)), lambda: 0.0).result.hit_rate
        cached, saved = own.predicted_tokens / own.prompt_tokens, own.saved_tokens / own.prompt_tokens
        if abs(cached - hits) > NEAR or abs(saved - (hits - really)) > NEAR:
            found[name] = (cached, saved), (hits, hits - really)
    return found


@pytest.mark.parametrize(("real", "stream"), [("round_robin", True), ("affinity", False)])
def test_a_shadow_saves_what_a_replay_of_the_recording_saves(real: str, stream: bool, tmp_path: Path) -> None:
    plan = Plan(real, 1, (ROOMY,) * 4, regret=False)
    trace = chats(40, turns=6, within_s=120.0)
    assert disagreements(plan, trace, tmp_path / "node.jsonl", tuple(POLICIES), stream=stream) == {}


def test_a_shadow_believes_in_no_more_cache_than_the_engines_have(tmp_path: Path) -> None:
    """With caches of a tenth of all prompts half of what was served before is gone."""
    plan = Plan("round_robin", 1, (TIGHT,) * 4, regret=False, speed=0.05)
    trace = chats(100, turns=6)
    assert disagreements(plan, trace, tmp_path / "node.jsonl", LOOKING_NOTHING_UP, stream=True) == {}
