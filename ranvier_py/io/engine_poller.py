"""Polls every engine over HTTP, with httpcore: is it alive, what does it serve, how busy is it, where are its events?

Rule: each engine has one task, in which health, metrics and publishers are polled side by side, so that a page that
hangs delays no other; core/engine_cache/sources/engine_polls.py decides when. Every page has a deadline. Redirects are
not followed, and nothing is read from the environment. Each poll opens its own connection: on an old one a probe would
not notice that the engine no longer accepts new ones. An engine that does not answer keeps its known publishers.
Bounds: every body's bytes; one task of each backend.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import trio
from httpcore import AsyncConnectionPool, NetworkError, ProtocolError, ReadError, Request, TimeoutException

from ranvier_py.core.addresses import parts_of_url
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.engine_cache.sources.engine_polls import (
    HEALTH_BYTES_MAX,
    KNOWN_STATUSES,
    METRICS_BYTES_MAX,
    METRICS_PATHS,
    MISSING_STATUSES,
    MODELS_BYTES_MAX,
    HealthSchedule,
    KeyRefusals,
    MetricsSchedule,
    Page,
    PollCounters,
    PollOptions,
    ProcessPage,
    failed_probe,
    figures_of,
    is_alive,
    own_fields,
    probe_result,
    read_models,
    read_process,
)
from ranvier_py.core.engine_cache.sources.event_values import EngineLoad
from ranvier_py.core.engine_cache.sources.publishers import (
    NOTHING,
    FoundPublishers,
    Publisher,
    at_home,
    read_event_sources,
    read_server_info,
    reuse_of_server_info,
)
from ranvier_py.core.errors import NodeExhausted, causes, is_exhaustion, words_of
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.backend import Card, ProbeResult
from ranvier_py.core.routing.models.served_apis import lacked_by_cards, lacked_by_page, page_for
from ranvier_py.core.routing.processes.ranks import rank_of, without_rank
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

PUBLISHERS_BYTES_MAX = 512 * 1024  # SGLang lists its whole configuration, some 30 kB
ADDRESSES_MAX = 64  # addresses of a backend's host name
DETAIL_CHARACTERS_MAX = 300  # of an error's description: enough for OpenSSL's longest text and a host
CLOSE_S = 1.0  # to close a TLS connection while being cancelled
Key = Callable[[], str]
"""Returns the key with which an engine is asked; "": with none. It may be another one each time."""

Fields = dict[bytes | str, bytes | str]
FAILURES = (NetworkError, TimeoutException, ProtocolError)
PUBLISHER_PAGES = (
    ("/kv_event_sources", read_event_sources),
    ("/server_info", read_server_info),
    ("/get_server_info", read_server_info),
)


class Soon:
    """Lets a wait end before its interval has passed."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, interval_s: float, gap_s: float) -> None:
        """Wait for the interval, or until `set` is called; in any case at least `gap_s`."""
        await trio.sleep(gap_s)
        with trio.move_on_after(max(interval_s - gap_s, 0)):
            await self._event.wait()
        self._event = trio.Event()


