"""What one node found of a rule holds on all nodes that have the same rules, and stays so whoever restarts."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import pytest

from cluster.scenario import Cluster, Scenario, Step
from cluster.simulation.sim_node import SimNode, sim_nodes
from cluster.simulation.sim_run import Run
from ranvier_py.config.rule_files import rule_book
from ranvier_py.core.clients.body_mender import (
    SESSIONS_FACTOR,
    TRIALS_MAX,
    BodyMender,
    Engines,
    ProofOptions,
    RuleUse,
    TrialResult,
)
from ranvier_py.core.clients.rule_verdicts import REPAIR_INTERVAL_S, VerdictGossip
from ranvier_py.core.peer import router_peer
from ranvier_py.core.prompts.request_apis import CHAT, RESPONSES

RULES = ("tools-by-name=rewrite",)
SESSIONS = 20
BODY = json.dumps({"model": "m", "tools": [{"name": "b"}, {"name": "a"}], "messages": []}).encode()
SORTED = json.dumps({"model": "m", "tools": [{"name": "a"}, {"name": "b"}], "messages": []}).encode()


def mender(*settings: str, sessions: int = SESSIONS) -> BodyMender:
    def digest(data: bytes) -> bytes:
        return blake2b(data, digest_size=16, key=b"of the cluster").digest()

    return BodyMender(rule_book(None, settings), digest, ProofOptions(sessions=sessions, control_share=0.5))


def sent(at_work: BodyMender, session: bytes) -> bytes:
    """The body of a turn of this session as an engine gets it."""
    found = at_work.mend(BODY, CHAT, "codex", b"codex_exec/1", session, lambda _: Engines(False, []))
    return BODY if found is None else found.sent


def judge(at_work: BodyMender, reused_tokens: int) -> str:
    """Have it see sessions until it decides, of which engines reused so much where the rule acted. What it did."""
    states = []
    for number in range(2 * SESSIONS):
        found = at_work.mend(BODY, CHAT, "codex", b"codex_exec/1", b"%d" % number, lambda _: Engines(False, []))
        if found is not None:
            reused = (reused_tokens if found.uses[0].changed else 50) + number % 3
            states += [each.state for _ in "12" for each in at_work.answered("codex", "m", found.uses, 100, reused)]
    return states[0]


class WithRules(VerdictGossip):
    """Of a node whose operator turned a rule on."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.mender = mender(*RULES)


class Lab:
    """Simulated nodes, whose gossip is sealed, and lost, as on a network."""

    def __init__(self, nodes: int, *steps: Step) -> None:
        size = Cluster(nodes=nodes, engines=2)
        self.run = Run(Scenario("verdicts", "of rules", 200.0, cluster=size, steps=steps), 3, sim_nodes())
        self.run.steps.plan()

    def until(self, at_s: float) -> None:
        self.run.world.time.run(at_s)

    def peer(self, number: int) -> router_peer.RouterPeer:
        node = self.run.world.hosts[number].node
        assert isinstance(node, SimNode)
        return node.peer

    def gossip(self, number: int) -> VerdictGossip:
        return self.peer(number).features.verdicts

    def mender(self, number: int) -> BodyMender:
        found = self.gossip(number).mender
        assert found is not None
        return found

    def states(self, *numbers: int) -> list[list[tuple[str, str]]]:
        return [[(row["state"], row["node"]) for row in self.mender(number).rows()] for number in numbers]


@pytest.fixture(autouse=True)
def rules_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_peer, "VerdictGossip", WithRules)


