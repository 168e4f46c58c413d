"""Routes of one node, sent to another and learned there."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.checkpoints import checkpoints
from ranvier_py.core.routing.checkpoints.cache_profile import CheckpointKind, profile_named
from ranvier_py.core.routing.checkpoints.checkpoint_index import KeptCheckpoint, mark_of
from ranvier_py.core.routing.checkpoints.checkpoints import BackendCheckpoints, lost
from ranvier_py.core.routing.peers import route_sync
from ranvier_py.core.routing.peers import route_updates as u
from ranvier_py.core.routing.peers.route_messages import unpack_rows
from ranvier_py.core.routing.peers.route_sync import GATHER_S, MERGED_MIN, TEXTS_WAIT_S
from ranvier_py.core.routing.route_table import Trust
from tests.core.routing.peers.route_net import CHAT, ENGINE, NEXT_TURN, OTHER, RouteNode

CHATS = 8
LEFT_S = TEXTS_WAIT_S + GATHER_S
"""After this even texts without tokens are sent."""


def two(*urls: str) -> tuple[RouteNode, RouteNode]:
    """They number their engines differently."""
    first, second = RouteNode(1, urls or (ENGINE, OTHER)), RouteNode(2, (urls or (ENGINE, OTHER))[::-1])
    first.meet(second)
    return first, second


def rows_of(node: RouteNode, now: float) -> list[u.UpdateRow]:
    return [row for update, _ in node.updates(now) for row in u.decode_rows(update)]


def texts_of(node: RouteNode, now: float) -> list[int]:
    return [row.text for row in rows_of(node, now)]


def test_the_next_turn_of_a_chat_finds_its_engine_on_another_node() -> None:
    first, second = two()
    first.serve(CHAT)
    first.send(second)
    assert second.holders(NEXT_TURN) == [(ENGINE, 64, Trust.REMOTE)]


def test_only_what_is_new_is_sent_and_it_hangs_where_it_belongs() -> None:
    first, second = two()
    first.serve(CHAT)
    first.send(second)
    first.serve(NEXT_TURN, 11.0)
    assert first.send(second, now=11.0) < 60
    assert [(view.tokens, view.level) for view in second.table.subtree(0)] == [(16, 0), (32, 1), (64, 2), (96, 3)]


def test_what_is_sent_ages_on_its_path() -> None:
    first, second = two()
    first.serve(CHAT, 10.0)
    first.send(second, now=110.0)
    assert second.holders(CHAT, 110.0)
    (view, *_) = second.table.subtree(0)
    assert view.holders[0].age_s == 100.0


def test_no_route_gets_younger_when_a_peer_copies_the_table() -> None:
    """Nodes that copy from each other would never forget it. A row's age is sent in 16 bits; routes may be older."""
    first, second = two()
    for node in (first, second):
        node.table.ttl_s = 86_400.0
    first.serve(CHAT, 10.0)
    for now in (60_000.0, 70_000.0):
        walk = first.sync.copy.rows(b"", 11.0)
        while (rows := walk.take(now)) is None:
            pass
        second.sync.copy.merge(unpack_rows(rows.data), now, now)
    claims = [second.table.claim(key[1] or key[2], second.engine().id) for key in CHAT]
    assert [claim.evidence for claim in claims if claim is not None] == [10] * len(CHAT)
    assert not any(first.sums(70_000.0)), "it is not compared either, since it would not be sent"


def test_a_backend_the_operator_did_not_give_us_is_never_ranked() -> None:
    """The rest of the update is learned."""
    first, second = RouteNode(1, [ENGINE, OTHER]), RouteNode(2, [OTHER])
    first.meet(second)
    first.serve(CHAT)
    first.serve([(48, 300, 400)], 10.0, OTHER)
    first.send(second)
    assert second.holders(CHAT) == []
    assert second.holders([(48, 300, 400)]) == [(OTHER, 48, Trust.REMOTE)]
    assert second.sync.counters.void == 1


