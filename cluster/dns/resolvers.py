"""Resolvers for trio, and so for httpx and openai: `trio.socket.set_custom_hostname_resolver(resolver)`.

`RoundRobinResolver` has names of its own; `DnsResolver` asks a server for those of its zone at each look-up. All other
names go to the system. trio tries addresses in the given order: the k-th look-up of a name begins with its k-th
address, and the others follow as spares. Rotation spreads *look-ups*, that is connections: a client that keeps one
connection keeps one node.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

import dns.asyncquery
import dns.exception
import dns.message
import trio
from dns.rcode import Rcode
from dns.rdatatype import RdataType

from cluster.dns.addresses import Address, NamesError

TRY_S = 2.0
TRIES_MAX = 2
"""glibc's resolver waits 5 s and tries twice; on one machine less is enough."""


class LookupFailed(OSError):
    """The name could not be resolved. `code` is the server's; None: no answer came."""

    def __init__(self, name: str, code: Rcode | None) -> None:
        super().__init__(f"{name}: {'no answer' if code is None else code.name}")
        self.code = code


async def look_up(server: tuple[str, int], name: str, kind: RdataType = RdataType.A) -> tuple[str, ...]:
    """Return the addresses in the server's order; none if the name has none of this type. Raises LookupFailed."""
    reply = await ask(server, name, kind)
    if reply.rcode() != Rcode.NOERROR:
        raise LookupFailed(name, reply.rcode())
    return tuple(record.to_text() for found in reply.answer if found.rdtype == kind for record in found)


async def ask(server: tuple[str, int], name: str, kind: RdataType) -> dns.message.Message:
    """Ask one question. Raises LookupFailed if no answer comes, dns.exception.DNSException for what is no name."""
    for _ in range(TRIES_MAX):
        query = dns.message.make_query(name, kind)
        try:
            return await dns.asyncquery.udp(
                query, server[0], TRY_S, server[1], ignore_unexpected=True, ignore_errors=True
            )
        except (dns.exception.DNSException, OSError):
            continue
    raise LookupFailed(name, None)


class Resolver(trio.abc.HostnameResolver):
    """Resolves the lab's names by `addresses_of`, all others by the system."""

    @abstractmethod
    async def addresses_of(self, name: str, versions: Sequence[int]) -> Sequence[Address] | None:
        """Return the addresses of a name of the lab; None for a name that the system resolves."""

    def ordered(self, name: str, found: list[Any]) -> list[Any]:  # noqa: ARG002  # for those who rotate
        """Return the addresses in the order in which trio shall try them."""
        return found

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002  # the name is trio's
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        name = host.decode("ascii").lower() if host is not None else ""
        versions = {int(socket.AF_INET): [4], int(socket.AF_INET6): [6]}.get(int(family), [4, 6])
        known = await self.addresses_of(name, versions)
        if known is None:
            found: list[Any] = await trio.to_thread.run_sync(
                socket.getaddrinfo, host, port, family, type, proto, flags, abandon_on_cancel=True
            )
            return self.ordered(name, found)
        fitting = [each for each in known if ip_address(each.ip).version in versions]
        if not fitting:
            raise socket.gaierror(socket.EAI_NONAME, f"{name} has no address of that family")
        kind = socket.SocketKind(type or socket.SOCK_STREAM)
        found = [(family_of(each.ip), kind, proto, "", (each.ip, each.port or int(port or 0))) for each in fitting]
        return self.ordered(name, found)

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        return await trio.to_thread.run_sync(socket.getnameinfo, sockaddr, flags, abandon_on_cancel=True)


def family_of(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(ip).version == 6 else socket.AF_INET


class RoundRobinResolver(Resolver):
    """Resolves the names that it was given. It lasts as long as the trio run."""

    def __init__(self, names: Mapping[str, Sequence[Address]]) -> None:
        for name, addresses in names.items():
            if not addresses:
                raise NamesError(f"{name}: a name needs an address")
        self.names = {name.lower(): tuple(addresses) for name, addresses in names.items()}
        self.lookups: dict[str, int] = {}

    async def addresses_of(self, name: str, versions: Sequence[int]) -> Sequence[Address] | None:  # noqa: ARG002
        return self.names.get(name)

    def ordered(self, name: str, found: list[Any]) -> list[Any]:
        """Begin one address further at each look-up, also for names of the system."""
        start = self.lookups.get(name, 0)
        self.lookups[name] = start + 1
        start %= len(found)
        return found[start:] + found[:start]


class DnsResolver(Resolver):
    """Resolves names that end in `.zone` by the lab's server."""

    def __init__(self, server: tuple[str, int], zone: str = "lab") -> None:
        self.server = server
        self.suffix = f".{zone.lower()}"

    async def addresses_of(self, name: str, versions: Sequence[int]) -> Sequence[Address] | None:
        if not name.endswith(self.suffix):
            return None
        found: list[str] = []
        try:
            for version in versions:
                found += await look_up(self.server, name, RdataType.A if version == 4 else RdataType.AAAA)
        except LookupFailed as error:
            gone = error.code == Rcode.NXDOMAIN
            raise socket.gaierror(socket.EAI_NONAME if gone else socket.EAI_AGAIN, str(error)) from error
        return [Address(ip) for ip in found]
