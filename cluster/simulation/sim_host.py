"""A simulated machine with one node on it: process, kernel buffers, processor, disk, and the loop that drives the node.

The loop is the edge's: drain what arrived, then do what is due; send what came out. Faults: a crash loses memory and
buffers, a pause stops the loop while the kernel goes on receiving until its buffer is full, a slow processor makes
every packet and every wake-up cost more. Rules: a packet is handled once, in order of arrival; timers are never early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

from cluster.network.fake_network import Network
from cluster.simulation.node_streams import StreamRequest
from cluster.simulation.sim_node import SimNode
from cluster.simulation.trace import Trace
from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Plane

KERNEL_BUFFER_BYTES = 1024 * 1024
"""What the node asks for with SO_RCVBUF (the default of Linux holds 150 datagrams)."""

DATAGRAM_OVERHEAD_BYTES = 768
"""The kernel counts its own bookkeeping against the buffer (truesize)."""

PACKET_COST_S = 0.0001
"""Of one packet on a whole processor; only a slow host is made to feel it."""

RESOLVE_ALONE_S, RESOLVE_S, RESOLVE_GROWTH, RESOLVE_SPREAD = 1.0, 30.0, 1.5, 0.2
STATE_INTERVAL_S = 30.0
TICK_MIN_S = 0.001
"""The loop sleeps at least so long: a millisecond is what a timer of the node is good for."""

LEAVE_S = 1.0
"""A node that leaves answers for so long, then its process ends."""

SPINS_MAX = 100
"""Wake-ups in a row, each a millisecond after the other, that neither send nor were waited for: an idle loop gone
mad."""


class SimHost:
    """See the module. `raised` is called with what the node raised: no exception may leave it."""

    def __init__(self, index: int, address: Address, net: Network, trace: Trace, rng: Random) -> None:
        self.index = index
        self.address = address
        self.net = net
        net.station(address)  # a machine is there, with a process or without
        self.time = net.time
        self.trace = trace
        self.rng = rng
        self.node: SimNode | None = None
        self.generation = 0
        self.paused = 0  # how many pauses hold it
        self.factor = 1.0
        self.disk_full = 0
        self.leaving = False
        self.started_at = 0.0
        self.state = b""
        self.resolve: Callable[[int, Callable[[Sequence[Address]], None]], None] | None = None
        self.raised: Callable[[SimHost, Exception], None] | None = None
        self.changed: Callable[[SimHost, MemberChange], None] | None = None
        self.received: Callable[[SimHost, Plane], None] | None = None
        self.requested: Callable[[SimHost, Sequence[StreamRequest]], None] | None = None  # of engines' event streams
        self.dropped = 0
        self.spins = 0
        self._inbox: deque[tuple[bytes, Address, Plane, float]] = deque()  # and when it came
        self.slowest_s = 0.0  # the longest that anything lay there
        self._inbox_bytes = 0
        self._free_at = 0.0
        self._planned_at = inf
        self._wanted_at = inf  # the node's `wake_at` after the last call of it
        self._resolve_s = RESOLVE_ALONE_S

    @property
    def running(self) -> bool:
        return self.node is not None

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, node: SimNode) -> None:
        """A new process. Its first look at the name comes within half a second: not all at once."""
        self.generation += 1
        self.node = node
        self.net.attach(self.address, self.arrive, self.unreachable)
        self.leaving = False
        self.started_at = self._free_at = self.time.now
        self._planned_at = inf
        self._resolve_s = RESOLVE_ALONE_S
        self.trace.add(self.time.now, self.index, "start", self.generation, node.session)
        self.time.after(self.rng.random() * 0.5, self._look_up, self.generation)
        self.time.after(STATE_INTERVAL_S, self._save, self.generation)
        self._plan()

    def crash(self) -> None:
        """The process is gone, with all it had not written down."""
        if self.node is None:
            return
        self.trace.add(self.time.now, self.index, "crash", self.generation)
        self.node = None
        self.net.detach(self.address)
        self.generation += 1
        self.paused = 0
        self._inbox.clear()
        self._inbox_bytes = 0

    def stop(self) -> None:
        """Politely: goodbye, a last second of answers, the state file, the end."""
        if self.node is not None:
            self.trace.add(self.time.now, self.index, "stop", self.generation)
            self.leaving = True
            self._run(self.node.peer.leave)
        self.time.after(LEAVE_S, self._stopped, self.generation)

    def _stopped(self, generation: int) -> None:
        if generation == self.generation and self.node is not None:
            self._write()
            self.crash()

    def free_disk(self) -> None:
        """One reason less for which it is full."""
        self.disk_full = max(0, self.disk_full - 1)

    def pause(self) -> None:
        self.paused += 1
        self.trace.add(self.time.now, self.index, "pause")

    def resume(self) -> None:
        if self.paused == 0:
            return  # the process that was stopped is gone
        self.paused -= 1
        if self.paused == 0:
            self.trace.add(self.time.now, self.index, "resume", len(self._inbox))
            self._work(self.generation)

    # --- network ----------------------------------------------------------------------------------------------------

    def arrive(self, data: bytes, source: Address, plane: Plane) -> bool:
        """A packet is there. False: the kernel has no room for it."""
        if self.paused == 0 and self.factor <= 1.0:
            self._receive(data, source, plane)
            return True
        cost = len(data) + DATAGRAM_OVERHEAD_BYTES
        if self._inbox_bytes + cost > KERNEL_BUFFER_BYTES:
            self.dropped += 1
            return False
        self._inbox.append((data, source, plane, self.time.now))
        self._inbox_bytes += cost
        if self.paused == 0 and len(self._inbox) == 1:
            self.time.at(self._free_at, self._work, self.generation)
        return True

    def unreachable(self, address: Address, plane: Plane) -> None:
        """What was sent there was refused, or its stream is broken."""
        self.trace.add(self.time.now, self.index, "unreachable", address[0], int(plane))
        if self.node is not None:
            self._run(self.node.peer.unreachable, address, plane)

    def _receive(self, data: bytes, source: Address, plane: Plane) -> None:
        self.trace.packet(self.time.now, self.index, source[0], plane, len(data))
        if self.node is not None:
            self._run(self.node.peer.receive, data, source, plane)
        if self.received is not None and self.node is not None:
            self.received(self, plane)

    def _work(self, generation: int) -> None:
        """Drain what arrived (all of it, or one packet on a slow processor), then what is due."""
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
        """Let something else of the process act on it (traffic, probes, an operator), and send what comes of it."""
        if self.node is not None:
            self._run(call, self.node)

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Of the process that runs, with the time as its last argument."""
        node = self.node
        assert node is not None
        try:
            call(*arguments, self.time.now)
            self._flush(node)
        except Exception as error:  # the very thing to find: whatever it is, it is a failure of the run
            if self.raised is None:
                raise
            self.raised(self, error)
            return
        self._plan()

    def _flush(self, node: SimNode) -> None:
        sends = node.peer.take()
        if self.requested is not None and node.streams is not None:
            self.requested(self, node.streams.take())
        for to, plane, data in sends:
            self.net.send(self.address, to, plane, data)
        if self.changed is not None:
            for change in node.peer.changes():
                self.changed(self, change)

    def _plan(self) -> None:
        """See that the loop wakes when the node wants it; an earlier plan stays and finds nothing due."""
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
            return  # `resume` comes to it
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
        """Ask the name; go on asking for ever, whatever the answer."""
        if generation != self.generation or self.node is None:
            return
        if not self.paused and not self.leaving and self.resolve is not None:
            self.resolve(self.index, lambda found: self._found(generation, found))
        if self.node.alone():
            self._resolve_s = min(RESOLVE_S, self._resolve_s * RESOLVE_GROWTH)
        else:
            self._resolve_s = RESOLVE_S
        spread = 1.0 + RESOLVE_SPREAD * (2 * self.rng.random() - 1)
        pause = self._resolve_s if not self.node.alone() else self._resolve_s / RESOLVE_GROWTH
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
        if self.disk_full == 0 and self.node is not None:
            self.state = self.node.peer.state()
