"""Looks at the metrics pages of engines, seldom and with care: cache size, hits, queues. Asked over HTTP with httpx.

One loop per backend. An engine renders its page in the process that serves requests: looking twenty times a second has
made vLLM unresponsive (llm-d-router#1842). So the interval is seconds, it grows with the time a page takes, so that an
engine spends at most a fiftieth of its time on us, and it doubles up to a minute with each look that fails. An engine
that has no page we can read is asked again after ten minutes. In a cluster one node looks at each engine: `owns` says
whether it is this one.

Rules: every page is bounded, every look has a deadline, redirects are not followed, nothing is read from the
environment; a connection lives for one look, as one that was cut off in its middle would be in the way of the next;
whatever comes back is text to `core/engine_cache/sources/engine_metrics`, which believes little.
Cost: 3 ms for a look at a page of 100 kB.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from random import Random

import httpx
import trio

from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics, read_metrics
from ranvier_py.core.engine_cache.sources.event_values import EngineLoad
from ranvier_py.core.engine_cache.sources.publishers import RANKS_MAX
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.io.engine_pages import page_of

PAGE_BYTES_MAX = 2 * 1024 * 1024
"""As much as a probe reads. vLLM's page is below 200 kB for one model; each adapter and rank adds some."""

PATHS = ("/metrics", "/prometheus/metrics")
"""TensorRT-LLM has JSON at the first, and what we read at the second."""

CLOSE_S = 1.0  # for the farewell of a TLS connection, while being cancelled

Report = Callable[[BackendId, EngineMetrics], object]


@dataclass(frozen=True, slots=True)
class ScrapeOptions:
    """When to look. Times in seconds."""

    interval_s: float = 5.0
    interval_max_s: float = 60.0  # after failures
    interval_unknown_s: float = 600.0  # where there is no page: the engine may be replaced by one that has it
    share_max: float = 0.02  # of an engine's time that may go into pages
    timeout_s: float = 3.0  # an engine in trouble is not to be asked more
    jitter: float = 0.2  # share of the interval, either way: nodes and engines out of step
    concurrent_max: int = 8

    def __post_init__(self) -> None:
        times = ("interval_s", "interval_max_s", "interval_unknown_s", "share_max", "timeout_s")
        problems = [f"{key}: must be above 0" for key in times if not 0 < getattr(self, key) < inf]
        if not 0 <= self.jitter < 1:
            problems.append("jitter: must be at least 0 and below 1")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class ScraperStatistics:
    """Counters."""

    looks: int
    failed: int  # no page, too long a page, no answer in time
    unknown: int  # pages that say nothing we know
    heard: int  # words of engines about their queues that counted as a look


class Loop:
    """The looks at one backend, one after the other."""

    def __init__(self, id: BackendId, url: str, api_key: str, context: ssl.SSLContext) -> None:  # noqa: A002
        self.id = id
        self.context = context
        self.url = httpx.URL(url)
        self.headers = {
            "host": self.url.netloc.decode("ascii"),
            "accept": "text/plain",
            "user-agent": "ranvier-scraper",
        }
        if api_key:
            self.headers["authorization"] = f"Bearer {api_key}"
        self.scope = trio.CancelScope()
        self.path = PATHS[0]
        self.failures = 0  # in a row
        self.took_s = 0.0
        self.unknown = False
        self.page = EngineMetrics()  # the last one that said anything
        self.told_at = -inf  # when the last report was made
        self.loads: dict[int, EngineLoad] = {}  # what each rank said of its queue in its event stream

    async def look(self, timeout_s: float) -> EngineMetrics | None:
        """What the page says; None when there was no answer in time."""
        began = trio.current_time()
        transport = httpx.AsyncHTTPTransport(verify=self.context, trust_env=False, retries=0)  # for this look alone
        try:
            with trio.fail_after(timeout_s):
                metrics = await self._look(transport)
        except (trio.TooSlowError, httpx.HTTPError):
            metrics = None
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
                await transport.aclose()
        self.took_s = trio.current_time() - began
        self.failures = 0 if metrics is not None else self.failures + 1
        self.unknown = metrics is not None and not metrics.known
        return metrics

    async def _look(self, transport: httpx.AsyncHTTPTransport) -> EngineMetrics:
        for path in dict.fromkeys((self.path, *PATHS)):
            metrics = read_metrics(await self._get(transport, path))
            if metrics.known:
                self.path = path
                return metrics
        return EngineMetrics()

    async def _get(self, transport: httpx.AsyncHTTPTransport, path: str) -> bytes:
        """A page; nothing for one that is not there or too long. Raises httpx.HTTPError."""
        request = httpx.Request("GET", self.url.copy_with(path=path), headers=self.headers)
        page = await page_of(transport, request, PAGE_BYTES_MAX)
        if page.status >= 500:
            raise httpx.HTTPError(f"status {page.status}")
        return page.body if page.status == 200 and not page.cut else b""

    def wait_s(self, options: ScrapeOptions) -> float:
        """How long to leave it alone."""
        if self.unknown:
            return options.interval_unknown_s
        patient = options.interval_s * 2.0 ** min(self.failures, 10)
        return max(min(patient, options.interval_max_s), self.took_s / options.share_max)


