"""Where does each engine publish its KV events? Asked of the engine over HTTP, or told by the operator.

One loop per backend that is watched: GET /kv_event_sources (vLLM), else /server_info or /get_server_info (SGLang). What
`core.kv.publishers` makes of the answer goes to `found`, whenever it is another one than before; an engine that tells
nothing has no publishers, one that does not answer keeps those it had.

    discovery = KvDiscovery(found, DiscoveryOptions(), rng)      # found(backend, publishers): (re)start subscribers
    discovery.watch(backend, url, api_key)                       # or with fixed=of_operator(…); not at all when off
    discovery.look_soon(backend)                                 # healthy again, restarted, or its events broke off

Rules: an engine decides on ports of its own host and on nothing else; an operator may name any host.
Bodies are bounded, looks have a deadline, redirects are not followed, nothing is read from the environment.
Cost: three small GETs a minute for an engine without events, one for an engine with them.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from urllib.parse import urlsplit

import httpx
import trio

from ranvier_py.core.engine_cache.sources.publishers import (
    NOTHING,
    Found,
    Publisher,
    at_home,
    read_event_sources,
    read_server_info,
)
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.io.engine_pages import page_of

log = logging.getLogger(__name__)

PAGE_BYTES_MAX = 512 * 1024  # SGLang tells its whole configuration, some 30 kB
ADDRESSES_MAX = 64  # of a backend's name
CLOSE_S = 1.0  # for the farewell of a TLS connection, while being cancelled

PAGES = (
    ("/kv_event_sources", read_event_sources),
    ("/server_info", read_server_info),
    ("/get_server_info", read_server_info),
)

Report = Callable[[BackendId, tuple[Publisher, ...]], object]


@dataclass(frozen=True, slots=True)
class DiscoveryOptions:
    """When to ask. All times in seconds."""

    interval_s: float = 60.0  # of an engine that answers: it may have been started anew with other ports
    interval_unanswered_s: float = 5.0  # as it is probed
    timeout_s: float = 5.0  # for one page
    gap_s: float = 1.0  # between two looks at one engine, however often `look_soon` is called
    jitter: float = 0.2  # share of the interval, either way

    def __post_init__(self) -> None:
        times = ("interval_s", "interval_unanswered_s", "timeout_s", "gap_s")
        problems = [f"{key}: must be above 0" for key in times if not 0 < getattr(self, key) < inf]
        if not 0 <= self.jitter < 1:
            problems.append("jitter: must be at least 0 and below 1")
        if problems:
            raise ConfigError(problems)


class Engine:
    """One engine: its pages, and what it said last."""

    def __init__(self, url: str, api_key: str, context: ssl.SSLContext) -> None:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=1.0)
        self.transport = httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits, retries=0)
        self.url = httpx.URL(url)
        self.host = urlsplit(url).hostname or ""
        self.headers = {"host": self.url.netloc.decode("ascii"), "accept": "*/*", "user-agent": "ranvier-discovery"}
        if api_key:
            self.headers["authorization"] = f"Bearer {api_key}"

    async def look(self, timeout_s: float) -> Found | None:
        """What it tells of its publishers. None: it does not answer, or not yet."""
        for path, read in PAGES:
            try:
                with trio.fail_after(timeout_s):
                    status, body = await self._get(path)
            except (trio.TooSlowError, httpx.RequestError):
                return None
            if status >= 500:
                return None
            found = read(body) if status == 200 else NOTHING
            if found != NOTHING:
                return at_home(found, self.host, await self._addresses(timeout_s))
        return NOTHING

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a page; an empty body for one that is too long. Raises httpx.RequestError."""
        request = httpx.Request("GET", self.url.copy_with(path=path), headers=self.headers)
        page = await page_of(self.transport, request, PAGE_BYTES_MAX)
        return page.status, b"" if page.cut else page.body

    async def _addresses(self, timeout_s: float) -> Sequence[str]:
        """What the backend's host stands for now; nothing where that can't be found out."""
        with trio.move_on_after(timeout_s):
            try:
                infos = await trio.socket.getaddrinfo(self.host, None)
            except OSError:
                return ()
            return list(dict.fromkeys(str(info[4][0]) for info in infos))[:ADDRESSES_MAX]
        return ()


