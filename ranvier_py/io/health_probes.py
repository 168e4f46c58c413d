"""Does each engine live, what does it serve, and is it still the same process? Asked over HTTP with httpx.

One loop per backend. A probe is GET /health (2xx, 401 and 403 are alive: an engine that asks for a key answers) or,
where an engine has no /health (404, 405), GET /v1/models; then, now and then, GET /v1/models for the model list and
GET /metrics for process_start_time_seconds. After a failure the next good probe asks for all of them at once, because
the engine may be another process. What is found goes to one callback; the registry decides what it means.

Rules: every body is bounded and every probe has a deadline; redirects are not followed, nothing is read from the
environment; a metrics page that is not there is not asked for again until the backend has failed once. Intervals are
jittered with the given rng, so that nodes and backends do not probe in step. A connection lives for one probe: a
probe that reuses an old one would not notice that nobody accepts any more.

Cost: about 2.5 ms of CPU per probe on an idle node (half of it the connection); healthy backends share a budget of
5 probes/s, so 100 of them take about 1.2 % of a core (measured with a 130 kB metrics page, 2 slow cores).
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from random import Random
from typing import Any

import httpx
import trio

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import ProbeResult
from ranvier_py.io.engine_pages import Page, page_of

HEALTH_BYTES_MAX = 64 * 1024  # engines answer with nothing or a line
MODELS_BYTES_MAX = 2 * 1024 * 1024  # about 10,000 adapters
METRICS_BYTES_MAX = 2 * 1024 * 1024  # vLLM's page is below 200 kB; its process metrics come first
MODELS_MAX = 4096  # per backend; more is a broken list
ALIVE_STATUSES = frozenset((401, 403))
METRICS_LINE_BYTES_MAX = 512  # the line we look for has no more than a few labels
CLOSE_S = 1.0  # for the farewell of a TLS connection, while being cancelled
START_TIME = b"process_start_time_seconds"

Report = Callable[[BackendId, ProbeResult], object]


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """When to ask. All times in seconds."""

    interval_s: float = 10.0  # requests notice a dead engine first; between Ranvier's 5 s and SMG's 60 s
    probes_per_s_max: float = 5.0  # of healthy backends, all together: beyond 50 of them the interval grows
    interval_unsettled_s: float = 1.0  # while the last answers differ, so that three failures take seconds
    unsettled_probes: int = 3  # how many probes in a row come at the short interval
    timeout_s: float = 5.0  # a busy engine's event loop may be slow; SMG's
    jitter: float = 0.2  # share of the interval, either way
    models_interval_s: float = 60.0  # adapters are loaded at run time
    metrics_interval_s: float = 30.0
    gap_s: float = 0.2  # between two probes of one backend, however often `probe_soon` is called
    concurrent_max: int = 64  # probes at once: bounds file descriptors

    def __post_init__(self) -> None:
        times = (
            "interval_s",
            "probes_per_s_max",
            "interval_unsettled_s",
            "timeout_s",
            "models_interval_s",
            "metrics_interval_s",
            "gap_s",
        )
        problems = [f"{key}: must be above 0" for key in times if not 0 < getattr(self, key) < inf]
        if not 0 <= self.jitter < 1:
            problems.append("jitter: must be at least 0 and below 1")
        if self.concurrent_max < 1:
            problems.append("concurrent_max: must be at least 1")
        if problems:
            raise ConfigError(problems)


class Engine:
    """One engine as httpx sees it: a transport and what has been learned about its pages."""

    def __init__(self, url: str, api_key: str, context: ssl.SSLContext) -> None:
        limits = httpx.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=1.0)
        self.transport = httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits, retries=0)
        self.url = httpx.URL(url)
        self.headers = {"host": self.url.netloc.decode("ascii"), "accept": "*/*", "user-agent": "ranvier-probe"}
        if api_key:
            self.headers["authorization"] = f"Bearer {api_key}"
        self.requests: dict[str, httpx.Request] = {}  # one per page; they have no body and can be sent again
        self.has_health = True
        self.has_metrics = True

    async def get(self, path: str, bytes_max: int) -> Page:
        """Raises httpx.RequestError. The caller sets the deadline."""
        request = self.requests.get(path)
        if request is None:
            request = httpx.Request("GET", self.url.copy_with(path=path), headers=self.headers)
            self.requests[path] = request
        return await page_of(self.transport, request, bytes_max)

    async def check(self) -> Page:
        """The page that says whether it lives."""
        if self.has_health:
            page = await self.get("/health", HEALTH_BYTES_MAX)
            if page.status not in (404, 405):
                return page
            self.has_health = False
        return await self.get("/v1/models", MODELS_BYTES_MAX)


class Loop:
    """The probes of one backend, one after the other."""

    def __init__(self, id: BackendId, engine: Engine, options: ProbeOptions, rng: Random) -> None:  # noqa: A002
        self.id = id
        self.engine = engine
        self.options = options
        self.rng = rng
        self.scope = trio.CancelScope()
        self.soon = trio.Event()
        self.first = trio.Event()
        self.ok: bool | None = None
        self.unsettled = 0  # probes still to come at the short interval
        self.models_at = self.metrics_at = -inf  # when they were last told

    async def wait(self, settled_s: float) -> None:
        """Until the next probe is due, or wanted soon. A healthy and settled backend is asked every `settled_s`."""
        await trio.sleep(self.options.gap_s)
        interval = settled_s if self.ok else self.options.interval_s
        if self.unsettled > 0:
            interval = self.options.interval_unsettled_s
        due = interval * (1 + self.options.jitter * (2 * self.rng.random() - 1))
        with trio.move_on_after(max(due - self.options.gap_s, 0)):
            await self.soon.wait()
        self.soon = trio.Event()

    async def probe(self) -> ProbeResult:
        began = trio.current_time()
        try:
            with trio.fail_after(self.options.timeout_s):
                page = await self.engine.check()
        except trio.TooSlowError:
            result = ProbeResult(False, detail=f"no answer within {self.options.timeout_s:g} s")
        except httpx.RequestError as exc:
            result = ProbeResult(False, refused=is_refused(exc), detail=f"{type(exc).__name__}: {exc}"[:200])
        else:
            result = await self.judge(page, trio.current_time() - began)
        self.note(result.ok)
        return result

    async def judge(self, page: Page, latency_s: float) -> ProbeResult:
        if not 200 <= page.status < 300 and page.status not in ALIVE_STATUSES:
            return ProbeResult(False, status=page.status, latency_s=latency_s, detail=f"status {page.status}")
        models, cards = await self.ask_models(page)
        started_at = await self.ask_start()
        return ProbeResult(True, False, page.status, latency_s, models, cards, started_at)

    async def ask_models(self, page: Page) -> tuple[tuple[str, ...] | None, tuple[Mapping[str, Any], ...]]:
        now = trio.current_time()
        if not self.engine.has_health:
            return read_models(page)
        if self.ok and now - self.models_at < self.options.models_interval_s:
            return None, ()
        page = await self.get("/v1/models", MODELS_BYTES_MAX)
        models, cards = read_models(page)
        if models is not None:
            self.models_at = now
        return models, cards

    async def ask_start(self) -> float | None:
        now = trio.current_time()
        if not self.engine.has_metrics or (self.ok and now - self.metrics_at < self.options.metrics_interval_s):
            return None
        self.metrics_at = now
        page = await self.get("/metrics", METRICS_BYTES_MAX)
        self.engine.has_metrics = page.status not in (404, 405)
        return read_start_time(page.body) if page.status == 200 else None

    async def get(self, path: str, bytes_max: int) -> Page:
        """A page that need not be there: whatever goes wrong, the engine was alive a moment ago."""
        try:
            with trio.fail_after(self.options.timeout_s):
                return await self.engine.get(path, bytes_max)
        except (trio.TooSlowError, httpx.RequestError):
            return Page(0, b"", cut=True)

    def note(self, ok: bool) -> None:
        """Choose the next interval; after a failure forget what was learned of the engine's pages."""
        self.unsettled = self.options.unsettled_probes if ok is not self.ok else max(self.unsettled - 1, 0)
        if self.ok is None and ok:
            self.unsettled = 0
        if not ok:
            self.engine.has_health = self.engine.has_metrics = True
        self.ok = ok


