"""ZeroMQ on trio: one socket is one connection, read through its descriptor, without threads of ours.

Rule: libzmq's own reconnecting is turned off: a `Wire` lives as long as its connection, so messages of two connections
never mix, a name is resolved anew each time, and the caller decides when to try again. The descriptor becomes readable
only once, so a socket is read until nothing is left, then its state is checked, and only then is it waited for. All
sockets of a node take turns: one at a time reads, for TURN_S at most. Bounds: `Room` limits what may wait in libzmq;
more bytes end the connection, as does a part above FRAME_BYTES_MAX. Further parts than FRAMES_MAX are dropped.
"""

from __future__ import annotations

import os
import socket as sockets
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Self

import trio

from ranvier_py.core.engine_cache.sources.event_frames import PAYLOAD_BYTES_MAX
from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Room
from ranvier_py.core.errors import NoZmq

try:
    import zmq
except ImportError:  # the extra is not installed
    zmq = None  # type: ignore[assignment]

TURN_S = 0.002  # then requests have their turn
FRAMES_MAX = 8  # parts of one message that are kept; engines send two to four
FRAME_BYTES_MAX = PAYLOAD_BYTES_MAX
SOCKETS_MAX = 4096  # libzmq's limit: three for each connection, two or three connections for each rank

CONNECT_S = 5.0  # to resolve a name, and then again until the handshake is complete
SUBSCRIBED_AFTER_S = 0.1  # a publisher needs a moment to receive the subscription

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3  # a vanished machine is noticed after 25 s

GUARD_INTERVAL_S = 0.2  # between two checks of the bytes that wait in libzmq

RECEIVED = struct.Struct("=Q")
RECEIVED_AT = 128  # of tcpi_bytes_received in Linux's struct tcp_info, since 4.1

SHORT_MAX = 255  # bytes of the longest part whose length takes one byte
SHORT_HEAD, LONG_HEAD = 2, 9  # bytes before a short and a long part, in ZMTP 3

MONITOR_EVENT = struct.Struct("=HI")

CLOSED = "closed"

Took = Callable[[list[bytes]], object]


class Backlog:
    """How much of one connection waits in libzmq: the bytes that the kernel received, less those handed over here.

    libzmq bounds how many messages wait and how long a part may be, but not how many parts a message has: it would hold
    one without an end for ever. The kernel counts the bytes received (TCP_INFO, on Linux), so the owner can end such a
    connection. If there is no count, nothing is bounded here, and nothing fails. A publisher that sends topics that we
    did not subscribe to seems to lag, and loses its connection after `bytes_max` of those. Close this with its socket.
    """

    def __init__(self, connection: sockets.socket) -> None:
        self._connection = connection
        self._taken = 0

    @classmethod
    def of(cls, descriptor: int, port: int) -> Self | None:
        """Return the backlog of libzmq's connection with this descriptor and peer's port; None if it can't be had."""
        if not hasattr(sockets, "TCP_INFO"):
            return None
        try:
            connection = sockets.socket(fileno=os.dup(descriptor))
        except OSError:
            return None
        found = cls(connection)
        try:
            if connection.getpeername()[1] == port and found._received() is not None:
                return found
        except OSError:
            pass  # the connection is gone already, and the descriptor is another's
        found.close()
        return None

    def take(self, part_bytes: int) -> None:
        """Count a part that was handed over."""
        self._taken += part_bytes + (SHORT_HEAD if part_bytes <= SHORT_MAX else LONG_HEAD)

    @property
    def size_bytes(self) -> int:
        """Bytes that wait now; 0 if that is not known any more."""
        received = self._received()
        return 0 if received is None else max(0, received - self._taken)

    def close(self) -> None:
        self._connection.close()

    def _received(self) -> int | None:
        try:
            info = self._connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, RECEIVED_AT + RECEIVED.size)
            return int(RECEIVED.unpack_from(info, RECEIVED_AT)[0])
        except (OSError, struct.error):
            return None


class KvSockets:
    """A node's ZeroMQ context, and the turn that its sockets take. Make it in the process that uses it."""

    def __init__(self) -> None:
        """Raises NoZmq."""
        if zmq is None:
            raise NoZmq
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self.turn = trio.CapacityLimiter(1)

    def close(self) -> None:
        """Destroy the context. All wires must be closed by now."""
        self._context.destroy(linger=0)

    async def connect(
        self,
        where: Endpoint,
        room: Room,
        took: Took,
        *,
        topics: Sequence[str] = (),
        question: Sequence[bytes] = (),
        up: Callable[[], object] = lambda: None,
        turn: int = 0,
    ) -> str:
        """Serve one connection from beginning to end: to a publisher, subscribed to `topics` (prefixes), or without any
        to a socket that answers this `question` many times.

        Gives each message to `took`; calls `up` once the connection is established; `turn` chooses among the addresses
        of a name. Returns why the connection ended; the network raises nothing here.
        """
        try:
            with self._context.socket(zmq.SUB if topics else zmq.DEALER) as socket:
                for option, value in options_of(room.messages_max):
                    socket.setsockopt(option, value)
                for topic in topics:
                    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
                with closing(Wire(socket, where.port, room, self.turn)) as wire:
                    with trio.fail_after(CONNECT_S):
                        socket.connect(await found(where, turn))
                    if question:
                        socket.send_multipart(question, zmq.NOBLOCK)
                    return await wire.run(took, up)
        except trio.TooSlowError:
            return "its name is not found in time"
        except zmq.ZMQError as error:
            return f"{error.strerror} (ZeroMQ)"
        except OSError as error:
            return error.strerror or str(error) or "not to be connected to"


