"""Hostile peers of the gossip port: strangers without a key, and a hostile member that has the key.

The node joins the cluster through this member. The member answers the node's greeting and probes, so the node accepts
as a member's whatever it sends later. It spoils the streams that the node opens to it, in three ways by turns.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import trio

from ranvier_py.core.engine_cache.peers.snapshot_transfer import SNAPSHOTS, SUBJECT
from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX, Address, Plane
from ranvier_py.core.mesh.transfer import Refused, TransferPart, Wanted
from ranvier_py.core.mesh.wire import messages as m
from ranvier_py.core.mesh.wire.frame import HEADER, STREAM_HEAD, BadFrame, pack
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.core.mesh.wire.seal import Sealer
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.backend_state.loads import Loads
from ranvier_py.core.routing.peers import route_messages as r
from ranvier_py.core.routing.peers.route_updates import Entry

LABEL = "ranvier"
U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
MET_S = 30.0


class HostilePeer:
    """A member at `address`, with a UDP socket and a TCP listener."""

    def __init__(self, address: Address, ring: KeyRing, rng: Random) -> None:
        self.address = address
        self.sealer = Sealer(rng.getrandbits(63) + 1, ring, LABEL)
        self.record = m.Record("hostile", self.sealer.session, 1, 0, m.State.ALIVE, *address, 0)
        self.node = 0  # the node's session
        self.node_address = address
        self.met = trio.Event()
        self.spoilt = 0  # streams from the node so far
        self._rng = rng
        self._socket = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._socket.bind(self.address)
        listeners = await trio.open_tcp_listeners(self.address[1], host=self.address[0])
        task_status.started()
        with self._socket:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, self.spoil, listeners)
                while True:
                    packet, self.node_address = await self._socket.recvfrom(1 << 16)
                    with suppress(BadFrame):
                        opened = self.sealer.open(packet, Plane.DATAGRAM)
                        await self._answer(opened.session, CODEC.decode(opened.kind, opened.body))

    async def _answer(self, session: int, message: m.Message) -> None:
        self.node = session
        if isinstance(message, m.Hello | m.Challenge):
            await self.tell(m.Echo(self.record, message.challenge, 0))
        elif isinstance(message, m.Ping):
            await self.tell(m.Ack(message.seq))
            self.met.set()

    async def tell(self, message: m.Message) -> None:
        await self.send(*CODEC.encode(message))

    async def send(self, kind: int, body: bytes) -> None:
        """Seal any body correctly and send it in a datagram; one that is too long for a datagram is not sent."""
        with suppress(ValueError):  # longer than a datagram may be
            packet = self.sealer.seal(Plane.DATAGRAM, self.node, kind, body)
            await self._socket.sendto(packet, self.node_address)

    def frame(self, kind: int, body: bytes) -> bytes:
        """Return a body, sealed and framed for a stream."""
        packet = self.sealer.seal(Plane.BULK, self.node, kind, body[: FRAME_BYTES_MAX // 2])
        return STREAM_HEAD.pack(len(packet)) + packet

    async def spoil(self, stream: trio.SocketStream) -> None:
        """Answer the node's stream with garbage, leave it unread, or end it, by turns."""
        self.spoilt += 1
        async with stream:
            if self.spoilt % 3 == 1:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(self._rng.randbytes(1000))
                    await stream.receive_some()
            elif self.spoilt % 3 == 2:
                await trio.sleep_forever()


# --- what strangers send ----------------------------------------------------------------------------------------------


