"""What a node is made of: parts, each of which runs, counts, shows, serves and reloads one thing.

`node.py` lists the parts in the order in which they start, and gives each what it needs of others; nothing else names
one, but `run_node` the public port, at whose end the node ends. Whatever concerns several of them walks the list: a
backend is added and removed, a poll has found something, metrics are read, a configuration is new.
Rule: a removal reaches every part, even if another one raises; an addition that raises leaves nothing anywhere.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import chain
from random import Random
from typing import Any, TypeVar

import trio

from ranvier_py import __version__
from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.findings import Finding
from ranvier_py.core.history.joined_panes import Join
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.log_limit import LogLimit
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.routing.backend import KEY_ACCEPTED
from ranvier_py.core.routing.backends import Backend, ProbeResult, Registry, Transition
from ranvier_py.core.routing.blame.refusals import SERVES
from ranvier_py.core.routing.health import Circuit, Health
from ranvier_py.core.routing.processes.engine_names import NONE
from ranvier_py.core.routing.router import Router
from ranvier_py.node.asked import Asked, Route
from ranvier_py.node.discovery.backend_sources import BackendSources
from ranvier_py.node.fingerprints import FingerprintScheme
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

Handler = Callable[[Asked], Any] | Route
"""Answers a request to the control port with a `ControlAnswer`, a JSON value, or an awaitable of one; a Route has words
for it as well."""


class Part:
    """One part of a node; what a part has no use for does nothing.

    `name`: under which the faults of its `loop` are counted. `keys`: of the configuration, or sections of it, of which
    it takes new values while the node runs. `joins`: by each of its panes that shows what this worker alone has served,
    what makes one of those of all workers of the node; `sums_series`: whether its series are such counts.
    """

    name = ""
    keys: Collection[str] = ()
    joins: Mapping[str, Join] = {}
    sums_series = False

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Work until cancelled, and confine own faults. The next part starts once this one reports that it has."""
        task_status.started()

    async def loop(self) -> None:
        """Work until cancelled; after a fault, the node calls this again."""

    def sweep(self, now: float) -> None:
        """Free what has expired, a little at a time: this is called once a second."""

    def stop(self) -> None:
        """Begin to end: no request is served any more, and the part is cancelled next."""

    def unready(self) -> str:
        """Return why the node should get no requests now; "" if nothing speaks against it."""
        return ""

    def adding(self, url: str) -> None:
        """Make room for a backend that is about to be added."""

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        """Take a backend that was added, with its configuration, if it has one."""

    def removed(self, backend: Backend) -> None:
        """Forget a backend that was removed, or whose addition failed: another one may get its id."""

    def restarted(self, backend: Backend) -> None:
        """Take that another process answers: a generation has begun."""

    def rank_refused(self, rank: Backend) -> bool:
        """Take that an engine refuses one of its ranks. Returns whether this places the request elsewhere."""
        return False

    def probed(self, backend: BackendId, result: ProbeResult) -> None: ...
    def measured(self, backend: BackendId, metrics: EngineMetrics) -> None: ...
    def found(self, backend: BackendId, publishers: tuple[Publisher, ...]) -> None: ...

    def view(self) -> Any: ...
    def of_engines(self, now: float) -> Mapping[str, Mapping[str, Any]]:
        """Return what it knows of engines for the status, by their names. None is what is not known; else a later part
        is believed before an earlier one."""
        return {}

    def findings(self, now: float) -> Iterable[Finding]:
        """Return what is wrong here, for the operator; asked once a second."""
        return ()

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        """Return what the page of the control port shows of it, by pane: JSON values, or a generator that returns one
        after some steps. Asked once in some seconds, and once a second while somebody looks (`watched`)."""
        return {}

    def series(self, now: float) -> Iterable[tuple[str, float]]:
        """Yield numbers by name of which the page shows the history, once a second."""
        return ()

    def metrics(self) -> Iterable[Sample]:
        return ()

    def routes(self) -> Mapping[str, Handler]:
        """Return what it serves, by method and path: "GET /admin/routes/<fingerprint>"."""
        return {}

    async def reread(self, after: Config | None) -> None:
        """Have its own files read again soon: the configuration was. Read other files that it names now, if it is good.
        Raises ConfigError; nothing changes."""

    def held(self, before: Config, after: Config) -> Iterable[str]:
        """Return keys that may change as a rule, but not from the present value to the new one."""
        return ()

    def check(self, before: Config, after: Config) -> bool:
        """Whether a file that it uses has other content. Raises ConfigError for what it can't take; nothing changes."""
        return False

    def reload(self, before: Config, after: Config) -> None:
        """Take new values of `keys`, and files that `check` found changed."""


class Counted(Part):
    """A part that does nothing but run and count. `prefix` of its metrics, if that is not its name."""

    def __init__(
        self, name: str, counters: Callable[[], Any], loop: Callable[[], Any] | None = None, prefix: str | None = None
    ) -> None:
        self.name, self._counters, self._loop = name, counters, loop
        self._prefix = name if prefix is None else prefix

    async def loop(self) -> None:
        if self._loop is not None:
            await self._loop()

    def view(self) -> Any:
        return values(self._counters())

    def metrics(self) -> Iterator[Sample]:
        return samples(self._prefix, self._counters())


