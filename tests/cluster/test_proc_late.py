"""A machine that loads processes slowly makes a run longer, and never ends it before its steps are carried out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from cluster.proc_net import Way
from cluster.proc_steps import Steps
from cluster.processes import LATE_S_MAX, LOADING_S, LOOK_S, Options, Run
from cluster.scenario import Scenario, Step

FOR_S = 60.0


class Loads:
    """Steps of which the only one starts a process."""

    def __init__(self, run: Run, begins_s: float, takes_s: float) -> None:
        self.run_ = run
        self.begins_s = begins_s
        self.takes_s = takes_s
        self.loading: dict[str, float] = {}

    async def run(self, _steps: Sequence[Step]) -> None:
        await trio.sleep(self.begins_s)
        self.loading["n1"] = self.run_.clock()
        await trio.sleep(self.takes_s)
        del self.loading["n1"]


def lasted(folder: Path, begins_s: float, takes_s: float) -> tuple[float, float, float]:
    """(when the run ended, when all was quiet, what was added), of a scenario of a minute."""

    async def main() -> tuple[float, float, float]:
        run = Run(Scenario("x", "x", FOR_S), Way("direct", "a test"), Options(gossip=False), folder, print)
        run.steps = cast("Steps", Loads(run, begins_s, takes_s))
        async with trio.open_nursery() as acting:
            acting.start_soon(run.carry_out_steps)
            acting.start_soon(run.watch_peers)
        return run.clock(), run.quiet_s, run.late_s

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_what_is_ready_in_time_adds_nothing(tmp_path: Path) -> None:
    assert lasted(tmp_path, 10.0, LOADING_S) == (FOR_S, 10.0 + LOADING_S, 0.0)


def test_what_takes_longer_is_added(tmp_path: Path) -> None:
    ended_s, quiet_s, late_s = lasted(tmp_path, 10.0, LOADING_S + 20.0)
    assert late_s == pytest.approx(20.0, abs=2 * LOOK_S)
    assert (ended_s, quiet_s) == (pytest.approx(FOR_S + late_s), pytest.approx(10.0 + LOADING_S + 20.0))


def test_the_run_does_not_end_while_something_is_started(tmp_path: Path) -> None:
    ended_s, quiet_s, _ = lasted(tmp_path, FOR_S - 2.0, 30.0)
    assert quiet_s == pytest.approx(FOR_S + 28.0)
    assert FOR_S + 28.0 <= ended_s < FOR_S + 30.0


def test_what_never_is_ready_ends_all_the_same(tmp_path: Path) -> None:
    ended_s, _, late_s = lasted(tmp_path, 10.0, 10_000.0)
    assert (ended_s, late_s) == (FOR_S + LATE_S_MAX, LATE_S_MAX)
