"""When a node, or its network, is unwell, it asks more slowly and believes more slowly."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.mesh.membership.profile import LAN, WAN, LocalHealth


def test_interval_and_time_out_stretch_eightfold() -> None:
    health = LocalHealth(LAN)
    assert (health.interval_s, health.timeout_s) == (0.5, 0.2)
    health.worse(3)
    assert health.interval_s == 2.0
    assert health.timeout_s == pytest.approx(0.8)
    health.worse(100)
    assert (health.score, health.interval_s) == (7, 4.0)
    for _ in range(10):
        health.better()
    assert (health.score, health.interval_s) == (0, 0.5)


def settled(share_of_help: float, seed: int, probes: int = 400) -> LocalHealth:
    health, rng = LocalHealth(LAN), Random(seed)
    for _ in range(probes):
        health.answered(rng.random() < share_of_help)
    return health


def test_a_network_that_loses_a_tenth_is_probed_as_fast_as_any() -> None:
    """Or a crash would be noticed four times as late."""
    assert not any(settled(1 - 0.9**2, seed).strained for seed in range(100))


def test_the_plain_profile_comes_back_and_does_not_flutter() -> None:
    health = settled(0.5, 1)
    rng = Random(2)
    changes = 0
    for _ in range(500):
        before = health.strained
        health.answered(rng.random() < 0.02)
        changes += health.strained is not before
    assert (health.strained, changes) == (False, 1)


def test_the_wan_profile_has_memberlists_numbers() -> None:
    numbers = (WAN.probe_interval_s, WAN.probe_timeout_s, WAN.suspicion_mult, WAN.gossip_interval_s, WAN.gossip_fanout)
    assert numbers == (5.0, 3.0, 6, 0.5, 4)
    assert WAN.probe_timeout_s + WAN.nack_after_s < WAN.probe_interval_s
    assert LAN.probe_timeout_s + LAN.nack_after_s < LAN.probe_interval_s


def test_push_pull_slows_down_with_the_cluster() -> None:
    """memberlist's util.go: doubled beyond 32, tripled beyond 64, and so on."""
    assert [LAN.exchange_s(members) for members in (1, 32, 33, 64, 65, 1000)] == [30, 30, 60, 60, 90, 180]
