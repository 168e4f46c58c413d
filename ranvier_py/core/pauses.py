"""How long to wait after failures."""

from __future__ import annotations

DOUBLINGS_MAX = 40
"""From a microsecond to two weeks. A float has no number above 2**1024, which failures in a row may well reach."""


def doubled(first_s: float, times: int, most_s: float) -> float:
    """The first pause, doubled so many times, up to a bound."""
    return min(first_s * 2.0 ** min(times, DOUBLINGS_MAX), most_s)
