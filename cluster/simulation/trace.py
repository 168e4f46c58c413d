"""Virtual time: a heap of what is going to happen, and the trace of what did.

Everything in a simulation happens in a call from `Heap.run`, at a time that was set when it was planned. Two things
planned for one time happen in the order in which they were planned. So a run is a function of its seed, and the hash of
its trace says whether two runs were the same one. Rules: nothing here reads a clock or draws a number.
Cost: about 1 us for an event, and as much again for its line in the trace.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from struct import Struct
from typing import Any, NamedTuple, TextIO

EVENTS_KEPT = 50
"""Of each node, for the report of a failure: some seconds of its life."""

PACKET = Struct("<diBI")


class Event(NamedTuple):
    """One line of the trace. `node` -1 is the world itself."""

    at_s: float
    node: int
    what: str
    detail: tuple[Any, ...]


class Heap:
    """What is planned, in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._planned: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        """Plan a call. A time that is over means now."""
        self._number += 1
        heapq.heappush(self._planned, (max(when, self.now), self._number, call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._planned, (self.now + seconds, self._number, call, arguments))

    def run(self, until: float) -> None:
        """Let everything happen that is planned up to and including `until`; then it is `until`."""
        planned, pop = self._planned, heapq.heappop
        while planned and planned[0][0] <= until:
            self.now, _, call, arguments = pop(planned)
            self.done += 1
            call(*arguments)
        self.now = until


class Trace:
    """The last events of each node, a hash over all, and optionally a file with all of them, one JSON list a line."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.events = 0
        self._hash = blake2b(digest_size=8)
        self._last: dict[int, deque[tuple[float, int, str, tuple[Any, ...]]]] = {}
        self._out = out

    def add(self, at_s: float, node: int, what: str, *detail: Any) -> None:
        """`detail`: numbers and text only, so that it looks the same in every process."""
        event = (at_s, node, what, detail)
        self.events += 1
        self._hash.update(repr(event).encode())
        kept = self._last.get(node)
        if kept is None:
            kept = self._last[node] = deque(maxlen=EVENTS_KEPT)
        kept.append(event)
        if self._out is not None:
            self._out.write(json.dumps([round(at_s, 6), node, what, *detail]) + "\n")

    def packet(self, at_s: float, node: int, source: str, plane: int, size: int) -> None:
        """A packet was heard: nine of ten events, so this way is shorter."""
        self.events += 1
        self._hash.update(PACKET.pack(at_s, node, plane, size))
        kept = self._last.get(node)
        if kept is None:
            kept = self._last[node] = deque(maxlen=EVENTS_KEPT)
        kept.append((at_s, node, "hear", (source, plane, size)))
        if self._out is not None:
            self._out.write(json.dumps([round(at_s, 6), node, "hear", source, plane, size]) + "\n")

    def digest(self) -> str:
        return self._hash.hexdigest()

    def last(self, nodes: tuple[int, ...]) -> list[Event]:
        """The last EVENTS_KEPT events of these nodes together, in order of time."""
        found = [Event(*event) for node in nodes for event in self._last.get(node, ())]
        return sorted(found, key=lambda event: event.at_s)[-EVENTS_KEPT:]
