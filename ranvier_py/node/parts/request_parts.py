"""The path of a request through a node: the pipeline, connections to backends, and the public port.

The port opens last and closes first. On SIGTERM or SIGINT the node stops accepting, lets running answers finish up to
the drain deadline, and ends.
"""

from __future__ import annotations

import gc
import hmac
import logging
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count, islice
from types import MappingProxyType
from typing import Any

import orjson
import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.model_tables import table_of
from ranvier_py.core.addresses import host_port
from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.errors import listening_on
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.history.joined_panes import of_requests, summed
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.prompts.body_json import excess
from ranvier_py.core.prompts.prompt import Prompt
from ranvier_py.core.routing.backends import Backend, Registry
from ranvier_py.core.routing.engine_findings import trouble
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.core.routing.wanted.found_backend import authorization_of
from ranvier_py.io.logs import request_line
from ranvier_py.node.access.access_parts import Access
from ranvier_py.node.asked import Asked, Route
from ranvier_py.node.client_parts import ClientReader
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.part import Handler, Node, Part, log_transitions
from ranvier_py.node.parts.model_parts import ModelLooks
from ranvier_py.node.parts.request_metrics import RequestMetrics
from ranvier_py.node.parts.response_parts import Responses
from ranvier_py.node.parts.tls_parts import PUBLIC, tls_context
from ranvier_py.node.parts.upkeep import Polls
from ranvier_py.proxy.call import PromptTokenizer, Tracer
from ranvier_py.proxy.connection_pool import BackendAddress, BackendAddresses
from ranvier_py.proxy.driver import Driver
from ranvier_py.proxy.failed_tries import known_short, passed_over
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.pipeline import Pipeline
from ranvier_py.proxy.server import DataServer
from ranvier_py.proxy.stages.reserve import ReserveStage
from ranvier_py.proxy.upstream import Upstream

log = logging.getLogger(__name__)


class RequestPath(Part):
    """See the module."""

    name = "request_path"
    joins = MappingProxyType({"requests": of_requests, "tenant_requests": summed})
    keys = (
        *("pipeline", "upstream", "debug_headers", "control_key", "control_key_file", "ask_usage"),
        *("backend_api_key", "backend_api_key_file", "anthropic_cache_control", "log_level", "log_format"),
        *("client_rules", "client_rules_file", "proof", "responses", "model"),
    )

    def __init__(  # noqa: PLR0913  # a place where parts meet
        self,
        node: Node,
        tokenizer: PromptTokenizer,
        asking: UsageAsker,
        polls: Polls,
        responses: Responses,
        clients: ClientReader,
        models: ModelLooks,
        *,
        reserve: ReserveStage | None,
        tracer: Tracer | None,
    ) -> None:
        config = node.config
        self._node, self._responses, self._clients, self.counts = node, responses, clients, RequestMetrics(node)
        self.addresses = BackendAddresses()
        self.upstream = Upstream(config.upstream)
        self.pipeline = Pipeline(
            node.router,
            self.upstream,
            tokenizer,
            address_of=self.addresses.__getitem__,
            asking=asking,
            trouble=polls.poller.probe_soon,
            look_for=models.look_for,
            lacking=models.lacks,
            changed=log_transitions,
            tenants=responses.tenants,
            limits=config.pipeline,
            own_keys=node.sources.keys,
            authorization=authorization_of(config.api_key),
            may_see=debugger_of(config),
            cache_control=config.anthropic_cache_control,
            responses=responses.cache,
            mender=clients.mender,
            reserve=reserve,
            tracer=tracer,
            own_probe=node.own_probe,
        )
        self._observe()
        self.pipeline.resolve.table = table_of(config.model)

    def _observe(self) -> None:
        """List what gets each request that is over: its spans, its counts, and its line in the log."""
        tracer, line = self.pipeline.tracer, request_line()
        self._line = line
        self.pipeline.observers = (
            *([tracer.end] if tracer is not None else []),
            self.counts.ended,
            *([lambda call, now: line(call.summary(now))] if line is not None else []),  # else nobody reads such lines
        )

    def refused(self, request: RequestSummary) -> None:
        """Take a request that the pipeline never got."""
        self.counts.refused(request)
        if self._line is not None:
            self._line(request)

    async def loop(self) -> None:
        """Keep the connections to engines until the end."""
        with closing(self.upstream):
            await trio.sleep_forever()

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        name, path = (spec.tls_name, spec.base_path) if spec is not None else ("", "")
        self.addresses[backend.url] = BackendAddress.parse(backend.url)._replace(tls_name=name, path_prefix=path)
        self._look_for_ranks()

    def sweep(self, now: float) -> None:
        self.upstream.prune()
        self.counts.fold()

    def removed(self, backend: Backend) -> None:
        self.counts.removed(backend.name)
        self._look_for_ranks()
        if address := self.addresses.pop(backend.url, None):
            self.upstream.forget(address)

    def _look_for_ranks(self) -> None:
        """Note whether this node chooses ranks, so that clients do not."""
        self.pipeline.router_fields.places_ranks = any(
            backend.behind.rank is not None for backend in self._node.registry
        )

    def check(self, before: Config, after: Config) -> bool:
        return self._clients.check(before, after)

    def reload(self, before: Config, after: Config) -> None:
        pipeline, edits = self.pipeline, self.pipeline.forward.edits
        self._observe()
        pipeline.set_limits(after.pipeline)
        pipeline.resolve.table = table_of(after.model)
        pipeline.responses = self._responses.cache
        pipeline.forward.authorization, pipeline.relay.may_see = authorization_of(after.api_key), debugger_of(after)
        edits.marks, edits.asking.enabled = after.anthropic_cache_control, after.ask_usage
        self.upstream.limits, pipeline.mend.mender = after.upstream, self._clients.mender

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        return {"requests": requests_view(self._node), "tenant_requests": self.counts.of_tenants()}

    def metrics(self) -> Iterator[Sample]:
        yield from self.counts.samples()
        yield from samples("upstream", self.upstream.counters)
        yield from samples("realtime", self.pipeline.realtime.counters)
        yield from samples("router_fields", self.pipeline.router_fields.counters)
        yield from samples("models", self.pipeline.resolve.counters)


