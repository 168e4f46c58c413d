"""The log of route updates: the updates of every origin, numbered, and the version vector over them.

All logs share one bound: beyond it the update that came first goes, whatever its origin, so that each origin keeps a
share according to its activity. An *absent* origin is no live member; forgotten when all its updates have expired, it
stays on a list for FORGOTTEN_S, so that no late clock brings it back. Invariant: a number is in the vector only if each
update up to it was received here, or was in a table that was merged (test_update_log.py). Bounds: `entries_max` updates
of ROUTE_UPDATE_BYTES_MEAN on average, ORIGINS_MAX origins, FORGOTTEN_MAX forgotten ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import ItemsView, Iterator, Sequence
from math import ceil, inf
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.routing.peers.route_messages import RouteUpdates
from ranvier_py.core.routing.peers.route_settings import RouteGossipCounters, RouteGossipSettings
from ranvier_py.core.routing.peers.route_updates import ENTRY_BYTES, ROUTE_UPDATE_BYTES_MAX, Entry
from ranvier_py.core.splitmix import GOLDEN, MASK, mix

ORIGINS_MAX = 4096
"""Sessions of 1000 nodes, and three restarts of each within the TTL. Updates of further origins are dropped."""

FORGOTTEN_MAX = 4096
FORGOTTEN_S = 120.0
"""How much later than we another node may forget an origin: TTL and membership differ by seconds, not minutes."""

COMPACT_AT = 512
"""Trimmed route updates stay in a log's list until they are at least this many and half of the list."""

AGE_MAX_S, HELD_MAX_MS = 65_535, 65_535
BATCH_ENTRIES_MAX = 128
BATCH_BYTES_MAX = 16 * 1024
"""A message of route updates has no more entries and bytes than these."""

PRUNED_AT_ONCE_MAX = 4096

ROUTE_UPDATE_BYTES_MEAN = 128
"""Twice what the update of one turn takes; those of many turns and of long prompts take up to ten times as much."""


def term(origin: int, number: int) -> int:
    """Return what one origin with its number adds to the hash."""
    return mix((mix(origin) + number * GOLDEN) & MASK)


class VersionVector:
    """Origin (session, u64) -> number (u64) up to which all its updates are here. An origin's number only grows. By the
    8 bytes of the hash, the XOR of one pseudo-random number for each pair, two nodes compare all of it."""

    __slots__ = ("_hash", "_moved", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._hash = 0
        self._moved: dict[int, int] = {}  # origins that changed since the hash -> the number that the hash has

    @property
    def hash(self) -> int:
        numbers, moved = self._numbers, self._moved
        for origin, before in moved.items():
            for number in (before, numbers.get(origin, 0)):
                self._hash ^= term(origin, number) if number else 0
        moved.clear()
        return self._hash

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, origin: int) -> int:
        """Return the number of this origin; 0 if it has none."""
        return self._numbers.get(origin, 0)

    def items(self) -> ItemsView[int, int]:
        return self._numbers.items()

    def raise_to(self, origin: int, number: int) -> None:
        """Raise the number of `origin`: all its updates up to `number`, which must be greater than before, are here."""
        before = self._numbers.get(origin, 0)
        assert number > before
        self._moved.setdefault(origin, before)
        self._numbers[origin] = number

    def drop(self, origin: int) -> None:
        """Drop an origin, if it is there."""
        number = self._numbers.pop(origin, 0)
        if number:
            self._moved.setdefault(origin, number)


class LoggedUpdate(NamedTuple):
    """One route update in a log. Both times are of the local clock."""

    route_update: bytes
    evidence: float  # not later than when it was learned
    learned: float  # when its origin made it, estimated from how long its senders held it


