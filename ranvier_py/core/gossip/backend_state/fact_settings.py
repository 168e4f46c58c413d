"""How often facts and loads are told and to how many, and what is counted of them. The defaults suit 3 to 100 nodes."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS_MAX = 4096  # as in the registry; facts about more are dropped and counted


@dataclass(frozen=True, slots=True)
class FactSettings:
    load_interval_s: float = 0.05
    """In-attempt counts reach the others within this, and at once after a quiet time. While they do not know, all nodes
    fill the same gap: a crowd that comes within it is spread by chance only."""
    load_repeat_s: float = 1.0  # unchanged loads are told again: three chances before they expire
    load_life_s: float = 3.0
    repair_interval_s: float = 10.0  # everything known, to one random peer
    everyone_max: int = 16  # so many peers are told what is new; more hear it through others
    listeners_max: int = 32  # load goes to so many peers at most, other ones each time
    datagrams: bool = True


@dataclass(slots=True)
class FactCounters:
    facts_heard: int = 0
    facts_adopted: int = 0
    loads_heard: int = 0
    loads_old: int = 0
    loads_expired: int = 0
    dropped: int = 0
