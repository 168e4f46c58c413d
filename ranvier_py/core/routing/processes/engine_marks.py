"""EngineMarks of an engine's process, by which two pages of metrics are seen to be of one engine or of two.

The identity is a digest of what stays while the process lives: when it and its series began, the size of its cache. The
totals are a digest of tokens and seconds that only requests raise, so that they are equal while an engine rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

SHOWN_MAX = 8  # names in the log and the status; a few show whose configuration to compare


@dataclass(frozen=True, slots=True)
class EngineMarks:
    """Digests of 64 bits, 0 where the page shows too little. `is_exact`: the identity has more than a start time."""

    identity: int = 0
    totals: int = 0
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class OtherNames:
    """What else is known of one backend's URL: under which names its engine is a backend a second time, and which nodes
    reach another engine by the same URL."""

    twins: Sequence[str] = ()
    strangers: Sequence[str] = ()

    @property
    def advice(self) -> str:
        """What the operator should do; "" if nothing."""
        return strangers_advice(self.strangers) or twins_advice(self.twins)


def strangers_advice(nodes: Sequence[str]) -> str:
    remedy = "use a name or an address that means the same on all nodes"
    return f"this URL leads to another engine on {in_short(nodes)}: {remedy}" if nodes else ""


def twins_advice(places: Sequence[str]) -> str:
    why = "the two share no routes, and the load of one is not known at the other"
    remedy = "list it once, by a URL that is the same on all nodes"
    return f"its engine is listed by another URL as well ({in_short(places)}): {why}; {remedy}" if places else ""


def agree(marks: EngineMarks, other: EngineMarks) -> bool:
    """Whether two pages are of one engine, as all shows that they have. A start time alone is outweighed by totals."""
    if marks.identity and other.identity:
        are_alike = marks.is_exact or not 0 != marks.totals != other.totals != 0
        return marks.identity == other.identity and are_alike
    return marks.totals == other.totals != 0


def disagree(marks: EngineMarks, other: EngineMarks) -> bool:
    """Whether two pages are of two engines, if they show one moment."""
    if marks.identity and other.identity:
        return marks.identity != other.identity
    return 0 != marks.totals != other.totals != 0


def digest_of(*values: object) -> int:
    """Return a digest that is never 0."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8, person=b"marks").digest(), "little") or 1


def in_short(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
