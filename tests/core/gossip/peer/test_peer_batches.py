"""Further turns that are known by their texts alone, many at once: told as update batches, learned as if one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from ranvier_py.core.gossip.peer import held_updates as turns
from ranvier_py.core.gossip.peer.held_updates import HOLD_S, LOT_S
from ranvier_py.core.gossip.peer.received_batches import MERGED_LEAST
from ranvier_py.core.gossip.peer.route_sync import BOUND_LEAST
from ranvier_py.core.gossip.replication.update_batches import ROWS_MAX, decode_batch, is_batch, rows_of
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import PrefixKey
from ranvier_py.core.routing.route_table.uses import used_before
from tests.core.gossip.peer.test_peer_routes import ENGINE, OTHER, Node

CHATS = 8


def nodes(*, understood: bool = True) -> tuple[Node, Node]:
    first, second = Node(1, ENGINE, OTHER), Node(2, OTHER, ENGINE)
    first.meet(second)
    first.routes.understood = second.routes.understood = understood
    return first, second


def beginnings(first: Node, now: float = 10.0) -> list[list[PrefixKey]]:
    """Chats that peers know the first turn of."""
    chats: list[list[PrefixKey]] = [[(32, 0, 1000 + number)] for number in range(CHATS)]
    for number, chat in enumerate(chats):
        first.serve(chat, now, (ENGINE, OTHER)[number % 2])
    return chats


def go_on(first: Node, chats: list[list[PrefixKey]], turns: int, now: float, seed: int = 1) -> None:
    """Each turn goes on from some point of some chat, with one more text or two."""
    rng = Random(seed)
    for turn in range(turns):
        which = rng.randrange(len(chats))
        chat = chats[which]
        for _ in range(1 + (turn % 3 == 0)):
            chat = [(chat[0][0] + 40, 0, rng.getrandbits(64) | 1), *chat]
        if turn % 2:
            chats[which] = chat
        first.serve(chat, now, (ENGINE, OTHER)[which % 2])


def tree(node: Node) -> list[tuple[int, tuple[int, ...], list[str]]]:
    """What a node knows: depth, texts and holders of each row below each."""
    views = node.table.subtree(0, limit=10_000)
    return sorted(
        (view.tokens, view.text_fingerprints, sorted(node.registry[claim.backend].url for claim in view.holders))
        for view in views
    )


def edges(node: Node) -> list[tuple[int, int]]:
    rows, *_ = node.table.parts()
    return sorted((rows.text[row], rows.text[rows.parent[row]]) for row in rows.index.values())


def route_updates(node: Node, now: float) -> list[tuple[bytes, float]]:
    return list(node.routes.route_updates(now))


@pytest.mark.parametrize("seed", range(5))
def test_a_update_batch_teaches_what_its_turns_would_teach_one_by_one(seed: int) -> None:
    trees = []
    for understood in (True, False):
        first, second = nodes(understood=understood)
        chats = beginnings(first)
        first.tell(second)
        go_on(first, chats, 300, 11.0, seed)
        told = route_updates(first, 11.0 + HOLD_S + LOT_S)
        assert any(is_batch(route_update) for route_update, _ in told) is understood
        assert len(told) < 20 or not understood
        for route_update, at in told:
            assert second.routes.hear(route_update, 13.0 - at, 13.0)
        assert edges(first) == edges(second)
        trees.append((tree(first), tree(second)))
        assert first.routes.counters.bound == (400 if understood else 0)
    (alone, heard), (again, one_by_one) = trees
    assert alone == again == heard == one_by_one


@pytest.mark.parametrize("seed", range(5))
def test_uses_are_heard_of_a_update_batch_as_one_by_one(seed: int) -> None:
    """Calibration counts by them what pushes other prefixes out; under full load nearly all turns come in update
    batches."""
    heard = []
    for understood in (True, False):
        first, second = nodes(understood=understood)
        chats = beginnings(first)
        first.tell(second)
        used: Counter[object] = Counter()

        def hear(
            prompts: Iterable[Sequence[PrefixKey]],
            backend: BackendId,
            generation: int,
            at: int,
            second: Node = second,
            used: Counter[object] = used,
        ) -> None:
            new_tokens, before = second.table.uses.used_before(prompts, backend, generation, at)
            used.update({(backend, "new"): new_tokens, **{(backend, then): each for then, each in before.items()}})

        second.table.remote_use = hear
        go_on(first, chats, 300, 11.0, seed)
        for route_update, at in route_updates(first, 11.0 + HOLD_S + LOT_S):
            assert second.routes.hear(route_update, 13.0 - at, 13.0)
        heard.append(dict(used))
    assert heard[0] == heard[1]
    assert sum(heard[0].values()) == 400 * 40 + CHATS * 32


def test_few_turns_are_told_one_by_one() -> None:
    first, _ = nodes()
    chats = beginnings(first)[:1]
    route_updates(first, 10.0)
    for number in range(BOUND_LEAST - 1):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    told = route_updates(first, 11.0 + HOLD_S + LOT_S)
    assert len(told) == BOUND_LEAST - 1
    assert not any(is_batch(route_update) for route_update, _ in told)


@pytest.mark.parametrize("count", [BOUND_LEAST, MERGED_LEAST - 1, MERGED_LEAST, ROWS_MAX, ROWS_MAX + 1, 500])
def test_no_turn_is_lost_between_two_update_batches(count: int) -> None:
    first, second = nodes()
    chats = beginnings(first)[:1]
    first.tell(second)
    for number in range(count):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    told = route_updates(first, 11.0 + HOLD_S + LOT_S)
    assert sum(rows_of(route_update) for route_update, _ in told) == count
    for route_update, at in told:
        second.routes.hear(route_update, 13.0 - at, 13.0)
    assert second.table.counters.rows == count + CHATS


@pytest.mark.parametrize("count", [MERGED_LEAST - 6, 3 * MERGED_LEAST])
def test_rows_whose_chat_comes_later_are_hung_where_they_belong(count: int) -> None:
    """Some of the update batch, or all of it, came before what it goes on from: over another way, or from another
    node."""
    first, second = nodes()
    chats = beginnings(first)
    begun = route_updates(first, 10.0)
    for route_update, at in begun[: CHATS // 2]:
        second.routes.hear(route_update, 10.0 - at, 10.0)
    go_on(first, chats, count, 11.0)
    for route_update, at in route_updates(first, 11.0 + HOLD_S + LOT_S):
        second.routes.hear(route_update, 13.0 - at, 13.0)
    assert second.routes.orphans > 0
    for route_update, at in begun[CHATS // 2 :]:
        second.routes.hear(route_update, 14.0 - at, 14.0)
    assert second.routes.orphans == 0
    assert edges(first) == edges(second)
    assert tree(first) == tree(second)


def test_who_waits_for_others_does_not_hold_up_a_update_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece whose row never comes waits for long: one by one a update batch would cost four times as much, all that
    time."""
    first, second = nodes()
    chats = beginnings(first)
    begun = route_updates(first, 10.0)
    for route_update, at in begun[1:]:
        second.routes.hear(route_update, 10.0 - at, 10.0)
    first.serve([(72, 0, 4999), *chats[0]], 10.5)
    ((route_update, _),) = route_updates(first, 10.5 + HOLD_S + LOT_S)
    second.routes.hear(route_update, 0.0, 13.0)
    assert second.routes.orphans == 1
    for number in range(40):
        first.serve([(72, 0, 5000 + number), *chats[1]], 13.0, OTHER)
    ((route_update, _),) = route_updates(first, 13.0 + HOLD_S + LOT_S)
    with monkeypatch.context() as patched:
        patched.setattr(second.routes.batches, "_one_by_one", lambda batch, rows, *_: len(rows) and 1 / 0)
        assert second.routes.hear(route_update, 2.0, 15.0)
    second.routes.hear(begun[0][0], 5.0, 15.0)
    assert second.routes.orphans == 0
    assert edges(first) == edges(second)


