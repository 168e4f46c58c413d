"""Fading sums from which lines are fitted by least squares."""

from __future__ import annotations

from copy import copy
from math import exp


def kept(since: float, now: float, over_s: float) -> float:
    """Return which share of a sum is left that fades over so many seconds."""
    return exp(-max(0.0, now - since) / over_s)


class Moments:
    """Fading sums over observations: t tokens, a their summed depths, d requests decoding, y seconds, and products."""

    __slots__ = (
        *("count", "dd", "dy", "sum_d", "sum_t", "sum_y", "td", "tt", "ty"),
        *("aa", "ad", "ay", "sum_a", "ta", "yy"),
    )

    def __init__(self) -> None:
        self.count = 0.0
        self.sum_t = self.sum_d = self.sum_y = self.sum_a = 0.0
        self.tt = self.td = self.dd = self.ty = self.dy = 0.0  # of products
        self.ta = self.aa = self.ad = self.ay = self.yy = 0.0

    def fade(self, share: float) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * share)

    def add(self, tokens: float, decoding: float, seconds: float, weight: float = 1.0, depths: float = 0.0) -> None:
        """Add an observation. `depths`: the sum of the depths of all its tokens, see `depths_of`."""
        self.count += weight
        self.sum_t += weight * tokens
        self.sum_d += weight * decoding
        self.sum_y += weight * seconds
        self.tt += weight * tokens * tokens
        self.td += weight * tokens * decoding
        self.dd += weight * decoding * decoding
        self.ty += weight * tokens * seconds
        self.dy += weight * decoding * seconds
        self.yy += weight * seconds * seconds
        if depths:
            self.sum_a += weight * depths
            self.ta += weight * tokens * depths
            self.aa += weight * depths * depths
            self.ad += weight * decoding * depths
            self.ay += weight * depths * seconds

    def weighed(self, slope: float) -> Moments:
        """Return these sums with tokens weighed by their depths."""
        if not slope:
            return self
        found = copy(self)
        found.sum_t = self.sum_t + slope * self.sum_a
        found.tt = self.tt + 2 * slope * self.ta + slope * slope * self.aa
        found.td = self.td + slope * self.ad
        found.ty = self.ty + slope * self.ay
        return found
