"""Backends from DNS: each address of a name, or each service of its SRV records.

Rules: an answer is asked for again when it expires, within LEAST_S to MOST_S. An error keeps what was found. That a
name has nothing counts with the third such answer in a row. Where no family is written, the first one that a name has
addresses of holds until it has none, so that no engine is there twice. Of SRV records those of the lowest priority
count; their weights become relative weights of backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import trio

from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.source_targets import DnsTarget
from ranvier_py.core.addresses import HostPort
from ranvier_py.core.errors import AddressError
from ranvier_py.core.pauses import doubled
from ranvier_py.core.routing.wanted.found_backend import FoundBackend, SourceName
from ranvier_py.io.sources.dns_lookups import DnsRecords, DnsService, NameServers
from ranvier_py.node.discovery.followers import Sink, SourceFollower

LEAST_S, MOST_S = 1.0, 60.0
EMPTY_ANSWERS = 3
JITTER = 0.1  # share of a pause by which nodes that began together drift apart
WEIGHT_LEAST = 0.01  # of a service of weight 0, which is to get very few


class DnsSource(SourceFollower):
    """Follows one name."""

    def __init__(self, target: DnsTarget, server: HostPort | None, rng: Random) -> None:
        super().__init__(SourceName("dns", target.text), (target, server))
        self._target, self._names, self._rng = target, NameServers(server), rng
        self._family = target.family
        self._asked = trio.Event()
        self._failures = self._empty = 0

    def look_soon(self) -> None:
        self._asked.set()

    async def run(self, sink: Sink) -> None:
        while True:
            pause_s = await self.look(sink)
            self._asked = trio.Event()
            with trio.move_on_after(pause_s * (1 - JITTER * self._rng.random())):
                await self._asked.wait()

    async def look(self, sink: Sink) -> float:
        """Look the name up once. Returns after how long to do it again."""
        try:
            found = await self._look_up()
        except AddressError as error:
            sink.fail(str(error))
            self._failures += 1
            return doubled(LEAST_S, self._failures - 1, MOST_S)
        pause_s, self._failures = min(max(found.ttl_s, LEAST_S), MOST_S), 0
        if not found.records:
            self._empty += 1
            if self._empty < EMPTY_ANSWERS:
                sink.doubt(f"the name has nothing, by {self._empty} of {EMPTY_ANSWERS} answers in a row")
                return pause_s
            self._family = self._target.family
        else:
            self._empty = 0
        specs, left_out = self._specs(found.records)
        sink.take([FoundBackend(spec) for spec in specs], left_out)
        return pause_s

    async def _look_up(self) -> DnsRecords:
        found = DnsRecords((), MOST_S)
        for family in (self._family,) if self._family else (4, 6):
            if self._target.port:
                found = await self._names.addresses(self._target.name, family)
            else:
                found = await self._names.services(self._target.name, family)
                found = found._replace(records=[each for each in found.records if each.addresses])
            if found.records:
                self._family = family
                break
        return found

    def _specs(self, records: Sequence[str] | Sequence[DnsService]) -> tuple[list[BackendSpec], list[str]]:
        common, port = self._target.common, self._target.port
        if port:
            return [common.spec(str(address), port) for address in records], []
        services = [each for each in records if isinstance(each, DnsService)]
        first = [each for each in services if each.priority == services[0].priority]
        later = len(services) - len(first)
        left_out = [f"{later} services of a later priority than {services[0].priority}"] if later else []
        return [*self._of_services(first)], left_out

    def _of_services(self, services: Sequence[DnsService]) -> Iterator[BackendSpec]:
        common, total = self._target.common, sum(each.weight for each in services)
        weight = float(common.options.get("weight", 1.0))
        for each in services:
            share = each.weight * len(services) / total if total else 1.0
            own = {"tls_name": each.host} if common.scheme == "https" and "tls_name" not in common.options else {}
            for address in each.addresses:
                yield common.spec(address, each.port, weight=round(max(share, WEIGHT_LEAST) * weight, 3), **own)
