"""Connections between simulated engines' publishers and the nodes that read them: subscriptions, losses, replay.

A publisher sends each message to every subscriber, in order. Some messages are lost (as beyond a high-water mark), and
all while the publisher can't be reached. A replay is asked for over a stream and loses nothing, but has only messages
that the engine still keeps. A paused process gets its messages when it resumes. Cost: one event per message and reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cluster.network.virtual_time import VirtualTime
from cluster.simulation.node_streams import ReplayRequested, StreamRequest, Subscribed, Unsubscribed
from cluster.simulation.sim_engine import SimKv
from cluster.simulation.sim_host import SimHost

DELAY_S = 0.001
REPLAY_S = 0.005
CONNECT_S = 0.01
STOPPED_S = 0.1
LOOK_S = 0.1
"""How often a node looks after its streams."""


@dataclass(slots=True)
class Wire:
    """One subscription."""

    host: SimHost
    generation: int
    engine: int
    connected: bool = False
    arrives_at: float = 0.0  # when the last message arrives: later ones do not overtake it


class SimStreams:
    """All connections, see the module. `kvs` are by engine."""

    def __init__(self, time: VirtualTime, rng: Random, kvs: Sequence[SimKv]) -> None:
        self.time = time
        self.kvs = kvs
        self.most_subscribers = 0
        self._rng = rng
        self._wires: dict[tuple[int, int, int], Wire] = {}

    def start(self, host: SimHost) -> None:
        """Let a process look after its streams for as long as it runs."""
        self.time.after(LOOK_S * host.rng.random(), self._look, host, host.generation)

    def subscribers(self, engine: int) -> list[SimHost]:
        """Return the hosts that receive this engine's messages now."""
        wires = [wire for wire in self._wires.values() if wire.engine == engine]
        return [wire.host for wire in wires if self._lives(wire)]

    def readers(self, engine: int) -> list[SimHost]:
        """Return the hosts that apply this engine's messages for all nodes."""
        found = [(host, host.node.streams) for host in self.subscribers(engine) if host.node is not None]
        return [host for host, streams in found if streams is not None and streams.level(engine) is not None]

    def publish(self, engine: int, messages: Sequence[tuple[int, bytes]]) -> None:
        kv = self.kvs[engine]
        if not kv.reachable:
            return
        loss = kv.loss.value
        for wire in [wire for wire in self._wires.values() if wire.engine == engine and wire.connected]:
            for seq, payload in messages:
                if loss and self._rng.random() < loss:
                    continue
                wire.arrives_at = max(self.time.now + DELAY_S, wire.arrives_at)
                self.time.at(wire.arrives_at, self._arrive, wire, seq, payload)

    def cut(self, engine: int) -> None:
        """Keep all nodes from this publisher."""
        self.kvs[engine].cut += 1
        self._break(engine)

    def halted(self, engine: int) -> None:
        """Take in that the engine's process has ended: its connections break."""
        self.kvs[engine].down = True
        self._break(engine)

    def restarted(self, engine: int) -> None:
        """Take in that the engine has a new process: connections break and are made anew."""
        self._break(engine)
        self.kvs[engine].down = False
        self._make(engine)

    def mend(self, engine: int) -> None:
        self.kvs[engine].cut -= 1
        self._make(engine)

    def _break(self, engine: int) -> None:
        for wire in [wire for wire in self._wires.values() if wire.engine == engine and wire.connected]:
            wire.connected = False
            self._notify(wire, "disconnected")

    def _make(self, engine: int) -> None:
        for wire in [wire for wire in self._wires.values() if wire.engine == engine]:
            self.time.after(CONNECT_S, self._connect, wire)

    # --- what nodes want --------------------------------------------------------------------------------------------

    def carry(self, host: SimHost, asks: Sequence[StreamRequest]) -> None:
        for ask in asks:
            place = (host.index, host.generation, ask.engine)
            if isinstance(ask, Subscribed):
                wire = self._wires[place] = Wire(host, host.generation, ask.engine)
                self.time.after(CONNECT_S, self._connect, wire)
                self.most_subscribers = max(self.most_subscribers, len(self.subscribers(ask.engine)))
            elif isinstance(ask, Unsubscribed):
                self._wires.pop(place, None)
            elif place in self._wires:
                self.time.after(REPLAY_S, self._replay, self._wires[place], ask)

    def _lives(self, wire: Wire) -> bool:
        place = (wire.host.index, wire.generation, wire.engine)
        if wire.host.generation != wire.generation or wire.host.node is None:
            self._wires.pop(place, None)
            return False
        return self._wires.get(place) is wire

    def _connect(self, wire: Wire) -> None:
        if self._lives(wire) and not wire.connected and self.kvs[wire.engine].reachable:
            wire.connected = True
            self._notify(wire, "connected")

    def _arrive(self, wire: Wire, seq: int, payload: bytes) -> None:
        if not self._lives(wire) or not wire.connected:
            return
        if wire.host.paused:
            self.time.after(STOPPED_S, self._arrive, wire, seq, payload)
            return
        wire.host.run(lambda node, now: node.streams.live(wire.engine, seq, payload, now) if node.streams else None)

    def _replay(self, wire: Wire, ask: ReplayRequested) -> None:
        kv = self.kvs[wire.engine]
        if not self._lives(wire):
            return
        answers = None if not kv.reachable else [message for message in kv.buffer if message[0] >= ask.first]
        wire.host.run(lambda node, now: node.streams.answered(ask, answers, now) if node.streams else None)

    def _notify(self, wire: Wire, what: str) -> None:
        wire.host.run(lambda node, now: node.streams.wired(wire.engine, what, now) if node.streams else None)

    def _look(self, host: SimHost, generation: int) -> None:
        if host.generation != generation or host.node is None:
            return
        if not host.paused:
            host.run(lambda node, now: node.streams.look(now) if node.streams else None)
        self.time.after(LOOK_S, self._look, host, generation)
