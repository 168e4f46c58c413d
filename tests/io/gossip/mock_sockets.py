"""A network of simulated sockets in one trio run: the shell of gossip opens and waits for them as for the kernel's.

A `Network` gives each host its `GossipSockets`, whose `System` makes more of the kind. Datagrams get lost and late;
a stream's bytes arrive in order, loss makes them late, a cut holds them until it heals or the sender's kernel gives up,
a process that is gone answers with a reset. Receive windows are kept; a window opens at once when the reader has read.
Everything is decided by one generator of random numbers with a seed, and all that is put on the wire is in `trace`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any, NamedTuple, cast

import trio
from trio.lowlevel import ParkingLot, checkpoint

from ranvier_py.core.gossip.gossip_values import Address
from ranvier_py.io.gossip.gossip_port import GossipSockets
from ranvier_py.io.gossip.sockets import System
from ranvier_py.proxy.transport import RECEIVE_BYTES, PlainTransport, Progress

DATAGRAMS_MAX = 4096  # in the buffer of a socket: what a few MB hold
WINDOW_BYTES = 256 * 1024  # sent on a stream and not read yet
BACKLOG = 256  # connections that wait to be accepted
RETRANSMIT_S = 0.2  # the least of Linux; doubles
SYN_S = 1.0  # to the repetition of the first packet; doubles
DOUBLINGS_MAX = 5
GIVE_UP_S = 10.0  # TCP_USER_TIMEOUT of the shell
END = b""  # in place of a segment: nothing more comes


class Conditions(NamedTuple):
    """Of all ways between hosts. `reset` is the share of segments whose stream is reset instead."""

    loss: float = 0.0
    delay_s: float = 0.0002
    jitter_s: float = 0.0003  # mean of the exponential part
    reset: float = 0.0
    datagrams: bool = True  # whether any pass


class Sent(NamedTuple):
    """One thing on the wire, whether it arrives or not."""

    at_s: float
    source: Address
    to: Address
    size: int


class Network:
    """Hosts are IPv4 literals; what one sends to itself passes the wire too."""

    def __init__(self, rng: Random, conditions: Conditions | None = None) -> None:
        self.rng = rng
        self.conditions = conditions or Conditions()
        self.cut: Callable[[str, str], bool] = lambda source, to: False
        self.blocked: Callable[[str, str], bool] = lambda source, to: False  # for datagrams alone
        self.trace: list[Sent] = []
        self.overflowed = 0  # datagrams that found no room
        self.resets = 0  # streams that the network broke
        self.datagrams: dict[Address, MockDatagrams] = {}
        self.listeners: dict[Address, MockListener] = {}
        self.streams: dict[int, MockStream] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._numbers = count(1_000_000)  # of sockets; no descriptor of the kernel is so large
        self._ports = count(30_000)
        self._sleep = trio.CancelScope()

    # --- time -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while self._events and self._events[0][0] <= trio.current_time():
                heappop(self._events)[2]()
            with trio.CancelScope(deadline=self._events[0][0] if self._events else inf) as self._sleep:
                await trio.sleep_forever()

    def at(self, when: float, event: Callable[[], object]) -> None:
        heappush(self._events, (when, next(self._order), event))
        if when < self._sleep.deadline:  # noqa: PLR1730  # setting it costs more than looking
            self._sleep.deadline = when

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        self.at(trio.current_time() + delay_s, event)

    # --- what happens to a packet -----------------------------------------------------------------------------------

    def delay_s(self) -> float:
        conditions = self.conditions
        return conditions.delay_s + conditions.jitter_s * self.rng.expovariate(1)

    def lost(self, source: Address, to: Address) -> bool:
        return self.rng.random() < self.conditions.loss or self.cut(source[0], to[0])

    def note(self, source: Address, to: Address, size: int) -> None:
        self.trace.append(Sent(round(trio.current_time(), 6), source, to, size))

    def send_datagram(self, source: Address, to: Address, data: bytes) -> None:
        self.note(source, to, len(data))
        delay_s, lost = self.delay_s(), self.lost(source, to)
        if self.conditions.datagrams and not lost and not self.blocked(source[0], to[0]):
            self.after(delay_s, lambda: self._deliver(source, to, data))

    def _deliver(self, source: Address, to: Address, data: bytes) -> None:
        sock = self.datagrams.get(to)
        if sock is not None and not sock.closed and not sock.take(data, source):
            self.overflowed += 1

    # --- sockets ----------------------------------------------------------------------------------------------------

    def sockets(self, address: Address, *, udp: bool = True) -> GossipSockets:
        """Bound ones of a new process. Raises OSError while another has the port."""
        if address in self.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = self.listeners[address] = MockListener(self, address)
        datagrams = None
        if udp:
            datagrams = cast("socket.socket", MockDatagrams(self, address))
            self.datagrams[address] = cast("MockDatagrams", datagrams)
        return GossipSockets(cast("socket.socket", listener), datagrams, *address, socket.AF_INET, self.system())

    def system(self) -> System:
        return System(
            socket=lambda family, kind: cast("socket.socket", MockStream(self)),
            transport=MockTransport,
            wait_readable=lambda sock: cast("MockSocket", sock).wait_readable(),
            wait_writable=lambda sock: cast("MockSocket", sock).wait_writable(),
        )

    def kill(self, host: str) -> None:
        """The process is gone: what it still does to its sockets reaches nobody, and its kernel resets its streams."""
        for address in [address for address in self.listeners if address[0] == host]:
            self.listeners[address].close()
            if address in self.datagrams:
                self.datagrams[address].close()
        for stream in [stream for stream in self.streams.values() if stream.local[0] == host]:
            stream.reset()

    def number(self) -> int:
        return next(self._numbers)

    def port(self) -> int:
        return next(self._ports)


class MockSocket:
    """What all have in common: waits, and options that mean nothing here."""

    family = socket.AF_INET

    def __init__(self, network: Network, local: Address) -> None:
        self.network = network
        self.local = local
        self.closed = False
        self.number = network.number()
        self.readers = ParkingLot()
        self.writers = ParkingLot()

    @property
    def readable(self) -> bool:
        return False

    @property
    def writable(self) -> bool:
        return True

    async def wait_readable(self) -> None:
        """Gives the turn away, as the kernel's does, even when there is no need to wait."""
        if self.readable:
            await checkpoint()
        else:
            await self.readers.park()

    async def wait_writable(self) -> None:
        if self.writable:
            await checkpoint()
        else:
            await self.writers.park()

    def wake(self) -> None:
        if self.readable:
            self.readers.unpark_all()
        if self.writable:
            self.writers.unpark_all()

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    def getsockname(self) -> Address:
        return self.local

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None: ...

    def getsockopt(self, level: int, option: int) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class MockDatagrams(MockSocket):
    def __init__(self, network: Network, local: Address) -> None:
        super().__init__(network, local)
        self.buffer: deque[tuple[bytes, Address]] = deque()

    @property
    def readable(self) -> bool:
        return bool(self.buffer)

    def sendto(self, data: bytes, to: Address) -> int:
        if not self.closed:  # else the process was killed and does not know it
            self.network.send_datagram(self.local, to, data)
        return len(data)

    def recvmsg(self, size: int, _: int) -> tuple[bytes, Sequence[Any], int, Address]:
        if not self.buffer:
            raise BlockingIOError
        data, source = self.buffer.popleft()
        return data[:size], (), 0, source

    def take(self, data: bytes, source: Address) -> bool:
        if len(self.buffer) >= DATAGRAMS_MAX:
            return False
        self.buffer.append((data, source))
        self.wake()
        return True

    def close(self) -> None:
        if not self.closed:
            super().close()
            del self.network.datagrams[self.local]