class Loop:
    """The looks at one backend, one after the other."""

    def __init__(self, id: BackendId, engine: Engine) -> None:  # noqa: A002
        self.id = id
        self.engine = engine
        self.scope = trio.CancelScope()
        self.soon = trio.Event()
        self.said = NOTHING


class KvDiscovery:
    """Looks at every watched backend and tells `found` what changed."""

    def __init__(
        self, found: Report, options: DiscoveryOptions, rng: Random, context: ssl.SSLContext | None = None
    ) -> None:
        """`context` is for https backends; by default the system's authorities are trusted."""
        self.looks = 0
        self._found = found
        self._options = options
        self._rng = rng
        self._context = context
        self._plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, and cheaper than httpx's own
        self._loops: dict[BackendId, Loop] = {}
        self._fixed: dict[BackendId, tuple[Publisher, ...]] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Backends may be watched before, and at any time meanwhile."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for id, publishers in self._fixed.items():  # noqa: A001
                    self._found(id, publishers)
                for loop in self._loops.values():
                    nursery.start_soon(self._keep_looking, loop)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def watch(self, id: BackendId, url: str, api_key: str = "", fixed: tuple[Publisher, ...] = ()) -> None:  # noqa: A002
        """Look at it from now on; or take what is fixed, without asking. Watching the same id again starts afresh."""
        self.forget(id)
        if fixed:
            self._fixed[id] = fixed
            if self._nursery is not None:
                self._found(id, fixed)
            return
        is_secure = url.startswith("https:")
        if is_secure and self._context is None:
            self._context = ssl.create_default_context()
        context = self._context if is_secure and self._context is not None else self._plain
        loop = self._loops[id] = Loop(id, Engine(url, api_key, context))
        if self._nursery is not None:
            self._nursery.start_soon(self._keep_looking, loop)

    def forget(self, id: BackendId) -> None:  # noqa: A002
        """Stop looking; nothing is told of it from here on. Harmless for an id that is not watched."""
        self._fixed.pop(id, None)
        loop = self._loops.pop(id, None)
        if loop is not None:
            loop.scope.cancel()

    def look_soon(self, id: BackendId) -> None:  # noqa: A002
        """It may be another process by now. Never more often than `gap_s`; nothing for what is fixed."""
        loop = self._loops.get(id)
        if loop is not None:
            loop.soon.set()

    def publishers(self, id: BackendId) -> tuple[Publisher, ...]:  # noqa: A002
        """Those that are known now."""
        loop = self._loops.get(id)
        return loop.said.publishers if loop is not None else self._fixed.get(id, ())

    async def _keep_looking(self, loop: Loop) -> None:
        options = self._options
        with loop.scope:
            try:
                while True:
                    said = await loop.engine.look(options.timeout_s)
                    self.looks += 1
                    if said is not None and self._loops.get(loop.id) is loop:
                        self._tell(loop, said)
                    interval_s = options.interval_unanswered_s if said is None else options.interval_s
                    await self._wait(loop, interval_s)
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
                    await loop.engine.transport.aclose()

    async def _wait(self, loop: Loop, interval_s: float) -> None:
        """Until the next look is due, or wanted soon."""
        options = self._options
        await trio.sleep(options.gap_s)
        due_s = interval_s * (1 + options.jitter * (2 * self._rng.random() - 1))
        with trio.move_on_after(max(due_s - options.gap_s, 0)):
            await loop.soon.wait()
        loop.soon = trio.Event()

    def _tell(self, loop: Loop, said: Found) -> None:
        before, loop.said = loop.said, said
        where = loop.engine.url
        if said.refused != before.refused:
            for problem in said.refused:
                log.warning("kv.refused %s: %s; kv_events of the backend can say where", where, problem)
        if said.publishers != before.publishers:
            places = ", ".join(f"rank {each.rank} at {each.events.endpoint}" for each in said.publishers)
            log.info("kv.found %s: %s", where, places or "none any more")
            self._found(loop.id, said.publishers)
