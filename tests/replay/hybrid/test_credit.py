"""What routers credit hybrid models' engines with, against what these reuse."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.presets import PROFILES, preset
from ranvier_py.replay.jobs import Done, Task, execute, make_ready
from ranvier_py.replay.knowledge import KnowledgeName
from ranvier_py.replay.replay_plan import Plan
from tests.replay.synthetic import BLOCK, chats

READY = make_ready(chats(turns=8))
ENGINES = 4
SHARE = 0.98


def replayed(
    limits: EngineLimits, policy: str = "affinity", knowledge: KnowledgeName = "calibrated", nodes: int = 1
) -> Done:
    plan = Plan(policy, nodes, (limits,) * ENGINES, regret=False, per_request=True, knowledge=knowledge)
    return execute(Task(READY, plan), lambda: 0.0)


def shares(done: Done) -> tuple[float, float]:
    """Of what was predicted the part that was reused, and of what was reused the part that was predicted."""
    rows = [orjson.loads(line) for line in done.lines.splitlines()]
    right = sum(min(row["matched"], row["cached"]) for row in rows)
    return right / sum(row["matched"] for row in rows), right / sum(row["cached"] for row in rows)


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "attention"])
def test_what_is_credited_is_what_an_engine_with_room_reuses(name: str) -> None:
    limits = preset(name.replace("_", "-"), BLOCK)
    precision, recall = shares(replayed(replace(limits, cache_tokens=4_000_000)))
    assert precision >= SHARE
    assert recall >= SHARE


@pytest.mark.parametrize("cache_tokens", [4_000_000, 28_000])
@pytest.mark.parametrize("name", ["vllm-align", "vllm-all"])
def test_what_events_of_states_bring_is_exact_even_where_room_is_short(name: str, cache_tokens: int) -> None:
    limits = replace(preset(name, BLOCK), cache_tokens=cache_tokens)
    precision, recall = shares(replayed(limits, knowledge="events"))
    assert precision >= SHARE
    assert recall >= SHARE


@pytest.mark.slow
def test_four_nodes_credit_what_each_of_them_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: by gossip alone."""
    limits = replace(preset("vllm-align", BLOCK), cache_tokens=4_000_000)
    precision, recall = shares(replayed(limits, nodes=4))
    assert min(precision, recall) >= SHARE
    monkeypatch.setattr(Checkpoints, "take", lambda *_: False)
    assert shares(replayed(limits, nodes=4))[1] < SHARE - 0.1


@pytest.mark.parametrize("policy", ["affinity", "ttft", "kv_score"])
def test_before_attention_engines_every_integer_is_the_same(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever checkpoints would do: nothing of it is done."""
    limits = preset("attention", BLOCK)
    ours = replayed(limits, policy)
    for name in ("credited", "_learn"):
        monkeypatch.setattr(Checkpoints, name, None)
    assert replayed(limits, policy) == ours
