"""The simulator in the tests: many seeds, the named scenarios, a large cluster, and that a run replays."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.scenario import Expect, Load, load_scenario, scenario_names
from cluster.simulation.sim_node import SimNode, sim_nodes
from cluster.simulation.sim_router import Birth
from cluster.simulation.sim_run import simulate
from cluster.simulation.simulate import RunRequest, command_of, main, run, scenario_of
from ranvier_py.core.mesh.wire.frame import SPOKEN
from tests.examples import some

ROOT = Path(__file__).parents[2]
SEEDS = 60  # always the same ones; `make soak` goes on to others
QUICK = ("cold_start", "engine_restart", "kill_one", "loss_30", "partition_three_ways", "rolling_restart")
"""One of each kind of trouble: the others run in CI."""

LONG = ("partition_long", "thousand", "crowd", "chaos")
"""Minutes of virtual time: for `python -m cluster sim --scenario NAME`. The thousand nodes have tests of their own."""


def simulated(name: str) -> bool:
    return "sim" in load_scenario(name).runs_on and name not in LONG


OTHERS = [name for name in scenario_names() if simulated(name) and name not in QUICK]


@pytest.mark.slow
def test_the_invariants_hold_for_many_seeds() -> None:
    """What fails is printed with the command that shows it again."""
    argv = [sys.executable, "-m", "cluster", "sim", "--seeds", f"0:{SEEDS}", "--small", "--quiet", "--jobs", "2"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", some([*QUICK, *OTHERS], len(QUICK)))
def test_a_cluster_lives_through(name: str) -> None:
    result = simulate(load_scenario(name), 1, sim_nodes())
    assert result.violation is None, f"{result.violation}\npython -m cluster sim --scenario {name} --seed 1"


@pytest.mark.parametrize("name", some(["upgrade_half", "rolling_restart", "kv_owner_killed_rolled", "chaos"], 2))
def test_a_cluster_lives_through_an_upgrade(name: str) -> None:
    """Nodes speak the previous version of the protocol until they are restarted."""
    make, begun = sim_nodes(), dict[int, SimNode]()

    def upgraded(birth: Birth) -> SimNode:
        node = make(birth)
        if begun.setdefault(birth.number, node) is node:
            node.peer.sessions.about = SPOKEN[0], ""
        return node

    result = simulate(load_scenario(name), 1, upgraded)
    assert result.violation is None, result.violation
    assert all(node.peer.counters.unspoken for node in begun.values()), "what is new is sent to none of them"


@pytest.mark.slow
def test_a_thousand_nodes_that_know_each_other_learn_of_each_death_and_each_route_update() -> None:
    """From then on, since it takes minutes of a core until they know each other: that is the test below."""
    result, _ = run(load_scenario("crowd"), 1)
    assert result.violation is None, result.violation
    assert result.measures["node_deaths"] == 3 * 997
    assert result.measures["updates_late"] == 0
    assert result.measures["everywhere_t100_s"] is not None
    assert result.measures["node_greetings"] < 50 * 1000


@pytest.mark.skipif("RANVIER_SOAK" not in os.environ, reason="takes minutes of a core: make soak")
def test_a_thousand_nodes_know_each_other_each_death_and_each_route_update() -> None:
    """And greet some neighbours each: half a million handshakes would be 500 greetings a node.

    Shorter than the scenario, which is for `python -m cluster sim`: nine seconds after the last crash instead of 14.
    """
    scenario = load_scenario("thousand")
    steps = tuple(replace(step, at_s=3.0) for step in scenario.steps)
    expect = replace(scenario.expect, dead_s=9.0, agree_s=8.5)
    result, _ = run(replace(scenario, for_s=13.0, steps=steps, expect=expect), 1)
    assert result.violation is None, result.violation
    assert result.measures["agreed_s"] is not None
    assert result.measures["updates_late"] == 0
    assert result.measures["everywhere_t100_s"] is not None
    assert result.measures["node_greetings"] < 150 * 1000


@pytest.mark.slow
def test_a_large_cluster_that_loses_packets_notices_a_death_and_reports_all() -> None:
    """Beyond the mesh: probes of strangers, relays drawn from acquaintances, route updates along rings."""
    scenario = load_scenario("kill_one")
    steps = tuple(replace(step, at_s=5.0) if step.do == "kill" else replace(step, for_s=9.0) for step in scenario.steps)
    scenario = replace(
        scenario,
        for_s=18.0,
        cluster=replace(scenario.cluster, nodes=90, spread_s=1.0),
        load=Load(chats_per_s=0.5, turns=2),
        steps=steps,
        expect=Expect(failed_requests_max=0, dead_s=11.0, agree_s=9.0, learned_s=3.0, false_deaths_max=0),
    )
    result = simulate(scenario, 1, sim_nodes())
    assert result.violation is None
    assert result.measures["updates_late"] == 0


@pytest.mark.slow
def test_a_hundred_nodes_start_at_once_and_know_each_other() -> None:
    scenario = load_scenario("steady")
    cluster = replace(scenario.cluster, nodes=100, spread_s=1.0)
    expect = replace(scenario.expect, agree_s=3.0, same_routes_s=None, learned_s=None)
    result = simulate(replace(scenario, cluster=cluster, for_s=5.0, expect=expect), 1, sim_nodes())
    assert result.violation is None
    assert result.measures["agreed_s"] is not None


def test_two_pairs_that_restarted_apart_find_each_other_at_the_next_look_up() -> None:
    """None has met a node of the other pair, and no state was written yet: only the name is left, each half minute."""
    result, _ = run(scenario_of(RunRequest("swarm", 880019, 0, 0.0, small=True)), 880019)
    assert result.violation is None


@pytest.mark.slow
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
    line_text = capsys.readouterr()
    assert json.loads(line_text.out)["ok"] is False
    assert "L4" in line_text.err
    assert f"--scenario {impossible} --seed 2" in line_text.err
    assert main(["--replay", str(kept), "--seed", "2", "--shrink", "--save", str(kept)]) == 1
    assert kept.read_text().count("[[step]]") == 1


def test_a_mistake_in_a_scenario_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("about = 'x'\n")
    assert main(["--replay", str(wrong)]) == 2
    assert "for_s is missing" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--nodes -1", "--for 5", "--for -1"])
def test_sizes_that_make_no_sense_are_no_traceback(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert "want at least one node" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["5", "5:x", ":"])
def test_seeds_that_are_no_range_are_a_wrong_command(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--seeds", words])
    assert "--seeds" in capsys.readouterr().err


def test_the_command_of_an_order_states_all_of_it() -> None:
    request = RunRequest("swarm", 7, 5, 30.0, small=True)
    assert command_of(request) == "python -m cluster sim --scenario swarm --seed 7 --small --nodes 5 --for 30"
    assert scenario_of(request).cluster.nodes == 5
