"""Time-outs of suspicions: the formula, who counts, and the heap behind them."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.membership.profile import LAN, WAN, Profile
from ranvier_py.core.mesh.membership.suspicion import Suspicions
from tests.examples import examples

MULT_5 = Profile(suspicion_mult=5)  # three confirmations make it shortest


def test_the_shortest_suspicion_grows_with_the_logarithm_of_the_cluster() -> None:
    assert [LAN.suspicion_min_s(members) for members in (1, 3, 10)] == [1.5, 1.5, 1.5]
    assert LAN.suspicion_min_s(100) == pytest.approx(3.0)
    assert WAN.suspicion_min_s(1000) == pytest.approx(90.0)


def test_confirmations_shorten_a_suspicion_by_the_published_formula() -> None:
    """memberlist's suspicion.go: max - (max - min) log(C + 1) / log(K + 1)."""
    assert [round(MULT_5.suspicion_s(10, count), 3) for count in range(5)] == [15.0, 8.75, 5.094, 2.5, 2.5]


def test_where_nobody_is_left_to_confirm_a_suspicion_is_short_from_the_start() -> None:
    """With K = 3 but only two others, a lone accuser in three nodes would wait six times too long."""
    assert MULT_5.suspicion_s(4, 0) == MULT_5.suspicion_min_s(4)
    assert MULT_5.suspicion_s(5, 0) == 6 * MULT_5.suspicion_min_s(5)


def test_more_accusers_than_count_are_not_kept() -> None:
    suspicions = Suspicions()
    suspicions.begin(7, 1, MULT_5, 10, 100.0)
    confirmed = [suspicions.confirm(7, accuser, MULT_5, 10) for accuser in range(2, 20)]
    assert confirmed == [True] * 3 + [False] * 15
    assert suspicions.wake_at == 102.5


def test_a_confirmation_never_makes_a_suspicion_longer() -> None:
    suspicions = Suspicions()
    suspicions.begin(7, 1, LAN, 3, 100.0)
    suspicions.rearm(7, 100.5)
    suspicions.confirm(7, 2, LAN, 1000)
    assert suspicions.wake_at == 100.5


def test_a_postponed_suspicion_stays_postponed_when_it_is_confirmed() -> None:
    """Or a second accuser would undo the allowance for a pause, and kill a member that had no time to refute."""
    suspicions = Suspicions()
    suspicions.begin(7, 1, MULT_5, 10, 100.0)
    suspicions.postpone(30.0)
    assert suspicions.wake_at == 145.0
    suspicions.confirm(7, 2, MULT_5, 10)
    assert suspicions.wake_at == 138.75


KINDS = st.sampled_from(["begin", "confirm", "rearm", "postpone", "end", "expire"])
STEPS = st.lists(st.tuples(KINDS, st.integers(1, 4), st.integers(1, 5)), max_size=40)


@settings(max_examples=examples(150))
@given(STEPS)
def test_no_deadline_passes_before_it_is_looked_for(steps: list[tuple[str, int, int]]) -> None:
    suspicions, now = Suspicions(), 0.0
    live: set[int] = set()
    for what, session, number in steps:
        now += 0.5
        if what == "begin":
            suspicions.begin(session, number, MULT_5, 10, now)
            live.add(session)
        elif what == "confirm":
            suspicions.confirm(session, number, MULT_5, 10)
        elif what == "rearm" and session in live:
            suspicions.rearm(session, now + number)
        elif what == "postpone":
            suspicions.postpone(number)
        elif what == "end":
            suspicions.end(session)
            live.discard(session)
        elif what == "expire":
            now += number
            over = suspicions.expired(now)
            assert len(over) == len(set(over))
            for ended in over:
                suspicions.end(ended)
                live.discard(ended)
        deadlines = [suspicion.deadline for one in sorted(live) if (suspicion := suspicions.get(one)) is not None]
        assert len(deadlines) == len(suspicions) == len(live)
        assert suspicions.wake_at <= min(deadlines, default=inf)
        assert what != "expire" or suspicions.wake_at > now
