"""What LOCAL learning adds to what peers may know."""

from itertools import pairwise

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import NewRoutes, RouteTable, Trust
from ranvier_py.core.routing.route_table.outgoing import QUEUE_MAX
from tests.builders.route_tables import route_table

ENGINE, OTHER = BackendId(0), BackendId(1)
CHAT = [(64, 104, 204), (32, 102, 202), (16, 101, 201)]
NEXT_TURN = [(96, 106, 206), (80, 105, 0), *CHAT]


def table(ttl_s: float = 1000.0) -> RouteTable:
    routes = route_table(capacity=100, ttl_s=ttl_s)
    routes.outgoing.collect()
    return routes


def learn(routes: RouteTable, chain: list[tuple[int, int, int]], now: float = 10.0, trust: Trust = Trust.LOCAL) -> None:
    routes.learn(chain, ENGINE, 0, trust, now)


def test_a_new_chat_is_one_update_from_top_to_end() -> None:
    routes = table()
    learn(routes, CHAT)
    assert list(routes.outgoing.new) == [NewRoutes(ENGINE, 0, CHAT, 0, 10.0)]


@pytest.mark.parametrize(
    ("chain", "backend", "generation", "expected"),
    [
        pytest.param(CHAT, ENGINE, 0, [], id="the same prompt again"),
        pytest.param(NEXT_TURN, ENGINE, 0, [(NEXT_TURN[:2], 104)], id="a next turn, and what stands above it"),
        pytest.param(CHAT, OTHER, 0, [(CHAT, 0)], id="another backend"),
        pytest.param(CHAT, ENGINE, 1, [(CHAT, 0)], id="a restarted backend"),
    ],
)
def test_of_a_known_prompt_only_what_is_new_is_reported(
    chain: list[PrefixKey], backend: BackendId, generation: int, expected: list[tuple[list[PrefixKey], int]]
) -> None:
    routes = table()
    learn(routes, CHAT, 11.0)
    routes.outgoing.new.clear()
    routes.learn(chain, backend, generation, Trust.LOCAL, 11.5)
    found = [NewRoutes(backend, generation, keys, above, 11.5) for keys, above in expected]
    assert list(routes.outgoing.new) == found


def test_tokens_that_join_a_text_are_an_update() -> None:
    """Peers that know the text alone could not match in mid-message."""
    routes = table()
    learn(routes, [(60, 0, 204), (30, 0, 202)])
    routes.outgoing.new.clear()
    learn(routes, [(64, 104, 204), (32, 102, 202)], 11.0)
    assert [key for updates in routes.outgoing.new for key in updates.chain] == [(64, 104, 204), (32, 102, 202)]


def test_what_peers_served_is_no_update_of_ours() -> None:
    routes = table()
    learn(routes, CHAT, 11.0, trust=Trust.REMOTE)
    assert not routes.outgoing.new
    learn(routes, CHAT, 11.5)
    assert not routes.outgoing.new


def test_of_a_prompt_that_is_asked_again_and_again_the_deepest_prefix_is_reported_once_a_second() -> None:
    """An engine keeps what it used last: peers would else believe that it dropped what one node serves all the time."""
    routes = table()
    for tenth in range(100, 200, 3):
        learn(routes, CHAT, tenth / 10)
    first, *others = routes.outgoing.new
    assert first.chain == CHAT
    assert {(tuple(update.chain), update.parent) for update in others} == {((CHAT[0],), CHAT[1][1])}
    assert [int(update.at) for update in others] == list(range(11, 20))


def test_what_is_reported_again_in_between_is_not_what_the_rest_hangs_below() -> None:
    """Peers would hang a question below a row in the middle of its document, and take the rest of it for unused."""
    routes = table(ttl_s=100.0)
    for number in range(1000, 31_000, 1000):
        keys = [(16 * depth, number + 7 * depth, 0) for depth in range(42)][::-1]
        above = {token: parent for (_, token, _), (_, parent, _) in pairwise([*keys[:-1], (0, 0, 0)])}
        learn(routes, keys[1:-1], 10.0, trust=Trust.REMOTE)
        routes.outgoing.new.clear()
        learn(routes, keys[:-1], 20.0)
        for update in routes.outgoing.new:
            names = [key[1] for key in update.chain]
            assert [above[name] for name in names] == [*names[1:], update.parent]


def test_what_an_engine_confirms_again_and_again_is_reported_within_every_half_of_its_life() -> None:
    """Otherwise peers would forget it; and it is no use of it."""
    routes = table(ttl_s=100.0)
    reported: list[float] = []
    for second in range(10, 1000, 3):
        learn(routes, CHAT, float(second), trust=Trust.CONFIRMED)
        reported += [updates.at for updates in routes.outgoing.new if CHAT[0] in updates.chain]
        routes.outgoing.new.clear()
    gaps = [later - earlier for earlier, later in pairwise(reported)]
    assert max(gaps[1:]) <= 53
    assert min(gaps[1:]) >= 47


def test_without_peers_nothing_is_collected() -> None:
    routes = route_table(capacity=100)
    learn(routes, CHAT)
    assert not routes.outgoing.new


def test_updates_nobody_fetches_are_bounded_and_counted() -> None:
    routes = route_table(capacity=100_000)
    routes.outgoing.collect()
    for number in range(QUEUE_MAX + 7):
        learn(routes, [(16, number + 1, 0)])
    assert len(routes.outgoing.new) == QUEUE_MAX
    assert routes.counters.new_routes_dropped == 7


def test_whoever_collects_is_called_for_the_first_update_only() -> None:
    """It is on a request's path, and the rest goes out with the first."""
    routes = route_table(capacity=100)
    calls: list[int] = []
    routes.outgoing.collect(lambda: calls.append(len(routes.outgoing.new)))
    learn(routes, CHAT)
    learn(routes, NEXT_TURN, 11.0)
    assert calls == [1]
    routes.outgoing.new.clear()
    learn(routes, [(16, 900, 901)], 12.0)
    assert calls == [1, 1]
