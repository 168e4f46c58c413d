"""What an engine reported, among nodes: what it dropped goes everywhere, what it holds is sent once."""

from __future__ import annotations

from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.peers.route_messages import unpack_rows
from ranvier_py.core.routing.peers.route_sync import CONFIRMED_WAIT_S, GATHER_S, TEXTS_WAIT_S
from ranvier_py.core.routing.peers.route_updates import (
    ENTRY_BYTES,
    REMOVED,
    ROUTE_UPDATE_BYTES_MAX,
    ProcessUpdate,
    encode_process,
)
from ranvier_py.core.routing.route_table import Trust
from tests.core.routing.peers.route_net import CHAT, ENGINE, NEXT_TURN, OTHER, RouteNode


def three() -> tuple[RouteNode, RouteNode, RouteNode]:
    """The reader of the engine's stream, who served the chat, somebody else. All know the chat."""
    reader, server, other = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE]), RouteNode(3, [OTHER, ENGINE])
    for one in (reader, server, other):
        for two in (reader, server, other):
            if one is not two:
                one.meet(two)
    server.serve(CHAT)
    server.send(reader, other, now=10.0)
    return reader, server, other


def confirm(node: RouteNode, chain: list[PrefixKey], now: float) -> None:
    node.learn(chain, now, Trust.CONFIRMED)


def test_what_an_engine_dropped_is_withdrawn_everywhere_whoever_served_it() -> None:
    reader, server, other = three()
    reader.table.withdraw(102, reader.engine().id, 20.0)
    reader.send(server, other, now=20.0)
    for node in (reader, server, other):
        assert [(url, tokens) for url, tokens, _ in node.holders(CHAT, 20.0)] == [(ENGINE, 16)]
    assert server.sync.counters.removals_withdrawn == 1
    assert server.updates(30.0) == [], "who follows does not send it"


def test_what_was_served_after_the_removal_stays() -> None:
    """The turn was under way when the engine dropped its blocks: it holds them again now."""
    reader, server, _ = three()
    reader.table.withdraw(101, reader.engine().id, 20.0)
    route_updates = reader.updates(20.0)
    server.serve(CHAT, 25.0)
    for route_update, at in route_updates:
        server.sync.receive([(26.0 - at, route_update)], 26.0)
    assert server.holders(CHAT, 26.0) == [(ENGINE, 64, Trust.LOCAL)]
    assert server.sync.counters.removals_younger == len(CHAT)


def test_what_was_served_since_it_went_stays_though_other_things_went_later() -> None:
    """An answer tells what was gone when its request was sent, minutes ago; that comes with what went just now."""
    reader, server, other = three()
    server.serve([(16, 301, 401)], 20.0)
    server.send(reader, other, now=20.0)
    server.serve(CHAT, 25.0)
    reader.table.withdraw(301, reader.engine().id, 30.0)
    reader.table.withdraw(101, reader.engine().id, 20.0)
    reader.send(server, now=30.0)
    assert server.holders(CHAT, 30.0) == [(ENGINE, 64, Trust.LOCAL)]
    assert server.holders([(16, 301, 401)], 30.0) == []


def test_a_piece_that_hangs_elsewhere_at_a_peer_goes_as_well() -> None:
    """It came when the row above it was unknown: what is withdrawn above does not reach it."""
    reader, _, other = three()
    engine = other.engine()
    other.table.withdraw(101, engine.id)
    other.table.learn([(64, 104, 204)], engine.id, engine.generation, Trust.REMOTE, 12.0)
    reader.table.withdraw(101, reader.engine().id, 20.0)
    reader.send(other, now=20.0)
    assert other.holders(CHAT, 20.0) == []


def test_a_removal_of_an_earlier_process_is_not_followed() -> None:
    reader, _, other = three()
    reader.table.withdraw(101, reader.engine().id, 20.0)
    route_updates = reader.updates(20.0)
    other.receive(reader, 21.0, generation=2)
    other.serve(CHAT, 21.0)
    for route_update, at in route_updates:
        other.sync.receive([(30.0 - at, route_update)], 30.0)
    assert other.holders(CHAT, 30.0) == [(ENGINE, 64, Trust.LOCAL)]
    assert other.sync.counters.void == 1


