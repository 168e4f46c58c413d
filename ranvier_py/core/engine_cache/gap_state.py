"""What a gap machine remembers: which messages it knows, those that a copy will lack, and the questions that are open.

Bounds: DIGESTS_MAX messages are remembered, the oldest go first; what is kept for a copy has those of the settings, and
beyond them the machine does not wait for the copy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import xxhash

from ranvier_py.core.engine_cache.gap_values import Apply, GapSettings

DIGESTS_MAX = 1024
"""Messages whose digest is remembered, to tell a repetition from a restart."""


@dataclass(slots=True)
class Replay:
    """A question to the replay socket."""

    ask: int
    first: int
    next_then: int
    deadline: float
    attempt: int
    checked: bool  # that the engine is the one we knew
    came: bool = False


@dataclass(slots=True)
class CopyAsked:
    """A question for a peer's copy."""

    ask: int
    deadline: float
    offer: tuple[int, int] | None = None  # number and digest of its last message, which is still to come


class Digests:
    """Messages that were applied, by number."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # oldest first

    def __contains__(self, seq: object) -> bool:
        return seq in self._known

    def get(self, seq: int) -> int | None:
        return self._known.get(seq)

    def add(self, seq: int, digest: int) -> None:
        self._known[seq] = digest
        if len(self._known) > DIGESTS_MAX:
            del self._known[next(iter(self._known))]

    def contradict(self, seq: int, payload: bytes) -> bool:
        """Whether another message is known under this number."""
        known = self._known.get(seq)
        return known is not None and known != xxhash.xxh3_64_intdigest(payload)

    def clear(self) -> None:
        self._known.clear()


class Kept:
    """Messages applied since a copy was asked for: it will lack those after its last one."""

    def __init__(self, settings: GapSettings) -> None:
        self._settings = settings
        self._messages: deque[Apply] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_full(self) -> bool:
        settings = self._settings
        return self._bytes > settings.held_bytes_max or len(self._messages) > settings.held_messages_max

    def add(self, message: Apply) -> None:
        self._messages.append(message)
        self._bytes += len(message.payload)

    def after(self, seq: int) -> list[Apply]:
        return [message for message in self._messages if message.seq > seq]

    def clear(self) -> None:
        self._messages.clear()
        self._bytes = 0
