"""How membership writes its letters: which plane, and what rides along.

Every ping, answer and request for help has room for updates; what the receiver must know comes first, the rest is taken
from the broadcasts. With datagrams off (networks that block UDP) all of it goes on the PROBE stream, which carries
nothing else, so that bulk never delays a probe. Sequence numbers are one series for own pings and for those in the name
of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier_py.core.gossip.gossip_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.gossip.membership.broadcasts import Broadcasts
from ranvier_py.core.gossip.membership.roster import Member
from ranvier_py.core.gossip.wire.messages import Ack, Message, Nack, Ping, PingRequest, Push, Update

FIELDS_BYTES = 96
"""The other fields of the longest of these messages (PingRequest: 45 bytes of address and three numbers) as msgpack."""

SEQ_MAX = 2**32 - 1
"""What the wire holds."""


class Post:
    """Appends letters to the outbox. `room_bytes` is what a datagram holds of updates."""

    __slots__ = ("_broadcasts", "_outbox", "_room_bytes", "_seq", "_size_of", "datagrams")

    def __init__(
        self,
        outbox: list[Outgoing],
        broadcasts: Broadcasts,
        *,
        size_of: Callable[[Update], int],
        room_bytes: int,
        datagrams: bool,
    ) -> None:
        self.datagrams = datagrams
        self._outbox = outbox
        self._broadcasts = broadcasts
        self._size_of = size_of
        self._room_bytes = room_bytes
        self._seq = 0

    def next_seq(self) -> int:
        self._seq = self._seq % SEQ_MAX + 1
        return self._seq

    def ping(self, address: Address, session: int, seq: int, plane: Plane, first: Sequence[Update] = ()) -> None:
        self._send(address, session, plane, Ping(seq, self._fill(first)))

    def ack(self, peer: Peer, seq: int, plane: Plane) -> None:
        self._send(peer.address, peer.session, plane, Ack(seq, self._fill(())))

    def nack(self, peer: Peer, seq: int, plane: Plane) -> None:
        self._send(peer.address, peer.session, plane, Nack(seq))

    def ask(self, relay: Member, seq: int, target: Member, first: Sequence[Update]) -> None:
        """Ask `relay` to ping `target`."""
        host, port = target.address
        request = PingRequest(seq, target.session, host, port, self._fill(first))
        self._send(relay.address, relay.session, self.best_plane(relay), request)

    def tell(self, address: Address, session: int, updates: Sequence[Update], plane: Plane = Plane.DATAGRAM) -> None:
        """Just these, as far as they fit."""
        fitting = self._fitting(updates, self._room_bytes)
        if fitting:
            self._send(address, session, plane, Push(tuple(fitting)))

    def gossip(self, member: Member) -> bool:
        """What waits to be spread. Returns whether anything did."""
        updates = self._fill(())
        if updates:
            self._send(member.address, member.session, self.best_plane(member), Push(updates))
        return bool(updates)

    def best_plane(self, member: Member) -> Plane:
        return Plane.DATAGRAM if member.datagrams else Plane.PROBE

    def _fill(self, first: Sequence[Update]) -> tuple[Update, ...]:
        if not first:
            return self._broadcasts.take(self._room_bytes)
        fitting = self._fitting(first, self._room_bytes)
        room_bytes = self._room_bytes - sum(map(self._size_of, fitting))
        return (*fitting, *self._broadcasts.take(room_bytes))

    def _fitting(self, updates: Sequence[Update], room_bytes: int) -> list[Update]:
        """As many from the start as there is room for."""
        fitting = []
        for update in updates:
            room_bytes -= self._size_of(update)
            if room_bytes < 0:
                break
            fitting.append(update)
        return fitting

    def _send(self, address: Address, session: int, plane: Plane, message: Message) -> None:
        if plane is Plane.DATAGRAM and not self.datagrams:
            plane = Plane.PROBE
        self._outbox.append(Outgoing(address, session, plane, message))
