"""What claims say of uses: which tokens a peer's request used again, and that a running one still uses its own."""

from __future__ import annotations

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust

A, B = BackendId(0), BackendId(1)


def chain(*names: int) -> list[PrefixKey]:
    """Deepest first; each name is 16 tokens deeper."""
    return [(16 * (depth + 1), name, 0) for depth, name in enumerate(names)][::-1]


def depth(table: RouteTable, chain: list[PrefixKey], backend: BackendId = A) -> int:
    found = table.match(chain, [1 if backend == each else -1 for each in (A, B)], 100.0, touch=False)
    return found[0].tokens if found else 0


def test_a_prompt_is_made_of_what_is_new_and_of_what_was_used_in_earlier_seconds() -> None:
    table = RouteTable()
    table.learn(chain(1, 2, 3, 4), A, 1, Trust.LOCAL, 10.0)
    table.learn(chain(1, 2), A, 1, Trust.LOCAL, 20.0)
    assert table.uses.used_before([chain(1, 2, 3, 4, 5, 6)], A, 1, 30) == (32, {10: 32, 20: 32})
    assert table.uses.used_before([chain(1, 2, 3)], A, 1, 15) == (0, {10: 16})  # the rest was used later than that
    assert table.uses.used_before([chain(1, 7)], A, 1, 30) == (16, {20: 16})
    assert table.uses.used_before([chain(8, 9)], A, 1, 30) == (32, {})
    assert table.uses.used_before([chain(1, 2)], B, 1, 30) == (32, {})
    assert table.uses.used_before([chain(1, 2)], A, 2, 30) == (32, {}), "of an earlier process"


def test_what_several_prompts_have_in_common_is_used_once() -> None:
    table = RouteTable()
    table.learn(chain(1, 2, 3), A, 1, Trust.LOCAL, 10.0)
    table.learn(chain(1, 2, 9), A, 1, Trust.LOCAL, 20.0)
    assert table.uses.used_before([chain(1, 2, 3, 4), chain(1, 2, 9), chain(1, 2, 3, 5)], A, 1, 30) == (
        32,
        {10: 16, 20: 48},
    )
    assert table.uses.used_before([chain(7, 8), chain(7, 8, 6)], A, 1, 30) == (48, {})


def test_a_prompt_that_goes_on_from_another_is_new_from_there() -> None:
    """A update batch says of its rows no more than the name of what is above them."""
    table = RouteTable()
    table.learn(chain(1, 2), A, 1, Trust.LOCAL, 10.0)
    pieces = [[(48, 3, 0), (0, 0, 2)], [(64, 4, 0), (0, 0, 3)], [(64, 5, 0), (0, 0, 3)]]
    assert table.uses.used_before(pieces, A, 1, 30) == (48, {10: 32})


def test_what_another_engine_holds_deeper_is_new_to_this_one_from_where_its_own_ends() -> None:
    table = RouteTable()
    table.learn(chain(1, 2), A, 1, Trust.LOCAL, 10.0)
    table.learn(chain(1, 2, 3, 4), B, 1, Trust.LOCAL, 11.0)
    assert table.uses.used_before([[(80, 5, 0), (64, 4, 0)]], A, 1, 30) == (48, {10: 32})
    assert table.uses.used_before([[(80, 5, 0), (64, 4, 0)], [(80, 6, 0), (64, 4, 0)]], A, 1, 30) == (64, {10: 32})


def test_a_route_update_of_a_peer_is_received_before_its_claims_are_raised() -> None:
    table = RouteTable()
    table.learn(chain(1, 2), A, 1, Trust.LOCAL, 10.0)
    received: list[tuple[int, dict[int, int]]] = []
    table.remote_use = lambda prompts, backend, generation, second: received.append(
        table.uses.used_before(prompts, backend, generation, second)
    )
    table.learn(chain(1, 2, 3), A, 1, Trust.LOCAL, 20.0)
    assert received == []
    table.learn(chain(1, 2, 3, 4), A, 1, Trust.REMOTE, 30.0)
    assert received == [(16, {20: 48})]


def test_what_a_running_request_uses_stays_young() -> None:
    table = RouteTable()
    table.learn(chain(1, 2, 3), A, 1, Trust.LOCAL, 10.0)
    table.learn(chain(1, 5), A, 1, Trust.LOCAL, 10.0)
    table.uses.renew(chain(1, 2, 3, 4), A, 1, 20)
    table.hide(A, 15)
    assert depth(table, chain(1, 2, 3)) == 48
    assert depth(table, chain(1, 5)) == 16
    table.uses.renew(chain(1, 5), A, 2, 30)  # it ran at an earlier process
    table.uses.renew(chain(8), B, 1, 30)
    assert depth(table, chain(1, 5)) == 16


def test_of_a_second_that_is_partly_out_the_deeper_claims_fade_first() -> None:
    table = RouteTable()
    table.learn(chain(1, 2, 3), A, 1, Trust.LOCAL, 10.0)
    table.learn(chain(4, 5), A, 1, Trust.LOCAL, 11.0)
    for backend in (A, B):
        table.learn(chain(6, 7, 8), backend, 1, Trust.LOCAL, 10.0)
    table.hide(A, 9, {10: 40, 11: 100})
    assert depth(table, chain(1, 2, 3)) == 32
    assert depth(table, chain(4, 5)) == 32
    assert depth(table, chain(6, 7, 8)) == 32
    assert depth(table, chain(6, 7, 8), B) == 48
    table.hide(A, 10, {11: 16})
    assert depth(table, chain(1, 2, 3)) == 0
    assert depth(table, chain(4, 5)) == 16
    table.hide(A, -1)
    assert depth(table, chain(1, 2, 3)) == 48
