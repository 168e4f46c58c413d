"""A rule stays on only if it helps, by what engines counted, and no one client decides that for all."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

from ranvier_py.core.clients.body_mender import (
    SESSIONS_FACTOR,
    TENANTS_MIN,
    TRIALS_MAX,
    BodyMender,
    RuleUse,
    TrialResult,
)
from ranvier_py.core.prompts.request_apis import CHAT
from tests.core.clients.test_client_rules import BARE, BILLING, GOOD, NONCE, OPTIONS, mend, mender


def tried(at_work: BodyMender, sessions: int, reused: dict[bool, float | None], rng: Random) -> list[TrialResult]:
    """Sessions of two answers each, whose engines reuse such shares, where the rule acts and where it does not."""
    verdicts: list[TrialResult] = []
    for number in range(sessions):
        for _ in range(2):
            found = mend(at_work, NONCE, session=b"session %d" % number)
            if found is None:
                continue
            share = reused[found.uses[0].changed]
            cached = None if share is None else round(1000 * min(1, max(0, rng.gauss(share, 0.05))))
            verdicts += at_work.answered("claude-code", "m", found.uses, None if share is None else 1000, cached)
    return verdicts


def test_a_rule_that_raises_what_engines_reuse_is_proved_and_goes_on() -> None:
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)
    (verdict,) = tried(at_work, 100, {True: 0.9, False: 0.6}, Random(1))
    assert verdict[:4] == ("claude-code-billing", "claude-code", "m", "proved")
    (row,) = at_work.rows()
    assert row["reused_share"] == pytest.approx(0.9, abs=0.03)
    assert row["reused_share_left_alone"] == pytest.approx(0.6, abs=0.05)
    assert mend(at_work, NONCE, session=b"one more") is not None
    (verdict,) = tried(at_work, 300, {True: 0.6, False: 0.6}, Random(2))
    assert verdict.state == "off", "a client of another version may have made it useless"


@pytest.mark.parametrize("reused", [{True: 0.6, False: 0.6}, {True: 0.3, False: 0.6}, {True: 0.0, False: 0.3}])
def test_a_rule_that_raises_nothing_is_turned_off_and_the_body_goes_on_as_it_came(
    reused: dict[bool, float | None],
) -> None:
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)
    (verdict,) = tried(at_work, 200, reused, Random(5))
    assert verdict.state == "off"
    assert "where it left sessions alone" in verdict.why
    assert mend(at_work, NONCE) is None
    assert mend(at_work, NONCE.replace(b'"m"', b'"n"')) is not None, "of another model nothing is known"


def test_a_rule_is_turned_off_where_engines_count_nothing_or_too_few_sessions_are_left_alone() -> None:
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)
    (verdict,) = tried(at_work, 200, {True: None, False: None}, Random(1))
    assert (verdict.state, verdict.why) == ("off", "engines count no cached tokens")
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)
    (verdict,) = tried(at_work, 400, {True: 0.5, False: None}, Random(1))
    assert (verdict.state, verdict.why) == ("off", "too few sessions to compare")


def test_sessions_of_one_cold_prompt_or_without_any_reuse_decide_nothing() -> None:
    """Else a client with a name for each request turned a rule off for all."""
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)
    for number in range(400):
        found = mend(at_work, NONCE, session=b"made up %d" % number)
        assert found is not None
        assert not list(at_work.answered("claude-code", "m", found.uses, 1000, 0))
    (row,) = at_work.rows()
    assert (row["sessions"], row["sessions_left_alone"]) == (0, 0)
    counted = next(each.value for each in at_work.metrics() if each.name == "client_rules_sessions_dropped")
    assert counted == 400 - SESSIONS_FACTOR * OPTIONS.sessions
    assert tried(at_work, 400, {True: -1.0, False: -1.0}, Random(1)) == [], "nothing was reused in either group"
    (verdict,) = tried(at_work, 400, {True: 0.9, False: 0.6}, Random(1))
    assert verdict.state == "proved"


def test_one_tenant_turns_no_rule_off_for_all() -> None:
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)

    def verdicts(tenants: int) -> list[TrialResult]:
        found: list[TrialResult] = []
        for number in range(400):
            tenant = b"%d" % (number % tenants)
            uses = [RuleUse("claude-code-billing", 1000 * tenants + number, number % 4 > 0, tenant)]
            for cached in (0, 10):
                found += at_work.answered("claude-code", "m", uses, 1000, cached)
        return found

    assert verdicts(1) == []
    (row,) = at_work.rows()
    assert (row["state"], row["why"].startswith("no tenant adds more than 1/4")) == ("measuring", True)
    assert next(each.value for each in at_work.metrics() if each.name == "client_rules_sessions_dropped") > 0
    (verdict,) = verdicts(TENANTS_MIN)
    assert verdict.state == "off"


def test_trials_are_bounded_and_those_that_were_forgotten_are_counted() -> None:
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)
    use = RuleUse("claude-code-billing", 1, True)
    for number in range(TRIALS_MAX + 3):
        assert not list(at_work.answered("claude-code", f"model {number}", [use], 100, 50))
    assert len(at_work.rows()) == TRIALS_MAX
    assert next(each.value for each in at_work.metrics() if each.name == "client_rules_trials_dropped") == 3


def test_a_session_is_left_alone_for_good_and_the_share_is_what_was_asked_for() -> None:
    at_work, twin = (mender("claude-code-billing=rewrite", options=OPTIONS) for _ in range(2))
    alone = 0
    for number in range(2000):
        found = [mend(each, NONCE, session=b"%d" % number) for each in (at_work, twin, at_work)]
        assert found[0] is not None
        assert found[0] == found[1] == found[2], "every node of a cluster has the same groups"
        alone += not found[0].uses[0].changed
        assert found[0].sent == (BARE if found[0].uses[0].changed else NONCE)
    assert 0.21 < alone / 2000 < 0.29
    assert at_work.counters.left_alone["claude-code-billing"] == 2 * alone


def test_a_conversation_without_a_session_is_known_by_its_first_question() -> None:
    at_work = mender("claude-code-billing=rewrite", options=OPTIONS)

    def use(question: str, *more: dict[str, Any]) -> RuleUse:
        first = {
            "role": "user",
            "content": [{"type": "text", "text": question, "cache_control": {"type": "ephemeral"}}],
        }
        system = [{"type": "text", "text": BILLING % "1ab"}, {"type": "text", "text": "x"}]
        body = {"system": system, "messages": [first, *more]}
        found = mend(at_work, json.dumps(body).encode(), session=b"")
        assert found is not None
        return found.uses[0]

    assert use("one") == use("one", {"role": "assistant", "content": "y"}) != use("two")


def test_a_conversation_is_known_by_its_first_question_without_what_a_rule_takes_out_of_it() -> None:
    """Else each of its turns would be a session of its own, and one in ten of them be left alone."""
    rule = {"pattern": 'pattern = "at [0-9:]+"', "replacement": 'replacement = ""\nwhere = "first"'}
    text = re.sub(r"^(pattern|replacement) = .*", lambda found: rule[found[1]], GOOD, flags=re.MULTILINE)
    at_work = mender("own=rewrite", options=OPTIONS, text=text)
    uses = []
    for minute in range(40):
        turns = [{"role": "user", "content": f"Which? at 12:{minute}"}]
        found = mend(at_work, json.dumps({"messages": turns}).encode(), CHAT, session=b"")
        assert found is not None
        uses += found.uses
    assert len(dict.fromkeys(uses)) == 1
