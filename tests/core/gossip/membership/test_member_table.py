"""The tables of membership: how long the dead stay, and what is refused when a table is full."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.gossip.gossip_values import Outgoing, Peer, Plane
from ranvier_py.core.gossip.membership import member_table as tables
from ranvier_py.core.gossip.membership.broadcasts import Broadcasts
from ranvier_py.core.gossip.membership.local_health import LocalHealth
from ranvier_py.core.gossip.membership.member_table import DEAD_S, GONE_S, Ledger
from ranvier_py.core.gossip.membership.membership_counters import Counts
from ranvier_py.core.gossip.membership.membership_outbox import Post
from ranvier_py.core.gossip.membership.profile import LAN
from ranvier_py.core.gossip.membership.relays import RELAYS_MAX, Relays
from ranvier_py.core.gossip.membership.roster import Roster
from ranvier_py.core.gossip.wire.messages import PingRequest, State
from tests.core.gossip.membership.small_cluster import record_of, size_of


def empty() -> tuple[Ledger, Counts]:
    counts = Counts()
    broadcasts = Broadcasts(4, 0.2, size_of, 1000, counts)
    return Ledger(record_of("me", 1_000_000), broadcasts, LocalHealth(LAN), counts, Random(1)), counts


def join(ledger: Ledger, number: int, now: float = 0.0) -> None:
    member = ledger.join(record_of(f"n{number}", number), now, "told")
    if member is not None:
        ledger.proved(member)


def bury(ledger: Ledger, number: int, now: float, state: State = State.DEAD) -> None:
    member = ledger.roster.get(number)
    assert member is not None
    ledger.bury(member, member.record._replace(state=state), now, "said so")


def test_the_dead_are_forgotten_above_after_ten_minutes_and_here_after_a_day() -> None:
    ledger, _ = empty()
    for number in (1, 2, 3):
        join(ledger, number)
        bury(ledger, number, 100.0 * number)
    ledger.reap(GONE_S + 199.0)
    assert ledger.gone == [1]
    ledger.reap(GONE_S + 301.0)
    assert ledger.gone == [1, 2, 3]
    member = ledger.roster.get(1)
    assert member is not None
    assert not member.proved
    ledger.reap(DEAD_S + 201.0)
    assert [member.session for member in ledger.roster.everybody()] == [3]
    assert list(ledger.dead) == [3]
    assert ledger.gone == [1, 2, 3], "each once"


def test_whoever_returns_in_time_is_not_forgotten() -> None:
    ledger, counts = empty()
    join(ledger, 1)
    bury(ledger, 1, 0.0)
    member = ledger.roster.get(1)
    assert member is not None
    ledger.absolve(member, record_of("n1", 1, incarnation=1), 5.0, "its own word")
    ledger.reap(2 * DEAD_S)
    assert ledger.gone == []
    assert ledger.roster.live == 1
    assert counts.false_alarms == 1
    bury(ledger, 1, 2 * DEAD_S)
    ledger.forget(member)
    assert ledger.gone == [1]


def test_only_so_many_dead_are_remembered_and_the_longest_dead_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "DEAD_MAX", 3)
    ledger, _ = empty()
    for number in range(1, 6):
        join(ledger, number)
    for number in (5, 4, 3, 2, 1):
        bury(ledger, number, 10.0 - number)
        ledger.reap(10.0)
    assert list(ledger.dead) == [3, 2, 1]
    assert ledger.gone == [5, 4]
    assert len(ledger.roster) == 3


def test_a_full_table_refuses_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MEMBERS_MAX", 3)
    ledger, counts = empty()
    for number in range(1, 6):
        join(ledger, number)
    assert (ledger.roster.live, len(ledger.roster), counts.members_refused) == (3, 3, 2)


def test_changes_that_nobody_drains_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHANGES_MAX", 3)
    ledger, counts = empty()
    for number in range(1, 6):
        join(ledger, number)
    assert (len(ledger.changes), counts.changes_dropped) == (3, 2)


def test_who_left_is_no_contact_and_who_died_is() -> None:
    ledger, _ = empty()
    for number in (1, 2):
        join(ledger, number)
    bury(ledger, 1, 1.0, State.LEFT)
    assert len(ledger.contacts) == 0
    bury(ledger, 2, 1.0)
    assert len(ledger.contacts) == 1


def test_a_member_that_moves_has_to_prove_itself_at_its_new_address() -> None:
    ledger, _ = empty()
    join(ledger, 1)
    member = ledger.roster.get(1)
    assert member is not None
    ledger.absolve(member, record_of("n1", 1, host="10.7.7.7", incarnation=1), 1.0, "its own word")
    assert not member.proved
    assert ledger.greetings.due(ledger.roster, ledger.neighbours, 10.0) == [("10.7.7.7", 7946)]
    assert ledger.roster.at(("10.7.7.7", 7946)) == [member]


def test_a_forgotten_member_is_not_spoken_of_any_more() -> None:
    ledger, _ = empty()
    join(ledger, 1)
    bury(ledger, 1, 1.0)
    assert len(ledger.broadcasts) == 1
    member = ledger.roster.get(1)
    assert member is not None
    ledger.forget(member)
    assert (len(ledger.broadcasts), len(ledger.roster), len(ledger.dead)) == (0, 0, 0)


def test_only_so_many_pings_for_others_are_under_way() -> None:
    counts = Counts()
    outbox: list[Outgoing] = []
    post = Post(outbox, Broadcasts(4, 0.2, size_of, 1000, counts), size_of=size_of, room_bytes=1000, datagrams=True)
    relays = Relays(Roster(), post, counts)
    asker = Peer(5, ("10.0.0.5", 7946))
    for seq in range(RELAYS_MAX + 10):
        relays.ask(asker, PingRequest(seq, 9, "10.0.0.9", 7946), Plane.DATAGRAM, (), LAN, 0.0)
    assert (len(relays), counts.relayed, counts.relays_dropped) == (RELAYS_MAX, RELAYS_MAX, 10)
    outbox.clear()
    relays.tick(0.2)
    planes = [(type(letter.message).__name__, letter.plane) for letter in outbox]
    assert planes == [("Nack", Plane.DATAGRAM), ("Ping", Plane.PROBE)] * RELAYS_MAX
    assert counts.nacks == RELAYS_MAX
    relays.tick(1.0)
    assert len(relays) == 0
    assert len(outbox) == 2 * RELAYS_MAX, "one nack each"
