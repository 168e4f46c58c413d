"""Reading a whole table: its sums and its columns against what a look at every row finds."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.route_values import U64, BackendNames, RouteColumns
from ranvier_py.core.routing.route_table.scan import (
    BUCKETS,
    CHUNK_CLAIMS,
    EXTRA_CLAIMS_MAX,
    SUMS_BYTES,
    SUMS_ROWS,
    ClaimReader,
    RowsScan,
    SumsScan,
    bucket_of,
)
from ranvier_py.core.splitmix import mix
from tests.builders.route_tables import route_table
from tests.core.routing.route_table import looks
from tests.core.routing.route_table.looks import BACKENDS, GENERATIONS, NOW, SOUP, TTL_S, Learned, learned_of, table_of
from tests.examples import examples

MARGIN_S = 5.0
Pair = tuple[int, int]  # fingerprint, backend


def names(order: tuple[int, ...] = (0, 1, 2), reported: tuple[bool, ...] = (True, True, True)) -> BackendNames:
    """`order[i]` is the backend that has local id i."""
    return BackendNames(
        np.array([reported[backend] * mix(1000 + backend) for backend in order], U64),
        np.array([7 + backend for backend in order], U64),
        np.array([GENERATIONS[backend] for backend in order], np.int32),
    )


def sums_of(table: RouteTable, now: float, whom: BackendNames | None = None) -> bytes:
    found = looks.sums_of(table, whom or names(), now, MARGIN_S)
    assert len(found) == SUMS_BYTES
    return found


def chunks_of(
    table: RouteTable, now: float, buckets: tuple[int, ...] = (), whom: BackendNames | None = None
) -> list[RouteColumns]:
    return looks.chunks_of(table, whom or names(), now, MARGIN_S, buckets)


def pairs_of(table: RouteTable, now: float) -> set[Pair]:
    return set(looks.pairs_of(table, now, MARGIN_S))


def brute_sums(pairs: set[Pair]) -> bytes:
    sums = [0] * BUCKETS
    for fingerprint, backend in pairs:
        sums[fingerprint >> 52] ^= mix(fingerprint ^ mix(1000 + backend) ^ (7 + backend))
    return np.array(sums, "<u8").tobytes()


def reported_by(chunks: list[RouteColumns]) -> set[Pair]:
    return {
        (fingerprint, backend)
        for columns in chunks
        for token, text, backend in zip(
            columns.token.tolist(), columns.text.tolist(), columns.backend.tolist(), strict=True
        )
        for fingerprint in (token, text)
        if fingerprint
    }


@settings(max_examples=examples(150))
@given(learned_of(SOUP, backends=BACKENDS + 1), st.sampled_from((6, 1000)))
def test_sums_and_columns_are_those_of_a_look_at_every_row(learned: Learned, capacity: int) -> None:
    table = table_of(learned, capacity)
    pairs = pairs_of(table, NOW)
    assert sums_of(table, NOW) == brute_sums(pairs)
    chunks = chunks_of(table, NOW)
    firsts = {pair for pair in pairs if pair in reported_by(chunks)}
    further = {text for view in table.subtree(0, limit=1000) for text in view.text_fingerprints[1:]}
    assert {pair for pair in pairs if pair[0] not in further} <= firsts
    assert reported_by(chunks) <= pairs
    assert {name for name, _ in pairs} == {name for name, _ in reported_by(chunks)}, "each name comes with some claim"


def test_sums_do_not_depend_on_the_order_of_learning_or_on_local_ids() -> None:
    rng = Random(1)
    route_updates = [
        ([(32, rng.getrandbits(64) | 1, 0), (16, mix(number % 7), rng.getrandbits(64) | 1)], rng.randrange(BACKENDS))
        for number in range(300)
    ]
    one, other = route_table(ttl_s=TTL_S), route_table(ttl_s=TTL_S)
    order = (2, 0, 1)
    for chain, backend in route_updates:
        one.learn(chain, BackendId(backend), GENERATIONS[backend], Trust.LOCAL, NOW)
    rng.shuffle(route_updates)
    for chain, backend in route_updates:
        other.learn(chain, BackendId(order.index(backend)), GENERATIONS[backend], Trust.REMOTE, NOW - 3)
    assert sums_of(one, NOW) == sums_of(other, NOW, names(order)) != bytes(SUMS_BYTES)


def test_one_claim_more_changes_its_buckets_only() -> None:
    table = route_table(([(32, mix(1), mix(2)), (16, mix(3), 0)], 0, NOW), generation=2, ttl_s=TTL_S)
    before = np.frombuffer(sums_of(table, NOW), "<u8")
    table.learn([(48, mix(4), mix(5)), (32, mix(1), 0)], BackendId(0), 2, Trust.LOCAL, NOW)
    after = np.frombuffer(sums_of(table, NOW), "<u8")
    assert np.flatnonzero(before != after).tolist() == sorted((mix(4) >> 52, mix(5) >> 52))


def test_claims_about_to_expire_are_neither_summed_nor_reported() -> None:
    """Two nodes forget the same claim a second apart: that must not look like a difference."""
    table = route_table(([(16, mix(1), 0)], 0, NOW), generation=2, ttl_s=TTL_S)
    edge = NOW + TTL_S - MARGIN_S
    assert sums_of(table, edge - 1) != bytes(SUMS_BYTES)
    assert [len(columns.token) for columns in chunks_of(table, edge - 1)] == [1]
    assert sums_of(table, edge) == bytes(SUMS_BYTES)
    table.learn([(16, mix(1), 0)], BackendId(1), 0, Trust.LOCAL, NOW + 1)
    assert sums_of(table, edge) == brute_sums({(mix(1), 1)})
    assert [len(columns.token) for columns in chunks_of(table, edge)] == [1]


def test_backends_that_are_not_reported_are_not_summed() -> None:
    table = route_table(([(16, mix(1), 0)], 1, NOW), ttl_s=TTL_S)
    whom = names(reported=(True, False, True))
    assert sums_of(table, NOW, whom) == bytes(SUMS_BYTES)
    assert reported_by(chunks_of(table, NOW, whom=whom)) == set()


def big_table(rows: int, seed: int, churn: bool, backends: int = BACKENDS) -> RouteTable:
    """Chains of ten; with churn, in a table that has been full for long, so that rows stand anywhere."""
    rng = Random(seed)
    table = route_table(capacity=rows, ttl_s=TTL_S)
    for number in range(rows // 10 * (4 if churn else 1)):
        backend = rng.randrange(backends)
        depth = rng.randint(1, 19) if churn else 10
        chain = [
            (16 * level, rng.getrandbits(64) | 1, rng.getrandbits(64) * (level % 3 > 0))
            for level in range(depth, 0, -1)
        ]
        table.learn(chain, BackendId(backend), GENERATIONS[backend], Trust.LOCAL, NOW + number * 1e-4)
    return table


@pytest.mark.parametrize("churn", [False, True])
def test_parents_come_before_their_children(churn: bool) -> None:
    """A child without its parent would hang under the top, and be evicted in the wrong order."""
    table = big_table(5000, 3, churn)
    chunks = chunks_of(table, NOW + 1)
    seen = {0}
    for columns in chunks:
        assert len(columns.token) <= 4 * CHUNK_CLAIMS
        for parent, token, text in zip(
            columns.parent.tolist(), columns.token.tolist(), columns.text.tolist(), strict=True
        ):
            assert parent in seen
            seen.update((token, text))
    assert reported_by(chunks) == pairs_of(table, NOW + 1)
    assert len(chunks) < 3 * len(table) // CHUNK_CLAIMS + 8, "chunks are filled"
    assert Counter(token for columns in chunks for token in columns.token.tolist()).most_common(1)[0][1] == 1


def test_only_the_wanted_buckets_are_reported() -> None:
    table = big_table(5000, 4, churn=True)
    buckets = tuple(range(0, BUCKETS, 5))
    pairs = pairs_of(table, NOW + 1)
    wanted = {pair for pair in pairs if (pair[0] >> 52) % 5 == 0}
    reported = reported_by(chunks_of(table, NOW + 1, buckets))
    assert wanted <= reported <= pairs
    assert len(reported) < len(pairs) / 2
    assert reported_by(chunks_of(table, NOW + 1, tuple(range(BUCKETS)))) == pairs
    assert reported_by(chunks_of(table, NOW + 1, (60_000,))) == set(), "there is no such bucket"


def test_the_table_changes_and_grows_between_steps() -> None:
    """An array with a numpy view left over can't grow: learning would raise BufferError."""
    table = route_table(ttl_s=TTL_S)
    rng = Random(6)
    scan = RowsScan(ClaimReader(table.rows, table.claims, names(), MARGIN_S), np.array((), np.uint16))
    sums = SumsScan(ClaimReader(table.rows, table.claims, names(), MARGIN_S))
    for number in range(60):
        for _ in range(100):
            chain = [(16 * level, rng.getrandbits(64) | 1, 0) for level in range(5, 0, -1)]
            table.learn(chain, BackendId(0), 2, Trust.LOCAL, NOW)
        if number % 7 == 6:
            scan = RowsScan(ClaimReader(table.rows, table.claims, names(), MARGIN_S), np.array((), np.uint16))
        scan.take(NOW)
        sums.step(NOW)


