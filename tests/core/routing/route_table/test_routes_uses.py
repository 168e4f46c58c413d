"""What claims say of uses, and what answers say of claims."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.table import WITHDRAW_ROWS_MAX
from tests.builders.route_tables import chain, route_table
from tests.examples import examples

A, B = BackendId(0), BackendId(1)
GENERATIONS = [1, 1]
table_of = partial(route_table, generation=1)


def depth(table: RouteTable, chain: list[PrefixKey], backend: BackendId = A) -> int:
    found = table.match(chain, [1 if backend == each else -1 for each in (A, B)], 100.0, touch=False)
    return found[0].tokens if found else 0


def test_a_prompt_is_made_of_what_is_new_and_of_what_was_used_in_earlier_seconds() -> None:
    table = table_of((chain(1, 2, 3, 4), A, 10.0), (chain(1, 2), A, 20.0))
    assert table.uses.used_before([chain(1, 2, 3, 4, 5, 6)], A, 1, 30) == (32, {10: 32, 20: 32})
    assert table.uses.used_before([chain(1, 2, 3)], A, 1, 15) == (0, {10: 16})  # the rest was used later than that
    assert table.uses.used_before([chain(1, 7)], A, 1, 30) == (16, {20: 16})
    assert table.uses.used_before([chain(8, 9)], A, 1, 30) == (32, {})
    assert table.uses.used_before([chain(1, 2)], B, 1, 30) == (32, {})
    assert table.uses.used_before([chain(1, 2)], A, 2, 30) == (32, {}), "of an earlier process"


def test_what_several_prompts_have_in_common_is_used_once() -> None:
    table = table_of((chain(1, 2, 3), A, 10.0), (chain(1, 2, 9), A, 20.0))
    assert table.uses.used_before([chain(1, 2, 3, 4), chain(1, 2, 9), chain(1, 2, 3, 5)], A, 1, 30) == (
        32,
        {10: 16, 20: 48},
    )


def test_of_the_prefix_a_prompt_goes_on_from_its_name_is_enough() -> None:
    table = table_of((chain(1, 2), A, 10.0))
    assert table.uses.used_before([[(48, 3, 0), (0, 0, 2)]], A, 1, 30) == (16, {10: 32})


def test_what_another_engine_holds_deeper_is_new_to_this_one_from_where_its_own_ends() -> None:
    table = table_of((chain(1, 2), A, 10.0), (chain(1, 2, 3, 4), B, 11.0))
    assert table.uses.used_before([[(80, 5, 0), (64, 4, 0)]], A, 1, 30) == (48, {10: 32})
    assert table.uses.used_before([[(80, 5, 0), (64, 4, 0)], [(80, 6, 0), (64, 4, 0)]], A, 1, 30) == (64, {10: 32})


def test_a_use_is_received_before_its_claims_are_raised() -> None:
    table = table_of((chain(1, 2), A, 10.0))
    received: list[tuple[int, dict[int, int]]] = []
    table.on_use = lambda prompts, backend, generation, second, _: received.append(
        table.uses.used_before(prompts, backend, generation, second)
    )
    table.learn(chain(1, 2, 3), A, 1, Trust.LOCAL, 20.0)
    table.learn(chain(1, 2, 3, 4), A, 1, Trust.REMOTE, 30.0)
    assert received == [(16, {10: 32}), (16, {20: 48})]


def test_a_rough_look_takes_all_that_is_held_for_as_old_as_its_deepest_part() -> None:
    table = table_of((chain(1, 2, 3), A, 10.0), (chain(1, 5), A, 12.0))
    rough = table.uses.roughly_used_before
    assert rough(chain(1, 2, 3, 4), A, 1, 30) == (16, {10: 48})
    assert rough(chain(1, 2, 3, 4), A, 1, 10) == (16, {}), "it was used in this second already"
    assert rough(chain(1, 2, 3, 4), A, 2, 30) == (64, {}), "an earlier process held it"
    assert rough(chain(8, 9), A, 1, 30) == (32, {})


def test_a_rough_look_at_the_rows_of_one_prompt_one_by_one_counts_none_twice() -> None:
    table, used = table_of(), 0
    table.learn(chain(1, 2, 3, 4), A, 1, Trust.LOCAL, 10.0)
    for depth in range(1, 5):
        path = chain(1, 2, 3, 4)[-depth:]
        used += sum(table.uses.roughly_used_before(path, A, 1, 30)[1].values())
        table.learn(path, A, 1, Trust.REMOTE, 30.0)
    assert used == 64


def test_peers_learn_what_a_running_request_still_uses() -> None:
    table, peer = table_of(), table_of()
    for each in (table, peer):
        each.learn(chain(1, 2, 3), A, 1, Trust.LOCAL, 10.0)
    table.outgoing.collect()
    for _ in range(2):  # once for each second
        table.uses.renew((48, 3, 0), A, 1, 20)
    [renewed] = table.outgoing.new
    assert (renewed.backend, renewed.chain, renewed.at) == (A, ((48, 3, 0),), 20)
    peer.learn(renewed.chain, A, 1, Trust.REMOTE, renewed.at)
    for each in (table, peer):
        each.hide(A, 15)
        assert depth(each, chain(1, 2, 3)) == 48


def test_what_a_running_request_uses_stays_young() -> None:
    table = table_of((chain(1, 2, 3), A, 10.0), (chain(1, 5), A, 10.0))
    key = table.uses.deepest_held(chain(1, 2, 3, 4), A, 1)
    assert key == (48, 3, 0)
    table.uses.renew(key, A, 1, 20)
    table.hide(A, 15)
    assert depth(table, chain(1, 2, 3)) == 48
    assert depth(table, chain(1, 5)) == 16
    assert table.uses.deepest_held(chain(1, 5), A, 2) is None, "it ran at an earlier process"
    assert table.uses.deepest_held(chain(8), B, 1) is None
    table.uses.renew((32, 5, 0), A, 2, 30)
    assert depth(table, chain(1, 5)) == 16


def test_of_a_second_that_is_partly_out_the_deeper_claims_fade_first() -> None:
    table = table_of((chain(1, 2, 3), A, 10.0), (chain(4, 5), A, 11.0))
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


def test_siblings_below_a_cold_prefix_go_and_everything_else_stays() -> None:
    table = table_of()
    cold, sibling, other = chain(1, 2, 3), chain(1, 2, 4, 5), chain(1, 6)
    for each in (cold, sibling, other):
        for backend in (A, B):
            table.learn(each, backend, 1, Trust.LOCAL, 10.0)
    table.learn(cold, A, 1, Trust.LOCAL, 50.0)  # it was served, so it is there again
    assert table.refute((32, 2, 0), A, before=40) == 1
    assert depth(table, sibling, A) == 32
    assert depth(table, cold, A) == 48
    assert depth(table, other, A) == 32
    assert depth(table, sibling, B) == 64


def test_an_answer_that_refutes_many_chats_withdraws_a_bounded_part_of_them_at_once() -> None:
    table = table_of()
    for chat in range(100, 150):
        table.learn(
            [(16 * (2 + depth), 1000 * chat + depth, 0) for depth in range(100, 0, -1)] + chain(1, 2),
            A,
            1,
            Trust.LOCAL,
            10.0,
        )
    assert table.refute((32, 2, 0), A, before=40) == 50
    assert 50 < table.counters.withdrawn <= 50 + WITHDRAW_ROWS_MAX
    while table.sweep(50.0, [1, 1]):
        pass
    assert table.counters.withdrawn == 5000
    assert len(table) == 2


def test_what_was_served_meanwhile_stays() -> None:
    table = table_of((chain(1, 2, 3), A, 50.0), (chain(1, 2, 4), A, 45.0), (chain(1, 2, 4, 5), A, 10.0))
    assert table.refute((32, 2, 0), A, before=40) == 1
    assert depth(table, chain(1, 2, 4, 5), A) == 48
    assert table.refute((32, 2, 0), A, before=46) == 1
    assert depth(table, chain(1, 2, 4), A) == 32


def test_peers_learn_what_was_withdrawn_as_of_the_request_that_found_out() -> None:
    table = table_of()
    table.outgoing.collect()
    table.learn(chain(1, 2, 3), A, 1, Trust.LOCAL, 50.0)
    table.learn(chain(1, 2, 4), A, 1, Trust.LOCAL, 10.0)
    assert table.refute((32, 2, 0), A, before=40) == 1
    assert [(updates.fingerprint, updates.at) for updates in table.outgoing.withdrawn] == [(4, 40)]


def test_an_unknown_prefix_refutes_nothing() -> None:
    assert table_of().refute((16, 9, 0), A, before=40) == 0


def test_evidence_is_reported_where_it_changes_deepest_first() -> None:
    table = table_of((chain(1, 2, 3, 4), A, 10.0), (chain(1, 2), A, 30.0), (chain(1), B, 40.0))
    assert table.uses.evidence_of(chain(1, 2, 3, 4, 5), A, 1) == [(64, 10), (32, 30)]
    assert table.uses.evidence_of(chain(1, 2), A, 2) == []


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 60)), max_size=8),
    st.integers(0, 70),
)
def test_a_hidden_claim_is_as_if_it_were_not_there_until_it_is_back(
    learned: list[tuple[list[int], int]], second: int
) -> None:
    """The one test of a match must agree with a table that never had the old evidence."""

    def names(path: list[int]) -> list[PrefixKey]:
        return chain(*(sum(part * 10**place for place, part in enumerate(path[: end + 1])) for end in range(len(path))))

    table, young = table_of(), table_of()
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


def test_what_was_seen_before_this_machine_started_is_hidden_only_as_others_are() -> None:
    """Time is counted from then, so evidence that peers saw earlier has negative seconds."""
    table = table_of()
    table.learn(chain(1, 2), A, 1, Trust.REMOTE, -50.0)
    table.hide(A, -1, {10: 16})
    assert depth(table, chain(1, 2)) == 32
    table.hide(A, 0, {10: 16})
    assert depth(table, chain(1, 2)) == 0
