"""What a reporter sends to one router, and when: numbered batches every 100 ms, a comparison every 5 s. Pure.

    sender.note(keys)                         these changed in the book
    posting = sender.next(now)                what to POST now, or None
    sender.answered(status, reply, now)       or sender.failed(now): no answer

One message is under way at a time; it is kept until it was answered, and sent again with its number (PX6). A comparison
states the sum of the table as it is after the batches before it, so those are made at the same moment. Where the router
differs it asks for the sums of the buckets, then for buckets, and is compared once more.

In the `plain` form, that of the report, there are no numbers: evictions alone, and all hashes every 5 s.

Rules: what changed twice before it was sent is sent once, as it is now. Nothing is sent when there is nothing to say. A
router that refuses is asked again after a while: 422 says that its fingerprints are made otherwise now (`misnamed`).
Bounds: `pending_max` hashes wait; beyond, they are forgotten and counted, and the next comparison heals it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from ranvier_py.core.engine_cache.sources.push_book import Book
from ranvier_py.core.engine_cache.sources.push_messages import written_entry, written_hash, written_sums

EVICTION_PATH = "/internal/eviction"
SYNC_PATH = "/internal/sync"

ROUNDS_MAX = 3
"""Comparisons in one sync: one that finds a difference, one after it was sent, one for what came meanwhile."""

OK_STATUS, UNPROCESSABLE, TOO_MANY = 200, 422, 429
SERVER_ERRORS = 500


@dataclass(frozen=True, slots=True)
class SenderSettings:
    batch_s: float = 0.1  # the report's
    sync_s: float = 5.0  # the report's
    sync_gap_s: float = 0.5  # between two comparisons, whatever a router asks for
    retry_s: float = 0.1  # after a failure, doubled up to `retry_max_s`
    retry_max_s: float = 2.5  # so that a router that came back is told within one sync
    refused_s: float = 5.0  # after a refusal that will not change at once
    batch_max: int = 20_000  # hashes in one message: 1.4 MB of prefix hashes
    pending_max: int = 200_000


@dataclass(slots=True)
class SenderCounts:
    """Counters since start: of messages, where nothing else is said."""

    sent: int = 0
    evictions: int = 0
    syncs: int = 0
    buckets: int = 0
    bytes: int = 0
    failed: int = 0  # no answer, or an error of the router's own
    refused: int = 0  # 4xx
    overflowed: int = 0  # hashes that did not wait any more


class Posting(NamedTuple):
    path: str
    body: Mapping[str, Any]


class Speaker(NamedTuple):
    """Who reports. `incarnation` is new for each process; without, the plain form is spoken."""

    worker: str
    incarnation: str = ""
    model: str = ""


class _Draft(NamedTuple):
    """A message before it has its number."""

    path: str
    kind: str  # batch, digest, sums, buckets, snapshot
    members: Mapping[str, Any]


class Sender:
    """The conversation with one router."""

    def __init__(
        self, speaker: Speaker, scheme: str, book: Book, rng: Random, settings: SenderSettings | None = None
    ) -> None:
        self.counts = SenderCounts()
        self.scheme = scheme
        self.misnamed = False  # the router knows another scheme by now
        self.certain = True  # nothing of the engine was missed
        self.old_in_a_row = 0  # messages that the router took for late ones
        self.in_step_at: float | None = None  # when a comparison last found no difference
        self._settings = settings or SenderSettings()
        self._speaker = speaker
        self._plain = not speaker.incarnation
        self._book = book
        self._rng = rng
        self._rounds = 0  # comparisons of this sync
        self._seq = 0
        self._pending: dict[int, None] = {}
        self._drafts: deque[_Draft] = deque()
        self._attempt: tuple[_Draft, Posting] | None = None
        self._wanted: deque[int] = deque()  # buckets that the router asked for
        self._batch_at = 0.0
        self._sync_at = 0.0  # at once: the router may know nothing
        self._wait_until = 0.0
        self._failures = 0

    @property
    def idle(self) -> bool:
        """Everything that is known was said and answered."""
        return not self._pending and not self._drafts and not self._wanted and self._attempt is None

    def note(self, keys: Iterable[int]) -> None:
        """These came or went."""
        self._pending.update(dict.fromkeys(keys))
        if len(self._pending) > self._settings.pending_max:
            self.counts.overflowed += len(self._pending)
            self._pending.clear()
            self._sync_at = 0.0

    def renamed(self, scheme: str) -> None:
        """All hashes are others now."""
        self.scheme, self.misnamed = scheme, False
        self._pending.clear()
        self._give_up()
        self._sync_at = self._wait_until = 0.0

    def next(self, now: float) -> Posting | None:
        """What to send now. Must be followed by `answered` or `failed` before the next one."""
        if now < self._wait_until or self.misnamed:
            return None
        if self._attempt is None:
            self._draft(now)
            if not self._drafts:
                return None
            draft = self._drafts.popleft()
            self._attempt = (draft, self._numbered(draft))
        self.counts.sent += 1
        return self._attempt[1]

    def answered(self, status: int, reply: Mapping[str, Any], now: float) -> None:
        if status >= SERVER_ERRORS or status == TOO_MANY:
            self.failed(now)
            return
        assert self._attempt is not None, "nothing was sent"
        draft, self._attempt = self._attempt[0], None
        self._failures = 0
        self.old_in_a_row = self.old_in_a_row + 1 if reply.get("status") == "old" else 0
        if status != OK_STATUS:
            self.counts.refused += 1
            self.misnamed = status == UNPROCESSABLE
            self._give_up()
            self._sync_at = self._wait_until = now + self._settings.refused_s
            return
        wanted = reply.get("want")
        if draft.kind == "digest" and wanted is None and reply.get("status") == "ok":
            self.in_step_at = now
        elif wanted == "sums" and draft.kind == "digest" and self._rounds < ROUNDS_MAX:
            self._drafts.append(_Draft(SYNC_PATH, "sums", {"sums": written_sums(self._book.table.sums)}))
        elif draft.kind == "sums" and isinstance(wanted, list):
            self._wanted.extend(place for place in wanted if type(place) is int)
        elif reply.get("resync") is True and draft.kind == "batch":
            self._sync_at = min(self._sync_at, self._last_sync + self._settings.sync_gap_s)

    def failed(self, now: float) -> None:
        """No answer came, or one that blames the router. The same message is sent again, later."""
        self.counts.failed += 1
        self._failures = min(self._failures + 1, 16)
        pause = min(self._settings.retry_max_s, self._settings.retry_s * 2 ** (self._failures - 1))
        self._wait_until = now + pause * (0.5 + self._rng.random() / 2)
        if self._plain and self._attempt is not None and self._attempt[0].kind == "snapshot":
            self._attempt = None  # another one is made instead of saying again what is old by then
            self._sync_at = self._wait_until

    # Inside

    @property
    def _last_sync(self) -> float:
        return self._sync_at - self._settings.sync_s

    def _give_up(self) -> None:
        self._drafts.clear()
        self._wanted.clear()
        self._attempt = None

    def _draft(self, now: float) -> None:
        """Write what is due, if nothing is waiting to be sent."""
        if self._drafts:
            return
        if self._wanted:
            self._drafts.append(self._bucket_draft())
            if not self._wanted:  # is it equal now?
                self._compare()
        elif now >= self._sync_at:
            self._sync_at = now + self._settings.sync_s
            self._batch_at = now + self._settings.batch_s
            self._rounds = 0
            self._compare()
        elif self._pending and now >= self._batch_at:
            self._batch_at = now + self._settings.batch_s
            self._drafts.extend(self._batches())

    def _compare(self) -> None:
        """All that changed, and the sum of the table after that."""
        self._drafts.extend(self._batches())
        self.counts.syncs += 1
        self._rounds += 1
        table = self._book.table
        if self._plain:
            hashes = [written_hash(self.scheme, key) for key in table]
            self._drafts.append(_Draft(SYNC_PATH, "snapshot", {"active_hashes": hashes}))
        else:
            members: dict[str, Any] = {"count": table.count, "digest": f"{table.total:016x}"}
            members |= {} if self.certain else {"certain": False}
            self._drafts.append(_Draft(SYNC_PATH, "digest", members))

    def _batches(self) -> Iterator[_Draft]:
        """What is pending, as it is now."""
        keys, self._pending = list(self._pending), {}
        for start in range(0, len(keys), self._settings.batch_max):
            members = self._batch(keys[start : start + self._settings.batch_max])
            if members.get("stored") or members["evicted_hashes"]:
                self.counts.evictions += 1
                yield _Draft(EVICTION_PATH, "batch", members)

    def _batch(self, keys: Sequence[int]) -> dict[str, Any]:
        entries = [(key, self._book.entry(key)) for key in keys]
        members: dict[str, Any] = {
            "evicted_hashes": [written_hash(self.scheme, key) for key, entry in entries if entry is None]
        }
        stored = [written_entry(self.scheme, entry) for _, entry in entries if entry is not None]
        if stored and not self._plain:
            members["stored"] = stored
        return members

    def _bucket_draft(self) -> _Draft:
        """As many of the wanted buckets as one message should carry."""
        buckets: dict[str, Any] = {}
        left = self._settings.batch_max
        while self._wanted and left > 0:
            place = self._wanted.popleft()
            entries = [self._book.entry(key) for key in self._book.table.bucket(place)]
            buckets[str(place)] = [written_entry(self.scheme, entry) for entry in entries if entry is not None]
            left -= len(entries)
        self.counts.buckets += len(buckets)
        return _Draft(SYNC_PATH, "buckets", {"buckets": buckets})

    def _numbered(self, draft: _Draft) -> Posting:
        head: dict[str, Any] = {"worker_id": self._speaker.worker}
        if not self._plain:
            self._seq += 1
            head |= {"hash_scheme": self.scheme, "incarnation": self._speaker.incarnation, "seq": self._seq}
            head |= {"model": self._speaker.model} if self._speaker.model else {}
        return Posting(draft.path, {**head, **draft.members})