def test_what_a_gone_process_dropped_is_not_reported() -> None:
    reader, _, _ = three()
    reader.table.withdraw(101, reader.engine().id, 20.0)
    reader.restart(20.0)
    assert reader.updates(20.0) == []
    assert reader.sync.counters.outdated == len(CHAT)


def test_what_came_and_went_between_two_looks_is_reported_as_gone_only() -> None:
    reader, server, other = three()
    confirm(reader, [(128, 900, 0), (64, 104, 0)], 20.0)
    reader.table.withdraw(900, reader.engine().id, 20.5)
    reader.send(server, other, now=20.0 + 2 * CONFIRMED_WAIT_S)
    assert [tokens for _, tokens, _ in other.holders([(128, 900, 0), *CHAT], 25.0)] == [64]
    assert reader.sync.counters.gone == 1


def test_what_went_and_came_again_is_reported_as_there() -> None:
    reader, server, other = three()
    reader.table.withdraw(104, reader.engine().id, 20.0)
    confirm(reader, [(64, 104, 0), (32, 102, 0)], 22.0)
    reader.send(server, other, now=22.0)
    reader.send(server, other, now=22.0 + CONFIRMED_WAIT_S)
    assert [tokens for _, tokens, _ in other.holders(CHAT, 24.0)] == [64]


def test_what_an_engine_states_of_a_prompt_that_a_peer_reports_is_not_reported_twice() -> None:
    reader, server, other = three()
    confirm(reader, [(128, 108, 0), (96, 106, 0), (64, 104, 0)], 20.0)  # its events are faster than the route update
    assert reader.send(server, other, now=20.1) == 0
    server.serve(NEXT_TURN, 20.1)
    server.send(reader, other, now=20.2)
    reader.send(server, other, now=20.0 + CONFIRMED_WAIT_S)
    assert reader.sync.counters.spared == 1
    assert [tokens for _, tokens, _ in other.holders([(128, 108, 0), *NEXT_TURN], 22.0)] == [128]
    assert other.table.prefix_key_of(108) == (128, 108, 0)


def test_what_the_reader_knows_of_texts_it_reports_with_what_the_engine_stated() -> None:
    """The chat went to another engine; a node that has dropped its row meanwhile would know it by its tokens only."""
    reader, server, other = three()
    other.table.withdraw(101, other.engine().id)
    assert other.table.prefix_key_of(104) is None
    reader.table.withdraw(104, reader.engine().id, 20.0)
    reader.updates(20.0)
    confirm(reader, [(64, 104, 0), (32, 102, 0), (16, 101, 0)], 21.0)
    reader.send(server, other, now=22.0)
    assert reader.table.prefix_key_of(102) == (32, 102, 202)
    confirm(reader, [(64, 104, 0), (32, 102, 0), (16, 101, 0)], 21.0 + reader.table.ttl_s / 2)
    reader.send(server, other, now=23.0 + reader.table.ttl_s / 2)
    assert other.table.prefix_key_of(102) == (32, 102, 202)


def test_a_text_that_no_peer_reported_is_reported_though_its_tokens_were() -> None:
    """The reader of the stream was faster than the node that served: it knows tokens only."""
    reader, server, other = three()
    confirm(reader, [(96, 106, 0), (64, 104, 0)], 20.0)
    confirm(server, [(512, 999, 0)], 20.0)  # something of its own waits, so it remembers what it receives
    server.updates(20.0)
    reader.send(server, other, now=21.0)
    server.serve(NEXT_TURN, 20.05)
    for at in (20.1, 21.2, 23.5):
        server.send(reader, other, now=at)
    assert [tokens for _, tokens, _ in other.holders([(96, 0, 206)], 24.0)] == [96]


