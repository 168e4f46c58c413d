"""Somebody on the wire who has no key: replays what it overheard, sends it to the wrong node, forges and scribbles.

Nothing of this may change what a node believes (S2, S8 and S10 would show it), may raise (S9), or make a node answer a
stranger with more bytes than the stranger sent. What never arrived is no replay: to deliver it late is to be a slow
wire, and S5 is told how slow (`held_back_s`). Bound: the last OVERHEARD_MAX packets.
"""

from __future__ import annotations

from collections import deque
from random import Random

from cluster.simulation.invariants import Invariants
from cluster.simulation.sim_net import SimNet, flipped
from ranvier_py.core.gossip.gossip_values import Address, Plane

OVERHEARD_MAX = 512
STRANGER: Address = ("192.0.2.66", 6666)
"""An address that no node has (TEST-NET-1, RFC 5737)."""


class Attacker:
    """Listens to `net` and injects into it."""

    def __init__(self, net: SimNet, rng: Random, invariants: Invariants) -> None:
        self.net = net
        self.rng = rng
        self.invariants = invariants
        self.heard: deque[tuple[int, int, Plane, bytes, float]] = deque(maxlen=OVERHEARD_MAX)
        self._cut_at: dict[tuple[int, int], float] = {}  # when a way was last seen cut
        self.sent_bytes = 0
        self.answered_bytes = 0
        self.longest = 0
        self.packets = 0
        net.overheard = self.overhear

    def overhear(self, source: int, to: Address, plane: Plane, data: bytes) -> None:
        if to == STRANGER:
            self.answered_bytes += len(data)
            if len(data) > self.longest or self.answered_bytes > self.sent_bytes:
                self.invariants.fail("S8", (source,), f"answers a stranger's {self.longest} bytes with {len(data)}")
            return
        target = self.net.numbers.get(to, -1)
        if target < 0:
            return
        now = self.net.heap.now
        if self.net.link(source, target, plane).cut:
            self._cut_at[source, target] = now
        if self.rng.random() < 0.2:
            self.heard.append((source, target, plane, data, now))

    def strike(self, number: int) -> None:
        """One packet for one node."""
        rng, self.packets = self.rng, self.packets + 1
        data, source, plane = rng.randbytes(rng.randrange(0, 1200)), STRANGER, Plane.DATAGRAM
        if self.heard:
            sender, target, plane, packet, sent_at = rng.choice(self.heard)
            kind = rng.randrange(5)
            if kind == 0:  # the same again, from where it came, to whom it went
                if self._cut_at.get((sender, target), -1.0) >= sent_at:
                    self.invariants.held_back(self.net.heap.now - sent_at)
                self.net.inject(target, self.net.addresses[sender], plane, packet)
                return
            if kind == 1:  # to somebody else
                self.net.inject(number, self.net.addresses[sender], plane, packet)
                return
            if kind == 2:  # as one's own
                data = packet
            elif kind == 3:
                data = flipped(packet, rng)
            else:
                data = packet[: rng.randrange(len(packet) + 1)]
        self.sent_bytes += len(data)
        self.longest = max(self.longest, len(data))
        self.net.inject(number, source, plane, data)
