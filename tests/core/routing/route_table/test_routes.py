"""The route table, by example: the seed document's own cases, and the rules that the model of the properties lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table import table as table_module
from ranvier_py.core.routing.route_table.claims import Claims
from ranvier_py.core.routing.route_table.route_values import LRU, UTILITY
from ranvier_py.core.routing.route_table.rows import EMPTY_SECONDS
from ranvier_py.core.routing.route_table.table import WITHDRAW_ROWS_MAX
from tests.builders.route_tables import route_table

ONE, TWO, THREE = BackendId(1), BackendId(2), BackendId(3)
GENERATIONS = (7, 7, 7, 7)
table_of = partial(route_table, generation=7)


def prompt(*messages: tuple[str, int]) -> list[PrefixKey]:
    """Prefix keys of a chat, deepest first: (text, tokens) of each message; aligned down to blocks of 16."""
    chain = []
    text, total = "", 0
    for words, tokens in messages:
        text, total = text + "|" + words, total + tokens
        aligned = total // 16 * 16
        chain.append((aligned, fp("tokens", text if aligned == total else f"{text}@{aligned}"), fp("text", text)))
    return chain[::-1]


def fp(kind: str, what: object) -> int:
    return abs(hash((kind, what))) | 1


def text_only(chain: list[PrefixKey]) -> list[PrefixKey]:
    return [(tokens, 0, text) for tokens, _, text in chain]


def plain(*depths: int, name: str = "a") -> list[PrefixKey]:
    """Token-only keys of one prompt, deepest first."""
    return [(depth, fp(name, depth), 0) for depth in sorted(depths, reverse=True)]


def depth(table: RouteTable, chain: list[PrefixKey], now: float = 0.0) -> int:
    found = table.match(chain, GENERATIONS, now, touch=False)
    return found[0].tokens if found else 0


@pytest.fixture
def table() -> RouteTable:
    return table_of(capacity=1000, ttl_s=100.0)


THREAD = (("system", 256), ("user1", 50), ("assistant1", 100), ("user2", 40))


@pytest.fixture
def learned(table: RouteTable) -> RouteTable:
    """The seed document's request: four messages ending at 256, 306, 406 and 446 tokens, served by backend 1."""
    assert table.learn(prompt(*THREAD), ONE, 7, Trust.LOCAL, 0.0) == 4
    return table


def test_one_request_produces_a_route_at_every_boundary_aligned_down_to_a_block(learned: RouteTable) -> None:
    views = learned.subtree(0)
    assert [view.tokens for view in views] == [256, 304, 400, 432]
    assert [view.level for view in views] == [0, 1, 2, 3]
    assert {(holder.backend, holder.trust) for view in views for holder in view.holders} == {(ONE, Trust.LOCAL)}


@pytest.mark.parametrize(
    ("chain", "tokens"),
    [
        pytest.param(prompt(("system", 256), ("different question", 60)), 256, id="a branch: the system prompt"),
        pytest.param(prompt(*THREAD, ("assistant2", 80), ("user3", 30)), 432, id="a continuation: its last turn"),
        pytest.param(prompt(*THREAD[:3], ("new user turn", 70)), 400, id="resumed in the middle: where it was cut"),
        pytest.param(prompt(("other system", 256)), 0, id="a foreign prompt: nothing"),
        pytest.param([], 0, id="no prompt: nothing"),
    ],
)
def test_a_conversation_matches_as_deep_as_it_is_known(
    learned: RouteTable, chain: list[PrefixKey], tokens: int
) -> None:
    assert learned.match(chain, GENERATIONS, 1.0) == ([Holder(ONE, tokens, Trust.LOCAL)] if tokens else [])
    assert learned.counters.missed == (not tokens)


def test_boundaries_that_collapse_to_one_block_are_one_row_with_all_their_texts(table: RouteTable) -> None:
    chain = [(256, 99, 13), (256, 99, 12), (256, 99, 11)]
    assert table.learn(chain, ONE, 7, Trust.LOCAL, 0.0) == 1
    assert len(table) == 1
    assert [depth(table, [(250, 0, text)]) for text in (11, 12, 13)] == [256, 256, 256]