def test_a_session_that_visits_all_nodes_gets_one_body_from_each_of_them_also_once_one_turned_the_rule_off() -> None:
    lab = Lab(4)
    lab.until(5.0)
    sessions = [b"session %d" % number for number in range(40)]
    for session in sessions:
        assert len({sent(lab.mender(number), session) for number in range(4)}) == 1
    assert {sent(lab.mender(0), session) for session in sessions} == {BODY, SORTED}
    logged: list[str] = []
    lab.gossip(3).followed = lambda result: logged.append(result.state)
    assert judge(lab.mender(0), 50) == "off"
    lab.until(6.0)
    for session in sessions:
        assert [sent(lab.mender(number), session) for number in range(4)] == [BODY] * 4
    name = lab.states(1)[0][0][1]
    assert lab.states(0, 1, 2, 3) == [[("off", "")], *[[("off", name)]] * 3]
    assert name == lab.peer(0).me.name
    assert lab.mender(3).counters.followed == {"off": 1}
    assert logged == ["off"], "once, though all send it on"


@pytest.mark.parametrize(
    "other", [mender(*RULES, sessions=40), mender("tools-by-name=rewrite,client=codex"), mender(*RULES, RULES[0])]
)
def test_verdicts_on_rules_of_before_a_change_turn_nothing_off_after_it(other: BodyMender) -> None:
    lab = Lab(2)
    lab.until(5.0)
    lab.gossip(1).mender = other
    judge(lab.mender(0), 50)
    lab.until(6.0)
    assert other.rows() == []
    assert other.counters.not_followed["rules"] in (1, 2), "one of them repeated, perhaps"
    assert lab.mender(0).rules != other.rules
    lab.gossip(1).mender = mender(*RULES)
    lab.until(5.0 + 4 * REPAIR_INTERVAL_S)
    assert lab.states(1)[0][0][0] == "off", "as soon as it has the same rules"


def test_turns_that_go_on_from_a_stored_response_are_never_left_alone_unless_their_session_is_named() -> None:
    """Each has but its own words: one in so many turns would be left alone, and break the prefix before and behind."""
    found = {}
    for session in (b"", b"named"):
        at_work = mender(*RULES)
        for turn in range(40):
            body = {**json.loads(BODY), "input": f"Question {turn}", "previous_response_id": f"resp_{turn}"}
            del body["messages"]
            name = session and session + b"%d" % turn
            at_work.mend(json.dumps(body).encode(), RESPONSES, "codex", b"", name, lambda _: Engines(False, []))
        found[session] = at_work.counters
    assert (found[b""].rewritten, found[b""].left_alone) == ({"tools-by-name": 40}, {})
    assert found[b"named"].left_alone


@pytest.mark.parametrize("model", ["m" * 1025, "line\nend", "\x1b[2J", "\ud800"])
def test_no_rule_acts_on_a_model_that_no_message_and_no_log_can_name(model: str) -> None:
    at_work = mender(*RULES)
    for name, is_mended in ((model, False), ("m" * 1024, True)):
        body = json.dumps({**json.loads(BODY), "model": name}).encode()
        found = at_work.mend(body, CHAT, "codex", b"codex_exec/1", b"a", lambda _: Engines(False, []))
        assert (found is not None) == is_mended
    assert at_work.counters.unread == 1


def test_a_proved_rule_stays_so_where_too_few_sessions_come_by_to_judge_it_again() -> None:
    """All nodes would turn off what one of them sees little of."""
    at_work = mender(*RULES)
    assert judge(at_work, 90) == "proved"
    for number in range(100 * SESSIONS):
        for _ in range(2):
            assert not list(at_work.answered("codex", "m", [RuleUse("tools-by-name", number, True)], 100, 90))
    (row,) = at_work.rows()
    assert (row["state"], row["sessions"] < SESSIONS_FACTOR * SESSIONS) == ("proved", True)


def test_verdicts_beyond_the_bound_are_left_out_and_counted() -> None:
    at_work = mender(*RULES)
    for number in range(TRIALS_MAX + 3):
        at_work.follow(TrialResult("tools-by-name", "codex", f"model {number}", "off", "why", "n1"))
    assert len(list(at_work.verdicts())) == len(at_work.fresh) == TRIALS_MAX
    assert at_work.counters.not_followed == {"full": 3}
