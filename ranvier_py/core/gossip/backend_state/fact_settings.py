"""How often facts and loads are sent and to how many, and what is counted of them. The defaults suit 3 to 100 nodes."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.metrics import counter

BACKENDS_MAX = 4096  # as in the registry; facts about more are dropped and counted


@dataclass(frozen=True, slots=True)
class FactSettings:
    load_interval_s: float = 0.05
    """In-flight counts reach the others within this, and at once after a quiet time. While they do not know, all nodes
    fill the same gap: a crowd that comes within it is spread by chance only."""
    load_repeat_s: float = 1.0  # unchanged loads are sent again: three chances before they expire
    load_life_s: float = 3.0
    repair_interval_s: float = 10.0  # everything known, to one random peer
    everyone_max: int = 16  # so many peers are sent what is new; more get it through others
    load_peers_max: int = 32  # load goes to so many peers at most, other ones each time
    datagrams: bool = True


@dataclass(slots=True)
class FactCounters:
    facts_received: int = counter("Facts of peers.")
    facts_adopted: int = counter("Facts of peers that were later than what was known.")
    loads_received: int = counter("Load reports of peers.")
    loads_old: int = counter("Load reports that came after a later one.")
    loads_expired: int = counter("Load reports that were not renewed in time.")
    dropped: int = counter("Facts and load reports of too many backends.")
