"""Revocations hold until their time, and are believed only with the admin key's signature. How they merge:
test_join_table.py."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.access import revocations as r
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.peer.router_peer import CODEC

KEY, NOON_MS, HOUR_MS = b"k" * 32, 1_795_262_400_000, 3_600_000
PEER = Peer(7, ("127.0.0.1", 7946))


def node(key: bytes = KEY, wall_ms: int = NOON_MS, stored: bytes = b"") -> tuple[r.Revocations, list[Outgoing]]:
    outbox: list[Outgoing] = []
    return r.Revocations(key, outbox, Random(1), 0.0, wall_ms=wall_ms, stored=stored), outbox


def row(key: bytes = KEY, clock: int = NOON_MS, until_ms: int = NOON_MS + HOUR_MS, holds: int = 1) -> r.Revocation:
    unsigned = r.Revocation(clock, until_ms, holds, "ann", b"")
    return unsigned._replace(signature=r.signature_of(key, unsigned))


def taken(one: r.Revocation, key: bytes = KEY) -> r.Revocations:
    table, _ = node(key)
    table.receive(PEER, CODEC.decode(*CODEC.encode(r.Revoked((one,)))), 0.0)
    return table


def test_a_revocation_holds_until_its_time_on_every_node_that_gets_it() -> None:
    table = taken(row())
    assert [table.is_revoked("ann", NOON_MS + ms) for ms in (0, HOUR_MS - 1, HOUR_MS)] == [True, True, False]
    assert not table.is_revoked("bob", NOON_MS)
    assert [one.id for one in table.held(0.0)] == ["ann"]
    assert table.held(3600.0) == []


def test_the_later_one_counts_whichever_comes_first() -> None:
    table = taken(row(clock=NOON_MS + 5, holds=0))
    table.receive(PEER, r.Revoked((row(),)), 0.0)
    assert not table.is_revoked("ann", NOON_MS)
    table.receive(PEER, r.Revoked((row(clock=NOON_MS + 6),)), 0.0)
    assert table.is_revoked("ann", NOON_MS)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (row(b"another key of some length"), "signature"),
        (row()._replace(until_ms=NOON_MS + 2), "signature"),
        (row()._replace(id="bob"), "signature"),
        (row(until_ms=NOON_MS), "time"),
        (row(until_ms=NOON_MS + 2 * r.YEAR_MS), "time"),
        (row(clock=NOON_MS + 2 * r.CLOCK_AHEAD_MS), "time"),
    ],
)
def test_one_that_nobody_signed_or_that_is_over_is_refused_and_counted(one: r.Revocation, reason: str) -> None:
    table = taken(one)
    assert table.counters.refused[reason] == 1
    assert not table.is_revoked("ann", NOON_MS)


def test_without_the_admin_key_none_is_given_or_taken() -> None:
    table, _ = node(b"")
    assert table.give("ann", NOON_MS + HOUR_MS, 0.0) == r.UNSIGNED
    assert not taken(row(), b"").is_revoked("ann", NOON_MS)


def test_one_outlives_a_restart_of_all_nodes_until_it_is_over_and_so_does_that_it_was_taken_back() -> None:
    table, _ = node()
    assert not table.give("ann", NOON_MS + HOUR_MS, 0.0)
    assert not table.give("bob", NOON_MS + HOUR_MS, 0.0)
    assert not table.give("bob", 0, 1.0)
    later, _ = node(wall_ms=NOON_MS + 60_000, stored=table.stored())
    assert [later.is_revoked(each, NOON_MS + 60_000) for each in ("ann", "bob")] == [True, False]
    later.receive(PEER, r.Revoked((row()._replace(id="bob"),)), 0.0)
    assert not later.is_revoked("bob", NOON_MS + 60_000)
    assert node(wall_ms=NOON_MS + HOUR_MS, stored=table.stored())[0].held(0.0) == []
    assert node(b"another key", stored=table.stored())[0].held(0.0) == []
    for spoilt in (b"", b"x" * 50, table.stored()[:-3]):
        assert node(stored=spoilt)[0].held(0.0) == []


def test_they_are_bounded_and_what_is_over_makes_room() -> None:
    table, _ = node()
    for number in range(r.REVOKED_MAX):
        assert not table.give(f"k{number}", NOON_MS + HOUR_MS, 0.0)
    assert "keys are revoked, and no more can be" in table.give("one more", NOON_MS + HOUR_MS, 0.0)
    table.receive(PEER, r.Revoked((row(),)), 0.0)
    assert table.counters.refused["full"] == 1
    assert len(node(stored=table.stored())[0].held(0.0)) == r.STORED_MAX
    assert len(table.stored()) < 1 << 16
    assert not table.give("one more", NOON_MS + 2 * HOUR_MS, 3600.0)
    assert table.give("never revoked", 0, 3600.0) == "never revoked is not revoked"
