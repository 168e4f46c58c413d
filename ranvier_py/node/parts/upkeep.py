"""What a node does beside requests: poll its engines, learn, record, free what has expired, and follow its peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.addresses import OFF
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.engine_cache.sources.publishers import Publisher, of_operator
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.peer.router_peer import Features
from ranvier_py.core.routing.backend_state.signed_commands import NODE, SignedCommands, by_clock
from ranvier_py.core.routing.backends import Backend, ProbeResult
from ranvier_py.core.routing.request_record import Header, scheme_mark
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.io.recorder import Recorder
from ranvier_py.io.tokenizer_worker import TokenizerWorker
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.engine_cache.calibration_parts import CalibrationParts, looked_at_by
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.part import Counted, Node, Part, log_transitions
from ranvier_py.node.parts.backend_orders import BackendOrders
from ranvier_py.node.parts.backend_views import reaches_engine
from ranvier_py.node.parts.node_orders import NodeOrders
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.hangs.hang_watch import HangWatch

log = logging.getLogger(__name__)


class Polls(Part):
    """See the module."""

    name = "polls"
    keys = ("polls",)

    def __init__(self, node: Node, clustering: ClusterParts | None) -> None:
        self._node = node
        self.poller = EnginePoller(
            node.config.polls,
            node.rng,
            probed=self._probed,
            measured=self._measured,
            found=self._found if node.config.kv_events == "auto" else None,
            received=self._received,
            server_info=self._server_info,
            owns=looked_at_by(clustering.peer) if clustering is not None else None,
            faults=node.faults,
        )

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        await self.poller.run(task_status=task_status)

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        events = spec is None or spec.kv_events != OFF
        publishers = publishers_of(spec) if spec is not None and events else ()
        name = spec.tls_name if spec is not None else ""
        key = partial(self._node.key_for, backend.url)
        url = with_base_path(backend.url, spec.base_path if spec is not None else "")
        own = self._node.own_probe
        self.poller.watch(backend.id, url, key, publishers=publishers, events=events, tls_name=name, own_probe=own)

    def removed(self, backend: Backend) -> None:
        self.poller.forget(backend.id)

    def held(self, before: Config, after: Config) -> Iterable[str]:
        """Polling of metrics can't begin or end."""
        changes = (before.polls.metrics_interval_s == 0) != (after.polls.metrics_interval_s == 0)
        return ("engine_metrics_interval_s",) if changes else ()

    def reload(self, before: Config, after: Config) -> None:
        self.poller.set_options(after.polls)

    def view(self) -> Any:
        return values(self.poller.counters)

    def metrics(self) -> Iterator[Sample]:
        return samples("poll", self.poller.counters)

    def _probed(self, backend: BackendId, result: ProbeResult) -> None:
        for part in self._node.parts:
            part.probed(backend, result)

    def _measured(self, backend: BackendId, metrics: EngineMetrics) -> None:
        for part in self._node.parts:
            part.measured(backend, metrics)

    def _found(self, backend: BackendId, publishers: tuple[Publisher, ...]) -> None:
        for part in self._node.parts:
            part.found(backend, publishers)

    def _server_info(self, backend: BackendId, caches: bool) -> None:
        registry = self._node.registry
        if (slot := registry.ids.current(backend)) is not None:
            slot.reuse.server_info_read(caches)
            registry.changes.reconsider(slot)

    def _received(self, backend: BackendId) -> None:
        log_transitions(self._node.registry.changes.received(backend, time.monotonic()))


def with_base_path(url: str, path: str) -> str:
    """Return a backend's URL with what precedes the paths of its pages, before its rank."""
    place, rank, number = url.partition("#")
    return place + path + rank + number


def publishers_of(spec: BackendSpec) -> tuple[Publisher, ...]:
    """Return where the configuration says that an engine publishes KV events; () if the engine is to be asked."""
    host = urlsplit(spec.url).hostname or ""
    return of_operator(spec.kv_events, spec.kv_replay, spec.kv_ranks, host) if spec.kv_events else ()


