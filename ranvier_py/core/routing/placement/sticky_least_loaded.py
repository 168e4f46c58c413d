"""`sticky_least_loaded`: stay with a backend that holds the prompt's beginning, else the least loaded one (Purdue).

Rule: of the backends that hold the first `prefix_tokens` of the prompt, or all of a shorter one, the least loaded
serves, even if others are idler; ties: the deepest. Without such a hit the least loaded of all, ties drawn.
Source: Pandey, Kumar, Khanolkar, Avula, «Stateful cache-aware routing», Purdue 2025. A hit is a match of the route
table instead of the paper's `prefix_hash`: a short prompt also matches what continues it, model, adapter and tokenizer
count, and where tokens are unknown, depths are estimates, and the beginning of a long first message is no match.
Reasons: hit, miss, limited. Cost: O(candidates) for a miss, O(holders) for a hit; the match lists every holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.fingerprint import anchor_at
from ranvier_py.core.routing.placement import ALL_HOLDERS, Candidate, Choice, Match, Policy
from ranvier_py.core.routing.placement.affinity import median_of_all, positions_of
from ranvier_py.core.routing.placement.baselines import draw_least_loaded, held_tokens, relative_loads


@dataclass(frozen=True, slots=True)
class StickyLeastLoadedOptions(Options):
    """What the paper lacks: a limit, since one hot prompt would load one backend; and `multi_depth`, since all prompts
    behind one chat template have one key."""

    prefix_tokens: int = option(64, "tokens of the beginning that a hit needs", least=1, most=1_000_000)
    multi_depth: bool = option(False, "of those that hold so much, only the deepest; false: all of them")
    sticky_limit_factor: float = option(0.0, "times the median above which nobody hits; 0: no limit", most=1000.0)
    sticky_limit_floor: int = option(2, "requests above that limit that are borne all the same", most=1_000_000)


class StickyLeastLoaded(Policy):
    name = "sticky_least_loaded"
    depths_wanted = ALL_HOLDERS
    wants_prefix = True

    def __init__(self, options: StickyLeastLoadedOptions | None = None) -> None:
        self.options = options or StickyLeastLoadedOptions()

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        enough = min(match.prefix_tokens or self.options.prefix_tokens, match.prompt_tokens)
        hits = [one for one in match.holders if one.tokens >= enough]
        if self.options.multi_depth:
            hits = [one for one in hits if one.tokens == hits[0].tokens]
        reason = "miss"
        if hits:
            positions = positions_of(hits, candidates)
            if self.options.sticky_limit_factor:
                positions = self.within_limit(positions, candidates)
            if positions:
                loads = relative_loads([candidates[position] for position in positions])
                chosen = candidates[positions[loads.index(min(loads))]]
                return Choice(chosen.id, "hit", held_tokens(match.holders, chosen))
            reason = "limited"
        return draw_least_loaded(match, candidates, rng, reason)

    def within_limit(self, positions: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Return those of `positions` whose load is within the limit of stickiness."""
        loads = relative_loads(candidates)
        bearable = self.options.sticky_limit_factor * median_of_all(loads)
        floor = self.options.sticky_limit_floor
        return [one for one in positions if loads[one] <= bearable + floor / candidates[one].weight]


def prefix_depth(length: int, block_tokens: int) -> int:
    """Return the depth in tokens that a request's `prefix_len` stands for: one block at least; 0 if it names none."""
    return max(block_tokens, anchor_at(length, block_tokens)) if length else 0