class Scraper:
    """Looks at every watched backend that this node owns and tells `report` what it found."""

    def __init__(
        self,
        report: Report,
        options: ScrapeOptions,
        rng: Random,
        *,
        owns: Callable[[BackendId], bool] = lambda _: True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`context` is for https backends; by default the system's authorities are trusted."""
        self.owns = owns
        self._report = report
        self._options = options
        self._rng = rng
        self._context = context
        self._plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # cheap, and never used for http
        self._limiter = trio.CapacityLimiter(options.concurrent_max)
        self._loops: dict[BackendId, Loop] = {}
        self._nursery: trio.Nursery | None = None
        self._looks = self._failed = self._unknown = self._heard = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for loop in self._loops.values():
                    nursery.start_soon(self._keep_looking, loop)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def watch(self, id: BackendId, url: str, api_key: str = "") -> None:  # noqa: A002
        """Look at it from now on. Watching the same id again starts afresh."""
        self.forget(id)
        context = self._plain
        if url.startswith("https:"):
            context = self._context = self._context or ssl.create_default_context()
        loop = self._loops[id] = Loop(id, url, api_key, context)
        if self._nursery is not None:
            self._nursery.start_soon(self._keep_looking, loop)

    def forget(self, id: BackendId) -> None:  # noqa: A002
        """Stop; nothing is reported of it from here on. Harmless for an id that is not watched."""
        loop = self._loops.pop(id, None)
        if loop is not None:
            loop.scope.cancel()

    def heard(self, id: BackendId, load: EngineLoad) -> None:  # noqa: A002
        """An engine told its queue in its event stream (SGLang's LoadStat): as good as a look, and as often at most.

        The rest is as the last page said, if there is one: SGLang has none unless it is told to.
        """
        loop = self._loops.get(id)
        rank = load.rank or 0
        if loop is None or load.running is None or rank >= RANKS_MAX:
            return
        loop.loads[rank] = load
        now = trio.current_time()
        if now < loop.told_at + self._options.interval_s:
            return
        loop.told_at = now
        loads = loop.loads.values()
        capacity = sum([each.tokens_max or 0 for each in loads])
        self._heard += 1
        running, waiting = sum([each.running or 0 for each in loads]), sum([each.waiting or 0 for each in loads])
        known = replace(loop.page, running=running, waiting=waiting)
        self._report(id, replace(known, capacity_tokens=known.capacity_tokens or capacity or None))

    def statistics(self) -> ScraperStatistics:
        return ScraperStatistics(self._looks, self._failed, self._unknown, self._heard)

    async def _keep_looking(self, loop: Loop) -> None:
        with loop.scope:
            while True:
                wait_s = self._options.interval_s
                if self.owns(loop.id):
                    await self._look(loop)
                    wait_s = loop.wait_s(self._options)
                await trio.sleep(wait_s * (1 + self._options.jitter * (2 * self._rng.random() - 1)))

    async def _look(self, loop: Loop) -> None:
        async with self._limiter:
            metrics = await loop.look(self._options.timeout_s)
        if self._loops.get(loop.id) is not loop:
            return  # forgotten while the page came in
        self._looks += 1
        self._failed += metrics is None
        self._unknown += loop.unknown
        if metrics is not None and metrics.known:
            loop.page, loop.told_at = metrics, trio.current_time()
            self._report(loop.id, metrics)
