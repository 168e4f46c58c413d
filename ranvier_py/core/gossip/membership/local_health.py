"""How well this node itself is: when it is slow, it must not call others dead.

The score goes from 0 (well) to `health_max`; probe interval and time-out are multiplied by score + 1 (Lifeguard). It
falls by one with each answered probe and rises with what points to ourselves: a probe that failed although relays were
asked and stayed silent too, a suspicion of ourselves that we had to refute, a tick that came late.

The same object measures the network: of the answered probes, the share that needed help (a relay or the stream).
Above HARD it doubles the profile, below EASY it goes back. 10 % loss each way makes 19 % of pings need help, which the
fast profile stands; 30 % makes 51 %, where every SWIM flaps. So HARD lies between them, far enough from both for a mean
over some 64 probes. Cost: O(1) for each call.
"""

from __future__ import annotations

from ranvier_py.core.gossip.membership.profile import Profile

HARD = 1 / 3
"""Share of answered probes that needed help: above, the profile is doubled. About 18 % loss each way."""

EASY = 1 / 4
"""Below this share the profile is the plain one again. About 13 % loss each way."""

MEMORY_PROBES = 64
"""The mean forgets at this pace: half a minute at two probes a second."""


class LocalHealth:
    """The score, and the profile that goes with the network's state."""

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
        """A probe was answered, with help or without."""
        self.helped_share += (helped - self.helped_share) / MEMORY_PROBES
        if self.helped_share > HARD:
            self.profile = self._doubled
        elif self.helped_share < EASY:
            self.profile = self._plain
