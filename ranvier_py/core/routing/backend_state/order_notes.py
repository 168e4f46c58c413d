"""Who ordered a change of a backend, and which peers obeyed: notes beside the change itself, to near peers alone.

Rules: a note changes nothing. Facts carry drains and signed commands the rest; a note names the caller for the peers'
logs and asks for an answer, which a peer gives once it followed the change, knows why it did not, or after FOLLOW_S.
It leaves before the change does. Bounds: GIVEN_MAX orders of ours that may be answered, ASKED_MAX of peers that are to
be, NAMES_MAX callers for NAMED_S; the oldest goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from math import inf
from typing import Any, NamedTuple

from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import parts_field
from ranvier_py.core.mesh.wire.frame import bad, text
from ranvier_py.core.metrics import counter

GIVEN_MAX = 64
ASKED_MAX = 256
NAMES_MAX = 256
NAMED_S = 60.0  # the change comes within seconds, or by a repair
FOLLOW_S = 1.5  # signed commands are followed four times a second
LOOK_S = 0.05
CALLER_BYTES_MAX = 64
WHY_BYTES_MAX = 200
ROWS_MAX = 8


class Carrier(IntEnum):
    """What carries the change."""

    DRAIN = 0  # facts: the subject is the backend's key
    COMMAND = 1  # a signed command: the subject is the digest of its URL
    WORKER_COMMAND = 2


class Order(NamedTuple):
    """`number`: by its giver's count. `clock`: that of the change; a peer with a later one has followed it as well."""

    number: int  # u64
    change: int  # u8
    subject: int  # u64
    clock: int  # u64
    caller: str  # at most 64 bytes


class OrderAnswer(NamedTuple):
    number: int
    why: str  # it did not obey, at most 200 bytes; empty: it did


class Orders(NamedTuple):
    orders: tuple[Order, ...]


class OrderAnswers(NamedTuple):
    answers: tuple[OrderAnswer, ...]


def read_order(number: int, change: int, subject: int, clock: int, caller: bytes) -> Order:
    if change > max(Carrier):
        bad("order")
    return Order(number, change, subject, clock, text(caller, CALLER_BYTES_MAX))


def read_answer(number: int, why: bytes) -> OrderAnswer:
    return OrderAnswer(number, text(why, WHY_BYTES_MAX))


ORDERS = Kind("backends", 56, Orders, (parts_field("order", "Q B Q Q *B", ROWS_MAX, read_order),), since=5)
ANSWERS = Kind("backends", 57, OrderAnswers, (parts_field("answer", "Q *B", ROWS_MAX, read_answer),), since=5)


@dataclass(slots=True)
class Given:
    """An order of ours: who was asked, and who has answered what."""

    asked: dict[int, None]
    answers: dict[int, str] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        return any(session not in self.answers for session in self.asked)


class Due(NamedTuple):
    """A peer's order that is to be answered."""

    peer: Peer
    order: Order
    until: float


@dataclass(slots=True)
class OrderCounters:
    asked: int = counter("Orders of peers that were to be answered.")
    dropped: int = counter("Orders of peers that were not answered, because too many came.")


class OrderNotes(Machine):
    """Gives and takes notes. `state` returns why this node does not follow an order, "" if it did, None: not yet."""

    kinds = (ORDERS, ANSWERS)

    def __init__(
        self,
        outbox: list[Outgoing],
        state: Callable[[Order], str | None],
        name_of: Callable[[int], str],
    ) -> None:
        self.counters = OrderCounters()
        self.answered: Callable[[], object] = lambda: None  # called when an answer has come
        self._outbox, self._state, self._name_of = outbox, state, name_of
        self._peers: Mapping[int, Peer] = {}
        self._numbers = count(1)
        self._given: dict[int, Given] = {}
        self._due: list[Due] = []
        self._names: dict[tuple[int, int], tuple[str, float]] = {}
        self._look_at = inf

    @property
    def wake_at(self) -> float:
        return self._look_at

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_orders": self.counters}

    def give(self, change: Carrier, subject: int, clock: int, caller: str, to: Iterable[int] | None = None) -> Given:
        """Let peers know of an order, all of them or these sessions. Their answers come into what is returned."""
        caller = caller.encode()[:CALLER_BYTES_MAX].decode(errors="ignore")
        sessions = dict.fromkeys(self._peers if to is None else [each for each in to if each in self._peers])
        given = Given(sessions)
        order = Order(next(self._numbers), change, subject, clock, caller)
        self._given[order.number] = given
        bounded(self._given, GIVEN_MAX)
        self._send([self._peers[session] for session in sessions], Orders((order,)))
        return given

    def ordered_by(self, change: Carrier, subject: int, now: float) -> str:
        """Return who ordered this; "" if that is not known."""
        named, at = self._names.get((change, subject), ("", -inf))
        return named if now - at <= NAMED_S else ""

    def met(self, peers: LivePeers, now: float) -> None:  # noqa: ARG002  # as of all machines
        self._peers = {peer.session: peer for peer in peers.near}

    def receive(self, peer: Peer, message: Orders | OrderAnswers, now: float) -> None:
        if isinstance(message, OrderAnswers):
            for answer in message.answers:
                given = self._given.get(answer.number)
                if given is not None and peer.session in given.asked:
                    given.answers[peer.session] = answer.why
            self.answered()
            return
        for order in message.orders:
            self.counters.asked += 1
            self._names[order.change, order.subject] = (f"{order.caller} on {self._name_of(peer.session)}", now)
            self._due.append(Due(peer, order, now + FOLLOW_S))
        self.counters.dropped += max(0, len(self._due) - ASKED_MAX)
        del self._due[:-ASKED_MAX]
        bounded(self._names, NAMES_MAX)
        self._look_at = min(self._look_at, now + LOOK_S)

    def tick(self, now: float) -> None:
        if now < self._look_at:
            return
        waiting = []
        for each in self._due:
            why = self._state(each.order)
            if why is None and now < each.until:
                waiting.append(each)
                continue
            why = "the order did not come, or has another signature" if why is None else why
            why = why.encode()[:WHY_BYTES_MAX].decode(errors="ignore")
            self._send([each.peer], OrderAnswers((OrderAnswer(each.order.number, why),)))
        self._due, self._look_at = waiting, now + LOOK_S if waiting else inf

    def _send(self, peers: Iterable[Peer], message: Orders | OrderAnswers) -> None:
        for peer in peers:
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))


def bounded(table: dict[Any, Any], most: int) -> None:
    """Drop the oldest entry of a table that has one too many."""
    while len(table) > most:
        del table[next(iter(table))]