class Engine:
    """One polled engine: how to ask it, and the schedules of its pages."""

    def __init__(self, id: BackendId, url: str, own: Callable[[], Fields], tls_name: str, options: PollOptions) -> None:  # noqa: A002
        self.id = id
        self.parts = parts_of_url(without_rank(url))
        self.rank = rank_of(url)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # of http never used, and cheaper than httpcore's own
        self.tls: tuple[ssl.SSLContext, dict[str, Any]] = context, {"sni_hostname": tls_name} if tls_name else {}
        self._own = own
        self.refusals = KeyRefusals()
        self.scope = trio.CancelScope()
        self.health = HealthSchedule(options)
        self.metrics = MetricsSchedule(options)
        self.probe_soon, self.discover_soon = Soon(), Soon()
        self.probed = trio.Event()  # the first probe has a result
        self.publishers = NOTHING
        self.fixed: tuple[Publisher, ...] | None = ()  # publishers that the operator named; None: nobody uses any

    def is_watched(self) -> bool:  # it may be forgotten while an answer arrives
        return not self.scope.cancel_called

    @property
    def headers(self) -> Fields:
        return {"host": self.parts.authority, "accept": "*/*", "user-agent": "ranvier", **self._own()}

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnectionPool]:
        """Open one connection for a few pages, one after the other."""
        pool = AsyncConnectionPool(self.tls[0], max_connections=1)
        try:
            yield pool
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
                await pool.aclose()

    async def page(self, pool: AsyncConnectionPool, path: str, bytes_max: int) -> Page:
        """Get one page, read up to `bytes_max`. Raises one of FAILURES. The caller sets the deadline."""
        request = Request("GET", self.parts.url + path, headers=self.headers, extensions=self.tls[1])
        response = await pool.handle_async_request(request)
        body, is_cut = bytearray(), False
        try:
            async for chunk in response.aiter_stream():  # a read may bring thousands
                await trio.lowlevel.cancel_shielded_checkpoint()  # its generators need a cancellation during a read
                body += chunk
                if len(body) > bytes_max and not is_cut:
                    is_cut = True
                    await response.aclose()  # the next read fails, which ends its chain of generators in order
        except ReadError:
            if not is_cut:
                raise
        finally:
            await response.aclose()
        self.refusals.answered(path, response.status)
        return Page(response.status, bytes(body[:bytes_max]), is_cut)

    async def optional(self, pool: AsyncConnectionPool, path: str, bytes_max: int, timeout_s: float) -> Page:
        """Get a page that may be missing. Failures give an empty page: the engine was alive a moment ago."""
        try:
            with trio.fail_after(timeout_s):
                return await self.page(pool, path, bytes_max)
        except (trio.TooSlowError, *FAILURES):
            return Page(0, b"", is_cut=True)

    async def check(self, pool: AsyncConnectionPool) -> Page:
        """Get the page that shows whether the engine is alive. Raises one of FAILURES."""
        if self.health.has_health:
            page = await self.page(pool, "/health", HEALTH_BYTES_MAX)
            if page.status not in MISSING_STATUSES:
                return page
            self.health.has_health = False
        return await self.page(pool, "/v1/models", MODELS_BYTES_MAX)

    async def models(
        self, pool: AsyncConnectionPool, page: Page, timeout_s: float
    ) -> tuple[tuple[str, ...] | None, tuple[Mapping[str, Any], ...]]:
        """Return the models' names and entries, if it is time to ask; `page` may be the model list itself."""
        if not self.health.has_health:
            return read_models(page)
        if not self.health.wants_models(trio.current_time()):
            return None, ()
        models, cards = read_models(await self.optional(pool, "/v1/models", MODELS_BYTES_MAX, timeout_s))
        if models is not None:
            self.health.models_known(trio.current_time())
        return models, cards

    async def lacks(self, pool: AsyncConnectionPool, cards: tuple[Card, ...], wait_s: float) -> frozenset[bytes] | None:
        """Return the paths that it does not serve, by its cards or, once for each process, by a page of its own."""
        lacks = lacked_by_cards(cards)
        path = page_for({str(card.get("owned_by")).lower() for card in cards})
        if lacks is not None or path is None or not self.health.wants_apis:
            return lacks
        page = await self.optional(pool, path, METRICS_BYTES_MAX, wait_s)
        self.health.wants_apis = page.status == 0
        return lacked_by_page(path, page.body) if page.status == 200 and not page.is_cut else None


async def repeat(ask: Callable[[Engine], Awaitable[None]], engine: Engine) -> None:
    while True:
        await ask(engine)


