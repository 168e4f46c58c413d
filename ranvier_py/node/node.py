"""The composition root: builds the parts of one node, opens the one nursery, stops them in reverse.

Start order is the order of lines in `run`; the public port opens last and closes first. On SIGTERM or SIGINT the node
stops accepting, lets running answers finish up to the drain deadline, and ends.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.control import control_port as control
from ranvier_py.control.operations import Admin
from ranvier_py.core.addresses import OFF, host_port
from ranvier_py.core.answers.usage_injection import UsageAsking
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.gossip.wire.messages import Command
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import ProbeResult, Registry, Transition
from ranvier_py.core.routing.checkpoints.cache_profile import AUTO
from ranvier_py.core.routing.health import Circuit, Health
from ranvier_py.io.descriptors import raise_descriptor_limit
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.io.logs import announce, log_counters, request_line
from ranvier_py.io.resolver import Resolver
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.io.tokenizer_worker import TokenizerWorker
from ranvier_py.node.answer_parts import share_answers
from ranvier_py.node.calibration_parts import looked_at_by
from ranvier_py.node.client_parts import client_reader_of
from ranvier_py.node.cluster_parts import ClusterParts, load_keys, open_cluster
from ranvier_py.node.engine_event_parts import EngineEvents
from ranvier_py.node.garbage import collected_in_waits
from ranvier_py.node.index_parts import Indexing, Preparing
from ranvier_py.node.parts import (
    INDEX_REDIS,
    alpha_process_of,
    authorization_of,
    calibrating_of,
    control_settings,
    debugger_of,
    fingerprint_key,
    indexing_of,
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
    tokenizer_process,
    within_descriptors,
)
from ranvier_py.node.push_parts import WorkerReports
from ranvier_py.node.reload import ConfigSource, Reloads
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.pipeline import Pipeline
from ranvier_py.proxy.server import DataServer
from ranvier_py.proxy.upstream import Upstream
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.00005
"""The event loop gives up the interpreter lock at each system call and gets it back from another thread at the latest
after this. CPython's default would be added to a request several times over."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEEP_BYTES = 256 * 1024 * 1024  # four bodies of the largest size at once
MAP_BYTES_MIN = 32 * 1024 * 1024  # glibc's own upper limit (DEFAULT_MMAP_THRESHOLD_MAX)
"""From here on one mapping per buffer."""

FOLLOW_INTERVAL_S = 0.25  # for doubts and commands of peers to reach the prober and the registry
COLLECT_INTERVAL_S = 600.0  # between two full collections, each in a moment without requests

SWEEP_INTERVAL_S = 1.0  # expired claims are invisible at once; the sweep only frees their memory
SWEEP_ROWS_MAX = 2000


