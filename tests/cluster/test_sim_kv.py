"""Simulated engines that tell what they hold: hit rates while they can't be heard, losses, nothing told of tokens."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from cluster.scenario import Cluster, Expect, Load, Scenario, ScenarioError, Step, check, load_scenario
from cluster.simulation.sim_engine import ChatTokens
from cluster.simulation.sim_node import sim_nodes
from cluster.simulation.sim_run import Run, simulate
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.peers import ownership
from ranvier_py.core.engine_cache.peers.snapshot_transfer import SNAPSHOTS
from ranvier_py.core.mesh.transfer import TransferPart
from ranvier_py.core.mesh.wire.codec import Codec
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.routing.peers.route_messages import RouteUpdates
from ranvier_py.core.routing.peers.route_updates import REMOVED, kind_of
from ranvier_py.replay.engine.block_cache import TokenIds

POINTS = 0.05
SEEDS = range(2, 20) if "RANVIER_SOAK" in os.environ else (2,)

QUICK = Scenario(
    name="kv_quick",
    about="three engines, a small cache",
    for_s=26.0,
    cluster=Cluster(nodes=3, engines=3, events=True, cache_blocks=600),
    load=Load(chats_per_s=2.5, turns=4),
    expect=Expect(same_routes_s=9.0, one_reader=True, exact=True, wrong_share_max=0.01, unknown_share_max=0.02),
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["kv_publisher_dead", "kv_garbage", "kv_owner_killed_rolled"])
def test_engines_that_cannot_be_received_cost_less_than_five_points_of_hits(name: str) -> None:
    """Against the same chats with all of them heard; and while it lasts, not only on the whole."""
    scenario = load_scenario(name)
    nothing = tuple(Step(at_s=step.at_s, do="heal", for_s=step.for_s) for step in scenario.steps)
    received = simulate(replace(scenario, steps=nothing, expect=Expect(same_routes_s=12.0)), 1, sim_nodes())
    unheard = simulate(scenario, 1, sim_nodes())
    assert unheard.violation is None
    assert unheard.measures["kv_exact"] < unheard.measures["kv_readers"] or name == "kv_owner_killed_rolled"
    for share in ("hit_share", "hit_share_during", "hit_share_after"):
        if received.measures[share] is not None:  # a kill is over at once
            assert unheard.measures[share] > received.measures[share] - POINTS, share


def test_of_a_version_whose_events_nobody_knows_what_traffic_teaches_is_believed() -> None:
    """What such an engine does not tell is not taken for not held; and rolled back, it is known exactly again."""
    scenario = load_scenario("kv_strange")
    assert simulate(scenario, 1, sim_nodes()).violation is None
    (step,) = scenario.steps
    forward = replace(scenario, for_s=28.0, steps=(replace(step, for_s=60.0),), expect=Expect(unknown_share_max=0.05))
    result = simulate(forward, 1, sim_nodes())
    assert result.violation is None
    assert result.measures["kv_exact"] == 1, "the engine that was not replaced"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss", [0.0, 0.01, 0.2])
def test_all_nodes_know_the_engine_cache_whatever_gets_lost_before_the_end(seed: int, loss: float) -> None:
    steps = (Step(at_s=3.0, do="events_loss", engines="all", loss=loss, for_s=10.0),) if loss else ()
    result = simulate(replace(QUICK, steps=steps), seed, sim_nodes())
    assert result.violation is None
    assert result.measures["kv_exact"] == 3
    assert result.measures["kv_subscribers_most"] == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_who_stood_by_reads_on_exactly_long_after_the_replay_buffer_rolled(seed: int) -> None:
    """And no reader is DEGRADED for a moment."""
    run = Run(load_scenario("kv_standby"), seed, sim_nodes())
    result = run.result()
    assert result.violation is None
    found = [host.node.streams for host in run.world.hosts if host.node is not None]
    assert sum(streams.degraded for streams in found if streams is not None) == 0
    assert result.measures["kv_subscribers_most"] <= 3


def test_five_seconds_after_the_death_all_is_known_again_while_chats_go_on() -> None:
    """Of which two or three go by until it is noticed. What lately changed is on its way."""
    soon = Expect(one_reader=True, exact=True, wrong_share_max=0.02, unknown_share_max=0.03)
    result = simulate(replace(load_scenario("kv_standby"), for_s=45.0, expect=soon), 1, sim_nodes())
    assert result.violation is None


def test_without_a_standby_the_same_death_is_not_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "SUBSCRIBERS", 1)
    result = simulate(load_scenario("kv_standby"), 2, sim_nodes())
    assert result.violation is not None
    assert result.violation.invariant == "L9"


def test_steps_of_events_need_engines_that_publish() -> None:
    wrong = replace(QUICK, cluster=Cluster(nodes=3), steps=(Step(at_s=1.0, do="events_cut", engines="all"),))
    with pytest.raises(ScenarioError, match="events = true"):
        check(wrong, "test")


MARKS = np.arange(1, 65, dtype=np.uint32) * np.uint32(0x01030107) + np.uint32(0x6B000000)


def run_with_marks(seed: int, patch: pytest.MonkeyPatch) -> Run:
    """Engines with small caches drop prefixes all the time, and later chats bring many of them back."""

    def drawn(self: ChatTokens, tokens: int) -> TokenIds:
        return MARKS[self._rng.choices(range(len(MARKS)), k=tokens)]

    patch.setattr(ChatTokens, "drawn", drawn)
    scenario = load_scenario("kv_late_joiner")
    return Run(replace(scenario, cluster=replace(scenario.cluster, cache_blocks=400)), seed, sim_nodes())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 14, 33])
def test_no_row_that_crossed_its_removal_stays_at_one_node(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first two, a copied table and an update that came by way of another node brought one back."""
    run = run_with_marks(seed, monkeypatch)
    assert run.result().violation is None
    assert sum(host.node.router.routes.counters.overtaken for host in run.world.hosts if host.node) > 0


