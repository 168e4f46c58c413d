"""Eviction by utility: what goes is what saves least for the time since its last use."""

from __future__ import annotations

from random import Random

import numpy as np

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.utility_queue import ALPHA, CLASS_MAX, LANES_MAX, TRUST_BITS, UtilityQueue
from tests.builders.route_tables import route_table
from tests.core.routing.route_table.test_routes_properties import TIMES, TTL_S, AnyChain

ENGINE, OTHER = BackendId(0), BackendId(1)
GENERATIONS = (0, 0)


def table_of(capacity: int) -> RouteTable:
    return route_table(capacity=capacity, eviction="utility")


def chain_of(name: int, *depths: int) -> list[PrefixKey]:
    """A prompt of its own with keys at these depths, which ascend."""
    return [(depth, 1_000_000 * name + depth, 0) for depth in reversed(depths)]


def learn(table: RouteTable, keys: list[PrefixKey], at: float, trust: Trust = Trust.LOCAL) -> None:
    table.learn(keys, ENGINE, 0, trust, at)


def depth_in(table: RouteTable, keys: list[PrefixKey], at: float = 1000.0) -> int:
    found = table.match(keys, GENERATIONS, at, touch=False)
    return found[0].tokens if found else 0


def test_an_idle_chat_keeps_its_end_and_loses_what_only_its_end_goes_on_from() -> None:
    table = table_of(6)
    idle, new = chain_of(1, 160, 320, 480, 640), chain_of(2, 16, 32, 48, 64)
    learn(table, idle, 1.0)
    learn(table, new, 50.0)
    assert depth_in(table, idle) == 640
    assert [key[0] for key in idle if depth_in(table, [key])] in ([640], [640, 160], [640, 320], [640, 480])
    assert depth_in(table, new) == 64


def test_a_row_with_one_child_is_replaced_by_that_child() -> None:
    table = table_of(3)
    first, second = chain_of(1, 160, 320, 480), chain_of(2, 160)
    learn(table, first, 1.0)
    learn(table, second, 2.0)
    assert len(table) == 3
    kept = [view.tokens for view in table.subtree(0) if view.token_fingerprint < 2_000_000]
    assert len(kept) == 2
    assert kept[-1] == 480
    assert depth_in(table, first) == 480
    learn(table, [*chain_of(1, 640), *first], 3.0)  # it goes on from where it is
    assert depth_in(table, [*chain_of(1, 640), *first]) == 640


def test_a_long_edge_outlives_a_short_one_of_the_same_age() -> None:
    table = table_of(2)
    short, long = chain_of(1, 32), chain_of(2, 4096)
    learn(table, long, 1.0)
    learn(table, short, 1.0)
    learn(table, chain_of(3, 512), 2.0)
    assert depth_in(table, long) == 4096
    assert depth_in(table, short) == 0


def test_savings_are_weighed_against_age() -> None:
    """The long prompt is older than all short ones: how much more may it save, and still go first?"""
    kept = []
    for depth in (16, 256, 4096):
        table = table_of(8)
        learn(table, chain_of(1, depth), 1.0)
        learn(table, chain_of(2, 4096), 50.0)
        for number in range(3, 9):
            learn(table, chain_of(number, 64), 90.0 + number)
        learn(table, chain_of(9, 64), 100.0)
        kept.append(depth_in(table, chain_of(1, depth)))
    assert kept == [0, 0, 4096]


def test_documents_that_never_come_again_keep_no_chats_out() -> None:
    reused = {}
    for eviction in ("lru", "utility"):
        rng, table = Random(3), route_table(capacity=100, eviction=eviction)
        for number in range(200):
            learn(table, chain_of(1000 + number, 12_000), float(number))
        turns, reused[eviction] = [0] * 40, 0
        for at in range(200, 1200):
            name = rng.randrange(len(turns))
            turns[name] = turns[name] % 12 + 1
            chat = chain_of(name, *range(400, 400 * turns[name] + 1, 400))
            reused[eviction] += depth_in(table, chat, float(at))
            learn(table, chat, float(at))
    assert reused["utility"] > 1.2 * reused["lru"] > 0