def stranger_packets(rng: Random) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of datagrams; streams carry the same bytes behind their length."""
    other = Sealer(9, KeyRing({7: rng.randbytes(32)}, 7), LABEL)
    kind, body = CODEC.encode(m.Ping(1))
    sealed = other.seal(Plane.DATAGRAM, 0, kind, body)
    yield "nothing", b""
    yield "one byte", b"R"
    yield "the magic alone", b"RG"
    yield "random bytes", rng.randbytes(1200)
    yield "more than a datagram should have", rng.randbytes(60_000)
    yield "a header and random bytes", HEADER.pack(b"RG", sealed[2], 7, 9, 0, 1) + rng.randbytes(64)
    yield "another version", sealed[:2] + b"\xff" + sealed[3:]
    yield "another key", sealed
    yield "a session of nothing", HEADER.pack(b"RG", sealed[2], 7, 0, 0, 1) + sealed[HEADER.size :]
    yield "a plane that is none", HEADER.pack(b"RG", sealed[2], 7, 9, 250, 1) + sealed[HEADER.size :]
    yield "a packet cut short", sealed[:-1]
    yield "a packet with one bit turned", sealed[:-3] + bytes((sealed[-3] ^ 4,)) + sealed[-2:]
    yield "HTTP", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    yield "the hello of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)


def stranger_streams(rng: Random) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) for streams, with lengths."""
    for name, packet in stranger_packets(rng):
        yield name, STREAM_HEAD.pack(len(packet)) + packet
    yield "a length of four gigabytes", STREAM_HEAD.pack(U32)
    yield "a length just above the limit", STREAM_HEAD.pack(FRAME_BYTES_MAX + 1) + bytes(64)
    yield "a length without its packet", STREAM_HEAD.pack(500) + b"RG"
    yield "half a length", b"\x01\x00"
    yield "a million lengths of nothing", bytes(1 << 20)


# --- what the member sends --------------------------------------------------------------------------------------------


def sealed_bodies(rng: Random) -> Iterator[tuple[str, int, bytes]]:
    """Yield (name, kind, body): malformed bodies of each kind, and bodies of kinds that do not exist."""
    for _, kind, make, fields, *_ in CODEC.kinds:
        yield f"{make.__name__} of random bytes", kind, rng.randbytes(200)
        yield f"{make.__name__} of the greatest numbers", kind, pack(*[U64] * len(fields))
        yield f"{make.__name__} of empty bytes", kind, pack(*[b""] * len(fields))
    yield "a kind that nobody has", 255, pack(1, 2, 3)
    yield "a body of arrays in arrays", CODEC.number_of[m.Ping], b"\x91" * 500
    yield "a body that says it has four gigabytes", CODEC.number_of[m.Ping], b"\x91\xc6\xff\xff\xff\xff" + bytes(64)


def lies(peer: HostilePeer) -> Iterator[tuple[str, m.Message]]:
    """Yield (name, message): well-formed messages that are untrue."""
    own = peer.record
    node = own._replace(name="node", session=peer.node, host=peer.node_address[0], port=peer.node_address[1])
    for state in m.State:
        untrue = node._replace(state=state, incarnation=U32, epoch=1)
        yield f"the node is {state.name} at the greatest incarnation", m.Push((m.Update(untrue, own.session),))
    yield "a later session has the node's name", m.Push((m.Update(node._replace(session=77, epoch=U64)),))
    yield "the node has another address", m.Push((m.Update(node._replace(host="192.0.2.1", port=1)),))
    yield "the sender has the greatest epoch", m.Push((m.Update(own._replace(epoch=U64, incarnation=U32)),))
    strangers = [own._replace(name=f"x{each}", session=1000 + each, port=1 + each) for each in range(500)]
    yield "five hundred members that are not there", m.Members(tuple(strangers), reply=True)
    yield "an answer to nothing", m.Ack(U32)
    yield "a probe of a third", m.PingRequest(1, 77, "192.0.2.1", 9)
    yield "a probe of the node by itself", m.PingRequest(2, peer.node, *peer.node_address)
    yield "updates up to the greatest number", r.RouteUpdates(0, U64 - 1, (Entry(U16, b"x"),), U16)
    yield "updates of the node's own session", r.RouteUpdates(peer.node, U32, (Entry(0, b"\xff" * 40),))
    yield "a vector of the greatest numbers", r.Vector(((peer.node, U64), (77, U64)), reply=True)
    yield "the node's own log was trimmed", r.Reset(peer.node, U64)
    yield "another schema", r.Digest(U64, U64)
    yield "the end of a transfer that nobody asked for", Refused(r.TABLES.what, U32, busy=True)
    yield "a whole table, from its last part", Wanted(r.TABLES.what, 1, U32, b"")
    yield "buckets that are not there", Wanted(r.TABLES.what, 2, 0, b"\xff" * 9)
    yield "sums of a table that nobody has", r.TotalSum(U64, bytes(8), True, U32)
    yield "a load beyond all", Loads(U32, ((U64, U16, U16, U32),))
    yield "a snapshot that nobody keeps", Wanted(SNAPSHOTS.what, 1, 0, SUBJECT.pack(U64, U16))
    yield "what nobody knows", TransferPart(U16, U32, U32, True, b"")
