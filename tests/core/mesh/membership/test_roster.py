"""The table of members and the order in which they are probed."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.membership.roster import URGENT_MAX, ProbeOrder, Roster
from ranvier_py.core.mesh.wire.messages import State
from tests.core.mesh.membership.small_cluster import record_of, roster_of
from tests.examples import examples


def bury(roster: Roster, turns: ProbeOrder, session: int) -> None:
    member = roster.get(session)
    assert member is not None
    roster.change(member, member.record._replace(state=State.DEAD), 1.0)
    turns.remove(session)


def drawn(turns: ProbeOrder, roster: Roster, count: int) -> list[int]:
    members = [turns.next(roster) for _ in range(count)]
    return [0 if member is None else member.session for member in members]


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_between_two_probes_of_one_member_lie_at_most_2n_minus_2_others(count: int) -> None:
    """SWIM's bound: 2n - 1 periods. Whatever is received of whom meanwhile must not break it."""
    roster, rng = roster_of(count), Random(1)
    turns = ProbeOrder(Random(2))
    order = []
    for now in range(count * 40):
        session = drawn(turns, roster, 1)[0]
        order.append(session)
        received = roster.get(rng.randint(1, count))
        received.received_at = float(now)
    for session in range(1, count + 1):
        at = [position for position, probed in enumerate(order) if probed == session]
        assert max(later - earlier for earlier, later in pairwise(at)) <= 2 * count - 1
        assert at[0] < count


def test_every_round_has_an_order_of_its_own() -> None:
    roster, turns = roster_of(8), ProbeOrder(Random(2))
    rounds = [tuple(drawn(turns, roster, 8)) for _ in range(20)]
    assert all(sorted(order) == list(range(1, 9)) for order in rounds)
    assert len(set(rounds)) == 20


def test_the_most_silent_of_the_next_few_goes_first() -> None:
    roster, turns = roster_of(6), ProbeOrder(Random(2))
    for session in range(1, 7):
        member = roster.get(session)
        member.received_at = 10.0 - session
    assert drawn(turns, roster, 6) == [6, 5, 4, 3, 2, 1]


def test_a_newcomer_gets_a_random_place_in_what_is_left_of_the_round() -> None:
    """At the end of a list it would wait for a whole round, and all newcomers would be probed in one go."""
    places = []
    for seed in range(60):
        roster, turns = roster_of(20), ProbeOrder(Random(seed))
        drawn(turns, roster, 5)
        roster.add(record_of("n99", 99), 0.0).received_at = 5.0
        for member in roster.alive():
            member.received_at = 5.0
        turns.insert(99)
        places.append(drawn(turns, roster, 16).index(99))
    assert min(places) <= 2
    assert max(places) >= 13
    assert len(set(places)) > 8


def test_the_dead_are_passed_over() -> None:
    roster, turns = roster_of(4), ProbeOrder(Random(1))
    drawn(turns, roster, 1)
    bury(roster, turns, 2)
    bury(roster, turns, 3)
    assert sorted(drawn(turns, roster, 6)[-4:]) == [1, 1, 4, 4]
    bury(roster, turns, 1)
    bury(roster, turns, 4)
    assert drawn(turns, roster, 3) == [0, 0, 0]


def test_the_urgent_get_every_other_turn_and_no_more() -> None:
    """Under many suspicions a round that only saw suspects would never find the next dead."""
    roster, turns = roster_of(10), ProbeOrder(Random(1))
    order = []
    for _ in range(20):
        turns.hasten(3)
        order += drawn(turns, roster, 1)
    assert order[::2] == [3] * 10
    assert sorted(order[1::2]) == list(range(1, 11))


def test_urgency_is_bounded() -> None:
    roster, turns = roster_of(100), ProbeOrder(Random(1))
    for session in range(1, 101):
        turns.hasten(session)
    assert drawn(turns, roster, 2 * URGENT_MAX)[::2] == list(range(1, URGENT_MAX + 1))
    assert drawn(turns, roster, 1)[0] != URGENT_MAX + 1


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("add", "die", "return", "rename", "move", "remove")), st.integers(1, 6), st.integers(1, 9)
    ),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(CHANGES)
def test_the_tables_agree_after_any_changes(changes: list[tuple[str, int, int]]) -> None:
    roster = Roster()
    known = {}
    for now, (what, session, number) in enumerate(changes):
        member, name = roster.get(session), f"n{number}"
        free = roster.named(name) is None
        if member is None:
            if what == "add" and free:
                known[session] = roster.add(record_of(name, session), now)
            continue
        record = member.record
        if what == "die":
            roster.change(member, record._replace(state=State.DEAD), now)
        elif what == "return":
            roster.change(member, record._replace(state=State.ALIVE), now)
        elif what == "rename" and free:
            roster.change(member, record._replace(name=name), now)
        elif what == "move":
            roster.change(member, record._replace(host=f"10.1.0.{number}"), now)
        elif what == "remove":
            roster.remove(member)
            del known[session]
        alive = [member for member in known.values() if member.live]
        assert list(roster.alive()) == alive
        assert roster.alive() is roster.alive()
        assert (len(roster), roster.live) == (len(known), len(alive))
        assert all(member in roster.at(member.address) for member in alive)
        assert all(roster.named(member.record.name) is member for member in known.values())
