"""What a gap machine says and is told: levels, effects, settings, counters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Level(Enum):
    EXACT = "exact"
    REPAIRING = "repairing"
    DEGRADED = "degraded"
    ESTIMATED = "estimated"


class Loss(Enum):
    """What is missing for good."""

    NOTHING = 0
    PART = 1
    ALL = 2  # of a gap, or of the time before we came


class Apply(NamedTuple):
    """Apply this message now. Tell `cleared` or `unreadable` if it was so."""

    seq: int
    payload: bytes


class Reset(NamedTuple):
    """The engine was restarted: it holds nothing that was applied so far."""


class AskReplay(NamedTuple):
    """Ask the replay socket from `first` on; hand in what comes under the same `ask`."""

    ask: int
    first: int


class AskPeer(NamedTuple):
    """Ask peers for an exact copy of what this engine holds."""

    ask: int


class Install(NamedTuple):
    """Take the copy that was just offered in place of all that was applied."""

    ask: int


class LevelChanged(NamedTuple):
    level: Level
    reason: str


Effect = Apply | Reset | AskReplay | AskPeer | Install | LevelChanged


@dataclass(frozen=True, slots=True)
class GapSettings:
    replay: bool = True  # the engine has a replay socket
    peers: bool = True
    replay_timeout_s: float = 5.0  # without an answer: engines answer within milliseconds, a busy one within seconds
    replay_pause_s: float = 1.0  # within an answer, which comes in one go: then its end was lost
    replay_attempts_max: int = 3  # while each brings something new
    peer_timeout_s: float = 30.0  # a copy of 200,000 blocks is 5 MB, and is read in steps
    peer_interval_s: float = 30.0  # between two questions while something is missing
    verify_interval_s: float = 10.0  # an engine whose answers contradict is asked that often
    estimated_after_s: float = 30.0  # cut off for that long, what was known is a guess
    recover_messages: int = 64  # in a row, after which ESTIMATED is DEGRADED
    held_messages_max: int = 20_000  # twice vLLM's replay buffer
    held_bytes_max: int = 64 << 20


@dataclass(slots=True)
class GapCounts:
    """Counters since start."""

    applied: int = 0
    repeated: int = 0  # messages that came again
    gaps: int = 0
    repaired: int = 0  # gaps that replay filled
    jumped: int = 0  # holes that were left
    restarts: int = 0
    late: int = 0  # answers to a question that is closed
    held_full: int = 0
    copies_taken: int = 0
    copies_refused: int = 0
    resumed: int = 0  # streams that began with a standby's copy
    copies_given_up: int = 0  # no answer in time, or too much came meanwhile
