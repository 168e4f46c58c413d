"""Commands of the operator that every node follows: add a backend, remove one.

An address taken from gossip could send prompts anywhere, so the cluster key is not enough here: a command is signed
with the admin key, which a node has only where its operator allows such commands. Without one nothing is signed,
nothing is followed, and what peers send is not even passed on.

Rules: one command for each URL, the one with the greatest clock; a removal is kept like an addition, or an old addition
would return. Commands go to all peers when they are new here, to a newcomer, and all of them to somebody now and then.
At most COMMANDS_MAX URLs; a command for one more is refused and counted.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from math import inf
from random import Random
from struct import pack

from ranvier_py.core.gossip.gossip_values import Outgoing, Peer, Plane
from ranvier_py.core.gossip.wire.messages import Command, Commands

COMMANDS_MAX = 4096  # URLs: as many as there can be backends
COMMANDS_PER_MESSAGE = 256  # of at most 700 bytes: below a frame
REPAIR_INTERVAL_S = 30.0
CLOCK_STEP_MAX = 1 << 32  # a clock further ahead than this is refused: nobody may end the count for good
VERBS = ("add", "remove")


class SignedCommands:
    """The commands one node knows. `admin_key` empty: none are given or taken."""

    def __init__(self, admin_key: bytes, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self.new: list[Command] = []  # to be followed; drained by the owner after every call
        self.refused = 0
        self._key = admin_key
        self._outbox = outbox
        self._rng = rng
        self._known: dict[str, Command] = {}
        self._fresh: list[Command] = []
        self._peers: Sequence[Peer] = ()
        self._repair_at = now + rng.uniform(0, REPAIR_INTERVAL_S)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def wake_at(self) -> float:
        if self._fresh and self._peers:
            return 0.0
        return self._repair_at if self._known and self._peers else inf

    def give(self, verb: str, url: str, weight: float, name: str) -> bool:
        """The operator gave it here. False: commands are not shared on this node."""
        known = self._known.get(url)
        if not self._key or (known is None and len(self._known) >= COMMANDS_MAX):
            return False
        clock = known.clock + 1 if known else 1
        signature = signature_of(self._key, clock, verb, url, weight, name)
        self._known[url] = command = Command(clock, verb, url, weight, name, signature)
        self._fresh.append(command)
        return True

    def peers(self, live: Sequence[Peer]) -> None:
        before = {peer.session for peer in self._peers}
        self._peers = live
        for peer in live:
            if peer.session not in before:
                self._send([peer], list(self._known.values()))

    def tick(self, now: float) -> None:
        if self._fresh and self._peers:
            self._send(self._peers, self._fresh)
            self._fresh = []
        if now >= self._repair_at:
            self._repair_at = now + REPAIR_INTERVAL_S * self._rng.uniform(0.8, 1.2)
            if self._peers:
                self._send([self._rng.choice(self._peers)], list(self._known.values()))

    def receive(self, message: Commands) -> None:
        for command in message.commands:
            if not self._is_good(command):
                self.refused += 1
            elif self._is_later(command):
                self._known[command.url] = command
                self._fresh.append(command)
                self.new.append(command)

    def _is_good(self, command: Command) -> bool:
        if not self._key or command.verb not in VERBS:
            return False
        expected = signature_of(self._key, command.clock, command.verb, command.url, command.weight, command.name)
        return hmac.compare_digest(expected, command.signature)

    def _is_later(self, command: Command) -> bool:
        known = self._known.get(command.url)
        if known is None:
            if len(self._known) < COMMANDS_MAX:
                return True
            self.refused += 1
            return False
        if command.clock > known.clock + CLOCK_STEP_MAX:
            self.refused += 1
            return False
        return (command.clock, command.verb, command.signature) > (known.clock, known.verb, known.signature)

    def _send(self, targets: Sequence[Peer], commands: Sequence[Command]) -> None:
        for start in range(0, len(commands), COMMANDS_PER_MESSAGE):
            message = Commands(tuple(commands[start : start + COMMANDS_PER_MESSAGE]))
            for peer in targets:
                self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))


def signature_of(key: bytes, clock: int, verb: str, url: str, weight: float, name: str) -> bytes:
    """HMAC-SHA256 over all that a command says, each part with its length."""
    parts = [pack("<Qd", clock, weight), verb.encode(), url.encode(), name.encode()]
    return hmac.new(key, b"".join(pack("<I", len(part)) + part for part in parts), sha256).digest()
