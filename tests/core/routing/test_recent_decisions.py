"""The latest decisions, and what was weighed for them while somebody looked."""

from __future__ import annotations

from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.recent_decisions import WEIGHED_EVERY_S, WEIGHED_MAX, RecentDecisions


def decision(number: int) -> Decision:
    return Decision(number, f"w{number}", "cold", "ttft", 0, 16, "none", (), (number,), (0,))  # type: ignore[arg-type]


def test_the_last_decision_about_a_request_is_found_as_long_as_it_is_kept() -> None:
    recent = RecentDecisions(2)
    made = [decision(number) for number in range(3)]
    for at, each in enumerate(made):
        recent.made.append((float(at), b"r%d" % (at // 2), each))
    assert recent.find(b"r0") == (1.0, made[1])
    recent.keep(1)
    assert recent.find(b"r0") is None
    assert recent.find(b"r1") == (2.0, made[2])


def test_terms_belong_to_their_own_decision_and_are_computed_for_one_in_a_while_alone() -> None:
    recent, made = RecentDecisions(9), [decision(1) for _ in range(3)]  # equal ones
    for at, each in zip((0.0, WEIGHED_EVERY_S / 2, WEIGHED_EVERY_S), made, strict=True):
        recent.weigh(each, lambda at=at: [{"sum_s": at}], at)  # type: ignore[misc]
    assert [recent.terms_of(each) for each in made] == [[{"sum_s": 0.0}], None, [{"sum_s": WEIGHED_EVERY_S}]]


def test_terms_are_bounded() -> None:
    recent, first = RecentDecisions(9), decision(0)
    recent.weigh(first, list, 0.0)
    for number in range(1, WEIGHED_MAX + 1):
        recent.weigh(decision(number), list, float(number))
    assert recent.terms_of(first) is None