def test_what_was_withdrawn_meanwhile_is_not_told() -> None:
    first, second = nodes()
    chats = beginnings(first)[:1]
    first.tell(second)
    for number in range(20):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    first.table.withdraw(5007, first.engine().id)
    first.tell(second, 11.0 + HOLD_S + LOT_S)
    assert first.routes.counters.keys_gone == 1
    assert second.holders([(72, 0, 5006)], 13.0)
    assert not second.holders([(72, 0, 5007)], 13.0)


def test_of_a_process_that_is_gone_nothing_is_told_or_heard() -> None:
    first, second = nodes()
    chats = beginnings(first)[:1]
    first.tell(second)
    for number in range(20):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    told = route_updates(first, 11.0 + HOLD_S + LOT_S)
    second.registry.restart(second.engine(), "test", 12.0)
    second.backends.look(12.0)
    assert not second.routes.hear(told[0][0], 1.0, 13.0)
    assert second.routes.counters.void == 1
    for number in range(20):
        first.serve([(72, 0, 6000 + number), *chats[0]], 14.0)
    first.registry.restart(first.engine(), "test", 15.0)
    first.backends.look(15.0)
    assert route_updates(first, 14.0 + HOLD_S + LOT_S) == []
    assert first.routes.counters.outdated == 20


