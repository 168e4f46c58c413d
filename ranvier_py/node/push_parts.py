"""What workers push becomes engine truth: joins the maps of `core/engine_cache/sources/push_state` to the sink, and
keys to fingerprints.

Hashes that are our own fingerprints go to the sink as they are: such a worker is known EXACT once a comparison found no
difference. The report's prefix hashes say one depth each, so such a worker stays ESTIMATED, and what it says of a key
becomes a claim, or a withdrawal, at the fingerprints that the key is known to stand for (`Links`). A prompt that is new
to this node is tokenized before it is placed; its key is noted in the thread that does it, and is brought to the event
loop before the prompt is placed, so that a router that was restarted finds the holders that the workers told it.

Speculation is the router's own: requests in flight, then what was served, as any claim that is learned. A worker whose
keys are known to us has to confirm such a claim within a lease, else it is withdrawn. A silent worker's claims
are left to age.

Rules: all of it runs on the event loop; threads only append to a bounded deque, and may wait until it was emptied.
Bounds: those of PushMap and Links; leases, of which the oldest is dropped and counted. Cost: 100 us for a prompt whose
key is brought to the loop, only while somebody pushes prefix hashes; a large snapshot gives way every few milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from threading import get_ident
from typing import Any

import trio

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.engine_cache.block_namespaces import Names
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Held
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.push_keys import LENGTHS_MAX
from ranvier_py.core.engine_cache.sources.push_leases import Leases
from ranvier_py.core.engine_cache.sources.push_links import Link, Links
from ranvier_py.core.engine_cache.sources.push_messages import PREFIX_HASH, Eviction, Sync
from ranvier_py.core.engine_cache.sources.push_reports import Said, names_of, source_of
from ranvier_py.core.engine_cache.sources.push_state import PushMap, PushSettings, Word, Worker
from ranvier_py.core.engine_cache.sources.push_table import Entry, tier_in
from ranvier_py.core.errors import NotFound
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.metrics import Sample
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Backend, Outcome
from ranvier_py.core.routing.placement.sticky_least_loaded import prefix_len_of
from ranvier_py.core.routing.request_record import scheme_mark
from ranvier_py.core.routing.router import Router
from ranvier_py.io.key_inbox import KeyInbox

TICK_S = 0.5
LINKS_PER_TICK = 100
"""Claims of what workers hold by key are refreshed so many at a time: 1 ms, and each well within its time to live."""

SLICE_BUCKETS = 8  # of a snapshot of 100,000 hashes: some 800, about 1 ms
SLICE_LINKS = 500
MODELS_MAX = 4096


@dataclass(slots=True)
class PushingCounts:
    """Counters since start."""

    keys_noted: int = 0
    keys_foreign: int = 0  # of prompts with a salt, or of a model that nobody lists
    leases_kept: int = 0  # that a worker confirmed
    leases_ended: int = 0  # that nobody did


@dataclass(frozen=True, slots=True)
class PushScheme:
    """What a reporter has to know to name prefixes as this node does."""

    identity: str
    mark: str
    key: bytes
    block_tokens: int
    prefix_tokens: int


class Pushing:
    """The port of control/worker_reports.py; an observer of attempts as soon as a worker reports prefix hashes.

    Args:
        identity, key: how this node makes fingerprints.
    """

    def __init__(
        self,
        router: Router,
        engine_caches: EngineCaches,
        inbox: KeyInbox,
        identity: str,
        key: bytes,
        *,
        settings: PushSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.map = PushMap(settings)
        self.links = Links()
        self.counts = PushingCounts()
        block_tokens, prefix_tokens = router.hasher.block_tokens, inbox.prefix_tokens
        self.scheme = PushScheme(identity, scheme_mark(identity, key), key, block_tokens, prefix_tokens)
        self._registry = router.registry
        self._router = router
        self._engine_caches = engine_caches
        self._inbox = inbox
        self._clock = clock
        self._names: dict[BackendId, Names] = {}
        self._generations: dict[BackendId, int] = {}
        self._models: dict[int, str] = {}  # by the running sum that a prompt of the model begins with
        self._models_version = -1
        self._leases = Leases()
        self._levels: dict[BackendId, tuple[Level, str]] = {}
        self._refreshed = 0
        inbox.drain = self.drain

    # --- what control/worker_reports.py asks -------------------------------------------------------------------------

    async def evicted(self, message: Eviction) -> Mapping[str, Any]:
        """Raises NotFound for a worker that is no backend."""
        backend, worker = self._worker(message.worker, message.word)
        if worker is None:
            return {"status": "old", "resync": False, "want": None}
        changes = self.map.evict(backend, message.evicted) + self.map.store(backend, message.stored)
        for start in range(0, len(changes), SLICE_LINKS):
            self._tell(backend, worker, changes[start : start + SLICE_LINKS])
            await trio.lowlevel.checkpoint()
        self._level(backend)
        numbered = bool(message.word.incarnation)
        return {"status": "ok", "resync": numbered and not worker.synced, "want": None}

    async def synced(self, message: Sync) -> Mapping[str, Any]:
        """The same for one message of a sync."""
        backend, worker = self._worker(message.worker, message.word)
        if worker is None:
            return {"status": "old", "resync": True, "want": None}
        first = not worker.synced
        want: Any = None
        if message.active is not None:
            await self._replace(backend, worker, message.active, whole=True)
        elif message.buckets is not None:
            await self._replace(backend, worker, message.buckets, whole=False)
        elif message.sums is not None:
            want = worker.table.differing(message.sums)
        else:
            digest, certain = message.digest or 0, message.certain
            if not self.map.compare(backend, message.hashes, digest, self._clock(), certain=certain):
                want = "sums"
        self._level(backend)
        if first and worker.synced and worker.scheme == PREFIX_HASH:
            await self._reconcile(backend, worker)
        return {"status": "ok", "resync": not worker.synced, "want": want}

    # --- attempts: a claim that traffic made has to be confirmed -----------------------------------------------------

    def attempt_sent(self, attempt: Attempt, now: float) -> None:  # noqa: ARG002
        """Requests may name another length of their prefix: its keys are noted from then on."""
        length, lengths = prefix_len_of(attempt.prompt.body), self._inbox.hasher.lengths
        if length and length not in lengths and len(lengths) < LENGTHS_MAX:
            self._inbox.hasher.keep((*lengths, length))

    def started(self, attempt: Attempt, now: float) -> None:
        self._lease(attempt.backend, attempt.prompt.end, now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:  # noqa: ARG002
        if attempt.first_at is not None:
            self._lease(attempt.backend, end, now)

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None: ...

    # --- by and by --------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """End leases, notice who went silent, refresh claims, until cancelled."""
        self._inbox.loop = get_ident()
        task_status.started()
        while True:
            await trio.sleep(TICK_S)
            self.tick(self._clock())

    def tick(self, now: float) -> None:
        self.drain()
        for backend in list(self.map.workers):
            self._look(backend, now)
        for backend in self.map.silence(now):
            self._level(backend)
        for backend, fingerprint in self._leases.ended(now):
            self._end_lease(backend, fingerprint, now)
        if self._inbox.urgent:
            self._refresh()

    def drain(self) -> None:
        """Take in the keys that were met, and claim what workers hold of them."""
        waiting, models = self._inbox.waiting, self._known_models() if self._inbox.waiting else {}
        while waiting:
            keyed = waiting.popleft()
            model = models.get(keyed.root)
            if model is None:
                self.counts.keys_foreign += 1
                continue
            self.counts.keys_noted += 1
            link = Link(keyed.key, keyed.fingerprint, keyed.tokens, model)
            self.links.add(link)
            self._claim(link)

    def statistics(self) -> Mapping[str, Any]:
        return {
            **asdict(self.map.counts),
            **asdict(self.counts),
            "workers": len(self.map.workers),
            "hashes": len(self.map),
            "links": self.links.count,
            "links_forgotten": self.links.forgotten,
            "leases": len(self._leases),
            "leases_dropped": self._leases.dropped,
        }

    def samples(self) -> list[Sample]:
        gauges = ("workers", "hashes", "links", "leases")
        return [
            Sample(f"push_{name}", "gauge" if name in gauges else "counter", f"{name} of pushed caches.", value)
            for name, value in self.statistics().items()
        ]

    def views(self, key: int | None = None) -> list[dict[str, Any]]:
        """Each worker that reports, for the control port; with a hash, whether it holds that."""
        names = {backend.id: backend.name for backend in self._registry}
        found = []
        for view in self.map.views(self._clock()):
            shown = {**view._asdict(), "backend": names.get(view.backend, ""), "level": view.level.value}
            if key is not None:
                shown["holds"] = key in self.map.workers[view.backend].table
            found.append(shown)
        return found

    # --- inside -----------------------------------------------------------------------------------------------------

    def _worker(self, name: str, word: Word) -> tuple[BackendId, Worker | None]:
        """Who speaks; None for a message that does not count. Raises NotFound."""
        backend = self._registry.find(name)
        if backend is None:
            raise NotFound(f"worker_id: no backend {name!r}")
        now = self._clock()
        known = self.map.workers.get(backend.id)
        if known is not None and (known.scheme, known.model) != (word.scheme, word.model):
            self._close(backend.id, now)
        if not self.map.hear(backend.id, word, now):
            return backend.id, None
        worker = self.map.workers[backend.id]
        if backend.id not in self._levels:
            self._open(backend, worker, now)
        return backend.id, worker

    def _open(self, backend: Backend, worker: Worker, now: float) -> None:
        held: Held = Said(self.links, worker)
        if worker.scheme == PREFIX_HASH:
            self._inbox.urgent = True
            self._inbox.hasher.keep((*self._inbox.hasher.lengths, self.scheme.prefix_tokens))
            if self not in self._router.observers:
                self._router.observers += (self,)
        else:
            names = names_of(backend, worker)
            self._names[backend.id] = Names(self._router.hasher, self._router.reader.namespace_of, names)
            held = self._names[backend.id].held(worker)
        self._generations[backend.id] = backend.generation
        self._engine_caches.open(source_of(backend.id), held, now)
        self._level(backend.id)

    def _close(self, backend: BackendId, now: float) -> None:
        self.map.forget(backend)
        self._engine_caches.close(source_of(backend), now)
        self._levels.pop(backend, None)
        self._names.pop(backend, None)
        self._generations.pop(backend, None)
        self._inbox.urgent = any(worker.scheme == PREFIX_HASH for worker in self.map.workers.values())

    def _look(self, id_: BackendId, now: float) -> None:
        """Is it still the engine that was reported of? A restarted one holds nothing, whatever its reporter knows."""
        backend = self._registry.slots[id_]
        if backend is None or backend.removed:
            self._close(id_, now)
        elif id_ in self._names and self._names[id_].base != names_of(backend, self.map.workers[id_]):
            self._close(id_, now)  # its names are in every fingerprint: all is told again
        elif self._generations.setdefault(id_, backend.generation) != backend.generation:
            self._generations[id_] = backend.generation
            self.map.empty(id_, "the engine was restarted")
            self._level(id_)

    def _level(self, backend: BackendId) -> None:
        """Say how well a worker is known, where that has changed."""
        worker = self.map.workers[backend]
        level, why = worker.level, worker.why
        if worker.scheme == PREFIX_HASH:
            level, why = Level.ESTIMATED, f"prefix hashes tell one depth each: {worker.why}"
        if self._levels.get(backend) != (level, why):
            self._levels[backend] = (level, why)
            self._engine_caches.set_level(source_of(backend), level, why, self._clock())

    async def _replace(
        self, backend: BackendId, worker: Worker, buckets: Mapping[int, Mapping[int, Entry]], *, whole: bool
    ) -> None:
        filling = self.map.begin(backend)
        for number, (place, entries) in enumerate(buckets.items()):
            self._tell(backend, worker, self.map.replace(backend, filling, place, entries))
            if number % SLICE_BUCKETS == 0:
                await trio.lowlevel.checkpoint()
        self.map.finish(backend, filling, self._clock(), whole=whole)

    def _tell(self, backend: BackendId, worker: Worker, changes: Sequence[Change]) -> None:
        """What became of hashes, as what became of prefixes."""
        if worker.scheme == PREFIX_HASH:
            found = []
            for change in changes:
                for link in self.links.of_key(change.fingerprint, worker.model):
                    self._leases.settle(backend, link.fingerprint)
                    found.append(Change(link.fingerprint, link.tokens, change.tier, UNKNOWN))
            changes = found
        if changes:
            told = Changes(False, tuple(changes), complete=True)
            names = self._names.get(backend)
            self._engine_caches.changed(source_of(backend), told if names is None else names.told(told), self._clock())

    def _claim(self, link: Link) -> None:
        """Those who hold this key hold this prefix."""
        for backend in self.map.holders(link.key):
            worker = self.map.workers[backend]
            packed = worker.table.get(link.key)
            if worker.scheme == PREFIX_HASH and worker.model in ("", link.model) and packed is not None:
                self._tell(backend, worker, [Change(Fingerprint(link.key), 0, tier_in(packed), UNKNOWN)])

    def _refresh(self) -> None:
        """Claims of what is held by key are learned again, a few at a time, for they age as all do."""
        part = self.links.part(self._refreshed, LINKS_PER_TICK)
        self._refreshed = self._refreshed + LINKS_PER_TICK if part else 0
        for link in part:
            self._claim(link)

    async def _reconcile(self, backend: BackendId, worker: Worker) -> None:
        """A worker said all that it holds for the first time: what else we believe of its keys is wrong."""
        start = 0
        while part := self.links.part(start, SLICE_LINKS):
            start += SLICE_LINKS
            lost = [link for link in part if self._is_unfounded(backend, worker, link)]
            gone = tuple(Change(link.fingerprint, link.tokens, Tier.ABSENT, UNKNOWN) for link in lost)
            if gone:
                self._engine_caches.changed(source_of(backend), Changes(False, gone, complete=True), self._clock())
            await trio.lowlevel.checkpoint()

    def _is_unfounded(self, backend: BackendId, worker: Worker, link: Link) -> bool:
        if worker.model not in ("", link.model) or (backend, link.fingerprint) in self._leases:
            return False
        return not any(each.key in worker.table for each in self.links.of_fingerprint(link.fingerprint))

    # Leases

    def _lease(self, backend: BackendId, end: Boundary, now: float) -> None:
        """Something was learned of this worker: has it said so itself, or will it?"""
        worker = self.map.workers.get(backend)
        if worker is None or worker.scheme != PREFIX_HASH or end.tokens < self.scheme.prefix_tokens:
            return
        for tokens, token, _ in end.chain():
            if tokens == self.scheme.prefix_tokens and token:
                self._expect(backend, worker, Fingerprint(token), now)

    def _expect(self, backend: BackendId, worker: Worker, fingerprint: Fingerprint, now: float) -> None:
        links = self.links.of_fingerprint(fingerprint)
        if not links or any(link.key in worker.table for link in links):
            return
        self._leases.begin(backend, fingerprint, now)

    def _end_lease(self, backend: BackendId, fingerprint: Fingerprint, now: float) -> None:
        worker, links = self.map.workers.get(backend), self.links.of_fingerprint(fingerprint)
        if worker is None or not links or worker.silent or worker.synced_at is None:
            return  # nobody who could have confirmed it
        if any(link.key in worker.table for link in links):
            self.counts.leases_kept += 1
            return
        self.counts.leases_ended += 1
        change = Change(fingerprint, links[0].tokens, Tier.ABSENT, UNKNOWN)
        self._engine_caches.changed(source_of(backend), Changes(False, (change,), complete=True), now)

    # Models

    def _known_models(self) -> Mapping[int, str]:
        """Models that prompts may name, by how the hash of such a prompt begins."""
        version = self._registry.version
        if self._models_version != version:
            self._models_version = version
            names = dict.fromkeys(["", *self._registry.listed][:MODELS_MAX])
            start, namespace_of = self._router.hasher.start, self._router.reader.namespace_of
            self._models = {start(namespace_of(name)).total: name for name in names}
        return self._models
