"""What each near peer has of backends, for an operator who asks one node about all: shown to him, never placed by.

Rules: a node asks all near peers at once; each answers with its list as it is then, PORTION rows at a time with a pause
between, so that no peer's question holds up requests. A list counts once all of it has come; options other
than the weight travel as a digest. Bounds: ASKED_MAX questions of ours, DUE_MAX answers of ours, of which the
oldest goes; BACKENDS_MAX rows in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from math import inf
from typing import Any, NamedTuple

from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import U32, parts_field
from ranvier_py.core.mesh.wire.frame import amount, bad, text
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backend import NAME_CHARS_MAX
from ranvier_py.core.routing.backend_state.loads import BACKENDS_MAX
from ranvier_py.core.routing.backend_state.order_notes import bounded
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backends import Backend

ASKED_MAX = 16
DUE_MAX = 64
PORTION = 128  # rows in a message: 20 kB with the longest names
PAUSE_S = 0.005
STATES = ("unknown", "healthy", "unhealthy")


class ListedBackend(NamedTuple):
    """One backend of a peer. `health`: index into STATES; `options`: digest of all that it was given but its weight."""

    key: int  # u64
    weight: float
    draining: bool
    health: int  # u8
    in_flight: int  # u32
    options: int  # u32
    name: str


class ListQuestion(NamedTuple):
    number: int


class BackendList(NamedTuple):
    """A portion of the answer to a question; `total`: how many rows all portions have."""

    number: int
    total: int
    rows: tuple[ListedBackend, ...]


def read_listed(
    key: int, weight: float, draining: int, health: int, in_flight: int, options: int, name: bytes
) -> ListedBackend:
    if draining > 1 or health >= len(STATES):
        bad("listed backend")
    return ListedBackend(
        key=key,
        weight=amount(weight),
        draining=draining == 1,
        health=health,
        in_flight=in_flight,
        options=options,
        name=text(name, NAME_CHARS_MAX),
    )


def check_total(message: BackendList) -> None:
    if message.total > BACKENDS_MAX:
        bad("number of listed backends")


@dataclass(slots=True)
class AskedLists:
    """A question of ours: who was asked, and the rows and the total that have come, by session."""

    asked: Mapping[int, Peer]
    rows: dict[int, dict[int, ListedBackend]] = field(default_factory=dict)
    totals: dict[int, int] = field(default_factory=dict)

    def list_of(self, session: int) -> Mapping[int, ListedBackend] | None:
        """Return a peer's backends by their key; None until all have come."""
        rows = self.rows.get(session, {})
        return rows if self.totals.get(session) == len(rows) else None

    @property
    def waits(self) -> bool:
        return any(self.list_of(session) is None for session in self.asked)


@dataclass(slots=True)
class ListCounters:
    asked: int = counter("Questions of peers for the list of this node's backends.")


class BackendLists(Machine):
    """Asks and answers (see the module). `answered` is called when something has come; `options_of` digests what a
    backend was given."""

    kinds = (
        Kind("backends", 58, ListQuestion, (U32,), since=5),
        Kind(
            *("backends", 59, BackendList, (U32, U32, parts_field("row", "Q d B B I I *B", PORTION, read_listed))),
            check_total,
            since=5,
        ),
    )
    wake_at = inf  # not computed when read, which is after each packet

    def __init__(self, backends: RegistrySync, outbox: list[Outgoing]) -> None:
        self.counters = ListCounters()
        self.answered: Callable[[], object] = lambda: None
        self.options_of: Callable[[Backend], int] = lambda _: 0
        self._backends, self._outbox = backends, outbox
        self._peers: Mapping[int, Peer] = {}
        self._numbers = count(1)
        self._asked: dict[int, AskedLists] = {}
        self._due: dict[tuple[int, int], Iterator[BackendList]] = {}  # by session and question: what is left to be sent

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_backend_lists": self.counters}

    def ask(self) -> AskedLists:
        """Ask all near peers. What they have comes into what is returned."""
        number, asked = next(self._numbers), AskedLists(self._peers)
        self._asked[number] = asked
        bounded(self._asked, ASKED_MAX)
        for peer in self._peers.values():
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, ListQuestion(number)))
        return asked

    def own(self) -> Iterator[ListedBackend]:
        """Yield what this node has, as it was at the last look of the registry."""
        for key, seen in [*self._backends.own.items()]:
            backend = seen.backend
            state, options = STATES.index(backend.health.value), self.options_of(backend)
            counts = backend.weight, backend.origin.drained, state, backend.work.own.inflight
            yield ListedBackend(key, *counts, options, backend.name)

    def met(self, peers: LivePeers, now: float) -> None:  # noqa: ARG002  # as of all machines
        self._peers = {peer.session: peer for peer in peers.near}
        self._due = {each: left for each, left in self._due.items() if each[0] in self._peers}

    def receive(self, peer: Peer, message: ListQuestion | BackendList, now: float) -> None:
        if peer.session not in self._peers:
            return
        if isinstance(message, ListQuestion):
            self.counters.asked += 1
            self._due[peer.session, message.number] = self._answer(message.number)
            bounded(self._due, DUE_MAX)
            self.wake_at = min(self.wake_at, now + PAUSE_S)
            return
        asked = self._asked.get(message.number)
        if asked is not None and peer.session in asked.asked:
            known = asked.rows.setdefault(peer.session, {})
            known |= {row.key: row for row in message.rows[: BACKENDS_MAX - len(known)]}
            asked.totals[peer.session] = message.total
            self.answered()

    def tick(self, now: float) -> None:
        if now < self.wake_at:
            return
        for question, left in [*self._due.items()][:1]:
            del self._due[question]
            if (message := next(left, None)) is not None:
                peer = self._peers[question[0]]
                self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
                self._due[question] = left  # behind the others
        self.wake_at = now + PAUSE_S if self._due else inf

    def _answer(self, number: int) -> Iterator[BackendList]:
        """Yield the messages of this node's list."""
        rows, total = self.own(), len(self._backends.own)
        while portion := tuple(islice(rows, PORTION)):
            yield BackendList(number, total, portion)
        if not total:
            yield BackendList(number, 0, ())


def differences(ours: Mapping[int, ListedBackend], theirs: Mapping[int, ListedBackend]) -> Iterator[tuple[str, str]]:
    """Yield how a peer's list differs from ours: the backend's name, and in what."""
    for key, own in ours.items():
        if (other := theirs.get(key)) is None:
            yield own.name, "is not there"
            continue
        parts = [f"has weight {other.weight:g}, here {own.weight:g}"] if other.weight != own.weight else []
        if other.draining is not own.draining:
            parts.append("is drained, here not" if other.draining else "is not drained, here it is")
        if other.health != own.health:
            parts.append(f"is {STATES[other.health]}, here {STATES[own.health]}")
        parts += ["has other options"] if other.options != own.options else []
        if parts:
            yield own.name, "; ".join(parts)
    for key, other in theirs.items():
        if key not in ours:
            yield other.name, "is not here"
