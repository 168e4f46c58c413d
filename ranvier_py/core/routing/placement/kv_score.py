"""`kv_score`: points for what is cached, for little load and for good health (Continuum Router, tier 4).

Rule: the highest score serves (`scores`); if too little is warm anywhere, the ring decides (chwbl.py), with its
reasons. Equal scores: fewer in flight, then the order of the ring. What is warm is the greater of what the route table
says and, where event sources are configured, the index of core/engine_cache/prefix_index by the key of the opening.
Source: Continuum Router, «KV cache optimization». What it leaves open or gets wrong stands at `overlaps`, `below_cap`
and `contradictions`; health is a filter before any policy.
Reasons: kv_aware, prefix_hash, overflow, fallback. Cost: O(candidates); the match lists every holder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from ranvier_py.core.ids import BackendId
from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.namespaces import FIRST_MESSAGE, OPENING_BYTES_MAX, SYSTEM
from ranvier_py.core.routing.placement import ALL_HOLDERS, Candidate, Choice, Match, Policy
from ranvier_py.core.routing.placement.baselines import mean_load, relative_loads
from ranvier_py.core.routing.placement.bounded_load import cap_of
from ranvier_py.core.routing.placement.chwbl import (
    EPSILON_MEANING,
    LENGTH_MEANING,
    SOURCE_MEANING,
    VIRTUAL_NODES_MEANING,
    Chwbl,
    ChwblOptions,
    ring_key,
)

SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class KvScoreOptions(Options):
    """Names and defaults are Continuum's, except for overlap_norm and bounded_score."""

    overlap_weight: float = option(0.6, "points for the overlap; this, load_weight, health_weight sum to 1", most=1.0)
    load_weight: float = option(0.3, "points for an idle backend", most=1.0)
    health_weight: float = option(0.1, "points for a backend that never failed", most=1.0)
    min_overlap_threshold: float = option(0.3, "overlap x tier below which the ring decides", most=1.0)
    gpu_tier_weight: float = option(1.0, "what cached tokens count for in an engine's own memory", most=1.0)
    storage_tier_weight: float = option(0.6, "what they count for where they must be reloaded", most=1.0)
    overlap_norm: str = option(
        "coverage",
        "overlap is a share of the prompt, or relative to the backend that holds most",
        one_of=("coverage", "relative"),
    )
    bounded_score: bool = option(True, "backends at the cap of the ring get no points; false: warmth alone may win")
    load_factor_epsilon: float = option(0.25, EPSILON_MEANING, least=0.01, most=10.0)
    virtual_nodes: int = option(150, VIRTUAL_NODES_MEANING, least=1, most=1000)
    max_prefix_length: int = option(OPENING_BYTES_MAX, LENGTH_MEANING, least=1, most=65_536)
    prefix_source: str = option(SYSTEM, SOURCE_MEANING, one_of=(SYSTEM, FIRST_MESSAGE))

    def contradictions(self) -> list[str]:
        total = self.overlap_weight + self.load_weight + self.health_weight
        # exactly 1, as the document has it, is not what 0.6 + 0.3 + 0.1 are in binary
        if abs(total - 1.0) <= SUM_TOLERANCE:
            return []
        return [f"overlap_weight, load_weight, health_weight: must sum to 1, not {total:g}"]


class IndexedPrefix(NamedTuple):
    """What one backend holds of a prefix, until when. `reload`: it is not in the engine's own memory."""

    tokens: int
    reload: bool
    until: float


class Index(Protocol):
    """What event sources report to be cached; core/engine_cache/prefix_index implements it."""

    def holders(self, prefix: str, now: float) -> Mapping[BackendId, IndexedPrefix]: ...
    def placed(self, overlap: float | None) -> None: ...