@pytest.fixture(scope="module")
def reported() -> tuple[list[tuple[Message, bytes]], list[bytes]]:
    """All messages of a cluster in which every token is a mark, with their bodies; and the marks."""
    reported: list[tuple[Message, bytes]] = []
    encode = Codec.encode

    def recorded(self: Codec, message: Message, *version: int) -> tuple[int, bytes]:
        kind, body = encode(self, message, *version)
        reported.append((message, body))
        return kind, body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Codec, "encode", recorded)
        run = run_with_marks(2, patch)
        assert run.result().violation is None
        assert Level.EXACT in {
            streams.level(0) for host in run.world.hosts if host.node and (streams := host.node.streams)
        }
    return reported, [
        order for mark in MARKS.tolist() for order in (mark.to_bytes(4, "little"), mark.to_bytes(4, "big"))
    ]


def test_no_token_id_is_in_any_message_between_nodes(reported: tuple[list[tuple[Message, bytes]], list[bytes]]) -> None:
    """Route updates, removals, tables, copies: searched in every alignment, before they are sealed."""
    messages, marks = reported
    given = [message.what for message, _ in messages if isinstance(message, TransferPart)]
    assert given.count(SNAPSHOTS.what) > 1
    route_updates = [
        entry.route_update for message, _ in messages if isinstance(message, RouteUpdates) for entry in message.entries
    ]
    assert sum(kind_of(update) == REMOVED for update in route_updates) > 10
    assert len(route_updates) > sum(kind_of(update) == REMOVED for update in route_updates) + 100
    for message, body in messages:
        found = [mark for mark in marks if mark in body]
        assert not found, (type(message), found)


def test_removals_are_a_small_part_of_what_is_reported(
    reported: tuple[list[tuple[Message, bytes]], list[bytes]],
) -> None:
    """The budget of routes is for both; nobody is told anything twice for the sake of streams."""
    messages, _ = reported
    route_updates = [
        entry.route_update for message, _ in messages if isinstance(message, RouteUpdates) for entry in message.entries
    ]
    removed = sum(len(route_update) for route_update in route_updates if kind_of(route_update) == REMOVED)
    assert removed < 0.35 * sum(map(len, route_updates))
