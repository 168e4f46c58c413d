"""What an event stream has yet to apply to its residency, in order.

Bound: of more than WAITING_BYTES_MAX the newest message is dropped and counted, as if it were unreadable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ranvier_py.core.engine_cache.gap_values import Apply, Install, StreamReset
from ranvier_py.core.engine_cache.sources.event_values import Batch
from ranvier_py.core.engine_cache.sources.events import EventDecoder

WAITING_BYTES_MAX = 128 << 20
"""More than a gap holds back, or than an engine sends while they are applied."""


@dataclass(slots=True)
class MessageProgress:
    """A message that is being applied, portion by portion, and what was in it so far."""

    seq: int
    size_bytes: int
    portions: Iterator[Batch]
    cleared: bool = False
    unread: bool = False


class EventBacklog:
    def __init__(self, decoder: EventDecoder) -> None:
        self.waiting: deque[MessageProgress | StreamReset | Install] = deque()
        self.bytes = 0  # of messages, until they are applied
        self._decoder = decoder

    def add(self, effect: Apply | StreamReset | Install) -> None:
        if isinstance(effect, Apply):
            self.bytes += len(effect.payload)
            self.waiting.append(MessageProgress(effect.seq, len(effect.payload), self._portions(effect.payload)))
        else:  # what came before is void
            self.waiting.clear()
            self.bytes = 0
            self.waiting.append(effect)

    def _portions(self, payload: bytes) -> Iterator[Batch]:
        if self.bytes <= WAITING_BYTES_MAX:
            return self._decoder.portions(payload)
        self._decoder.counters.dropped += 1
        return iter((Batch((), unread=1),))
