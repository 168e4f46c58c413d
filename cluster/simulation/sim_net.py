"""The network between simulated nodes: datagrams that get lost, streams that get late, and the faults of both.

Every ordered pair of nodes has the conditions of `Link`: those of a good network, changed by the rules in force. A rule
concerns all pairs from some nodes to some others, so a thousand nodes need no table of a million pairs. Datagrams:
loss, delay (exponential with a heavy tail), doubles, reordering, flipped bits, a largest size. Streams: one for each
(from, to, plane), opened when first used, in order; loss becomes delay, a cut holds the bytes in a bounded buffer until
it heals or the sender's kernel gives up; a process that is gone answers with a reset. The sender is told of a broken
stream and of a refused one, never of a lost datagram: as kernels do. What fits no buffer is dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import log
from random import Random
from typing import NamedTuple, Protocol

from cluster.simulation.trace import Heap, Trace
from ranvier_py.core.gossip.gossip_values import Address, Plane

STREAM_BUFFER_BYTES = 1024 * 1024
"""Of one stream, sender's and receiver's kernel together: what Linux grows to without tuning is more."""

GIVE_UP_S = 10.0
"""After so long without an acknowledgement a stream is broken (TCP_USER_TIMEOUT of the node)."""

RETRANSMIT_S = 0.2
"""The least time-out of Linux; doubles with each loss."""

RETRANSMIT_DOUBLINGS_MAX = 5
STREAM_IDLE_S = 60.0
"""A stream unused for so long is closed by the node."""


class Link(NamedTuple):
    """Conditions one way. The first values are a data centre's."""

    loss: float = 0.0
    delay_s: float = 0.0002
    jitter_s: float = 0.0002  # mean of the exponential part
    tail: float = 0.001  # share of packets that wait in some queue
    tail_s: float = 0.02  # mean of that wait
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.05
    corrupt: float = 0.0
    mtu: int = 65_507
    cut: bool = False
    refuse: bool = False

    def worse(self, other: Link) -> Link:
        """Both sets of conditions together."""
        return Link(
            loss=1 - (1 - self.loss) * (1 - other.loss),
            delay_s=self.delay_s + other.delay_s,
            jitter_s=self.jitter_s + other.jitter_s,
            tail=max(self.tail, other.tail),
            tail_s=max(self.tail_s, other.tail_s),
            duplicate=max(self.duplicate, other.duplicate),
            reorder=max(self.reorder, other.reorder),
            reorder_s=max(self.reorder_s, other.reorder_s),
            corrupt=max(self.corrupt, other.corrupt),
            mtu=min(self.mtu, other.mtu),
            cut=self.cut or other.cut,
            refuse=self.refuse or other.refuse,
        )


NEUTRAL = Link(delay_s=0.0, jitter_s=0.0, tail=0.0, tail_s=0.0, reorder_s=0.0)
PAIRS_KEPT_MAX = 200_000
"""Conditions of pairs that are remembered between changes of the rules."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Something that is wrong between these nodes (bit masks over node numbers) on these planes."""

    sources: bytes
    targets: bytes
    one_way: bool
    udp: bool
    tcp: bool
    link: Link

    def concerns(self, source: int, target: int, plane: Plane) -> bool:
        if not (self.udp if plane is Plane.DATAGRAM else self.tcp):
            return False
        if self.sources[source] and self.targets[target]:
            return True
        return not self.one_way and bool(self.sources[target] and self.targets[source])


class Host(Protocol):
    """What the network knows of a host. `generation` counts its processes; `running` is false between them."""

    @property
    def generation(self) -> int: ...

    @property
    def running(self) -> bool: ...

    def arrive(self, data: bytes, source: Address, plane: Plane) -> bool: ...  # False: no room; a stream tries again

    def broken(self, address: Address, plane: Plane) -> None: ...  # what was sent there could not be


@dataclass(slots=True)
class NetStatistics:
    """Packets by fate, and bytes by plane. Reset by nobody."""

    sent: int = 0
    delivered: int = 0
    lost: int = 0
    cut: int = 0
    doubled: int = 0
    corrupted: int = 0
    oversize: int = 0
    nobody: int = 0  # no such address, or no process there
    overflowed: int = 0  # no room in a buffer
    resets: int = 0
    bytes_by_plane: dict[int, int] = field(default_factory=lambda: {int(plane): 0 for plane in Plane})

    def to_json(self) -> dict[str, object]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


