"""What a node does when the host name of a backend leads elsewhere, or another process answers there."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import trio

from ranvier_py.core.addresses import is_address
from ranvier_py.core.errors import Conflict, RequestError
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.backend import normal_url
from ranvier_py.core.routing.backends import Backend
from ranvier_py.core.routing.processes.cache_counts import count_caches
from ranvier_py.core.routing.processes.name_addresses import (
    have_same_addresses,
    host_and_port,
    in_short,
    may_share_a_place,
)
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.io.host_names import HostNames
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.part import Node, Part, log_transitions
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.upstream import Upstream

log = logging.getLogger(__name__)


class NameParts(Part):
    """Keeps connections, probes and event streams with the names of backends. `addresses`: of all backends, by URL."""

    name = "names"

    def __init__(
        self,
        node: Node,
        addresses: Mapping[str, BackendAddress],
        upstream: Upstream,
        poller: EnginePoller,
        engine_events: EngineEvents,
    ) -> None:
        self._registry, self._faults = node.registry, node.faults
        self._addresses, self._upstream = addresses, upstream
        self._poller, self._engine_events = poller, engine_events
        self._compared: dict[str, object] = {}  # by URL: what a backend's place was compared with last
        self.names = HostNames(lambda: [each.host for each in addresses.values()], self._resolved)

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await self.names.run(self._faults)

    def _compare_places(self, backend: Backend, addresses: frozenset[str]) -> None:
        """Note which other backends lead to the same place, if any of that may have changed."""
        counters = self._registry.counters
        compared = (backend.id, addresses, counters.backends_added, counters.backends_removed)
        if self._compared.get(backend.url) == compared:
            return
        self._compared = {url: known for url, known in self._compared.items() if url in self._registry.ids.by_url}
        self._compared[backend.url] = compared
        found = [
            other.id
            for other in self._registry
            if other is not backend
            and may_share_a_place(backend.url, other.url)
            and have_same_addresses(addresses, self._known(host_and_port(other.url)[0]))
        ]
        self._registry.names.placed(backend.id, found)

    def _known(self, host: str) -> Collection[str]:
        """Return the addresses of a host, as far as they are known."""
        if is_address(host):
            return (host,)
        return self.names.names[host].addresses if host in self.names.names else ()

    async def refuse_twin(self, url: object) -> None:
        """Raise Conflict if a backend with another URL is at the resolved address and port of this one.

        What is no URL, or was not found in time, passes. Nothing can be added between this look and the return.
        """
        try:
            url = normal_url(url) if isinstance(url, str) else ""
        except RequestError:
            return
        known: dict[str, frozenset[str]] = {}
        while url not in self._registry.ids.by_url:
            near = [each for each in self._registry if url and may_share_a_place(url, each.url)]
            hosts = {place: host_and_port(place)[0] for place in (url, *(each.url for each in near))} if near else {}
            if missing := set(hosts.values()) - known.keys():
                known |= await self.names.addresses(missing)
                continue
            for each in near:
                if have_same_addresses(known[hosts[url]], known[hosts[each.url]]):
                    found = in_short(known[hosts[url]])
                    raise Conflict(f"{url} is where backend {each.name!r} at {each.url} is already: at {found}")
            return

    def restarted(self, backend: Backend) -> None:
        if address := self._addresses.get(backend.url):
            self._upstream.renew(address)

    def _resolved(self, host: str, addresses: frozenset[str], moved: bool) -> None:
        """Connections go to these addresses; if all are new, so may be the process."""
        self._upstream.keep(host, addresses)
        now, hosts = time.monotonic(), self.names.names[host].hosts
        for backend in self._registry:
            address = self._addresses.get(backend.url)
            if address is None or address.host != host:
                continue
            log_transitions(count_caches(backend, now, hosts=hosts))
            self._compare_places(backend, addresses)
            if moved:
                log.warning(event("backend.moved", engine=backend.name, addresses=in_short(addresses)))
                backend.seen.process.name_moved()
                self._poller.moved(backend.id)
                self._engine_events.moved(backend.id)
