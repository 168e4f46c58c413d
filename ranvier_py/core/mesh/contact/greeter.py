"""Greets addresses that may be those of peers, by datagram and by stream in turn, as one of both may be blocked.

Bound: TRIED_MAX addresses for which the plane of the next greeting is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.contact.sessions import Sessions
from ranvier_py.core.mesh.membership.members import Membership
from ranvier_py.core.mesh.membership.neighbour_set import MESH_MEMBERS_MAX
from ranvier_py.core.mesh.mesh_values import Address, Plane

STRANGERS_MAX = 8
"""If `contact` gets MESH_MEMBERS_MAX unknown addresses or more, it greets only this many: one answer is enough, and DNS
names all of them again and again."""

TRIED_MAX = 4096


class Greeter:
    def __init__(self, members: Membership, sessions: Sessions, *, datagrams: bool) -> None:
        self._members, self._sessions, self._datagrams = members, sessions, datagrams
        self._tried: BoundedDict[Address, bool] = BoundedDict(TRIED_MAX)  # whether the next one goes by stream

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        """Greet addresses that an operator or DNS names."""
        if not self._members.neighbours.is_mesh:
            known = {member.address for member in self._members.alive()}
            addresses = [address for address in addresses if address not in known]
        for address in addresses if len(addresses) < MESH_MEMBERS_MAX else addresses[:STRANGERS_MAX]:
            self.greet(address, now)

    def greet(self, address: Address, now: float) -> None:
        """Send a Hello, unless a proved live member is there."""
        session = self._sessions.session_at(address)
        member = self._members.member(session) if session else None
        if member is not None and member.live and member.proved:
            return
        streamed = self._tried.get(address, not self._datagrams)
        if self._sessions.greet(address, now, Plane.PROBE if streamed else Plane.DATAGRAM) and self._datagrams:
            self._tried[address] = not streamed

    def proved(self, address: Address) -> None:
        """Note that a member was proved at this address."""
        self._tried.pop(address, None)
