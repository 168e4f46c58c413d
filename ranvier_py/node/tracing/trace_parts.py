"""Traces of requests: samples them, and hands their spans to a collector.

Rule: a request pays for its ids; its spans are made at its end, if it is sampled or failed. A span that finds the queue
full is dropped and counted, and so is a batch that the collector does not take in TRIES_MAX tries. No request waits.
Bounds: `otel_queue_max` spans wait; BATCH_MAX of them are sent at once, each BATCH_S; LAST_S at the end of the node.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.trace_options import TraceTarget, target_of
from ranvier_py.core.errors import ConfigError, RanvierError, words_of
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, counter, gauge, samples
from ranvier_py.core.pauses import doubled
from ranvier_py.core.tracing.span import TraceSpan
from ranvier_py.core.tracing.span_names import NAMES, SCHEMA
from ranvier_py.core.tracing.trace_context import RequestTrace, parent_in, trace_of
from ranvier_py.io.tracing.otlp_sender import OtlpSender, Sent
from ranvier_py.node.part import Node, Part
from ranvier_py.node.tracing.request_spans import has_failed, span_of_refused, spans_of
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest

log = logging.getLogger(__name__)

BATCH_MAX, BATCH_S = 512, 1.0  # spans in one request: some 400 kB; traces may be seen a second later
TRIES_MAX = 5
RETRY_S, RETRY_S_MAX = 1.0, 30.0
LAST_S = 2.0
OTEL_FILES = ("otel_headers_file", "otel_ca_file", "otel_certificate_file", "otel_key_file")


@dataclass(slots=True)
class TraceCounters:
    """What became of spans."""

    traced: int = counter("Requests of which spans were made, for the collector of traces.")
    exported: int = counter("Spans of requests that the collector of traces took.")
    dropped: dict[str, int] = counter(
        "Spans of requests that the collector of traces lacks: the queue was full, it refused them, or was away.",
        label="reason",
    )
    failures: int = counter("Exports to the collector of traces that failed.")
    waiting: int = gauge("Spans of requests that wait for the collector of traces.")


class TraceParts(Part):
    """See the module. Without a collector there is none (`node.tracer_of`)."""

    name = "traces"
    keys = ("otel_sample_ratio", "otel_semconv", "otel_queue_max")

    def __init__(self, node: Node, target: TraceTarget) -> None:
        self.counters, self._queue = TraceCounters(), deque[TraceSpan]()
        self._node, self._target = node, target
        self._sender = sender_of(target)
        self._resource = {**target.resource, **place_of(node.config)}
        self._trouble = ""
        self._rng = Random(os.urandom(16))  # noqa: S311  # ids need to differ, also from those of other nodes
        self.reload(node.config, node.config)

    def reload(self, before: Config, after: Config) -> None:
        options = after.traces
        self._ratio, self._room = options.otel_sample_ratio, options.otel_queue_max
        self._names, self._schema = NAMES[options.otel_semconv], SCHEMA[options.otel_semconv]

    # --- requests ---------------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Give a request its trace."""
        call.trace = self._trace(call.request)

    def end(self, call: Call, now: float) -> None:
        """Keep the spans of a request that has ended, if it is sampled or has failed."""
        if call.trace is not None and (call.trace.is_sampled or has_failed(call)):
            self._keep(spans_of(call, call.trace, now, time.time() - now, self._names))

    def refused(self, request: HttpRequest, client: Client, error: RanvierError) -> RequestTrace:
        """Trace a request that was refused by its head."""
        trace = self._trace(request)
        if trace.is_sampled or error.status >= 500:
            self._keep([span_of_refused(request, client, trace, error, time.time())])
        return trace

    def _trace(self, request: HttpRequest) -> RequestTrace:
        fields = request.fields.trace
        return trace_of(parent_in(fields) if fields else None, self._ratio, self._rng)

    def _keep(self, spans: Iterable[TraceSpan]) -> None:
        self.counters.traced += 1
        for span in spans:
            if len(self._queue) >= self._room:
                self._drop("queue_full", 1)
            else:
                self._queue.append(span)

    def _drop(self, reason: str, spans: int) -> None:
        if spans:
            self.counters.dropped[reason] += spans

    # --- the collector ----------------------------------------------------------------------------------------------

    async def loop(self) -> None:
        try:
            while True:
                await trio.sleep(BATCH_S)
                while self._queue:
                    await self._export(self._next())
        except trio.Cancelled:
            with trio.CancelScope(shield=True), trio.move_on_after(LAST_S):
                while self._queue:
                    self._settle(await self._send(batch := self._next()), len(batch))
            self._sender.close()
            raise

    def _next(self) -> list[TraceSpan]:
        return [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]

    async def _export(self, batch: list[TraceSpan]) -> None:
        """Send a batch, again after what may pass."""
        for tries in range(TRIES_MAX):
            try:
                sent = await self._send(batch)
            except trio.Cancelled:
                self._queue.extendleft(reversed(batch))  # for the last try
                raise
            self._note(sent)
            if not sent.may_repeat or tries == TRIES_MAX - 1:
                break
            pause_s = max(min(sent.retry_after_s, RETRY_S_MAX), doubled(RETRY_S, tries, RETRY_S_MAX))
            await trio.sleep(pause_s * (1 + 0.2 * self._rng.random()))
        self._settle(sent, len(batch))

    async def _send(self, batch: list[TraceSpan]) -> Sent:
        version, now_s = self._node.release, time.time()
        send = partial(self._sender.send, batch, self._resource, version, self._schema, now_s)
        return await trio.to_thread.run_sync(send, abandon_on_cancel=True)

    def _settle(self, sent: Sent, spans: int) -> None:
        if sent.trouble:
            self._drop("away" if sent.may_repeat else "refused", spans)
        else:
            rejected = min(sent.rejected, spans)
            self._drop("rejected", rejected)
            self.counters.exported += spans - rejected

    def _note(self, sent: Sent) -> None:
        """Log trouble when it begins, changes or ends."""
        self.counters.failures += bool(sent.trouble)
        trouble = sent.trouble or (f"it rejected {sent.rejected} spans" if sent.rejected else "")
        if bool(trouble) is not bool(self._trouble):
            if trouble:
                log.warning(event("traces.not_taken", collector=self._place, why=trouble))
            else:
                log.info(event("traces.taken", collector=self._place))
        self._trouble = trouble

    @property
    def _place(self) -> str:
        scheme, _, rest = self._target.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"

    def view(self) -> Any:
        return {"collector": self._place, "trouble": self._trouble, "waiting": len(self._queue)}

    def metrics(self) -> Iterator[Sample]:
        self.counters.waiting = len(self._queue)
        return samples("traces", self.counters)


def place_of(config: Config) -> dict[str, str]:
    """Return which node of a cluster, and which of its workers, sends traces."""
    node = config.node_name or config.listen
    return {"service.instance.id": node if config.workers == 1 else f"{node}/{config.worker_index}"}


def sender_of(target: TraceTarget) -> OtlpSender:
    """Raises ConfigError for files of TLS that can't be used."""
    try:
        return OtlpSender(
            *(target.url, target.headers, target.ca_file, target.certificate),
            timeout_s=target.timeout_s,
            is_compressed=target.is_compressed,
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"otel_ca_file, otel_certificate_file: {words_of(error)}"]) from error


def check_traces(config: Config) -> None:
    """Raise ConfigError if what a collector needs can't be used."""
    if (target := target_of(config.traces, os.environ)) is not None:
        sender_of(target).close()
