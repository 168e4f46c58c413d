"""Words of the engine truth: who says something, what it keeps, what can be seen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId, Fingerprint


class Held(Protocol):
    """What a channel keeps for one engine, or for one data-parallel rank of it. A Residency is one."""

    def tier(self, fingerprint: Fingerprint) -> Tier:
        """Where this prefix is, as of the last Changes that were handed in. ABSENT: it is not held."""
        ...


@runtime_checkable
class HeldMany(Protocol):
    """A Held that answers for many prefixes at once, which a sweep asks for: ten times as fast."""

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        """Those of these that are held, and where."""
        ...


class Source(NamedTuple):
    """Who speaks of a backend: a channel, or a part of one.

    Names are `channel` or `channel/part`: "push", "zmq/0" (rank 0). The parts of a channel make up one engine together,
    several channels each tell of the whole of it.
    """

    backend: BackendId
    name: str

    @property
    def channel(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class EngineCacheView:
    """One source, for status and metrics. Ages in seconds; None where never."""

    source: Source
    level: Level
    reason: str
    level_age_s: float
    changed_age_s: float | None
    changes: int  # prefixes that came, moved or went, since it was opened
    cleared: int  # times that it said that all is void


@dataclass(slots=True)
class EngineCacheCounters:
    """Counters since start."""

    confirmed: int = 0  # prefixes that an engine told of and that became claims
    removed: int = 0  # claims withdrawn because an engine said so
    passed: int = 0  # changes at depths where the table is never asked
    refused: int = 0  # ... and at others, for one engine had its share of the table
    voided: int = 0  # times that everything of one engine became void
    affirmed: int = 0  # claims that a sweep raised or refreshed
    retracted: int = 0  # claims that a sweep withdrew because the engine does not hold them
    unknown: int = 0  # words of a source that is not open, or of a backend that is gone
