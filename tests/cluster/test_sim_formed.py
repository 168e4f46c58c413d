"""A cluster that is put there by hand is one: nobody hears anything new, and it is as able as one that came about."""

from dataclasses import replace

import pytest

from cluster.scenario import Cluster, Expect, Load, Scenario, Step
from cluster.simulation.sim_node import SimNode, sim_nodes
from cluster.simulation.sim_run import Run, simulate

CALM = Scenario(
    name="formed",
    about="nothing happens",
    for_s=6.0,
    cluster=Cluster(nodes=12, engines=2, formed=True),
    expect=Expect(agree_s=0.0, false_deaths_max=0),
    runs_on=("sim",),
)


def nodes_of(run: Run) -> list[SimNode]:
    return [host.node for host in run.world.hosts if isinstance(host.node, SimNode)]


def test_all_know_each_other_from_the_start_and_have_nothing_to_state() -> None:
    run = Run(CALM, 1, sim_nodes())
    result = run.result()
    assert result.violation is None
    assert result.measures["agreed_s"] == 0.0
    assert result.measures["node_greetings"] <= 12, "each greets its own address, which the name gave it"
    assert not any(node.peer.members.statistics().queued for node in nodes_of(run))
    assert result.measures["packets"] < 12 * 6 * 12, "no more than an idle node sends: probes, answers, digests"


def test_timers_of_idle_nodes_neither_drift_nor_spin() -> None:
    """As many probes as there are intervals, and little beside them happens at all."""
    run = Run(replace(CALM, for_s=100.0, cluster=replace(CALM.cluster, nodes=3)), 1, sim_nodes())
    assert run.result().violation is None
    for node in nodes_of(run):
        assert node.peer.members.statistics().probes == pytest.approx(100 / 0.5, abs=4)
    assert run.world.time.done < 3 * 100 * HAPPENS_PER_S


HAPPENS_PER_S = 25
"""To a node without work: four looks at the registry, two probes and two digests, and as many packets and answers."""


@pytest.mark.parametrize("nodes", [5, pytest.param(90, marks=pytest.mark.slow)])
def test_it_notices_a_death_and_reports_every_route_update(nodes: int) -> None:
    """Beyond the mesh, too, where most sessions are yet to be proved."""
    scenario = replace(
        CALM,
        for_s=10.0,
        cluster=replace(CALM.cluster, nodes=nodes),
        load=Load(chats_per_s=1.0, turns=2),
        steps=(Step(1.0, "kill", nodes=(3,)),),
        expect=Expect(failed_requests_max=0, dead_s=8.0, agree_s=8.5, learned_s=0.5, false_deaths_max=0),
    )
    result = simulate(scenario, 1, sim_nodes())
    assert result.violation is None
    assert result.measures["updates_late"] == 0
    assert result.measures["node_deaths"] == nodes - 1


def test_who_is_started_later_joins_as_ever() -> None:
    scenario = replace(
        CALM,
        cluster=replace(CALM.cluster, running=tuple(range(11))),
        steps=(Step(1.0, "start", nodes=(11,)),),
        expect=Expect(agree_s=3.0, false_deaths_max=0),
    )
    run = Run(scenario, 1, sim_nodes())
    assert run.result().violation is None
    assert all(node.peer.members.size() == 12 for node in nodes_of(run))
