"""A relay in user space for every link between nodes: cuts, loss, delay and the like, where the kernel does none of it.

Each node hears gossip at its *real* address and advertises its *shown* one, where the relay listens. A datagram of node
a to the shown address of b leaves the relay from the shown address of a to the real one of b: both sides see only shown
addresses, as if they were each other's. Streams likewise; who opened one is found by its source address, or by the
system's table of sockets when several nodes share one.

Conditions hold for one direction of one link. A cut stream is silent and stays open; what was under way arrives after
the heal, as TCP would do it. Bounds: delayed datagrams, streams; what is above a bound is dropped and counted.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import trio

from cluster.processes.packet_record import Deframer, Recorder

Address = tuple[str, int]

DELAYED_MAX = 20_000
STREAMS_MAX = 1_000
CHUNK_BYTES = 65_536
STREAM_CHUNKS_MAX = 64
"""Chunks of a delayed stream under way; then its sender waits, as for a full window."""

RESEND_S = 0.2
"""What a lost segment costs a stream: Linux waits this long at least before it sends again."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What happens on one direction of a link. Shares are 0 … 1; the first four of them concern datagrams alone."""

    cut: frozenset[str] = frozenset()  # planes that are silent: udp, tcp
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    reorder_s: float = 0.05
    delay_s: float = 0.0
    jitter_s: float = 0.0
    mtu: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """Where a node hears gossip, and what it tells the others."""

    real: Address
    shown: Address


class Links:
    """The condition of every direction. Streams that wait for a heal wait for `changed`."""

    def __init__(self) -> None:
        self.conditions: dict[tuple[int, int], Condition] = {}
        self.changed = trio.Event()

    def of(self, sender: int, receiver: int) -> Condition:
        return self.conditions.get((sender, receiver), Condition())

    def set(self, sender: int, receiver: int, condition: Condition | None) -> None:
        if condition is None or condition == Condition():
            self.conditions.pop((sender, receiver), None)
        else:
            self.conditions[sender, receiver] = condition
        self.changed.set()
        self.changed = trio.Event()

    async def wait_open(self, sender: int, receiver: int, plane: str) -> Condition:
        while plane in (condition := self.of(sender, receiver)).cut:
            await self.changed.wait()
        return condition


class Relay:
    """All links of one cluster. `processes` says which processes are nodes just now: number of a node by process id."""

    def __init__(
        self,
        ends: Sequence[End],
        links: Links,
        rng: Random,
        processes: Callable[[], Mapping[int, int]] = dict,
        recorder: Recorder | None = None,
    ) -> None:
        self.ends = ends
        self.links = links
        self.rng = rng
        self.processes = processes
        self.recorder = recorder
        self.by_real = {end.real: number for number, end in enumerate(ends)}
        self.by_ip = {end.real[0]: number for number, end in enumerate(ends)}
        self.sockets: list[trio.socket.SocketType] = []
        self.delayed = 0
        self.streams = 0
        self.counts: dict[str, int] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry until cancelled. Started when every shown address is there. Raises OSError."""
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

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- datagrams --------------------------------------------------------------------------------------------------

    async def carry_datagrams(self, receiver: int, nursery: trio.Nursery) -> None:
        """Everything that is sent to one node."""
        while True:
            try:
                data, source = await self.sockets[receiver].recvfrom(CHUNK_BYTES)
            except ConnectionError:  # the node's socket is closed; the system tells us here
                continue
            sender = self.by_real.get(source)
            if sender is None:
                self.count("udp from strangers")
                continue
            for copy, delay_s in self.fate(sender, receiver, data):
                if self.recorder is not None:
                    self.recorder.note(sender, receiver, "udp", copy)
                if delay_s <= 0:
                    await self.send(sender, receiver, copy)
                elif self.delayed < DELAYED_MAX:
                    self.delayed += 1
                    nursery.start_soon(self.send_later, sender, receiver, copy, delay_s)
                else:
                    self.count("udp dropped, too many delayed")

    def fate(self, sender: int, receiver: int, data: bytes) -> list[tuple[bytes, float]]:
        """What of this datagram arrives, and how much later."""
        condition = self.links.of(sender, receiver)
        if "udp" in condition.cut or (condition.mtu and len(data) > condition.mtu):
            self.count("udp cut")
            return []
        if self.rng.random() < condition.loss:
            self.count("udp lost")
            return []
        copies = 2 if self.rng.random() < condition.duplicate else 1
        return [(self.flipped(data, condition), self.delay(condition, datagram=True)) for _ in range(copies)]

    def flipped(self, data: bytes, condition: Condition) -> bytes:
        if not data or self.rng.random() >= condition.corrupt:
            return data
        self.count("udp corrupted")
        changed = bytearray(data)
        changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def delay(self, condition: Condition, *, datagram: bool) -> float:
        delay_s = condition.delay_s
        if condition.jitter_s:
            delay_s += self.rng.expovariate(1 / condition.jitter_s)
        if datagram:
            return delay_s + (condition.reorder_s if self.rng.random() < condition.reorder else 0.0)
        return delay_s + (RESEND_S if self.rng.random() < condition.loss else 0.0)

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
        await self.links.wait_open(sender, receiver, "tcp")
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
        """Which node opened this stream."""
        try:
            peer, own = stream.socket.getpeername(), stream.socket.getsockname()
        except OSError:
            return None
        if peer[0] in self.by_ip and len(self.by_ip) == len(self.ends):
            return self.by_ip[peer[0]]
        inode = socket_inode(peer, own)
        nodes = self.processes()
        return next((number for pid, number in nodes.items() if inode and holds(pid, inode)), None)

    async def pump(
        self, source: trio.SocketStream, sink: trio.SocketStream, way: tuple[int, int], scope: trio.CancelScope
    ) -> None:
        """One direction of one stream, in order, each chunk as late as the condition says."""
        sending, receiving = trio.open_memory_channel[tuple[float, bytes]](STREAM_CHUNKS_MAX)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read_stream, source, sending, way)
            nursery.start_soon(self.write_stream, receiving, sink, way, scope)

    async def read_stream(
        self, source: trio.SocketStream, queue: trio.MemorySendChannel[tuple[float, bytes]], way: tuple[int, int]
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
                        self.recorder.note(*way, "tcp", frame)
                due_s = max(due_s, trio.current_time() + self.delay(self.links.of(*way), datagram=False))
                await queue.send((due_s, data))

    async def write_stream(
        self,
        queue: trio.MemoryReceiveChannel[tuple[float, bytes]],
        sink: trio.SocketStream,
        way: tuple[int, int],
        scope: trio.CancelScope,
    ) -> None:
        try:
            async for due_s, data in queue:
                await trio.sleep_until(due_s)
                await self.links.wait_open(*way, "tcp")
                await sink.send_all(data)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            scope.cancel()  # the other side is gone: so is the whole stream


def socket_inode(local: Address, remote: Address) -> str | None:
    """Inode of the TCP socket with these ends, by the kernel's table (proc_pid_net(5)). Linux, IPv4."""
    wanted = [hexadecimal(local), hexadecimal(remote)]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1:3] == wanted:
            return words[9]
    return None


def hexadecimal(address: Address) -> str:
    """As the kernel's table writes it: the bytes of the address as a number of this machine."""
    return f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"


def holds(pid: int, inode: str) -> bool:
    """Whether this process has the socket open."""
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process ends just now
        return False
    for entry in entries:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(entry) == f"socket:[{inode}]":
                return True
    return False
