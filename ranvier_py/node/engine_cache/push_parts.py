"""Takes what workers push: event batches for event streams (`pushed_events`), and prefix hashes of the Purdue report.

A prefix hash stands for one depth only, so a worker that reports only hashes stays at ESTIMATED. Its report becomes a
route, or a withdrawal, at the fingerprints that the hash stands for (`Links`); a new prompt is tokenized before it is
placed, so that its hash finds the holders that workers reported. Such a worker has to confirm what traffic taught
within a lease, since a snapshot may be older than that; else the route is withdrawn. Routes of a silent worker age.
Bounds: those of PushMap and Links; INBOX_MAX keys of prompts; LEASES_MAX leases, the oldest dropped and counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.push_keys import (
    LENGTHS_MAX,
    PREFIX_TOKENS,
    KeyedPrefix,
    KeyHasher,
    Link,
    Links,
)
from ranvier_py.core.engine_cache.sources.push_map import PushMap, PushWorker
from ranvier_py.core.engine_cache.sources.push_messages import (
    EVENTS,
    PREFIXES,
    EventReport,
    PrefixReport,
    hash_in,
    read_events,
    read_eviction,
    read_sync,
)
from ranvier_py.core.errors import NotFound
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.prompts.fingerprint import UNCOMPUTED_TOKENS
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.backends import Backend
from ranvier_py.core.routing.placement.sticky_least_loaded import StickyLeastLoaded, StickyLeastLoadedOptions
from ranvier_py.core.routing.router import Router
from ranvier_py.node.asked import Asked
from ranvier_py.node.engine_cache.pushed_events import PushedEvents, ReportReader
from ranvier_py.node.fingerprints import FingerprintScheme
from ranvier_py.node.part import Handler, Part
from ranvier_py.node.parts.router_parts import POLICY_OPTIONS, placement_options
from ranvier_py.supervision import Faults

TICK_S = 0.5
PAUSE_S = 0.001  # between two ticks of event streams that are due immediately
LINKS_PER_TICK = 100
"""Routes of hashes that workers hold are refreshed so many at a time, each well within its time to live."""

SLICE_LINKS = 500
LEASE_S = 10.0
"""Two syncs: a snapshot taken just before the first token does not have the prompt, but the next one does."""

LEASES_MAX = 65_536
MODELS_MAX = 4096
INBOX_MAX = 65_536  # more than half a second's new prompts, and it is emptied twice a second
CHANNEL = "prefix_hashes"
REASON = "prefix hashes stand for one depth each"


class KeyInbox:
    """Receives prefix hashes of prompts: from the tokenizer process, and from `hasher` for token ids in a request.

    While any worker reports hashes, they are taken in at once, so that this very prompt finds what workers
    reported of it. Hashes are noted at once if the policy is the Purdue report's, else once a worker reports some:
    prompts that were known before have no links to their hashes.
    """

    def __init__(self, key: bytes, block_tokens: int, policy: str, prefix_tokens: int = PREFIX_TOKENS) -> None:
        lengths = (prefix_tokens,) if policy == StickyLeastLoaded.name else ()
        self.hasher = KeyHasher(key, block_tokens, notify=self.put, lengths=lengths, short=UNCOMPUTED_TOKENS)
        self.prefix_tokens = prefix_tokens
        self.waiting: deque[KeyedPrefix] = deque(maxlen=INBOX_MAX)
        self.taken: Callable[[], object] | None = None  # called at once with what came, while a worker reports hashes

    @property
    def lengths(self) -> Sequence[int]:
        """Lengths in tokens of the prefixes whose hashes are wanted."""
        return self.hasher.lengths

    def put(self, keyed: KeyedPrefix) -> None:
        self.waiting.append(keyed)
        if self.taken is not None:
            self.taken()


def key_inbox(config: Config, scheme: FingerprintScheme) -> KeyInbox:
    """Make what hashes prompts, and notes the prefix hashes that workers which push them would use."""
    options = placement_options(config).build(StickyLeastLoadedOptions)
    return KeyInbox(scheme.key, config.block_size_tokens, config.policy, options.prefix_tokens)


class PrefixHolder:
    """What a worker holds, by our fingerprints instead of its prefix hashes (`Held` of EngineCaches)."""

    def __init__(self, links: Links, worker: PushWorker) -> None:
        self._links, self._worker = links, worker

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        hashes, links_of = self._worker.hashes, self._links.of_fingerprint
        return {name: Tier.GPU for name in fingerprints if any(link.key in hashes for link in links_of(name))}


class Leases:
    """Routes of traffic, each of which its worker has to confirm within LEASE_S, the next to end first."""

    def __init__(self, workers: PushMap, links: Links) -> None:
        self._map, self._links = workers, links
        self.ends: BoundedDict[tuple[BackendId, Fingerprint], float] = BoundedDict(LEASES_MAX)

    def begin(self, backend: BackendId, end: Boundary, depth: int, now: float) -> None:
        """Begin a lease for what was learned of this worker, unless the worker has reported it already. `depth`: the
        tokens that a hash stands for."""
        worker = self._map.workers.get(backend)
        if worker is None or end.tokens < depth:
            return
        for tokens, token, _ in end.chain():
            links = self._links.of_fingerprint(Fingerprint(token)) if tokens == depth and token else ()
            lease = backend, Fingerprint(token)
            if links and lease not in self.ends and not any(link.key in worker.hashes for link in links):
                self.ends[lease] = now + LEASE_S  # a later use does not extend it, since it confirms nothing
                self._map.counters.leases_dropped = self.ends.dropped

    def ended(self, now: float) -> Iterator[tuple[BackendId, Link]]:
        """End those that are over. Yields the worker and the link of each that was not confirmed, if it could be."""
        while self.ends and next(iter(self.ends.values())) <= now:
            backend, fingerprint = next(iter(self.ends))
            del self.ends[backend, fingerprint]
            worker, links = self._map.workers.get(backend), self._links.of_fingerprint(fingerprint)
            if worker is None or not links or worker.silent or worker.synced_at is None:
                continue  # nobody could have confirmed it
            if any(link.key in worker.hashes for link in links):
                self._map.counters.leases_kept += 1
                continue
            self._map.counters.leases_ended += 1
            yield backend, links[0]

    def are_unfounded(self, backend: BackendId, worker: PushWorker, links: Sequence[Link]) -> list[Link]:
        """Return those of these links of which the worker has neither a lease nor any hash."""
        return [
            link
            for link in links
            if worker.model in ("", link.model)
            and (backend, link.fingerprint) not in self.ends
            and not any(each.key in worker.hashes for each in self._links.of_fingerprint(link.fingerprint))
        ]


class ModelRoots:
    """The models that prompts may name, by the running sum with which such a prompt's hash begins."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._version, self._models = -1, dict[int, str]()

    def known(self) -> Mapping[int, str]:
        pools = self._router.registry.pools
        if self._version != pools.version:
            self._version = pools.version
            names = dict.fromkeys(["", *pools.names.listed][:MODELS_MAX])
            start, namespace_of = self._router.hasher.start, self._router.reader.namespace_of
            self._models = {start(namespace_of(name)).total: name for name in names}
        return self._models


