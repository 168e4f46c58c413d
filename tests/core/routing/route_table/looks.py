"""What a table holds, by looking at every row and by reading it step by step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.route_values import BackendNames, Claim, RouteColumns
from ranvier_py.core.routing.route_table.scan import ClaimReader, RowsScan, SumsScan
from ranvier_py.core.splitmix import mix
from tests.builders.route_tables import route_table

NOW = 100.0
TTL_S = 20.0
BACKENDS = 3
GENERATIONS = [2, 0, 5, 1]
"""Of the backends, and of one more that peers know nothing of."""

Learned = list[tuple[list[PrefixKey], int, bool, Trust, int]]
"""Keys, backend, whether of an earlier process, trust, age."""

TOKENS = st.integers(0, 12).map(lambda number: number and mix(number))
TEXTS = st.integers(0, 12).map(lambda number: number and mix(number + 100))
DEPTHS = st.integers(1, 9).map(lambda blocks: 16 * blocks)
SOUP = st.lists(st.tuples(DEPTHS, TOKENS, TEXTS), min_size=1, max_size=6)


def learned_of(chain: st.SearchStrategy[list[PrefixKey]], backends: int = BACKENDS) -> st.SearchStrategy[Learned]:
    fields = (chain, st.integers(0, backends - 1), st.booleans(), st.sampled_from(Trust), st.integers(0, 18))
    return st.lists(st.tuples(*fields), max_size=12)


def table_of(learned: Learned, capacity: int = 1000, eviction: str = "lru") -> RouteTable:
    table = route_table(capacity=capacity, ttl_s=TTL_S, eviction=eviction)
    for chain, backend, late, trust, age in learned:
        generation = max(0, GENERATIONS[backend] - late)
        table.learn(chain, BackendId(backend), generation, trust, NOW - age)
    return table


def claims_of(table: RouteTable) -> Iterator[tuple[int, BackendId, Claim]]:
    """(fingerprint, backend, claim), also of claims that count no more."""
    for view in table.subtree(0, limit=len(table)):
        for name in (view.token_fingerprint, *view.text_fingerprints):
            for holder in view.holders if name else ():
                claim = table.claim(name, holder.backend)
                assert claim is not None
                yield name, holder.backend, claim


def pairs_of(table: RouteTable, now: float = NOW, margin_s: float = 0.0) -> dict[tuple[int, int], tuple[int, int]]:
    """(fingerprint, backend) -> (trust, evidence) of the live claims of those backends that peers know."""
    return {
        (fingerprint, backend): (claim.trust, claim.evidence)
        for fingerprint, backend, claim in claims_of(table)
        if backend < BACKENDS and claim.generation == GENERATIONS[backend] and claim.evidence > now - TTL_S + margin_s
    }


def sums_of(table: RouteTable, names: BackendNames, now: float = NOW, margin_s: float = 0.0) -> bytes:
    scan = SumsScan(ClaimReader(table.rows, table.claims, names, margin_s))
    while (found := scan.step(now)) is None:
        pass
    return found


def chunks_of(
    table: RouteTable, names: BackendNames, now: float = NOW, margin_s: float = 0.0, buckets: tuple[int, ...] = ()
) -> list[RouteColumns]:
    scan = RowsScan(ClaimReader(table.rows, table.claims, names, margin_s), np.array(buckets, np.uint16))
    found: list[RouteColumns] = []
    while True:
        chunk = scan.take(now)
        if chunk:
            found.append(chunk.columns)
            if chunk.last:
                return found
