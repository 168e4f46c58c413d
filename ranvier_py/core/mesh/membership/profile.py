"""The timing of membership: every interval, time-out and count of SWIM and Lifeguard, and how they stretch.

Rule: LAN is twice as fast as the LAN defaults of memberlist (probe 1 s / 500 ms, mult 4): a false «dead» costs little,
since routes point to backends and outlive the peer that sent them. WAN has memberlist's WAN numbers. The formulas for
the length of a suspicion and the push-pull interval are memberlist's (suspicion.go, util.go).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log, log2, log10

HARD = 1 / 3  # share of answered probes that needed help: above, the profile is doubled. About 18 % loss each way.
EASY = 1 / 4  # below this share the profile is the plain one again. About 13 % loss each way.
MEMORY_PROBES = 64  # the mean forgets at this rate: half a minute at two probes a second


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings of membership. Durations in seconds; counts without a unit."""

    probe_interval_s: float = 0.5  # one member is probed in each
    probe_timeout_s: float = 0.2  # for the direct answer; then others are asked
    nack_after_s: float = 0.15  # a relay sends a nack early enough to arrive within the interval
    relays: int = 3  # members asked to ping on our behalf
    suspicion_mult: int = 3  # of the interval: the shortest suspicion; two fewer confirmations make it that short
    suspicion_max_mult: int = 6  # the longest suspicion, as a multiple of the shortest
    health_max: int = 7  # local health 0 … 7: interval and time-out up to 8 times as long
    gossip_interval_s: float = 0.2
    gossip_fanout: int = 3
    retransmit_mult: int = 4  # times the digits of the member count: how often an update is sent
    exchange_interval_s: float = 30.0  # between push-pulls of the whole list
    evidence_s: float = 2.0  # how long a packet from a member proves that it is alive

    def suspicion_min_s(self, members: int) -> float:
        """Return the length of the shortest suspicion in a cluster of so many members, this node included."""
        return self.suspicion_mult * max(1.0, log10(max(1, members))) * self.probe_interval_s

    def suspicion_s(self, members: int, confirmations: int) -> float:
        """Return how long a suspicion lasts that this many others have confirmed."""
        shortest = self.suspicion_min_s(members)
        wanted = self.confirmations(members)
        if wanted == 0:
            return shortest
        longest = shortest * self.suspicion_max_mult
        return max(shortest, longest - (longest - shortest) * log(confirmations + 1) / log(wanted + 1))

    def confirmations(self, members: int) -> int:
        """Return how many others must confirm a suspicion to make it shortest: 0 if there are not that many others."""
        wanted = max(0, self.suspicion_mult - 2)
        return wanted if members - 2 >= wanted else 0

    def exchange_s(self, members: int) -> float:
        """Return the time between push-pulls: longer in large clusters, where each costs more."""
        return self.exchange_interval_s * (1 if members <= 32 else ceil(log2(members) - 5) + 1)

    def doubled(self) -> Profile:
        """Return the profile for a network that loses much: twice the probe interval, twice `suspicion_mult`."""
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


class LocalHealth:
    """The score of local health, and the profile that suits the network's state (Lifeguard, arXiv 1707.00788): a node
    that is slow itself must not call others dead. The score, 0 (well) to `health_max`, multiplies interval and time-out
    by score + 1. Above a share HARD of answered probes that needed help the profile is doubled, below EASY it is the
    plain one again: 10 % loss each way makes 19 % of pings need help, which the fast profile stands; 30 % 51 %."""

    __slots__ = ("_doubled", "_plain", "helped_share", "profile", "score")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.score = 0
        self.helped_share = 0.0
        self._plain = profile
        self._doubled = profile.doubled()

    @property
    def interval_s(self) -> float:
        return self.profile.probe_interval_s * (self.score + 1)

    @property
    def timeout_s(self) -> float:
        return self.profile.probe_timeout_s * (self.score + 1)

    @property
    def strained(self) -> bool:
        """Whether the network loses so much that the profile is doubled."""
        return self.profile is self._doubled

    def better(self) -> None:
        self.score = max(0, self.score - 1)

    def worse(self, by: int = 1) -> None:
        self.score = min(self._plain.health_max, self.score + by)

    def worst(self) -> None:
        self.score = self._plain.health_max

    def answered(self, helped: bool) -> None:
        """Count an answered probe. `helped`: relays or the other path were tried before the answer came."""
        self.helped_share += (helped - self.helped_share) / MEMORY_PROBES
        if self.helped_share > HARD:
            self.profile = self._doubled
        elif self.helped_share < EASY:
            self.profile = self._plain
