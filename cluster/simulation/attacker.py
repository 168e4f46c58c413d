"""An attacker on the network without a key: it replays recorded packets, misdirects them, forges and damages them.

Its packets must neither change what a node believes (S2, S8 and S10 would show it), nor make it raise (S9), nor make it
answer a stranger with more bytes than the stranger sent. A packet that a cut kept from its receiver is not replayed but
delivered late, which S5 has to allow (`held_back_s`). Bound: the last RECORDED_MAX packets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

from cluster.network.fake_network import Network
from cluster.network.links import flipped
from cluster.simulation.invariants import Invariants
from ranvier_py.core.mesh.mesh_values import Address, Plane

RECORDED_MAX = 512
OUTSIDER: Address = ("192.0.2.66", 6666)
"""An address that no node has (TEST-NET-1, RFC 5737)."""


class Attacker:
    """Records packets of `net` and injects others. `addresses` are those of the nodes, by number."""

    def __init__(self, net: Network, addresses: Sequence[Address], rng: Random, invariants: Invariants) -> None:
        self.net = net
        self.addresses = addresses
        self.rng = rng
        self.invariants = invariants
        self.recorded: deque[tuple[Address, Address, Plane, bytes, float]] = deque(maxlen=RECORDED_MAX)
        self.sent_bytes = 0
        self.answered_bytes = 0
        self.longest = 0
        self._known = dict.fromkeys(addresses)
        self._cut_at: dict[tuple[Address, Address], float] = {}  # when a link was last seen cut
        net.tap = self.record

    def record(self, source: Address, target: Address, plane: Plane, data: bytes) -> None:
        if target == OUTSIDER:
            self.answered_bytes += len(data)
            if len(data) > self.longest or self.answered_bytes > self.sent_bytes:
                text = f"answers a stranger's {self.longest} bytes with {len(data)}"
                self.invariants.fail("S8", (self.addresses.index(source),), text)
        elif target in self._known:
            if self.net.links.link(source, target, plane).cut:
                self._cut_at[source, target] = self.net.time.now
            if self.rng.random() < 0.2:
                self.recorded.append((source, target, plane, data, self.net.time.now))

    def strike(self, number: int) -> None:
        """Send one packet to a node."""
        rng, victim = self.rng, self.addresses[number]
        data, plane = rng.randbytes(rng.randrange(0, 1200)), Plane.DATAGRAM
        if self.recorded:
            sender, target, plane, packet, sent_at = rng.choice(self.recorded)
            kind = rng.randrange(5)
            if kind == 0:  # the same packet, from the same sender to the same receiver
                if self._cut_at.get((sender, target), -1.0) >= sent_at:
                    self.invariants.held_back(self.net.time.now - sent_at)
                self.net.inject(target, sender, plane, packet)
                return
            if kind == 1:  # to another node
                self.net.inject(victim, sender, plane, packet)
                return
            if kind == 2:  # from the attacker's own address
                data = packet
            elif kind == 3:
                data = flipped(packet, rng)
            else:
                data = packet[: rng.randrange(len(packet) + 1)]
        self.sent_bytes += len(data)
        self.longest = max(self.longest, len(data))
        self.net.inject(victim, OUTSIDER, plane, data)