def test_bytes_that_are_no_route_update_are_counted_and_change_nothing() -> None:
    node = RouteNode(1)
    for data in (b"", b"\x01" * 40, b"\x00" * 11):
        assert not node.sync.receive([(0.0, data)], 10.0)
    assert node.sync.counters.bad == 3
    assert len(node.table) == 0


def test_a_route_update_of_an_earlier_generation_is_dropped_and_counted() -> None:
    node = RouteNode(1)
    node.restart(11.0)
    update = u.encode_rows([u.UpdateRow((node.key(), 1), 0, *key) for key in CHAT])
    assert not node.sync.receive([(0.0, update)], 12.0)
    assert node.sync.counters.void == 1


def test_several_texts_that_end_in_one_block_are_sent_as_one_row() -> None:
    """The engine's template adds nothing between these messages."""
    first, second = two()
    first.serve([(32, 102, 203), (32, 102, 202), (16, 101, 201)])
    first.send(second)
    assert [(view.tokens, view.level) for view in second.table.subtree(0)] == [(16, 0), (32, 1)]
    assert all(second.holders([(32, 0, text)]) for text in (202, 203))


# --- what waits -------------------------------------------------------------------------------------------------------


def test_a_turn_is_sent_once_its_texts_with_its_tokens() -> None:
    """Sent twice it would cost twice the bytes."""
    first, second = two()
    first.serve(CHAT)
    first.send(second)
    first.serve([(90, 0, 206), *CHAT], 11.0)
    assert not first.updates(11.0)
    first.serve([(128, 107, 207), (96, 106, 206), *CHAT], 12.0)
    assert texts_of(first, 12.0) == [206, 207]
    assert not first.updates(11.0 + LEFT_S)
    assert first.sync.counters.spared == 1
    assert first.sync.waiting == 0


def test_a_turn_whose_tokens_never_come_is_sent_by_its_texts() -> None:
    first, second = two()
    first.serve(CHAT)
    first.send(second)
    first.serve([(90, 0, 206), *CHAT], 11.0)
    first.send(second, now=11.0 + LEFT_S)
    assert second.holders([(90, 0, 206)], 11.0 + LEFT_S) == [(ENGINE, 90, Trust.REMOTE)]


def test_a_new_chat_is_sent_at_once_by_its_texts() -> None:
    """A crowd that comes to all nodes at once must find out where the first one went."""
    first, second = two()
    first.serve([(60, 0, 204), (30, 0, 202)])
    first.send(second)
    assert second.holders([(60, 0, 204)]) == [(ENGINE, 60, Trust.REMOTE)]


def test_before_the_table_is_shown_everything_in_it_is_sent() -> None:
    """Whoever gets it may be the only one who has it when we die, and then no log would bring it to the rest."""
    first, _ = two()
    sent: list[bytes] = []
    first.sync.copy.asked = lambda _: sent.extend(update for update, _ in first.updates(11.0, everything=True))
    first.serve(CHAT)
    first.updates()
    first.serve([(90, 0, 206), *CHAT], 11.0)
    assert not first.updates(11.0)
    first.sync.copy.sums(11.0)
    assert len(sent) == 1
    first.serve([(95, 0, 207), *CHAT], 11.0)
    first.sync.copy.rows(b"", 11.0)
    assert len(sent) == 2