def requests_view(node: Node) -> dict[str, Any]:
    """Return what this worker has served, for the page: counts alone, so that those of several can be added up."""
    router = node.router
    counters = router.counters
    return {
        "policy": router.policy.name,
        "outcomes": dict(counters.outcomes),
        "prompt_tokens": counters.prompt_tokens,
        "predicted_tokens": counters.predicted_tokens,
        "counted_tokens": counters.engine_prompt_tokens,
        "cached_tokens": counters.engine_cached_tokens,
        "routes": values(router.routes.counters)["rows"],
    }


def request_ids() -> Iterator[bytes]:
    """Return ids that are unique among nodes and restarts."""
    return map(f"{secrets.token_hex(4)}-%x".encode().__mod__, count(1))


def debugger_of(config: Config) -> Callable[[bytes | None], bool]:
    """Return a predicate: may a request with this key see its routing, which reveals hosts and what others sent?"""
    key = config.control_key.get_secret_value().encode() if config.control_key else b""
    if config.debug_headers:
        return lambda _: True
    return lambda given: given is not None and key != b"" and hmac.compare_digest(given, key)


KEYS_SHOWN_MAX = 64
"""Depths of a prompt in an explanation, the deepest first: a screen."""


class Explanations(Part):
    """See the module."""

    name = "explanations"

    def __init__(self, pipeline: Pipeline, tokenizer: PromptTokenizer, access: Access) -> None:
        self._pipeline, self._tokenizer, self._gate = pipeline, tokenizer, access.gate

    def routes(self) -> Mapping[str, Handler]:
        what = "Where a request would go, and why: a dry run of its body"
        return {"POST /explain": Route(self.explain, what, {}, others=True)}

    async def explain(self, asked: Asked) -> Mapping[str, Any]:
        """Dry-run a chat or a completion: tokenize it as placing would, but place, learn and count nothing.

        Its fields name its tenant where tenants are kept apart, and the credential for which a backend may pause.
        """
        body, headers, pipeline = await asked.body(), asked.fields(), self._pipeline
        headers = headers if self._gate is None else self._gate.tenant_headers(headers)
        router, tenants, path = pipeline.match.router, pipeline.read.tenants, path_of(body)
        await trio.lowlevel.checkpoint()  # each step may parse as much as a turn of the event loop has time for
        body = (await Driver(pipeline.resolve.resolved(HttpRequest(b"POST", path, list(headers), body))).run()).body
        await trio.lowlevel.checkpoint()
        body = pipeline.mend.body_as_read(path, body, headers)
        await trio.lowlevel.checkpoint()
        prompt = router.read(path, body, tenants.of(headers) if tenants is not None else b"", dry=True)
        request = HttpRequest(b"POST", path, list(headers), body)
        prompt.avoid = passed_over(router, request, prompt, time.monotonic(), dry=True)
        if router.too_little(prompt, router.find(prompt, time.monotonic(), touch=False)):
            await self._tokenizer.tokenize_first(prompt, pipeline.match.limits.tokenize_deadline_s)
        prompt.avoid = tuple(sorted({*prompt.avoid, *known_short(router.registry, prompt)}))
        chain = islice(router.holders.chain(prompt.end), KEYS_SHOWN_MAX)
        report = router.explain(prompt, time.monotonic())
        left_out = left_out_of(router.registry, prompt, [each["backend"] for each in report["candidates"]])
        return {**report, "left_out": [*left_out], "chain": [prefix_key_view(*key) for key in chain]}