class Stream:
    """Bytes on their way from one process to another, in order."""

    __slots__ = ("blocked_at", "bytes", "generation", "moving", "ready_at", "target_generation", "used_at", "waiting")

    def __init__(self, generation: int, target_generation: int, ready_at: float) -> None:
        self.generation = generation
        self.target_generation = target_generation
        self.ready_at = ready_at  # nothing arrives before: the connection is being made, or the last piece is ahead
        self.waiting: deque[tuple[bytes, float]] = deque()  # and when each was sent
        self.bytes = 0
        self.moving = False
        self.blocked_at = -1.0
        self.used_at = ready_at


class SimNet:
    """Delivers between the hosts of `addresses` (address -> number, the same number as in `hosts`)."""

    def __init__(
        self, heap: Heap, rng: Random, trace: Trace, hosts: Sequence[Host], addresses: Sequence[Address]
    ) -> None:
        self.heap = heap
        self.rng = rng
        self.trace = trace
        self.hosts = hosts
        self.addresses = addresses
        self.numbers = {address: number for number, address in enumerate(addresses)}
        self.base = Link()
        self.rules: list[Rule] = []
        self.core = bytes(len(hosts))  # between these all is well, whatever the rules say
        self.statistics = NetStatistics()
        self.sent_by = [0] * len(hosts)  # bytes
        self.packets_by = [0] * len(hosts)
        self.slowest_s = 0.0  # the longest that anything was on its way
        self.overheard: Callable[[int, Address, Plane, bytes], None] | None = None  # who listens on the wire
        self._streams: dict[tuple[int, int, Plane], Stream] = {}
        self._links: dict[tuple[int, int, Plane], Link] = {}
        heap.after(STREAM_IDLE_S, self._close_idle)

    # --- rules ------------------------------------------------------------------------------------------------------

    def add(self, rule: Rule) -> None:
        self.rules.append(rule)
        self._links.clear()

    def remove(self, rule: Rule) -> None:
        """No matter whether it is in force."""
        self.rules = [one for one in self.rules if one is not rule]
        self._links.clear()

    def heal(self) -> None:
        self.rules.clear()
        self._links.clear()

    def protect(self, core: bytes) -> None:
        self.core = core
        self._links.clear()

    def mask(self, numbers: tuple[int, ...]) -> bytes:
        found = bytearray(len(self.hosts))
        for number in numbers:
            found[number] = 1
        return bytes(found)

    def link(self, source: int, target: int, plane: Plane) -> Link:
        """The conditions from one to the other just now."""
        if not self.rules:
            return self.base
        key = (source, target, plane)
        link = self._links.get(key)
        if link is None:
            link = self.base
            if not (self.core[source] and self.core[target]):
                for rule in self.rules:
                    if rule.concerns(source, target, plane):
                        link = link.worse(rule.link)
            if len(self._links) >= PAIRS_KEPT_MAX:
                self._links.clear()
            self._links[key] = link
        return link

    def passes(self, source: int, target: int) -> bool:
        """Whether anything at all gets through both ways on both planes."""
        ways = ((source, target), (target, source))
        return not any(self.link(*way, plane).cut for way in ways for plane in (Plane.DATAGRAM, Plane.BULK))

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, source: int, to: Address, plane: Plane, data: bytes) -> None:
        statistics = self.statistics
        statistics.sent += 1
        statistics.bytes_by_plane[plane] += len(data)
        self.sent_by[source] += len(data)
        self.packets_by[source] += 1
        if self.overheard is not None:
            self.overheard(source, to, plane, data)
        target = self.numbers.get(to, -1)
        if target < 0:
            statistics.nobody += 1
            return
        link = self.link(source, target, plane)
        if link.cut and link.refuse:
            statistics.cut += 1
            self.heap.after(0.0, self._tell, source, self.hosts[source].generation, to, plane)
        elif plane is Plane.DATAGRAM:
            self._datagram(source, target, link, data)
        else:
            self._stream(source, target, plane, link, data)

    def inject(self, target: int, source: Address, plane: Plane, data: bytes) -> None:
        """A packet that nobody sent: an attacker's."""
        self.heap.after(self.base.delay_s, self._arrive, target, source, plane, data)

    def _tell(self, source: int, generation: int, to: Address, plane: Plane) -> None:
        host = self.hosts[source]
        if host.running and host.generation == generation:
            host.broken(to, plane)

    def _delay(self, link: Link) -> float:
        rng = self.rng
        delay = link.delay_s - log(1.0 - rng.random()) * link.jitter_s  # an exponential draw
        if link.tail and rng.random() < link.tail:
            delay += rng.expovariate(1.0) * link.tail_s
        return delay

    # --- datagrams --------------------------------------------------------------------------------------------------

    def _datagram(self, source: int, target: int, link: Link, data: bytes) -> None:
        rng, statistics = self.rng, self.statistics
        if link.cut:
            statistics.cut += 1
            return
        if link.loss and rng.random() < link.loss:
            statistics.lost += 1
            return
        if len(data) > link.mtu:
            statistics.oversize += 1
            return
        if link.corrupt and rng.random() < link.corrupt:
            statistics.corrupted += 1
            data = flipped(data, rng)
        delay = self._delay(link)
        if link.reorder and rng.random() < link.reorder:
            delay += rng.random() * 2 * link.reorder_s
        address = self.addresses[source]
        self.slowest_s = max(self.slowest_s, delay)
        self.heap.after(delay, self._arrive, target, address, Plane.DATAGRAM, data)
        if link.duplicate and rng.random() < link.duplicate:
            statistics.doubled += 1
            self.heap.after(delay + self._delay(link), self._arrive, target, address, Plane.DATAGRAM, data)

    def _arrive(self, target: int, source: Address, plane: Plane, data: bytes) -> None:
        host = self.hosts[target]
        if not host.running:
            self.statistics.nobody += 1
        elif host.arrive(data, source, plane):
            self.statistics.delivered += 1
        else:
            self.statistics.overflowed += 1

    # --- streams ----------------------------------------------------------------------------------------------------

    def _stream(self, source: int, target: int, plane: Plane, link: Link, data: bytes) -> None:
        key = (source, target, plane)
        stream = self._streams.get(key)
        generation = self.hosts[source].generation
        if stream is None or stream.generation != generation:
            shake = self._delay(link) + self._delay(link)
            stream = Stream(generation, -1, self.heap.now + shake)
            self._streams[key] = stream
        if stream.bytes + len(data) > STREAM_BUFFER_BYTES:
            self.statistics.overflowed += 1
            return
        stream.waiting.append((data, self.heap.now))
        stream.bytes += len(data)
        stream.used_at = self.heap.now
        if not stream.moving:
            stream.moving = True
            self._move(key, stream)

    def _move(self, key: tuple[int, int, Plane], stream: Stream) -> None:
        """Put the first waiting piece on the wire, if the way is free; come back later if not."""
        source, target, plane = key
        if self._streams.get(key) is not stream or self.hosts[source].generation != stream.generation:
            return
        now, link = self.heap.now, self.link(source, target, plane)
        if link.cut:
            stream.blocked_at = now if stream.blocked_at < 0 else stream.blocked_at
            if link.refuse or now - stream.blocked_at >= GIVE_UP_S:
                self._break(key, stream)
            else:
                self.heap.after(RETRANSMIT_S, self._move, key, stream)
            return
        stream.blocked_at = -1.0
        delay, losses = self._delay(link), 0
        while link.loss and losses < RETRANSMIT_DOUBLINGS_MAX and self.rng.random() < link.loss:
            delay += RETRANSMIT_S * 2**losses
            losses += 1
        stream.ready_at = max(stream.ready_at, now + delay)
        self.heap.at(stream.ready_at, self._finish_attempt, key, stream)

    def _finish_attempt(self, key: tuple[int, int, Plane], stream: Stream) -> None:
        source, target, plane = key
        if self._streams.get(key) is not stream or not stream.waiting:
            return
        host = self.hosts[target]
        if stream.target_generation < 0 and host.running:
            stream.target_generation = host.generation
        if not host.running or stream.target_generation != host.generation:
            self._break(key, stream)
            return
        data, sent_at = stream.waiting[0]
        if not host.arrive(data, self.addresses[source], plane):
            self.heap.after(
                RETRANSMIT_S, self._finish_attempt, key, stream
            )  # the reader's buffer is full: the sender waits
            return
        self.statistics.delivered += 1
        self.slowest_s = max(self.slowest_s, self.heap.now - sent_at)
        stream.waiting.popleft()
        stream.bytes -= len(data)
        stream.moving = bool(stream.waiting)
        if stream.moving:
            self._move(key, stream)

    def _break(self, key: tuple[int, int, Plane], stream: Stream) -> None:
        """Reset, refused, or given up: what waits is gone, and the sender is told."""
        source, target, plane = key
        self.statistics.resets += 1
        self.statistics.nobody += len(stream.waiting)
        del self._streams[key]
        self.heap.after(self.base.delay_s, self._tell, source, stream.generation, self.addresses[target], plane)

    def _close_idle(self) -> None:
        old = self.heap.now - STREAM_IDLE_S
        self._streams = {key: one for key, one in self._streams.items() if one.moving or one.used_at > old}
        self.heap.after(STREAM_IDLE_S, self._close_idle)

    def streams(self) -> Iterator[tuple[tuple[int, int, Plane], int]]:
        """(from, to, plane) and bytes under way, of every open one."""
        for key, stream in self._streams.items():
            yield key, stream.bytes


def flipped(data: bytes, rng: Random) -> bytes:
    """The same with one bit turned over."""
    if not data:
        return data
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)
