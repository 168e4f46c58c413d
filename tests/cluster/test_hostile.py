"""Every hostile case against a real node; each side of its ports is a run of its own."""

from __future__ import annotations

import pytest

from cluster.hostile import SIDES, run

CASES_MIN = {"public": 150, "control": 80, "answers": 45, "polls": 30, "strangers": 30, "member": 80}


@pytest.mark.parametrize("side", SIDES)
async def test_a_node_survives_whatever_is_sent_to_it(side: str) -> None:
    report = await run(seed=1, seconds=0.0, sides=[side])
    assert report.cases[side] >= CASES_MIN[side]
    assert report.found == []
