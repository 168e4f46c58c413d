"""The addresses that a backend's host name has had, and what a new answer of the resolver means."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import ip_address

SHOWN_MAX = 8  # addresses of one name in the log and the status; a few show what kind of name it is


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
