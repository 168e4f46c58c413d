"""Words of a gap machine: levels, effects, options, counters; and what it remembers, within bounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import xxhash

from ranvier_py.core.metrics import counter

DIGESTS_MAX = 1024
"""Messages whose digest is remembered, to tell a repetition from a restart."""


class Level(Enum):
    EXACT = "exact"
    REPAIRING = "repairing"
    DEGRADED = "degraded"
    ESTIMATED = "estimated"


class EventLoss(Enum):
    """What is missing for good."""

    NOTHING = 0
    PART = 1
    ALL = 2  # of a gap, or of the time before we came


class Apply(NamedTuple):
    """Apply this message now. Call `cleared` or `unreadable` if it was so."""

    seq: int
    payload: bytes


class StreamReset(NamedTuple):
    """The engine was restarted: it holds nothing that was applied so far."""


class AskReplay(NamedTuple):
    """Ask the replay socket from `first` on; hand in what comes under the same `ask`."""

    ask: int
    first: int


class AskPeer(NamedTuple):
    """Ask peers for an exact snapshot of what this engine holds."""

    ask: int


class Install(NamedTuple):
    """Take the snapshot that was just offered in place of all that was applied."""

    ask: int


class LevelChanged(NamedTuple):
    level: Level
    reason: str


Effect = Apply | StreamReset | AskReplay | AskPeer | Install | LevelChanged


@dataclass(frozen=True, slots=True)
class GapSettings:
    replay: bool = True  # the engine has a replay socket
    peers: bool = True
    replay_timeout_s: float = 5.0  # without an answer: engines answer within milliseconds, a busy one within seconds
    replay_pause_s: float = 1.0  # within an answer, which comes in one go: then its end was lost
    replay_attempts_max: int = 3  # while each brings something new
    peer_timeout_s: float = 30.0  # a snapshot of 200,000 blocks is 5 MB, and is read in steps
    peer_interval_s: float = 30.0  # between two questions while something is missing
    verify_interval_s: float = 10.0  # an engine whose answers contradict is asked that often
    estimated_after_s: float = 30.0  # cut off for that long, what was known is a guess
    recover_messages: int = 64  # in a row, after which ESTIMATED is DEGRADED
    held_messages_max: int = 20_000  # twice vLLM's replay buffer
    held_bytes_max: int = 64 << 20


@dataclass(slots=True)
class GapCounters:
    applied: int = counter("Messages applied.")
    repeated: int = counter("Messages that came again.")
    gaps: int = counter("Gaps in the numbers of messages.")
    repaired: int = counter("Gaps that replay filled.")
    jumped: int = counter("Gaps that were left.")
    restarts: int = counter("Restarts of the engine that its messages showed.")
    late: int = counter("Answers to a question that was closed.")
    held_full: int = counter("Times that too much waited behind a gap.")
    snapshots_taken: int = counter("Snapshots of peers taken.")
    snapshots_refused: int = counter("Snapshots of peers that did not fit.")
    snapshots_given_up: int = counter("Snapshots that did not come in time, or after too much.")


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
class SnapshotAsked:
    """A question for a peer's snapshot."""

    ask: int
    deadline: float
    offer: tuple[int, int] | None = None  # number and digest of its last message, which is still to come


class Digests:
    """The last messages that were applied, by number."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # oldest first

    def __contains__(self, seq: object) -> bool:
        return seq in self._known

    def get(self, seq: int) -> int | None:
        return self._known.get(seq)

    def add(self, seq: int, payload: bytes) -> None:
        self._known[seq] = xxhash.xxh3_64_intdigest(payload)
        if len(self._known) > DIGESTS_MAX:
            del self._known[next(iter(self._known))]

    def contradict(self, seq: int, payload: bytes) -> bool:
        """Whether another message is known under this number."""
        known = self._known.get(seq)
        return known is not None and known != xxhash.xxh3_64_intdigest(payload)

    def clear(self) -> None:
        self._known.clear()


class Kept:
    """Messages applied since a snapshot was asked for: it will lack those after its last one."""

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
