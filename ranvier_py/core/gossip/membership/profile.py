"""How fast membership works: every interval, time-out and count of SWIM and Lifeguard, for a LAN and for a WAN.

LAN is twice as fast as the LAN defaults of memberlist (probe 1 s / 500 ms, mult 4): a false «dead» costs a node little,
because routes point to backends and outlive the peer that taught them. WAN has memberlist's WAN numbers as they are.
Health multiplies interval and time-out by up to 8 (Lifeguard, arXiv 1707.00788); a network that loses much doubles
interval and mult (`doubled`). Formulas of suspicion and of push-pull are memberlist's (suspicion.go, util.go).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log, log2, log10


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings of membership. Durations in seconds; counts without a unit."""

    probe_interval_s: float = 0.5  # one member is probed in each
    probe_timeout_s: float = 0.2  # for the direct answer; then others are asked
    nack_after_s: float = 0.15  # a relay says «not yet» early enough to be heard within the interval
    relays: int = 3  # asked to ping in our name
    suspicion_mult: int = 3  # of the interval: the shortest suspicion; two fewer confirmations make it that short
    suspicion_max_mult: int = 6  # the longest suspicion, as a multiple of the shortest
    health_max: int = 7  # local health 0 … 7: interval and time-out up to 8 times as long
    gossip_interval_s: float = 0.2
    gossip_fanout: int = 3
    retransmit_mult: int = 4  # times the digits of the member count: how often an update is sent
    exchange_interval_s: float = 30.0  # between push-pulls of the whole list
    evidence_s: float = 2.0  # a packet from a member speaks for its life so long

    def suspicion_min_s(self, members: int) -> float:
        """The shortest suspicion in a cluster of so many members, this node included."""
        return self.suspicion_mult * max(1.0, log10(max(1, members))) * self.probe_interval_s

    def suspicion_s(self, members: int, confirmations: int) -> float:
        """How long a suspicion lasts that so many others share."""
        shortest = self.suspicion_min_s(members)
        wanted = self.confirmations(members)
        if wanted == 0:
            return shortest
        longest = shortest * self.suspicion_max_mult
        return max(shortest, longest - (longest - shortest) * log(confirmations + 1) / log(wanted + 1))

    def confirmations(self, members: int) -> int:
        """How many others must share a suspicion to make it shortest: none when there are not that many others."""
        wanted = max(0, self.suspicion_mult - 2)
        return wanted if members - 2 >= wanted else 0

    def exchange_s(self, members: int) -> float:
        """Time between push-pulls: longer in large clusters, where each costs more."""
        return self.exchange_interval_s * (1 if members <= 32 else ceil(log2(members) - 5) + 1)

    def doubled(self) -> Profile:
        """For a network that loses much: half as eager to probe, twice as slow to believe."""
        return replace(self, probe_interval_s=2 * self.probe_interval_s, suspicion_mult=2 * self.suspicion_mult)


LAN = Profile()

WAN = Profile(
    probe_interval_s=5.0,
    probe_timeout_s=3.0,
    nack_after_s=1.2,
    suspicion_mult=6,
    gossip_interval_s=0.5,
    gossip_fanout=4,
    exchange_interval_s=60.0,
    evidence_s=20.0,  # four probe intervals, as in the LAN
)