def test_of_more_than_can_be_held_back_the_oldest_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under full load more comes within the time than may wait."""
    monkeypatch.setattr(route_sync, "HELD_MAX", 500)
    first, _ = two()
    first.serve(CHAT)
    first.updates()
    for number in range(600):
        first.serve([(72, 0, 5000 + number), *CHAT], 11.0)
    assert texts_of(first, 11.0) == list(range(5000, 5100))
    assert first.sync.waiting == 500


def test_texts_without_tokens_leave_together() -> None:
    first, _ = two()
    first.serve(CHAT)
    first.updates()
    for number in range(10):
        first.serve([(72, 0, 5000 + number), *CHAT], 11.0 + number / 100)
    assert not first.updates(11.0 + TEXTS_WAIT_S)
    ((update, at),) = first.updates(11.1 + LEFT_S)
    assert u.row_count(update) == 10
    assert at == 11.0, "as old as its oldest row"


# --- many rows at once ------------------------------------------------------------------------------------------------


def beginnings(first: RouteNode) -> list[list[PrefixKey]]:
    """Chats that peers know the first turn of."""
    chats: list[list[PrefixKey]] = [[(32, 0, 1000 + number)] for number in range(CHATS)]
    for number, chat in enumerate(chats):
        first.serve(chat, 10.0, (ENGINE, OTHER)[number % 2])
    return chats


def go_on(first: RouteNode, chats: list[list[PrefixKey]], turns: int, now: float, seed: int = 1) -> None:
    """Each turn goes on from some point of some chat, with one more text or two, some of them with tokens."""
    rng = Random(seed)
    for number in range(turns):
        which = rng.randrange(len(chats))
        chat = chats[which]
        for _ in range(1 + (number % 3 == 0)):
            token = rng.getrandbits(64) | 1 if number % 5 == 0 else 0
            chat = [(chat[0][0] + 40, token, rng.getrandbits(64) | 1), *chat]
        if number % 2:
            chats[which] = chat
        first.serve(chat, now, (ENGINE, OTHER)[which % 2])


def tree(node: RouteNode) -> list[tuple[int, int, Sequence[int], int, list[str]]]:
    """What a node knows: depth, names, parent and holders of each row."""
    return sorted(
        (
            view.tokens,
            view.token_fingerprint,
            view.text_fingerprints,
            view.parent,
            sorted(node.registry[claim.backend].url for claim in view.holders),
        )
        for view in node.table.subtree(0, limit=10_000)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("merged", [True, False])
def test_many_rows_at_once_are_learned_as_one_by_one(seed: int, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_sync, "MERGED_MIN", MERGED_MIN if merged else 10_000)
    first, second = two()
    chats = beginnings(first)
    first.send(second)
    go_on(first, chats, 300, 11.0, seed)
    for now in (11.0, 11.0 + LEFT_S):
        first.send(second, now=now)
    assert tree(first) == tree(second)
    assert second.sync.counters.received < 20


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """How often each function was called."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_name] if event == "call" else ()))
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_all_rows_of_a_message_are_written_in_one_pass() -> None:
    """A peer that is busy takes turns of all others: what each row costs by itself is what there is to save."""
    first, second = two()
    first.serve(CHAT)
    first.send(second)
    for number in range(300):
        first.serve([(72, 0, 5000 + number), *CHAT], 11.0)
    updates = [(0.0, update) for update, _ in first.updates(11.0 + LEFT_S)]
    calls = calls_of(lambda: second.sync.receive(updates, 20.0))
    assert len(updates) > 1
    assert calls["merge"] == 2, "of all updates, and of the table"
    assert calls.total() < 300, calls
    assert len(second.table) == len(first.table) == 300 + len(CHAT)


def test_the_tokens_of_a_chat_join_its_texts_without_a_path_for_each() -> None:
    """A new chat is sent by its texts at once, and once more when it is tokenized."""
    first, second = two()
    chat: list[PrefixKey] = [(40 * depth, 0, 7000 + depth) for depth in range(40, 0, -1)]
    first.serve(chat)
    first.send(second)
    first.serve([(tokens + 8, 9000 + text, text) for tokens, _, text in chat], 11.0)
    updates = [(1.0, update) for update, _ in first.updates(12.0)]
    calls = calls_of(lambda: second.sync.receive(updates, 12.0))
    assert tree(first) == tree(second)
    assert second.table.counters.attached == 40
    assert calls["add"] == 0, calls


