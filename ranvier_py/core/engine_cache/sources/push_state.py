"""What workers push: the forward map (hash -> workers) and the reverse map (worker -> hashes) of the Purdue report.
Added is what the report lacks: order, bounds, and comparison in place of repetition. Pure.

A worker numbers its messages; a number that is not new is dropped, one that is too high shows that something was lost,
and a snapshot is wanted. A new incarnation begins again at any number, an old one is never heard again. The plain form
of the report has neither and counts as it comes. A snapshot is taken in bucket by bucket: it changes what differs,
never blocks for long, and what a worker said since it was begun stands: `begin`, `replace` for each bucket, `finish`.
Whoever is silent for three syncs is not believed any more, until it speaks.

Every method returns what became of hashes as `Change`s, whose `fingerprint` is the hash.
Invariant: a worker is among the holders of a hash exactly if the hash is in its table; a hash nobody holds has no
entry. Other workers' hashes are never touched by what one says.
Bounds: hashes of one worker, hashes of all; what is beyond is refused and counted, and compared no more: the worker's
table is not EXACT then. Cost: 3 to 6 us for a hash that comes or goes, 0.5 us for one that stays in a
snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.push_table import Entry, HashTable, bucket_of, tokens_in
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint

INCARNATIONS_KEPT = 4
"""Earlier processes of one reporter whose late messages are recognised."""


@dataclass(frozen=True, slots=True)
class PushSettings:
    hashes_max: int = 1_000_000  # of one worker: a cache of 16 million tokens
    hashes_all_max: int = 8_000_000  # 1.3 GB
    silent_s: float = 15.0  # three syncs of 5 s


@dataclass(slots=True)
class PushCounts:
    """Counters since start; in hashes where nothing else is said."""

    messages: int = 0
    old: int = 0  # messages that came again, late, or from an earlier process
    gaps: int = 0  # times that numbers were missing
    incarnations: int = 0
    stored: int = 0
    evicted: int = 0
    evicted_unknown: int = 0
    refused: int = 0  # no room
    snapshots: int = 0
    healed_gone: int = 0  # that only a snapshot took away
    healed_new: int = 0  # that only a snapshot brought
    matched: int = 0  # comparisons that found no difference
    differed: int = 0
    silenced: int = 0  # times that a worker was not believed any more


class Word(NamedTuple):
    """What comes with each message. No incarnation: the plain form, without numbers."""

    scheme: str
    incarnation: str = ""
    seq: int = 0
    model: str = ""


class PushView(NamedTuple):
    """One worker, for status and metrics."""

    backend: BackendId
    scheme: str
    hashes: int
    level: Level
    reason: str
    seq: int
    heard_age_s: float
    synced_age_s: float | None


class Worker:
    """One worker's table and where its messages stand."""

    __slots__ = (
        "_past",
        "certain",
        "complete",
        "filling",
        "heard_at",
        "incarnation",
        "model",
        "scheme",
        "seq",
        "silent",
        "synced",
        "synced_at",
        "table",
        "touched",
        "why",
    )

    def __init__(self, scheme: str, model: str) -> None:
        self.scheme = scheme
        self.model = model  # that its hashes are of; empty: not said
        self.table = HashTable()
        self.incarnation = ""
        self._past: deque[str] = deque(maxlen=INCARNATIONS_KEPT)
        self.seq = 0
        self.synced = False
        self.synced_at: float | None = None
        self.heard_at = 0.0
        self.silent = False
        self.complete = True  # nothing was refused since the last snapshot
        self.certain = True  # the reporter knows its engine exactly
        self.why = "no snapshot yet"
        self.filling = 0  # number of the snapshot in work
        self.touched: dict[int, None] | None = None  # hashes told of since it was begun

    def tier(self, fingerprint: Fingerprint) -> Tier:
        return self.table.tier(fingerprint)

    @property
    def level(self) -> Level:
        if self.silent or self.synced_at is None:
            return Level.ESTIMATED
        if not self.synced:
            return Level.REPAIRING
        return Level.EXACT if self.complete and self.certain else Level.DEGRADED

    def takes(self, word: Word, counts: PushCounts) -> bool:
        """Whether this message is news; notes where it stands."""
        if not word.incarnation:
            return True
        if word.incarnation != self.incarnation:
            if word.incarnation in self._past:
                return False
            if self.incarnation:
                self._past.append(self.incarnation)
            self.incarnation, self.seq = word.incarnation, word.seq
            counts.incarnations += 1
            self.doubt("another process reports")
            return True
        if word.seq <= self.seq:
            return False
        if word.seq > self.seq + 1:
            counts.gaps += 1
            self.doubt("a message is missing")
        self.seq = word.seq
        return True

    def doubt(self, why: str) -> None:
        if self.synced or self.synced_at is None:
            self.synced, self.why = False, why

    def settled(self, now: float) -> None:
        self.synced, self.synced_at = True, now
        self.why = "in step" if self.certain else "in step with a reporter that missed something of its engine"
        if not self.complete:
            self.why = "more than there is room for"


