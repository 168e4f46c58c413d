"""Pieces of paths that come before the rows they hang under."""

from __future__ import annotations

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.orphans import LOOKS_EACH, ORPHANS_MAX, Orphans, PeerRows
from tests.builders.route_tables import route_table
from tests.core.routing.route_table.test_routes_properties import check

NOW = 100.0
GENERATIONS = [0, 0, 0]
A, B = BackendId(0), BackendId(1)
TOP: PrefixKey = (16, 1, 101)
MIDDLE: PrefixKey = (32, 2, 102)
DEEP: PrefixKey = (48, 3, 103)


def table_of() -> tuple[RouteTable, Orphans]:
    table = route_table(capacity=10_000, ttl_s=20.0)
    return table, Orphans(table)


def holders(table: RouteTable) -> dict[int, list[int]]:
    """Token fingerprint -> backends."""
    found = table.subtree(0, limit=20_000)
    return {view.token_fingerprint: sorted(holder.backend for holder in view.holders) for view in found}


def levels(table: RouteTable) -> list[tuple[int, int]]:
    return [(view.level, view.token_fingerprint) for view in table.subtree(0, limit=20_000)]


def test_a_piece_hangs_under_its_row_whichever_comes_first() -> None:
    one, early = table_of()
    early.learn([DEEP], 2, B, 0, NOW)
    early.learn([MIDDLE], 101, A, 0, NOW)
    early.learn([TOP], 0, A, 0, NOW)
    other, late = table_of()
    late.learn([TOP], 0, A, 0, NOW)
    late.learn([MIDDLE], 101, A, 0, NOW)
    late.learn([DEEP], 2, B, 0, NOW)
    assert levels(one) == levels(other) == [(0, 1), (1, 2), (2, 3)]
    assert holders(one) == holders(other) == {1: [0, 1], 2: [0, 1], 3: [1]}
    assert (early.adopted, len(early), late.adopted) == (2, 0, 0)
    check(one, GENERATIONS, NOW)


def test_the_claim_climbs_with_its_own_evidence() -> None:
    table, orphans = table_of()
    orphans.learn([DEEP], 2, B, 0, NOW - 8)
    orphans.learn([MIDDLE, TOP], 0, A, 0, NOW)
    claim = table.claim(2, B)
    assert claim is not None
    assert (claim.evidence, claim.trust) == (NOW - 8, Trust.REMOTE)


def test_rows_that_came_otherwise_are_found_in_time() -> None:
    table, orphans = table_of()
    for number in range(10):
        orphans.learn([(48, 1000 + number, 0)], 2000 + number, B, 0, NOW)
    table.learn([(32, 2007, 0)], A, 0, Trust.LOCAL, NOW)
    for number in range(10 // LOOKS_EACH + 1):
        orphans.learn([(16, 5000 + number, 0)], 0, A, 0, NOW)
    assert (orphans.adopted, len(orphans)) == (1, 9)
    assert holders(table)[2007] == [0, 1]


def test_a_piece_that_expired_while_it_waited_changes_nothing() -> None:
    table, orphans = table_of()
    orphans.learn([DEEP], 2, B, 0, NOW)
    orphans.learn([MIDDLE], 0, A, 0, NOW + 30)
    assert holders(table)[2] == [0]
    check(table, GENERATIONS, NOW + 30)


def test_a_piece_that_names_itself_does_not_wait() -> None:
    table, orphans = table_of()
    orphans.learn([DEEP, MIDDLE], 103, A, 0, NOW)
    assert len(orphans) == 0
    check(table, GENERATIONS, NOW)


def test_what_waits_is_bounded_and_what_goes_stays_where_it_is() -> None:
    table, orphans = table_of()
    for number in range(ORPHANS_MAX + 50):
        orphans.learn([(16, 1_000_000 + number, 0)], 10_000 + number, A, 0, NOW)
    assert (len(orphans), orphans.dropped, len(table)) == (ORPHANS_MAX, 50, ORPHANS_MAX + 50)


def test_uses_before_the_machine_was_started_are_reported_of_their_own_backend_and_second() -> None:
    table = route_table(capacity=10_000, ttl_s=3600.0)
    used: list[tuple[int, int, int]] = []
    table.on_use = lambda _prompts, backend, _generation, second, below: used.append((backend, second, below))
    piece = PeerRows([B, B], [0, 101], [16, 32], [1, 2], [101, 102], {B: 0}, NOW - 300)
    Orphans(table).merge([piece], {B: 0}, NOW)
    assert used == [(B, -200, 32)]
