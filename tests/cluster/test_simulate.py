"""The simulator as `make test` uses it: many seeds, the named scenarios, a large cluster, and that a run replays."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.scenario import load_scenario, scenario_names
from cluster.sim_mind import Minds
from cluster.sim_run import simulate
from cluster.simulate import Order, command_of, main, scenario_of

ROOT = Path(__file__).parents[2]
SEEDS = 200
LONG = ("partition_long", "thousand", "chaos")
"""Minutes of virtual time or a thousand nodes: for `python -m cluster sim --scenario NAME`."""


def simulated(name: str) -> bool:
    return "sim" in load_scenario(name).runs_on and name not in LONG


@pytest.mark.slow
def test_the_invariants_hold_for_many_seeds() -> None:
    """What fails is printed with the command that shows it again."""
    argv = [sys.executable, "-m", "cluster", "sim", "--seeds", f"0:{SEEDS}", "--small", "--quiet", "--jobs", "2"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in scenario_names() if simulated(name)])
def test_a_cluster_lives_through(name: str) -> None:
    result = simulate(load_scenario(name), 1, Minds())
    assert result.violation is None, f"{result.violation}\npython -m cluster sim --scenario {name} --seed 1"


def test_a_hundred_nodes_start_at_once_and_know_each_other() -> None:
    scenario = load_scenario("steady")
    cluster = replace(scenario.cluster, nodes=100, spread_s=1.0)
    expect = replace(scenario.expect, agree_s=3.0, same_routes_s=None, learned_s=None)
    result = simulate(replace(scenario, cluster=cluster, for_s=5.0, expect=expect), 1, Minds())
    assert result.violation is None
    assert result.measures["agreed_s"] is not None


def test_a_seed_gives_one_trace_in_every_process() -> None:
    """Hash seeds, addresses and the order of sets differ between processes; a run must not."""
    argv = [sys.executable, "-m", "cluster", "sim", "--seed", "5", "--small"]
    digests = [
        json.loads(subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout)[
            "trace"
        ]
        for _ in range(2)
    ]
    assert digests[0] == digests[1]


def test_a_schedule_is_kept_replayed_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bound that cannot hold: the report has the invariant, the schedule and the command; the file replays."""
    impossible = tmp_path / "impossible.toml"
    text = (ROOT / "cluster" / "scenarios" / "kill_one.toml").read_text()
    impossible.write_text(text.replace("dead_s = 5.0", "dead_s = 0.01"))
    kept = tmp_path / "kept.toml"
    assert main(["--replay", str(impossible), "--seed", "2", "--save", str(kept)]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["ok"] is False
    assert "L4" in said.err
    assert f"--scenario {impossible} --seed 2" in said.err
    assert main(["--replay", str(kept), "--seed", "2", "--shrink", "--save", str(kept)]) == 1
    assert kept.read_text().count("[[step]]") == 1


def test_a_mistake_in_a_scenario_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("about = 'x'\n")
    assert main(["--replay", str(wrong)]) == 2
    assert "for_s is missing" in capsys.readouterr().err


def test_the_command_of_an_order_says_all_of_it() -> None:
    order = Order("swarm", 7, 5, 30.0, small=True)
    assert command_of(order) == "python -m cluster sim --scenario swarm --seed 7 --small --nodes 5 --for 30"
    assert scenario_of(order).cluster.nodes == 5