Kind = TypeVar("Kind", bound=Part)


class Node:
    """What the parts of one node share, and the walks over all of them."""

    release = __version__

    def __init__(
        self, config: Config, scheme: FingerprintScheme, router_of: Callable[[Registry], Router], rng: Random
    ) -> None:
        """`config` is replaced when it is read again."""
        self.config, self.scheme, self.rng, self.faults = config, scheme, rng, Faults()
        shared = config.siblings_key or secrets.token_bytes(32)  # a probe may come to another worker
        self.own_probe = blake2b(shared, digest_size=8, person=b"own probe").hexdigest().encode()
        self.parts: Sequence[Part] = ()
        self.registry = Registry(
            config.health, resorted=SilentResorts(), restarted=self._restarted, rank_refused=self._rank_refused
        )
        self.sources = BackendSources(self.registry, self.add_backend, self.remove_backend)
        self.router = router_of(self.registry)

    def _restarted(self, backend: Backend) -> None:
        self.sources.restarted(backend)
        for part in self.parts:
            part.restarted(backend)

    def _rank_refused(self, rank: Backend) -> bool:
        return any(part.rank_refused(rank) for part in self.parts)

    def assemble(self, parts: Sequence[Part]) -> None:
        """Take the parts, in the order in which they start, and give them the backends of the configuration."""
        self.parts = tuple(parts)
        self.sources.configure(self.config.backend)

    def key_for(self, url: str) -> str:
        """Return the key with which the engine at this URL is asked: its own, or that of all; "" if there is none."""
        own = self.sources.key_of(url)
        return own.content if own is not None else self.config.api_key

    def part(self, kind: type[Kind]) -> Kind:
        """Return the part of this kind."""
        (found,) = [each for each in self.parts if isinstance(each, kind)]
        return found

    @property
    def generations(self) -> list[int]:
        """The generation of each backend by its id, -1 for one that is gone."""
        return [each.generation if each is not None and not each.removed else -1 for each in self.registry.ids.slots]

    async def start(self, nursery: trio.Nursery) -> Mapping[str, Any]:
        """Start the parts in order. Returns what each reported, by name."""
        reported = {}
        for part in self.parts:
            reported[part.name] = await nursery.start(part.run)
            nursery.start_soon(self.faults.keep, part.name, part.loop)
        return reported

    def unready(self) -> str:
        """Return why the node should get no requests now, as the part says that starts last; "" if it should."""
        return next((why for part in reversed(self.parts) if (why := part.unready())), "")

    def metrics(self) -> Iterator[Sample]:
        return chain.from_iterable(part.metrics() for part in self.parts)

    def add_backend(
        self, url: str, weight: float, name: str, spec: BackendSpec | None = None, *, by: str = ""
    ) -> BackendId:
        """Add a backend; `spec`: its configuration, if any; `by`: whoever ordered that. Raises BadRequest; then nothing
        was added."""
        for part in self.parts:
            part.adding(url)
        with ExitStack() as undo:
            hosted, any_model = (spec.hosted, spec.any_model) if spec is not None else (None, False)
            backend = self.registry.add(url, weight=weight, name=name, hosted=hosted, any_model=any_model)
            undo.callback(self.remove_backend, backend.name)
            for part in self.parts:
                part.added(backend, spec)
            undo.pop_all()
        log.info(event("backend.added", engine=backend.name, url=backend.url, weight=weight, by=by))
        return backend.id

    def remove_backend(self, name_or_url: str, *, by: str = "", why: str = "") -> None:
        """Have each part forget the backend and its ranks, even if another part raises. Raises NotFound."""
        for each in self.registry.ids.known(name_or_url).behind.as_ranks:
            self.remove_backend(each.name)
        backend = self.registry.remove(name_or_url)
        with ExitStack() as steps:
            for part in self.parts:
                steps.callback(part.removed, backend)
        log.info(event("backend.removed", engine=backend.name, url=backend.url, by=by, why="" if by else why))


WELL = (Health.HEALTHY.value, Circuit.CLOSED.value, SERVES, KEY_ACCEPTED, NONE)
"""States that need no attention."""

ORDERED = ("models", "draining")
"""Changes that somebody has made on purpose."""


class SilentResorts:
    """Logs that a model is served only by backends that are unhealthy by time-outs alone."""

    def __init__(self) -> None:
        self._limit = LogLimit()

    def __call__(self, model: str) -> None:
        if (more := self._limit.more("", time.monotonic())) is not None:
            log.warning(event("pool.silent", model=model, more=more))


def log_transitions(transitions: Sequence[Transition]) -> None:
    """Log changes of backends: as warnings if somebody may have to look, else at info."""
    for change in transitions:
        level = logging.INFO if change.what in ORDERED or change.after in WELL else logging.WARNING
        log.log(
            level,
            event(
                f"backend.{change.what}",
                engine=change.name,
                before=change.before,
                after=change.after,
                by="",
                why=change.why,
            ),
        )
