"""One node without a network: what it is sent, and what it writes."""

from __future__ import annotations

from random import Random

from ranvier_py.core.mesh.membership.members import Membership
from ranvier_py.core.mesh.membership.profile import LAN
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Message, Push, Record, Update
from tests.core.mesh.membership.small_cluster import ROOM_BYTES, record_of

ME = record_of("n0", 1_000_000)


def peer_of(record: Record) -> Peer:
    return Peer(record.session, (record.host, record.port))


class LoneNode:
    """Its clock moves by `run` alone; `greeted` has the addresses that it greeted meanwhile."""

    def __init__(self, *proved: Record, seed: int = 1, datagrams: bool = True) -> None:
        self.outbox: list[Outgoing] = []
        self.now = 100.0
        self.greeted: list[Address] = []
        self.members = Membership(
            ME, LAN, self.outbox, Random(seed), self.now, room_bytes=ROOM_BYTES, datagrams=datagrams
        )
        for record in proved:
            self.members.proved(record, self.now)

    def gets(self, sender: Record, message: Message, plane: Plane = Plane.DATAGRAM) -> None:
        self.members.receive(peer_of(sender), message, self.now, plane)

    def gets_updates(self, sender: Record, *records: Record, accuser: int = 0) -> None:
        self.gets(sender, Push(tuple(Update(record, accuser) for record in records)))

    def known(self, session: int) -> Member:
        member = self.members.member(session)
        assert member is not None
        return member

    def forget_packets(self) -> None:
        """Nobody was received lately."""
        for member in self.members.alive():
            member.received_at = self.now - 100.0

    def tick(self) -> None:
        self.members.tick(self.now)
        self.greeted += self.members.needs_greeting(self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := max(self.members.wake_at, self.now)) <= end:
            self.now, sent = at, len(self.outbox)
            self.tick()
            self.wrote(self.outbox[sent:])
        self.now = end

    def wrote(self, sends: list[Outgoing]) -> None:
        """What left with one tick: here others may answer."""
