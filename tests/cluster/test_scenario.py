"""Scenario files: read strictly, written back equal, victims drawn by the seed."""

import json

import pytest

from cluster.engine.engine_faults import Fault
from cluster.scenario import (
    VERBS,
    ScenarioError,
    Step,
    load_scenario,
    quiet_at,
    read_scenario,
    scenario_names,
    settle,
    write_scenario,
)

HEAD = 'about = "x"\nfor_s = 10\n'


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_of_the_lab_reads_and_writes_back_equal(name: str) -> None:
    scenario = load_scenario(name)
    assert read_scenario(write_scenario(scenario), name) == scenario
    settled = settle(scenario, 1)
    assert settle(read_scenario(write_scenario(settled), name), 2) == settled
    assert quiet_at(settled) < scenario.for_s, "nothing is left of the time in which the bounds must hold"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("for_s = 10", "about is missing"),
        (HEAD + "colour = 1", "no key 'colour'"),
        (HEAD + "runs_on = ['moon']", "moon"),
        (HEAD + "[cluster]\nnodes = -1", "cluster"),
        (HEAD + "[cluster]\nnodes = true", "nodes"),
        (HEAD + "[cluster]\nnodes = 2\nnames = ['a']", "names"),
        (HEAD + "[cluster]\ndns = 'wrong'", "dns"),
        (HEAD + "[cluster]\nformed = true", "own names"),
        (HEAD + "runs_on = ['sim']\n[cluster]\nformed = true\nspread_s = 1", "at once"),
        (HEAD + "[expect]\nagree_s = 'soon'", "agree_s"),
        (HEAD + "[step]\nat_s = 1", "two brackets"),
        (HEAD + "[[step]]\nat_s = 1", "do = VERB"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'explode'", "no verb 'explode'"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'kill'", "nodes is missing"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'kill'\nnodes = [9]", "there are 0"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'kill'\nnodes = 'some'", "'some'"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'kill'\nnodes = 'all'\nloss = 0.5", "kill takes no 'loss'"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'kill'\nnodes = '²%'", "'²%'"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'keys'\nnodes = 'all'\nkeys = []", "one at least"),
        (HEAD + "[[step]]\nat_s = 11\ndo = 'heal'", "at_s"),
        (HEAD + "[[step]]\nat_s = 5\ndo = 'heal'\n[[step]]\nat_s = 4\ndo = 'heal'", "in order"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'link'\nnodes = 'all'", "at least one of"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'link'\nnodes = 'all'\nloss = 1.5", "loss: 1.5"),
        (HEAD + "[[step]]\nat_s = 1\ndo = 'cut'\nnodes = [0]\nplanes = ['ipx']", "ipx"),
        ("about = ", "scenario"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        read_scenario(text, "x")


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ScenarioError, match="steady"):
        load_scenario("nonsense")


def test_the_seed_picks_the_victims_and_nothing_else_does() -> None:
    scenario = load_scenario("kill_half")
    first, again = settle(scenario, 5), settle(scenario, 5)
    assert first == again
    assert len(first.steps[0].nodes) == 3
    assert len({settle(scenario, seed).steps[0].nodes for seed in range(20)}) > 5


def test_the_rest_is_whoever_is_not_named() -> None:
    text = HEAD + "[cluster]\nnodes = 4\n[[step]]\nat_s = 1\ndo = 'cut'\nnodes = [1, 2]\n"
    assert settle(read_scenario(text, "x"), 1).steps[0].others == (0, 3)


def test_quiet_comes_after_the_last_undoing() -> None:
    text = HEAD + "[cluster]\nnodes = 3\n[[step]]\nat_s = 1\ndo = 'pause'\nnodes = 'all'\nfor_s = 2\nevery_s = 0.5\n"
    assert quiet_at(settle(read_scenario(text, "x"), 1)) == pytest.approx(4.0)


def test_every_verb_takes_only_fields_that_a_step_has() -> None:
    names = set(Step.__dataclass_fields__)
    for name, verb in VERBS.items():
        assert names.issuperset((*verb.needs, *verb.may, verb.lasts)), name


def test_every_fault_of_a_scenario_is_one_that_engines_know() -> None:
    faults = [
        step.fault for name in scenario_names() for step in load_scenario(name).steps if step.do == "engine_fault"
    ]
    assert faults
    for fault in faults:
        Fault.read(json.loads(fault))
