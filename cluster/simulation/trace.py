"""The trace of a run: the last events of each node, and a hash over all that shows whether two runs were the same."""

from __future__ import annotations

import json
from collections import deque
from hashlib import blake2b
from struct import Struct
from typing import Any, NamedTuple, TextIO

EVENTS_KEPT = 50
"""Events of each node that are kept for the report of a failure: the last seconds of its life."""

PACKET = Struct("<diBI")


class Event(NamedTuple):
    """One line of the trace. `node` -1 is the world itself."""

    at_s: float
    node: int
    what: str
    detail: tuple[Any, ...]


class Trace:
    """The last events of each node, a hash over all, and optionally a file with all of them, one JSON list a line."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.events = 0
        self._hash = blake2b(digest_size=8)
        self._last: dict[int, deque[tuple[float, int, str, tuple[Any, ...]]]] = {}
        self._out = out

    def add(self, at_s: float, node: int, what: str, *detail: Any) -> None:
        """Add an event. `detail` is numbers and text only, so that it is the same in every process."""
        event = (at_s, node, what, detail)
        self._hash.update(repr(event).encode())
        self._keep(event)

    def packet(self, at_s: float, node: int, source: str, plane: int, size: int) -> None:
        """Add the arrival of a packet. Nine of ten events are such, so their hash is shorter."""
        self._hash.update(PACKET.pack(at_s, node, plane, size))
        self._keep((at_s, node, "receive", (source, plane, size)))

    def _keep(self, event: tuple[float, int, str, tuple[Any, ...]]) -> None:
        self.events += 1
        at_s, node, what, detail = event
        kept = self._last.get(node)
        if kept is None:
            kept = self._last[node] = deque(maxlen=EVENTS_KEPT)
        kept.append(event)
        if self._out is not None:
            self._out.write(json.dumps([round(at_s, 6), node, what, *detail]) + "\n")

    def digest(self) -> str:
        return self._hash.hexdigest()

    def last(self, nodes: tuple[int, ...]) -> list[Event]:
        """The last EVENTS_KEPT events of these nodes together, in order of time."""
        found = [Event(*event) for node in nodes for event in self._last.get(node, ())]
        return sorted(found, key=lambda event: event.at_s)[-EVENTS_KEPT:]
