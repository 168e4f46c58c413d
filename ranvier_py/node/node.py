"""The parts of one node, and what several of them do together: add and remove backends, follow peers, drain.

On SIGTERM or SIGINT the node stops accepting, lets running answers finish up to the drain deadline, and ends.
`run_node` runs the parts.
"""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from random import Random

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.control_settings import control_settings
from ranvier_py.core.addresses import OFF
from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_limit import LogLimit
from ranvier_py.core.routing.backend import KEY_ACCEPTED
from ranvier_py.core.routing.backend_state.signed_commands import Command
from ranvier_py.core.routing.backends import Backend, ProbeResult, Registry, Transition
from ranvier_py.core.routing.blame.refusals import SERVES
from ranvier_py.core.routing.checkpoints.cache_profile import AUTO
from ranvier_py.core.routing.health import Circuit, Health
from ranvier_py.core.routing.processes.engine_names import NONE
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.io.logs import log_counters, request_line
from ranvier_py.io.resolver import Resolver
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.io.tokenizer_worker import TokenizerWorker
from ranvier_py.node.client_parts import client_reader_of
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.engine_event_parts import EngineEvents
from ranvier_py.node.index_parts import IndexedTokenizer
from ranvier_py.node.name_parts import NameParts
from ranvier_py.node.parts import (
    INDEX_REDIS,
    authorization_of,
    calibration_parts_of,
    debugger_of,
    hang_watch_of,
    index_parts_of,
    key_inbox,
    make_router,
    publishers_of,
    recorder_of,
    redis_pools_of,
    request_ids,
    response_cache_of,
    scheme_of,
    shadows_of,
    tenants_of,
    tls_context,
)
from ranvier_py.node.push_parts import WorkerReports
from ranvier_py.node.ranks.rank_parts import RankParts
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.pipeline import Pipeline
from ranvier_py.proxy.server import DataServer
from ranvier_py.proxy.upstream import Upstream
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

FOLLOW_INTERVAL_S = 0.25  # between two transfers of peers' doubts and commands to the poller and the registry
COLLECT_INTERVAL_S = 600.0  # between two full collections, each in a moment without requests

SAME_SIGNAL_S = 0.5
"""Signals to stop within this time count as one: the kernel reports the death of a worker's parent once for each of its
threads, and a service manager may signal a worker as well as the parent, which passes the signal on."""

SWEEP_INTERVAL_S = 1.0  # expired routes are never matched; the sweep only frees their memory
SWEEP_ROWS_MAX = 2000


