"""Addresses that turned out to lead back to ourselves, so that we do not greet ourselves again and again.

DNS names us too, and a service's address may lead to any node. Such an address is believed only when a greeting of our
own came back whose number was sent to that very address less than 4 s ago; that is no proof, since whoever is on the
wire can reflect it. So it is believed for OWN_S only, not at all where a proved session was heard since the greeting,
and no longer when one is heard.
Bounds: OWN_MAX addresses, the oldest goes first. Cost: 0.1 us for a look.
"""

from __future__ import annotations

from ranvier_py.core.gossip.gossip_values import Address

OWN_S = 5.0
"""A greeting of half a kilobyte to ourselves each five seconds costs nothing; an address that leads to one of several
nodes is tried again, and a reflected greeting keeps us from its receiver no longer."""

OWN_MAX = 64  # a host has few addresses, and a cluster few service names


class OwnAddresses:
    """`mine` is the address that we advertise, which is our own for ever."""

    def __init__(self, mine: Address) -> None:
        self.dropped = 0
        self._mine = mine
        self._until: dict[Address, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def believe(self, address: Address, now: float) -> None:
        """It leads back to us just now."""
        self._until.pop(address, None)
        if len(self._until) >= OWN_MAX:
            self.dropped += 1
            del self._until[next(iter(self._until))]
        self._until[address] = now + OWN_S

    def holds(self, address: Address, now: float) -> bool:
        """Whether it is not worth a greeting now."""
        if address == self._mine:
            return True
        until = self._until.get(address)
        if until is None:
            return False
        if until > now:
            return True
        del self._until[address]
        return False

    def forget(self, address: Address) -> None:
        """Somebody else lives there."""
        self._until.pop(address, None)