@pytest.mark.parametrize("seed", range(4))
def test_uses_are_counted_of_many_rows_as_of_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration counts by them what pushes other prefixes out."""
    counted = []
    for merged in (MERGED_MIN, 10_000):
        monkeypatch.setattr(route_sync, "MERGED_MIN", merged)
        first, second = two()
        chats = beginnings(first)
        first.send(second)
        used: Counter[object] = Counter()

        def note(
            prompts: Iterable[Sequence[PrefixKey]],
            backend: BackendId,
            generation: int,
            at: int,
            tokens_below: int,
            second: RouteNode = second,
            used: Counter[object] = used,
        ) -> None:
            new_tokens, before = second.table.uses.used_before(prompts, backend, generation, at)
            used[backend] += new_tokens + tokens_below
            used.update({(backend, earlier): tokens for earlier, tokens in before.items()})

        second.table.on_use = note
        go_on(first, chats, 200, 11.0, seed)
        first.send(second, now=11.0 + LEFT_S)
        counted.append(used)
    assert counted[0] == counted[1]
    assert sum(counted[0].values()) > 0


@pytest.mark.parametrize("count", [MERGED_MIN - 6, 3 * MERGED_MIN])
def test_rows_whose_chat_comes_later_are_hung_where_they_belong(count: int) -> None:
    """Some of the update, or all of it, came before what it goes on from: over another path, or from another node."""
    first, second = two()
    chats = beginnings(first)
    begun = u.decode_rows(first.updates()[0][0])
    second.sync.receive([(0.0, u.encode_rows(begun[: CHATS // 2]))], 10.0)
    go_on(first, chats, count, 11.0)
    for now in (11.0, 11.0 + LEFT_S):
        first.send(second, now=now)
    assert second.sync.orphans > 0
    second.sync.receive([(4.0, u.encode_rows(begun[CHATS // 2 :]))], 14.0)
    assert second.sync.orphans == 0
    assert tree(first) == tree(second)


def test_of_a_process_that_is_gone_nothing_is_sent_or_taken() -> None:
    first, second = two()
    first.serve(CHAT)
    first.send(second)
    for number in range(20):
        first.serve([(72, 0, 5000 + number), *CHAT], 11.0)
    updates = first.updates(11.0 + LEFT_S)
    second.restart(12.0)
    assert not second.sync.receive([(1.0, updates[0][0])], 13.0)
    assert second.sync.counters.void == 1
    for number in range(20):
        first.serve([(72, 0, 6000 + number), *CHAT], 14.0)
    first.restart(15.0)
    assert first.updates(14.0 + LEFT_S) == []
    assert first.sync.counters.outdated == 20


def test_what_peers_ask_of_a_process_that_is_gone_counts_as_no_row_that_was_not_sent() -> None:
    """Each peer that asked for side state counted the same entries once more."""
    first, _ = two()
    engine = first.engine()
    first.owners.learn(first.owners.response_key("a response", b""), engine.id, engine.generation, 10.0)
    first.restart(11.0)
    for _ in range(3):
        assert [list(first.sync.side_updates(piece, 12.0)) for piece in first.sync.side_state()] == [[]]
    assert first.sync.counters.outdated == 0


def test_what_was_withdrawn_meanwhile_is_not_sent() -> None:
    first, second = two()
    first.serve(CHAT)
    first.send(second)
    for number in range(20):
        first.serve([(72, 0, 5000 + number), *CHAT], 11.0)
    first.table.withdraw(5007, first.engine().id)
    first.send(second, now=11.0 + LEFT_S)
    assert first.sync.counters.gone == 1
    assert second.holders([(72, 0, 5006)], 13.0)
    assert not second.holders([(72, 0, 5007)], 13.0)


def checkpoints_of(node: RouteNode) -> BackendCheckpoints:
    """Those of ENGINE, which is a hybrid model's."""
    engine = node.engine()
    node.checkpoints.set_profile(engine.id, profile_named("vllm-align:16"))
    own = node.checkpoints.known[engine.id]
    own.begin(engine.generation)
    return own


def position(node: RouteNode, now: float = 10.0) -> int:
    """Where the next turn of CHAT can begin."""
    found = checkpoints_of(node).index.deepest(NEXT_TURN, 64, 200, now)
    return found.position if found is not None else 0


STATE_AT_64 = mark_of(CheckpointKind.DECODE_END)