def test_a_update_batch_is_as_old_as_its_oldest_row() -> None:
    first, second = nodes()
    chats = beginnings(first)[:1]
    first.tell(second)
    for number in range(20):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0 + number)
    told = route_updates(first, 100.0)
    assert [at for _, at in told] == [11.0]
    second.routes.hear(told[0][0], 89.0, 100.0)
    assert {claim.age_s for view in second.table.subtree(5000) for claim in view.holders} == {89.0}


def test_bytes_that_are_no_update_batch_are_counted_and_change_nothing() -> None:
    first, second = nodes()
    chats = beginnings(first)[:1]
    first.tell(second)
    for number in range(20):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    ((route_update, _),) = route_updates(first, 11.0 + HOLD_S + LOT_S)
    before = second.table.counters.rows
    assert not second.routes.hear(route_update[:-1], 0.0, 13.0)
    assert second.routes.counters.bad == 1
    assert second.table.counters.rows == before


def test_of_more_than_can_be_held_back_the_oldest_go_in_a_update_batch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under full load more comes within the time than may wait."""
    monkeypatch.setattr(turns, "HELD_MAX", 500)
    first, _ = nodes()
    chats = beginnings(first)[:1]
    route_updates(first, 10.0)
    for number in range(600):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    told = [decode_batch(route_update) for route_update, _ in route_updates(first, 11.0)]
    assert [text for batch in told for text in batch.texts.tolist()] == list(range(5000, 5100))
    assert first.routes.waiting == 500


def test_turns_wait_for_a_full_update_batch_but_not_for_long() -> None:
    first, _ = nodes()
    chats = beginnings(first)[:1]
    route_updates(first, 10.0)
    for number in range(ROWS_MAX - 1):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    assert route_updates(first, 11.0 + HOLD_S) == []
    first.serve([(72, 0, 6000), *chats[0]], 11.1)
    assert route_updates(first, 11.05 + HOLD_S) == []
    ((route_update, _),) = route_updates(first, 11.1 + HOLD_S)
    assert rows_of(route_update) == ROWS_MAX
    for number in range(20):
        first.serve([(72, 0, 7000 + number), *chats[0]], 14.0)
    assert route_updates(first, 14.0 + HOLD_S) == []
    assert [rows_of(route_update) for route_update, _ in route_updates(first, 14.0 + HOLD_S + LOT_S)] == [20]


def test_a_turn_that_was_told_with_its_tokens_is_in_no_update_batch() -> None:
    first, second = nodes()
    chats = beginnings(first)[:1]
    first.tell(second)
    for number in range(20):
        first.serve([(72, 0, 5000 + number), *chats[0]], 11.0)
    first.serve([(72, 90, 5003), (32, 91, 1000)], 11.2)
    first.tell(second, 12.0)
    ((route_update, _),) = route_updates(first, 11.0 + HOLD_S + LOT_S)
    assert rows_of(route_update) == 19
    assert first.routes.counters.spared == 1
    assert second.holders([(72, 90, 0)], 13.0)
