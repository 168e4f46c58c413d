"""The TCP half of the gossip port, inwards: streams that peers opened are read, and never written to.

Rules: a frame's length is checked before the frame is read, and memory grows with what came, not with what was
announced. A stream ends when it says nothing for `idle_in_s`, when its first frame takes longer than `first_frame_s` or
any frame longer than `frame_s`, or at the first length that can't be; a packet that is none of ours costs only itself.
At the bound the stream that has been silent longest makes place: strangers can't lock peers out, who would come back.
The packets of all streams together take `hold_s` at a time, then timers and requests have their turn. Running out of
descriptors pauses accepting, and ends nothing.

The source of a packet is the peer's host and the port that its stream happens to have: nothing can be sent there.
Cost: one wait and one read for 64 KiB, some 5 us for each packet.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import trio

from ranvier_py.core.gossip.gossip_values import FRAME_BYTES_MAX, Address, Plane
from ranvier_py.core.gossip.wire.frame import HEADER, MAGIC, OVERHEAD_BYTES
from ranvier_py.io.gossip.sockets import SYSTEM, System
from ranvier_py.io.gossip.traffic_counters import FRAME_HEAD, Drop, NetOptions, Traffic, plain_address
from ranvier_py.proxy.transport import PlainTransport

ACCEPT_BATCH = 16  # taken before other tasks run again
ACCEPT_PAUSE_S = 0.1  # after accept failed, mostly for want of descriptors; trio.serve_listeners waits as long

STREAM_PLANES = {int(Plane.PROBE): Plane.PROBE, int(Plane.BULK): Plane.BULK}


class Inbound:
    """One stream that a peer opened."""

    __slots__ = ("buffer", "frames", "scope", "source", "transport", "why")

    def __init__(self, transport: PlainTransport, source: Address) -> None:
        self.transport = transport
        self.source = source
        self.scope = trio.CancelScope()
        self.buffer = bytearray()
        self.frames = 0
        self.why = ""


class Acceptor:
    """Takes the listening socket over. `receive` gets each packet and its source, and does not raise."""

    def __init__(
        self,
        listener: socket.socket,
        receive: Callable[[bytes, Address, Plane], None],
        traffic: Traffic,
        options: NetOptions,
        system: System = SYSTEM,
    ) -> None:
        self.listener = listener
        self.receive = receive
        self.traffic = traffic
        self.options = options
        self.system = system
        self.inbound: dict[int, Inbound] = {}  # the one that was silent longest first
        self.turn = trio.CapacityLimiter(1)

    def __len__(self) -> int:
        return len(self.inbound)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self.system.wait_readable(self.listener)
                try:
                    for _ in range(ACCEPT_BATCH):
                        sock, source = self.listener.accept()
                        self._admit(sock, plain_address(source), nursery)
                except BlockingIOError:
                    pass
                except OSError as error:
                    self.traffic.error(error, "accept")
                    if error.errno != errno.ECONNABORTED:  # that one is gone already
                        await trio.sleep(ACCEPT_PAUSE_S)

    def _admit(self, sock: socket.socket, source: Address, nursery: trio.Nursery) -> None:
        self.traffic.accepted += 1
        if len(self.inbound) >= self.options.streams_in:
            silent = self.inbound.pop(next(iter(self.inbound)))
            silent.why = "displaced"
            silent.scope.cancel()
        inbound = Inbound(self.system.transport(sock), source)
        self.inbound[id(inbound)] = inbound
        nursery.start_soon(self._read, inbound)

    async def _read(self, inbound: Inbound) -> None:
        inbound.scope.deadline = trio.current_time() + self.options.first_frame_s
        try:
            with inbound.scope:
                while not inbound.why:
                    data = await inbound.transport.receive()
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
            self.traffic.fault("reading a stream")
        finally:
            self.inbound.pop(id(inbound), None)
            self.traffic.close(inbound.why or "ended")
            inbound.transport.close()

    async def _take_in(self, inbound: Inbound, data: bytes) -> None:
        """Hand over the frames that are whole now, one stream at a time and `hold_s` at a stretch."""
        frames = inbound.frames
        fresh = not inbound.buffer
        inbound.buffer += data
        while not inbound.why and self._whole(inbound):
            async with self.turn:
                self._hand_over(inbound)
        if inbound.frames > frames and id(inbound) in self.inbound:
            self.inbound[id(inbound)] = self.inbound.pop(id(inbound))
        if not inbound.frames:
            return  # the first one has its deadline
        if not inbound.buffer:
            inbound.scope.deadline = trio.current_time() + self.options.idle_in_s
        elif fresh or inbound.frames > frames:
            inbound.scope.deadline = trio.current_time() + self.options.frame_s

    def _whole(self, inbound: Inbound, start: int = 0) -> int:
        """Where the frame that begins at `start` ends, if it is whole; else 0. A bad length ends the stream."""
        buffer = inbound.buffer
        if len(buffer) - start < FRAME_HEAD.size:
            return 0
        (length,) = FRAME_HEAD.unpack_from(buffer, start)
        if not OVERHEAD_BYTES <= length <= FRAME_BYTES_MAX:
            inbound.why = "malformed"
            return 0
        end: int = start + FRAME_HEAD.size + length
        return end if end <= len(buffer) else 0

    def _hand_over(self, inbound: Inbound) -> None:
        clock = self.traffic.clock
        until = clock() + self.options.hold_s
        start = 0
        while end := self._whole(inbound, start):
            packet = bytes(memoryview(inbound.buffer)[start + FRAME_HEAD.size : end])
            start = end
            inbound.frames += 1
            self._sort(packet, inbound.source)
            if clock() > until:
                break
        del inbound.buffer[:start]

    def _sort(self, packet: bytes, source: Address) -> None:
        """The header says which plane a stream serves; the seal holds it to that."""
        magic, _, _, _, number, _ = HEADER.unpack_from(packet)
        plane = STREAM_PLANES.get(number)
        if magic != MAGIC or plane is None:
            self.traffic.drop(Drop.FOREIGN)
            return
        self.traffic.received(plane, FRAME_HEAD.size + len(packet))
        self.receive(packet, source, plane)
