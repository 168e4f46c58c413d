"""Addresses of this machine for the lab, and how they are written on a command line.

Linux answers on all of 127/8, so the nodes of a lab share one port on 127.0.0.2, 127.0.0.3, … like nodes on machines of
their own. Where that fails (macOS has only 127.0.0.1) each node gets 127.0.0.1 and its own port; so an address behind a
name may have a port, which overrides the requested one.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from random import Random

PORT_MIN, PORT_END = 20_000, 32_000
"""Ports for the lab: above the well-known services, below 32768, from where Linux numbers outgoing connections."""

PORT_TRIES_MAX = 200
"""If 200 random ports of 12,000 are taken, the machine has another problem."""


class NamesError(ValueError):
    """A name has no valid form, or the machine has no free address or port. Nothing was opened."""


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address behind a name; `port` 0 means the port that the client asks for."""

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


def can_bind(ip: str, port: int = 0) -> bool:
    """Whether a server could listen on this address just now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((ip, port))
        except OSError:
            return False
    return True


def free_port(ips: Sequence[str], rng: Random, taken: frozenset[int] = frozenset()) -> int:
    """Return a port below 32768 that is free on all `ips`. Another process may still take it before it is used.

    Raises NamesError.
    """
    for _ in range(PORT_TRIES_MAX):
        port = rng.randrange(PORT_MIN, PORT_END)
        if port not in taken and all(can_bind(ip, port) for ip in ips):
            return port
    raise NamesError(f"no free port between {PORT_MIN} and {PORT_END} on {', '.join(ips)}")


def node_addresses(count: int, rng: Random, taken: frozenset[int] = frozenset()) -> tuple[list[Address], str]:
    """Return addresses for `count` nodes behind one name, and a notice for when they don't share a port, else ""."""
    ips = [f"127.0.0.{2 + index}" for index in range(count)]
    if all(can_bind(ip) for ip in ips):
        port = free_port(ips, rng, taken)
        return [Address(ip, port) for ip in ips], ""
    ports: list[int] = []
    for _ in range(count):
        ports.append(free_port(["127.0.0.1"], rng, taken | frozenset(ports)))
    word = f"this machine has no {ips[0]}: the nodes stand on 127.0.0.1 with a port each instead of one port for all"
    return [Address("127.0.0.1", port) for port in ports], word
