"""Every hostile case against a real node; each of its ports is a run of its own."""

from __future__ import annotations

import pytest

from cluster.hostile import SIDES, run

CASES_MIN = {"public": 150, "control": 80, "answers": 45, "polls": 30, "strangers": 30, "member": 80}
PORTS = {"public": ("public", "answers"), "control": ("control", "polls"), "gossip": ("strangers", "member")}
assert sorted(CASES_MIN) == sorted(SIDES)


@pytest.mark.parametrize("port", PORTS)
async def test_a_node_survives_whatever_is_sent_to_it(port: str) -> None:
    report = await run(seed=1, seconds=0.0, sides=PORTS[port])
    assert all(report.cases[side] >= CASES_MIN[side] for side in PORTS[port])
    assert report.found == []
