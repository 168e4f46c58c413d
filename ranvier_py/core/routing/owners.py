"""Owners: which engine keeps a stored response, and which one served a client's session last.

Rule: a request that names a response by its id must go to the process that made it; a session is only a hint. The
latest entry holds, for the process that it was made for. Invariant: a turn that names a stored response reaches its
engine by any node, or is a 404 (test_agents_placed.py). No id and no session's name is kept or sent, only a digest
under the cluster's key, made with the tenant: nobody is led to what another one keeps.
Bounds: ENTRIES_MAX; the oldest goes, and is counted. Entries live RESPONSE_TTL_S, SESSION_TTL_S after they were made or
renewed. QUEUE_MAX wait to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict, BoundedQueue
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, gauge

ENTRIES_MAX = 65_536
"""Entries of each kind: some 16 MB."""

RESPONSE_TTL_S = 86_400.0  # engines keep responses until they end; a client that goes on after a day gets a 404
SESSION_TTL_S = 3600.0  # no longer than routes: what an engine held an hour ago it has evicted
QUEUE_MAX = 16_384
LATEST_MAX = 16_384  # of each kind, sent to a peer that lacks them: 200 kB


class Owner(NamedTuple):
    """The process of a backend that keeps something, and when it was learned, in seconds of this node's clock."""

    backend: BackendId
    generation: int
    at: float


class NewOwner(NamedTuple):
    """An entry to send to peers."""

    digest: int
    owner: Owner


@dataclass(slots=True)
class OwnerCounters:
    """How many owners are known, and how they were learned and used."""

    responses: int = gauge("Stored responses whose engine is known.")
    sessions: int = gauge("Sessions of clients whose engine is known.")
    learned: int = counter("Responses and sessions learned from answers of this node.")
    received: int = counter("Responses and sessions whose engine peers reported.")
    dropped: int = counter("Responses and sessions dropped for want of room, here or on their way to peers.")
    lost: int = counter("Requests for a stored response that no engine keeps any more, or that nobody knows.")
    hinted: int = counter(
        "Prompts of one message or of a sub-agent, of which nothing is known, that followed their session."
    )


class Owners:
    """The owners of responses and sessions, see the module. Times are seconds of one monotonic clock."""

    def __init__(self, digest: Callable[[bytes], bytes], entries_max: int = ENTRIES_MAX) -> None:
        """`digest` is a keyed hash, the same on all nodes of a cluster."""
        self.counters = OwnerCounters()
        self.collecting = False  # whether new entries are queued for peers
        self.isolated = False  # tenants are kept apart: what has no known owner may be another tenant's
        self.new: BoundedQueue[NewOwner] = BoundedQueue(QUEUE_MAX)
        self._keyed_digest = digest
        self._responses: BoundedDict[int, Owner] = BoundedDict(entries_max)
        self._sessions: BoundedDict[int, Owner] = BoundedDict(entries_max)

    def collect(self, came: Callable[[], object]) -> None:
        """Queue new entries for peers from now on. `came` is called when the first entry of a batch comes."""
        self.collecting, self.new.came = True, came

    def response_key(self, name: str, tenant: bytes) -> int:
        """Return the digest of a response's id: odd, hence not 0."""
        return self._digest(b"response", name.encode("utf-8", "surrogatepass"), tenant) | 1

    def session_key(self, name: bytes, tenant: bytes) -> int:
        """Return the digest of a session's name: even, and 0 for no name."""
        return self._digest(b"session", name, tenant) & ~1 if name else 0

    def find(self, digest: int, now: float) -> Owner | None:
        """Return the owner, None if it is not known. Its process may be gone."""
        owner = self._of(digest).get(digest)
        ttl_s = RESPONSE_TTL_S if digest & 1 else SESSION_TTL_S
        return owner if owner is not None and now - owner.at < ttl_s else None

    def learn(self, digest: int, backend: BackendId, generation: int, now: float) -> None:
        """Note an owner by an answer of this node. The same owner is noted again only after SESSION_TTL_S / 4."""
        known = self.find(digest, now)
        if known is not None and known[:2] == (backend, generation) and now - known.at < SESSION_TTL_S / 4:
            return
        owner = Owner(backend, generation, now)
        self._put(digest, owner)
        self.counters.learned += 1
        if self.collecting:
            self.counters.dropped += self.new.put(NewOwner(digest, owner))

    def latest(self) -> Iterator[NewOwner]:
        """Yield the latest entries for a peer that lacks them: LATEST_MAX of each kind, oldest first, so that it drops
        them in that order, too. Entries may come and go meanwhile."""
        for entries in (self._responses, self._sessions):
            latest = list(islice(reversed(entries.items()), LATEST_MAX))
            for digest, owner in reversed(latest):
                yield NewOwner(digest, owner)

    def take(self, digest: int, backend: BackendId, generation: int, at: float) -> bool:
        """Take over what a peer learned at `at`, unless a later entry is known. Returns whether it is new here."""
        known = self._of(digest).get(digest)
        if known is not None and known.at >= at:
            return False
        self.counters.received += 1
        self._put(digest, Owner(backend, generation, at))
        return known is None or known[:2] != (backend, generation)

    def _of(self, digest: int) -> BoundedDict[int, Owner]:
        return self._responses if digest & 1 else self._sessions

    def _put(self, digest: int, owner: Owner) -> None:
        entries, counters = self._of(digest), self.counters
        before = entries.dropped
        entries[digest] = owner
        counters.dropped += entries.dropped - before
        counters.responses, counters.sessions = len(self._responses), len(self._sessions)

    def _digest(self, what: bytes, name: bytes, tenant: bytes) -> int:
        return int.from_bytes(self._keyed_digest(b"%b\0%b\0%b" % (what, tenant, name))[:8], "little")
