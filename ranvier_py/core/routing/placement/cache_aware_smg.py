"""`cache_aware_smg`: the rule of SMG, the successor of SGLang's router: holders below a load gate, then expected wait.

Rule: if enough of the prompt is matched, the deepest holder below the gate (`spills`) with the least expected wait; if
none is below it, any backend that is. Without such a match the least wait of all. The cached part of this prompt is in
no wait: affinity and load are compared one after the other. Source: SMG 1.13.0, approximate modes (what every HTTP
worker gets), with matches of the route table and this node's counts. Left out: KV usage (no Candidate has that gauge),
overload protection (health and circuits come first) and event mode (it needs gRPC workers). Cost: O(candidates).
Reasons: match, spill, expected_wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from random import Random

from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement import Candidate, Choice, Match, Policy
from ranvier_py.core.routing.placement.affinity import deepest_of, positions_of
from ranvier_py.core.routing.placement.baselines import held_tokens, least_loaded, mean_load
from ranvier_py.core.routing.placement.cache_aware import CACHE_THRESHOLD_MEANING


@dataclass(frozen=True, slots=True)
class CacheAwareSmgOptions(Options):
    """The defaults are SMG's; of the names only the first is."""

    cache_threshold: float = option(0.3, CACHE_THRESHOLD_MEANING, most=1.0)
    holders_max: int = option(8, "holders of the deepest match that are looked at", least=1, most=4096)
    spill_factor: float = option(1.5, "times its share of the load that a backend may bear", least=1.0)
    spill_margin_min: int = option(4, "requests above its share that it may always bear", most=1_000_000)
    spill_margin_max: int = option(64, "requests above its share that it may bear at most", most=1_000_000)
    decode_cost_tokens: float = option(1024.0, "tokens of prefill that a decoding request counts as")
    prefill_tokens_per_s: float = option(2000.0, "prefill of a backend of weight 1", least=1.0)

    def contradictions(self) -> list[str]:
        if self.spill_margin_min <= self.spill_margin_max:
            return []
        return [f"spill_margin_min: must be at most spill_margin_max ({self.spill_margin_max})"]


class CacheAwareSmg(Policy):
    name = "cache_aware_smg"

    def __init__(self, options: CacheAwareSmgOptions | None = None) -> None:
        self.options = options or CacheAwareSmgOptions()

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        reason, among = "expected_wait", list(candidates)
        if match.holders and match.holders[0].tokens > self.options.cache_threshold * match.prompt_tokens:
            per_weight = mean_load(candidates)
            holders = positions_of(deepest_of(match.holders)[: self.options.holders_max], candidates)
            safe = [candidates[position] for position in holders if not self.spills(candidates[position], per_weight)]
            reason = "match" if safe else "spill"
            among = safe or [one for one in candidates if not self.spills(one, per_weight)] or among
        if len(among) == 1:
            return Choice(among[0].id, reason, held_tokens(match.holders, among[0]))
        chosen = among[rng.choice(least_loaded([self.wait_s(one) for one in among]))]
        return Choice(chosen.id, reason, held_tokens(match.holders, chosen))

    def spills(self, candidate: Candidate, per_weight: float) -> bool:
        """Whether this backend is over the gate. Rounding apart, one always bears at most its share, and is not."""
        share = per_weight * candidate.weight
        return candidate.load > self.options.spill_factor * share and candidate.load > share + self.margin(share)

    def margin(self, share: float) -> int:
        """Return how many requests above its share of the load a backend may bear: the swing of a Poisson count."""
        return min(self.options.spill_margin_max, max(self.options.spill_margin_min, ceil(2 * sqrt(share))))

    def wait_s(self, candidate: Candidate) -> float:
        """Return the expected seconds until it is the turn of a request that comes now."""
        tokens = candidate.work.pending_tokens + candidate.work.decoding * self.options.decode_cost_tokens
        return tokens / (self.options.prefill_tokens_per_s * candidate.weight)

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        per_weight = mean_load(candidates)
        return [
            {
                "held_tokens": held_tokens(match.holders, one),
                "expected_wait_s": self.wait_s(one),
                "load_requests": one.load,
                "fair_load_requests": per_weight * one.weight,
                "spill_margin_requests": self.margin(per_weight * one.weight),
            }
            for one in candidates
        ]
