"""Shares an operator's orders about backends with the other workers of a node, or with all nodes, and collects answers.

Rule: an order goes to all nodes if the admin key signs it, else to the other workers of this node, of which each has
the key that their parent gave them. Drains go to all by facts. Beside each goes a note that asks for an answer.
Of one URL the order with the greatest clock holds, of whichever kind: one that this node knows to be older than what it
did last is not carried out, in whatever order they come and also after a restart. Bound: COMMANDS_MAX URLs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.peer.router_peer import RouterPeer
from ranvier_py.core.routing.backend_state.backend_lists import STATES, ListedBackend, differences
from ranvier_py.core.routing.backend_state.order_notes import Carrier, Given, bounded
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backend_state.signed_commands import (
    COMMANDS_MAX,
    NO_OPTIONS,
    NODE,
    Command,
    CommandOptions,
    SignedCommands,
    digest_of,
)
from ranvier_py.core.routing.backends import Backend, Registry

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
        self._done: dict[str, int] = {}  # by URL, the clock of the last order that this node carried out
        self._came = trio.Event()  # set by the next answer
        for machine in (peer.features.order_notes, peer.features.backend_lists):
            machine.answered = self._answered

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
        above = max(other.clock_of(url), self._done.get(url, 0))
        is_shared = table.give(verb, url, weight, name, now, options, above=above)
        self.done(url, max(above, table.clock_of(url)))  # what stays here holds against what was ordered before it
        if not is_shared:
            return ()
        change = Carrier.COMMAND if goes_out else Carrier.WORKER_COMMAND
        to = None if goes_out else features.worker_commands.workers
        return [self._note(change, digest_of(url), table.clock_of(url), caller, to)]

    def is_over(self, command: Command) -> bool:
        """Whether this node carried out this command before, or a later order about the same URL."""
        return command.clock <= self._done.get(command.url, 0)

    def done(self, url: str, clock: int) -> None:
        """Note that an order with this clock was carried out here."""
        self._done[url] = max(clock, self._done.pop(url, 0))
        bounded(self._done, COMMANDS_MAX)

    def stored(self) -> Mapping[str, Any]:
        """Return what must outlive a restart, or orders that peers still hold would undo later ones: as JSON."""
        features = self._peer.features
        return {
            "clocks": {url: clock for url, clock in self._done.items() if url != NODE},
            "drain_clocks": drain_clocks(features.backends),
            "commands": features.signed_commands.stored(),
        }

    def restore(self, stored: Mapping[str, Any], registry: Registry) -> None:
        """Take what `stored` returned, once the registry is as it was. Raises ValueError, TypeError, LookupError."""
        for url, clock in stored.get("clocks", {}).items():
            self.done(str(url), int(clock))
        backends = self._peer.features.backends
        backends.look(time.monotonic())
        for url, clock in stored.get("drain_clocks", {}).items():
            backend = registry.ids.find(url)
            key = backends.key_of(backend.id) if backend is not None else None
            if backend is not None and key is not None:
                backends.facts.drain(key, backend.origin.drained, clock=int(clock))
        self._peer.features.signed_commands.restore(stored.get("commands", ()), time.monotonic())

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
        workers = self._workers()
        found = [
            (workers.get(session) or self._peer.name_of(session), given.answers.get(session, NO_ANSWER))
            for given in asked
            for session in given.asked
        ]
        return [{"place": place, "why": why} for place, why in sorted(found)]

    async def lists(self) -> Sequence[Mapping[str, Any]]:
        """Return what each other worker and node has of backends, and how that differs from what is here; `why` it is
        not known, if it did not answer in time."""
        lists, now = self._peer.features.backend_lists, time.monotonic()
        self._peer.flush(now)
        asked = lists.ask()
        self._poke()
        with trio.move_on_after(ANSWERS_S):
            while asked.waits:
                await self._came.wait()
        ours = {row.key: row for row in lists.own()}
        workers = self._workers()
        found = []
        for session in asked.asked:
            theirs = asked.list_of(session)
            place = workers.get(session) or self._peer.name_of(session)
            found.append(place_of(place, ours, theirs))
        return sorted(found, key=lambda each: str(each["place"]))

    def _workers(self) -> Mapping[int, str]:
        return {session: self._worker_of(session) for session in self._peer.features.worker_commands.workers}

    def _answered(self) -> None:
        self._came.set()
        self._came = trio.Event()

    def _worker_of(self, session: int) -> str:
        member = self._peer.members.member(session)
        return f"worker {member.address[1] - self._first_port()}" if member is not None else ""


def drain_clocks(backends: RegistrySync) -> dict[str, int]:
    """Return by URL the clock of the last order about draining each backend that had one."""
    clocks = {seen.backend.url: backends.facts.of(key).drain_clock for key, seen in backends.own.items()}
    return {url: clock for url, clock in clocks.items() if clock}


def place_of(
    place: str, ours: Mapping[int, ListedBackend], theirs: Mapping[int, ListedBackend] | None
) -> Mapping[str, Any]:
    """Return what a worker or node has, for JSON."""
    if theirs is None:
        return {"place": place, "why": NO_ANSWER, "backends": [], "differences": []}
    rows = [
        {
            "name": ours[key].name if key in ours else row.name,
            "weight": row.weight,
            "draining": row.draining,
            "health": STATES[row.health],
            "in_flight": row.in_flight,
        }
        for key, row in theirs.items()
    ]
    differing = [{"name": name, "what": what} for name, what in differences(ours, theirs)]
    return {"place": place, "why": "", "backends": rows, "differences": differing}