class OriginLog:
    """The kept route updates of one origin: numbers base + 1 … base + len()."""

    __slots__ = ("_bytes", "_list", "_offsets", "_start", "absent_since", "base")

    def __init__(self, base: int, absent_since: float) -> None:
        self.base = base
        self.absent_since = absent_since  # inf = it is a live member
        self._list: list[LoggedUpdate] = []
        self._offsets: list[int] = []  # of each update: bytes on the wire of all that were appended before it
        self._bytes = 0  # on the wire, of all that were ever appended
        self._start = 0  # updates before this place are trimmed

    def __len__(self) -> int:
        return len(self._list) - self._start

    def append(self, kept: LoggedUpdate) -> None:
        self._list.append(kept)
        self._offsets.append(self._bytes)
        self._bytes += len(kept.route_update) + ENTRY_BYTES

    def bytes_after(self, number: int) -> int:
        """Return the bytes on the wire of the updates from number + 1 on; `number` must not be below the base."""
        at = self._start + number - self.base
        return self._bytes - self._offsets[at] if at < len(self._offsets) else 0

    def first(self) -> LoggedUpdate:
        return self._list[self._start]

    def after(self, number: int) -> Iterator[LoggedUpdate]:
        """Yield the updates from number + 1 on; `number` must not be below the base."""
        for at in range(self._start + number - self.base, len(self._list)):
            yield self._list[at]

    def clear(self) -> None:
        """Drop all updates, for good."""
        self._list.clear()
        self._offsets.clear()
        self._start = 0

    def bytes_kept(self) -> int:
        return self._bytes - self._offsets[self._start] if len(self) else 0

    def trim(self) -> int:
        """Drop the oldest update. Returns the bytes that it took on the wire."""
        size = len(self.first().route_update) + ENTRY_BYTES
        self._start += 1
        self.base += 1
        if self._start >= COMPACT_AT and 2 * self._start >= len(self._list):
            del self._list[: self._start]
            del self._offsets[: self._start]
            self._start = 0
        return size


