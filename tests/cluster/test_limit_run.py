"""A limit of tokens a minute over whole simulated clusters, with four fifths of the clients at one node, who ask for
twice as much: however many nodes there are, whatever is lost, cut or killed."""

from __future__ import annotations

import pytest

from cluster.limits.limit_run import NEEDED, LimitCase, LimitRun

SHARE = NEEDED / LimitCase().per_minute  # of the limit, that one request may need
SLOW = pytest.mark.slow
MOST_OF_ONE = 1.03
"""The most in the worst minute of one run: chance decides which; the mean over seeds is below the goal of 1.02, which
benchmarks/limits measures."""


@pytest.mark.parametrize("nodes", [2, *[pytest.param(nodes, marks=SLOW) for nodes in (1, 4, 8, 32)]])
def test_no_minute_has_more_than_the_limit_and_nothing_is_left_while_somebody_waits(nodes: int) -> None:
    found = LimitRun(LimitCase(nodes, for_s=200.0 if nodes < 32 else 150.0), 1).go()
    assert found.served_most <= MOST_OF_ONE
    assert found.held_mean >= 0.98 - SHARE
    assert found.false < 0.01 * found.requests


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [4, 8])
def test_a_partition_of_half_a_minute_never_doubles_the_limit(nodes: int) -> None:
    found = LimitRun(LimitCase(nodes, cut_s=150.0, for_s=270.0), 2).go()
    assert found.served_most <= 1.05
    assert found.held_mean >= 0.98 - 2 * SHARE  # each side may have a remainder in which no request has room


@pytest.mark.slow
def test_a_killed_node_costs_no_more_than_its_share() -> None:
    found = LimitRun(LimitCase(4, kill_s=150.0), 1).go()
    assert found.served_most <= 1.02
    assert found.held_mean >= 0.85