def test_a_step_ends_behind_many_further_claims() -> None:
    """They are read one by one: thousands of rows held by all backends would hold up requests."""
    table = route_table(ttl_s=TTL_S)
    rows = 2 * EXTRA_CLAIMS_MAX
    for number in range(rows):
        for backend in range(BACKENDS):
            table.learn([(16, mix(number), 0)], BackendId(backend), GENERATIONS[backend], Trust.LOCAL, NOW)
    assert rows < SUMS_ROWS
    scan = SumsScan(ClaimReader(table.rows, table.claims, names(), MARGIN_S))
    steps = 1
    while (found := scan.step(NOW)) is None:
        steps += 1
    assert steps >= rows * (BACKENDS - 1) / EXTRA_CLAIMS_MAX
    assert found == brute_sums(pairs_of(table, NOW))
    assert reported_by(chunks_of(table, NOW)) == pairs_of(table, NOW)


def test_a_row_with_more_claims_than_a_chunk_comes_whole() -> None:
    table = route_table(ttl_s=TTL_S)
    count = CHUNK_CLAIMS + 50
    for backend in range(count):
        table.learn([(16, mix(1), 0)], BackendId(backend), 2, Trust.LOCAL, NOW)
    whom = BackendNames(np.arange(1, count + 1, dtype=U64), np.zeros(count, U64), np.full(count, 2, np.int32))
    table.learn([(16, mix(2), 0)], BackendId(0), 2, Trust.LOCAL, NOW)
    reported = [columns.backend.tolist() for columns in chunks_of(table, NOW, whom=whom)]
    assert sorted(backend for some in reported for backend in some) == sorted([*range(count), 0])


def test_buckets_are_the_top_bits() -> None:
    assert bucket_of(np.array([0, 2**52, 2**64 - 1], U64)).tolist() == [0, 1, BUCKETS - 1]
