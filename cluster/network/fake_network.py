"""A fake network in virtual time: pure, seeded, for the simulator and for tests of everything that uses a network.

    time = VirtualTime()
    net = Network(time, Random(7))                     # a third argument for the links' conditions, e.g. DATA_CENTRE
    net.attach("a", lambda data, source, plane: print(data))
    rule = net.links.add(Rule(["a"], ["b"], Link(loss=0.3, delay_s=0.01)))       # until `net.links.remove(rule)`
    net.send("b", "a", Plane.DATAGRAM, b"hello")
    time.run(5.0)                                      # all that is planned up to 5 s happens now, in order of time

Datagrams may be lost, delayed, doubled, reordered or changed. A stream (any other plane) keeps its order: loss delays
it and a cut holds it. It breaks after GIVE_UP_S, or if its receiver is gone or is another process; then all waiting
data is lost. As with kernels, the sender learns of a broken stream and of a refusal, never of a lost datagram.
Bound: STREAM_BUFFER_BYTES wait on a stream; data that does not fit is dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from cluster.network.links import PERFECT, RETRANSMIT_S, Link, Links
from cluster.network.virtual_time import VirtualTime
from ranvier_py.core.mesh.mesh_values import Plane

STREAM_BUFFER_BYTES = 1024 * 1024
"""Of one stream, in the kernels of sender and receiver together; Linux without tuning allows more."""

GIVE_UP_S = 10.0
"""A stream without an acknowledgement for so long is broken (TCP_USER_TIMEOUT of the node)."""

STREAM_IDLE_S = 60.0
"""A stream unused for so long is closed by the node."""

Arrive = Callable[[Any, Any, Plane], object]
"""(data, source, plane). False: the receiver has no room; a stream tries again, a datagram is lost."""

Unreachable = Callable[[Any, Plane], object]
"""(target, plane): a send to this target was refused, or its stream is broken."""


@dataclass(slots=True)
class NetworkCounters:
    """Packets by fate, and bytes by plane."""

    sent: int = 0
    delivered: int = 0
    lost: int = 0
    cut: int = 0
    doubled: int = 0
    corrupted: int = 0
    oversize: int = 0
    nobody: int = 0  # no process at the target
    overflowed: int = 0  # no room in a buffer
    resets: int = 0
    bytes_by_plane: dict[int, int] = field(default_factory=lambda: {int(plane): 0 for plane in Plane})


@dataclass(slots=True, eq=False)
class Station:
    """An address: `arrive` is None while no process is there; `generation` counts starts and ends of processes."""

    arrive: Arrive | None = None
    unreachable: Unreachable | None = None
    generation: int = 0
    sent_bytes: int = 0
    packets: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """The data in transit from one process to another, in order."""

    key: tuple[Hashable, Hashable, Plane]
    sender: int  # generation
    ready_at: float  # nothing arrives earlier: the connection is being made, or the piece before is in transit
    reader: int = -1  # generation, once the first piece has arrived
    waiting: deque[tuple[Any, float]] = field(default_factory=deque)  # (data, when it was sent)
    bytes: int = 0
    moving: bool = False
    blocked_at: float = inf
    used_at: float = 0.0


class Network:
    """The fake network. `tap` gets (source, target, plane, data) of each packet; if it returns True, that is lost."""

    def __init__(self, time: VirtualTime, rng: Random, base: Link = PERFECT) -> None:
        self.time = time
        self.rng = rng
        self.links = Links(base)
        self.counters = NetworkCounters()
        self.slowest_s = 0.0  # the longest time that any packet was in transit
        self.tap: Callable[[Any, Any, Plane, Any], object] | None = None
        self._stations: dict[Hashable, Station] = {}
        self._streams: dict[tuple[Hashable, Hashable, Plane], Stream] = {}

    def station(self, address: Hashable) -> Station:
        """Return the station of an address, which is made at the first call."""
        found = self._stations.get(address)
        if found is None:
            found = self._stations[address] = Station()
        return found

    def attach(self, address: Hashable, arrive: Arrive, unreachable: Unreachable | None = None) -> None:
        """Put a process at an address. Streams to and from the process before it break."""
        station = self.station(address)
        station.arrive, station.unreachable = arrive, unreachable
        station.generation += 1

    def detach(self, address: Hashable) -> None:
        """Remove the process at an address."""
        station = self.station(address)
        station.arrive = station.unreachable = None
        station.generation += 1

    def send(self, source: Hashable, target: Hashable, plane: Plane, data: Any) -> None:
        """Send a packet."""
        counters, station, size = self.counters, self.station(source), len(data)
        counters.sent += 1
        counters.bytes_by_plane[plane] += size
        station.sent_bytes += size
        station.packets += 1
        if self.tap is not None and self.tap(source, target, plane, data):
            counters.lost += 1
            return
        if target not in self._stations:
            counters.nobody += 1
            return
        link = self.links.link(source, target, plane)
        if link.cut and link.refuse:
            counters.cut += 1
            self.time.after(0.0, self._notify, source, station.generation, target, plane)
        elif plane is Plane.DATAGRAM:
            what, copies = link.draw_copies(data, self.rng)
            if what:
                setattr(counters, what, getattr(counters, what) + 1)
            for delay, copy in copies:
                self.slowest_s = max(self.slowest_s, delay)
                self.time.after(delay, self._arrive, target, source, plane, copy)
        else:
            self._send_on_stream((source, target, plane), station.generation, link, data)

    def inject(self, target: Hashable, source: Hashable, plane: Plane, data: Any) -> None:
        """Deliver a packet that no node sent: an attacker's."""
        self.time.after(self.links.base.delay_s, self._arrive, target, source, plane, data)

    def _arrive(self, target: Hashable, source: Hashable, plane: Plane, data: Any) -> None:
        arrive = self.station(target).arrive
        if arrive is None:
            self.counters.nobody += 1
        elif arrive(data, source, plane) is False:
            self.counters.overflowed += 1
        else:
            self.counters.delivered += 1

    def _notify(self, source: Hashable, generation: int, target: Hashable, plane: Plane) -> None:
        station = self.station(source)
        if station.unreachable is not None and station.generation == generation:
            station.unreachable(target, plane)

    # --- streams ----------------------------------------------------------------------------------------------------

    def _send_on_stream(self, key: tuple[Hashable, Hashable, Plane], generation: int, link: Link, data: Any) -> None:
        now, stream = self.time.now, self._streams.get(key)
        idle = stream is not None and not stream.moving and now - stream.used_at > STREAM_IDLE_S
        if stream is None or idle or stream.sender != generation:
            handshake_s = link.draw_delay_s(self.rng) + link.draw_delay_s(self.rng)
            stream = self._streams[key] = Stream(key, generation, now + handshake_s)
        if stream.bytes + len(data) > STREAM_BUFFER_BYTES:
            self.counters.overflowed += 1
            return
        stream.waiting.append((data, now))
        stream.bytes += len(data)
        stream.used_at = now
        if not stream.moving:
            stream.moving = True
            self._move(stream)

    def _is_open(self, stream: Stream) -> bool:
        return self._streams.get(stream.key) is stream and self.station(stream.key[0]).generation == stream.sender

    def _move(self, stream: Stream) -> None:
        """Send the first waiting piece if the link is open, else try again later, or break the stream."""
        if not self._is_open(stream):
            return
        now, link = self.time.now, self.links.link(*stream.key)
        if link.cut:
            stream.blocked_at = min(stream.blocked_at, now)
            if link.refuse or now - stream.blocked_at >= GIVE_UP_S:
                self._break(stream)
            else:
                self.time.after(RETRANSMIT_S, self._move, stream)
            return
        stream.blocked_at = inf
        stream.ready_at = max(stream.ready_at, now + link.draw_stream_delay_s(self.rng))
        self.time.at(stream.ready_at, self._deliver, stream)

    def _deliver(self, stream: Stream) -> None:
        """Deliver the first waiting piece."""
        if not self._is_open(stream):
            return
        source, target, plane = stream.key
        station = self.station(target)
        if stream.reader < 0:
            stream.reader = station.generation
        if station.arrive is None or stream.reader != station.generation:
            self._break(stream)
            return
        data, sent_at = stream.waiting[0]
        if station.arrive(data, source, plane) is False:
            self.time.after(RETRANSMIT_S, self._deliver, stream)  # the reader's buffer is full: the sender waits
            return
        self.counters.delivered += 1
        self.slowest_s = max(self.slowest_s, self.time.now - sent_at)
        stream.waiting.popleft()
        stream.bytes -= len(data)
        stream.moving = bool(stream.waiting)
        if stream.moving:
            self._move(stream)

    def _break(self, stream: Stream) -> None:
        """Break a stream that was reset, refused or given up: waiting data is lost, and the sender is notified."""
        source, target, plane = stream.key
        self.counters.resets += 1
        self.counters.nobody += len(stream.waiting)
        del self._streams[stream.key]
        self.time.after(self.links.base.delay_s, self._notify, source, stream.sender, target, plane)
