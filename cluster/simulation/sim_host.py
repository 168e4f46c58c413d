"""A simulated machine with one node on it: process, kernel buffers, processor, disk, and the loop that drives the node.

The loop is that of a node's I/O: handle what arrived, then what is due, and send the results. Faults: a crash loses
memory and buffers; a pause stops the loop while the kernel receives until its buffer is full; a slow processor makes
packets and wake-ups take longer. Rules: packets are handled once, in order of arrival; timers are never early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any

from cluster.faulted_value import FaultedValue
from cluster.network.fake_network import Network
from cluster.simulation.node_streams import StreamRequest
from cluster.simulation.sim_node import SimNode
from cluster.simulation.trace import Trace
from ranvier_py.core.mesh.mesh_values import Address, MemberChange, Plane

KERNEL_BUFFER_BYTES = 1024 * 1024
"""The size that the node asks for with SO_RCVBUF (Linux's default holds 150 datagrams)."""

DATAGRAM_OVERHEAD_BYTES = 768
"""The kernel counts its own bookkeeping against the buffer (truesize)."""

PACKET_COST_S = 0.0001
"""For one packet on a whole processor; only slow hosts are charged for it."""

RESOLVE_ALONE_S, RESOLVE_ALONE_MAX_S, RESOLVE_S, RESOLVE_GROWTH, RESOLVE_SPREAD = 1.0, 5.0, 30.0, 1.5, 0.2
STATE_INTERVAL_S = 30.0
TICK_MIN_S = 0.001
"""The least time that the loop sleeps: a node's timers are no finer."""

LEAVE_S = 1.0
"""A node that leaves goes on answering for so long, then its process ends."""

SPINS_MAX = 100
"""Wake-ups in a row, a millisecond apart, that send nothing and at once ask for the next: beyond, the loop runs
idle."""


def fail(_: SimHost, error: Exception) -> None:
    raise error


class SimHost:
    """A simulated host, see the module. `raised` gets every exception of the node: it must not raise any."""

    def __init__(self, index: int, address: Address, net: Network, trace: Trace, rng: Random) -> None:
        self.index = index
        self.address = address
        self.net = net
        net.station(address)  # the machine exists, with a process or without
        self.time = net.time
        self.trace = trace
        self.rng = rng
        self.node: SimNode | None = None
        self.generation = 0
        self.paused = False
        self.factor = 1.0  # how much slower the processor is
        self.pauses = FaultedValue(False, self._hold)  # of the present process
        self.slowdowns = FaultedValue(1.0, partial(setattr, self, "factor"))
        self.disk_full = FaultedValue(False)
        self.leaving = False
        self.started_at = 0.0
        self.state = b""
        self.resolve: Callable[[int, Callable[[Sequence[Address]], None]], object] = lambda *_: None
        self.raised: Callable[[SimHost, Exception], object] = fail
        self.changed: Callable[[SimHost, MemberChange], object] = lambda *_: None
        self.received: Callable[[SimHost, Plane], object] = lambda *_: None
        self.requested: Callable[[SimHost, Sequence[StreamRequest]], object] = lambda *_: None  # about event streams
        self.dropped = 0
        self.spins = 0
        self._inbox: deque[tuple[bytes, Address, Plane, float]] = deque()  # with the time of arrival
        self.slowest_s = 0.0  # the longest time that a packet waited there
        self._inbox_bytes = 0
        self._free_at = 0.0
        self._planned_at = inf
        self._wanted_at = inf  # the node's `wake_at` after it was last called
        self._resolve_s = RESOLVE_ALONE_S

    @property
    def running(self) -> bool:
        return self.node is not None

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, node: SimNode) -> None:
        """Start a process. It first resolves the name within half a second, so that not all do so at once."""
        self.generation += 1
        self.node = node
        self.net.attach(self.address, self.arrive, self.unreachable)
        self.leaving = False
        self.started_at = self._free_at = self.time.now
        self._planned_at = inf
        self._resolve_s = RESOLVE_ALONE_S if node.alone() else RESOLVE_S
        self.trace.add(self.time.now, self.index, "start", self.generation, node.session)
        self.time.after(self.rng.random() * 0.5, self._look_up, self.generation)
        self.time.after(STATE_INTERVAL_S, self._save, self.generation)
        self._plan()

    def crash(self) -> None:
        """End the process; all that it has not written is lost."""
        if self.node is None:
            return
        self.trace.add(self.time.now, self.index, "crash", self.generation)
        self.node = None
        self.net.detach(self.address)
        self.generation += 1
        self.pauses.clear()
        self._inbox.clear()
        self._inbox_bytes = 0

    def stop(self) -> None:
        """Stop orderly: the node says goodbye, answers for LEAVE_S, writes its state file and ends."""
        if self.node is not None:
            self.trace.add(self.time.now, self.index, "stop", self.generation)
            self.leaving = True
            self._run(self.node.peer.leave)
        self.time.after(LEAVE_S, self._stopped, self.generation)

    def _stopped(self, generation: int) -> None:
        if generation == self.generation and self.node is not None:
            self._write()
            self.crash()

    def _hold(self, paused: bool) -> None:
        """Stop the process, or let it go on."""
        if paused != self.paused:
            self.paused = paused
            self.trace.add(self.time.now, self.index, "pause" if paused else "resume", len(self._inbox))
            self._work(self.generation)

    # --- network ----------------------------------------------------------------------------------------------------

    def arrive(self, data: bytes, source: Address, plane: Plane) -> bool:
        """Take in a packet. False: the kernel has no room for it."""
        if not self.paused and self.factor <= 1.0:
            self._receive(data, source, plane)
            return True
        cost = len(data) + DATAGRAM_OVERHEAD_BYTES
        if self._inbox_bytes + cost > KERNEL_BUFFER_BYTES:
            self.dropped += 1
            return False
        self._inbox.append((data, source, plane, self.time.now))
        self._inbox_bytes += cost
        if not self.paused and len(self._inbox) == 1:
            self.time.at(self._free_at, self._work, self.generation)
        return True

    def unreachable(self, address: Address, plane: Plane) -> None:
        """Notify the node that a send was refused, or that its stream is broken."""
        self.trace.add(self.time.now, self.index, "unreachable", address[0], int(plane))
        if self.node is not None:
            self._run(self.node.peer.unreachable, address, plane)

    def _receive(self, data: bytes, source: Address, plane: Plane) -> None:
        self.trace.packet(self.time.now, self.index, source[0], plane, len(data))
        if self.node is not None:
            self._run(self.node.peer.receive, data, source, plane)
            self.received(self, plane)

    def _work(self, generation: int) -> None:
        """Handle what arrived (all, or one packet on a slow processor), then what is due."""
        if generation != self.generation or self.node is None or self.paused:
            return
        while self._inbox:
            data, source, plane, came_at = self._inbox.popleft()
            self.slowest_s = max(self.slowest_s, self.time.now - came_at)
            self._inbox_bytes -= len(data) + DATAGRAM_OVERHEAD_BYTES
            self._receive(data, source, plane)
            if self.factor > 1.0 and self._inbox:
                self._free_at = self.time.now + PACKET_COST_S * self.factor
                self.time.at(self._free_at, self._work, generation)
                break
        self._plan()
        if self._wanted_at <= self.time.now:
            self._tick(generation, self._planned_at)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[SimNode, float], None]) -> None:
        """Let another part of the process call the node (traffic, probes, an operator), and send the results."""
        if self.node is not None:
            self._run(call, self.node)

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call the running node with the time as the last argument, and send the results."""
        node = self.node
        assert node is not None
        try:
            call(*arguments, self.time.now)
            self._flush(node)
        except Exception as error:  # any exception is a failure of the run, which it exists to find
            self.raised(self, error)
            return
        self._plan()

    def _flush(self, node: SimNode) -> None:
        sends = node.peer.take()
        if node.streams is not None:
            self.requested(self, node.streams.take())
        for to, plane, data in sends:
            self.net.send(self.address, to, plane, data)
        for change in node.peer.changes():
            self.changed(self, change)

    def _plan(self) -> None:
        """Plan a wake-up when the node wants one. An earlier plan stays, and its wake-up finds nothing due."""
        if self.node is None:
            return
        self._wanted_at = self.node.peer.wake_at
        when = max(self._wanted_at, self.time.now + TICK_MIN_S)
        if when < self._planned_at and when != inf:
            self._planned_at = when
            late = 0.0 if self.factor <= 1.0 else self.rng.random() * PACKET_COST_S * self.factor * 10
            self.time.at(when + late, self._tick, self.generation, when)

    def _tick(self, generation: int, planned: float) -> None:
        if generation != self.generation or self.node is None or planned != self._planned_at:
            return
        if self.paused:
            return  # `_hold` does it
        self._planned_at = inf
        if self._wanted_at > self.time.now:
            self._plan()
            return
        before = self.net.station(self.address).packets
        self._run(self.node.peer.tick)
        idle = self.net.station(self.address).packets == before
        again = self._wanted_at <= self.time.now + TICK_MIN_S
        self.spins = self.spins + 1 if idle and again else 0

    # --- name and disk ----------------------------------------------------------------------------------------------

    def _look_up(self, generation: int) -> None:
        """Resolve the name, again and again for ever, whatever the answer."""
        if generation != self.generation or self.node is None:
            return
        if not self.paused and not self.leaving:
            self.resolve(self.index, lambda found: self._found(generation, found))
        pause = min(self._resolve_s, RESOLVE_ALONE_MAX_S) if self.node.alone() else self._resolve_s
        self._resolve_s = min(RESOLVE_GROWTH * pause, RESOLVE_S)
        spread = 1.0 + RESOLVE_SPREAD * (2 * self.rng.random() - 1)
        self.time.after(pause * spread, self._look_up, generation)

    def _found(self, generation: int, addresses: Sequence[Address]) -> None:
        if generation == self.generation and not self.paused and addresses and self.node is not None:
            self._run(self.node.peer.contact, addresses)

    def _save(self, generation: int) -> None:
        if generation == self.generation and self.node is not None:
            if not self.paused:
                self._write()
            self.time.after(STATE_INTERVAL_S, self._save, generation)

    def _write(self) -> None:
        if not self.disk_full and self.node is not None:
            self.state = self.node.peer.state()