def learn_checkpoint(node: RouteNode, depth: int = 64) -> None:
    """By an answer of this node."""
    learned = checkpoints_of(node).index.learn(CHAT, [(depth, STATE_AT_64)], 10.0)
    node.checkpoints._announce(checkpoints_of(node), node.engine().id, learned)


def test_a_checkpoint_is_known_by_peers_and_lost_apart_from_its_route() -> None:
    first, second = two()
    first.serve(CHAT)
    own, engine = checkpoints_of(first), first.engine()
    learn_checkpoint(first)
    assert position(second) == 0
    first.send(second)
    assert position(second) == 64
    for key, checkpoint, _ in own.index.refute(CHAT, 32, 64):
        first.checkpoints._announce(own, engine.id, [KeptCheckpoint(key, lost(checkpoint, 12.0), is_new=True)])
    first.send(second, now=12.0)
    assert position(second) == 0
    assert second.holders(NEXT_TURN) == [(ENGINE, 64, Trust.REMOTE)], "its keys and values are there"
    sent, received = first.sync.counters.entries_sent, second.sync.counters.entries_received
    assert sent["checkpoints"] == received["checkpoints"] == 4, "each under both its names"


def test_a_peer_believes_a_checkpoint_for_as_long_as_who_learned_it() -> None:
    first, second = two()
    learn_checkpoint(first)
    checkpoints_of(second)
    first.send(second, now=500.0)
    assert (position(second, 609.0), position(second, 611.0)) == (64, 0)


def test_a_peer_that_asks_gets_the_latest_side_state_each_entry_with_its_age() -> None:
    first, second = two()
    own = checkpoints_of(first)
    own.index.learn(CHAT, [(64, STATE_AT_64), (32, STATE_AT_64)], 10.0)
    old, new = (first.owners.response_key(name, b"") for name in ("old", "new"))
    first.owners.learn(old, first.engine().id, first.engine().generation, 10.0)
    first.owners.learn(new, first.engine().id, first.engine().generation, 3700.0)
    checkpoints_of(second)
    for piece in first.sync.side_state():
        second.sync.take_side_state(first.sync.side_updates(piece, 3710.0), 3710.0, 3710.0)
    assert [second.owners.find(key, 3710.0) for key in (old, new)] == [
        (second.engine().id, second.engine().generation, at) for at in (10.0, 3700.0)
    ]
    assert position(second, 609.0) == 64
    assert position(second, 611.0) == 0


def test_an_answer_with_other_updates_than_side_state_is_not_learned() -> None:
    """What a peer may bring of rows is limited elsewhere."""
    first, second = two()
    first.serve(CHAT)
    removal = u.encode_process(u.ProcessUpdate(u.REMOVED, (first.key(), 1), [(1,)]))
    rows = [update for update, _ in first.updates()]
    assert rows
    second.sync.take_side_state([*rows, removal, b"", b"\x08"], 10.0, 10.0)
    assert second.holders(CHAT) == []
    assert second.sync.counters.bad >= 4


def test_rows_of_different_ages_do_not_age_each_other() -> None:
    first, second = two()
    first.serve([(48, 300, 400)], 10.0)
    first.send(second, now=10.0)
    first.serve(CHAT, 3000.0)
    first.table.outgoing.insist(300, first.engine().id)
    first.send(second, now=3001.0)
    ages = {view.token_fingerprint: view.holders[0].age_s for view in second.table.subtree(0)}
    assert ages[300] - ages[CHAT[0][1]] == 2990.0


def test_checkpoints_of_an_earlier_process_and_of_attention_are_not_taken() -> None:
    first, second = two()
    own = checkpoints_of(first)
    learn_checkpoint(first)
    first.send(second)
    assert not second.checkpoints.known
    own.index.clear()
    learn_checkpoint(first)
    checkpoints_of(second)
    second.restart(11.0)
    first.send(second, now=12.0)
    assert position(second, 12.0) == 0


def test_marks_that_nobody_fetches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "QUEUE_MAX", 4)
    node, _ = two()
    for depth in (64, 32, 16):
        learn_checkpoint(node, depth)
    assert len(node.checkpoints.new) == 4
    assert node.checkpoints.counters.dropped == 2
