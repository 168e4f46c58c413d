"""Whom to greet, and how often."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from random import Random

from ranvier_py.core.mesh.membership.contacts import CONTACT_S, CONTACTS_MAX, SPREAD_S, Contacts, Greetings
from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.membership.neighbour_set import MESH_MEMBERS_MAX, NeighbourSet
from ranvier_py.core.mesh.membership.roster import Roster
from ranvier_py.core.mesh.mesh_values import Address
from tests.core.mesh.membership.small_cluster import PORT, roster_of

MESH = NeighbourSet(9999, 0, Roster())
"""Nobody is in it yet: whoever is met is to be greeted."""


def place(number: int) -> Address:
    return (f"10.0.{number >> 8}.{number & 255}", PORT)


def greeted(greetings: Greetings, roster: Roster, until: float) -> list[tuple[float, Address]]:
    """Everything that is greeted when the owner wakes as it should."""
    found = []
    while (now := greetings.wake_at) <= until:
        found += [(now, address) for address in greetings.due(roster, MESH, now)]
    return found


def test_the_members_of_the_largest_mesh_are_greeted_within_moments_and_not_in_one_go() -> None:
    roster, greetings = roster_of(MESH_MEMBERS_MAX - 1), Greetings(Random(1))
    for session in range(1, MESH_MEMBERS_MAX):
        greetings.want(session, MESH_MEMBERS_MAX, 0.0)
    times: dict[Address, float] = {}
    for now, address in greeted(greetings, roster, 8.0):
        times.setdefault(address, now)
    assert len(times) == MESH_MEMBERS_MAX - 1
    ordered = sorted(times.values())
    assert ordered[-1] <= SPREAD_S * MESH_MEMBERS_MAX
    assert len(set(ordered)) == len(ordered)


def test_a_greeting_without_an_answer_is_repeated_ever_more_slowly() -> None:
    roster, greetings = roster_of(1), Greetings(Random(1))
    greetings.want(1, 10, 0.0)
    greetings.want(1, 10, 0.0)
    times = [now for now, _ in greeted(greetings, roster, 300.0)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] <= 0.02
    assert gaps[0] <= 1.0
    assert all(15.0 <= gap <= 30.0 for gap in gaps[6:])
    assert 10 <= len(times) <= 30


def test_a_member_wanted_again_is_not_greeted_twice_as_often() -> None:
    """Each loss of proof would add one more series of greetings."""
    roster, greetings = roster_of(1), Greetings(Random(1))
    for _ in range(5):
        greetings.want(1, 1, 0.0)
        greetings.done(1)
    greetings.want(1, 1, 0.0)
    assert len(greeted(greetings, roster, 0.4)) == 1


def contact_times(contacts: Contacts, members: int, until: float) -> list[tuple[float, Address]]:
    found = []
    while (now := contacts.wake_at) <= until:
        found += [(now, address) for address in contacts.due(members, now)]
    return found


def test_the_dead_are_greeted_in_turn_for_a_day_and_then_forgotten() -> None:
    contacts = Contacts(Random(1), MembershipCounters())
    for number in (1, 2, 3):
        contacts.add(place(number), 0.0)
    found = contact_times(contacts, 100, 30 * 3600.0)
    assert [address for _, address in found[:6]] == [place(1), place(2), place(3)] * 2
    assert 0.95 * CONTACT_S <= found[-1][0] <= CONTACT_S
    assert CONTACT_S / 33 <= len(found) <= CONTACT_S / 27
    assert (len(contacts), contacts.wake_at) == (0, inf)


def test_across_a_cut_somebody_is_greeted_every_second_however_many_nodes_there_are() -> None:
    for members in (1, 3, 10):
        every = [Contacts(Random(seed), MembershipCounters()) for seed in range(members)]
        for contacts in every:
            contacts.add(place(99), 0.0)
        times = sorted(now for contacts in every for now, _ in contact_times(contacts, members, 600.0))
        assert 600 * 0.85 <= len(times) <= 600 * 1.15


def test_only_so_many_contacts_are_kept_and_the_rest_is_counted() -> None:
    counts = MembershipCounters()
    contacts = Contacts(Random(1), counts)
    for number in range(CONTACTS_MAX + 10):
        contacts.add(place(number), 0.0)
    assert (len(contacts), counts.contacts_dropped) == (CONTACTS_MAX, 10)
    assert contacts.due(1, 10.0) == [place(10)]


def test_contacts_from_before_a_restart_are_greeted_quickly_once() -> None:
    """The cluster is found again without names or seeds, in a moment."""
    contacts = Contacts(Random(1), MembershipCounters())
    contacts.add(place(50), 0.0)
    for number in range(20):
        contacts.remember(place(number), 0.0)
    found = contact_times(contacts, 1, 3.0)
    assert {address for _, address in found} >= {place(number) for number in range(20)}
    assert found[19][0] <= 1.5
    assert len(found) <= 26