class EnginePoller:
    """Polls every watched backend and reports the results. It never touches the registry itself.

    Args:
        probed: callback for GET /health (else /v1/models), now and then /v1/models and /metrics.
        measured: for GET /metrics, else /prometheus/metrics.
        found: for GET /kv_event_sources (vLLM), else /server_info (SGLang).
        received: for any answer of the latter two, whatever it says. A kind without a callback is not polled.
        server_info: called with whether an engine says that it caches prefixes.
        owns: whether this node, and not a peer, polls the metrics of a backend.
        context: for https backends; by default the system's authorities are trusted.
    """

    def __init__(  # noqa: PLR0913  # one for each kind of answer, and what tests replace
        self,
        options: PollOptions,
        rng: Random,
        *,
        probed: Callable[[BackendId, ProbeResult], object] | None = None,
        measured: Callable[[BackendId, EngineMetrics], object] | None = None,
        found: Callable[[BackendId, tuple[Publisher, ...]], object] | None = None,
        received: Callable[[BackendId], object] | None = None,
        server_info: Callable[[BackendId, bool], object] | None = None,
        owns: Callable[[BackendId], bool] | None = None,
        context: ssl.SSLContext | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults or Faults()
        self.counters = PollCounters()
        self._options, self._rng, self._probed = options, rng, probed
        self._measured = measured if options.metrics_interval_s > 0 else None
        self._found, self._received, self._server_info = found, received, server_info
        self._owns, self._context = owns, context
        at_once = options.probes_at_once_max, options.metrics_at_once_max
        self._at_once = tuple(map(trio.CapacityLimiter, at_once))  # of probes, of metrics pages
        self._engines: dict[BackendId, Engine] = {}
        self._nursery: trio.Nursery | None = None

    def set_options(self, options: PollOptions) -> None:
        """Set the options for all waits that begin from now on. Whether metrics are polled at all does not change."""
        self._options = options
        for engine in self._engines.values():
            engine.health.options = engine.metrics.options = options

    def trust(self, context: ssl.SSLContext | None) -> None:
        """Use this TLS context for https engines from the next connection on; None: the system's authorities."""
        self._context = context
        for engine in [each for each in self._engines.values() if each.parts.is_secure]:
            self._context = self._context or ssl.create_default_context()
            engine.tls = self._context, engine.tls[1]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. `watch` may be called before, and at any time meanwhile."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for engine in list(self._engines.values()):
                    self._start(engine)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def watch(
        self,
        id: BackendId,  # noqa: A002
        url: str,
        key: Key = str,
        *,
        publishers: tuple[Publisher, ...] = (),
        events: bool = True,
        tls_name: str = "",
        own_probe: bytes = b"",
    ) -> None:
        """Poll this backend from now on, at once and afresh, each time with the key that `key` returns, and with
        `own_probe`. `publishers` that an operator named are reported without asking; without `events` nobody asks."""
        self.forget(id)
        engine = self._engines[id] = Engine(id, url, partial(own_fields, key, own_probe), tls_name, self._options)
        if engine.parts.is_secure:
            self.trust(self._context)
        engine.fixed = publishers if events or publishers else None
        if self._nursery is not None:
            self._start(engine)

    def forget(self, id: BackendId) -> None:  # noqa: A002
        """Stop polling this backend, and report nothing about it any more. Unknown ids are ignored."""
        engine = self._engines.pop(id, None)
        if engine is not None:
            engine.scope.cancel()
            engine.probed.set()

    def probe_soon(self, id: BackendId) -> None:  # noqa: A002
        """Probe now instead of at the next interval, since a request failed there; `probe_gap_s` is always kept."""
        if engine := self._engines.get(id):
            engine.probe_soon.set()

    def moved(self, id: BackendId) -> None:  # noqa: A002
        """Ask all again that may differ, since another process may answer: the backend's name has another address."""
        if engine := self._engines.get(id):
            engine.health.moved()
            engine.probe_soon.set()
            engine.discover_soon.set()

    def discover_soon(self, id: BackendId) -> None:  # noqa: A002
        """Ask the engine again where it publishes: it may be another process by now, with other ports."""
        if engine := self._engines.get(id):
            engine.discover_soon.set()

    def load_reported(self, id: BackendId, load: EngineLoad) -> None:  # noqa: A002
        """Take the queue length that an engine reported in its event stream; it may count as a look at its metrics."""
        engine = self._engines.get(id)
        if engine is None or self._measured is None:
            return
        metrics = engine.metrics.load_reported(load, trio.current_time())
        if metrics is not None:
            self.counters.loads_reported += 1
            self._measured(id, metrics)

    async def list_models(self, ids: Iterable[BackendId], wait_s: float, listed: Callable[..., object]) -> None:
        """Ask these backends for their models now. Calls `listed` with id, names and cards of who answers in time."""
        with trio.move_on_after(wait_s):
            async with trio.open_nursery() as nursery:
                for engine in filter(None, map(self._engines.get, ids)):
                    nursery.start_soon(self._list, engine, listed)

    async def _list(self, engine: Engine, listed: Callable[..., object]) -> None:
        async with self._at_once[0], engine.connection() as pool:
            page = await engine.optional(pool, "/v1/models", MODELS_BYTES_MAX, self._options.probe_timeout_s)
        names, cards = read_models(page)
        if names is not None and engine.is_watched():
            engine.health.models_known(trio.current_time())
            listed(engine.id, names, cards)

    async def wait_first_round(self) -> None:
        """Wait until every backend that is watched now has been probed once. The caller sets the deadline."""
        for engine in list(self._engines.values()):
            await engine.probed.wait()

    def _start(self, engine: Engine) -> None:
        assert self._nursery is not None
        if self._found is not None and engine.fixed:
            self._found(engine.id, engine.fixed)
        self._nursery.start_soon(self._poll, engine)

    async def _poll(self, engine: Engine) -> None:
        """Poll all pages of one engine until it is forgotten."""
        with engine.scope:
            async with trio.open_nursery() as nursery:
                if self._probed is not None:
                    nursery.start_soon(self._faults.keep, "probe", repeat, self._probe, engine)
                if self._measured is not None:
                    nursery.start_soon(self._faults.keep, "engine_metrics", repeat, self._measure, engine)
                if self._found is not None and engine.fixed == ():
                    nursery.start_soon(self._faults.keep, "publishers", repeat, self._discover, engine)

    def _note_received(self, engine: Engine) -> None:
        if self._received is not None and engine.is_watched():
            self._received(engine.id)

    async def _probe(self, engine: Engine) -> None:
        result = None
        async with self._at_once[0], engine.connection() as pool:
            with suppress(NodeExhausted):  # no verdict: the engine never saw the probe
                result = await self._probe_result(engine, pool)
        if result is None:
            self.counters.probes_not_made += 1
        else:
            engine.health.judged(result.ok)
        if result is not None and engine.is_watched():
            assert self._probed is not None
            self.counters.probes += 1
            self._probed(engine.id, replace(result, key_refused=engine.refusals.text))
            engine.probed.set()
        interval_s = engine.health.interval_s(len(self._engines))
        await engine.probe_soon.wait(self._options.jittered(interval_s, self._rng), self._options.probe_gap_s)

    async def _probe_result(self, engine: Engine, pool: AsyncConnectionPool) -> ProbeResult:
        timeout_s, began = self._options.probe_timeout_s, trio.current_time()
        try:
            with trio.fail_after(timeout_s):
                page = await engine.check(pool)
        except trio.TooSlowError:
            detail = f"no answer within {timeout_s:g} s"
            return ProbeResult(False, latency_s=trio.current_time() - began, detail=detail, timed_out=True)
        except FAILURES as exc:
            if is_exhaustion(exc):
                raise NodeExhausted(words_of(exc)) from exc
            detail = f"{type(exc).__name__}: {words_of(exc)} ({engine.parts.host})"[:DETAIL_CHARACTERS_MAX]
            return ProbeResult(False, refused=is_refused(exc), detail=detail)
        latency_s = trio.current_time() - began
        if not is_alive(page):
            return failed_probe(page, latency_s)
        models, cards = await engine.models(pool, page, timeout_s)
        lacks = await engine.lacks(pool, cards, timeout_s)
        process = ProcessPage()
        if engine.health.wants_start_time(trio.current_time()):
            metrics = await engine.optional(pool, METRICS_PATHS[0], METRICS_BYTES_MAX, timeout_s)
            engine.health.has_metrics = metrics.status not in MISSING_STATUSES
            process = read_process(metrics, engine.rank)
            engine.health.start_read(process.started_at)
        return probe_result(page, latency_s, (models, cards), process, lacks)

    async def _measure(self, engine: Engine) -> None:
        interval_s = self._options.metrics_interval_s
        if self._owns is None or self._owns(engine.id):
            async with self._at_once[1]:
                began = trio.current_time()
                metrics = await self._metrics(engine)
                now = trio.current_time()
            is_informative = engine.metrics.looked(metrics, now - began, now)
            if engine.is_watched():
                self.counters.metrics_pages += 1
                self.counters.metrics_failed += metrics is None
                self.counters.metrics_unknown += metrics is not None and not is_informative
                if metrics is not None and is_informative:
                    assert self._measured is not None
                    self._measured(engine.id, metrics)
            interval_s = engine.metrics.interval_s()
        await trio.sleep(self._options.jittered(interval_s, self._rng))

    async def _metrics(self, engine: Engine) -> EngineMetrics | None:
        """Return the figures of an engine's metrics page; None for a failure, a status from 500 on or a timeout."""
        try:
            with trio.fail_after(self._options.metrics_timeout_s):
                async with engine.connection() as pool:
                    for path in dict.fromkeys((engine.metrics.path, *METRICS_PATHS)):
                        page = await engine.page(pool, path, METRICS_BYTES_MAX)
                        self._note_received(engine)
                        if page.status >= 500:
                            return None
                        metrics = figures_of(page, engine.rank)
                        if metrics.known:
                            engine.metrics.path = path
                            return metrics
        except (trio.TooSlowError, *FAILURES):
            return None
        return EngineMetrics()

    async def _discover(self, engine: Engine) -> None:
        options = self._options
        async with engine.connection() as pool:
            found = await self._publishers(engine, pool)
        self.counters.discoveries += 1
        if found is not None and engine.is_watched():
            self._report_publishers(engine, found)
        interval_s = options.publishers_unanswered_interval_s if found is None else options.publishers_interval_s
        await engine.discover_soon.wait(self._options.jittered(interval_s, self._rng), options.publishers_gap_s)

    async def _publishers(self, engine: Engine, pool: AsyncConnectionPool) -> FoundPublishers | None:
        """Return where it publishes; None if it can't or won't answer now, or its host can't be resolved just now."""
        is_sure = True
        for path, read in PUBLISHER_PAGES:
            try:
                with trio.fail_after(self._options.publishers_timeout_s):
                    page = await engine.page(pool, path, PUBLISHERS_BYTES_MAX)
                self._note_received(engine)
            except (trio.TooSlowError, *FAILURES):
                return None
            if page.status >= 500:
                return None
            is_sure = is_sure and page.status in KNOWN_STATUSES
            body = page.body if page.status == 200 and not page.is_cut else b""
            if self._server_info is not None and read is read_server_info:
                reuses = reuse_of_server_info(body)
                if reuses is not None:
                    self._server_info(engine.id, reuses)
            found = read(body) if page.status == 200 else NOTHING
            if found != NOTHING:
                addresses = await addresses_of(engine.parts.host, self._options.publishers_timeout_s)
                at = at_home(found, engine.parts.host, addresses)
                return None if at.refused and not addresses else at
        return NOTHING if is_sure else None

    def _report_publishers(self, engine: Engine, found: FoundPublishers) -> None:
        """Report publishers only if they changed: each report starts readers anew."""
        before, engine.publishers = engine.publishers, found
        if found.refused != before.refused:
            for problem in found.refused:
                log.warning(event("publishers.refused", url=engine.parts.url, why=problem))
        if self._found is not None and found.publishers != before.publishers:
            places = [f"rank {each.rank} at {each.events.endpoint}" for each in found.publishers]
            log.info(event("publishers.found", url=engine.parts.url, places=places))
            self._found(engine.id, found.publishers)


async def addresses_of(host: str, timeout_s: float) -> Sequence[str]:
    """Return the addresses of a backend's host; empty if it can't be resolved in time."""
    with trio.move_on_after(timeout_s), suppress(OSError):
        infos = await trio.socket.getaddrinfo(host, None)
        return list(dict.fromkeys(str(info[4][0]) for info in infos))[:ADDRESSES_MAX]
    return ()


def is_refused(error: BaseException) -> bool:
    """Whether a refused connection is somewhere in the chain of causes."""
    return any(isinstance(each, ConnectionRefusedError) for each in causes(error))