class Node:
    """The parts of one node, wired together. Nothing runs until `run`, which adds the parts that not every node has."""

    clustering: ClusterParts | None = None
    log_counters = staticmethod(log_counters)  # they count for the whole process

    def __init__(self, config: Config, tokenizer: TokenizerProcess, rng: Random, key: bytes) -> None:
        """`tokenizer` must have started; `key` keys its fingerprints and this node's."""
        self.config, self.tokenizer, self.faults = config, tokenizer, Faults()
        self.resolver, self.registry = Resolver(self.faults), Registry(config.health, resorted=SilentResorts())
        self.drained = trio.Event()  # set once no request is served any more, and the peers know it
        self.first_round = trio.CancelScope()  # the wait for the first answers of engines
        self.addresses: dict[str, BackendAddress] = {}
        self.scheme = scheme_of(config, tokenizer.facts, key)
        self.keys = keys = key_inbox(config, self.scheme)
        self.router = make_router(config, tokenizer.facts, self.scheme, self.registry, rng, keys.hasher)
        self.recorder = recorder_of(config, self.scheme)
        self.shadows, self.clients = shadows_of(config, self.router, rng), client_reader_of(config, self.scheme, rng)
        self.router.observers += tuple(each for each in (self.shadows, self.recorder, self.clients) if each is not None)
        self.tokenizer_worker = TokenizerWorker(tokenizer, self.router, keys, queue_max=config.learn_queue_max)
        self.upstream, self.asking = Upstream(config.upstream), UsageAsker(enabled=config.ask_usage)
        self.engine_events = EngineEvents(self.router, rng, log_transitions, faults=self.faults)
        self.worker_reports = WorkerReports(self.router, self.engine_events.engine_caches, keys, faults=self.faults)
        self.calibration_parts = calibration_parts_of(config, self.router, self.asking, self.engine_events)
        self.poller = EnginePoller(
            config.polls,
            rng,
            probed=self._probed,
            measured=self.calibration_parts.looked,
            found=self._found if config.kv_events == "auto" else None,
            received=self._received,
            faults=self.faults,
        )
        events, poller = self.engine_events, self.poller
        poller.on_server_info = self.calibration_parts.server_info
        events.discover_soon, events.load_reported = poller.discover_soon, poller.load_reported
        report, pools, tenants = request_line(), redis_pools_of(config), tenants_of(config, self.scheme)
        self.pipeline = Pipeline(
            self.router,
            self.upstream,
            IndexedTokenizer(self.tokenizer_worker, lambda: self.index_parts),
            config.pipeline,
            address_of=self._address_of,
            asking=self.asking,
            report=report,
            trouble=self.poller.probe_soon,
            changed=log_transitions,
            authorization=authorization_of(config),
            ids=request_ids(),
            tenants=tenants,
            may_see=debugger_of(config),
            cache_control=config.anthropic_cache_control,
            responses=response_cache_of(config, self.scheme, pools, rng, tenants),
            mender=self.clients.mender,
        )
        tls = tls_context(config)
        self.server = DataServer(self.pipeline.handle, config.server, tls=tls, report=report, faults=self.faults)
        self.names = NameParts(self.registry, self.addresses, self.upstream, poller, events)
        self.rank_parts = RankParts(self.registry, self.add_backend, self.remove_backend, config.ranks)
        self.hang_watch = hang_watch_of(config, self.pipeline, self.calibration_parts, events)
        self.upstream.readiness = self.server.readiness  # which runs as long as there are requests
        self.control, self.draining = control_settings(config), False
        index_of = partial(index_parts_of, config, self.registry, self.engine_events.engine_caches, rng, self.faults)
        self.index_parts = index_of()  # of no backends, which come now
        for spec in config.backend:
            self.add_backend(spec.url, spec.weight, spec.name, spec)
        self.index_parts = index_of(pools.get(INDEX_REDIS))
        self.index_parts.join(self.router.policy)

    def add_backend(self, url: str, weight: float, name: str, spec: BackendSpec | None = None) -> BackendId:
        """Add a backend; `spec`: its configuration, if any. Raises BadRequest; then nothing was added."""
        self.rank_parts.make_room(url)
        with ExitStack() as undo:
            backend = self.registry.add(url, weight=weight, name=name, hosted=spec.hosted if spec is not None else None)
            undo.callback(self.remove_backend, backend.name)
            self.addresses[backend.url] = BackendAddress.parse(backend.url)
            self.rank_parts.added(backend, spec)
            self.index_parts.taken(backend.id, backend.url)
            for learner in (self.router.policy, self.shadows):
                if learner is not None:
                    learner.forget(backend.id)
            events = spec is None or spec.kv_events != OFF
            publishers = publishers_of(spec) if spec is not None and events else ()
            self.calibration_parts.configured[backend.id] = spec.kv_profile if spec is not None else AUTO
            self.poller.watch(backend.id, backend.url, self.config.api_key, publishers=publishers, events=events)
            undo.pop_all()
        self._look_for_ranks()
        log.info("backend.added %s %s weight %g", backend.name, backend.url, weight)
        return backend.id

    def _look_for_ranks(self) -> None:
        """Note whether this node chooses ranks, so that clients do not."""
        self.pipeline.router_fields.places_ranks = any(backend.rank is not None for backend in self.registry)

    def remove_backend(self, name_or_url: str) -> None:
        """Have each part forget the backend and its ranks, even if another part raises. Raises NotFound."""
        for each in self.registry.known(name_or_url).as_ranks:
            self.remove_backend(each.name)
        backend = self.registry.remove(name_or_url)
        self._look_for_ranks()
        with ExitStack() as steps:
            if address := self.addresses.pop(backend.url, None):
                steps.callback(self.upstream.forget, address)
            for part in (self.calibration_parts, self.engine_events, self.worker_reports, self.poller):
                steps.callback(part.forget, backend.id)
            steps.callback(self.rank_parts.forget, backend)
        log.info("backend.removed %s", backend.name)

    def drain_backend(self, name_or_url: str, draining: bool) -> Backend:
        """Send a backend no more requests, or some again, because an operator orders it. Raises NotFound."""
        before = self.registry.known(name_or_url).draining
        backend = self.registry.drain(name_or_url, draining)
        if before is not draining:
            log.info("backend.draining %s %s -> %s (ordered over the control port)", backend.name, before, draining)
        return backend

    async def follow(self, clustering: ClusterParts) -> None:
        """Act on peers' reports and commands, for ever."""
        peer = clustering.peer
        while True:
            await trio.sleep(FOLLOW_INTERVAL_S)
            log_transitions(peer.transitions())
            for backend in peer.doubted():
                self.poller.probe_soon(backend)
            for backend in self.registry.names.unsure():
                self.poller.moved(backend)
            for command in peer.signed_commands.take_new():
                with self.faults.caught("commands"):
                    if not self._follow(command):
                        peer.signed_commands.failed(command)
            clustering.look()

    def _follow(self, command: Command) -> bool:
        """Carry out a command that the operator gave on another node. Returns False if that fails now."""
        known = self.registry.find(command.url)
        try:
            if command.verb == "add" and known is None:
                self.add_backend(command.url, command.weight, command.name)
            elif command.verb == "remove" and known is not None:
                self.remove_backend(command.url)
        except RanvierError as error:
            log.warning("backend.command_refused %s %s: %s", command.verb, command.url, error)
            return False
        return True

    def _address_of(self, url: str) -> BackendAddress:
        """Return the backend's address, parsed when it was added; parse it again if it was removed meanwhile."""
        return self.addresses.get(url) or BackendAddress.parse(url)

    def _probed(self, backend: BackendId, result: ProbeResult) -> None:
        self.rank_parts.probed(backend, result)
        log_transitions(self.registry.probed(backend, result, time.monotonic()))

    def _found(self, backend: BackendId, publishers: tuple[Publisher, ...]) -> None:
        self.rank_parts.published(backend, [each.rank for each in publishers])
        self.engine_events.found(backend, publishers)

    def _received(self, backend: BackendId) -> None:
        log_transitions(self.registry.received(backend, time.monotonic()))

    async def sweep(self) -> None:
        """Free what has expired, a little at a time, for ever."""
        collected_at = time.monotonic()
        while True:
            await trio.sleep(SWEEP_INTERVAL_S)
            if time.monotonic() - collected_at > COLLECT_INTERVAL_S and self.server.counters.in_flight == 0:
                gc.collect()
                collected_at = time.monotonic()
            generations = [
                slot.generation if slot is not None and not slot.removed else -1 for slot in self.registry.slots
            ]
            with self.faults.caught("sweep"):
                self.engine_events.sweep(time.monotonic())
            if self.shadows is not None:
                with self.faults.caught("sweep"):
                    self.shadows.tick(self.calibration_parts.calibration.backends(), time.monotonic())
            for routes in (self.router.routes, *(self.shadows.tables if self.shadows is not None else ())):
                with self.faults.caught("sweep"):
                    routes.sweep(time.monotonic(), generations, SWEEP_ROWS_MAX)
            self.upstream.prune()

    async def stop_on_signal(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drain at the first SIGTERM or SIGINT; a later one cuts the drain short."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info("node.draining after %s, up to %g s", signal.Signals(number).name, self.config.drain_timeout_s)
                break
            self.draining = True
            self.first_round.cancel()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cut_at_next, signals, nursery.cancel_scope)
                await self.server.drain(self.config.drain_timeout_s)
                if self.clustering is not None:  # last, so that the last answers are still sent to peers
                    await self.clustering.leave()
                nursery.cancel_scope.cancel()
            await self.server.drain(0)  # cuts what is left after a second signal
            self.drained.set()

    async def _cut_at_next(self, signals: object, scope: trio.CancelScope) -> None:
        drained_at = trio.current_time()
        async for _ in signals:  # type: ignore[attr-defined]
            if trio.current_time() < drained_at + SAME_SIGNAL_S:
                continue
            log.info("node.cut at the second signal")
            scope.cancel()


class SilentResorts:
    """Logs that a model is served only by backends that are unhealthy by time-outs alone."""

    def __init__(self) -> None:
        self._limit = LogLimit()

    def __call__(self, model: str) -> None:
        if (suffix := self._limit.suffix("", time.monotonic())) is not None:
            words = "they are asked all the same"
            log.warning("pool.silent all backends of %r only time out: %s%s", model or "any model", words, suffix)


WELL = (Health.HEALTHY.value, Circuit.CLOSED.value, SERVES, KEY_ACCEPTED, NONE)
"""States that need no attention."""

ORDERED = ("models", "draining")
"""Changes that somebody has made on purpose."""


def log_transitions(transitions: Sequence[Transition]) -> None:
    """Log changes of backends: as warnings if somebody may have to look, else at info."""
    for change in transitions:
        level = logging.INFO if change.what in ORDERED or change.after in WELL else logging.WARNING
        log.log(level, "backend.%s %s %s -> %s (%s)", change.what, change.name, change.before, change.after, change.why)
