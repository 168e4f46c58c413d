"""`chwbl`: consistent hashing with bounded loads over the opening of a conversation (Continuum Router, tier 1).

Rule: the owner on the ring of the opening's key (`ring_key`) serves, unless it has reached its cap; then the next
backend clockwise below its cap. There always is one, for all caps together exceed the load. A conversation that
overflowed stays where it is while there is room. Without a key the least loaded serves.
Source: Continuum Router, «KV cache optimization»; Karger et al. 1997; Mirrokni, Thorup and Zadimoghaddam. Left out: a
second key below the opening (`sticky_overflow` finds the holders). Weights act only through caps.
Reasons: prefix_hash, overflow, fallback. Cost: a search for an idle owner; else O(candidates).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np

from ranvier_py.core.cardinality import Cardinality
from ranvier_py.core.ids import UNKNOWN
from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.namespaces import FIRST_MESSAGE, OPENING_BYTES_MAX, SYSTEM
from ranvier_py.core.routing.placement import Candidate, Choice, Match, Policy
from ranvier_py.core.routing.placement.affinity import deepest_of, positions_of
from ranvier_py.core.routing.placement.baselines import draw_least_loaded, held_tokens, mean_load
from ranvier_py.core.routing.placement.bounded_load import cap_of
from ranvier_py.core.routing.placement.rendezvous import Words, seed_of
from ranvier_py.core.routing.placement.ttft import COMMON_SLACK_TOKENS
from ranvier_py.core.splitmix import mix_array

RINGS_MAX = 64  # pools of different models in use at once; a ring of 64 backends is about 150 kB
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads numbers even where they are small

EPSILON_MEANING = "share above its part of the load from which a backend of the ring takes no more"
VIRTUAL_NODES_MEANING = "points of each backend on the ring"
LENGTH_MEANING = "bytes of the opening that its key is made of; an index asked for it needs the length of its sources"
SOURCE_MEANING = "the opening is the system prompt, else the first message; first_message: that in any case"


@dataclass(frozen=True, slots=True)
class ChwblOptions(Options):
    """Names, defaults and ranges are Continuum's, except for the last two options."""

    load_factor_epsilon: float = option(0.25, EPSILON_MEANING, least=0.01, most=10.0)
    virtual_nodes: int = option(150, VIRTUAL_NODES_MEANING, least=1, most=1000)
    max_prefix_length: int = option(OPENING_BYTES_MAX, LENGTH_MEANING, least=1, most=65_536)
    prefix_source: str = option(SYSTEM, SOURCE_MEANING, one_of=(SYSTEM, FIRST_MESSAGE))
    sticky_overflow: bool = option(True, "a conversation that overflowed stays there; false: each turn starts anew")


class Chwbl(Policy):
    """State: the rings and the count of keys, which change no answer."""

    name = "chwbl"

    def __init__(self, options: ChwblOptions | None = None) -> None:
        self.options = options or ChwblOptions()
        self.opening_bytes, self.opening_source = self.options.max_prefix_length, self.options.prefix_source
        self.prefixes = Cardinality()  # keys that came
        self.depths_wanted = int(self.options.sticky_overflow)  # else it reads no match
        self.ring = Ring(self.options.virtual_nodes)

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        key = ring_key(match)
        if key is None:
            return draw_least_loaded(match, candidates, rng, "fallback")
        self.prefixes.add(key)
        owner = self.ring.owner(key, candidates)
        holding = self.overflowed_to(match, candidates)
        if not holding or owner in holding:
            chosen = candidates[owner]
            if chosen.load == 0:  # below any cap
                return Choice(chosen.id, "prefix_hash", held_tokens(match.holders, chosen))
        # the document's cap is 0 while idle: ours counts the coming request
        share = mean_load(candidates, coming=1) * (1.0 + self.options.load_factor_epsilon)
        # the document scatters a conversation that overflowed: here those that hold more than its opening come first
        for position in chain(holding, self.ring.walk(key, candidates)):
            chosen = candidates[position]
            if chosen.load < cap_of(share, chosen.weight):
                return Choice(
                    chosen.id, "prefix_hash" if position == owner else "overflow", held_tokens(match.holders, chosen)
                )
        raise AssertionError("everybody at the cap")

    def overflowed_to(self, match: Match, candidates: Sequence[Candidate]) -> list[int]:
        """Return the positions of the deepest holders, if they hold more of this prompt than its opening."""
        if not self.options.sticky_overflow or not match.holders:
            return []
        if match.holders[0].tokens <= match.home_tokens + COMMON_SLACK_TOKENS:
            return []
        return positions_of(deepest_of(match.holders), candidates)


class Ring:
    """Finds the owners of keys: each belongs to the next point clockwise on a circle of 64 bits. Points are mixed from
    backends' names, so that peers agree, and one that goes or comes moves only its own keys. Shares are uneven by about
    1 / sqrt(points): 8 % with 150. Keeps the layouts of recent pools, which change no answer."""

    def __init__(self, points: int) -> None:
        self.points = points  # of each backend
        self.layouts: dict[int, tuple[Sequence[Candidate], Words, list[int]]] = {}

    def __copy__(self) -> Ring:
        return Ring(self.points)

    def owner(self, key: int, candidates: Sequence[Candidate]) -> int:
        """Return the position of the backend to which a key of 64 bits belongs."""
        places, owners = self.layout(candidates)
        return owners[int(places.searchsorted(np.uint64(key))) % len(owners)]

    def walk(self, key: int, candidates: Sequence[Candidate]) -> Iterator[int]:
        """Yield the positions of all backends, the owner first, then each as its first point comes clockwise."""
        places, owners = self.layout(candidates)
        start = int(places.searchsorted(np.uint64(key)))
        seen = [False] * len(candidates)
        for step in range(start, start + len(owners)):
            position = owners[step % len(owners)]
            if not seen[position]:
                seen[position] = True
                yield position

    def layout(self, candidates: Sequence[Candidate]) -> tuple[Words, list[int]]:
        """Return the points in ascending order, and whose they are. Kept for tuples, which cannot change."""
        entry = self.layouts.get(id(candidates))
        if entry is not None:
            return entry[1], entry[2]
        seeds = np.array([seed_of(candidate.name) for candidate in candidates], dtype=np.uint64)
        places = mix_array(seeds[:, None] + GOLDEN * np.arange(1, self.points + 1, dtype=np.uint64)).ravel()
        order = places.argsort(kind="stable")
        owners: list[int] = (order // self.points).tolist()
        if isinstance(candidates, tuple):
            if len(self.layouts) >= RINGS_MAX:
                self.layouts.clear()
            self.layouts[id(candidates)] = (candidates, places[order], owners)
        return places[order], owners


def ring_key(match: Match) -> int | None:
    """Return the key of the prompt's opening, 64 bits; None for a prompt without one. The document's key is ambiguous
    for a model with a zero byte in its name: such a name gives none."""
    if match.opening:
        return int.from_bytes(match.opening[:8], "big")
    return match.home * int(GOLDEN) % 2**64 if match.home != UNKNOWN else None