class PushMap:
    """All workers' hashes."""

    def __init__(self, settings: PushSettings | None = None) -> None:
        self.settings = settings or PushSettings()
        self.counts = PushCounts()
        self.workers: dict[BackendId, Worker] = {}  # the reverse map
        self._holders: dict[int, tuple[BackendId, ...]] = {}  # the forward map
        self._alone: dict[BackendId, tuple[BackendId, ...]] = {}  # one tuple for all hashes that one worker holds alone
        self._hashes = 0

    def __len__(self) -> int:
        """Hashes of all workers."""
        return self._hashes

    def holders(self, key: int) -> Sequence[BackendId]:
        """Workers that hold a hash, as far as they are believed."""
        return [one for one in self._holders.get(key, ()) if not self.workers[one].silent]

    def forward(self) -> Mapping[int, Sequence[BackendId]]:
        """The whole forward map. Not to be changed."""
        return self._holders

    # Messages

    def hear(self, backend: BackendId, word: Word, now: float) -> bool:
        """A message came. False: it is an old one, and nothing of it counts.

        A worker that names its hashes by another scheme than before has to be forgotten first.
        """
        worker = self.workers.get(backend)
        if worker is None:
            worker = self.workers[backend] = Worker(word.scheme, word.model)
            self._alone[backend] = (backend,)
        self.counts.messages += 1
        if not worker.takes(word, self.counts):
            self.counts.old += 1
            return False
        worker.heard_at = now
        if worker.silent:
            worker.silent = False
            worker.doubt("was silent")
        return True

    def store(self, backend: BackendId, entries: Iterable[Entry]) -> list[Change]:
        worker = self.workers[backend]
        changes = []
        for entry in entries:
            if worker.touched is not None:
                worker.touched[entry.key] = None
            if self._put(backend, worker, entry.key, entry.packed):
                self.counts.stored += 1
                changes.append(change_of(entry))
        return changes

    def evict(self, backend: BackendId, keys: Iterable[int]) -> list[Change]:
        """These are gone. Those that were not known are told as gone as well: traffic may have claimed them."""
        worker = self.workers[backend]
        changes = []
        for key in keys:
            if worker.touched is not None:
                worker.touched[key] = None
            packed = self._drop(backend, worker, key)
            self.counts.evicted += 1
            self.counts.evicted_unknown += packed is None
            changes.append(gone(key, packed or 0))
        return changes

    # Snapshots

    def compare(self, backend: BackendId, count: int, total: int, now: float, *, certain: bool = True) -> bool:
        """Whether our table of this worker is the one that it has. `certain`: it has missed nothing of its engine."""
        worker = self.workers[backend]
        same = (worker.table.count, worker.table.total) == (count, total)
        self.counts.matched += same
        self.counts.differed += not same
        full = not worker.complete and not self._has_room(worker)
        if same or full:  # what there is no room for need not be sent again
            worker.complete, worker.certain = same, certain
            worker.settled(now)
        else:
            worker.doubt("differs from what the worker has")
        return same or full

    def begin(self, backend: BackendId) -> int:
        """A snapshot, or a part of one, is about to be taken in. An earlier one that is still in work is given up."""
        worker = self.workers[backend]
        worker.complete = True
        worker.filling += 1
        worker.touched = {}
        return worker.filling

    def replace(self, backend: BackendId, filling: int, place: int, entries: Mapping[int, Entry]) -> list[Change]:
        """One bucket of snapshot number `filling`: what it lacks is gone, what it has is there."""
        worker = self.workers.get(backend)
        if worker is None or worker.filling != filling or worker.touched is None:
            return []
        touched, known = worker.touched, worker.table.bucket(place)
        changes = []
        for key in [key for key in known if key not in entries and key not in touched]:
            changes.append(gone(key, self._drop(backend, worker, key) or 0))
            self.counts.healed_gone += 1
        for key, entry in entries.items():
            if key not in touched and known.get(key) != entry.packed and self._put(backend, worker, key, entry.packed):
                self.counts.healed_new += 1
                changes.append(change_of(entry))
        return changes

    def finish(self, backend: BackendId, filling: int, now: float, *, whole: bool) -> bool:
        """The end of that snapshot, which was of everything or not. False: another one has been begun since."""
        worker = self.workers.get(backend)
        if worker is None or worker.filling != filling:
            return False
        worker.touched = None
        if whole:
            self.counts.snapshots += 1
            worker.settled(now)
        return True

    # Workers

    def silence(self, now: float) -> list[BackendId]:
        """Workers that were believed until now, and have been silent for too long."""
        quiet = []
        for backend, worker in self.workers.items():
            if not worker.silent and now - worker.heard_at >= self.settings.silent_s:
                worker.silent, worker.synced, worker.why = True, False, "silent"
                self.counts.silenced += 1
                quiet.append(backend)
        return quiet

    def empty(self, backend: BackendId, why: str) -> None:
        """The worker holds nothing that it told of. O(its hashes), 1 us each."""
        worker = self.workers[backend]
        worker.doubt(why)
        for key in list(worker.table):
            self._drop(backend, worker, key)

    def forget(self, backend: BackendId) -> None:
        """There is no such worker any more. O(its hashes), 1 us each."""
        worker = self.workers.get(backend)
        if worker is not None:
            for key in worker.table:
                self._unhold(backend, key)
            self._hashes -= worker.table.count
            del self.workers[backend], self._alone[backend]

    def views(self, now: float) -> list[PushView]:
        return [
            PushView(
                backend=backend,
                scheme=worker.scheme,
                hashes=worker.table.count,
                level=worker.level,
                reason=worker.why,
                seq=worker.seq,
                heard_age_s=now - worker.heard_at,
                synced_age_s=None if worker.synced_at is None else now - worker.synced_at,
            )
            for backend, worker in self.workers.items()
        ]

    # Inside

    def _put(self, backend: BackendId, worker: Worker, key: int, packed: int) -> bool:
        """Whether anything is otherwise than before."""
        table = worker.table
        if key not in table:
            if not self._has_room(worker):
                self.counts.refused += 1
                worker.complete = False
                return False
            self._hashes += 1
            held = self._holders.get(key)
            self._holders[key] = self._alone[backend] if held is None else (*held, backend)
        return table.put(key, packed) != packed

    def _has_room(self, worker: Worker) -> bool:
        return worker.table.count < self.settings.hashes_max and self._hashes < self.settings.hashes_all_max

    def _drop(self, backend: BackendId, worker: Worker, key: int) -> int | None:
        packed = worker.table.pop(key)
        if packed is not None:
            self._hashes -= 1
            self._unhold(backend, key)
        return packed

    def _unhold(self, backend: BackendId, key: int) -> None:
        left = tuple([one for one in self._holders[key] if one != backend])
        if not left:
            del self._holders[key]
        else:
            self._holders[key] = left if len(left) > 1 else self._alone[left[0]]


def change_of(entry: Entry) -> Change:
    return Change(Fingerprint(entry.key), entry.tokens, entry.tier, Fingerprint(entry.parent))


def gone(key: int, packed: int) -> Change:
    return Change(Fingerprint(key), tokens_in(packed), Tier.ABSENT, UNKNOWN)


def by_bucket(entries: Iterable[Entry], places: Iterable[int]) -> dict[int, dict[int, Entry]]:
    """Entries as `replace` wants them: these buckets, also where they are empty, and no other. O(entries)."""
    found: dict[int, dict[int, Entry]] = {place: {} for place in places}
    for entry in entries:
        bucket = found.get(bucket_of(entry.key))
        if bucket is not None:
            bucket[entry.key] = entry
    return found