class KvScore(Policy):
    """State: the rings, which change no answer, and the index, which others fill."""

    name = "kv_score"
    depths_wanted = ALL_HOLDERS

    def __init__(self, options: KvScoreOptions | None = None) -> None:
        self.options = options = options or KvScoreOptions()
        self.opening_bytes, self.opening_source = options.max_prefix_length, options.prefix_source
        self.ring = Chwbl(ChwblOptions(options.load_factor_epsilon, options.virtual_nodes))
        self.index: Index | None = None

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        warm = self.warm(match)
        overlaps = self.overlaps(match, warm)
        among = self.below_cap(candidates) if overlaps else ()
        warmest = max([overlaps.get(candidates[position].id, 0.0) for position in among], default=-1.0)
        if warmest < self.options.min_overlap_threshold:
            if self.index is not None:
                self.index.placed(None)
            return self.ring.choose(match, candidates, rng)
        scores = self.scores(overlaps, candidates)
        best = max([scores[one] for one in among])
        chosen = candidates[self.first(match, candidates, [one for one in among if scores[one] == best])]
        if self.index is not None:
            self.index.placed(overlaps.get(chosen.id, 0.0))
        self.ring.prefixes.add(ring_key(match) or 0)
        return Choice(chosen.id, "kv_aware", warm.get(chosen.id, (0, False))[0])

    def warm(self, match: Match) -> dict[BackendId, tuple[int, bool]]:
        """Return by backend how many tokens of the prompt it holds, and whether it must reload them."""
        found = {one.backend: (one.tokens, one.tier > 0) for one in match.holders}
        if self.index is not None and match.opening:
            for backend, held in self.index.holders(match.opening.hex(), match.at).items():
                tokens = min(held.tokens, match.prompt_tokens)
                if tokens > found.get(backend, (0, False))[0]:
                    found[backend] = (tokens, held.reload)
        return found

    def overlaps(self, match: Match, warm: Mapping[BackendId, tuple[int, bool]]) -> dict[BackendId, float]:
        """Return overlap x tier, 0 to 1, by backend that holds anything. The document's overlap is relative to the best
        backend: 16 tokens of 10,000 weigh as much as all, and its threshold never acts. Ours is of the prompt."""
        if not warm:
            return {}
        options = self.options
        most = max(tokens for tokens, _ in warm.values())
        whole = max(1, match.prompt_tokens if options.overlap_norm == "coverage" else most)
        return {
            backend: min(1.0, tokens / whole) * (options.storage_tier_weight if reload else options.gpu_tier_weight)
            for backend, (tokens, reload) in warm.items()
        }

    def below_cap(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        """Return the positions that may get points: below the ring's cap, or all. Never empty. In the document nothing
        outweighs its 0.6 points of warmth, so that one backend takes all that is warm."""
        if not self.options.bounded_score:
            return range(len(candidates))
        share = mean_load(candidates, coming=1) * (1.0 + self.options.load_factor_epsilon)
        return [position for position, one in enumerate(candidates) if one.load < cap_of(share, one.weight)]

    def scores(self, overlaps: Mapping[BackendId, float], candidates: Sequence[Candidate]) -> list[float]:
        """Return the scores in the order of the candidates, 0 to 1."""
        options, get = self.options, overlaps.get
        loads = relative_loads(candidates)
        greatest = max(loads) or 1.0
        return [
            options.overlap_weight * get(one.id, 0.0)
            + options.load_weight * (1.0 - load / greatest)
            + options.health_weight * one.seen.success_rate
            for one, load in zip(candidates, loads, strict=True)
        ]

    def first(self, match: Match, candidates: Sequence[Candidate], tied: list[int]) -> int:
        """Choose among positions of equal score: fewer in flight, then the order of the ring."""
        if len(tied) == 1:
            return tied[0]
        fewest = min([candidates[one].load for one in tied])
        tied = [one for one in tied if candidates[one].load == fewest]
        if len(tied) == 1:
            return tied[0]
        return next(one for one in self.ring.ring.walk(ring_key(match) or 0, candidates) if one in tied)

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        warm = self.warm(match)
        overlaps = self.overlaps(match, warm)
        loads = relative_loads(candidates)
        greatest = max(loads) or 1.0
        among = self.below_cap(candidates)
        return [
            {
                "held_tokens": warm.get(one.id, (0, False))[0],
                "overlap_share": overlaps.get(one.id, 0.0),
                "load_share": loads[position] / greatest,
                "success_share": one.seen.success_rate,
                "below_cap": float(position in among),
                "score": score,
            }
            for position, (one, score) in enumerate(zip(candidates, self.scores(overlaps, candidates), strict=True))
        ]


def ring_of(policy: Policy) -> Chwbl | None:
    """Return the ring policy: `policy` itself, or the one that `kv_score` falls back on; None for any other policy."""
    return policy.ring if isinstance(policy, KvScore) else policy if isinstance(policy, Chwbl) else None