def test_texts_learned_first_become_one_row_when_their_tokens_are_known(table: RouteTable) -> None:
    table.learn([(260, 0, 13), (255, 0, 12), (250, 0, 11)], ONE, 7, Trust.LOCAL, 0.0)
    assert len(table) == 3
    table.learn([(256, 99, 13), (256, 99, 12), (256, 99, 11)], TWO, 7, Trust.LOCAL, 0.0)
    assert len(table) == 1
    assert {holder.backend for holder in table.match([(0, 0, 11)], GENERATIONS, 0.0, wanted=2)} == {ONE, TWO}
    assert table.counters.merged == 2


def test_tokens_join_a_row_known_by_its_text_and_correct_its_depth(table: RouteTable) -> None:
    chain = prompt(*THREAD)
    table.learn([(tokens + 32, 0, text) for tokens, _, text in chain], ONE, 7, Trust.LOCAL, 0.0)
    assert depth(table, text_only(chain)) == 464
    assert table.learn(chain, ONE, 7, Trust.LOCAL, 0.0) == 0
    assert depth(table, text_only(chain)) == 432
    assert depth(table, [(tokens, token, 0) for tokens, token, _ in chain]) == 432
    assert table.counters.attached == 4


def test_a_new_anchor_splits_the_link_between_parent_and_child(table: RouteTable) -> None:
    table.learn(plain(64, 512), ONE, 7, Trust.REMOTE, 0.0)
    table.learn(plain(64, 256, 512), TWO, 7, Trust.LOCAL, 1.0)
    views = table.subtree(0)
    assert [(view.level, view.tokens) for view in views] == [(0, 64), (1, 256), (2, 512)]
    assert {holder.backend for holder in views[1].holders} == {ONE, TWO}, "what holds 512 tokens holds the first 256"


def test_bare_claims_of_peers_are_roots_until_a_local_chain_links_them(table: RouteTable) -> None:
    for key in plain(64, 256, 512):
        table.learn([key], TWO, 7, Trust.REMOTE, 0.0)
    assert [view.level for view in table.subtree(0)] == [0, 0, 0]
    table.learn(plain(64, 256, 512, 768), ONE, 7, Trust.LOCAL, 0.0)
    views = table.subtree(0)
    assert [(view.level, view.tokens) for view in views] == [(0, 64), (1, 256), (2, 512), (3, 768)]
    assert [len(view.holders) for view in views] == [2, 2, 2, 1]


def test_a_walk_reads_no_further_than_the_deepest_known_key(learned: RouteTable) -> None:
    def chain() -> Iterator[PrefixKey]:
        yield from prompt(*THREAD, ("assistant2", 80))[:2]
        raise AssertionError("read too far")

    assert learned.match(chain(), GENERATIONS, 0.5)[0].tokens == 432
    assert learned.learn(chain(), ONE, 7, Trust.LOCAL, 0.5) == 1


def test_a_learn_that_reads_little_still_refreshes_the_whole_path(learned: RouteTable) -> None:
    chain = prompt(*THREAD)
    learned.learn(chain[:1], ONE, 7, Trust.LOCAL, 60.0)
    assert depth(learned, chain[-1:], now=159.0) == 256
    assert depth(learned, chain, now=160.0) == 0


def test_a_backend_that_is_not_eligible_is_passed_over_and_keeps_its_claims(table: RouteTable) -> None:
    table.learn(plain(64, 256), ONE, 7, Trust.LOCAL, 0.0)
    table.learn(plain(64), TWO, 7, Trust.LOCAL, 0.0)
    assert table.match(plain(64, 256), (7, -1, 7), 0.0)[0].backend == TWO
    assert table.match(plain(64, 256), (), 0.0) == []
    assert table.sweep(0.0, (7, -1)) == 0
    assert table.match(plain(64, 256), GENERATIONS, 0.0)[0].backend == ONE


def test_a_new_generation_voids_all_claims_at_once_and_the_sweep_removes_them(learned: RouteTable) -> None:
    assert learned.match(prompt(*THREAD), (7, 8), 0.0) == []
    assert learned.sweep(0.0, (7, 8)) == 4
    assert len(learned) == 0
    assert learned.counters.voided == 4


def test_a_late_answer_of_an_older_generation_does_not_replace_newer_claims(table: RouteTable) -> None:
    table.learn(plain(64, 256), ONE, 8, Trust.LOCAL, 0.0)
    table.learn(plain(64, 256, 512), ONE, 7, Trust.LOCAL, 1.0)
    assert [holder.tokens for holder in table.match(plain(64, 256, 512), (0, 8), 1.0)] == [256]


