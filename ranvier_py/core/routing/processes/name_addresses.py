"""The addresses that a backend's host name has had, and whether two URLs lead to one place: by port, rank, addresses.

Invariant: a backend is added whole or not, and to a place of its own (test_adding_backends.py, test_places_taken.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from ranvier_py.core.addresses import DEFAULT_PORTS, is_address
from ranvier_py.core.routing.processes.ranks import rank_of

SHOWN_MAX = 8  # addresses of one name in the log and the status; a few show what kind of name it is

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a connection to «any address» leads  # noqa: S104


@dataclass(slots=True)
class NameAddresses:
    """Those of one name; empty until the first answer. A resolver that fails changes nothing."""

    addresses: frozenset[str] = frozenset()

    def answered(self, found: Iterable[str]) -> bool:
        """Take an answer. Returns whether the name has moved: it has none of the addresses of before."""
        before, self.addresses = self.addresses, frozenset(found) or self.addresses
        return bool(before) and before.isdisjoint(self.addresses)

    @property
    def hosts(self) -> int:
        """How many machines or processes the name surely stands for: one may have an address of each family."""
        versions = [ip_address(address).version for address in self.addresses]
        return max(versions.count(4), versions.count(6))


def in_short(addresses: Collection[str]) -> str:
    """Return addresses for the log, sorted; of many the first."""
    shown = sorted(addresses)[:SHOWN_MAX]
    more = len(addresses) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def may_share_a_place(url: str, other: str) -> bool:
    """Whether two backends' URLs lead to one place if their hosts have the same addresses.

    Behind the ports of HTTP and HTTPS one address may serve many names: there two names are two places.
    """
    (host, port), (other_host, other_port) = host_and_port(url), host_and_port(other)
    by_name = port in DEFAULT_PORTS.values() and not is_address(host) and not is_address(other_host)
    return port == other_port and rank_of(url) == rank_of(other) and (host == other_host or not by_name)


def have_same_addresses(addresses: Iterable[str], others: Iterable[str]) -> bool:
    """Whether two hosts are one: in a family that both have, they have the same addresses, and they share a family."""
    found, other = by_family(addresses), by_family(others)
    common = found.keys() & other.keys()
    return bool(common) and all(found[family] == other[family] for family in common)


def by_family(addresses: Iterable[str]) -> dict[int, set[str]]:
    """Return addresses as they are connected to, by the version of IP."""
    families: dict[int, set[str]] = {}
    for text in addresses:
        address = ip_address(LOOPBACK.get(text, text))
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        families.setdefault((mapped or address).version, set()).add(str(mapped or address))
    return families


def host_and_port(url: str) -> tuple[str, int]:
    """Return the host and the port of a backend's URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
