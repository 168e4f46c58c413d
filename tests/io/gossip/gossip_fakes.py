"""A Gossip that records what its shell does to it, and shells on real sockets around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from random import Random
from typing import Any

import trio

from ranvier_py.core.addresses import is_wildcard
from ranvier_py.core.mesh.mesh_values import Address, MemberChange, Plane, Send
from ranvier_py.core.mesh.port_traffic import PortOptions
from ranvier_py.core.mesh.wire.frame import HEADER, MAGIC, OVERHEAD_BYTES, PROTOCOL_VERSION, STREAM_HEAD
from ranvier_py.io.gossip.gossip_port import GossipPort, GossipSockets, open_sockets
from ranvier_py.io.gossip.gossip_streams import InboundStreams, OutboundStreams

DEADLINE_S = 15.0


def packet(plane: Plane = Plane.DATAGRAM, size: int = 100, number: int = 0) -> bytes:
    """Looks like a packet from outside, and tells its number."""
    assert size >= OVERHEAD_BYTES
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, 1, 7, plane, number).ljust(size, b"x")


def number_of(data: bytes) -> int:
    return int(HEADER.unpack_from(data)[5])


def frame(data: bytes) -> bytes:
    return STREAM_HEAD.pack(len(data)) + data


class FakeGossip:
    """Records (call, what) in `calls`. `answer` may say what to send for what was received."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.wake_at = inf
        self.outbox: list[Send] = []
        self.changed: list[MemberChange] = []
        self.answer: Callable[[bytes, Address, Plane], Sequence[Send]] = lambda data, source, plane: ()
        self.on_tick: Callable[[float], object] = lambda now: setattr(self, "wake_at", inf)
        self.on_unreachable: Callable[[Address, Plane], Sequence[Send]] = lambda address, plane: ()
        self._happened = trio.Event()

    def _record(self, call: str, what: Any) -> None:
        self.calls.append((call, what))
        self._happened.set()

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        self._record("receive", (data, source, plane))
        self.outbox.extend(self.answer(data, source, plane))

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        self._record("contact", tuple(addresses))

    def unreachable(self, address: Address, plane: Plane, now: float) -> None:
        self._record("unreachable", (address, plane))
        self.outbox.extend(self.on_unreachable(address, plane))

    def tick(self, now: float) -> None:
        self._record("tick", now)
        self.on_tick(now)

    def leave(self, now: float) -> None:
        self._record("leave", now)

    def take(self) -> list[Send]:
        taken, self.outbox = self.outbox, []
        return taken

    def changes(self) -> list[MemberChange]:
        taken, self.changed = self.changed, []
        return taken

    def seen(self, call: str) -> list[Any]:
        return [what for name, what in self.calls if name == call]

    def packets(self) -> list[bytes]:
        return [data for data, _, _ in self.seen("receive")]

    async def until(self, call: str, count: int = 1) -> list[Any]:
        """All of these calls, once there are so many."""
        while len(self.seen(call)) < count:
            self._happened = trio.Event()
            await self._happened.wait()
        return self.seen(call)


class Shell(GossipPort):
    """A gossip port with its streams, as a node composes them."""

    def __init__(self, peer: Any, sockets: GossipSockets, rng: Random, **more: Any) -> None:
        super().__init__(peer, sockets, **more)
        host = "" if is_wildcard(sockets.host) else sockets.host
        self.outbound = OutboundStreams(sockets.listener.family, host, self, rng)
        self.inbound = InboundStreams(sockets.listener, self)
        self.send_stream = self.outbound.send

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.outbound.run)
            nursery.start_soon(self.inbound.run)
            task_status.started(await nursery.start(super().run))


@asynccontextmanager
async def shell(
    gossip: FakeGossip | None = None,
    host: str = "127.0.0.1",
    *,
    udp: bool = True,
    wrap: Callable[[Any], Any] = lambda sock: sock,
    **options: Any,
) -> AsyncIterator[tuple[Shell, FakeGossip]]:
    """A running shell on a port of its own. `wrap` may put something around its datagram socket."""
    gossip = gossip or FakeGossip()
    sockets = await open_sockets(host, 0, udp=udp)
    sockets = sockets._replace(datagrams=wrap(sockets.datagrams))
    net = Shell(gossip, sockets, Random(1), options=PortOptions(**options), clock=trio.current_time)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(net.run)
            yield net, gossip
            nursery.cancel_scope.cancel()


def address_of(net: GossipPort) -> Address:
    return net.sockets.host, net.sockets.port


def send(net: GossipPort, to: Address, plane: Plane, data: bytes) -> None:
    """As if the core had decided to."""
    gossip = net.peer
    assert isinstance(gossip, FakeGossip)
    gossip.outbox.append(Send(to, plane, data))
    net.carry(net.clock())


async def checkpoints(until: Callable[[], bool]) -> None:
    """Let others run until that holds. The deadline is the caller's."""
    while not until():
        await trio.lowlevel.checkpoint()