class Prober:
    """Probes every watched backend and tells `report` what it found. It never touches the registry itself."""

    def __init__(
        self, report: Report, options: ProbeOptions, rng: Random, context: ssl.SSLContext | None = None
    ) -> None:
        """`context` is for https backends; by default the system's authorities are trusted."""
        self.report = report
        self.options = options
        self.rng = rng
        self.loops: dict[BackendId, Loop] = {}
        self.nursery: trio.Nursery | None = None
        self.limiter = trio.CapacityLimiter(options.concurrent_max)
        self.plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, and 20 ms cheaper than httpx's own
        self.context = context  # else made at the first https backend
        self.probes = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Backends may be watched before, and at any time meanwhile."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                for loop in self.loops.values():
                    nursery.start_soon(self.keep_probing, loop)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.nursery = None

    def watch(self, id: BackendId, url: str, api_key: str = "") -> None:  # noqa: A002
        """Probe it from now on, the first time at once. Watching the same id again starts afresh."""
        self.forget(id)
        if url.startswith("https:") and self.context is None:
            self.context = ssl.create_default_context()
        engine = Engine(url, api_key, self.context if self.context and url.startswith("https:") else self.plain)
        loop = self.loops[id] = Loop(id, engine, self.options, self.rng)
        if self.nursery is not None:
            self.nursery.start_soon(self.keep_probing, loop)

    def forget(self, id: BackendId) -> None:  # noqa: A002
        """Stop probing it; nothing is reported of it from here on. Harmless for an id that is not watched."""
        loop = self.loops.pop(id, None)
        if loop is not None:
            loop.scope.cancel()
            loop.first.set()

    def probe_soon(self, id: BackendId) -> None:  # noqa: A002
        """A request met trouble there: look now instead of at the next interval. Never more often than `gap_s`."""
        loop = self.loops.get(id)
        if loop is not None:
            loop.soon.set()

    @property
    def settled_s(self) -> float:
        """How often each healthy backend is asked."""
        return max(self.options.interval_s, len(self.loops) / self.options.probes_per_s_max)

    async def wait_first_round(self) -> None:
        """Until every backend that is watched now has been probed once. The caller sets the deadline."""
        for loop in list(self.loops.values()):
            await loop.first.wait()

    async def keep_probing(self, loop: Loop) -> None:
        with loop.scope:
            try:
                while True:
                    async with self.limiter:
                        result = await loop.probe()
                    if self.loops.get(loop.id) is not loop:
                        return  # forgotten while the answer came in
                    self.probes += 1
                    self.report(loop.id, result)
                    loop.first.set()
                    await loop.wait(self.settled_s)
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
                    await loop.engine.transport.aclose()