def test_claims_expire_after_their_last_evidence_however_often_they_are_looked_up(learned: RouteTable) -> None:
    chain = prompt(*THREAD)
    for now in (50.0, 99.0):
        assert learned.match(chain, GENERATIONS, now)
    assert learned.match(chain, GENERATIONS, 100.0) == []
    assert learned.sweep(100.0, GENERATIONS) == 4
    assert len(learned) == 0
    assert learned.counters.expired == 4


def test_evidence_from_the_past_counts_from_when_it_was_seen(table: RouteTable) -> None:
    table.match([], GENERATIONS, 500.0)
    assert table.learn(plain(64), ONE, 7, Trust.REMOTE, 450.0) == 1
    assert table.match(plain(64), GENERATIONS, 549.0)
    assert not table.match(plain(64), GENERATIONS, 550.0)
    assert table.learn(plain(32), ONE, 7, Trust.REMOTE, 450.0) == 0


def test_by_age_an_idle_conversation_loses_its_deep_routes_first_and_a_shared_prompt_survives() -> None:
    table = table_of(capacity=6, eviction=LRU)
    shared = plain(64, 128, name="system")
    idle, busy = plain(256, 512, name="idle") + shared, plain(256, 512, name="busy") + shared
    table.learn(idle, ONE, 7, Trust.LOCAL, 0.0)
    table.learn(busy, ONE, 7, Trust.LOCAL, 10.0)
    assert depth(table, idle, 10.0) == 512
    table.learn(plain(1024, name="busy") + busy, ONE, 7, Trust.LOCAL, 20.0)
    assert depth(table, idle, 20.0) == 256
    table.learn(plain(2048, 1024, name="busy") + busy, ONE, 7, Trust.LOCAL, 30.0)
    assert depth(table, idle, 30.0) == 128
    assert depth(table, busy, 30.0) == 512


def test_backends_at_one_depth_come_together_by_trust_then_by_freshness(table: RouteTable) -> None:
    table.learn(plain(64), ONE, 7, Trust.REMOTE, 3.0)
    table.learn(plain(64), TWO, 7, Trust.LOCAL, 1.0)
    table.learn(plain(64), THREE, 7, Trust.LOCAL, 2.0)
    found = table.match(plain(64), GENERATIONS, 3.0, wanted=3)
    assert [holder.backend for holder in found] == [THREE, TWO, ONE]
    assert table.match(plain(64), GENERATIONS, 3.0) == found, "load may decide among equals"


def test_an_expired_claim_does_not_lend_its_trust_to_a_weaker_one(table: RouteTable) -> None:
    table.learn(plain(64), ONE, 7, Trust.LOCAL, 0.0)
    table.learn(plain(64), ONE, 7, Trust.REMOTE, 100.0)
    assert table.match(plain(64), GENERATIONS, 100.0)[0].trust == Trust.REMOTE
    assert table.counters.claims["local"] == 0


@pytest.mark.parametrize(
    "again",
    [
        lambda table: table.match([(64, 40, 41)], GENERATIONS, 2.0),
        lambda table: table.learn([(64, 40, 41)], ONE, 7, Trust.LOCAL, 2.0),
        lambda table: table.learn([(64, 40, 141)], ONE, 7, Trust.LOCAL, 2.0),
    ],
    ids=["a match", "learning it again", "learning another name of it"],
)
def test_a_use_keeps_a_route_from_being_evicted_and_a_dry_run_does_not(again: Callable[[RouteTable], object]) -> None:
    table, used, other = table_of(capacity=2), [(64, 40, 41)], [(64, 50, 51)]
    table.learn(used, ONE, 7, Trust.LOCAL, 0.0)
    table.learn(other, ONE, 7, Trust.LOCAL, 1.0)
    again(table)
    table.match(other, GENERATIONS, 3.0, touch=False)
    table.learn([(64, 60, 61)], ONE, 7, Trust.LOCAL, 4.0)
    assert (depth(table, used, 4.0), depth(table, other, 4.0)) == (64, 0)


def test_a_use_of_a_deep_route_counts_for_the_routes_it_passes_through() -> None:
    table = table_of((plain(64, 128, name="a"), ONE, 0.0), (plain(64, name="b"), ONE, 1.0), capacity=3)
    table.match(plain(64, 128, name="a"), GENERATIONS, 2.0)
    table.withdraw(plain(128, name="a")[0][1], ONE)
    table.learn(plain(64, 128, name="c"), ONE, 7, Trust.LOCAL, 3.0)
    assert (depth(table, plain(64, name="a"), 3.0), depth(table, plain(64, name="b"), 3.0)) == (64, 0)