def left_out_of(registry: Registry, prompt: Prompt, asked: Collection[str]) -> Iterator[Mapping[str, str]]:
    """Yield the backends that are no candidates for a prompt, and why."""
    now = time.monotonic()
    for backend in registry:
        if backend.name in asked or backend.behind.as_ranks:
            continue
        found = trouble(backend, registry, now)
        if found is not None:
            why = found.what
        elif not backend.catalog.serves(prompt.model):
            why = f"it does not list {prompt.model}"
        else:
            why = "it is passed over for this request: it pauses, refused its like, or is too short for it"
        yield {"backend": backend.name, "why": why}


def path_of(body: bytes) -> bytes:
    """Return the path to which a client would send this body, judged by members that only one API has."""
    if excess(body):
        return CHAT_PATH  # it is too much to parse, for the reader of any API
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return CHAT_PATH  # whose reader reports what is wrong with the body
    members = asked if isinstance(asked, dict) else {}
    if "messages" in members:
        return MESSAGES_PATH if "system" in members else CHAT_PATH
    return COMPLETION_PATH if "prompt" in members else RESPONSES_PATH if "input" in members else CHAT_PATH


def prefix_key_view(tokens: int, token: int, text: int) -> dict[str, Any]:
    """Return a depth of a prompt with fingerprints as /admin/routes takes them; None for a missing one."""
    names = {"token_fingerprint": token, "text_fingerprint": text}
    return {"tokens": tokens, **{name: f"{value:016x}" if value else None for name, value in names.items()}}


SAME_SIGNAL_S = 0.5
"""Signals to stop within this time count as one: the kernel reports the death of a worker's parent once for each of its
threads, and a service manager may signal a worker as well as the parent, which passes the signal on."""

COLLECT_INTERVAL_S = 600.0  # between two full collections, each in a moment without requests

RESERVED_DESCRIPTORS = 512
"""For all but clients and their requests to backends: 256 for the control port, 64 probes at once, 64 refusals at once,
the streams of peers, sockets of the node itself, files."""

RESERVED_PER_BACKEND = 8
"""Sockets for a backend's events and replays, with those that ZeroMQ needs for them, and for polls of its pages."""


NEARLY_FULL = 0.9
"""Share of connections, or of requests in flight, from which on an operator should act: the next burst is refused."""