class UpdateLogs:
    """The logs of all origins and the version vector. A route update expires `ttl_s` after its evidence."""

    def __init__(self, session: int, settings: RouteGossipSettings, counters: RouteGossipCounters) -> None:
        self.session = session
        self.vector = VersionVector()
        self.counters = counters
        self._entries_max = settings.log_entries_max
        self._bytes_max = self._entries_max * (ROUTE_UPDATE_BYTES_MEAN + ENTRY_BYTES)
        self.bytes_kept = 0  # on the wire, of all updates in the logs
        self._ttl_s = settings.ttl_s
        self._forget_after_s = settings.forget_after_s
        self._logs: dict[int, OriginLog] = {session: OriginLog(0, inf)}
        self._order = deque[OriginLog]()  # the log of each kept route update, oldest first; some may be cleared
        self._live: dict[int, None] = {}
        self._forgotten = BoundedDict[int, float](FORGOTTEN_MAX)  # origin -> until when it counts as forgotten

    def __len__(self) -> int:
        """How many places are taken, at most `entries_max`. Those of cleared logs are freed once they come first."""
        return len(self._order)

    @property
    def own(self) -> int:
        """The number of the last route update of this node."""
        return self.vector[self.session]

    def base(self, origin: int) -> int:
        """Return the number up to which an origin's updates can't be had here. 0 for an unknown origin."""
        log = self._logs.get(origin)
        return log.base if log is not None else 0

    def origins(self) -> Sequence[int]:
        return list(self._logs)

    def is_forgotten(self, origin: int) -> bool:
        return origin in self._forgotten

    # --- growing ----------------------------------------------------------------------------------------------------

    def append(self, route_update: bytes, at: float) -> None:
        """Add a route update of this node, with the time of its evidence."""
        self._push(self._logs[self.session], LoggedUpdate(route_update, at, at))
        self.vector.raise_to(self.session, self.own + 1)

    def open(self, origin: int, now: float) -> bool:
        """Begin the log of an origin if there is none. Returns False if it is forgotten or there are ORIGINS_MAX."""
        if origin in self._logs:
            return True
        if origin in self._forgotten:
            return False
        if len(self._logs) >= ORIGINS_MAX:
            return False
        self._logs[origin] = OriginLog(0, inf if origin in self._live else now)
        return True

    def extend(self, origin: int, kept: Sequence[LoggedUpdate]) -> None:
        """Add the route updates, at least one, that follow the last one of an open origin."""
        log = self._logs[origin]
        for each in kept:
            self._push(log, each)
        self.vector.raise_to(origin, self.vector[origin] + len(kept))

    def adopt(self, origin: int, number: int) -> bool:
        """Raise an origin to `number`, since a merged table has its routes up to it. The updates in its log go.

        Returns False, and changes nothing, if the number is not above ours, or the origin is ours or not open.
        """
        if origin == self.session or number <= self.vector[origin] or origin not in self._logs:
            return False
        before = self._logs[origin]
        self._logs[origin] = OriginLog(number, before.absent_since)
        self.bytes_kept -= before.bytes_kept()
        before.clear()
        self.vector.raise_to(origin, number)
        return True

    def _push(self, log: OriginLog, kept: LoggedUpdate) -> None:
        log.append(kept)
        order = self._order
        order.append(log)
        self.bytes_kept += len(kept.route_update) + ENTRY_BYTES
        while len(order) > self._entries_max or self.bytes_kept > self._bytes_max:
            oldest = order.popleft()
            if len(oldest):
                self.counters.trimmed += 1
                self.bytes_kept -= oldest.trim()

    # --- reading ----------------------------------------------------------------------------------------------------

    def batch(self, origin: int, after: int, now: float, bytes_max: int = BATCH_BYTES_MAX) -> RouteUpdates | None:
        """Return the updates after `after`, which must not be below the base, as one message; None if there are none.

        It has at least one update, even if that exceeds `bytes_max`. Of an expired one only the number is sent, and of
        one that is too old for its age to be stated: nothing gets younger on its way.
        """
        log = self._logs.get(origin)
        if log is None or after >= self.vector[origin]:
            return None
        assert after >= log.base
        entries: list[Entry] = []
        learned = now
        for kept in log.after(after):
            age_s = ceil(now - kept.evidence)
            route_update = kept.route_update if age_s < self._ttl_s and age_s <= AGE_MAX_S else b""
            bytes_max -= len(route_update) + ENTRY_BYTES
            if entries and (bytes_max < 0 or len(entries) >= BATCH_ENTRIES_MAX):
                break
            entries.append(Entry(min(max(age_s, 0), AGE_MAX_S), route_update))
            learned = kept.learned
        held_ms = min(max(round((now - learned) * 1000), 0), HELD_MAX_MS)
        return RouteUpdates(0 if origin == self.session else origin, after, tuple(entries), held_ms)

    def bytes_after(self, origin: int, after: int) -> int:
        """Return how many bytes the updates after a number take on the wire, as far as they are here."""
        log = self._logs[origin]
        return log.bytes_after(max(after, log.base))

    def evidence_after(self, origin: int, after: int) -> float:
        """Return the evidence time of the first update after a number, which is not below the base nor the last."""
        return next(self._logs[origin].after(after)).evidence

    def is_spent(self, origin: int) -> bool:
        """Whether an origin is absent and no update of it is left to be passed on."""
        log = self._logs[origin]
        return log.absent_since < inf and not len(log)

    # --- forgetting -------------------------------------------------------------------------------------------------

    def present(self, live: Sequence[int], now: float) -> None:
        """Set the live sessions. Origins among them are not absent, and no longer forgotten."""
        self._live = dict.fromkeys(live)
        for origin, log in self._logs.items():
            if origin in self._live or origin == self.session:
                log.absent_since = inf
            elif log.absent_since == inf:
                log.absent_since = now
        for origin in [origin for origin in self._forgotten if origin in self._live]:
            del self._forgotten[origin]

    def prune(self, now: float) -> bool:
        """Drop what has expired: route updates, then origins, then forgotten origins. Call it about once a second.

        Returns whether that was all: after a long sleep everything has expired, and goes in steps of 2 ms.
        """
        order, ttl_s = self._order, self._ttl_s
        for _ in range(PRUNED_AT_ONCE_MAX):
            if not order:
                break
            oldest = order[0]
            if len(oldest):
                if oldest.first().evidence + ttl_s > now:
                    break
                self.bytes_kept -= oldest.trim()
            order.popleft()
        else:
            return False
        life_s = max(ttl_s, self._forget_after_s)
        for origin in [origin for origin, log in self._logs.items() if log.absent_since + life_s <= now]:
            self._forget(origin, now)
        for origin in [origin for origin, until in self._forgotten.items() if until <= now]:
            del self._forgotten[origin]
        return True

    def _forget(self, origin: int, now: float) -> None:
        log = self._logs.pop(origin)
        self.bytes_kept -= log.bytes_kept()
        log.clear()
        self.vector.drop(origin)
        self._forgotten[origin] = now + FORGOTTEN_S


def fits(route_update: bytes) -> bytes:
    """Return the route update, or an empty one if no batch could carry it: its number counts, and nobody retries it."""
    return route_update if len(route_update) <= ROUTE_UPDATE_BYTES_MAX else b""
