"""A machine that loads processes slowly makes a run longer, and never ends it before its steps are carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import trio
from dns.rdatatype import RdataType

from cluster.dns.dns_server import DnsFaultKind
from cluster.processes.chaos_plan import PEERS_NAME
from cluster.processes.chaos_run import LATE_S_MAX, LOADING_S, Options, Run
from cluster.processes.engine_watch import BACK_S, EngineWatch
from cluster.processes.fleet import Fleet, Member
from cluster.processes.link_control import SECOND_IP, LinkMode
from cluster.processes.process_steps import ProcessSteps, Undo
from cluster.scenario import Cluster, Scenario, Step

FOR_S = 60.0


class Loads:
    """Steps of which the only one starts a process."""

    def __init__(self, run: Run, begins_s: float, takes_s: float) -> None:
        self.run_ = run
        self.begins_s = begins_s
        self.takes_s = takes_s
        self.loading: dict[str, float] = {}
        self.late_s = 0.0

    async def run(self, _steps: Sequence[Step]) -> None:
        await trio.sleep(self.begins_s)
        self.loading["n1"] = self.run_.clock()
        await trio.sleep(self.takes_s)
        del self.loading["n1"]


class SlowFleet:
    """Processes that are gone at once and take long to load."""

    def __init__(self, run: Run, takes_s: float) -> None:
        self.run = run
        self.takes_s = takes_s
        self.diary: list[tuple[str, str]] = []

    def clock(self) -> float:
        return self.run.clock()

    def note(self, _: str) -> None:
        """The run's diary is not looked at."""

    async def kill(self, member: Member) -> None:
        self.diary.append(("gone", member.name))

    stop = kill

    async def start(self, member: Member) -> None:
        await trio.sleep(self.takes_s)
        self.diary.append(("back", member.name))


def made_steps(folder: Path, scenario: Scenario, takes_s: float = 0.0) -> tuple[Run, ProcessSteps, SlowFleet]:
    run = Run(scenario, LinkMode("direct", "a test"), Options(gossip=False), folder, print)
    fleet = SlowFleet(run, takes_s)
    run.steps = run.make_steps(cast("Fleet", fleet))
    return run, run.steps, fleet


@pytest.mark.parametrize(
    ("begins_s", "takes_s", "ended_s", "quiet_s"),
    [
        pytest.param(10.0, LOADING_S, FOR_S, 10.0 + LOADING_S, id="what is ready in time adds nothing"),
        pytest.param(10.0, LOADING_S + 20.0, FOR_S + 20.0, 30.0 + LOADING_S, id="what takes longer is added"),
        pytest.param(FOR_S - 2.0, 30.0, FOR_S + 28.0, FOR_S + 28.0, id="no end while something is started"),
        pytest.param(10.0, 10_000.0, FOR_S + LATE_S_MAX, None, id="what never is ready ends all the same"),
    ],
)
async def test_a_run_is_as_late_as_what_it_waits_for(
    tmp_path: Path, autojump_clock: object, begins_s: float, takes_s: float, ended_s: float, quiet_s: float | None
) -> None:
    run, *_ = made_steps(tmp_path, Scenario("x", "x", FOR_S, Cluster(running=())))
    run.steps = cast("ProcessSteps", Loads(run, begins_s, takes_s))
    async with trio.open_nursery() as acting:
        acting.start_soon(run.carry_out_steps)
        acting.start_soon(run.watch_peers)
    assert run.clock() == pytest.approx(FOR_S + run.steps.late_s)
    assert run.clock() == pytest.approx(ended_s, abs=2.0)
    assert quiet_s is None or run.quiet_s == pytest.approx(quiet_s)


async def test_the_next_is_not_stopped_before_the_last_is_back(tmp_path: Path, autojump_clock: object) -> None:
    """Restarted by the clock alone, all of them were gone at once on a machine that took ten seconds for each."""
    scenario = Scenario("x", "x", FOR_S, Cluster(nodes=3, running=(0, 1, 2)))
    run, _, fleet = made_steps(tmp_path, scenario, 10.0)
    step = Step(10.0, "restart", nodes=(0, 1, 2), every_s=4.0)
    run.scenario = replace(scenario, steps=(step,))
    await run.carry_out_steps()
    assert len(fleet.diary) == 6
    away = 0
    for what, _ in fleet.diary:
        away += 1 if what == "gone" else -1
        assert away <= 2


async def test_wrong_names_and_stops_of_engines_each_end_by_themselves(tmp_path: Path, autojump_clock: object) -> None:
    """And then the name resolves to what the scenario says, where all nodes once were given the right answer."""
    scenario = Scenario("x", "x", FOR_S, Cluster(nodes=2, engines=1, running=(0, 1), dns="empty"))
    run, steps, fleet = made_steps(tmp_path, scenario)

    def words() -> list[DnsFaultKind | None]:
        faults = [run.zone.fault_of(PEERS_NAME, place.ip, RdataType.A) for place in run.plan.nodes]
        return [None if fault is None else fault.kind for fault in faults]

    assert words() == [DnsFaultKind.EMPTY] * 2
    one = await steps.do_dns(Step(1.0, "dns", dns="failing", nodes=(0,)), None)
    all_ = await steps.do_dns(Step(2.0, "dns", dns="all", nodes=(0, 1)), None)
    assert words() == [None, None]
    await called(one)
    assert words() == [None, None]
    await called(all_)
    assert words() == [DnsFaultKind.EMPTY] * 2
    stops = [await steps.do_engine_stop(Step(1.0, "engine_stop"), 0) for _ in "12"]
    await called(stops[0])
    assert [what for what, _ in fleet.diary] == ["gone", "gone"]
    await called(stops[1])
    assert fleet.diary[-1] == ("back", "engine-0")


async def test_a_name_that_moves_leads_to_a_new_process_while_the_old_one_runs_on(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(1.0, "engine_moves", engines=(1,), for_s=5.0)
    scenario = Scenario("x", "x", FOR_S, Cluster(nodes=1, engines=2, running=(0,)), steps=(step,))
    run, steps, fleet = made_steps(tmp_path, scenario, takes_s=2.0)
    recorded: list[tuple[str, str]] = []

    async def take(_: EngineWatch, member: Member) -> None:
        assert not fleet.diary[1:], "it still runs"
        recorded.append((member.name, member.command().ready_host))

    monkeypatch.setattr(EngineWatch, "take", take)
    undo = await steps.do_engine_moves(step, 1)
    assert run.zone.addresses("engine-1.lab", None, "") == (SECOND_IP,)
    assert fleet.diary == [("back", "engine-1-moved")]
    assert [member.name for member in run.engines] == ["engine-0", "engine-1-moved"]
    assert not run.engine_watch.serves("engine-1", run.clock())
    assert [run.engine_watch.serves("engine-1-moved", 2.0 + later_s) for later_s in (0.0, BACK_S)] == [False, True]
    await called(undo)
    assert fleet.diary[1:] == [("gone", "engine-1")]
    assert recorded == [("engine-1", "127.0.0.1")]


async def called(undo: Undo) -> None:
    assert undo is not None
    await undo()
