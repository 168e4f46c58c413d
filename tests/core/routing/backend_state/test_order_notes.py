"""Notes beside an order: who gave it, and the answers of peers."""

from __future__ import annotations

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.backend_state import order_notes as n
from tests.core.routing.backend_state.test_signed_commands import alike

PEERS = [Peer(number, ("127.0.0.1", 7000 + number)) for number in (1, 2)]


def notes(state: dict[int, str | None] | None = None) -> tuple[n.OrderNotes, list[Outgoing]]:
    """`state`: by subject."""
    outbox: list[Outgoing] = []
    made = n.OrderNotes(outbox, lambda order: (state or {}).get(order.subject), "node-{}".format)
    made.met(alike(PEERS), 0.0)
    return made, outbox


def sent(outbox: list[Outgoing]) -> list[object]:
    messages = [each.message for each in outbox]
    for message in messages:
        CODEC.encode(message)
    outbox.clear()
    return messages


def test_a_peer_answers_once_it_follows_and_names_who_gave_the_order() -> None:
    giver, outbox = notes()
    given = giver.give(n.Carrier.DRAIN, 7, 3, "ann")
    order = sent(outbox)[0]
    taker, answers = notes(state := {7: None})
    taker.receive(PEERS[0], order, 1.0)  # type: ignore[arg-type]
    assert taker.ordered_by(n.Carrier.DRAIN, 7, 1.0) == "ann on node-1"
    taker.tick(taker.wake_at)
    assert answers == []
    state[7] = ""
    taker.tick(taker.wake_at)
    (answer,) = sent(answers)
    giver.receive(PEERS[1], answer, 2.0)  # type: ignore[arg-type]
    assert (given.answers, given.waits) == ({2: ""}, True)
    giver.receive(PEERS[0], answer, 2.0)  # type: ignore[arg-type]
    assert not given.waits
    assert taker.ordered_by(n.Carrier.DRAIN, 7, 100.0) == ""


def test_what_does_not_come_is_answered_with_a_reason_in_time() -> None:
    taker, answers = notes()
    taker.receive(PEERS[0], n.Orders((n.Order(1, 1, 7, 3, "ann"),)), 0.0)
    now = 0.0
    while not answers:
        now = taker.wake_at
        taker.tick(now)
    assert now <= n.FOLLOW_S + 2 * n.LOOK_S
    (answer,) = sent(answers)
    assert isinstance(answer, n.OrderAnswers)
    assert "did not come" in answer.answers[0].why


def test_orders_names_and_answers_have_bounds() -> None:
    made, outbox = notes()
    given = [made.give(n.Carrier.DRAIN, number, 1, "x" * 100) for number in range(n.GIVEN_MAX + 1)]
    made.receive(PEERS[0], n.OrderAnswers((n.OrderAnswer(1, ""), n.OrderAnswer(2, ""))), 0.0)
    assert (given[0].answers, given[1].answers) == ({}, {1: ""})
    sent(outbox)
    for start in range(0, n.ASKED_MAX + n.ROWS_MAX, n.ROWS_MAX):
        orders = tuple(n.Order(number, 1, number, 1, "ann") for number in range(start, start + n.ROWS_MAX))
        made.receive(PEERS[0], n.Orders(orders), 0.0)
    assert made.counters.dropped == n.ROWS_MAX
    assert (made.ordered_by(n.Carrier.COMMAND, 0, 0.0), made.ordered_by(n.Carrier.COMMAND, 99, 0.0)) == (
        "",
        "ann on node-1",
    )