class PublicPort(Part):
    """See the module. `drained` is set once no request is served any more, and the peers know it."""

    name = "public_port"
    keys = (
        *("server", "upstream", "pipeline", "drain_timeout_s"),
        *(*PUBLIC, "cors_origins"),
    )

    def __init__(
        self, node: Node, path: RequestPath, polls: Polls, clustering: ClusterParts | None, access: Access
    ) -> None:
        config, handle, tracer = node.config, path.pipeline.handle, path.pipeline.tracer
        self._node, self._polls, self._clustering, self._path = node, polls, clustering, path
        self._certificate = tls_context(config)
        self.server = DataServer(
            *(handle, config.server),
            tls=self._certificate,
            report=path.refused,
            ids=request_ids(),
            faults=node.faults,
        )
        self.server.conversations.cors.origins = config.cors_origins
        self.server.conversations.by_head, self.server.conversations.before_body = access.by_head, access.before_body
        self.server.conversations.denied = access.denied
        self.server.conversations.refused = tracer.refused if tracer is not None else None
        path.upstream.readiness = self.server.readiness  # which runs as long as there are requests
        self.draining = False
        self.drained = trio.Event()
        self.cut_by: signal.Signals | None = None  # the signal that cut the drain short
        self._collected_at = time.monotonic()
        self._first_round = trio.CancelScope()  # the wait for the first answers of engines

    def sweep(self, now: float) -> None:
        if now - self._collected_at > COLLECT_INTERVAL_S and self.server.counters.in_flight == 0:
            gc.collect()
            self._collected_at = now

    def unready(self) -> str:
        if self.draining:
            return "draining"
        return "" if self.server.is_open else "the public port is not open yet"

    async def run(self, *, task_status: trio.TaskStatus[Sequence[tuple[str, int]]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until drained. Reports the bound (host, port) pairs. Raises ListenError."""
        config = self._node.config
        async with trio.open_nursery() as nursery:
            await nursery.start(self._stop_on_signal)
            self._first_round.deadline = trio.current_time() + config.polls.probe_timeout_s
            with self._first_round:  # who serves which model, before the first request asks
                await self._polls.poller.wait_first_round()
            host, port = host_port(config.listen)
            with listening_on(config.listen):
                bound = await nursery.start(partial(self.server.serve, host, port, reuse_port=config.workers > 1))
            for backend in self._node.registry:  # one of them may be this port, which refused its first probe
                if backend.vitals.streak < 0:
                    self._polls.poller.probe_soon(backend.id)
            task_status.started(bound)

    async def _stop_on_signal(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drain at the first SIGTERM or SIGINT; a later one cuts the drain short."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                drain_s = self._node.config.drain_timeout_s
                log.info(event("node.draining", signal=signal.Signals(number).name, seconds=drain_s))
                break
            self.draining = True
            self._first_round.cancel()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cut_at_next, signals, nursery.cancel_scope)
                await self.server.drain(self._node.config.drain_timeout_s)
                if self._clustering is not None:  # last, so that the last answers are still sent to peers
                    await self._clustering.leave()
                nursery.cancel_scope.cancel()
            await self.server.drain(0)  # cuts what is left after a second signal
            self.drained.set()

    async def _cut_at_next(self, signals: object, scope: trio.CancelScope) -> None:
        drained_at = trio.current_time()
        async for number in signals:  # type: ignore[attr-defined]
            if trio.current_time() < drained_at + SAME_SIGNAL_S:
                continue
            log.info(event("node.cut"))
            self.cut_by = signal.Signals(number)
            scope.cancel()

    def held(self, before: Config, after: Config) -> Iterable[str]:
        """The port can't change between plain HTTP and TLS."""
        changes = (before.tls_certificate_file is None) != (after.tls_certificate_file is None)
        return ("tls_certificate_file", "tls_key_file") if changes else ()

    def check(self, before: Config, after: Config) -> bool:
        self._certificate = tls_context(after)
        return self._certificate is not None

    def reload(self, before: Config, after: Config) -> None:
        """Both sides of a request share the descriptors, so their limits change together."""
        self.server.tls, self.server.conversations.cors.origins = self._certificate, after.cors_origins
        self.server.conversations.limits = after.server

    def findings(self, now: float) -> Iterator[Finding]:
        """Yield what the port is nearly full of."""
        limits, counters = self.server.conversations.limits, self.server.counters
        for name, used, most in (
            ("connections_max", counters.connections, limits.connections_max),
            ("in_flight_max", counters.in_flight, limits.in_flight_max),
        ):
            if used >= NEARLY_FULL * most:
                what = f"{used} of {most} are in use: {name}"
                remedy = f"Raise {name}, or add a node; see who sends so much: ranvier access."
                yield Finding(
                    "node_full",
                    Severity.DEGRADED,
                    what,
                    about=name,
                    whom="new clients are refused beyond",
                    remedy=remedy,
                )

    def metrics(self) -> Iterator[Sample]:
        return samples("server", self.server.counters)


def within_descriptors(config: Config, descriptors: int) -> Config:
    """Return the configuration with so few clients that each can have one descriptor, and each request one more.

    At most half of the descriptors stay in reserve; if there are many, as many as the rest of a node may need.
    """
    server, clients = config.server, clients_within(config, descriptors)
    if clients < server.connections_max:
        log.warning(
            event("node.connections_cut", before=server.connections_max, after=clients, descriptors=descriptors)
        )
        server = replace(server, connections_max=clients)
    upstream = replace(config.upstream, open_max=min(server.in_flight_max, server.connections_max))
    return replace(config, server=server, upstream=upstream)


def clients_within(config: Config, descriptors: int) -> int:
    """Return how many clients a process that may have so many descriptors has room for."""
    reserved = RESERVED_DESCRIPTORS + RESERVED_PER_BACKEND * len(config.backend)
    free = descriptors - min(reserved, descriptors // 2)
    return max(free - config.server.in_flight_max, free // 2, 1)


def descriptors_for(config: Config) -> int:
    """Return how many descriptors all clients that are to be taken need."""
    reserved = RESERVED_DESCRIPTORS + RESERVED_PER_BACKEND * len(config.backend)
    clients = config.server.connections_max
    return reserved + clients + min(config.server.in_flight_max, clients)
