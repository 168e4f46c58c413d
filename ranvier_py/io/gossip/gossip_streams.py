"""The TCP half of the gossip port: outward streams, one for each address and plane, and those that peers opened.

    frame   4 length of the packet, little-endian | packet

Rule: `send` never waits; a packet without room in its stream's queue is dropped and counted. Inward streams are only
read: a frame's length is checked before the frame is read, and memory grows with the bytes that came. Bounds: each
plane's queue, `streams_in`, and the seconds of each wait.
Invariant: `queued_bytes` sums the bytes in all queues, each within its plane's bound (test_gossip_streams.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from random import Random
from typing import Protocol

import trio
from trio.lowlevel import ParkingLot, wait_readable, wait_writable

from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX, Address, Plane
from ranvier_py.core.mesh.port_traffic import Drop, PortCounters, PortOptions, plain_address, socket_address
from ranvier_py.core.mesh.wire.frame import HEADER, MAGIC, OVERHEAD_BYTES, STREAM_HEAD
from ranvier_py.core.pauses import doubled
from ranvier_py.supervision import Faults

BATCH_BYTES = 64 * 1024  # frames that leave together: one system call, and one copy that is cheap
RECEIVE_BYTES = 64 * 1024
ACCEPT_BATCH = 16  # connections accepted before other tasks run again
ACCEPT_PAUSE_S = 0.1  # after accept failed, mostly for lack of descriptors; trio.serve_listeners waits as long

IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h: connect chooses the port, so that many streams may share it
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST

STREAM_PLANES = {int(plane): plane for plane in Plane if plane is not Plane.DATAGRAM}


class Port(Protocol):
    """What streams report to: the gossip port, which the node passes in. Its methods raise nothing."""

    counters: PortCounters
    options: PortOptions
    faults: Faults

    def receive(self, data: bytes, source: Address, plane: Plane) -> None: ...
    def broke(self, address: Address, plane: Plane, error: OSError) -> None: ...
    def failed(self, doing: str, error: OSError) -> None: ...
    def clock(self) -> float: ...


class PeerStream:
    """One outward stream: its queue, and the state of its connection."""

    __slots__ = ("address", "attempts", "bytes_max", "idle", "plane", "queue", "queued_bytes", "sending")

    def __init__(self, address: Address, plane: Plane, bytes_max: int) -> None:
        self.address, self.plane, self.bytes_max = address, plane, bytes_max
        self.queue: deque[bytes] = deque()
        self.queued_bytes = 0
        self.sending = 0  # packets taken from the queue that the kernel has not taken completely
        self.attempts = 0  # failed ones in a row
        self.idle = ParkingLot()

    def take(self) -> bytes:
        """Take the next frames together. They count as queued until they are sent."""
        frames = [self.queue.popleft()]
        size = len(frames[0])
        while self.queue and size + len(self.queue[0]) <= BATCH_BYTES:
            frames.append(self.queue.popleft())
            size += len(frames[-1])
        self.sending = len(frames)
        return frames[0] if len(frames) == 1 else b"".join(frames)


class OutboundStreams:
    """All outward streams. One that can't be opened, breaks, is closed by its peer or takes nothing for `stall_s` loses
    its queue and is reported to the port; it is opened again for the next packet, after a pause that doubles. One task
    owns a socket: cancelled within a frame it resets the connection, so that no receiver takes half a frame for the
    next one."""

    def __init__(self, family: int, host: str, port: Port, rng: Random) -> None:
        """`host` is the local address of streams; "" for whichever faces the peer."""
        self.family, self.host, self.port = family, host, port
        self.counters = port.counters
        self.options = port.options
        self.rng = rng
        self.streams: dict[tuple[Address, Plane], PeerStream] = {}
        self.nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the streams' tasks until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.nursery = None

    def send(self, to: Address, plane: Plane, data: bytes) -> bool:
        """Queue a packet, or drop and count it. Returns False if that address can't be reached."""
        drop = self._obstacle(to, plane, data)
        if drop is not None:
            self.counters.drop(drop)
            return drop is not Drop.NO_SUCH_ADDRESS
        stream = self.streams.get((to, plane))
        if stream is None:
            stream = self._open(to, plane)
        frame = STREAM_HEAD.pack(len(data)) + data
        if stream.queued_bytes + len(frame) > stream.bytes_max:
            self.counters.drop(Drop.QUEUE_FULL)
            return True
        stream.queue.append(frame)
        self._queued(stream, len(frame))
        stream.idle.unpark_all()
        return True

    def _queued(self, stream: PeerStream, size: int) -> None:
        stream.queued_bytes += size
        self.counters.queued_bytes += size

    def _obstacle(self, to: Address, plane: Plane, data: bytes) -> Drop | None:
        if not data or len(data) > FRAME_BYTES_MAX:
            return Drop.TOO_LONG
        if self.counters.queued_bytes + len(data) > self.options.queued_bytes:
            return Drop.MEMORY
        if (to, plane) in self.streams:
            return None
        if self.nursery is None or len(self.streams) >= self.options.streams_out:
            return Drop.STREAMS
        return None if socket_address(to, ipv6=self.family == socket.AF_INET6) else Drop.NO_SUCH_ADDRESS

    def _open(self, to: Address, plane: Plane) -> PeerStream:
        assert self.nursery is not None
        options = self.options
        bytes_max = options.probe_queue_bytes if plane is Plane.PROBE else options.bulk_queue_bytes
        stream = self.streams[to, plane] = PeerStream(to, plane, bytes_max)
        self.counters.streams_out = len(self.streams)
        self.nursery.start_soon(self._keep, stream)
        return stream

    async def _keep(self, stream: PeerStream) -> None:
        try:
            await self.port.faults.keep("gossip_stream", self._serve, stream)
        finally:
            del self.streams[stream.address, stream.plane]
            self.counters.streams_out = len(self.streams)

    async def _serve(self, stream: PeerStream) -> None:
        """Connect, send and try again, until nothing is left to send."""
        options = self.options
        try:
            while stream.queue:
                began = trio.current_time()
                try:
                    await self._converse(stream)
                    continue  # idle, unless a packet was queued just now
                except OSError as error:
                    self.counters.broken += 1
                    self._discard(stream)
                    self.port.broke(stream.address, stream.plane, error)
                if trio.current_time() - began > options.settled_s:
                    stream.attempts = 0
                pause_s = doubled(options.retry_s, stream.attempts, options.retry_s_max)
                stream.attempts += 1
                await trio.sleep(pause_s * self.rng.uniform(0.5, 1.0))
        finally:
            self._discard(stream)

    def _discard(self, stream: PeerStream) -> None:
        self.counters.drop(Drop.BROKEN, len(stream.queue) + stream.sending)
        stream.queue.clear()
        stream.sending = 0
        self._queued(stream, -stream.queued_bytes)

    async def _converse(self, stream: PeerStream) -> None:
        """Serve one connection until it is idle. Raises OSError if it ends in any other manner."""
        sock = await self.connect(stream.address)
        self.counters.connects += 1
        ended: list[OSError] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, sock, nursery.cancel_scope, ended)
                try:
                    await self._write(stream, sock)
                except OSError as error:
                    ended.append(error)
                nursery.cancel_scope.cancel()
            if ended:
                raise ended[0]
            sock.close()
        finally:
            if sock.fileno() >= 0:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.close()

    async def _write(self, stream: PeerStream, sock: socket.socket) -> None:
        """Send until the queue stays empty for `idle_out_s`. Raises OSError; TimeoutError if the peer takes nothing."""
        while True:
            if not stream.queue:
                with trio.move_on_after(self.options.idle_out_s):
                    await stream.idle.park()
                if not stream.queue:
                    return
            batch = stream.take()
            rest = memoryview(batch)[send_now(sock, batch) :]
            while rest:
                with trio.move_on_after(self.options.stall_s) as patience:
                    await wait_writable(sock)
                if patience.cancelled_caught:
                    raise TimeoutError("takes nothing")
                rest = rest[send_now(sock, rest) :]
            self._queued(stream, -len(batch))
            self.counters.sent(stream.plane, len(batch), stream.sending)
            stream.sending = 0

    async def connect(self, address: Address) -> socket.socket:
        """Connect. Raises OSError, which includes TimeoutError."""
        to = socket_address(address, ipv6=self.family == socket.AF_INET6)
        assert to is not None, "checked before the stream was opened"
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError, AttributeError):  # else a half-open connection blocks the stream
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.options.stall_s))
            if self.host:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
                sock.bind((self.host, 0))
            with trio.move_on_after(self.options.connect_s) as patience:
                try:
                    sock.connect(to)
                except BlockingIOError:
                    await wait_writable(sock)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    raise OSError(number, os.strerror(number))
            if patience.cancelled_caught:
                raise TimeoutError("no connection in time")
        except BaseException:
            sock.close()
            raise
        return sock