@pytest.mark.parametrize("first", [Trust.REMOTE, Trust.CONFIRMED])
def test_a_claim_keeps_the_greater_trust_and_the_later_evidence(table: RouteTable, first: Trust) -> None:
    table.learn(plain(64), ONE, 7, first, 1.0)
    table.learn(plain(64), ONE, 7, Trust.LOCAL, 2.0 if first > Trust.LOCAL else 0.0)
    (holder,) = table.match(plain(64), GENERATIONS, 2.0)
    claim = table.claim(plain(64)[0][1], ONE)
    assert claim is not None
    assert holder.trust == max(first, Trust.LOCAL) == claim.trust
    assert claim.evidence == (2 if first > Trust.LOCAL else 1)
    assert table.counters.claims[Trust(holder.trust).name.lower()] == 1


def test_equal_tokens_of_other_messages_get_the_names_of_both(table: RouteTable) -> None:
    """A template may strip spaces: the tokens are known, the texts are not."""
    table.learn([(64, 40, 41), (32, 30, 0), (16, 20, 21)], ONE, 7, Trust.LOCAL, 0.0)
    assert table.learn([(64, 40, 141), (32, 30, 0), (16, 20, 121)], ONE, 7, Trust.LOCAL, 0.0) == 0
    assert [depth(table, [(64, 0, text)]) for text in (41, 141, 21, 121)] == [64, 64, 16, 16]


@pytest.mark.parametrize("eviction", [LRU, UTILITY])
def test_a_table_that_is_never_full_forgets_the_seconds_in_which_nothing_is_queued_any_more(eviction: str) -> None:
    table = table_of(ttl_s=10.0, eviction=eviction)
    table.learn(plain(32, name="held"), ONE, 7, Trust.CONFIRMED, 0.0)
    for second in range(2000):
        table.learn(plain(64, name=str(second)), ONE, 7, Trust.CONFIRMED, float(second))
        table.learn(plain(32, name="held"), ONE, 7, Trust.CONFIRMED, float(second))  # its place in the queue stays
        table.sweep(float(second), GENERATIONS)
    assert len(table) < 20
    assert sum(map(len, table.leaves.heads.values())) <= len(table)
    assert sum(map(len, table.leaves.seconds.values())) <= 2 * len(table) + EMPTY_SECONDS


def test_a_path_longer_than_the_table_is_stored_from_its_deep_end() -> None:
    table = table_of(capacity=2)
    assert table.learn(plain(16, 32, 64, 128), ONE, 7, Trust.LOCAL, 0.0) == 2
    assert depth(table, plain(128)) == 128
    assert table.counters.refused == 2


def test_withdrawing_a_prefix_takes_what_is_below_it_and_leaves_what_is_above_and_others(table: RouteTable) -> None:
    path = plain(64, 128, 256, 512)
    table.learn(path, ONE, 7, Trust.LOCAL, 0.0)
    table.learn(path[1:], TWO, 7, Trust.LOCAL, 0.0)
    assert table.withdraw(path[2][1], ONE)
    assert not table.withdraw(path[2][1], ONE)
    assert not table.withdraw(12345, ONE)
    found = table.match(path, GENERATIONS, 0.0, wanted=2)
    assert [(holder.backend, holder.tokens) for holder in found] == [(TWO, 256), (ONE, 64)]
    assert len(table) == 3, "the deepest row has no claim left"
    assert table.withdraw(path[-1][1], TWO)
    assert table.withdraw(path[-1][1], ONE)
    assert len(table) == 0


def test_a_large_withdrawal_is_finished_by_the_sweep() -> None:
    table = table_of(capacity=10_000)
    root = plain(16, name="root")
    for number in range(3000):
        table.learn(plain(64, name=str(number)) + root, ONE, 7, Trust.LOCAL, 0.0)
    assert table.withdraw(root[0][1], ONE)
    assert 0 < len(table) < 2000
    table.sweep(0.0, GENERATIONS)
    assert len(table) == 0
    assert table.counters.withdrawn == 3001


