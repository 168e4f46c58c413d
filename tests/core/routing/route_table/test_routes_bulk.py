"""Merging columns: as if each claim had been learned, and sound whatever a peer sends."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table import claims as claims_module
from ranvier_py.core.routing.route_table.route_values import U64, BackendNames, Claim, RouteColumns
from ranvier_py.core.splitmix import mix
from tests.builders.route_tables import route_table
from tests.core.routing.route_table.looks import (
    BACKENDS,
    DEPTHS,
    GENERATIONS,
    NOW,
    SOUP,
    TEXTS,
    TOKENS,
    TTL_S,
    Learned,
    chunks_of,
    learned_of,
    pairs_of,
    sums_of,
    table_of,
)
from tests.core.routing.route_table.test_routes_properties import check
from tests.examples import examples

NAMES = BackendNames(
    np.array([mix(n) for n in range(1, 4)], U64), np.zeros(3, U64), np.array(GENERATIONS[:BACKENDS], np.int32)
)
THEIRS = np.array([*GENERATIONS[:BACKENDS], -1], np.int32)


def merge_all(table: RouteTable, chunks: list[RouteColumns], now: float = NOW) -> int:
    return sum(table.merge(columns, NAMES.generation, now) for columns in chunks)


def columns(*claims: tuple[int, int, int, int, int, float]) -> RouteColumns:
    """(parent, tokens, token, text, backend, age)"""
    parent, tokens, token, text, backend, age = zip(*claims, strict=True) if claims else ((),) * 6
    return RouteColumns(
        np.array(parent, U64),
        np.array(tokens, np.uint32),
        np.array(token, U64),
        np.array(text, U64),
        np.array(backend, np.int16),
        np.array([NOW - each for each in age], np.int32),
    )


PLAIN = (
    st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.integers(0, 2)), min_size=1, max_size=6)
    .map(lambda chain: sorted({depth: (depth, *rest) for depth, *rest in chain}.values(), reverse=True))
    .map(
        lambda chain: [
            (16 * depth, (exact or not text) * mix(depth), text and mix(100 * text + depth))
            for depth, exact, text in chain
        ]
    )
)
"""Pieces of one path, deepest first. What the two texts of a depth have in common are its tokens."""


@settings(max_examples=examples(150))
@given(learned_of(SOUP))
def test_an_empty_table_gets_the_same_claims(learned: Learned) -> None:
    source, target = table_of(learned), route_table(ttl_s=TTL_S)
    merge_all(target, chunks_of(source, NAMES))
    check(target, GENERATIONS, NOW)
    assert sums_of(target, NAMES) == sums_of(source, NAMES)
    assert {pair: evidence for pair, (_, evidence) in pairs_of(target).items()} == {
        pair: evidence for pair, (_, evidence) in pairs_of(source).items()
    }
    assert all(trust == Trust.REMOTE for trust, _ in pairs_of(target).values())


@settings(max_examples=examples(150))
@given(learned_of(PLAIN), learned_of(PLAIN))
def test_a_merge_loses_nothing_and_takes_the_later_evidence(mine: Learned, theirs: Learned) -> None:
    source, target = table_of(theirs), table_of(mine)
    before, reported = pairs_of(target), pairs_of(source)
    chunks = chunks_of(source, NAMES)
    merge_all(target, chunks)
    check(target, GENERATIONS, NOW)
    after = pairs_of(target)
    assert all(after[pair][0] >= trust and after[pair][1] >= evidence for pair, (trust, evidence) in before.items())
    assert all(after[pair][1] >= evidence for pair, (_, evidence) in reported.items())
    again = sums_of(target, NAMES)
    assert merge_all(target, chunks) == 0, "the same once more is nothing new"
    assert sums_of(target, NAMES) == again


def test_new_rows_hang_under_a_row_whose_tokens_came_with_the_same_claims() -> None:
    target = route_table(ttl_s=TTL_S)
    target.learn([(16, 0, 7)], BackendId(1), GENERATIONS[1], Trust.REMOTE, NOW)
    chunk = columns((0, 16, 1, 7, 1, 0), (1, 32, 2, 0, 1, 0), (2, 48, 3, 0, 1, 0))
    merge_all(target, [chunk])
    rows = target.rows
    first, second, third = (rows.index[name] for name in (1, 2, 3))
    assert rows.index[7] == first
    assert (rows.parent[third], rows.parent[second], rows.parent[first]) == (second, first, 0)
    check(target, GENERATIONS, NOW)


CLAIMS = st.lists(
    st.tuples(
        st.one_of(TOKENS, TEXTS),
        st.one_of(DEPTHS, st.just(0)),
        st.one_of(TOKENS, TEXTS),
        st.one_of(TEXTS, TOKENS),
        st.integers(-1, 5),
        st.integers(-3, 25),
    ),
    max_size=12,
)


@settings(max_examples=examples(300))
@given(
    learned_of(SOUP),
    st.lists(CLAIMS, max_size=3),
    st.sampled_from((1, 4, 8, 1000)),
    st.sampled_from(("lru", "utility")),
)
def test_any_columns_leave_a_sound_table(
    mine: Learned, theirs: list[list[tuple[int, int, int, int, int, float]]], capacity: int, eviction: str
) -> None:
    """Circles, parents of themselves, names that mean two things, ids and times out of range, no room."""
    table = table_of(mine, capacity, eviction)
    for claims in theirs:
        table.merge(columns(*claims), THEIRS, NOW)
        check(table, GENERATIONS, NOW)
    while len(table):
        table.sweep(NOW + 2 * TTL_S, GENERATIONS)
    check(table, GENERATIONS, NOW + 2 * TTL_S)


@pytest.mark.parametrize(
    "claim",
    [
        (0, 0, 1, 2, 0, 0.0),  # of no tokens
        (0, 16, 0, 0, 0, 0.0),  # without a name
        (0, 16, 1, 2, 3, 0.0),  # of a backend that peers do not know
        (0, 16, 1, 2, 4, 0.0),  # or does not exist
        (0, 16, 1, 2, -1, 0.0),
        (0, 16, 1, 2, 0, TTL_S),  # expired
        (0, 16, 1, 2, 0, -1.0),  # of tomorrow
    ],
)
def test_what_is_no_live_claim_is_left_out(claim: tuple[int, int, int, int, int, float]) -> None:
    table = route_table(ttl_s=TTL_S)
    assert table.merge(columns(claim, (0, 16, 7, 8, 0, 0.0)), THEIRS, NOW) == 1
    assert set(pairs_of(table)) == {(7, 0), (8, 0)}


def test_rows_find_their_place_among_known_ones() -> None:
    """The order of eviction follows the tree: deep rows first."""
    table = route_table(([(32, 2, 0), (16, 1, 0)], 0, NOW), generation=2, ttl_s=TTL_S)
    merge_all(table, [columns((2, 48, 3, 0, 0, 1.0), (3, 64, 4, 44, 0, 1.0), (2, 48, 5, 0, 0, 1.0))])
    assert [(view.level, view.token_fingerprint) for view in table.subtree(0)] == [
        (0, 1),
        (1, 2),
        (2, 5),
        (2, 3),
        (3, 4),
    ]
    check(table, GENERATIONS, NOW)


def test_a_claim_of_a_new_row_climbs_to_known_parents() -> None:
    """A router that matches the shorter prefix must find the backend, too."""
    table = route_table(([(32, 2, 0), (16, 1, 0)], 0, NOW - 9), generation=2, ttl_s=TTL_S)
    merge_all(table, [columns((2, 48, 3, 0, 1, 4.0), (3, 64, 4, 0, 0, 2.0))])
    assert {pair: claim[1] for pair, claim in pairs_of(table).items()} == {
        (1, 0): 98,
        (2, 0): 98,
        (3, 0): 98,
        (4, 0): 98,
        (1, 1): 96,
        (2, 1): 96,
        (3, 1): 96,
    }
    check(table, GENERATIONS, NOW)


def test_a_row_without_its_parent_finds_it_when_it_is_reported_again() -> None:
    table = route_table(ttl_s=TTL_S)
    merge_all(table, [columns((1, 32, 2, 0, 0, 0.0))])
    assert [view.level for view in table.subtree(0)] == [0]
    merge_all(table, [columns((0, 16, 1, 0, 0, 0.0), (1, 32, 2, 0, 0, 0.0))])
    assert [(view.level, view.tokens) for view in table.subtree(0)] == [(0, 16), (1, 32)]


def test_a_full_table_stays_full_and_keeps_the_newest() -> None:
    rng = Random(2)
    table = route_table(capacity=500, ttl_s=TTL_S)
    for start in range(0, 2000, 100):
        claims = [(0, 16, rng.getrandbits(64) | 1, 0, 0, 19.0 - start // 100 * 0.9) for _ in range(100)]
        merge_all(table, [columns(*claims)])
        check(table, GENERATIONS, NOW)
    statistics = table.counters
    assert (statistics.rows, statistics.evicted["remote"], statistics.created) == (500, 1500, 2000)
    assert min(evidence for _, evidence in pairs_of(table).values()) >= NOW - 6


def test_uses_that_peers_saw_before_this_machine_started_are_those_of_their_own_backend() -> None:
    """Time is counted from then, so what peers saw earlier has negative seconds."""
    uses: list[tuple[int, int, int, int]] = []
    table = route_table()
    table.on_use = lambda _, backend, generation, second, tokens: uses.append((backend, generation, second, tokens))
    table.merge(columns((0, 16, 1, 0, 1, NOW + 50), (0, 32, 2, 0, 2, NOW - 5)), NAMES.generation, 10.0, used=True)
    assert uses == [(1, 0, -50, 16), (2, 5, 5, 32)]


def test_local_rows_outlive_what_peers_report() -> None:
    table = route_table(capacity=300, ttl_s=TTL_S)
    for number in range(1, 201):
        table.learn([(16, mix(number), 0)], BackendId(0), 2, Trust.LOCAL, NOW - 15)
    merge_all(
        table,
        [
            columns(*((0, 16, mix(number), 0, 1, 0.0) for number in range(start, start + 90)))
            for start in range(1000, 2000, 90)
        ],
    )
    assert sum(trust == Trust.LOCAL for trust, _ in pairs_of(table).values()) == 200


def test_more_rows_than_the_table_has_are_refused_not_mixed_up() -> None:
    table = route_table(capacity=5, ttl_s=TTL_S)
    merge_all(table, [columns(*((0, 16, mix(number), 0, 0, 0.0) for number in range(1, 10)))])
    check(table, GENERATIONS, NOW)
    assert (len(table), table.counters.refused) == (5, 4)


def test_the_table_grows_by_doubling_while_it_merges() -> None:
    table = route_table(capacity=3000, ttl_s=TTL_S)
    for start in range(1, 3000, 512):
        key = min(start + 512, 3001)
        merge_all(table, [columns(*((mix(n - 1), 16, mix(n), mix(n + 10**6), n % 3, 0.0) for n in range(start, key)))])
    assert len(table) == 3000 == table.counters.created
    check(table, GENERATIONS, NOW)


def test_rows_used_before_are_linked_like_new_ones() -> None:
    """A free row keeps its old links in the columns; a row that is first among its siblings has none to its left."""
    table = route_table(capacity=40, ttl_s=TTL_S)
    merge_all(table, [columns(*((0, 16, mix(n), 0, 0, 10.0) for n in range(1, 41)))])
    for number in (7, 30, 12, 25, 5):
        table.withdraw(mix(number), BackendId(0))
    chain = [(mix(n - 1) if n > 101 else 0, 16 * (n - 100), mix(n), 0, 0, 5.0) for n in range(101, 106)]
    merge_all(table, [columns(*chain)])
    check(table, GENERATIONS, NOW)
    assert [view.level for view in table.subtree(mix(101))] == [0, 1, 2, 3, 4]
    for number in range(105, 100, -1):
        assert table.withdraw(mix(number), BackendId(0))
        check(table, GENERATIONS, NOW)
    assert len(table) == 35


def test_what_peers_still_use_is_evicted_last() -> None:
    table = route_table(capacity=3, ttl_s=TTL_S)
    merge_all(table, [columns(*((0, 16, name, 0, 0, age) for name, age in ((1, 9.0), (2, 8.0), (3, 7.0))))])
    merge_all(table, [columns((0, 16, 1, 0, 0, 1.0))])
    merge_all(table, [columns((0, 16, 4, 0, 0, 0.0))])
    assert {fingerprint for fingerprint, _ in pairs_of(table)} == {1, 3, 4}


@settings(max_examples=examples(100))
@given(
    learned_of(SOUP),
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, BACKENDS - 1), st.integers(int(NOW - TTL_S) + 1, int(NOW))),
        max_size=40,
    ),
)
def test_claims_that_climb_together_end_as_if_each_had_climbed_alone(
    learned: Learned, raised: list[tuple[int, int, int]]
) -> None:
    """Paths that meet, several claims for one row, rows of others, expired ones."""
    together, alone = table_of(learned), table_of(learned)
    placed = [row for row in range(1, alone.rows.top) if alone.rows.parent[row] >= 0]
    claims = [(placed[place % len(placed)], *claim) for place, *claim in raised] if placed else []
    for row, backend, evidence in sorted(claims, key=lambda claim: claim[2]):
        alone.claims.raise_from(row, backend, Claim(GENERATIONS[backend], Trust.REMOTE, evidence))
    if claims:
        rows, backends, evidence = (np.array(column, np.int32) for column in zip(*claims, strict=True))
        with patch.object(claims_module, "CLIMB_TOGETHER_MIN", 1):
            together.claims.raise_many(rows, backends, np.array(GENERATIONS, np.int32)[backends], evidence)
    assert pairs_of(together) == pairs_of(alone)
    check(together, GENERATIONS, NOW)
