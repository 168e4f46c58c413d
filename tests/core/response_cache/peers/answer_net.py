"""Nodes that share stored answers."""

from __future__ import annotations

from functools import partial
from random import Random

from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.mesh.transfer import Transfers
from ranvier_py.core.response_cache.invalidations import EVERYTHING, VoidMark, VoidScope
from ranvier_py.core.response_cache.peers.answer_fetches import Fetched
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerSettings
from ranvier_py.core.response_cache.peers.peer_answers import AnswerSecrets, PeerAnswers
from tests.builders.machine_net import MachineNet

SECRET, TTL_S = b"a cluster secret", 60.0
TENANT = b"t" * 16


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


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
        self.machines = (self.answers, Transfers(self.answers.fetches.transfer))
        self.answers.fetches.find = self._find
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


class AnswerNet(MachineNet[AnswerNode]):
    def __init__(self, nodes: int, seed: int = 7, admin_key: bytes = b"") -> None:
        super().__init__(partial(AnswerNode, admin_key=admin_key), nodes, seed)

    def fetch(self, session: int, number: int, age_max_s: float = 1e9) -> tuple[bytes | None, float]:
        """What a node gets of its peers, and after how long. (None, 0) where it asks nobody."""
        node, began = self.nodes[session], self.now
        request = node.answers.ask(key_of(number), age_max_s, self.now)
        while request is not None and request not in node.results:
            self.run(0.001)
            assert self.now < began + 5
        return (None if request is None else node.results[request]), self.now - began

    def knows(self, session: int) -> int:
        return self.nodes[session].answers.counters.known
