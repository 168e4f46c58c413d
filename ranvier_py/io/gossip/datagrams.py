"""The UDP half of the gossip port: one socket for all peers.

A wake-up takes what is there, at most `drain_max` datagrams or `hold_s`, then timers and requests have their turn.
Sending never waits: what the kernel does not take is dropped and counted, since a late probe is worth nothing.

Rules: no error ends the loop. One of receiving is counted and told now and then (chitchat#145: its server returned, and
all gossip stopped); one of sending says either something about this machine, or that the peer can't be reached, and
then the core hears it (memberlist#242: an unreachable peer was kept alive for ever).
Cost: about 4 us of ours for each datagram, each way, and the kernel's.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

import trio

from ranvier_py.core.gossip.gossip_values import DATAGRAM_BYTES_MAX, Address, Plane
from ranvier_py.io.gossip.sockets import SYSTEM, System
from ranvier_py.io.gossip.traffic_counters import (
    OURS,
    Drop,
    NetOptions,
    SocketAddress,
    Traffic,
    plain_address,
    socket_address,
    try_option,
)

SO_RXQ_OVFL = 40  # asm-generic/socket.h: with a datagram, how many the kernel has dropped on this socket
OVERFLOW_SPACE = socket.CMSG_SPACE(4) if sys.platform == "linux" else 0

PAUSE_S = 0.01  # after an error of receiving; doubles up to
PAUSE_S_MAX = 1.0

ROUTES_MAX = 4096  # addresses whose spelling for the socket is remembered


class Datagrams:
    """Takes the bound socket over. `receive` gets each packet and its source, and does not raise."""

    def __init__(
        self,
        sock: socket.socket,
        receive: Callable[[bytes, Address, Plane], None],
        traffic: Traffic,
        options: NetOptions,
        system: System = SYSTEM,
    ) -> None:
        self.sock = sock
        self.receive = receive
        self.traffic = traffic
        self.options = options
        self.system = system
        self._routes: dict[Address, SocketAddress | None] = {}
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, options.socket_bytes)
        try_option(sock, socket.SOL_SOCKET, SO_RXQ_OVFL if OVERFLOW_SPACE else None, 1)
        self.buffer_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def send(self, to: Address, data: bytes) -> bool:
        """False when that address can't be reached."""
        traffic = self.traffic
        if len(data) > DATAGRAM_BYTES_MAX:
            traffic.drop(Drop.TOO_LONG)
            return True
        route = self._route(to)
        if route is None:
            traffic.drop(Drop.NO_SUCH_ADDRESS)
            return False
        try:
            self.sock.sendto(data, route)
        except BlockingIOError:
            traffic.drop(Drop.SOCKET_FULL)
        except OSError as error:
            traffic.drop(Drop.ERROR)
            traffic.error(error, "send", to)
            return error.errno in OURS
        else:
            traffic.sent(Plane.DATAGRAM, len(data))
        return True

    def _route(self, to: Address) -> SocketAddress | None:
        try:
            return self._routes[to]
        except KeyError:
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            route = self._routes[to] = socket_address(to, self.sock.family)
            return route

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = PAUSE_S
        while True:
            await self.system.wait_readable(self.sock)
            try:
                self._drain()
                pause_s = PAUSE_S
            except OSError as error:
                self.traffic.error(error, "receive")
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _drain(self) -> None:
        """Take what is there. Raises OSError."""
        clock, options = self.traffic.clock, self.options
        until = clock() + options.hold_s
        for _ in range(options.drain_max):
            try:
                data, ancillary, _, source = self.sock.recvmsg(DATAGRAM_BYTES_MAX + 1, OVERFLOW_SPACE)
            except BlockingIOError:
                return
            for _, kind, value in ancillary:
                if kind == SO_RXQ_OVFL:
                    self._lost(int.from_bytes(value, sys.byteorder))
            self.traffic.received(Plane.DATAGRAM, len(data))
            if len(data) > DATAGRAM_BYTES_MAX:
                self.traffic.drop(Drop.TOO_LONG)
            else:
                self.receive(data, plain_address(source), Plane.DATAGRAM)
            if clock() > until:
                return

    def _lost(self, total: int) -> None:
        if total > self.traffic.kernel_drops:
            self.traffic.complain("overflow", f"gossip.overflow {total} datagrams found no room in the socket so far")
            self.traffic.kernel_drops = total