def send_now(sock: socket.socket, data: bytes | memoryview) -> int:
    """Send what the kernel takes now. Returns how many bytes it took. Raises OSError."""
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0


async def watch(sock: socket.socket, scope: trio.CancelScope, ended: list[OSError]) -> None:
    """Wait until the peer ends the stream: peers send nothing on it, so anything that can be read is the end."""
    try:
        await read(sock, 1)
        ended.append(ConnectionResetError("was closed by the peer"))
    except OSError as error:
        ended.append(error)
    scope.cancel()


async def read(sock: socket.socket, bytes_max: int = RECEIVE_BYTES) -> bytes:
    """Return the next bytes; b"" at the end. Raises OSError."""
    while True:
        await wait_readable(sock)
        with contextlib.suppress(BlockingIOError):  # the kernel dropped a bad segment after waking us
            return sock.recv(bytes_max)


class Inbound:
    """One stream that a peer opened."""

    __slots__ = ("buffer", "frames", "scope", "sock", "source", "why")

    def __init__(self, sock: socket.socket, source: Address) -> None:
        sock.setblocking(False)
        self.sock, self.source = sock, source
        self.scope = trio.CancelScope()
        self.buffer = bytearray()
        self.frames = 0
        self.why = ""  # the reason why it ended

    def whole(self, start: int = 0) -> int:
        """Return where the frame at `start` ends, or 0 if it is not complete. An impossible length ends the stream."""
        buffer = self.buffer
        if len(buffer) - start < STREAM_HEAD.size:
            return 0
        (length,) = STREAM_HEAD.unpack_from(buffer, start)
        if not OVERHEAD_BYTES <= length <= FRAME_BYTES_MAX:
            self.why = "malformed"
            return 0
        end: int = start + STREAM_HEAD.size + length
        return end if end <= len(buffer) else 0


