"""The world as gossip has it: sockets, time and effects around one object that knows none of them.

`Gossip` gets bytes and the time and says what to send; this shell carries it. One UDP socket and one TCP listener share
a port (`gossip_datagrams`, `gossip_inbound`), streams outwards are opened as needed (`gossip_streams`), and one task
sleeps until the core wants to be woken. After every call into the core its effects are carried out, so nothing waits
for a later call.

Rules: whoever calls the core by himself calls `poke` after it: that wakes the timer if the core wants to be woken
earlier, and costs next to nothing. An exception in the core is a bug: it is counted and told, and costs the packet that
it came with. Nothing here waits for a peer except the task of that peer's stream.
Invariant: the timer never sleeps past `wake_at`, and never spins: after many ticks without a pause it takes one.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple, Protocol

import trio
from trio.lowlevel import ParkingLot

from ranvier_py.core.gossip.endpoints import HostPort, is_wildcard, spelled
from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Plane, Send
from ranvier_py.core.gossip.wire.frame import MAGIC, PROTOCOL_VERSION
from ranvier_py.core.histogram import Histogram
from ranvier_py.io.gossip.datagrams import Datagrams
from ranvier_py.io.gossip.inbound_streams import Acceptor
from ranvier_py.io.gossip.outbound_streams import Streams
from ranvier_py.io.gossip.sockets import SYSTEM, System
from ranvier_py.io.gossip.traffic_counters import Drop, NetOptions, NetStatistics, Traffic

__all__ = ["Gossip", "GossipNet", "GossipSockets", "NetOptions", "NetStatistics", "open_sockets"]

log = logging.getLogger(__name__)

LOOK_S = 1.0  # the timer looks at `wake_at` at least this often, in case somebody forgot to poke
HURRIED_MAX = 256  # ticks without a pause: then each is followed by one
PAUSE_S = 0.001
FAULT_PAUSE_S = 0.1  # after an exception in the core: it may still be due
ROUNDS_MAX = 8  # of effects that follow from effects; what is left comes with the next call

LATENESS_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 60.0)

OURS = MAGIC + bytes((PROTOCOL_VERSION,))  # how each packet begins that can be opened here

BIND_TRIES = 16  # for a port that is free for both UDP and TCP, where any will do
LISTEN_BACKLOG = 256  # connections the kernel holds while we are busy: a cluster that restarts at once


class Gossip(Protocol):
    """The core as its shell needs it. Nothing in it waits; `now` is the clock of this shell, in seconds."""

    @property
    def wake_at(self) -> float:
        """When `tick` is wanted next; may become earlier after any call."""

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None: ...
    def contact(self, addresses: Sequence[Address], now: float) -> None: ...
    def unreachable(self, address: Address, plane: Plane, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def take(self) -> Sequence[Send]: ...
    def changes(self) -> Sequence[MemberChange]: ...
    def leave(self, now: float) -> None: ...


class GossipSockets(NamedTuple):
    """Bound sockets, before anything is read: the core is made once the port is known."""

    listener: socket.socket
    datagrams: socket.socket | None
    host: str
    port: int
    family: int  # of peers: AF_INET, AF_INET6, or AF_UNSPEC where one socket speaks both
    system: System = SYSTEM  # that they are of

    def close(self) -> None:
        self.listener.close()
        if self.datagrams is not None:
            self.datagrams.close()


async def open_sockets(host: str, port: int, *, udp: bool = True) -> GossipSockets:
    """Bind UDP and TCP on one port; 0 takes one that is free for both. Raises OSError that says where."""
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    for tries_left in reversed(range(BIND_TRIES if port == 0 else 1)):
        try:
            return bound(family, address, udp=udp)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not tries_left:
                where = spelled((host, port))
                raise OSError(error.errno, f"{error.strerror or error} (gossip on {where})") from error
    raise AssertionError("not reached")


def bound(family: int, address: Any, *, udp: bool) -> GossipSockets:
    listener = socket.socket(family, socket.SOCK_STREAM)
    datagrams: socket.socket | None = None
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # :: speaks IPv4, too
        listener.bind(address)
        host, port = listener.getsockname()[:2]
        if udp:  # without SO_REUSEADDR: two processes must not share it
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            datagrams.setblocking(False)
            if family == socket.AF_INET6:
                datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            datagrams.bind((host, port, *address[2:]))
        listener.listen(LISTEN_BACKLOG)
    except BaseException:
        listener.close()
        if datagrams is not None:
            datagrams.close()
        raise
    return GossipSockets(listener, datagrams, host, port, socket.AF_UNSPEC if host == "::" else family)


class GossipNet:
    """Carries a Gossip. Takes the sockets over. `changed` gets what the operator wants to see in the log."""

    def __init__(
        self,
        gossip: Gossip,
        sockets: GossipSockets,
        rng: Random,
        *,
        options: NetOptions | None = None,
        changed: Callable[[Sequence[MemberChange]], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` must be the one that the core's other callers use."""
        options = options or NetOptions()
        self.gossip = gossip
        self.sockets = sockets
        self.changed = changed
        self.clock = clock
        self.traffic = traffic = Traffic(clock)
        self.lateness_s = Histogram(LATENESS_BUCKETS_S)
        self.acceptor = Acceptor(sockets.listener, self.receive, traffic, options, sockets.system)
        self.datagrams: Datagrams | None = None
        if sockets.datagrams is not None:
            self.datagrams = Datagrams(sockets.datagrams, self.receive, traffic, options, sockets.system)
        host = "" if is_wildcard(sockets.host) else sockets.host
        self.streams = Streams(sockets.listener.family, host, self.broke, traffic, options, rng, sockets.system)
        self._asleep_until = -inf
        self._bed = ParkingLot()

    async def run(self, *, task_status: trio.TaskStatus[HostPort] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; reports where it listens. Never raises for the sake of a peer or of the network."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.streams.run)
                nursery.start_soon(self.acceptor.run)
                if self.datagrams is not None:
                    nursery.start_soon(self.datagrams.run)
                nursery.start_soon(self.keep_time)
                task_status.started((self.sockets.host, self.sockets.port))
        finally:
            self.sockets.close()

    # --- into the core ----------------------------------------------------------------------------------------------

    def receive(self, data: bytes, source: Address, plane: Plane) -> None:
        if not data.startswith(OURS):
            self._tell_of_other_major(data, source)
        now = self.clock()
        try:
            self.gossip.receive(data, source, plane, now)
        except Exception:
            self.traffic.fault("receive")
        self.carry(now)

    def _tell_of_other_major(self, data: bytes, source: Address) -> None:
        """Such a packet is refused and counted where it is opened. Anybody may have sent it, so it is told seldom."""
        if data.startswith(MAGIC) and len(data) > len(MAGIC):
            major, where = data[len(MAGIC)], spelled(source)
            text = f"gossip.version packets of protocol {major} from {where} refused: {PROTOCOL_VERSION} is spoken here"
            self.traffic.complain("major", text)

    def contact(self, addresses: Sequence[Address]) -> None:
        """Addresses where peers may be: what discovery finds."""
        now = self.clock()
        try:
            self.gossip.contact(addresses, now)
        except Exception:
            self.traffic.fault("contact")
        self.carry(now)

    def broke(self, address: Address, plane: Plane) -> None:
        now = self.clock()
        self._unreachable({(address, plane): None}, now)
        self.carry(now)

    def leave(self) -> None:
        """Say goodbye. Keep running for a moment after it: peers may ask again."""
        now = self.clock()
        try:
            self.gossip.leave(now)
        except Exception:
            self.traffic.fault("leave")
        self.carry(now)

    def _unreachable(self, places: dict[tuple[Address, Plane], None], now: float) -> None:
        for address, plane in places:
            try:
                self.gossip.unreachable(address, plane, now)
            except Exception:
                self.traffic.fault("unreachable")

    def room(self, address: Address) -> int:
        """Bytes that can be sent there on BULK just now without being dropped."""
        return self.streams.room(address)

    # --- out of the core --------------------------------------------------------------------------------------------

    def carry(self, now: float) -> None:
        """Carry out the core's effects, and those that follow from what can't be sent."""
        try:
            for _ in range(ROUNDS_MAX):
                lost: dict[tuple[Address, Plane], None] = {}
                for to, plane, data in self.gossip.take():
                    if not self._send(to, plane, data):
                        lost[to, plane] = None
                if not lost:
                    break
                self._unreachable(lost, now)
            changes = self.gossip.changes()
            if changes:
                self.changed(changes)
        except Exception:
            self.traffic.fault("effects")
        self.poke()

    def _send(self, to: Address, plane: Plane, data: bytes) -> bool:
        """False when that address can't be reached."""
        if plane is not Plane.DATAGRAM:
            return self.streams.send(to, plane, data)
        if self.datagrams is not None:
            return self.datagrams.send(to, data)
        self.traffic.drop(Drop.NO_UDP)
        return True

    # --- time -------------------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """The core was called: wake the timer, if that is due earlier now. Cheap, and as often as one likes."""
        if self._asleep_until > -inf and self.gossip.wake_at < self._asleep_until:
            self._asleep_until = -inf
            self._bed.unpark_all()

    async def keep_time(self) -> None:
        """Tick when the core wants it, until cancelled. Measures how late the event loop wakes us."""
        hurried = 0
        while True:
            wake_at = self.gossip.wake_at
            sleep_s = wake_at - self.clock()
            if sleep_s > 0:
                hurried = 0
                await self._sleep(wake_at, sleep_s)
                continue
            hurried += 1
            if not self.tick():
                await trio.sleep(FAULT_PAUSE_S)
            await trio.sleep(PAUSE_S if hurried > HURRIED_MAX else 0)

    async def _sleep(self, wake_at: float, sleep_s: float) -> None:
        """At most until then; `poke` wakes."""
        self._asleep_until = wake_at
        with trio.move_on_after(min(sleep_s, LOOK_S)) as sleep:
            await self._bed.park()
        self._asleep_until = -inf
        if sleep.cancelled_caught and sleep_s <= LOOK_S:
            self.lateness_s.observe(max(0.0, self.clock() - wake_at))

    def tick(self) -> bool:
        """Whether that went well."""
        self.traffic.ticks += 1
        now = self.clock()
        faults = self.traffic.faults
        try:
            self.gossip.tick(now)
        except Exception:
            self.traffic.fault("tick")
        self.carry(now)
        return self.traffic.faults == faults

    # --- seeing it --------------------------------------------------------------------------------------------------

    def statistics(self) -> NetStatistics:
        traffic = self.traffic
        return NetStatistics(
            streams_out=len(self.streams),
            streams_in=len(self.acceptor),
            queued_bytes=self.streams.queued_bytes,
            receive_buffer_bytes=self.datagrams.buffer_bytes if self.datagrams else 0,
            packets_sent=named(traffic.packets_sent),
            packets_received=named(traffic.packets_received),
            bytes_sent=named(traffic.bytes_sent),
            bytes_received=named(traffic.bytes_received),
            drops={reason.value: number for reason, number in traffic.drops.items()},
            errors=dict(traffic.errors),
            kernel_drops=traffic.kernel_drops,
            connects=traffic.connects,
            broken=traffic.broken,
            accepted=traffic.accepted,
            closed=dict(traffic.closed),
            ticks=traffic.ticks,
            faults=traffic.faults,
        )


def named(numbers: dict[Plane, int]) -> dict[str, int]:
    return {plane.name.lower(): number for plane, number in numbers.items()}
