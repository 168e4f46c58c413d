"""Fading sums from which lines are fitted by least squares."""

from __future__ import annotations

from copy import copy
from math import exp


def kept(since: float, now: float, over_s: float) -> float:
    """Return which share of a sum is left that fades over so many seconds."""
    return exp(-max(0.0, now - since) / over_s)


NO_DEPTHS = (0.0, 0.0, 0.0, 0.0, 0.0)


class Moments:
    """Fading sums over observations: t tokens, d requests decoding, y seconds, and products. `depths`: of a, the summed
    depths of the tokens, and of its products with t, a, d and y."""

    __slots__ = ("count", "dd", "depths", "dy", "sum_d", "sum_t", "sum_y", "td", "tt", "ty", "yy")

    def __init__(self) -> None:
        self.count = 0.0
        self.sum_t = self.sum_d = self.sum_y = 0.0
        self.tt = self.td = self.dd = self.ty = self.dy = self.yy = 0.0  # of products
        self.depths = NO_DEPTHS

    def fade(self, share: float) -> None:
        # one by one, for each answer fades three of these
        self.count *= share
        self.sum_t *= share
        self.sum_d *= share
        self.sum_y *= share
        self.tt *= share
        self.td *= share
        self.dd *= share
        self.ty *= share
        self.dy *= share
        self.yy *= share
        if self.depths is not NO_DEPTHS:
            a, ta, aa, ad, ay = self.depths
            self.depths = (a * share, ta * share, aa * share, ad * share, ay * share)

    def add(self, tokens: float, decoding: float, seconds: float, weight: float = 1.0, depths: float = 0.0) -> None:
        """Add an observation. `depths`: the sum of the depths of all its tokens, see `depths_of`."""
        t, d, y = weight * tokens, weight * decoding, weight * seconds
        self.count += weight
        self.sum_t += t
        self.sum_d += d
        self.sum_y += y
        self.tt += t * tokens
        self.td += t * decoding
        self.dd += d * decoding
        self.ty += t * seconds
        self.dy += d * seconds
        self.yy += y * seconds
        if depths:
            a, ta, aa, ad, ay = self.depths
            self.depths = (
                a + weight * depths,
                ta + weight * tokens * depths,
                aa + weight * depths * depths,
                ad + weight * decoding * depths,
                ay + weight * depths * seconds,
            )

    def weighed(self, slope: float) -> Moments:
        """Return these sums with tokens weighed by their depths."""
        if not slope:
            return self
        found, (a, ta, aa, ad, ay) = copy(self), self.depths
        found.sum_t = self.sum_t + slope * a
        found.tt = self.tt + 2 * slope * ta + slope * slope * aa
        found.td = self.td + slope * ad
        found.ty = self.ty + slope * ay
        return found
