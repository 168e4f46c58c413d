"""Which fingerprint of ours a prefix hash of the report stands for: what joins a worker's keys to the route table.

A hash can't be turned into another, so both are noted when a prompt's tokens are at hand (`push_keys.KeyHasher`). One
key stands for several fingerprints where equal tokens were asked of several models. Pure.

Bounds: `links_max` fingerprints; the one that was linked longest ago goes first, and is counted: what a worker says of
its key from then on does not reach the claims that are there, which end by their time to live.
Cost: 1 us; some 300 bytes for each link.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from ranvier_py.core.ids import Fingerprint

LINKS_MAX = 262_144


class Link(NamedTuple):
    key: int
    fingerprint: Fingerprint
    tokens: int  # depth of the fingerprint
    model: str


class Links:
    """Keys and fingerprints, both ways."""

    def __init__(self, links_max: int = LINKS_MAX) -> None:
        self._links_max = links_max
        self._by_key: dict[int, dict[Fingerprint, Link]] = {}
        self._by_print: dict[Fingerprint, dict[int, Link]] = {}  # oldest first
        self.count = 0
        self.forgotten = 0

    def add(self, link: Link) -> None:
        """Two keys of one fingerprint: of 64 tokens and of 70, which stand at one anchor."""
        links = self._by_print.pop(link.fingerprint, {})
        self.count += link.key not in links
        links[link.key] = link
        self._by_print[link.fingerprint] = links  # the newest now
        self._by_key.setdefault(link.key, {})[link.fingerprint] = link
        while self.count > self._links_max:
            self._forget(next(iter(self._by_print)))

    def of_key(self, key: int, model: str = "") -> list[Link]:
        """What this key stands for, in one model or in any."""
        found = self._by_key.get(key)
        return [link for link in found.values() if model in ("", link.model)] if found else []

    def of_fingerprint(self, fingerprint: Fingerprint) -> Sequence[Link]:
        found = self._by_print.get(fingerprint)
        return tuple(found.values()) if found else ()

    def part(self, start: int, most: int) -> list[Link]:
        """Links of so many fingerprints from this place on, oldest first; none: that was all."""
        return [link for links in islice(self._by_print.values(), start, start + most) for link in links.values()]

    def _forget(self, fingerprint: Fingerprint) -> None:
        links = self._by_print.pop(fingerprint)
        self.forgotten += len(links)
        self.count -= len(links)
        for key in links:
            prints = self._by_key[key]
            del prints[fingerprint]
            if not prints:
                del self._by_key[key]
