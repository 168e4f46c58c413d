"""Signed orders of the operator."""

from random import Random

import pytest

from ranvier_py.core.gossip.backend_state.signed_commands import CLOCK_STEP_MAX, SignedCommands, signature_of
from ranvier_py.core.gossip.gossip_values import Outgoing, Peer
from ranvier_py.core.gossip.wire.messages import Command, Commands

KEY = b"k" * 32
URL = "http://10.0.0.1:8000"
PEER = Peer(7, ("127.0.0.1", 7946))


def node(key: bytes = KEY) -> tuple[SignedCommands, list[Outgoing]]:
    outbox: list[Outgoing] = []
    return SignedCommands(key, outbox, Random(1), 0.0), outbox


def command(clock: int, verb: str = "add", key: bytes = KEY, url: str = URL) -> Command:
    return Command(clock, verb, url, 1.0, "e", signature_of(key, clock, verb, url, 1.0, "e"))


def test_an_order_given_on_one_node_is_followed_by_another() -> None:
    giver, outbox = node()
    taker, _ = node()
    giver.peers([PEER])
    assert giver.give("add", URL, 2.0, "engine-1")
    giver.tick(0.0)
    message = outbox[-1].message
    assert isinstance(message, Commands)
    taker.receive(message)
    assert [(new.verb, new.url, new.weight, new.name) for new in taker.new] == [("add", URL, 2.0, "engine-1")]


@pytest.mark.parametrize("change", [{"url": "http://evil:1"}, {"verb": "remove"}, {"weight": 9.0}, {"clock": 5}])
def test_an_order_changed_on_its_path_is_refused(change: dict[str, object]) -> None:
    taker, _ = node()
    taker.receive(Commands((command(1)._replace(**change),)))  # type: ignore[arg-type]
    assert not taker.new
    assert taker.refused == 1


def test_without_the_admin_key_nothing_is_given_taken_or_passed_on() -> None:
    taker, outbox = node(b"")
    taker.peers([PEER])
    taker.receive(Commands((command(1, key=b""),)))
    taker.tick(100.0)
    assert not taker.give("add", URL, 1.0, "")
    assert not taker.new
    assert not outbox


def test_an_old_addition_does_not_undo_a_removal() -> None:
    taker, _ = node()
    taker.receive(Commands((command(2, "remove"), command(1, "add"))))
    assert [new.verb for new in taker.new] == ["remove"]


def test_the_same_order_twice_is_followed_and_passed_on_once() -> None:
    taker, outbox = node()
    taker.peers([PEER])
    for _ in range(2):
        taker.receive(Commands((command(1),)))
        taker.tick(0.0)
    assert len(taker.new) == 1
    assert len(outbox) == 1


def test_a_clock_near_its_end_can_not_be_forced_on_us() -> None:
    taker, _ = node()
    taker.receive(Commands((command(1),)))
    taker.receive(Commands((command(2 + CLOCK_STEP_MAX, "remove"),)))
    assert [new.verb for new in taker.new] == ["add"]
    assert taker.refused == 1


def test_a_newcomer_is_sent_all_commands() -> None:
    giver, outbox = node()
    for port in range(300):
        giver.give("add", f"http://10.0.0.1:{port + 1}", 1.0, "")
    giver.peers([PEER])
    reported = [outgoing.message for outgoing in outbox if isinstance(outgoing.message, Commands)]
    assert sum(len(message.commands) for message in reported) == 300
