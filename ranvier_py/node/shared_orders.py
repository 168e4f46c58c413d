"""Shares an operator's orders about backends with the other workers of a node, or with all nodes, and collects answers.

Rule: an order goes to all nodes if the admin key signs it, else to the other workers of this node, of which each has
the key that their parent gave them. Drains go to all by facts. Beside each goes a note that asks for an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.peer.router_peer import RouterPeer
from ranvier_py.core.routing.backend_state.order_notes import Carrier, Given
from ranvier_py.core.routing.backend_state.signed_commands import (
    NO_OPTIONS,
    Command,
    CommandOptions,
    SignedCommands,
    digest_of,
)
from ranvier_py.core.routing.backends import Backend

ANSWERS_S = 2.0  # peers answer within FOLLOW_S of theirs, or never
FROM_PEER = "an operator of another node"
NO_ANSWER = f"no answer in {ANSWERS_S:g} s"


def without_gossip(config: Config) -> Sequence[Mapping[str, str]]:
    """Return where an order does not go on a node that does not gossip, and why."""
    why = "they do not gossip, so each must be asked at its own control port"
    return [{"place": "other workers", "why": why}] if config.workers > 1 else []


class WantedBackend(NamedTuple):
    """What an operator orders of a URL, as a signed command has it."""

    verb: str
    url: str
    weight: float = 1.0
    name: str = ""
    options: CommandOptions = NO_OPTIONS


class SharedOrders:
    """See the module. `poke` has what is to be sent leave; `first_port`: where the first worker gossips."""

    def __init__(self, peer: RouterPeer, poke: Callable[[], object], first_port: Callable[[], int]) -> None:
        self._peer, self._poke, self._first_port = peer, poke, first_port
        self._came = trio.Event()  # set by the next answer
        peer.features.order_notes.answered = self._answered

    @property
    def signs(self) -> bool:
        """Whether orders for other nodes can be signed here."""
        return self._peer.features.signed_commands.signs

    def order(self, wanted: WantedBackend, caller: str, *, cluster: bool) -> Sequence[Given]:
        """Share an operator's order with all nodes, or with the other workers of this one alone. Returns who is asked
        to answer; nobody if it stays here."""
        features, now = self._peer.features, time.monotonic()
        tables: Sequence[SignedCommands] = (features.signed_commands, features.worker_commands)
        goes_out = cluster and self.signs
        table, other = tables if goes_out else reversed(tables)
        verb, url, weight, name, options = wanted
        if not table.give(verb, url, weight, name, now, options, above=other.clock_of(url)):
            return ()
        change = Carrier.COMMAND if goes_out else Carrier.WORKER_COMMAND
        to = None if goes_out else features.worker_commands.workers
        return [self._note(change, digest_of(url), table.clock_of(url), caller, to)]

    def drained(self, backend: Backend, caller: str) -> Sequence[Given]:
        """Share that a backend was drained, or is no more. Returns who is asked to answer."""
        self._peer.flush(time.monotonic())
        backends = self._peer.features.backends
        key = backends.key_of(backend.id)
        return [self._note(Carrier.DRAIN, key, backends.facts.of(key).drain_clock, caller)] if key is not None else ()

    def ordered_by(self, command: Command) -> str:
        """Return who gave a command, as far as that is known."""
        names, subject, now = self._peer.features.order_notes, digest_of(command.url), time.monotonic()
        changes = (Carrier.COMMAND, Carrier.WORKER_COMMAND)
        return next((by for change in changes if (by := names.ordered_by(change, subject, now))), FROM_PEER)

    def _note(self, change: Carrier, subject: int, clock: int, caller: str, to: Sequence[int] | None = None) -> Given:
        given = self._peer.features.order_notes.give(change, subject, clock, caller, to)
        self._poke()
        return given

    async def answers(self, asked: Sequence[Given]) -> Sequence[Mapping[str, str]]:
        """Return where an order went and why it was not obeyed there, "" if it was, once all have answered."""
        with trio.move_on_after(ANSWERS_S):
            while any(given.waits for given in asked):
                await self._came.wait()
        workers = {session: self._worker_of(session) for session in self._peer.features.worker_commands.workers}
        found = [
            (workers.get(session) or self._peer.name_of(session), given.answers.get(session, NO_ANSWER))
            for given in asked
            for session in given.asked
        ]
        return [{"place": place, "why": why} for place, why in sorted(found)]

    def _answered(self) -> None:
        self._came.set()
        self._came = trio.Event()

    def _worker_of(self, session: int) -> str:
        member = self._peer.members.member(session)
        return f"worker {member.address[1] - self._first_port()}" if member is not None else ""
