"""Names of the lab: round-robin DNS inside one process, and the loopback addresses behind it.

A client finds a node by a name with several addresses and takes the first that answers. trio tries addresses in the
order given, so the rotation is ours: the k-th look-up of a name begins with its k-th address, the others follow as
spares. Rotation spreads *look-ups*, that is connections: a client that keeps one connection keeps one node.

Linux answers on all of 127/8, so the nodes of a lab share one port on 127.0.0.2, 127.0.0.3, …, as they would on
machines of their own. Where that fails (macOS has 127.0.0.1 only) every node gets 127.0.0.1 and a port of its own,
and an address of a name may carry a port that overrides the asked one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from random import Random
from typing import Any

import trio

AddressInfo = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
]
"""One line of `socket.getaddrinfo`."""

PORT_MIN, PORT_END = 20_000, 32_000
"""Ports for the lab: above the well-known services, below 32768 where Linux begins to number outgoing connections."""

PORT_TRIES_MAX = 200
"""A machine where 200 random ports of 12,000 are taken has another problem than ours."""


class NamesError(ValueError):
    """A name was given wrongly, or the machine has no address or port for us. Nothing was opened."""


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address behind a name; `port` 0 means the port that was asked for."""

    ip: str
    port: int = 0


def parse_resolve(text: str) -> tuple[str, tuple[Address, ...]]:
    """Read `NAME=IP[:PORT],IP[:PORT],…` (IPv6 with a port in brackets). Raises NamesError."""
    name, equals, rest = text.partition("=")
    if not name or not equals or not rest:
        raise NamesError(f"{text!r}: want NAME=IP,IP,… such as router.lab=127.0.0.2,127.0.0.3")
    return name.lower(), tuple(parse_address(part.strip()) for part in rest.split(","))


def parse_address(text: str) -> Address:
    """Read `IP`, `IP:PORT` or `[IPv6]:PORT`. Raises NamesError."""
    ip, port = text, "0"
    if text.startswith("["):
        ip, _, port = text[1:].partition("]:")
    elif text.count(":") == 1:
        ip, _, port = text.partition(":")
    try:
        ip_address(ip)
        number = int(port)
    except ValueError as error:
        raise NamesError(f"{text!r} is not an IP address with or without a port") from error
    if not 0 <= number <= 65535:
        raise NamesError(f"{text!r}: a port is 0 … 65535")
    return Address(ip, number)


class RoundRobinResolver(trio.abc.HostnameResolver):
    """Resolves the names it was given by turns, all others by the system (and rotates those answers too).

    Set it with `trio.socket.set_custom_hostname_resolver(resolver)`; it lasts as long as the trio run.
    """

    def __init__(self, names: Mapping[str, Sequence[Address]]) -> None:
        for name, addresses in names.items():
            if not addresses:
                raise NamesError(f"{name}: a name needs an address")
        self.names = {name.lower(): tuple(addresses) for name, addresses in names.items()}
        self.lookups: dict[str, int] = {}

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
        known = self.names.get(name)
        if known is None:
            found: list[Any] = await trio.to_thread.run_sync(
                socket.getaddrinfo, host, port, family, type, proto, flags, abandon_on_cancel=True
            )
        else:
            asked = int(port or 0)
            found = [self.line(address, asked, type, proto) for address in known]
            found = [line for line in found if family in (0, line[0])]
            if not found:
                raise socket.gaierror(socket.EAI_NONAME, f"{name} has no address of that family")
        return self.rotate(name, found)

    @staticmethod
    def line(address: Address, asked: int, kind: int, proto: int) -> AddressInfo:
        port = address.port or asked
        stream = socket.SocketKind(kind or socket.SOCK_STREAM)
        if isinstance(ip_address(address.ip), IPv6Address):
            return socket.AF_INET6, stream, proto, "", (address.ip, port, 0, 0)
        return socket.AF_INET, stream, proto, "", (address.ip, port)

    def rotate(self, name: str, found: list[Any]) -> list[Any]:
        """Turn the answer by one more place at each look-up. The table is as long as the names a client uses: few."""
        turn = self.lookups.get(name, 0)
        self.lookups[name] = turn + 1
        start = turn % len(found)
        return found[start:] + found[:start]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        return await trio.to_thread.run_sync(socket.getnameinfo, sockaddr, flags, abandon_on_cancel=True)


def can_bind(ip: str, port: int = 0) -> bool:
    """Whether a server could listen there just now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((ip, port))
        except OSError:
            return False
    return True


def free_port(ips: Sequence[str], rng: Random, taken: frozenset[int] = frozenset()) -> int:
    """A port below 32768 that is free on every one of `ips`. Somebody may still take it first: try to start, then see.

    Raises NamesError.
    """
    for _ in range(PORT_TRIES_MAX):
        port = rng.randrange(PORT_MIN, PORT_END)
        if port not in taken and all(can_bind(ip, port) for ip in ips):
            return port
    raise NamesError(f"no free port between {PORT_MIN} and {PORT_END} on {', '.join(ips)}")


def node_addresses(count: int, rng: Random, taken: frozenset[int] = frozenset()) -> tuple[list[Address], str]:
    """Addresses for `count` nodes behind one name, and a word on how (empty when they share a port, as they should)."""
    ips = [f"127.0.0.{2 + index}" for index in range(count)]
    if all(can_bind(ip) for ip in ips):
        port = free_port(ips, rng, taken)
        return [Address(ip, port) for ip in ips], ""
    ports: list[int] = []
    for _ in range(count):
        ports.append(free_port(["127.0.0.1"], rng, taken | frozenset(ports)))
    word = f"this machine has no {ips[0]}: the nodes stand on 127.0.0.1 with a port each instead of one port for all"
    return [Address("127.0.0.1", port) for port in ports], word
