"""A cluster that begins as another checkout, and how `make test-upgrade` makes one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.processes import chaos, upgrade
from cluster.processes.chaos_run import Options, Run
from cluster.processes.children import ROOT
from cluster.processes.link_control import LinkMode
from cluster.scenario import load_scenario, settled
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION


async def test_a_node_runs_the_first_checkout_until_it_is_restarted(tmp_path: Path) -> None:
    scenario = settled("upgrade_half", "processes", 1, 0, None, 0.0)
    run = Run(scenario, LinkMode("direct", "a test"), Options(first_tree=tmp_path), tmp_path, print)
    member = run.nodes[0]
    trees = []
    for member.generation in (1, 2, 3):  # as the fleet counts its starts
        trees.append(member.command().tree)
    assert trees == [tmp_path, ROOT, ROOT]
    assert run.engines[0].command().tree == ROOT


@pytest.mark.parametrize("name", upgrade.SCENARIOS)
def test_an_upgrade_restarts_nodes_and_allows_no_failed_request(name: str) -> None:
    scenario = load_scenario(name)
    assert [step.do for step in scenario.steps] == ["roll"]
    assert (scenario.expect.failed_requests_max, scenario.expect.false_deaths_max) == (0, 0)
    assert scenario.expect.same_routes_s is not None
    assert scenario.expect.hit_share_min == 0.98, "of before"


@pytest.mark.parametrize(("spoken", "code"), [(PROTOCOL_VERSION - 1, chaos.OK), (PROTOCOL_VERSION, chaos.MISUSED)])
def test_an_upgrade_begins_with_a_checkout_of_the_previous_version_and_refuses_any_other(
    spoken: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Sequence[str]] = []

    @contextmanager
    def checkout(_: str) -> Iterator[Path]:
        yield tmp_path

    def run(words: Sequence[str]) -> int:
        calls.append(words)
        return chaos.OK

    monkeypatch.setattr(upgrade, "checkout", checkout)
    monkeypatch.setattr(upgrade, "output", lambda command, folder: f"{spoken}\n")
    monkeypatch.setattr(chaos, "main", run)
    assert upgrade.main(["--seed", "7"]) == code
    expected = [*(f"--scenario={name}" for name in upgrade.SCENARIOS), f"--first-tree={tmp_path}", "--seed", "7"]
    assert calls == ([expected] if code == chaos.OK else [])


def test_a_commit_that_is_not_here_is_a_wrong_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def output(command: Sequence[str], folder: Path) -> str:
        raise subprocess.CalledProcessError(128, list(command))

    monkeypatch.setattr(upgrade, "output", output)
    assert upgrade.main([]) == chaos.MISUSED
