"""What answers say of claims: one prefix that was cold is forgotten with what hangs below it, and no other."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust

A, B = BackendId(0), BackendId(1)
GENERATIONS = [1, 1]


def chain_of(*names: int) -> list[PrefixKey]:
    """Deepest first; each name is 16 tokens deeper."""
    return [(16 * (depth + 1), name, 0) for depth, name in enumerate(names)][::-1]


def depth(table: RouteTable, chain: Sequence[PrefixKey], backend: BackendId, now: float = 100.0) -> int:
    found = table.match(chain, [1 if backend == each else -1 for each in (A, B)], now, touch=False)
    return found[0].tokens if found else 0


def test_siblings_below_a_cold_prefix_go_and_everything_else_stays() -> None:
    table = RouteTable()
    cold, sibling, other = chain_of(1, 2, 3), chain_of(1, 2, 4, 5), chain_of(1, 6)
    for chain in (cold, sibling, other):
        for backend in (A, B):
            table.learn(chain, backend, 1, Trust.LOCAL, 10.0)
    table.learn(cold, A, 1, Trust.LOCAL, 50.0)  # it was served, so it is there again
    assert table.refute((32, 2, 0), A, before=40) == 1
    assert depth(table, sibling, A) == 32
    assert depth(table, cold, A) == 48
    assert depth(table, other, A) == 32
    assert depth(table, sibling, B) == 64


def test_what_was_served_meanwhile_stays() -> None:
    table = RouteTable()
    table.learn(chain_of(1, 2, 3), A, 1, Trust.LOCAL, 50.0)
    table.learn(chain_of(1, 2, 4), A, 1, Trust.LOCAL, 45.0)
    table.learn(chain_of(1, 2, 4, 5), A, 1, Trust.LOCAL, 10.0)
    assert table.refute((32, 2, 0), A, before=40) == 1
    assert depth(table, chain_of(1, 2, 4, 5), A) == 48
    assert table.refute((32, 2, 0), A, before=46) == 1
    assert depth(table, chain_of(1, 2, 4), A) == 32


def test_peers_are_reported_of_what_was_withdrawn_as_of_the_request_that_found_out() -> None:
    table = RouteTable()
    table.outgoing.collect()
    table.learn(chain_of(1, 2, 3), A, 1, Trust.LOCAL, 50.0)
    table.learn(chain_of(1, 2, 4), A, 1, Trust.LOCAL, 10.0)
    assert table.refute((32, 2, 0), A, before=40) == 1
    assert [(updates.fingerprint, updates.at) for updates in table.outgoing.withdrawn] == [(4, 40)]


def test_an_unknown_prefix_refutes_nothing() -> None:
    assert RouteTable().refute((16, 9, 0), A, before=40) == 0


def test_evidence_is_reported_where_it_changes_deepest_first() -> None:
    table = RouteTable()
    table.learn(chain_of(1, 2, 3, 4), A, 1, Trust.LOCAL, 10.0)
    table.learn(chain_of(1, 2), A, 1, Trust.LOCAL, 30.0)
    table.learn(chain_of(1), B, 1, Trust.LOCAL, 40.0)
    assert table.uses.evidence_of(chain_of(1, 2, 3, 4, 5), A, 1) == [(64, 10), (32, 30)]
    assert table.uses.evidence_of(chain_of(1, 2), A, 2) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 60)), max_size=8),
    st.integers(0, 70),
)
def test_a_hidden_claim_is_as_if_it_were_not_there_until_it_is_back(
    learned: list[tuple[list[int], int]], second: int
) -> None:
    """The one test of a match must agree with a table that never had the old evidence."""

    def names(path: list[int]) -> list[PrefixKey]:
        return chain_of(
            *(sum(part * 10**place for place, part in enumerate(path[: end + 1])) for end in range(len(path)))
        )

    table, young = RouteTable(), RouteTable()
    for path, at in learned:
        for backend in (A, B):
            table.learn(names(path), backend, 1, Trust.LOCAL, float(at))
            if backend == B or at > second:
                young.learn(names(path), backend, 1, Trust.LOCAL, float(at))
    table.hide(A, second)
    for path, _ in learned:
        both = [each.match(names(path), GENERATIONS, 100.0, wanted=2, touch=False) for each in (table, young)]
        assert both[0] == both[1]
    table.hide(A, -1)
    for path, _ in learned:
        assert depth(table, names(path), A) == 16 * len(path)
