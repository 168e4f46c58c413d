"""Whom the planes above membership deal with in a large cluster, and that what they say still reaches everybody."""

from __future__ import annotations

from functools import cache

import pytest

from cluster.scenario import Cluster, Scenario
from cluster.simulation.sim_node import SimNode, sim_nodes
from cluster.simulation.sim_run import Run
from ranvier_py.core.mesh.membership.live_members import GUESTS_MAX
from ranvier_py.core.mesh.membership.neighbour_set import MESH_MEMBERS_MAX
from ranvier_py.core.routing.backend_state.facts import Verdict
from tests.examples import whole

NODES, FOR_S = whole((80, 14.0), (MESH_MEMBERS_MAX + 4, 6.0))
BACKEND = 12345


@cache
def large_cluster() -> list[SimNode]:
    """Of a cluster beyond a mesh, some seconds after one node saw a backend restart."""
    assert NODES > MESH_MEMBERS_MAX
    cluster = Cluster(nodes=NODES, engines=2, spread_s=0.5)
    run = Run(Scenario("company", "more than a mesh", FOR_S, cluster=cluster), 1, sim_nodes())

    def restart(node: SimNode, now: float) -> None:
        node.peer.features.facts.observe(BACKEND, Verdict.HEALTHY, 100.0)
        node.peer.features.facts.restarted(BACKEND, 900.0)

    run.world.time.at(FOR_S / 2, lambda: run.world.hosts[7].run(restart))
    assert run.result().violation is None
    found = [host.node for host in run.world.hosts]
    return [node for node in found if isinstance(node, SimNode)]


@pytest.mark.slow
def test_a_restart_that_one_node_saw_is_known_to_all() -> None:
    """Facts go to neighbours, and on from there."""
    assert [node.peer.features.facts.of(BACKEND).generation for node in large_cluster()] == [2] * NODES


@pytest.mark.slow
def test_neighbours_have_met_and_others_are_met_by_and_by() -> None:
    """A mesh would have greeted all in the first second."""
    count = 0
    for node in large_cluster():
        neighbours = node.peer.members.neighbours
        met = {member.session for member in neighbours.acquainted()}
        assert not neighbours.is_mesh
        assert met >= set(neighbours.near())
        count += len(met)
    assert count < NODES * (NODES - 1)


@pytest.mark.slow
def test_route_updates_are_reported_on_however_few_the_neighbours_are() -> None:
    """A node with less peers than a mesh has took the cluster for one, and reported on nothing."""
    for node in large_cluster():
        assert node.peer.features.routes._outbox.relays
        assert len(node.peer.features.routes._outbox.targets) == 3


def test_routes_are_shared_with_neighbours_and_a_few_guests() -> None:
    for node in large_cluster():
        near = node.peer.members.neighbours.near()
        shared = node.peer.live_members.sharing
        assert len(near) <= len(shared) <= len(near) + GUESTS_MAX
        assert set(shared) >= set(near)


def test_who_deals_with_us_is_admitted_though_we_would_not_have_chosen_it() -> None:
    """Two nodes may see other neighbours for a moment: what one says to the other must not be lost."""
    guests = [
        set(node.peer.live_members.sharing) - set(node.peer.members.neighbours.near()) for node in large_cluster()
    ]
    assert any(guests)
    assert [node.peer.features.routes.counters.strangers for node in large_cluster()] == [0] * NODES
