"""Whom a node knows directly: all of a few, the neighbours of many."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.membership.neighbour_set import (
    ALL_RINGS,
    MESH_MEMBERS_MAX,
    SHARED_RINGS,
    STEPS,
    NeighbourSet,
    positions_of,
)
from ranvier_py.core.mesh.membership.roster import Member, Roster
from ranvier_py.core.mesh.wire.messages import State
from ranvier_py.core.splitmix import MASK
from tests.core.mesh.membership.small_cluster import record_of
from tests.examples import examples

SCHEMA = 7


def several(sessions: Iterable[int]) -> list[tuple[int, int]]:
    """(session, schema) of members of our schema."""
    return [(session, SCHEMA) for session in sessions]


class World:
    """A circle and its roster, as the ledger keeps them together."""

    def __init__(self, me: int) -> None:
        self.roster = Roster()
        self.neighbours = NeighbourSet(me, SCHEMA, self.roster)

    def join(self, session: int, schema: int = SCHEMA) -> Member:
        record = record_of(f"n{session}", session, host="10.0.0.1")._replace(schema=schema)
        member = self.roster.add(record, 0.0)
        self.neighbours.join(member)
        return member

    def part(self, session: int) -> None:
        member = self.roster.get(session)
        assert member is not None
        self.roster.remove(member)
        self.neighbours.part(session)


def world_of(me: int, others: list[tuple[int, int]]) -> World:
    world = World(me)
    for session, schema in others:
        if session != me:
            world.join(session, schema)
    return world


def neighbour_set_of(me: int, others: list[tuple[int, int]]) -> NeighbourSet:
    return world_of(me, others).neighbours


def neighbours_of(me: int, others: dict[int, int]) -> set[int]:
    """Brute force over {session: schema}."""
    found: set[int] = set()
    for ring in (*SHARED_RINGS, *ALL_RINGS):
        asked = [session for session, schema in others.items() if ring in ALL_RINGS or schema == SCHEMA]
        mine = positions_of(me)[ring]
        ahead = sorted(asked, key=lambda session: (positions_of(session)[ring] - mine) & MASK)
        found |= {*ahead[:STEPS], *ahead[-STEPS:]}
    return found


def test_in_a_small_cluster_everybody_is_wanted() -> None:
    neighbours = neighbour_set_of(1, several(range(2, MESH_MEMBERS_MAX + 1)))
    assert neighbours.is_mesh
    assert all(neighbours.wants(session) for session in range(2, MESH_MEMBERS_MAX + 1))


def test_in_a_large_cluster_sixteen_are_wanted_and_want_us_too() -> None:
    """Or half of the greetings would find nobody who tells anything back."""
    members = several(range(1, 301))
    circles = {session: neighbour_set_of(session, members) for session, _ in members}
    for session, neighbours in circles.items():
        assert not neighbours.is_mesh
        assert 12 <= len(neighbours.near()) <= 16
        assert all(session in circles[other].near() for other in neighbours.near())


@pytest.mark.slow
def test_neighbours_of_neighbours_reach_everybody_in_a_few_steps() -> None:
    members = several(range(1, 1001))
    near: dict[int, dict[int, None]] = {}
    reached, steps = {1}, 0
    while len(reached) < 1000 and steps < 6:
        for session in sorted(reached):
            near.setdefault(session, neighbour_set_of(session, members).near())
        reached |= {other for session in sorted(reached) for other in near[session]}
        steps += 1
    assert steps <= 4


def test_members_of_another_schema_are_neighbours_on_the_ring_of_all_alone() -> None:
    """They share no routes with us, but must hear of members and backends."""
    neighbours = neighbour_set_of(1, [(session, SCHEMA if session % 2 else 8) for session in range(2, 400)])
    other = [session for session in neighbours.near() if not session % 2]
    assert 1 <= len(other) <= 2 * STEPS
    assert len(neighbours.near()) - len(other) >= 2 * STEPS * len(SHARED_RINGS) - 3


def test_who_moves_up_after_a_death_is_to_be_greeted() -> None:
    world = world_of(1, several(range(2, 400)))
    neighbours = world.neighbours
    before = dict(neighbours.near())
    for member in world.roster.alive():
        if member.session in before:
            neighbours.met(member)
    assert neighbours.unmet() == []
    world.part(next(iter(before)))
    unmet = neighbours.unmet() if neighbours.widened else []
    assert unmet
    assert all(session not in before and neighbours.wants(session) for session in unmet)


def test_a_cluster_that_shrinks_becomes_a_mesh_again() -> None:
    """Those that were too many to know are few now, and nothing else would have them greeted."""
    world = world_of(1, several(range(2, MESH_MEMBERS_MAX + 2)))
    assert not world.neighbours.is_mesh
    world.part(2)
    assert (world.neighbours.is_mesh, world.neighbours.widened) == (True, True)
    assert world.neighbours.unmet() == list(range(3, MESH_MEMBERS_MAX + 2))


def test_the_dead_and_the_moved_are_no_acquaintances() -> None:
    world = world_of(1, several((2, 3, 4)))
    members = world.roster.alive()
    for member in members:
        world.neighbours.met(member)
    world.part(2)
    world.neighbours.lost(3)
    assert [member.session for member in world.neighbours.acquainted()] == [4]


def test_a_proof_of_the_dead_makes_no_acquaintance() -> None:
    world = world_of(1, several((2,)))
    member = world.roster.alive()[0]
    world.roster.change(member, member.record._replace(state=State.DEAD), 1.0)
    world.neighbours.part(2)
    world.neighbours.met(member)
    assert world.neighbours.acquainted() == ()


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), count=st.integers(0, 120))
def test_neighbours_are_the_next_on_each_ring_whatever_happened_before(seed: int, count: int) -> None:
    rng = Random(seed)
    world, there = World(5), dict[int, int]()
    neighbours = world.neighbours
    for _ in range(count):
        if there and rng.random() < 0.4:
            gone = rng.choice(list(there))
            del there[gone]
            world.part(gone)
        else:
            session = rng.getrandbits(64) | 8
            there[session] = rng.choice((SCHEMA, SCHEMA, 8))
            world.join(session, there[session])
        if rng.random() < 0.3:
            assert set(neighbours.near()) == neighbours_of(5, there)
    assert set(neighbours.near()) == neighbours_of(5, there)
