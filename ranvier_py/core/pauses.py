"""Computes how long to wait after failures."""

from __future__ import annotations

DOUBLINGS_MAX = 40
"""Enough for a microsecond to become two weeks. Floats end at 2**1024, which failures in a row may well reach."""


def doubled(first_s: float, times: int, most_s: float) -> float:
    """Return the first pause, doubled so many times, but at most `most_s`."""
    return min(first_s * 2.0 ** min(times, DOUBLINGS_MAX), most_s)