class WorkerReports(Part, Observer):
    """Serves worker_reports.py; observes attempts as soon as a worker reports prefix hashes."""

    name = "worker_reports"
    keys = ("policy", *POLICY_OPTIONS)

    def __init__(
        self,
        router: Router,
        engine_caches: EngineCaches,
        inbox: KeyInbox,
        *,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._faults = faults or Faults()
        self.map, self.links = PushMap(), Links()
        self.events = PushedEvents(router, engine_caches, clock, self._faults)
        self._registry, self._router = router.registry, router
        self._engine_caches, self._inbox, self._clock = engine_caches, inbox, clock
        self._models = ModelRoots(router)
        self._leases = Leases(self.map, self.links)
        self._refreshed = 0
        self._reader = ReportReader(self.backend_of)

    def routes(self) -> Mapping[str, Handler]:
        handler = self._reader.handler
        return {
            "POST /internal/eviction": handler(read_eviction, PREFIXES, self.evicted),
            "POST /internal/sync": handler(read_sync, PREFIXES, self.synced),
            "POST /internal/events": handler(read_events, EVENTS, self.batched),
            # with ?hash=5f30… which of them hold that
            "GET /internal/workers": lambda asked: {"workers": self.views(asked_hash(asked))},
        }

    async def evicted(self, report: PrefixReport) -> Mapping[str, Any]:
        """Take a report of evicted hashes. Raises NotFound for a worker that is no backend."""
        backend, worker = self._worker(report)
        for keys in self.map.evict(backend, list(report.hashes)):
            self._changed(backend, worker, keys, Tier.ABSENT)
            await trio.lowlevel.checkpoint()
        return {"status": "ok"}

    async def synced(self, report: PrefixReport) -> Mapping[str, Any]:
        """Take a report of all hashes that a worker holds. Raises NotFound for a worker that is no backend."""
        backend, worker = self._worker(report)
        is_first = worker.synced_at is None
        for keys, tier in self.map.sync(backend, report.hashes, self._clock()):
            self._changed(backend, worker, keys, tier)
            await trio.lowlevel.checkpoint()
        if is_first and worker.synced_at is not None:
            await self._reconcile(backend, worker)
        return {"status": "ok"}

    async def batched(self, report: EventReport) -> Mapping[str, Any]:
        """Take a report of event batches. Raises NotFound for a worker that is no backend, and Unavailable."""
        backend = self.backend_of(report.worker)
        for each in backend.behind.as_ranks:
            if each.behind.rank == report.rank:
                return await self.events.take(each, report._replace(ranks=(report.rank,)))
        return await self.events.take(backend, report)

    def views(self, key: int | None = None) -> list[dict[str, Any]]:
        """Return a row for each worker that reports; given a prefix hash, also whether the worker holds it."""
        now, found = self._clock(), self.events.views()
        for backend, worker in self.map.workers.items():
            shown: dict[str, Any] = {
                "backend": self._registry[backend].name,
                "source": CHANNEL,
                "level": Level.ESTIMATED.value,
                "hashes": len(worker.hashes),
                "report_age_s": now - worker.reported_at,
                "sync_age_s": None if worker.synced_at is None else now - worker.synced_at,
            }
            found.append(shown if key is None else {**shown, "holds": key in worker.hashes})
        return found

    def removed(self, backend: Backend) -> None:
        self._close(backend.id, self._clock())
        self.events.forget(backend.id)

    def reload(self, before: Config, after: Config) -> None:
        inbox = self._inbox
        inbox.prefix_tokens = placement_options(after).build(StickyLeastLoadedOptions).prefix_tokens
        if after.policy == StickyLeastLoaded.name:
            inbox.hasher.keep((*inbox.lengths, inbox.prefix_tokens))

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        """Note a prefix length that a request names: hashes of that length are wanted from now on."""
        length, lengths = attempt.prompt.prefix_len, self._inbox.hasher.lengths
        if length and length not in lengths and len(lengths) < LENGTHS_MAX:
            self._inbox.hasher.keep((*lengths, length))

    def started(self, attempt: Attempt, now: float) -> None:
        self._leases.begin(attempt.target.id, attempt.prompt.end, self._inbox.prefix_tokens, now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        if attempt.first_at is not None:
            self._leases.begin(attempt.target.id, end, self._inbox.prefix_tokens, now)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """End leases, notice silent workers, refresh routes and tick event streams, until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._faults.keep, "worker_reports", self._keep_ticking)
            nursery.start_soon(self._faults.keep, "pushed_events", self._follow_events)

    async def _keep_ticking(self) -> None:
        while True:
            self.tick(self._clock())
            await trio.sleep(TICK_S)

    async def _follow_events(self) -> None:
        while True:
            wait_s = self.events.tick(self._clock())
            with trio.move_on_after(max(PAUSE_S, wait_s)):
                await self.events.due.wait()
            self.events.due = trio.Event()

    def tick(self, now: float) -> None:
        self.drain()
        for id_, worker in list(self.map.workers.items()):
            known = self._registry.ids.current(id_)
            if known is None or worker.generation != known.generation:
                self._close(id_, now)  # a restarted engine holds nothing, whatever was reported before
        self.map.silence(now)
        for backend, link in self._leases.ended(now):
            self._report(backend, [link], Tier.ABSENT)
        if self.map.workers:
            part = self.links.part(self._refreshed, LINKS_PER_TICK)
            self._refreshed = self._refreshed + LINKS_PER_TICK if part else 0
            for link in part:
                self._confirm(link)

    def drain(self) -> None:
        """Link the hashes that came in to fingerprints, and confirm what workers hold of them."""
        waiting, models = self._inbox.waiting, self._models.known() if self._inbox.waiting else {}
        while waiting:
            keyed = waiting.popleft()
            model = models.get(keyed.root)
            if model is None:
                self.map.counters.keys_foreign += 1
                continue
            self.map.counters.keys_noted += 1
            link = Link(keyed.key, keyed.fingerprint, keyed.tokens, model)
            self.links.add(link)
            self._confirm(link)

    def metrics(self) -> Iterator[Sample]:
        yield from samples("push", self.map.counters)
        yield from samples("push_events", self.events.counters)
        for name, help_text, value in (
            ("workers", "Workers that report their prefix hashes to this node.", len(self.map.workers)),
            ("hashes", "Prefix hashes that workers reported and hold.", len(self.map)),
            ("links", "Prefix hashes that are linked to fingerprints.", len(self.links)),
            ("leases", "Routes of traffic that a worker has to confirm.", len(self._leases.ends)),
            ("streams", "Streams of KV events that reporters push.", len(self.events)),
        ):
            yield Sample(f"push_{name}", "gauge", help_text, value)
        help_text = "Links of prefix hashes forgotten for want of room."
        yield Sample("push_links_forgotten", "counter", help_text, self.links.forgotten)

    def backend_of(self, name: str) -> Backend:
        backend = self._registry.ids.find(name)
        if backend is None:
            raise NotFound(f"worker_id: no backend {name!r}")
        return backend

    def _worker(self, report: PrefixReport) -> tuple[BackendId, PushWorker]:
        backend, now = self.backend_of(report.worker), self._clock()
        known = self.map.workers.get(backend.id)
        worker = self.map.report(backend.id, report.model, now, backend.generation)
        if worker is not known:
            self._inbox.taken = self.drain
            self._inbox.hasher.keep((*self._inbox.hasher.lengths, self._inbox.prefix_tokens))
            if self not in self._router.observers:
                self._router.observers += (self,)
            source = Source(backend.id, CHANNEL)
            self._engine_caches.open(source, PrefixHolder(self.links, worker), now)
            self._engine_caches.set_level(source, Level.ESTIMATED, REASON, now)
        return backend.id, worker

    def _close(self, backend: BackendId, now: float) -> None:
        self.map.forget(backend)
        self._engine_caches.close(Source(backend, CHANNEL), now)
        self._inbox.taken = self.drain if self.map.workers else None

    def _changed(self, backend: BackendId, worker: PushWorker, keys: Iterable[int], tier: Tier) -> None:
        """Report a change of prefix hashes as one of the prefixes that they stand for, and end their leases."""
        links = [link for key in keys for link in self.links.of_key(key, worker.model)]
        for link in links:
            self._leases.ends.pop((backend, link.fingerprint), None)
        self._report(backend, links, tier)

    def _report(self, backend: BackendId, links: Sequence[Link], tier: Tier) -> None:
        if links:
            changes = tuple(Change(link.fingerprint, link.tokens, tier, UNKNOWN) for link in links)
            found = Changes(cleared=False, changes=changes, complete=True)
            self._engine_caches.changed(Source(backend, CHANNEL), found, self._clock())

    def _confirm(self, link: Link) -> None:
        """Report that the holders of this hash hold its prefix. The routes age like all others."""
        for backend in self.map.holders(link.key):
            worker = self.map.workers[backend]
            if worker.model in ("", link.model):
                self._changed(backend, worker, (link.key,), Tier.GPU)

    async def _reconcile(self, backend: BackendId, worker: PushWorker) -> None:
        """Withdraw routes that a worker's first complete report does not confirm, while the id is this worker's."""
        start = 0
        while self.map.workers.get(backend) is worker and (part := self.links.part(start, SLICE_LINKS)):
            start += SLICE_LINKS
            self._report(backend, self._leases.are_unfounded(backend, worker, part), Tier.ABSENT)
            await trio.lowlevel.checkpoint()


def asked_hash(asked: Asked) -> int | None:
    text = asked.query.get("hash", "")
    return hash_in(text, "hash") if text else None
