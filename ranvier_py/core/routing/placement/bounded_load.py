"""`bounded_load`: Ranvier's default policy, here to show what it costs.

Rule: the deepest holder, or the backend that jump hash names for a cold prefix, serves below its cap (`cap_of`); else
the first below it of as many probes as there are backends; then the least loaded. The cap applies to holders as well:
with few requests in flight it is 1 or 2, so that two concurrent requests behind one prefix already go apart.
Source: ranvier-core 2.1.0; Lamping and Veach, arXiv 1406.2294. Other than there, the table learns who served, the key
is the first boundary's fingerprint, and a request without a prefix goes to the least loaded. Cost: O(candidates).
Reasons: hit, hit_probed, cold, cold_probed, least_loaded, no_prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

from ranvier_py.core.ids import UNKNOWN
from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement import Candidate, Choice, Match, Policy
from ranvier_py.core.routing.placement.affinity import position_of
from ranvier_py.core.routing.placement.baselines import draw_least_loaded, held_tokens, mean_load

MASK = 2**64 - 1
MULTIPLIER = 2862933555777941757  # the paper's linear congruential generator
DUST = 1e-9  # taken off before rounding up: a cap that is whole but for rounding errors stays whole


@dataclass(frozen=True, slots=True)
class BoundedLoadOptions(Options):
    bounded_load_epsilon: float = option(
        0.25, "share above the mean load from which a backend takes no more", least=0.01, most=10.0
    )


class BoundedLoad(Policy):
    name = "bounded_load"

    def __init__(self, options: BoundedLoadOptions | None = None) -> None:
        self.epsilon = (options or BoundedLoadOptions()).bounded_load_epsilon

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        if match.home == UNKNOWN and not match.holders:
            return draw_least_loaded(match, candidates, rng, "no_prefix")
        share = mean_load(candidates) * (1.0 + self.epsilon)
        kind = "cold"
        if match.holders:
            kind = "hit"
            holder = candidates[position_of(match.holders[0].backend, candidates)]
            if holder.load < cap_of(share, holder.weight):
                return Choice(holder.id, kind, match.holders[0].tokens)
        # numbered by name, so that peers agree; a lost backend moves other keys, too
        ordered = sorted(candidates, key=lambda one: one.name)
        for probe in range(len(ordered)):
            candidate = ordered[jump_hash(match.home + probe, len(ordered))]
            if candidate.load < cap_of(share, candidate.weight):
                reason = "cold" if kind == "cold" and probe == 0 else f"{kind}_probed"
                return Choice(candidate.id, reason, held_tokens(match.holders, candidate))
        return draw_least_loaded(match, candidates, rng, "least_loaded")


def cap_of(share: float, weight: float) -> int:
    """Return the load at which a backend of this weight, which ranvier-core ignores, is full, if one of weight 1 may
    have `share`; at least 1."""
    return max(1, ceil(share * weight - DUST))


def jump_hash(key: int, buckets: int) -> int:
    """Return the bucket of a key. One bucket more moves only the keys that go to the new bucket."""
    state, bucket, following = key & MASK, -1, 0
    while following < buckets:
        bucket = following
        state = (state * MULTIPLIER + 1) & MASK
        following = int((bucket + 1) * (2**31 / ((state >> 33) + 1)))
    return bucket
