"""Conditions of links, each for one direction, the rules that impose them, and the fate of single datagrams.

The simulator's network and the relay between real processes share this. Addresses are anything that can be hashed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from math import log
from random import Random
from typing import Any, NamedTuple

from ranvier_py.core.mesh.mesh_values import Plane

PAIRS_CACHED_MAX = 200_000
"""Pairs of addresses whose conditions are cached until the rules change."""

UDP, TCP = frozenset((Plane.DATAGRAM,)), frozenset(Plane) - {Plane.DATAGRAM}
PLANES = {"udp": UDP, "tcp": TCP}
RETRANSMIT_S, RETRANSMIT_DOUBLINGS_MAX = 0.2, 5
"""The least time-out of Linux; it doubles with each loss."""


class Link(NamedTuple):
    """Conditions in one direction. Shares are 0 … 1. Duplicates, disorder and corruption concern datagrams alone; loss
    of a part makes a stream late.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0  # mean of the exponential part
    tail: float = 0.0  # share of packets that wait in some queue
    tail_s: float = 0.0  # mean of that wait
    duplicate: float = 0.0
    reorder: float = 0.0  # share of datagrams held back, for `reorder_s` on average
    reorder_s: float = 0.0
    corrupt: float = 0.0  # share of datagrams with one bit turned over
    mtu: int = 65_507  # longer datagrams vanish
    cut: bool = False
    refuse: bool = False  # of a cut: the sender gets an error at once

    def worse(self, other: Link) -> Link:
        """Return both sets of conditions combined."""
        return Link(
            loss=1 - (1 - self.loss) * (1 - other.loss),
            delay_s=self.delay_s + other.delay_s,
            jitter_s=self.jitter_s + other.jitter_s,
            tail=max(self.tail, other.tail),
            tail_s=max(self.tail_s, other.tail_s),
            duplicate=max(self.duplicate, other.duplicate),
            reorder=max(self.reorder, other.reorder),
            reorder_s=max(self.reorder_s, other.reorder_s),
            corrupt=max(self.corrupt, other.corrupt),
            mtu=min(self.mtu, other.mtu),
            cut=self.cut or other.cut,
            refuse=self.refuse or other.refuse,
        )

    def draw_delay_s(self, rng: Random) -> float:
        """Draw how long one packet takes."""
        delay = self.delay_s - log(1.0 - rng.random()) * self.jitter_s  # an exponential draw
        if self.tail and rng.random() < self.tail:
            delay += rng.expovariate(1.0) * self.tail_s
        return delay

    def draw_stream_delay_s(self, rng: Random) -> float:
        """Draw how long one piece of a stream takes, with retransmissions of lost parts."""
        delay, losses = self.draw_delay_s(rng), 0
        while self.loss and losses < RETRANSMIT_DOUBLINGS_MAX and rng.random() < self.loss:
            delay += RETRANSMIT_S * 2**losses
            losses += 1
        return delay

    def draw_copies(self, data: Any, rng: Random) -> tuple[str, list[tuple[float, Any]]]:
        """Draw a datagram's fate in a word ("" if nothing happens), and (delay, data) of each copy that arrives."""
        if self.cut:
            return "cut", []
        if self.loss and rng.random() < self.loss:
            return "lost", []
        if len(data) > self.mtu:
            return "oversize", []
        what = ""
        if self.corrupt and rng.random() < self.corrupt:
            what, data = "corrupted", flipped(data, rng)
        delay = self.draw_delay_s(rng)
        if self.reorder and rng.random() < self.reorder:
            delay += rng.random() * 2 * self.reorder_s
        copies = [(delay, data)]
        if self.duplicate and rng.random() < self.duplicate:
            what = "doubled"
            copies.append((delay + self.draw_delay_s(rng), data))
        return what, copies


PERFECT = Link()
"""A link without faults or delay."""

DATA_CENTRE = Link(delay_s=0.0002, jitter_s=0.0002, tail=0.001, tail_s=0.02)
CUT = Link(cut=True)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Conditions between these addresses on these planes."""

    sources: Collection[Hashable]
    targets: Collection[Hashable]
    link: Link
    one_direction: bool = False
    planes: frozenset[Plane] = frozenset(Plane)

    def concerns(self, source: Hashable, target: Hashable, plane: Plane) -> bool:
        if plane not in self.planes:
            return False
        there = source in self.sources and target in self.targets
        return there or (not self.one_direction and target in self.sources and source in self.targets)


class Links:
    """The rules in force, and the conditions without rules."""

    def __init__(self, base: Link = PERFECT) -> None:
        self.base = base
        self.rules: list[Rule] = []
        self.protected: Collection[Hashable] = frozenset()  # addresses between which no rule holds
        self._cache: dict[tuple[Hashable, Hashable, Plane], Link] = {}

    def add(self, rule: Rule) -> Rule:
        self.rules.append(rule)
        self._cache.clear()
        return rule

    def remove(self, rule: Rule) -> None:
        """End a rule, whether it is in force or not."""
        self.rules = [one for one in self.rules if one is not rule]
        self._cache.clear()

    def heal(self) -> None:
        """End every rule."""
        self.rules.clear()
        self._cache.clear()

    def protect(self, core: Collection[Hashable]) -> None:
        """Let no rule hold between these addresses from now on."""
        self.protected = frozenset(core)
        self._cache.clear()

    def link(self, source: Hashable, target: Hashable, plane: Plane) -> Link:
        """Return the current conditions from one address to the other."""
        if not self.rules:
            return self.base
        key = (source, target, plane)
        link = self._cache.get(key)
        if link is None:
            link = self.base
            if not (source in self.protected and target in self.protected):
                for rule in self.rules:
                    if rule.concerns(source, target, plane):
                        link = link.worse(rule.link)
            if len(self._cache) >= PAIRS_CACHED_MAX:
                self._cache.clear()
            self._cache[key] = link
        return link


def flipped(data: Any, rng: Random) -> Any:
    """Return bytes with one bit flipped; anything else unchanged."""
    if not data or not isinstance(data, bytes):
        return data
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)
