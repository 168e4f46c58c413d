"""Words of a gap machine: levels, effects, options, counters; and what it remembers, within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import xxhash

from ranvier_py.core.metrics import counter

DIGESTS_MAX = 1024
"""Messages whose digest is remembered."""


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


class Messages:
    """Some that wait, by number: behind a hole, or, since a snapshot was asked for, because it will lack the last."""

    def __init__(self, settings: GapSettings) -> None:
        self.by_seq: dict[int, bytes] = {}  # in the order in which they came
        self._settings = settings
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.by_seq)

    @property
    def is_full(self) -> bool:
        settings = self._settings
        return self._bytes > settings.held_bytes_max or len(self.by_seq) > settings.held_messages_max

    def add(self, seq: int, payload: bytes) -> None:
        self.by_seq[seq] = payload
        self._bytes += len(payload)

    def pop(self, seq: int) -> bytes | None:
        payload = self.by_seq.pop(seq, None)
        self._bytes -= len(payload or b"")
        return payload

    def clear(self) -> dict[int, bytes]:
        """What it had."""
        messages, self.by_seq, self._bytes = self.by_seq, {}, 0
        return messages


def digest_of(payload: bytes) -> int:
    """By which a repetition is distinguished from a restart."""
    return xxhash.xxh3_64_intdigest(payload)