def test_what_prompts_have_differed_behind_outlives_what_one_chat_went_through() -> None:
    table = table_of(7)
    system = chain_of(1, 512)
    for number in range(2, 5):
        learn(table, [*chain_of(number, 560 + 16 * number), *system], 1.0)
    straight = chain_of(6, 512, 1024)
    learn(table, straight, 1.0)
    learn(table, chain_of(7, 16, 32, 48, 64), 50.0)  # of the questions one is left
    assert depth_in(table, system) == 512
    assert [depth_in(table, [key]) for key in straight] == [1024, 0]


def test_remote_routes_go_before_local_ones_and_these_before_confirmed_ones() -> None:
    table = table_of(3)
    learn(table, chain_of(1, 8192), 9.0, Trust.REMOTE)
    learn(table, chain_of(2, 512), 2.0, Trust.LOCAL)
    learn(table, chain_of(3, 16), 1.0, Trust.CONFIRMED)
    learn(table, chain_of(4, 16), 10.0, Trust.CONFIRMED)
    learn(table, chain_of(5, 16), 10.0, Trust.CONFIRMED)
    assert [depth_in(table, chain_of(name, depth)) > 0 for name, depth in ((1, 8192), (2, 512), (3, 16))] == [
        *(False, False, True)
    ]


def test_rows_that_are_queued_at_once_stand_where_each_would_alone() -> None:
    rng, table = Random(6), table_of(300)
    for at in range(1, 200):
        shared = rng.randrange(40)
        depths = sorted(rng.sample(range(16, 60_000, 16), 3))
        learn(table, [*chain_of(1000 + at, *depths[1:]), *chain_of(shared, depths[0])], float(at))
    queue, rows = table.leaves, np.arange(1, 301)
    assert isinstance(queue, UtilityQueue)
    alone = [queue.lane_of(row) for row in rows.tolist()]
    assert queue.lanes_of(rows).tolist() == alone
    assert len(set(alone)) > 8


def test_who_goes_has_the_least_score() -> None:
    """Against all candidates, by brute force, under random traffic of lone prefixes."""
    rng, table = Random(5), table_of(60)
    known: dict[int, tuple[int, int]] = {}  # name -> depth, second
    evicted = 0
    for at in range(1, 400):
        depth = rng.choice((16, 64, 300, 1000, 5000))
        learn(table, chain_of(at, depth), float(at))
        gone = [name for name, (tokens, _) in known.items() if not depth_in(table, chain_of(name, tokens), float(at))]
        if gone:
            scores = scores_of(known, at)
            assert scores[gone[0]] <= min(scores.values()) + 0.05
            del known[gone[0]]
            evicted += 1
        assert len(gone) <= 1
        known[at] = depth, at
        again = rng.choice(list(known))
        table.match(chain_of(again, known[again][0]), GENERATIONS, float(at))
        known[again] = known[again][0], at
    assert evicted == 399 - 60


def scores_of(known: dict[int, tuple[int, int]], at: int) -> dict[int, float]:
    """Marconi's, of prefixes without others before or behind them."""
    saved = {name: tokens * (1 + tokens / 2 / 12288) for name, (tokens, _) in known.items()}
    oldest, least, most = min(second for _, second in known.values()), min(saved.values()), max(saved.values())
    return {
        name: (second - oldest) / max(1, at - oldest) + ALPHA * (saved[name] - least) / max(1.0, most - least)
        for name, (_, second) in known.items()
    }


def test_lanes_fit_their_column_and_their_bound() -> None:
    assert (2 * CLASS_MAX << TRUST_BITS | 3) < 256
    assert LANES_MAX == 180


class AnyChainByUtility(AnyChain):
    """Whatever comes, in a table that forgets rows in the middle, too: it stays sound."""

    def begin(self, capacity: int) -> None:
        super().begin(capacity)
        self.table = table_of(capacity)
        self.table.ttl_s = TTL_S


AnyChainByUtility.TestCase.settings = TIMES
TestTheTableThatForgetsByUtilityStaysSound = AnyChainByUtility.TestCase
