"""A relay in user space for every link between nodes: cuts, loss, delay and the like where the kernel offers none.

Each node listens for gossip at its *real* address and advertises its *shown* address, at which the relay listens. When
node a sends a datagram to b's shown address, the relay sends it from a's shown to b's real address. Streams likewise.

A cut stream is silent but stays open; data in transit arrives after the heal, as with TCP. Bounds: DELAYED_MAX delayed
datagrams, which are dropped and counted beyond it, and STREAMS_MAX streams, which are refused and counted beyond it.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import trio

from cluster.network.links import Link, Links
from cluster.processes.packet_record import Deframer, Recorder
from ranvier_py.core.mesh.mesh_values import Plane

Address = tuple[str, int]

DELAYED_MAX = 20_000
STREAMS_MAX = 1_000
CHUNK_BYTES = 65_536
STREAM_CHUNKS_MAX = 64
"""Chunks of a delayed stream in transit; beyond, its sender waits, as for a full window."""


@dataclass(frozen=True, slots=True)
class End:
    """Where a node receives gossip, and the address that it advertises."""

    real: Address
    shown: Address


class Relay:
    """Carries all links of one cluster. Each node has its own IP."""

    def __init__(
        self,
        ends: Sequence[End],
        links: Links,
        rng: Random,
        recorder: Recorder | None = None,
    ) -> None:
        self.ends = ends
        self.links = links
        self.changed = trio.Event()  # wakes streams that wait for a heal
        self.rng = rng
        self.recorder = recorder
        self.by_real = {end.real: number for number, end in enumerate(ends)}
        self.by_ip = {end.real[0]: number for number, end in enumerate(ends)}
        self.sockets: list[trio.socket.SocketType] = []
        self.delayed = 0
        self.streams = 0
        self.counts: dict[str, int] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry until cancelled; started when every shown address is bound. Raises OSError."""
        async with trio.open_nursery() as nursery:
            listeners: list[tuple[int, trio.SocketListener]] = []
            try:
                for number, end in enumerate(self.ends):
                    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    self.sockets.append(sock)
                    await sock.bind(end.shown)
                    (listener,) = await trio.open_tcp_listeners(end.shown[1], host=end.shown[0])
                    listeners.append((number, listener))
                for number, listener in listeners:
                    nursery.start_soon(self.carry_datagrams, number, nursery)
                    nursery.start_soon(self.accept, number, listener)
                task_status.started()
                await trio.sleep_forever()
            finally:
                for sock in self.sockets:
                    sock.close()

    def wake(self) -> None:
        """Wake waiting streams after the links have changed."""
        self.changed.set()
        self.changed = trio.Event()

    async def wait_open(self, sender: int, receiver: int) -> Link:
        while (link := self.links.link(sender, receiver, Plane.BULK)).cut:
            await self.changed.wait()
        return link

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- datagrams --------------------------------------------------------------------------------------------------

    async def carry_datagrams(self, receiver: int, nursery: trio.Nursery) -> None:
        """Carry all datagrams that are sent to one node."""
        while True:
            try:
                data, source = await self.sockets[receiver].recvfrom(CHUNK_BYTES)
            except ConnectionError:  # a node's socket was closed, which the system reports here
                continue
            sender = self.by_real.get(source)
            if sender is None:
                self.count("udp from strangers")
                continue
            what, copies = self.links.link(sender, receiver, Plane.DATAGRAM).draw_copies(data, self.rng)
            if what:
                self.count(f"udp {what}")
            for delay_s, copy in copies:
                if self.recorder is not None:
                    self.recorder.note(sender, receiver, "udp", copy)
                if delay_s <= 0:
                    await self.send(sender, receiver, copy)
                elif self.delayed < DELAYED_MAX:
                    self.delayed += 1
                    nursery.start_soon(self.send_later, sender, receiver, copy, delay_s)
                else:
                    self.count("udp dropped, too many delayed")

    async def send_later(self, sender: int, receiver: int, data: bytes, delay_s: float) -> None:
        try:
            await trio.sleep(delay_s)
            await self.send(sender, receiver, data)
        finally:
            self.delayed -= 1

    async def send(self, sender: int, receiver: int, data: bytes) -> None:
        try:
            await self.sockets[sender].sendto(data, self.ends[receiver].real)
        except OSError:
            self.count("udp unsent")
        else:
            self.count("udp carried")

    # --- streams ----------------------------------------------------------------------------------------------------

    async def accept(self, receiver: int, listener: trio.SocketListener) -> None:
        async def handle(stream: trio.SocketStream) -> None:
            if self.streams >= STREAMS_MAX:
                self.count("tcp refused, too many")
                await trio.aclose_forcefully(stream)
                return
            self.streams += 1
            try:
                await self.carry_stream(stream, receiver)
            finally:
                self.streams -= 1
                stream.socket.close()

        await trio.serve_listeners(handle, [listener])

    async def carry_stream(self, stream: trio.SocketStream, receiver: int) -> None:
        sender = self.opener_of(stream)
        if sender is None:
            self.count("tcp from strangers")
            return
        await self.wait_open(sender, receiver)
        try:
            onward = await trio.open_tcp_stream(*self.ends[receiver].real, local_address=self.ends[sender].shown[0])
        except OSError:
            self.count("tcp refused")
            return
        self.count("tcp carried")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.pump, stream, onward, (sender, receiver), nursery.cancel_scope)
                nursery.start_soon(self.pump, onward, stream, (receiver, sender), nursery.cancel_scope)
        finally:
            onward.socket.close()

    def opener_of(self, stream: trio.SocketStream) -> int | None:
        """Return the number of the node that opened this stream."""
        try:
            return self.by_ip.get(stream.socket.getpeername()[0])
        except OSError:
            return None

    async def pump(
        self, source: trio.SocketStream, sink: trio.SocketStream, pair: tuple[int, int], scope: trio.CancelScope
    ) -> None:
        """Carry one direction of a stream in order, and delay each chunk by the link's conditions."""
        sending, receiving = trio.open_memory_channel[tuple[float, bytes]](STREAM_CHUNKS_MAX)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read_stream, source, sending, pair)
            nursery.start_soon(self.write_stream, receiving, sink, pair, scope)

    async def read_stream(
        self, source: trio.SocketStream, queue: trio.MemorySendChannel[tuple[float, bytes]], pair: tuple[int, int]
    ) -> None:
        deframer, due_s = Deframer(), -math.inf
        async with queue:
            while True:
                try:
                    data = await source.receive_some(CHUNK_BYTES)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    data = b""
                if not data:
                    return
                if self.recorder is not None:
                    for frame in deframer.feed(data):
                        self.recorder.note(*pair, "tcp", frame)
                due_s = max(
                    due_s, trio.current_time() + self.links.link(*pair, Plane.BULK).draw_stream_delay_s(self.rng)
                )
                await queue.send((due_s, data))

    async def write_stream(
        self,
        queue: trio.MemoryReceiveChannel[tuple[float, bytes]],
        sink: trio.SocketStream,
        pair: tuple[int, int],
        scope: trio.CancelScope,
    ) -> None:
        try:
            async for due_s, data in queue:
                await trio.sleep_until(due_s)
                await self.wait_open(*pair)
                await sink.send_all(data)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            scope.cancel()  # the other side is gone, so the whole stream ends
