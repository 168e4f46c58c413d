"""The TCP half of the gossip port, outwards: one stream for each address and plane, opened when there is a need.

    frame   4 length of the packet, little-endian | packet

Rules: `send` never waits; what has no room in the stream's queue is dropped and counted, and the core may ask before
how much room there is. A stream that can't be opened, breaks, is closed by its peer or takes nothing for `stall_s`
loses its queue, and the core hears that the peer is unreachable. It is tried again when there is something to say,
after a pause that doubles, with jitter. One stream is one task that owns its socket: whoever cancels it in the middle
of a frame ends the connection too, so a receiver never takes half a frame for the beginning of another. After a minute
of silence a stream is closed, which tells nobody anything.
Invariant: `queued_bytes` is the sum of what waits in all queues, each of which is within the bound of its plane.
Cost: for what fits the socket one send and no wait; frames that wait together leave together.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from random import Random

import trio
from trio.lowlevel import ParkingLot

from ranvier_py.core.gossip.gossip_values import FRAME_BYTES_MAX, Address, Plane
from ranvier_py.io.gossip.sockets import SYSTEM, System
from ranvier_py.io.gossip.traffic_counters import (
    FRAME_HEAD,
    OURS,
    Drop,
    NetOptions,
    Traffic,
    socket_address,
    try_option,
)
from ranvier_py.proxy.transport import PlainTransport

BATCH_BYTES = 64 * 1024  # leave together: one system call, and one copy that is cheap

IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h: the port is chosen at connect, where many streams may share it


class Stream:
    """One direction to one peer on one plane."""

    __slots__ = ("address", "attempts", "bytes_max", "idle", "plane", "queue", "queued_bytes", "sending")

    def __init__(self, address: Address, plane: Plane, bytes_max: int) -> None:
        self.address = address
        self.plane = plane
        self.bytes_max = bytes_max
        self.queue: deque[bytes] = deque()
        self.queued_bytes = 0
        self.sending = 0  # packets taken from the queue that have not left yet
        self.attempts = 0  # in a row that came to nothing
        self.idle = ParkingLot()


class Streams:
    """All streams outwards. `broke(address, plane)` hears of those that ended against our will."""

    def __init__(
        self,
        family: int,
        host: str,
        broke: Callable[[Address, Plane], None],
        traffic: Traffic,
        options: NetOptions,
        rng: Random,
        system: System = SYSTEM,
    ) -> None:
        """`host` is the address that streams come from; empty for whichever faces the peer."""
        self.family = family
        self.host = host
        self.broke = broke
        self.traffic = traffic
        self.options = options
        self.rng = rng
        self.system = system
        self.queued_bytes = 0
        self.streams: dict[tuple[Address, Plane], Stream] = {}
        self.nursery: trio.Nursery | None = None

    def __len__(self) -> int:
        return len(self.streams)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.nursery = None

    def room(self, address: Address) -> int:
        """Bytes that the bulk stream to this address takes just now."""
        stream = self.streams.get((address, Plane.BULK))
        own = self.options.bulk_queue_bytes - (stream.queued_bytes if stream else 0)
        return max(0, min(own, self.options.queued_bytes - self.queued_bytes))

    def send(self, to: Address, plane: Plane, data: bytes) -> bool:
        """False when that address can't be reached."""
        drop, traffic = self._obstacle(to, plane, data), self.traffic
        if drop is not None:
            traffic.drop(drop)
            return drop is not Drop.NO_SUCH_ADDRESS
        stream = self.streams.get((to, plane))
        if stream is None:
            stream = self._open(to, plane)
        frame = FRAME_HEAD.pack(len(data)) + data
        if stream.queued_bytes + len(frame) > stream.bytes_max:
            traffic.drop(Drop.QUEUE_FULL)
            return True
        stream.queue.append(frame)
        stream.queued_bytes += len(frame)
        self.queued_bytes += len(frame)
        stream.idle.unpark_all()
        return True

    def _obstacle(self, to: Address, plane: Plane, data: bytes) -> Drop | None:
        if not data or len(data) > FRAME_BYTES_MAX:
            return Drop.TOO_LONG
        if self.queued_bytes + len(data) > self.options.queued_bytes:
            return Drop.MEMORY
        if (to, plane) in self.streams:
            return None
        if self.nursery is None or len(self.streams) >= self.options.streams_out:
            return Drop.STREAMS
        return None if socket_address(to, self.family) else Drop.NO_SUCH_ADDRESS

    def _open(self, to: Address, plane: Plane) -> Stream:
        assert self.nursery is not None
        options = self.options
        bytes_max = options.bulk_queue_bytes if plane is Plane.BULK else options.probe_queue_bytes
        stream = self.streams[to, plane] = Stream(to, plane, bytes_max)
        self.nursery.start_soon(self._keep, stream)
        return stream

    # --- one stream -------------------------------------------------------------------------------------------------

    async def _keep(self, stream: Stream) -> None:
        """Connect, send, try again, until nobody has anything to say any more."""
        options = self.options
        try:
            while stream.queue:
                began = trio.current_time()
                try:
                    await self._converse(stream)
                    continue  # idle, unless something came to be said just now
                except OSError as error:
                    self._failed(stream, error)
                if trio.current_time() - began > options.settled_s:
                    stream.attempts = 0
                pause_s = min(options.retry_s * 2**stream.attempts, options.retry_s_max)
                stream.attempts += 1
                await trio.sleep(pause_s * self.rng.uniform(0.5, 1.0))
        except Exception:
            self.traffic.fault("stream")
        finally:
            del self.streams[stream.address, stream.plane]
            self._discard(stream)

    def _failed(self, stream: Stream, error: OSError) -> None:
        self.traffic.broken += 1
        self.traffic.error(error, "stream", stream.address)
        self._discard(stream)
        if error.errno not in OURS:
            self.broke(stream.address, stream.plane)

    def _discard(self, stream: Stream) -> None:
        self.traffic.drop(Drop.BROKEN, len(stream.queue) + stream.sending)
        stream.queue.clear()
        stream.sending = 0
        self.queued_bytes -= stream.queued_bytes
        stream.queued_bytes = 0

    async def _converse(self, stream: Stream) -> None:
        """One connection, until it is idle. Raises OSError when it ends against our will."""
        transport = await self._connect(stream.address)
        self.traffic.connects += 1
        ended: list[OSError] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, transport, nursery.cancel_scope, ended)
                try:
                    await self._write(stream, transport)
                except OSError as error:
                    ended.append(error)
                nursery.cancel_scope.cancel()
            if ended:
                raise ended[0]
            transport.close()
        finally:
            transport.abort()  # nothing, after a close

    async def _watch(self, transport: PlainTransport, scope: trio.CancelScope, ended: list[OSError]) -> None:
        """Nobody answers on this stream: whatever can be read is its end."""
        try:
            await transport.receive(1)
            ended.append(ConnectionResetError("was closed by the peer"))
        except OSError as error:
            ended.append(error)
        scope.cancel()

    async def _write(self, stream: Stream, transport: PlainTransport) -> None:
        """Returns after a time of silence. Raises OSError, TimeoutError when the peer takes nothing."""
        while True:
            if not stream.queue:
                with trio.move_on_after(self.options.idle_out_s):
                    await stream.idle.park()
                if not stream.queue:
                    return
            batch = self._take(stream)
            sent = transport.send_now((batch,))
            if sent < len(batch):
                with trio.move_on_after(self.options.stall_s) as patience:
                    await transport.send_rest(memoryview(batch)[sent:], lambda _: self._patient(patience))
                if patience.cancelled_caught:
                    raise TimeoutError("takes nothing")
            stream.queued_bytes -= len(batch)
            self.queued_bytes -= len(batch)
            self.traffic.sent(stream.plane, len(batch), stream.sending)
            stream.sending = 0

    def _patient(self, patience: trio.CancelScope) -> None:
        patience.deadline = trio.current_time() + self.options.stall_s

    def _take(self, stream: Stream) -> bytes:
        """The next frames together. They count as queued until they have left."""
        queue = stream.queue
        frames = [queue.popleft()]
        size = len(frames[0])
        while queue and size + len(queue[0]) <= BATCH_BYTES:
            frames.append(queue.popleft())
            size += len(frames[-1])
        stream.sending = len(frames)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    async def _connect(self, address: Address) -> PlainTransport:
        """Raises OSError, TimeoutError included."""
        to = socket_address(address, self.family)
        assert to is not None, "checked before the stream was opened"
        sock = self.system.socket(self.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)  # else a half-open peer wedges the stream
            try_option(sock, socket.IPPROTO_TCP, user_timeout, int(1000 * self.options.stall_s))
            if self.host:
                try_option(sock, socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
                sock.bind((self.host, 0))
            with trio.move_on_after(self.options.connect_s) as patience:
                try:
                    sock.connect(to)
                except BlockingIOError:
                    await self.system.wait_writable(sock)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    raise OSError(number, os.strerror(number))
            if patience.cancelled_caught:
                raise TimeoutError("no connection in time")
            return self.system.transport(sock)
        except BaseException:
            sock.close()
            raise
