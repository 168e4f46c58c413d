"""Values of a gap machine: levels, effects, settings, counters, and the messages that it holds back, within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ranvier_py.core.engine_cache.snapshot import Snapshot
from ranvier_py.core.metrics import counter

DIGESTS_MAX = 1024
"""Last messages whose digests are remembered."""


class Level(Enum):
    EXACT = "exact"  # every message since it started or cleared its cache was applied, or a snapshot and all after it
    REPAIRING = "repairing"  # a gap is being filled
    DEGRADED = "degraded"  # some messages are lost, those after them are known; or the stream is cut off
    ESTIMATED = "estimated"  # nothing is known, or no message of a gap came back


class EventLoss(Enum):
    """How much is lost for good."""

    NOTHING = 0
    PART = 1
    ALL = 2  # no message of a gap came back, or nothing from before we connected is known


class Apply(NamedTuple):
    """Apply this message now. Call `cleared` or `unreadable` if that is what it was."""

    seq: int
    payload: bytes


class StreamReset(NamedTuple):
    """The engine was restarted: nothing that was applied so far holds any more."""


class AskReplay(NamedTuple):
    """Ask the replay socket for messages from `first` on; hand in its answers under the same `ask`."""

    ask: int
    first: int


class AskPeer(NamedTuple):
    """Ask peers for an exact snapshot of what this engine holds."""

    ask: int


class Install(NamedTuple):
    """Replace all that was applied with this snapshot."""

    snapshot: Snapshot


class LevelChanged(NamedTuple):
    level: Level
    reason: str


Effect = Apply | StreamReset | AskReplay | AskPeer | Install | LevelChanged


@dataclass(frozen=True, slots=True)
class GapSettings:
    replay: bool = True  # the engine has a replay socket; else a cut must be too short for a new process to catch up
    peers: bool = True
    replay_timeout_s: float = 5.0  # until the first answer: engines need milliseconds, busy ones seconds
    replay_pause_s: float = 1.0  # between two answers, which come in one go: beyond that the end was lost
    replay_attempts_max: int = 3  # as long as each brings something new
    peer_timeout_s: float = 30.0  # a snapshot of 200,000 blocks is 5 MB, and is read in steps
    peer_interval_s: float = 30.0  # between two requests while something is missing
    verify_interval_s: float = 10.0  # least time between two checks of an engine whose answers contradict
    messages_per_s_max: float = 1000.0  # that an engine can publish: one for each of its steps, which take milliseconds
    estimated_after_s: float = 30.0  # after this time cut off, what was known is a guess
    recover_messages: int = 64  # in a row that turn ESTIMATED into DEGRADED
    held_messages_max: int = 20_000  # twice vLLM's replay buffer
    held_bytes_max: int = 64 << 20


@dataclass(slots=True)
class GapCounters:
    applied: int = counter("Messages with KV events that were applied.")
    repeated: int = counter("Messages with KV events that came a second time.")
    gaps: int = counter("Gaps in the sequence numbers of messages with KV events.")
    repaired: int = counter("Gaps in KV events that the engine's replay filled.")
    jumped: int = counter("Gaps in KV events that nothing could fill.")
    restarts: int = counter("Restarts of an engine that its KV events showed.")
    late: int = counter("Replays and snapshots of KV events that came after they were given up.")
    held_full: int = counter("Times that too many messages waited behind a gap in KV events.")
    snapshots_taken: int = counter("Snapshots of an engine's cache taken over from peers.")
    snapshots_refused: int = counter("Snapshots of an engine's cache from peers that did not fit its events.")
    snapshots_given_up: int = counter(
        "Snapshots of an engine's cache that peers did not send in time, or before too many events."
    )


@dataclass(slots=True)
class Replay:
    """An open question to the replay socket."""

    ask: int
    first: int
    next_then: int
    deadline: float
    attempt: int
    checked: bool  # the engine proved to be the process that we knew
    came: bool = False


@dataclass(slots=True)
class SnapshotAsked:
    """An open question for a peer's snapshot."""

    ask: int
    deadline: float
    offer: Snapshot | None = None  # one whose last message has not come here yet


class Messages:
    """Messages that wait, by number: behind a gap, or to be applied after a snapshot that was asked for."""

    def __init__(self, settings: GapSettings) -> None:
        self.by_seq: dict[int, bytes] = {}  # in order of arrival
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
        """Remove and return all messages."""
        messages, self.by_seq, self._bytes = self.by_seq, {}, 0
        return messages