def test_what_only_the_engine_knows_is_reported_within_a_moment() -> None:
    """Requests that reached it past us."""
    reader, server, other = three()
    confirm(reader, [(32, 502, 0), (16, 501, 0)], 20.0)
    assert reader.send(server, other, now=20.0 + CONFIRMED_WAIT_S) > 0
    assert other.holders([(32, 502, 0)], 21.0) == [(ENGINE, 32, Trust.REMOTE)]


def test_bytes_that_are_no_removal_are_counted() -> None:
    node = RouteNode(1, [ENGINE])
    good = encode_process(ProcessUpdate(REMOVED, (node.key(), 1), [(1, 2)]))
    node.sync.receive([(0.0, good[:-3])], 10.0)
    node.sync.receive([(0.0, encode_process(ProcessUpdate(REMOVED, (77, 1), [(1, 2)])))], 10.0)
    assert (node.sync.counters.bad, node.sync.counters.void) == (1, 1)


def test_a_removal_takes_nine_bytes_and_a_block_that_came_one() -> None:
    """The budget: a busy engine stores and drops 5,000 blocks a second."""
    reader, server, other = three()
    blocks = 512
    engine = reader.engine()
    anchors = [depth for depth in range(1, blocks + 1) if depth in (1, 2, 4, 8) or depth % 16 == 0]
    prompts = 20  # the table has room for them
    for prompt in range(prompts):
        chain = [(16 * depth, 1000 + 10_000 * prompt + depth, 0) for depth in reversed(anchors)]
        confirm(reader, chain, 20.0)
    stored = reader.send(server, other, now=30.0)
    assert stored / (prompts * blocks) < 1.0
    gone = [1000 + 10_000 * prompt + depth for prompt in range(prompts) for depth in reversed(anchors)]
    for fingerprint in gone:  # the last blocks first, as engines do
        reader.table.withdraw(fingerprint, engine.id, 40.0)
    route_updates = reader.updates(40.0)
    dropped = sum(len(route_update) + ENTRY_BYTES for route_update, _ in route_updates)
    assert 8.0 <= dropped / len(gone) < 8.2
    assert dropped / (prompts * blocks) < 0.7
    assert max(len(route_update) for route_update, _ in route_updates) <= ROUTE_UPDATE_BYTES_MAX


def test_a_row_that_crosses_a_removal_is_not_learned_again() -> None:
    """It would stay at this node alone: all updates have arrived then, and no node compares its table."""
    reader, server, other = three()
    late = RouteNode(4, [ENGINE])
    for node in (reader, server):
        node.meet(late)
    server.table.outgoing.insist(104, server.engine().id)
    (row,) = server.updates(20.0)
    reader.table.withdraw(104, reader.engine().id, 20.0)
    reader.send(server, other, late, now=20.0)
    for node in (other, late):
        node.sync.receive([(20.0 - row[1], row[0])], 20.0)
        assert not node.holders([(64, 104, 204)], 20.0)
        assert node.table.counters.overtaken == 1


def test_a_copy_of_a_table_in_which_a_removal_is_missing_does_not_undo_it() -> None:
    reader, server, _ = three()
    walk = server.sync.copy.rows(b"", 20.0)
    while (rows := walk.take(20.0)) is None:
        pass
    reader.table.withdraw(102, reader.engine().id, 20.0)
    assert reader.sync.copy.merge(unpack_rows(rows.data), 20.0, 20.0) == 0
    assert [tokens for _, tokens, _ in reader.holders(CHAT, 20.0)] == [16]


def test_what_was_served_since_its_removal_is_learned_from_peers() -> None:
    reader, server, other = three()
    reader.table.withdraw(101, reader.engine().id, 20.0)
    reader.send(server, other, now=20.0)
    server.serve(CHAT, 21.0)
    server.send(reader, other, now=21.0 + TEXTS_WAIT_S + GATHER_S)
    for node in (reader, other):
        assert [tokens for _, tokens, _ in node.holders(CHAT, 25.0)] == [64]
