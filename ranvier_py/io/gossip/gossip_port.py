"""Runs the gossip core, which does no I/O: gives it time and datagrams, and carries out its effects.

Rule: whoever else calls the core calls `poke` afterwards. An exception in the core is a bug: it is counted and logged,
and loses the packet that it came with. One wake-up takes at most `drain_max` datagrams or `hold_s`. Sending never
waits: what the kernel does not take is dropped and counted. No error ends the loop (chitchat#145: all gossip ended).
That a peer can't be reached is reported to the core (memberlist#242).
Invariant: the timer never sleeps past `wake_at`, and pauses after HURRIED_MAX ticks (test_gossip_port.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import trio
from trio.lowlevel import ParkingLot, wait_readable

from ranvier_py.core.addresses import HostPort, spelled
from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.errors import listening_on
from ranvier_py.core.log_events import LogEvent, event
from ranvier_py.core.log_limit import LogLimit
from ranvier_py.core.mesh.mesh import Mesh
from ranvier_py.core.mesh.mesh_values import DATAGRAM_BYTES_MAX, Address, MemberChange, Plane
from ranvier_py.core.mesh.port_traffic import (
    OUR_FAULTS,
    Drop,
    PortCounters,
    PortOptions,
    SocketAddress,
    plain_address,
    socket_address,
)
from ranvier_py.core.metrics import Histogram
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

LOOK_S = 1.0  # the timer reads `wake_at` at least this often, in case a caller forgot to poke
HURRIED_MAX = 256  # ticks without a pause; after these, each is followed by one
PAUSE_S = 0.001
FAULT_PAUSE_S = 0.1  # after an exception in the core, which may still be due
ROUNDS_MAX = 8  # of effects that follow from effects; the rest is carried out with the next call

LATENESS_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 60.0)

BIND_TRIES = 16  # to find a port that is free for both UDP and TCP, if any will do
LISTEN_BACKLOG = 256  # connections that the kernel holds while we are busy, as when a whole cluster restarts

SO_RXQ_OVFL = 40  # asm-generic/socket.h: each datagram comes with the number that the kernel has dropped so far
OVERFLOW_SPACE = socket.CMSG_SPACE(4) if sys.platform == "linux" else 0
RECEIVE_PAUSE_S = (0.01, 1.0)  # after an error of receiving: the first pause, and the longest; it doubles
ADDRESSES_MAX = 4096  # addresses whose form for the socket is remembered


class GossipSockets(NamedTuple):
    """Bound sockets from which nothing is read yet: the core is made once the port is known."""

    listener: socket.socket
    datagrams: socket.socket | None
    host: str
    port: int
    family: int  # of peers: AF_INET, AF_INET6, or AF_UNSPEC if one socket serves both

    def close(self) -> None:
        self.listener.close()
        if self.datagrams is not None:
            self.datagrams.close()


async def open_sockets(host: str, port: int, *, udp: bool = True) -> GossipSockets:
    """Bind UDP and TCP to the same port; 0 chooses one that is free for both. Raises ListenError."""
    with listening_on(f"gossip on {spelled((host, port))}"):
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        for tries_left in reversed(range(BIND_TRIES if port == 0 else 1)):
            try:
                return bound(family, address, udp=udp)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not tries_left:
                    raise
    raise AssertionError("not reached")


def bound(family: int, address: Any, *, udp: bool) -> GossipSockets:
    """Bind the sockets and listen. Raises OSError."""
    with contextlib.ExitStack() as opened:

        def bind(kind: int, *to: Any) -> socket.socket:
            sock = socket.socket(family, kind)
            opened.callback(sock.close)
            sock.setblocking(False)
            if kind == socket.SOCK_STREAM:  # two processes must not share the port for UDP
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # :: serves IPv4, too
            sock.bind(to)
            return sock

        listener = bind(socket.SOCK_STREAM, *address)
        host, port = listener.getsockname()[:2]
        datagrams = bind(socket.SOCK_DGRAM, host, port, *address[2:]) if udp else None
        listener.listen(LISTEN_BACKLOG)
        opened.pop_all()
    return GossipSockets(listener, datagrams, host, port, socket.AF_UNSPEC if host == "::" else family)


class GossipPort:
    """Runs one peer and owns its sockets. `changed` gets the changes of members, for the log.

    `send_stream` sends what is no datagram, and returns False if that address can't be reached.
    """

    def __init__(
        self,
        peer: Mesh,
        sockets: GossipSockets,
        *,
        options: PortOptions | None = None,
        changed: Callable[[Sequence[MemberChange]], object] = lambda _: None,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` must be the one that the core's other callers use."""
        self.faults = faults or Faults()
        self.peer, self.sockets = peer, sockets
        self.options = options or PortOptions()
        self.changed, self.clock = changed, clock
        self.counters = PortCounters()
        self.lateness_s = Histogram(LATENESS_BUCKETS_S)
        self.send_stream: Callable[[Address, Plane, bytes], bool] = lambda *_: True
        self._log_limit = LogLimit()
        self._spelled: BoundedDict[Address, SocketAddress | None] = BoundedDict(ADDRESSES_MAX)
        self._asleep_until = -inf
        self._bed = ParkingLot()
        if sockets.datagrams is not None:
            self._prepare(sockets.datagrams)

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, self.options.socket_bytes)
        if OVERFLOW_SPACE:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        self.counters.receive_buffer_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    async def run(self, *, task_status: trio.TaskStatus[HostPort] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; reports the address it listens on. Peers and the network raise nothing here."""
        try:
            async with trio.open_nursery() as nursery:
                if self.sockets.datagrams is not None:
                    nursery.start_soon(
                        self.faults.keep, "gossip_datagrams", self.receive_datagrams, self.sockets.datagrams
                    )
                nursery.start_soon(self.faults.keep, "gossip_timer", self.keep_time)
                task_status.started((self.sockets.host, self.sockets.port))
        finally:
            self.sockets.close()

    def receive(self, data: bytes, source: Address, plane: Plane) -> None:
        self._call("receive", self.peer.receive, data, source, plane)

    def contact(self, addresses: Sequence[Address]) -> None:
        """Give the core addresses where peers may be, as discovery finds them."""
        self._call("contact", self.peer.contact, addresses)

    def leave(self) -> None:
        """Announce that this node leaves. Keep running for a moment: peers may ask again."""
        self._call("leave", self.peer.leave)

    def broke(self, address: Address, plane: Plane, error: OSError) -> None:
        """Report that a stream to a peer failed: to the core, unless this machine is to blame."""
        self.failed("stream", error, address)
        if error.errno not in OUR_FAULTS:
            self._call("unreachable", self.peer.unreachable, address, plane)

    def tick(self) -> bool:
        """Call the core because time has passed. Returns whether nothing raised."""
        self.counters.ticks += 1
        return self._call("tick", self.peer.tick)

    def _call(self, what: str, call: Callable[..., None], *arguments: object) -> bool:
        """Call the core with the time, and carry out its effects. Returns whether nothing raised."""
        now, went_well = self.clock(), True
        try:
            call(*arguments, now)
        except Exception as error:
            self.faults.note(f"gossip_{what}", error)
            went_well = False
        return self.carry(now) and went_well

    def carry(self, now: float) -> bool:
        """Carry out the core's effects, and report addresses that can't be reached. Returns whether nothing raised."""
        went_well = True
        try:
            for _ in range(ROUNDS_MAX):
                lost: dict[tuple[Address, Plane], None] = {}
                for to, plane, data in self.peer.take():
                    send = self._send_datagram if plane is Plane.DATAGRAM else self.send_stream
                    if not send(to, plane, data):
                        lost[to, plane] = None
                if not lost:
                    break
                for address, plane in lost:
                    self.peer.unreachable(address, plane, now)
            if changes := self.peer.changes():
                self.changed(changes)
        except Exception as error:
            self.faults.note("gossip_effects", error)
            went_well = False
        self.poke()
        return went_well

    def _send_datagram(self, to: Address, plane: Plane, data: bytes) -> bool:
        """Send, or drop and count, a datagram. Returns False if its address can't be reached."""
        counters, sock = self.counters, self.sockets.datagrams
        if sock is None or len(data) > DATAGRAM_BYTES_MAX:
            counters.drop(Drop.NO_UDP if sock is None else Drop.TOO_LONG)
            return True
        address = self._address(to)
        if address is None:
            counters.drop(Drop.NO_SUCH_ADDRESS)
            return False
        try:
            sock.sendto(data, address)
        except BlockingIOError:
            counters.drop(Drop.SOCKET_FULL)
        except OSError as error:
            counters.drop(Drop.ERROR)
            self.failed("send", error, to)
            return error.errno in OUR_FAULTS
        else:
            counters.sent(plane, len(data))
        return True

    def _address(self, to: Address) -> SocketAddress | None:
        try:
            return self._spelled[to]
        except KeyError:
            ipv6 = self.sockets.listener.family == socket.AF_INET6
            address = self._spelled[to] = socket_address(to, ipv6=ipv6)
            return address

    async def receive_datagrams(self, sock: socket.socket) -> None:
        """Receive until cancelled."""
        pause_s, longest_s = RECEIVE_PAUSE_S
        while True:
            await wait_readable(sock)
            try:
                self._drain(sock)
                pause_s = RECEIVE_PAUSE_S[0]
            except OSError as error:
                self.failed("receive", error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    def _drain(self, sock: socket.socket) -> None:
        """Take the datagrams that wait, within the bounds of one wake-up. Raises OSError."""
        until = self.clock() + self.options.hold_s
        for _ in range(self.options.drain_max):
            try:
                data, ancillary, _, source = sock.recvmsg(DATAGRAM_BYTES_MAX + 1, OVERFLOW_SPACE)
            except BlockingIOError:
                return
            for _, kind, value in ancillary:
                if kind == SO_RXQ_OVFL:
                    self._overflowed(int.from_bytes(value, sys.byteorder))
            self.counters.received(Plane.DATAGRAM, len(data))
            if len(data) > DATAGRAM_BYTES_MAX:
                self.counters.drop(Drop.TOO_LONG)
            else:
                self.receive(data, plain_address(source), Plane.DATAGRAM)
            if self.clock() > until:
                return

    def _overflowed(self, total: int) -> None:
        if total > self.counters.kernel_drops:
            self.complain("overflow", event("gossip.overflow", datagrams=total))
            self.counters.kernel_drops = total

    def poke(self) -> None:
        """Wake the timer if the core wants that earlier than before. Cheap; call it as often as you like."""
        if self._asleep_until > -inf and self.peer.wake_at < self._asleep_until:
            self._asleep_until = -inf
            self._bed.unpark_all()

    async def keep_time(self) -> None:
        """Tick whenever the core wants it, until cancelled. Measures how late the event loop wakes the timer."""
        hurried = 0
        while True:
            wake_at = self.peer.wake_at
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
        """Sleep until then, for at most LOOK_S, or until `poke`."""
        self._asleep_until = wake_at
        with trio.move_on_after(min(sleep_s, LOOK_S)) as sleep:
            await self._bed.park()
        self._asleep_until = -inf
        if sleep.cancelled_caught and sleep_s <= LOOK_S:
            self.lateness_s.observe(max(0.0, self.clock() - wake_at))

    def failed(self, doing: str, error: OSError, address: Address | None = None) -> None:
        """Count an error of the kernel, and log it now and then, as a warning if this machine is to blame."""
        level = logging.WARNING if error.errno in OUR_FAULTS else logging.INFO
        kind = f"{doing} {self.counters.error(error)}"
        where = spelled(address) if address else ""
        self.complain(kind, event(f"gossip.{doing}_failed", address=where, why=error.strerror or str(error)), level)

    def complain(self, kind: str, found: LogEvent, level: int = logging.WARNING) -> bool:
        """Log this, unless a line of the same kind was logged a moment ago. Returns whether it was."""
        more = self._log_limit.more(kind, self.clock())
        if more is not None:
            found.fields["more"] = more
            log.log(level, found)
        return more is not None
