"""`cache_aware`: the rule of SGLang's router in its last release, thresholds for load and for the match.

Rule: if loads lie far apart, the least loaded backend; else, if enough of the prompt is matched, its deepest holder;
else the least loaded one. Source: Byron Hsu, «Cache-aware load balancer in SGLang», in the form of sglang-router
0.3.2; its successor is cache_aware_smg.py. What differs: matches come from the route table, not from a tree of
characters, so they count tokens in whole blocks and end with a restart, a failure or their time to live. Loads are per
unit of weight.
Reasons: imbalance, match, least_loaded. Cost: O(candidates), for the spread of the loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement import Candidate, Choice, Match, Policy
from ranvier_py.core.routing.placement.baselines import held_tokens, relative_loads

CACHE_THRESHOLD_MEANING = "share of the prompt above which a match is followed"


@dataclass(frozen=True, slots=True)
class CacheAwareOptions(Options):
    """The names and defaults are sglang-router's."""

    cache_threshold: float = option(0.3, CACHE_THRESHOLD_MEANING, most=1.0)
    balance_abs_threshold: float = option(64.0, "requests between greatest and least load above which load decides")
    balance_rel_threshold: float = option(1.5, "and times the least load that the greatest must exceed", least=1.0)


class CacheAware(Policy):
    name = "cache_aware"

    def __init__(self, options: CacheAwareOptions | None = None) -> None:
        self.options = options or CacheAwareOptions()

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:  # noqa: ARG002
        loads = relative_loads(candidates)
        least, greatest = min(loads), max(loads)
        reason = "least_loaded"
        options = self.options
        if greatest - least > options.balance_abs_threshold and greatest > options.balance_rel_threshold * least:
            reason = "imbalance"
        elif match.holders:
            deepest = match.holders[0]
            if deepest.tokens > options.cache_threshold * match.prompt_tokens:
                # SGLang takes any of several deepest holders; here the one of most trust, then evidence, is first
                return Choice(deepest.backend, "match", deepest.tokens)
        # of equally loaded ones the first, so new prompts at an idle cluster all go to one backend, as there
        chosen = candidates[loads.index(least)]
        return Choice(chosen.id, reason, held_tokens(match.holders, chosen))
