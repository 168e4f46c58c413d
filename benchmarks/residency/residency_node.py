"""The core of a node that reads engines' events, for `residency`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time_ns

from benchmarks.residency.residency_streams import Streams
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Apply, GapSettings, Level
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher
from ranvier_py.core.routing.route_table import RouteTable

BLOCK_TOKENS = 16
KEY = b"a key of thirty-two bytes' length"
NAMESPACE = Fingerprint(7)
GENERATION = 1
STEPS_PER_S = 50.0
PARTS = ("gap_machine", "decoder", "residency", "settle", "engine_cache")


@dataclass(slots=True)
class Fed:
    """What a node has for one engine. `seq`: the number of its next message."""

    machine: GapMachine
    decoder: EventDecoder
    residency: Residency
    source: Source
    seq: int = 0


class Node:
    """The core of a node that reads engines' events."""

    def __init__(self, engines: int, *, engine_caches: bool) -> None:
        hasher = TokenHasher(KEY, BLOCK_TOKENS)
        self.routes = RouteTable(capacity=1_000_000)
        self.engine_caches = EngineCaches(self.routes, lambda _backend: GENERATION) if engine_caches else None
        self.engines = []
        for number in range(engines):
            residency = Residency(hasher, lambda _scope: NAMESPACE)
            source = Source(BackendId(number), "zmq/0")
            machine = GapMachine(GapSettings(replay=False))
            machine.connected(0.0)
            if self.engine_caches is not None:
                self.engine_caches.open(source, residency, 0.0)
                self.engine_caches.set_level(source, Level.EXACT, "", 0.0)
            self.engines.append(Fed(machine, EventDecoder(), residency, source))

    def feed(self, engine: Fed, payload: bytes, now: float, spent: list[int]) -> None:
        """Process one message, and add the nanoseconds of each part of the work to `spent`, in the order of PARTS."""
        clock = process_time_ns
        start = clock()
        effects = engine.machine.live(engine.seq, payload, now)
        engine.seq += 1
        gap = clock()
        batches = [engine.decoder.decode(effect.payload) for effect in effects if isinstance(effect, Apply)]
        decoded = clock()
        for batch in batches:
            for event in batch.events:
                engine.residency.apply(event)
        applied = clock()
        changes = engine.residency.settle()
        settled = clock()
        if self.engine_caches is not None:
            self.engine_caches.changed(engine.source, changes, now)
        recorded = clock()
        for place, took in enumerate(
            (gap - start, decoded - gap, applied - decoded, settled - applied, recorded - settled)
        ):
            spent[place] += took


def apply_streams(streams: Sequence[Streams], engines: int, *, engine_caches: bool) -> tuple[Node, int, list[int]]:
    """Fill the engines, then process the measured messages, the engines in turn. Returns node, blocks, nanoseconds."""
    node, spent, blocks = Node(engines, engine_caches=engine_caches), [0] * len(PARTS), 0
    for payloads in ("filling", "payloads"):
        spent = [0] * len(PARTS)
        gc.collect()
        gc.freeze()
        lists = [getattr(streams[number % len(streams)], payloads) for number in range(engines)]
        for step in range(max(map(len, lists))):
            for engine, messages in zip(node.engines, lists, strict=True):
                if step < len(messages):
                    node.feed(engine, messages[step], step / STEPS_PER_S, spent)
    blocks = sum(streams[number % len(streams)].blocks for number in range(engines))
    return node, blocks, spent
