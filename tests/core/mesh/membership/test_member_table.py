"""The tables of membership: how long the dead stay, and what is refused when a table is full."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.mesh.membership import member_table as tables
from ranvier_py.core.mesh.membership.broadcasts import MembershipOutbox
from ranvier_py.core.mesh.membership.member_table import DEAD_S, GONE_S, MemberTable
from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.membership.profile import LAN
from ranvier_py.core.mesh.membership.relays import RELAYS_MAX, Relays
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import PingRequest, State
from tests.core.mesh.membership.small_cluster import record_of


def empty() -> tuple[MemberTable, MembershipCounters]:
    table = MemberTable(record_of("me", 1_000_000), LAN, 1000, Random(1))
    return table, table.counters


def join(table: MemberTable, number: int, now: float = 0.0) -> None:
    member = table.join(record_of(f"n{number}", number), now, "reported")
    if member is not None:
        table.proved(member)


def bury(table: MemberTable, number: int, now: float, state: State = State.DEAD) -> None:
    member = table.roster.get(number)
    assert member is not None
    table.bury(member, member.record._replace(state=state), now, "claimed so")


def test_the_dead_are_forgotten_above_after_ten_minutes_and_here_after_a_day() -> None:
    table, _ = empty()
    for number in (1, 2, 3):
        join(table, number)
        bury(table, number, 100.0 * number)
    table.reap(GONE_S + 199.0)
    assert table.dead.gone == [1]
    table.reap(GONE_S + 301.0)
    assert table.dead.gone == [1, 2, 3]
    member = table.roster.get(1)
    assert not member.proved
    table.reap(DEAD_S + 201.0)
    assert [member.session for member in table.roster.values()] == [3]
    assert list(table.dead.died) == [3]
    assert table.dead.gone == [1, 2, 3], "each once"


def test_whoever_returns_in_time_is_not_forgotten() -> None:
    table, counts = empty()
    join(table, 1)
    bury(table, 1, 0.0)
    member = table.roster.get(1)
    assert member is not None
    table.absolve(member, record_of("n1", 1, incarnation=1), 5.0, "its own word")
    table.reap(2 * DEAD_S)
    assert table.dead.gone == []
    assert table.roster.live == 1
    assert counts.false_alarms == 1
    bury(table, 1, 2 * DEAD_S)
    table.forget(member)
    assert table.dead.gone == [1]


def test_only_so_many_dead_are_remembered_and_the_longest_dead_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "DEAD_MAX", 3)
    table, _ = empty()
    for number in range(1, 6):
        join(table, number)
    for number in (5, 4, 3, 2, 1):
        bury(table, number, 10.0 - number)
        table.reap(10.0)
    assert list(table.dead.died) == [3, 2, 1]
    assert table.dead.gone == [5, 4]
    assert len(table.roster) == 3


def test_a_full_table_refuses_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MEMBERS_MAX", 3)
    table, counts = empty()
    for number in range(1, 6):
        join(table, number)
    assert (table.roster.live, len(table.roster), counts.members_refused) == (3, 3, 2)


def test_changes_that_nobody_drains_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHANGES_MAX", 3)
    table, counts = empty()
    for number in range(1, 6):
        join(table, number)
    assert (len(table.changes), counts.changes_dropped) == (3, 2)


def test_who_left_is_no_contact_and_who_died_is() -> None:
    table, _ = empty()
    for number in (1, 2):
        join(table, number)
    bury(table, 1, 1.0, State.LEFT)
    assert len(table.contacts) == 0
    bury(table, 2, 1.0)
    assert len(table.contacts) == 1


def test_a_member_that_moves_has_to_prove_itself_at_its_new_address() -> None:
    table, _ = empty()
    join(table, 1)
    member = table.roster.get(1)
    table.absolve(member, record_of("n1", 1, host="10.7.7.7", incarnation=1), 1.0, "its own word")
    assert not member.proved
    assert table.greetings.due(table.roster, table.neighbours, 10.0) == [("10.7.7.7", 7946)]
    assert table.roster.at(("10.7.7.7", 7946)) == [member]


def test_a_forgotten_member_is_not_spoken_of_any_more() -> None:
    table, _ = empty()
    join(table, 1)
    bury(table, 1, 1.0)
    assert len(table.broadcasts) == 1
    member = table.roster.get(1)
    assert member is not None
    table.forget(member)
    assert (len(table.broadcasts), len(table.roster), len(table.dead.died)) == (0, 0, 0)


def test_pings_in_the_name_of_others_are_bounded() -> None:
    table, counts = empty()
    outbox: list[Outgoing] = []
    relays = Relays(table, MembershipOutbox(outbox, table.broadcasts, 1000, datagrams=True))
    asker = Peer(5, ("10.0.0.5", 7946))
    for seq in range(RELAYS_MAX + 10):
        relays.relay(asker, PingRequest(seq, 9, "10.0.0.9", 7946), Plane.DATAGRAM, (), 0.0)
    assert (len(relays), counts.relayed, counts.relays_dropped) == (RELAYS_MAX, RELAYS_MAX, 10)
    outbox.clear()
    relays.tick(0.2)
    planes = [(type(out.message).__name__, out.plane) for out in outbox]
    assert planes == [("Nack", Plane.DATAGRAM), ("Ping", Plane.PROBE)] * RELAYS_MAX
    assert counts.nacks == RELAYS_MAX
    relays.tick(1.0)
    assert len(relays) == 0
    assert len(outbox) == 2 * RELAYS_MAX, "one nack each"