class MockListener(MockSocket):
    def __init__(self, network: Network, local: Address) -> None:
        super().__init__(network, local)
        self.queue: deque[MockStream] = deque()

    @property
    def readable(self) -> bool:
        return bool(self.queue)

    def accept(self) -> tuple[socket.socket, Address]:
        if not self.queue:
            raise BlockingIOError
        stream = self.queue.popleft()
        return cast("socket.socket", stream), stream.remote

    def close(self) -> None:
        if not self.closed:
            super().close()
            del self.network.listeners[self.local]
            for stream in self.queue:
                stream.reset()


class MockStream(MockSocket):
    """One end of a connection. What it sent is `attempt` until it lands in the peer's `inbox`."""

    def __init__(self, network: Network, local: Address = ("", 0), remote: Address = ("", 0)) -> None:
        super().__init__(network, local)
        self.remote = remote
        self.peer: MockStream | None = None  # once connected
        self.error = 0
        self.ended = False  # the peer said that nothing more comes
        self.inbox: deque[bytes] = deque()
        self.unread = 0  # bytes sent that the peer has not read
        self.attempt: deque[tuple[float, bytes]] = deque()
        self.held_at = -1.0  # since when a cut holds the attempt
        self.retrying = False
        network.streams[self.number] = self

    @property
    def readable(self) -> bool:
        return bool(self.inbox or self.error or self.ended)

    @property
    def writable(self) -> bool:
        return bool(self.error or (self.peer and self.unread < WINDOW_BYTES))

    def getsockopt(self, level: int, option: int) -> int:
        return self.error if option == socket.SO_ERROR else 0

    # --- being connected --------------------------------------------------------------------------------------------

    def bind(self, address: Address) -> None:
        self.local = (address[0], self.network.port())

    def connect(self, to: Address) -> None:
        self.remote = to
        self._knock(0)
        raise BlockingIOError

    def _knock(self, tries: int) -> None:
        if self.closed:
            return
        network = self.network
        network.note(self.local, self.remote, 0)
        delay_s, lost = network.delay_s(), network.lost(self.local, self.remote)
        if lost:
            network.after(SYN_S * 2 ** min(tries, DOUBLINGS_MAX), lambda: self._knock(tries + 1))
        else:
            network.after(delay_s, self._meet)

    def _meet(self) -> None:
        network = self.network
        listener = network.listeners.get(self.remote)
        if listener is None:
            network.after(network.delay_s(), lambda: self.fail(errno.ECONNREFUSED))
        elif len(listener.queue) >= BACKLOG:
            network.after(SYN_S, lambda: self._knock(1))
        elif not self.closed:
            other = MockStream(network, self.remote, self.local)
            other.peer = self
            listener.queue.append(other)
            listener.wake()
            network.after(network.delay_s(), lambda: self._met(other))

    def _met(self, other: MockStream) -> None:
        self.peer = other
        self.wake()

    # --- sending ----------------------------------------------------------------------------------------------------

    def sendmsg(self, parts: Sequence[bytes]) -> int:
        self._check()
        room = WINDOW_BYTES - self.unread if self.peer else 0
        data = b"".join(parts)[:room]
        if not data:
            raise BlockingIOError
        self.unread += len(data)
        self.network.note(self.local, self.remote, len(data))
        if self.network.rng.random() < self.network.conditions.reset:
            self.network.resets += 1
            self.reset(closing=False)
        else:
            self._launch(data)
        return len(data)

    def _launch(self, data: bytes) -> None:
        network = self.network
        delay_s, losses = network.delay_s(), 0
        while losses < DOUBLINGS_MAX and network.rng.random() < network.conditions.loss:
            delay_s += RETRANSMIT_S * 2**losses
            losses += 1
        at = max(trio.current_time() + delay_s, self.attempt[-1][0] if self.attempt else 0.0)
        self.attempt.append((at, data))
        network.at(at, self._finish_attempt)

    def _finish_attempt(self) -> None:
        """What is due arrives, unless a cut holds it."""
        now, network = trio.current_time(), self.network
        while self.attempt and self.attempt[0][0] <= now:
            if network.cut(self.local[0], self.remote[0]):
                self._hold(now)
                return
            self.held_at = -1.0
            _, data = self.attempt.popleft()
            if self.peer is not None:
                self.peer.arrive(data)

    def _hold(self, now: float) -> None:
        if self.held_at < 0:
            self.held_at = now
        elif now - self.held_at > GIVE_UP_S:
            self.fail(errno.ETIMEDOUT)
        if not self.retrying and not self.error:
            self.retrying = True
            self.network.after(RETRANSMIT_S, self._retry)

    def _retry(self) -> None:
        self.retrying = False
        self._finish_attempt()

    def arrive(self, data: bytes) -> None:
        if self.closed or self.error:
            self.reset()
            return
        if data == END:
            self.ended = True
        else:
            self.inbox.append(data)
        self.wake()

    # --- receiving --------------------------------------------------------------------------------------------------

    def recv(self, size: int) -> bytes:
        if not self.inbox:
            self._check()
            if self.ended:
                return b""
            raise BlockingIOError
        data = self.inbox.popleft()
        if len(data) > size:
            self.inbox.appendleft(data[size:])
            data = data[:size]
        if self.peer is not None:
            self.peer.unread -= len(data)
            self.peer.wake()
        return data

    # --- the end ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def fail(self, error: int) -> None:
        if not self.closed:
            self.error = self.error or error
            self.attempt.clear()
            self.wake()

    def reset(self, *, closing: bool = True) -> None:
        """Both ends are told; this one at once. What was under way is gone."""
        peer, network = self.peer, self.network
        if peer is not None:
            network.after(network.delay_s(), lambda: self._tell(peer))
        self.fail(errno.ECONNRESET)
        if closing:
            self._forget()

    def _tell(self, peer: MockStream) -> None:
        """A reset that a cut swallows is not repeated: the other end finds out when it says something."""
        if not self.network.cut(self.local[0], self.remote[0]):
            peer.fail(errno.ECONNRESET)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if option == socket.SO_LINGER:
            self.reset()

    def shutdown(self, how: int) -> None:
        raise AssertionError("gossip does not half-close")

    def close(self) -> None:
        if not self.closed and self.peer is not None and not self.error:
            self._launch(END)
        self._forget()

    def _forget(self) -> None:
        self.closed = True
        self.network.streams.pop(self.number, None)


class MockTransport(PlainTransport):
    """The node's own transport, but for the two waits, which it would ask the kernel for."""

    __slots__ = ("sock",)

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.sock = cast("MockStream", sock)

    async def receive(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        while True:
            await self.sock.wait_readable()
            data = self.receive_now(bytes_max)
            if data is not None:
                return data

    async def send_rest(self, rest: memoryview, progress: Progress) -> None:
        while rest:
            await self.sock.wait_writable()
            sent = self.send_now((rest,))  # type: ignore[arg-type]  # as there
            rest = rest[sent:]
            progress(sent)