ASK_INTERVAL_S = 1.0  # between two questions to peers whether they reach an engine, by a node that reaches none
FOLLOW_INTERVAL_S = 0.25  # between two transfers of peers' doubts and commands to the poller and the registry
SWEEP_INTERVAL_S = 1.0  # expired routes are never matched; the sweep only frees their memory


class Sweep(Part):
    """Has every part free what has expired, a little at a time."""

    name = "sweep"

    def __init__(self, node: Node) -> None:
        self._node = node

    async def loop(self) -> None:
        while True:
            await trio.sleep(SWEEP_INTERVAL_S)
            for part in self._node.parts:
                with self._node.faults.caught("sweep"):
                    part.sweep(time.monotonic())


class PeerFollower(Part):
    """Acts on peers' reports and commands."""

    name = "follow"

    def __init__(
        self, node: Node, clustering: ClusterParts, polls: Polls, orders: BackendOrders, node_orders: NodeOrders
    ) -> None:
        self._node, self._clustering, self._poller, self._orders = node, clustering, polls.poller, orders
        self._node_orders, self._asked_at = node_orders, -ASK_INTERVAL_S

    async def loop(self) -> None:
        peer = self._clustering.peer
        while True:
            await trio.sleep(FOLLOW_INTERVAL_S)
            log_transitions(peer.transitions())
            for backend in peer.doubted():
                self._poller.probe_soon(backend)
            for backend in self._node.registry.names.unsure():
                self._poller.moved(backend)
            self._follow(peer.features)
            if not reaches_engine(self._node.registry) and time.monotonic() - self._asked_at >= ASK_INTERVAL_S:
                self._asked_at = time.monotonic()
                peer.features.facts.doubts.wanted = True
                self._clustering.port.poke()
            self._clustering.look()

    def _follow(self, features: Features) -> None:
        """Carry out what operators ordered on other nodes and workers, in the order in which it was given."""
        tables: Sequence[SignedCommands] = (features.signed_commands, features.worker_commands)
        shared = self._clustering.orders
        new = [(command, table) for table in tables for command in table.take_new()]
        for command, table in sorted(new, key=lambda each: by_clock(each[0])):
            if shared.is_over(command):  # followed before a restart, or undone since
                table.followed(command)
                continue
            why = "a bug there, which its log has"
            with self._node.faults.caught("commands"):
                orders = self._node_orders if command.url == NODE else self._orders
                why = orders.follow(command, shared.ordered_by(command))
            if not why:
                shared.done(command.url, command.clock)
            table.followed(command, why)


class Learner(Counted):
    """Has prompts and answers tokenized and learned."""

    keys = ("learn_queue_max",)

    def __init__(self, worker: TokenizerWorker) -> None:
        super().__init__("tokenizer_worker", lambda: worker.counters, worker.run)
        self._worker = worker

    def reload(self, before: Config, after: Config) -> None:
        self._worker.queue_max = after.learn_queue_max


class HangParts(Counted):
    """Watches for engines that hang."""

    keys = ("polls",)

    def __init__(
        self,
        node: Node,
        serving: Mapping[int, Call],
        polls: Polls,
        calibration: CalibrationParts,
        events: EngineEvents,
    ) -> None:
        watch = HangWatch(
            *(node.router, serving, node.config.polls.hang_s),
            probe=polls.poller.probe_soon,
            changed=log_transitions,
            reported_waiting=calibration.waiting,
            sent_event_at=events.received_at,
        )
        super().__init__("hangs", lambda: watch.hangs.counters, watch.run)
        self._hangs = watch.hangs

    def reload(self, before: Config, after: Config) -> None:
        self._hangs.hang_s = after.polls.hang_s


def recorder_of(node: Node) -> list[Counted]:
    """Return what records attempts, if the operator wants that."""
    config, scheme = node.config, node.scheme
    if config.record_file is None:
        return []
    recorder = Recorder(
        config.record_file,
        Header(time.time(), config.block_size_tokens, scheme_mark(scheme.identity, scheme.key)),
        started_at=time.monotonic(),
        clock=time.monotonic,
        bytes_max=config.record_bytes_max,
        files_max=config.record_files_max,
    )
    node.router.observers += (recorder,)
    return [Counted("recorder", lambda: recorder.counters, recorder.run)]