class InboundStreams:
    """Accepts and reads the streams of peers. Owns the listening socket. A stream ends if it is silent for `idle_in_s`,
    if its first frame takes longer than `first_frame_s` or another one than `frame_s`, and at an impossible length; a
    foreign packet is only dropped. At `streams_in` a new stream displaces the one silent longest, so that strangers
    can't lock peers out, which would come back. A packet's source is the peer's host, with the port of its end of the
    stream."""

    def __init__(self, listener: socket.socket, port: Port) -> None:
        self.listener, self.port = listener, port
        self.counters = port.counters
        self.options = port.options
        self.inbound: dict[int, Inbound] = {}  # the one that has been silent longest first
        self.one_at_a_time = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Run until cancelled."""
        async with trio.open_nursery() as nursery:
            await self.port.faults.keep("gossip_accept", self._accept, nursery)

    async def _accept(self, nursery: trio.Nursery) -> None:
        while True:
            await wait_readable(self.listener)
            try:
                for _ in range(ACCEPT_BATCH):
                    sock, source = self.listener.accept()
                    self._admit(Inbound(sock, plain_address(source)), nursery)
            except BlockingIOError:
                pass
            except OSError as error:
                self.port.failed("accept", error)
                if error.errno != errno.ECONNABORTED:  # that connection is gone already
                    await trio.sleep(ACCEPT_PAUSE_S)

    def _admit(self, inbound: Inbound, nursery: trio.Nursery) -> None:
        self.counters.accepted += 1
        if len(self.inbound) >= self.options.streams_in:
            silent = self.inbound.pop(next(iter(self.inbound)))
            silent.why = "displaced"
            silent.scope.cancel()
        self.inbound[id(inbound)] = inbound
        self.counters.streams_in = len(self.inbound)
        nursery.start_soon(self.port.faults.once, "gossip_inbound", self._read, inbound)

    async def _read(self, inbound: Inbound) -> None:
        inbound.scope.deadline = trio.current_time() + self.options.first_frame_s
        try:
            with inbound.scope:
                while not inbound.why:
                    data = await read(inbound.sock)
                    if data:
                        await self._take_in(inbound, data)
                    else:
                        inbound.why = "peer"
            if inbound.scope.cancelled_caught and not inbound.why:
                inbound.why = "slow" if inbound.buffer or not inbound.frames else "idle"
        except OSError:
            inbound.why = "error"
        except Exception:
            inbound.why = "error"
            raise
        finally:
            self.inbound.pop(id(inbound), None)
            self.counters.streams_in = len(self.inbound)
            self.counters.close(inbound.why or "ended")
            inbound.sock.close()

    async def _take_in(self, inbound: Inbound, data: bytes) -> None:
        """Hand over the complete frames, one stream at a time and for `hold_s` at a stretch; set the next deadline."""
        frames = inbound.frames
        fresh = not inbound.buffer
        inbound.buffer += data
        while not inbound.why and inbound.whole():
            async with self.one_at_a_time:
                self._hand_over(inbound)
        if inbound.frames > frames and id(inbound) in self.inbound:
            self.inbound[id(inbound)] = self.inbound.pop(id(inbound))
        if not inbound.frames:
            return  # the deadline of the first frame stays
        if not inbound.buffer:
            inbound.scope.deadline = trio.current_time() + self.options.idle_in_s
        elif fresh or inbound.frames > frames:
            inbound.scope.deadline = trio.current_time() + self.options.frame_s

    def _hand_over(self, inbound: Inbound) -> None:
        until = self.port.clock() + self.options.hold_s
        start = 0
        while end := inbound.whole(start):
            packet = bytes(memoryview(inbound.buffer)[start + STREAM_HEAD.size : end])
            start = end
            inbound.frames += 1
            self._sort(packet, inbound.source)
            if self.port.clock() > until:
                break
        del inbound.buffer[:start]

    def _sort(self, packet: bytes, source: Address) -> None:
        """Read from the header which plane the packet is for; opening it verifies that."""
        magic, _, _, _, number, _ = HEADER.unpack_from(packet)
        plane = STREAM_PLANES.get(number)
        if magic != MAGIC or plane is None:
            self.counters.drop(Drop.FOREIGN)
            return
        self.counters.received(plane, STREAM_HEAD.size + len(packet))
        self.port.receive(packet, source, plane)