class Wire:
    """One socket with its one connection, and the monitor that reports on it."""

    def __init__(self, socket: Any, port: int, room: Room, turn: trio.CapacityLimiter) -> None:
        self.socket, self._port, self._room = socket, port, room
        self._turn = turn
        self._parts: list[bytes] = []
        self._backlog: Backlog | None = None
        self._why = ""
        self._monitor = socket.get_monitor_socket()

    def close(self) -> None:
        if self._backlog is not None:
            self._backlog.close()
        self.socket.disable_monitor()
        self._monitor.close(0)

    async def run(self, took: Took, up: Callable[[], object]) -> str:
        """Hand over each message until the connection ends. Returns why it ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, took)
            nursery.start_soon(self._guard, nursery.cancel_scope)
            self._why = await self._watch(nursery, up)
            nursery.cancel_scope.cancel()
        if self._why == CLOSED:
            await self._read(took, waits=False)
        return self._why

    async def _read(self, took: Took, *, waits: bool = True) -> None:
        """Hand over messages for ever; without `waits` those that came before the connection was lost."""
        while True:
            async with self._turn:
                more = self._take(took)
            if not (more or waits):
                return
            if not more and not self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                await trio.lowlevel.wait_readable(self.socket.getsockopt(zmq.FD))

    def _take(self, took: Took) -> bool:
        """Hand over messages for one turn. Returns whether there may be more."""
        over = time.perf_counter() + TURN_S
        while time.perf_counter() < over:
            try:
                part = self.socket.recv(zmq.NOBLOCK)
                more = self.socket.getsockopt(zmq.RCVMORE)
            except zmq.ZMQError:  # Again, or an error that the monitor reports
                return False
            if self._backlog is not None:
                self._backlog.take(len(part))
            if len(self._parts) < FRAMES_MAX:
                self._parts.append(part)
            if not more:
                parts, self._parts = self._parts, []
                took(parts)
        return True

    async def _watch(self, nursery: trio.Nursery, up: Callable[[], object]) -> str:
        """Wait until the connection ends. Returns why."""
        trouble = "no answer in time"
        with trio.move_on_after(CONNECT_S):
            trouble = await self._greet()
        if trouble:
            return trouble
        nursery.start_soon(self._up, up)
        while (await self._event())[0] not in OVER:
            pass
        return CLOSED

    async def _greet(self) -> str:
        """Wait until the connection is established. Returns what went wrong, "" if nothing."""
        while True:
            event, value = await self._event()
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return ""
            if event == zmq.Event.CONNECTED:
                self._backlog = Backlog.of(value, self._port)
            if event in GREETING_FAILED:
                return "no ZeroMQ there"
            if event in OVER:
                return "refused or unreachable"

    async def _up(self, up: Callable[[], object]) -> None:
        await trio.sleep(SUBSCRIBED_AFTER_S)
        up()

    async def _guard(self, scope: trio.CancelScope) -> None:
        """End the connection if too much waits: the peer sends faster than we read, or a message without an end."""
        while True:
            await trio.sleep(GUARD_INTERVAL_S)
            if self._backlog is not None and self._backlog.size_bytes > self._room.bytes_max:
                self._why = "too much at once"
                scope.cancel()

    async def _event(self) -> tuple[Any, int]:
        """Return the monitor's next event, and its value."""
        while True:
            try:
                head, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
                event, value = MONITOR_EVENT.unpack(head)
                return zmq.Event(event), value
            except zmq.Again:
                if not self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    await trio.lowlevel.wait_readable(self._monitor.getsockopt(zmq.FD))


if zmq is not None:
    GREETING_FAILED = (
        zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
        zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
        zmq.Event.HANDSHAKE_FAILED_AUTH,
    )
    OVER = (*GREETING_FAILED, zmq.Event.DISCONNECTED, zmq.Event.CLOSED, zmq.Event.MONITOR_STOPPED)


def options_of(messages_max: int) -> tuple[tuple[int, int], ...]:
    """Return the options of every socket. Heartbeats are off: not every publisher is libzmq, and one without answers to
    them would seem dead."""
    return (
        (zmq.LINGER, 0),
        (zmq.RECONNECT_IVL, -1),
        (zmq.RCVHWM, messages_max),
        (zmq.MAXMSGSIZE, FRAME_BYTES_MAX),
        (zmq.HANDSHAKE_IVL, round(1000 * CONNECT_S)),
        (zmq.CONNECT_TIMEOUT, round(1000 * CONNECT_S)),
        (zmq.IPV6, 1),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S),
        (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES),
    )


async def found(where: Endpoint, turn: int) -> str:
    """Return the endpoint with an address for its name: libzmq would resolve it while all its sockets wait."""
    infos = await trio.socket.getaddrinfo(where.host, where.port, type=sockets.SOCK_STREAM)
    address = infos[turn % len(infos)][4]
    return Endpoint(str(address[0]), where.port).endpoint
