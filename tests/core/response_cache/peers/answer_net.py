"""Nodes that share stored answers, over a wire that encodes everything, takes time, and may lose or hold it."""

from __future__ import annotations

import heapq
from itertools import count
from random import Random

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.response_cache.invalidations import EVERYTHING, VoidMark, VoidScope
from ranvier_py.core.response_cache.peers.answer_fetches import Fetched
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerSettings
from ranvier_py.core.response_cache.peers.peer_answers import AnswerSecrets, PeerAnswers
from tests.builders.peers import alike

SECRET, TTL_S, LATENCY_S = b"a cluster secret", 60.0, 0.001
TENANT = b"t" * 16


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def peer_of(session: int) -> Peer:
    return Peer(session, ("10.0.0.1", 7000 + session))


class AnswerNode:
    """What a node does with its answers, in little: `held` is when each was asked for; each of one model and tenant."""

    def __init__(
        self, session: int, now: float, secret: bytes = SECRET, admin_key: bytes = b"", room: int = 1 << 30
    ) -> None:
        self.session = session
        self.room = room
        self.outbox: list[Outgoing] = []
        self.held: dict[bytes, float] = {}
        self.size = 10
        self.results: dict[int, bytes | None] = {}
        self.gave: list[bytes] = []
        self.answers = PeerAnswers(
            PeerAnswerSettings(shares=True, ttl_s=TTL_S),
            AnswerSecrets(secret, admin_key),
            self.outbox,
            Random(session),
            now,
            room=lambda _: self.room,
        )
        self.answers.source.find = self._find
        self.answers.fetches.arrived = self._arrived
        self.answers.invalidations.invalidated = self._invalidated

    def keep(self, number: int, now: float) -> None:
        if not self.answers.invalidations.known.void("m", TENANT, now):
            self.held[key_of(number)] = now
            self.answers.keys.add(key_of(number), now)

    def drop(self, number: int) -> None:
        del self.held[key_of(number)]
        self.answers.keys.drop(key_of(number))

    def _find(self, name: bytes, age_max_s: float, now: float) -> bytes | None:
        key = self.answers.keys.find(name)
        if key is None or key not in self.held or now - self.held[key] > age_max_s:
            return None
        self.gave.append(key)
        return key * self.size

    def _arrived(self, fetched: Fetched) -> bool:
        self.results[fetched.request] = fetched.data
        return fetched.data is None or not fetched.data.startswith(b"garbage")

    def _invalidated(self, one: VoidMark) -> None:
        for key in [key for key, at in self.held.items() if at <= one.before]:
            if one.scope in (EVERYTHING, VoidScope("m"), VoidScope("", TENANT), VoidScope("m", TENANT)):
                del self.held[key]
                self.answers.keys.drop(key)


class AnswerNet:
    """`lose`: the share of messages that is lost; `cut`: pairs between which none passes; `asleep`: nodes that do
    nothing, and get what came when they wake."""

    def __init__(self, nodes: int, seed: int = 7, admin_key: bytes = b"") -> None:
        self.now = 100.0
        self.rng = Random(seed)
        self.lose = 0.0
        self.cut: list[frozenset[int]] = []
        self.asleep: list[int] = []
        self.sent: list[tuple[int, int, Message]] = []
        self._order = count()
        self._wire: list[tuple[float, int, int, int, int, bytes]] = []
        self.nodes = {number: AnswerNode(number, self.now, admin_key=admin_key) for number in range(1, nodes + 1)}
        self.meet()

    def meet(self) -> None:
        """Each knows who is there now, and not cut off from it."""
        for node in self.nodes.values():
            others = [
                one for one in self.nodes if one != node.session and frozenset((one, node.session)) not in self.cut
            ]
            peers = [peer_of(one) for one in others]
            node.answers.met(alike(peers), self.now)

    def part(self, *group: int) -> None:
        """These are cut off from the rest, and each side notices."""
        rest = [one for one in self.nodes if one not in group]
        self.cut = [frozenset((one, other)) for one in group for other in rest]
        self.meet()

    def heal(self) -> None:
        self.cut = []
        self.meet()

    def start(self, session: int, admin_key: bytes = b"") -> AnswerNode:
        node = self.nodes[session] = AnswerNode(session, self.now, admin_key=admin_key)
        self.meet()
        return node

    def kill(self, session: int) -> None:
        del self.nodes[session]
        self.meet()

    def run(self, seconds: float, step_s: float = 0.002) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            self._deliver()
            for node in list(self.nodes.values()):
                if node.session not in self.asleep and node.answers.wake_at <= self.now:
                    node.answers.tick(self.now)
                    self._send(node)

    def fetch(self, session: int, number: int, age_max_s: float = 1e9) -> tuple[bytes | None, float]:
        """What a node gets of its peers, and after how long. (None, 0) where it asks nobody."""
        node, began = self.nodes[session], self.now
        request = node.answers.ask(key_of(number), age_max_s, self.now)
        while request is not None and request not in node.results:
            self.run(0.001, 0.001)
            assert self.now < began + 5
        return (None if request is None else node.results[request]), self.now - began

    def knows(self, session: int) -> int:
        return self.nodes[session].answers.counters.known

    def _send(self, node: AnswerNode) -> None:
        """As a shell does it: after a tick, and after something was received."""
        messages = list(node.outbox)
        node.outbox.clear()
        for _, to, _, message in messages:
            kind, body = CODEC.encode(message)
            self.sent.append((node.session, to, message))
            if frozenset((node.session, to)) in self.cut or self.rng.random() < self.lose:
                continue
            due = self.now + LATENCY_S
            heapq.heappush(self._wire, (due, next(self._order), node.session, to, kind, body))

    def _deliver(self) -> None:
        held = []
        while self._wire and self._wire[0][0] <= self.now:
            entry = heapq.heappop(self._wire)
            _, _, sender, to, kind, body = entry
            if to in self.asleep:
                held.append(entry)
            elif to in self.nodes:
                self.nodes[to].answers.receive(peer_of(sender), CODEC.decode(kind, body), self.now)
                self._send(self.nodes[to])
        for entry in held:
            heapq.heappush(self._wire, entry)