class Node:
    """The parts of one node, wired. Nothing runs until `run`, which adds those that not every node has."""

    clustering: ClusterParts | None = None
    reloads: Reloads | None = None
    log_counters = staticmethod(log_counters)  # of the whole process

    def __init__(self, config: Config, tokenizer: TokenizerProcess, rng: Random, key: bytes) -> None:
        """`tokenizer` has started; `key` is what fingerprints are made with, there as here."""
        self.config = config
        self.tokenizer = tokenizer
        self.faults = Faults()
        self.resolver = Resolver(self.faults)
        self.drained = trio.Event()  # nobody is served any more, and the peers know it
        self.addresses: dict[str, BackendAddress] = {}
        self.scheme = scheme_of(config, tokenizer.facts, key)
        self.registry = Registry(config.health)
        self.keys = keys = key_inbox(config, self.scheme)
        self.router = make_router(config, tokenizer.facts, self.scheme, self.registry, rng, keys.hasher)
        self.shadows = shadows_of(config, self.router, rng)
        self.recorder, self.alpha_process = recorder_of(config, self.scheme), alpha_process_of(config, self.router)
        self.clients = client_reader_of(config, self.scheme, rng)
        self.router.observers += tuple(each for each in (self.shadows, self.recorder, self.clients) if each is not None)
        self.tokenizer_worker = TokenizerWorker(tokenizer, self.router, keys, queue_max=config.learn_queue_max)
        self.upstream = Upstream(config.upstream)
        self.engine_events = EngineEvents(self.router, rng, log_transitions, faults=self.faults)
        self.worker_reports = WorkerReports(self.router, self.engine_events.engine_caches, keys, faults=self.faults)
        self.asking = UsageAsking(enabled=config.ask_usage)
        self.calibrating = calibrating_of(config, self.router, self.asking, self.engine_events)
        self.poller = EnginePoller(
            config.polls,
            rng,
            probed=self._probed,
            measured=self.calibrating.looked,
            found=self.engine_events.found if config.kv_events == "auto" else None,
            faults=self.faults,
        )
        self.engine_events.discover_soon = self.poller.discover_soon
        self.engine_events.load_reported = self.poller.load_reported
        report, pools, tenants = request_line(), redis_pools_of(config), tenants_of(config, self.scheme)
        self.pipeline = Pipeline(
            self.router,
            self.upstream,
            Preparing(self.tokenizer_worker, lambda: self.indexing),
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
        self.server = DataServer(
            self.pipeline.handle, config.server, tls=tls_context(config), report=report, faults=self.faults
        )
        self.upstream.readiness = self.server.readiness  # runs as long as there are requests
        self.admin, self.control = Admin(self), control_settings(config)
        for spec in config.backend:
            self.add_backend(spec.url, spec.weight, spec.name, spec)
        self.indexing: Indexing = indexing_of(
            config, self.registry, self.engine_events.engine_caches, rng, self.faults, pools.get(INDEX_REDIS)
        )
        self.indexing.join(self.router.policy)

    def add_backend(self, url: str, weight: float, name: str, spec: BackendSpec | None = None) -> BackendId:
        """`spec` is what else was configured. Raises BadRequest; whatever is raised, nothing was added."""
        with ExitStack() as undo:
            backend = self.registry.add(url, weight=weight, name=name, hosted=spec.hosted if spec is not None else None)
            undo.callback(self.remove_backend, backend.name)
            self.addresses[backend.url] = BackendAddress.parse(backend.url)
            events = spec is None or spec.kv_events != OFF
            publishers = publishers_of(spec) if spec is not None and events else ()
            self.calibrating.configured[backend.id] = spec.kv_profile if spec is not None else AUTO
            self.poller.watch(backend.id, backend.url, self.config.api_key, publishers=publishers, events=events)
            undo.pop_all()
        log.info("backend.added %s %s weight %g", backend.name, backend.url, weight)
        return backend.id

    def remove_backend(self, name_or_url: str) -> None:
        """Raises NotFound. Each part forgets it, whatever is raised by another."""
        backend = self.registry.remove(name_or_url)
        with ExitStack() as steps:
            if address := self.addresses.pop(backend.url, None):
                steps.callback(self.upstream.forget, address)
            for part in (self.calibrating, self.engine_events, self.poller):
                steps.callback(part.forget, backend.id)
        log.info("backend.removed %s", backend.name)

    async def follow(self, clustering: ClusterParts) -> None:
        """Do what peers bring about here, for ever."""
        peer = clustering.peer
        while True:
            await trio.sleep(FOLLOW_INTERVAL_S)
            log_transitions(peer.transitions())
            for backend in peer.doubted():
                self.poller.probe_soon(backend)
            for command in peer.commands():
                with self.faults.caught("commands"):
                    self._follow(command)
            clustering.look()

    def _follow(self, command: Command) -> None:
        """A command that the operator gave on another node."""
        known = self.registry.find(command.url)
        try:
            if command.verb == "add" and known is None:
                self.add_backend(command.url, command.weight, command.name)
            elif command.verb == "remove" and known is not None:
                self.remove_backend(command.url)
        except RanvierError as error:
            log.warning("backend.command_refused %s %s: %s", command.verb, command.url, error)

    def _address_of(self, url: str) -> BackendAddress:
        """Parsed once for each backend; one that is leaving may still be asked for."""
        return self.addresses.get(url) or BackendAddress.parse(url)

    def _probed(self, backend: BackendId, result: ProbeResult) -> None:
        log_transitions(self.registry.probed(backend, result, time.monotonic()))

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
            shadows = self.shadows.shadows if self.shadows is not None else ()
            for router in (self.router, *(shadow.router for shadow in shadows)):
                with self.faults.caught("sweep"):
                    router.routes.sweep(time.monotonic(), generations, SWEEP_ROWS_MAX)
            self.upstream.prune()

    async def stop_on_signal(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drain at the first SIGTERM or SIGINT; a second one cuts the drain short."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info("node.draining after %s, up to %g s", signal.Signals(number).name, self.config.drain_timeout_s)
                break
            self.admin.draining = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cut_at_next, signals, nursery.cancel_scope)
                await self.server.drain(self.config.drain_timeout_s)
                if self.clustering is not None:  # last, so that the last answers are still sent to peers
                    await self.clustering.leave()
                nursery.cancel_scope.cancel()
            await self.server.drain(0)  # what a second signal left; nothing otherwise
            self.drained.set()

    async def _cut_at_next(self, signals: object, scope: trio.CancelScope) -> None:
        async for _ in signals:  # type: ignore[attr-defined]
            log.info("node.cut at the second signal")
            scope.cancel()


WELL = (Health.HEALTHY.value, Circuit.CLOSED.value)
"""What a backend is to be."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running node listens: (host, port) pairs of the public port, URL of the control port."""

    public: Sequence[tuple[str, int]]
    control: str

    def __str__(self) -> str:
        public = " ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.public)
        return f"{public} control {self.control}"


async def run(
    config: Config,
    *,
    tokenizer_of: Callable[[Config, bytes], TokenizerProcess] = tokenizer_process,
    source: ConfigSource | None = None,
    task_status: trio.TaskStatus[Addresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one node until a signal tells it to stop. Raises ConfigError or OSError at the start.

    `source` is what the configuration is read from again; without it the node keeps this one.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    loaded, descriptors = config, raise_descriptor_limit()
    config = within_descriptors(config, descriptors)
    keys, key_file = await load_keys(config) if config.gossip_endpoints is not None else (None, None)
    key = fingerprint_key(config, keys.fingerprint_secret if keys is not None else None)
    tokenizer = tokenizer_of(config, key)
    await tokenizer.start()
    try:
        facts = tokenizer.facts
        log.log(logging.INFO if facts.incremental else logging.WARNING, "node.tokenizer %s", facts.probe_report)
        node = Node(config, tokenizer, Random(secrets.randbits(64)), key)  # noqa: S311  # placement draws no secrets
        node.reloads = Reloads(node, loaded, source, descriptors) if source is not None else None
        with node.resolver.installed(), closing(node.upstream), collected_in_waits():
            if keys is not None:
                node.clustering = await open_cluster(config, keys, key_file, node.router, node.scheme, node.faults)
                node.engine_events.share(node.clustering.peer.streams)
                node.poller.owns = looked_at_by(node.clustering.peer)
                if node.pipeline.responses is not None:
                    share_answers(node.pipeline.responses, node.clustering)
            await run_parts(node, task_status)
    finally:
        await tokenizer.close()
    log.info("node.stopped")


async def run_parts(node: Node, task_status: trio.TaskStatus[Addresses]) -> None:
    """Start the parts in order, serve until drained, stop them in reverse.

    No fault of a part ends the others: it is kept here, or keeps its own loops where it has several.
    """
    config, faults = node.config, node.faults
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(node.resolver.run)
        nursery.start_soon(faults.keep, "tokenizer", node.tokenizer.run)
        nursery.start_soon(faults.keep, "tokenizer_worker", node.tokenizer_worker.run)
        nursery.start_soon(faults.keep, "sweep", node.sweep)
        nursery.start_soon(faults.keep, "clients", node.clients.run)
        for place, part in (("recorder", node.recorder), ("route_eviction", node.alpha_process)):
            if part is not None:
                nursery.start_soon(faults.keep, place, part.run)
        if node.clustering is not None:
            await nursery.start(node.clustering.run)
            nursery.start_soon(faults.keep, "follow", node.follow, node.clustering)
        nursery.start_soon(node.indexing.run)
        if (responses := node.pipeline.responses) is not None and responses.elsewhere is not None:
            nursery.start_soon(faults.keep, "response_cache", responses.elsewhere.run)
        await nursery.start(node.poller.run)
        await nursery.start(node.engine_events.run)
        nursery.start_soon(faults.keep, "calibration", node.calibrating.run)
        await nursery.start(node.worker_reports.run)
        with listening_on(config.control):
            serve = partial(control.serve, node.admin, node.control, shutdown=shutdown, faults=faults)
            url = await nursery.start(serve)
        await nursery.start(node.stop_on_signal)
        if node.reloads is not None and signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:  # else it ends a process
            nursery.start_soon(faults.keep, "reload", node.reloads.run)
        with trio.move_on_after(config.polls.probe_timeout_s):  # who serves which model, before the first request asks
            await node.poller.wait_first_round()
        async with trio.open_nursery() as serving:
            host, port = host_port(config.listen)
            with listening_on(config.listen):
                bound = await serving.start(partial(node.server.serve, host, port, reuse_port=config.workers > 1))
            addresses = Addresses(bound, url)
            if not config.backend:
                log.warning("node.no_backends every request gets a 503 until one is added: POST /admin/backends")
            log.info("node.ready on %s", addresses)
            announce(f"ranvier listening on {addresses}")
            task_status.started(addresses)
        await node.drained.wait()
        shutdown.set()
        nursery.cancel_scope.cancel()


@contextmanager
def listening_on(address: str) -> Iterator[None]:
    """An error of binding names the address."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror or error} ({address})") from error


def log_transitions(transitions: Sequence[Transition]) -> None:
    """A warning for what somebody may have to look at; good news and what is listed are none."""
    for change in transitions:
        level = logging.INFO if change.what == "models" or change.after in WELL else logging.WARNING
        log.log(level, "backend.%s %s %s -> %s (%s)", change.what, change.name, change.before, change.after, change.why)


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory; False where that can't be done.

    By default glibc gives back what it frees at the top of its heap, so every large body is received into pages that
    the kernel must first find and clear. Up to `KEEP_BYTES` of a process stay reserved after a peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAP_BYTES_MIN)) and bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES))