def test_withdrawals_below_a_prefix_of_many_chats_look_at_a_bounded_part_of_them_and_leave_no_more_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though an engine stores and drops the prefix again and again."""
    table, root, looks, get = table_of(), plain(16, name="root"), list[int](), Claims.get
    monkeypatch.setattr(Claims, "get", lambda claims, row, backend: looks.append(row) or get(claims, row, backend))
    for _ in range(3):
        for number in range(10_000):
            table.learn(plain(64, 128, name=str(number)) + root, ONE, 7, Trust.LOCAL, 0.0)
        looks.clear()
        assert table.withdraw(root[0][1], ONE)
        assert len(looks) < 4 * WITHDRAW_ROWS_MAX
        assert len(table.withdrawing) < 10
    while table.sweep(0.0, GENERATIONS):
        assert len(table.withdrawing) < 10
    assert (len(table), len(table.withdrawing)) == (0, 0)


def test_withdrawals_that_are_too_many_at_once_are_given_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "WITHDRAW_ROWS_MAX", 0)
    monkeypatch.setattr(table_module, "WITHDRAWING_MAX", 10)
    table = table_of()
    for number in range(15):
        table.learn(plain(16, 32, name=str(number)), ONE, 7, Trust.LOCAL, 0.0)
        assert table.withdraw(plain(16, name=str(number))[0][1], ONE)
    assert (len(table.withdrawing), table.counters.withdrawals_given_up) == (10, 5)
    table.sweep(0.0, GENERATIONS)
    assert sum(depth(table, plain(32, name=str(number))) > 0 for number in range(15)) == 5


def test_the_sweep_does_a_bounded_part_of_the_table_at_a_time(table: RouteTable) -> None:
    for number in range(500):
        table.learn(plain(64, name=str(number)), ONE, 7, Trust.LOCAL, 0.0)
    assert table.sweep(200.0, GENERATIONS, limit=100) == 100
    assert len(table) == 400


def test_the_subtree_view_reports_depths_parents_holders_and_ages(learned: RouteTable) -> None:
    learned.match([], GENERATIONS, 30.0)
    chain = prompt(*THREAD)
    view = learned.subtree(chain[1][2])[0]
    assert (view.tokens, view.exact, view.children, view.idle_s) == (400, True, 1, 30.0)
    assert (view.token_fingerprint, view.text_fingerprints) == (chain[1][1], (chain[1][2],))
    assert view.parent == chain[2][1]
    assert [(holder.backend, holder.generation, holder.age_s) for holder in view.holders] == [(ONE, 7, 30.0)]
    assert len(learned.subtree(chain[1][1])) == 2
    assert len(learned.subtree(0, limit=3)) == 3
    assert learned.subtree(424242) == []


@pytest.mark.parametrize(
    ("key", "backend", "generation"),
    [((16, 1, 0), 4096, 0), ((16, 1, 0), -1, 0), ((16, 1, 0), 1, -1), ((16, 2**64, 0), 1, 0), ((2**32, 1, 0), 1, 0)],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    table: RouteTable, key: PrefixKey, backend: int, generation: int
) -> None:
    with pytest.raises(ValueError, match=r"backend id|generation|not a prefix key"):
        table.learn([key], BackendId(backend), generation, Trust.LOCAL, 0.0)
    assert len(table) == 0


def test_keys_without_a_fingerprint_or_without_tokens_are_no_prefix(table: RouteTable) -> None:
    assert table.learn([(64, 0, 0), (0, 0, 5)], ONE, 7, Trust.LOCAL, 0.0) == 0
    assert table.learn([], ONE, 7, Trust.LOCAL, 0.0) == 0
    with pytest.raises(ValueError, match="positive"):
        table_of(capacity=0)


def test_a_long_chat_that_was_known_by_its_text_is_learned_by_its_tokens_in_time_proportional_to_its_length() -> None:
    """Anchors that come between its messages are hung there without a walk to the top for each."""

    def seconds_for(messages: int) -> float:
        table = table_of(capacity=100_000)
        ends = [(48 * number, fp("tokens", number), fp("text", number)) for number in range(messages, 0, -1)]
        anchors = [(tokens - 16, fp("anchor", tokens), 0) for tokens, _, _ in ends]
        table.learn(text_only(ends), ONE, 7, Trust.LOCAL, 0.0)
        began = time.thread_time()
        table.learn([key for pair in zip(ends, anchors, strict=True) for key in pair], ONE, 7, Trust.LOCAL, 1.0)
        took_s = time.thread_time() - began
        assert table.counters.unlinked == 0
        return took_s

    assert min(seconds_for(4000) for _ in range(3)) < 24 * min(seconds_for(500) for _ in range(3))
