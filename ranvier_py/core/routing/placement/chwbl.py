"""`chwbl`: consistent hashing with bounded loads over the opening of a conversation (Continuum Router, tier 1).

Rule: the key is the hash of the system prompt, or of the first message where there is none. Its owner on the ring
serves, unless it has reached its cap = ceil((1 + `load_factor_epsilon` 0.25) x (all load + 1) x its share of the
weight), at least 1; then the next backend clockwise that has not. Someone has not: caps together exceed all load. A
conversation that overflowed stays where it is while there is room (`sticky_overflow`): a backend that holds more of the
prompt than its opening is asked before the owner. No key: the least loaded, ties drawn.

Source: Continuum Router, «KV cache optimization», tier 1; the algorithm is Mirrokni, Thorup and Zadimoghaddam's. What
the document leaves open or gets wrong: its cap of (1 + epsilon) x the average is 0 while idle, so the coming request is
counted; its overflow scatters the turns of a conversation, so ours is sticky (false: as written, and then no match is
asked for at all); a zero byte in the model's name makes its key ambiguous, so such a name gives no key. Weights act
through caps alone. Left out: a second key below the opening, which the conversation's holders make needless;
anthropic_cache_control_injection, which changes bodies and places nothing.

The key is `Match.opening` where the node has computed it (`opening_key`, as the document has it), else the fingerprint
of the first boundary, which is the same message under our own hash.
Reasons: prefix_hash, overflow, fallback. Cost: a search for an idle owner; else O(candidates). No more
than 1 / (1 + epsilon) of all can be at the cap, so the walk takes about (1 + epsilon) / epsilon steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from ranvier_py.core.ids import UNKNOWN
from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement import Candidate, Choice, Match
from ranvier_py.core.routing.placement.affinity import COMMON_SLACK_TOKENS, deepest_of, positions_of
from ranvier_py.core.routing.placement.baselines import held_tokens, least_loaded, relative_loads
from ranvier_py.core.routing.placement.bounded_load import cap_of
from ranvier_py.core.routing.placement.ring import Ring

ODD = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads fingerprints over the ring even where they are small numbers

EPSILON_MEANING = "share above its part of the load from which a backend of the ring takes no more"
VIRTUAL_NODES_MEANING = "points of each backend on the ring"


@dataclass(frozen=True, slots=True)
class ChwblOptions(Options):
    """Names, defaults and ranges are Continuum's, but for the last."""

    load_factor_epsilon: float = option(0.25, EPSILON_MEANING, least=0.01, most=10.0)
    virtual_nodes: int = option(150, VIRTUAL_NODES_MEANING, least=1, most=1000)
    sticky_overflow: bool = option(True, "a conversation that overflowed stays there; false: each turn starts anew")


class Chwbl:
    """State: none but the rings, which change no answer."""

    __slots__ = ("depths_wanted", "epsilon", "ring", "sticky")

    name = "chwbl"
    wants_opening = True
    depths_wanted: int  # 1, or 0 where overflow is not sticky: then it reads no match

    def __init__(self, options: ChwblOptions | None = None) -> None:
        options = options or ChwblOptions()
        self.epsilon = options.load_factor_epsilon
        self.sticky = options.sticky_overflow
        self.depths_wanted = int(self.sticky)
        self.ring = Ring(options.virtual_nodes)

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        key = ring_key(match)
        if key is None:
            chosen = candidates[rng.choice(least_loaded(relative_loads(candidates)))]
            return Choice(chosen.id, "fallback", held_tokens(match, chosen))
        owner = self.ring.owner(key, candidates)
        holding = self.overflowed_to(match, candidates)
        if not holding or owner in holding:
            chosen = candidates[owner]
            if chosen.load == 0:  # below any cap
                return Choice(chosen.id, "prefix_hash", held_tokens(match, chosen))
        share = fair_share(candidates, self.epsilon)
        for position in chain(holding, self.ring.walk(key, candidates)):
            chosen = candidates[position]
            if chosen.load < cap_of(share, chosen.weight):
                return Choice(chosen.id, "prefix_hash" if position == owner else "overflow", held_tokens(match, chosen))
        raise AssertionError("everybody at the cap")

    def overflowed_to(self, match: Match, candidates: Sequence[Candidate]) -> list[int]:
        """Positions that hold more of this prompt than its opening: where the conversation is."""
        if not self.sticky or not match.holders:
            return []
        if match.holders[0].tokens <= match.home_tokens + COMMON_SLACK_TOKENS:
            return []
        return positions_of(deepest_of(match.holders), candidates)


def fair_share(candidates: Sequence[Candidate], epsilon: float) -> float:
    """Requests that a backend of weight 1 may have with the coming one, before rounding up."""
    total = sum([one.load for one in candidates])
    return (1.0 + epsilon) * (total + 1) / sum([one.weight for one in candidates])


def ring_key(match: Match) -> int | None:
    """64 bits that name where the prompt begins; None where nothing does."""
    if match.opening:
        return int.from_bytes(match.opening[:8], "big")
    return match.home * ODD % 2**64 if match.home != UNKNOWN else None
