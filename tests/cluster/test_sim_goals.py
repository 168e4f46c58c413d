"""What ten simulated nodes reach and cost, as the goals say: in virtual time, where a slow machine changes nothing."""

from __future__ import annotations

import pytest

from benchmarks.convergence import scenario_of
from cluster.simulation.sim_node import sim_nodes
from cluster.simulation.sim_run import simulate

PEERS = 9


def test_ten_nodes_cost_a_kilobyte_a_second_and_peer_while_one_starts_and_one_dies() -> None:
    """Each change makes all compare their tables, six times each: 28 kB a second, as long as whole sums were sent."""
    measures = simulate(scenario_of(10, 0.0, 20.0, 0.0), 1, sim_nodes()).measures
    sent = sum(measures[f"{plane}_bytes_per_node_s"] for plane in ("datagram", "probe", "bulk"))
    assert sent < 2000
    assert sent / PEERS < 1000 / 3


@pytest.mark.parametrize(("chats_per_s", "bytes_most"), [(4.0, 115), pytest.param(40.0, 95, marks=pytest.mark.slow)])
def test_a_turn_is_usable_everywhere_within_its_time_and_bytes(chats_per_s: float, bytes_most: int) -> None:
    """On real processes 100 ms are for this and for the machine.

    From formed on: what is learned while nodes still meet comes up to 0.3 s later, to chance's share of the route
    updates.
    """
    measures = simulate(scenario_of(10, 0.0, 12.0, chats_per_s, formed=True), 1, sim_nodes()).measures
    assert measures["learned_t50_s"] < 0.062
    assert measures["learned_t99_s"] < 0.07
    assert measures["updates_late"] == 0
    assert measures["route_bytes_per_turn_and_peer"] < bytes_most
