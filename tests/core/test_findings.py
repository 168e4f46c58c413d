import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.findings import FINDINGS_MAX, GONE_S, Finding, Findings, Severity, worst_of

DOWN = Finding("engine_down", Severity.DEGRADED, "engine a does not answer", about="a")
ALL_DOWN = Finding("no_engine", Severity.DOWN, "no engine answers")
ADVICE = Finding("shadow_better", Severity.NOTICE, "another policy would save more")


def test_the_texts_of_a_finding_are_given_by_their_names() -> None:
    """All four are texts, so no type would warn of two that changed places."""
    with pytest.raises(TypeError):
        Finding("clocks", Severity.NOTICE, "the clocks differ", "n1", "signed commands")  # type: ignore[misc]


def test_a_finding_begins_once_and_ends_once_it_was_gone_for_a_while() -> None:
    findings = Findings()
    assert [each.finding for each in findings.look([DOWN], 1.0)[0]] == [DOWN]
    assert findings.look([DOWN], 2.0) == ([], [])
    assert [each.since for each in findings.verdict()] == [1.0]
    assert findings.look([], 2.0 + GONE_S - 0.1) == ([], [])
    assert not findings.verdict()
    begun, ended = findings.look([], 2.0 + GONE_S)
    assert not begun
    assert [each.finding for each in ended] == [DOWN]


def test_what_comes_and_goes_is_one_finding() -> None:
    findings = Findings()
    findings.look([DOWN], 0.0)
    for second in range(1, 20):
        assert findings.look([DOWN] if second % 2 else [], float(second)) == ([], [])
        assert len(findings.verdict()) == second % 2
    assert findings.verdict()[0].since == 0.0


def test_other_words_of_the_same_finding_replace_the_old_ones() -> None:
    findings = Findings()
    findings.look([DOWN], 0.0)
    other = Finding("engine_down", Severity.DEGRADED, "engine a refuses connections", about="a")
    assert findings.look([other], 1.0) == ([], [])
    assert [(each.finding, each.since) for each in findings.verdict()] == [(other, 0.0)]


def test_the_worst_comes_first_and_of_equals_the_oldest() -> None:
    findings = Findings()
    other = Finding("engine_down", Severity.DEGRADED, "engine b does not answer", about="b")
    findings.look([other], 0.0)
    findings.look([ADVICE, DOWN, other, ALL_DOWN], 1.0)
    assert [each.finding for each in findings.verdict()] == [ALL_DOWN, other, DOWN, ADVICE]
    assert worst_of(each.finding for each in findings.verdict()) is Severity.DOWN
    assert worst_of([]) is None


@given(st.lists(st.tuples(st.sampled_from([*Severity]), st.integers(0, 2000)), max_size=1000))
def test_of_too_many_findings_the_least_severe_are_counted_and_not_kept(drawn: list[tuple[Severity, int]]) -> None:
    found = {about: Finding("kind", severity, "words", about=str(about)) for severity, about in drawn}
    found |= {3000 + n: Finding("kind", Severity.NOTICE, "words", about=str(3000 + n)) for n in range(FINDINGS_MAX)}
    findings = Findings()
    findings.look(found.values(), 0.0)
    kept = [each.finding for each in findings.verdict()]
    assert len(kept) == min(len(found), FINDINGS_MAX)
    assert findings.dropped == len(found) - len(kept)
    severities = sorted((each.severity for each in found.values()), reverse=True)[: len(kept)]
    assert [each.severity for each in kept] == severities
