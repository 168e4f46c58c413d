"""The sources of a node's backends: what follows them, and how they look to an operator.

Rule: a reload begins to follow new sources and forgets those that are gone; others go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from random import Random
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.discovery_settings import DiscoveryOptions
from ranvier_py.config.source_targets import DnsTarget, KubernetesTarget
from ranvier_py.core.addresses import parse_host_port, spelled
from ranvier_py.core.findings import Finding, Severity, counted
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.routing.engine_findings import SOURCES
from ranvier_py.core.routing.wanted.found_backend import SourceName
from ranvier_py.core.routing.wanted.source_set import Belief, SourceSet
from ranvier_py.node.asked import Route
from ranvier_py.node.discovery.followers import Sink, SourceFollower
from ranvier_py.node.part import Handler, Node, Part

DNS_PORT = 53
SHOWN_MAX = 8  # findings of one kind
LEFT_OUT_MAX = 20  # sentences about entries that can't be used, of one source in one view


class DiscoveryParts(Part):
    """See the module."""

    name = "sources"
    keys = ("discovery",)

    def __init__(self, node: Node) -> None:
        self._node, self._sources = node, node.sources
        self._wanted = followers_of(node.config, node.rng)
        self._followers: dict[SourceName, SourceFollower] = {}
        self._scopes: dict[SourceName, trio.CancelScope] = {}
        self._changed = trio.Event()
        self._begin()

    def _begin(self) -> None:
        """Show the sources, of which none has answered yet."""
        for name in self._wanted:
            self._sources.reconciler.source(name, time.monotonic())

    async def loop(self) -> None:
        """Follow the sources of the configuration as it is now."""
        self._followers, self._scopes = {}, {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sources.settle_rest)
            while True:
                self._changed = trio.Event()
                self._follow(self._wanted, nursery)
                await self._changed.wait()

    def _follow(self, wanted: Mapping[SourceName, SourceFollower], nursery: trio.Nursery) -> None:
        for name, follower in list(self._followers.items()):
            if name not in wanted or wanted[name].settings != follower.settings:
                self._scopes.pop(name).cancel()
                del self._followers[name]
                if name not in wanted:
                    self._sources.give_up(name)
        for name, follower in wanted.items():
            if name not in self._followers:
                self._followers[name], self._scopes[name] = follower, trio.CancelScope()
                nursery.start_soon(self._run, follower, self._scopes[name])

    async def _run(self, follower: SourceFollower, scope: trio.CancelScope) -> None:
        with scope:
            await self._node.faults.keep("sources", follower.run, Sink(self._sources, follower.name))

    async def reread(self, after: Config | None) -> None:
        for follower in self._followers.values():
            follower.look_soon()

    def reload(self, before: Config, after: Config) -> None:
        self._wanted = followers_of(after, self._node.rng)
        self._begin()
        self._changed.set()

    def sweep(self, now: float) -> None:
        if not self._sources.reconciler.is_settled:
            self._sources.settle()

    def findings(self, now: float) -> Iterator[Finding]:
        reconciler = self._sources.reconciler
        for name, source in reconciler.sources.items():
            if source.state is Belief.FAILING:
                yield failing(source)
            elif source.left_out:
                what = f"of {name} {len(source.left_out)} things can't be used: {source.left_out[0]}"
                remedy = "Mend what is named there; the others are in /admin/sources."
                yield Finding("source_left_out", Severity.NOTICE, what, about=str(name), remedy=remedy, command=SOURCES)
        for url, why in islice(reconciler.failed.items(), SHOWN_MAX):
            what, remedy = f"{url} could not be added: {why}", "Mend its entry; it is tried again by itself."
            yield Finding(
                "engine_not_added",
                Severity.DEGRADED,
                what,
                about=url,
                whom="its requests go to others",
                remedy=remedy,
                command=SOURCES,
            )
        for url in islice(reconciler.unconfirmed, SHOWN_MAX):
            what = f"{url} gets no requests: another process took its address while its source fails"
            remedy = "Mend its source, which then confirms it; or add it yourself, if it is meant."
            command = f"ranvier backend add {url}"
            yield Finding(
                "engine_unconfirmed",
                Severity.DEGRADED,
                what,
                about=url,
                whom="its requests go to others",
                remedy=remedy,
                command=command,
            )

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/sources": Route(lambda _: self.view(), "Sources of backends, and what they could not add")}

    def view(self) -> Mapping[str, Any]:
        """Return the state of each source, and what of their backends could not be added."""
        reconciler, now = self._sources.reconciler, time.monotonic()
        listed = sorted(reconciler.sources.items(), key=lambda item: item[0].rank)
        removed = [url for url, override in reconciler.overrides.items() if override.spec is None]
        about = {url: dict(each.want.found.about) for url, each in reconciler.placed.items() if each.want.found.about}
        return {
            "sources": {str(name): source_view(source, now) for name, source in listed},
            "not_added": reconciler.failed,
            "removed_by_operators": removed,
            "about": about,
        }

    def metrics(self) -> Iterator[Sample]:
        for name, source in self._sources.reconciler.sources.items():
            yield from samples("backend_source", source.counters, {"source": str(name)})


def failing(source: SourceSet[Any]) -> Finding:
    """Return that a source fails: what it found before still serves, if it found anything."""
    what = f"the source {source.name} of engines fails, and keeps {counted(len(source.found), 'engine')}: {source.why}"
    severity = Severity.NOTICE if source.found else Severity.DEGRADED
    whom = "engines that come or go there" if source.found else "all engines that it would name"
    remedy = "Mend what it names; it is tried again by itself."
    return Finding("source_failing", severity, what, about=str(source.name), whom=whom, remedy=remedy, command=SOURCES)


def followers_of(config: Config, rng: Random) -> dict[SourceName, SourceFollower]:
    """Return what follows the sources of a configuration, by name. Each kind is imported where there is one."""
    options, followers = config.discovery, list[SourceFollower]()
    if options.backends_file is not None:
        from ranvier_py.node.discovery.file_source import FileSource  # noqa: PLC0415

        followers.append(FileSource(options.backends_file))
    if options.backend_dns:
        followers += dns_sources(options, rng)
    followers += [kubernetes_source(config, text, rng) for text in options.backend_kubernetes]
    return {follower.name: follower for follower in followers}


def dns_sources(options: DiscoveryOptions, rng: Random) -> list[SourceFollower]:
    """Follow names."""
    from ranvier_py.node.discovery.dns_source import DnsSource  # noqa: PLC0415

    server = parse_host_port(options.backend_dns_server, DNS_PORT) if options.backend_dns_server else None
    return [DnsSource(DnsTarget.parse(text), server, rng) for text in options.backend_dns]


def kubernetes_source(config: Config, text: str, rng: Random) -> SourceFollower:
    """Follow something of Kubernetes. Within a cluster the environment names the API server."""
    from ranvier_py.io.sources.kubernetes_api import KubernetesApi  # noqa: PLC0415
    from ranvier_py.node.discovery.kubernetes_source import KubernetesSource  # noqa: PLC0415

    options = config.discovery
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    url = options.kubernetes_api or (f"https://{spelled((host, int(port)))}" if host and port.isdecimal() else "")
    api = KubernetesApi(url, options.kubernetes_credentials) if url else None
    settings = text, url, options.kubernetes_credentials
    return KubernetesSource(KubernetesTarget.parse(text), api, rng, settings)


def source_view(source: SourceSet[Any], now: float) -> Mapping[str, Any]:
    good_at = source.good_at
    return {
        "state": source.state.value,
        "since_s": round(now - source.since, 1),
        "why": source.why,
        "backends": len(source.found),
        "good_s_ago": None if good_at is None else round(now - good_at, 1),
        "left_out": source.left_out[:LEFT_OUT_MAX],
    }
