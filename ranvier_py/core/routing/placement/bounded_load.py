"""`bounded_load`: what Ranvier ships as its default, to show what it costs.

Rule: the preferred backend is the deepest holder, or for a prefix that nobody holds the one that jump hash names. A
backend takes the request while its load is below cap = max(1, ceil((1 + `bounded_load_epsilon` 0.25) x mean load)).
Else the next probe is tried, jump hash of the key + 0, 1, 2 …, as many as there are backends; else the least loaded.
The cap is applied to holders too, and that is what it costs: with few requests in flight it is 1 or 2, so that two
concurrent requests behind one prefix already part. `affinity` has the other rule of the same router.

Source: ranvier-core 2.1.0 (its document, «When your load balancer learns», has twice the median instead); jump
consistent hash is Lamping and Veach, arXiv 1406.2294. Backends are counted in the order of their names, so that peers
agree; a lost one moves other keys too, as there (rendezvous.py does not). What differs: who served is learned, not who
was preferred, so a diverted prefix has several holders, of whom the one with the freshest evidence is preferred; the
key is the first boundary's fingerprint, not a hash of 128 tokens; a request without a prefix goes to the least loaded,
not to the first; caps are shared out by weight, which there is ignored. Left out: load_aware_routing = false (the same
as `load_aware` of affinity); gauges of the GPU (no Candidate has them).

Reasons: hit, hit_probed, cold, cold_probed, least_loaded, no_prefix. Cost: O(candidates); a probe adds O(log n).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

from ranvier_py.core.ids import UNKNOWN
from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement import Candidate, Choice, Match
from ranvier_py.core.routing.placement.affinity import position_of
from ranvier_py.core.routing.placement.baselines import held_tokens, least_loaded, relative_loads

MASK = 2**64 - 1
MULTIPLIER = 2862933555777941757  # the paper's linear congruential generator
DUST = 1e-9  # a cap that is whole but for rounding is whole


@dataclass(frozen=True, slots=True)
class BoundedLoadOptions(Options):
    bounded_load_epsilon: float = option(
        0.25, "share above the mean load from which a backend takes no more", least=0.01, most=10.0
    )


class BoundedLoad:
    """State: none."""

    __slots__ = ("epsilon",)

    name = "bounded_load"
    depths_wanted = 1

    def __init__(self, options: BoundedLoadOptions | None = None) -> None:
        self.epsilon = (options or BoundedLoadOptions()).bounded_load_epsilon

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        if match.home == UNKNOWN and not match.holders:
            chosen = candidates[rng.choice(least_loaded(relative_loads(candidates)))]
            return Choice(chosen.id, "no_prefix", 0)
        share = mean_share(candidates, self.epsilon)
        kind = "cold"
        if match.holders:
            kind = "hit"
            holder = candidates[position_of(match.holders[0].backend, candidates)]
            if holder.load < cap_of(share, holder.weight):
                return Choice(holder.id, kind, match.holders[0].tokens)
        ordered = sorted(candidates, key=name_of)
        for probe in range(len(ordered)):
            candidate = ordered[jump_hash(match.home + probe, len(ordered))]
            if candidate.load < cap_of(share, candidate.weight):
                reason = "cold" if kind == "cold" and probe == 0 else f"{kind}_probed"
                return Choice(candidate.id, reason, held_tokens(match, candidate))
        chosen = candidates[rng.choice(least_loaded(relative_loads(candidates)))]
        return Choice(chosen.id, "least_loaded", held_tokens(match, chosen))


def mean_share(candidates: Sequence[Candidate], epsilon: float) -> float:
    """Requests that a backend of weight 1 may have, before rounding up."""
    return sum([one.load for one in candidates]) / sum([one.weight for one in candidates]) * (1.0 + epsilon)


def cap_of(share: float, weight: float) -> int:
    """The load at which a backend of this weight takes no more. An idle one always does."""
    return max(1, ceil(share * weight - DUST))


def name_of(candidate: Candidate) -> str:
    return candidate.name


def jump_hash(key: int, buckets: int) -> int:
    """The bucket of a key: from `buckets` to one more, only the keys that go to the new one move."""
    state, bucket, following = key & MASK, -1, 0
    while following < buckets:
        bucket = following
        state = (state * MULTIPLIER + 1) & MASK
        following = int((bucket + 1) * (2**31 / ((state >> 33) + 1)))
    return bucket
