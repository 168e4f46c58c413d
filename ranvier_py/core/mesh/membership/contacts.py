"""Whom to greet: members known by report only, and addresses of members that have died.

Rule: a greeting (Hello) makes two sessions prove themselves to each other. A member that this node is to know
(`neighbour_set`) is greeted at random times, ever more seldom, until it proves itself, dies, or is no longer one to
know. The dead stay contacts for a day: after a long cut nobody else would greet them (weaviate#10698). Each of n live
nodes greets one every n seconds, so a cut is crossed about every second.
Bounds: the greetings of a mesh; CONTACTS_MAX addresses (first come, first dropped).
"""

from __future__ import annotations

from math import inf
from random import Random

from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.membership.neighbour_set import NeighbourSet
from ranvier_py.core.mesh.membership.roster import Roster
from ranvier_py.core.mesh.mesh_values import Address

SPREAD_S = 0.002  # times the members: the first greeting waits up to this, lest all greet a newcomer at once
AGAIN_S = (1.0, 30.0)  # time until an unanswered greeting is repeated: at first and at most; doubled each time
CONTACT_S = 24 * 3600.0  # a contact is forgotten after a day (foca)
CONTACTS_MAX = 4096  # as many as there may be members
CONTACT_INTERVAL_S = (1.0, 30.0)  # mean time between greetings of contacts: by the whole cluster; by one node at most
REMEMBERED_S = 0.05  # between two greetings of contacts from before a restart


class Greetings:
    """Members to be greeted until they prove their session."""

    def __init__(self, rng: Random) -> None:
        self.wake_at = inf
        self._rng = rng
        self._waits: dict[int, tuple[float, float]] = {}  # session -> (due at, time to the greeting after that)
        self._urgent: dict[Address, None] = {}

    def urge(self, address: Address, now: float) -> None:
        """Greet at once, since a probe waits for it. There is one at a time, as of probes."""
        self._urgent[address] = None
        self.wake_at = min(self.wake_at, now)

    def want(self, session: int, members: int, now: float) -> None:
        """Plan to greet a member known by report."""
        if session not in self._waits:
            due_at = now + self._rng.uniform(0, SPREAD_S * members)
            self._waits[session] = (due_at, AGAIN_S[0])
            self.wake_at = min(self.wake_at, due_at)

    def done(self, session: int) -> None:
        """Stop greeting a member: it proved itself or is gone."""
        self._waits.pop(session, None)

    def due(self, roster: Roster, neighbours: NeighbourSet, now: float) -> list[Address]:
        """Return the addresses to greet now."""
        addresses = list(self._urgent)
        self._urgent.clear()
        for session in [session for session, (due_at, _) in self._waits.items() if due_at <= now]:
            _, wait_s = self._waits.pop(session)
            member = roster.get(session)
            if member is not None and member.live and not member.proved and neighbours.wants(session):
                addresses.append(member.address)
                due_at = now + self._rng.uniform(0.5, 1.0) * wait_s
                self._waits[session] = (due_at, min(2 * wait_s, AGAIN_S[1]))
        self.wake_at = min([due_at for due_at, _ in self._waits.values()], default=inf)
        return addresses


class Contacts:
    """Addresses of the dead, in the order in which they will be greeted."""

    def __init__(self, rng: Random, counters: MembershipCounters) -> None:
        self.wake_at = inf
        self._rng = rng
        self._counters = counters
        self._until: dict[Address, float] = {}
        self._fresh: dict[Address, None] = {}  # remembered from before a restart and not greeted yet

    def __len__(self) -> int:
        return len(self._until)

    def add(self, address: Address, now: float) -> None:
        self._until.pop(address, None)
        self._until[address] = now + CONTACT_S
        if len(self._until) > CONTACTS_MAX:
            self.remove(next(iter(self._until)))
            self._counters.contacts_dropped += 1
        self.wake_at = min(self.wake_at, now + self._rng.uniform(0.5, 1.0) * CONTACT_INTERVAL_S[0])

    def remember(self, address: Address, now: float) -> None:
        """Add a contact from before a restart, to be greeted soon."""
        self.add(address, now)
        self._fresh[address] = None
        self.wake_at = now

    def remove(self, address: Address) -> None:
        """Remove an address: a member lives there."""
        self._until.pop(address, None)
        self._fresh.pop(address, None)

    def due(self, members: int, now: float) -> list[Address]:
        """Return the contact to greet now, if it is time for one. It goes to the end of the queue."""
        if now < self.wake_at:
            return []
        address = next(iter(self._fresh or self._until), None)
        while address is not None and self._until[address] < now:
            self.remove(address)
            address = next(iter(self._fresh or self._until), None)
        if address is None:
            self.wake_at = inf
            return []
        self._fresh.pop(address, None)
        self._until[address] = self._until.pop(address)
        interval_s = REMEMBERED_S if self._fresh else min(CONTACT_INTERVAL_S[0] * members, CONTACT_INTERVAL_S[1])
        self.wake_at = now + self._rng.uniform(0.1, 1.9) * interval_s  # lest all that saw a death greet in step
        return [address]
