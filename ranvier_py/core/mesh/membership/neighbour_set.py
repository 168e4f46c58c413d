"""Which members a node deals with directly: all in a small cluster, its neighbours in a large one.

Rule: beyond MESH_MEMBERS_MAX members a node seeks out its *neighbours* alone: the next and the last STEPS sessions on a
few rings, each a pseudo-random order of live sessions that every node knows. Each ring alone leads to every member; the
others prove themselves when probed. *Acquaintances* are the live members that have proved themselves, for as long as
they live at that address: they alone are sent messages and asked for help.
Invariant: neighbours are neighbours of each other wherever two nodes see the same members; the set only changes by a
join or a death (test_neighbour_set.py).
"""

from __future__ import annotations

from bisect import insort
from functools import lru_cache

from ranvier_py.core.mesh.membership.roster import Member, Roster
from ranvier_py.core.splitmix import GOLDEN, MASK, mix

MESH_MEMBERS_MAX = 64  # this node included: proved in a second by 2000 handshakes in the whole cluster
SHARED_RINGS, ALL_RINGS = (0, 1, 2), (3,)
"""Rings of members with the same schema, and of all. Route updates are spread along the first ones (`route_outbox`)."""

STEPS = 2  # on each ring, each way: some 16 neighbours. One of them may be unreachable without a gap in the ring.
RINGS_MAX = 8
POSITIONS_REMEMBERED = 8192  # twice the sessions of the largest cluster, 1 MiB; forgetting only costs time


@lru_cache(POSITIONS_REMEMBERED)
def positions_of(session: int) -> tuple[int, ...]:
    """Return the position of a session on each of RINGS_MAX rings: u64."""
    return tuple(mix((session + ring * GOLDEN) & MASK) for ring in range(RINGS_MAX))


class Side:
    """The nearest STEPS members one way round one ring: (distance, session), the nearest first."""

    __slots__ = ("nearest", "reach")

    def __init__(self) -> None:
        self.nearest: list[tuple[int, int]] = []
        self.reach = MASK + 1  # a member closer than this is among the nearest

    def offer(self, distance: int, session: int) -> None:
        insort(self.nearest, (distance, session))
        del self.nearest[STEPS:]
        if len(self.nearest) == STEPS:
            self.reach = self.nearest[-1][0]


class NeighbourSet:
    """The neighbours and acquaintances of this node (see the module). `MemberTable` reports which members are live."""

    def __init__(self, session: int, schema: int, roster: Roster) -> None:
        self.widened = False
        """Whether a member known before may have become one to greet: see `unmet`."""
        self._schema = schema
        self._roster = roster
        self._positions = positions_of(session)
        self._acquainted: dict[int, Member] = {}
        self._drawn: tuple[Member, ...] | None = ()
        self._near: dict[int, None] | None = {}
        self._stale = False  # a neighbour is gone: others move up
        self._sides = [(ring, Side(), Side()) for ring in (*SHARED_RINGS, *ALL_RINGS)]

    def join(self, member: Member) -> None:
        """Add a member that is live from now on, proved or not. The roster must have it as live already."""
        session = member.record.session
        if not self._stale:
            self._offer(session, member.record.schema)
        if member.proved:
            self.met(member)

    def part(self, session: int) -> None:
        """Remove a member that is not live any more, after the roster. May be called any number of times."""
        self.lost(session)
        if not self._stale and session in self.near():
            self._stale = self.widened = True
        self.widened |= self._roster.live == MESH_MEMBERS_MAX - 1

    def met(self, member: Member) -> None:
        """Note that a member has proved itself."""
        if member.live:
            self._acquainted[member.record.session] = member
            self._drawn = None

    def lost(self, session: int) -> None:
        """Note that a member's proof holds no more: it died, or its address changed."""
        if self._acquainted.pop(session, None) is not None:
            self._drawn = None

    @property
    def is_mesh(self) -> bool:
        """Whether the cluster is so small that each two members are to know each other."""
        return self._roster.live < MESH_MEMBERS_MAX

    def wants(self, session: int) -> bool:
        """Whether this live member should be greeted if it has not proved itself."""
        return self.is_mesh or session in self.near()

    def near(self) -> dict[int, None]:
        """Return the sessions of the neighbours, proved or not. Their order means nothing."""
        if self._stale:
            self._rebuild()
        if self._near is None:
            sides = [side for _, ahead, behind in self._sides for side in (ahead, behind)]
            self._near = {session: None for side in sides for _, session in side.nearest}
        return self._near

    def acquainted(self) -> tuple[Member, ...]:
        """Return the live members that have proved themselves. The same object until something changes."""
        if self._drawn is None:
            self._drawn = tuple(self._acquainted.values())
        return self._drawn

    def unmet(self) -> list[int]:
        """Return the sessions to greet after the set has widened. O(members) in a small cluster."""
        self.widened = False
        sought = [member.session for member in self._roster.alive()] if self.is_mesh else self.near()
        return [session for session in sought if session not in self._acquainted]

    def _offer(self, session: int, schema: int) -> None:
        theirs, mine = positions_of(session), self._positions
        for ring, ahead, behind in self._sides if schema == self._schema else self._sides[-len(ALL_RINGS) :]:
            distance = (theirs[ring] - mine[ring]) & MASK
            if distance < ahead.reach:
                ahead.offer(distance, session)
                self._near = None
            if MASK - distance < behind.reach:
                behind.offer(MASK - distance, session)
                self._near = None

    def _rebuild(self) -> None:
        self._sides = [(ring, Side(), Side()) for ring, _, _ in self._sides]
        for member in self._roster.alive():
            self._offer(member.record.session, member.record.schema)
        self._near = None
        self._stale = False