def read_models(page: Page) -> tuple[tuple[str, ...] | None, tuple[Mapping[str, Any], ...]]:
    """Names and entries of a /v1/models page; (None, ()) where it tells none. Odd entries are skipped."""
    if page.status != 200 or page.cut:
        return None, ()
    try:
        listed = json.loads(page.body)
    except (ValueError, RecursionError):
        return None, ()
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list):
        return None, ()
    cards = tuple(card for card in data[:MODELS_MAX] if isinstance(card, dict) and isinstance(card.get("id"), str))
    return (tuple(card["id"] for card in cards), cards) if cards else (None, ())


def read_start_time(metrics: bytes) -> float | None:
    """The value of process_start_time_seconds in a Prometheus page; labels and a time stamp may be there."""
    start = 0 if metrics.startswith(START_TIME) else metrics.find(b"\n" + START_TIME) + 1
    if start == 0 and not metrics.startswith(START_TIME):
        return None
    line, end, _ = metrics[start : start + METRICS_LINE_BYTES_MAX].partition(b"\n")
    fields = line[len(START_TIME) :].rpartition(b"}")[2].split()
    try:
        value = float(fields[0]) if end and fields else -inf
    except ValueError:
        return None
    return value if isfinite(value) and value > 0 else None


def is_refused(error: BaseException | None) -> bool:
    """Whether a connection was refused, somewhere down the chain of causes."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    if isinstance(error, BaseExceptionGroup):
        return any(is_refused(part) for part in error.exceptions)
    return is_refused(error.__cause__ or error.__context__)
