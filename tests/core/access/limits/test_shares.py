"""Shares of limits that nodes have on their own, and what is kept for those that vanished."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.limits.count import CountRow
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.meters import LimitSpan
from ranvier_py.core.access.limits.shares import FREED_S, STALE_S, VANISHED_S, LimitPeers
from tests.builders.machine_net import peer_of
from tests.core.access.limits.limit_net import meters

(MINUTE,) = meters(tokens_per_minute=1000)
ME = 1


def peers(*sessions: int, names: dict[int, str] = {}) -> LimitPeers:  # noqa: B006  # only read
    made = LimitPeers(ME, lambda _: False, lambda session: names.get(session, f"n{session}"))
    made.met([peer_of(session) for session in sessions], 100.0)
    for session in sessions:
        made.fresh(session, 100.0)
    return made


@given(st.dictionaries(st.integers(1, 6), st.integers(0, 500)), st.lists(st.integers(2, 6), max_size=4, unique=True))
def test_shares_of_all_sum_up_to_one_in_whatever_order_nodes_vanish(taken: dict[int, int], gone: list[int]) -> None:
    counters, others = Counters(ME), peers(2, 3, 4, 5, 6)
    count = counters.count(MINUTE, 100.0)
    for session, tokens in taken.items():
        counters.merge(CountRow(MINUTE.id, session, LimitSpan.MINUTE, 1, 0, tokens, 0.0, 0.0), 100.0)
    left = [2, 3, 4, 5, 6]
    for session in gone:
        left.remove(session)
        others.met([peer_of(one) for one in left], 100.0)
        held = others.held(1000.0, count, count.taken)
        assert 0 <= held <= 1000.0
    shares = [*others.share(count, ME, *others.live), *[allowed.share for allowed in count.allowed.values()]]
    assert abs(sum(shares) - 1) < 1e-9
    assert len(shares) == 6


def test_a_node_vanishes_once_it_is_silent_and_is_back_with_its_next_message() -> None:
    others = peers(2, 3)
    others.fresh(2, 101.0)
    others.look(100.0 + STALE_S + 0.1)
    assert (list(others.live), list(others.vanished)) == ([2], [3])
    assert others.fresh(3, 103.0)
    others.look(103.0)
    assert (list(others.live), list(others.vanished)) == ([2, 3], [])


def test_a_node_that_is_back_under_its_name_takes_the_place_of_the_one_that_vanished() -> None:
    others = peers(2, names={2: "router-2", 3: "router-2"})
    others.met([], 101.0)
    assert list(others.vanished) == [2]
    others.met([peer_of(3)], 102.0)
    assert not others.vanished


def test_a_vanished_node_is_forgotten_after_an_hour_unless_shares_are_kept() -> None:
    for keeps in (False, True):
        others = peers(2)
        others.keeps = keeps
        others.met([], 101.0)
        others.look(101.0 + VANISHED_S - 1)
        assert list(others.vanished) == [2]
        others.look(101.0 + VANISHED_S + 1)
        assert list(others.vanished) == [2] * keeps


def test_what_a_vanished_node_had_in_flight_is_free_three_seconds_later() -> None:
    others = peers(2)
    others.met([], 101.0)
    others.look(100.0 + FREED_S - 0.1)
    assert others.freed == []
    for later in (0.0, 5.0):
        others.look(100.0 + FREED_S + later)
        assert others.freed == [2]


def test_all_nodes_that_see_the_same_members_name_the_same_home() -> None:
    homes = set()
    for me in (1, 2, 3):
        made = LimitPeers(me, lambda _: False, str)
        others = [session for session in (1, 2, 3) if session != me]
        made.met([peer_of(session) for session in others], 100.0)
        for session in others:
            made.fresh(session, 100.0)
        home = made.home(77)
        homes.add(me if home is None else home.session)
    assert len(homes) == 1
