"""Looks names up in DNS with dnspython: addresses and services, and for how long an answer holds.

Rule: that a name has nothing is an answer; that nobody knows is an error. /etc/hosts is not read. dnspython, of
the extra `[dns]`, is imported with the first look-up. Bounds: LOOKUP_S for one name; ADDRESSES_MAX; HOSTS_AT_ONCE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import trio

from ranvier_py.core.addresses import HostPort
from ranvier_py.core.errors import AddressError

LOOKUP_S = 5.0  # with all tries and servers
ADDRESSES_MAX = 4096  # as many as there can be backends
HOSTS_AT_ONCE = 8
NEGATIVE_TTL_S = 5.0  # of an answer that names none

RECORDS = {4: "A", 6: "AAAA"}


class DnsRecords(NamedTuple):
    """The records of a name, sorted; () if it has none. `ttl_s`: how long that holds."""

    records: Sequence[Any]
    ttl_s: float


class DnsService(NamedTuple):
    """One SRV record. `addresses`: of its host, as far as they came with it."""

    priority: int
    weight: int
    port: int
    host: str
    addresses: Sequence[str] = ()


class NameServers:
    """Asks `server`, or those of this machine. One for each name that is followed."""

    def __init__(self, server: HostPort | None) -> None:
        self._server = server

    async def addresses(self, name: str, version: int) -> DnsRecords:
        """Return the addresses of one family. Raises AddressError."""
        answer, ttl_s = await self._ask(name, RECORDS[version])
        return DnsRecords(sorted({record.address for record in answer})[:ADDRESSES_MAX], ttl_s)

    async def services(self, name: str, version: int) -> DnsRecords:
        """Return the SRV records of a name, with all addresses of one family that their hosts have. Raises
        AddressError."""
        answer, ttl_s = await self._ask(name, "SRV")
        known = additional(answer, version)
        hosts = sorted({record.target.to_text(omit_final_dot=True) for record in answer})[:ADDRESSES_MAX]
        limit, ttls = trio.CapacityLimiter(HOSTS_AT_ONCE), [ttl_s]
        errors: list[AddressError] = []

        async def look_up(host: str) -> None:
            async with limit:
                try:
                    found = await self.addresses(f"{host}.", version)
                except AddressError as error:
                    errors.append(error)
                else:
                    known[host] = found.records
                    ttls.append(found.ttl_s)

        async with trio.open_nursery() as nursery:
            for host in hosts:
                if host not in known:
                    nursery.start_soon(look_up, host)
        if errors:
            raise errors[0]
        return DnsRecords(services_of(answer, known), min(ttls))

    async def _ask(self, name: str, kind: str) -> tuple[Any, float]:
        """Return the records of a kind, and for how long they hold. Raises AddressError."""
        try:
            import dns.asyncresolver  # noqa: PLC0415  # an extra
            import dns.exception  # noqa: PLC0415
            import dns.resolver  # noqa: PLC0415
        except ImportError as error:
            raise AddressError("looking up backends in DNS needs dnspython: install ranvier-py[dns]") from error
        try:
            resolver = dns.asyncresolver.Resolver(configure=self._server is None)
            if self._server is not None:
                resolver.nameservers, resolver.port = [self._server[0]], self._server[1]
            answer = await resolver.resolve(name, kind, lifetime=LOOKUP_S, raise_on_no_answer=False, search=True)
        except dns.resolver.NXDOMAIN:
            return (), NEGATIVE_TTL_S
        except (dns.exception.DNSException, OSError, ValueError) as error:
            raise AddressError(f"{name} {kind}: {str(error) or type(error).__name__}") from error
        if answer.rrset is None:
            return (), NEGATIVE_TTL_S
        return answer, float(answer.chaining_result.minimum_ttl)


def additional(answer: Any, version: int) -> dict[str, Sequence[str]]:
    """Return the addresses that came with an answer, by host."""
    found: dict[str, Sequence[str]] = {}
    for records in answer.response.additional if answer else ():
        addresses = [record.address for record in records if hasattr(record, "address")]
        fitting = sorted(address for address in addresses if (":" in address) is (version == 6))
        if fitting:
            found[records.name.to_text(omit_final_dot=True)] = fitting
    return found


def services_of(answer: Any, known: Mapping[str, Sequence[str]]) -> list[DnsService]:
    found = []
    for record in answer:
        host = record.target.to_text(omit_final_dot=True)
        found.append(DnsService(record.priority, record.weight, record.port, host, known.get(host, ())))
    return sorted(found)
